"""What is known of tiers and engine follows what happened, and forgets it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.connector.load_rates import HALF_LIFE_S, HALF_LIFE_TOKENS, PrefillRate, TierLoadTimes
from kvsluice.tiers.backpressure import Spent

# ---- the engine --------------------------------------------------------------------------------


def test_nothing_is_known_of_an_engine_that_told_nothing():
    assert PrefillRate().token_s is None


def test_steps_of_one_kind_give_their_own_rate():
    rate = PrefillRate()
    for _ in range(3):
        rate.observe(4096, 0.4096)
    assert rate.token_s == pytest.approx(1e-4)


def test_small_steps_say_little_about_long_prompts():
    rate = PrefillRate()
    rate.observe(8192, 0.8192)
    for _ in range(200):
        rate.observe(5, 0.030)
    assert rate.token_s == pytest.approx(1e-4, rel=0.05), "a mean over tokens would say 7.4e-4"


def test_an_engine_that_only_takes_small_steps_is_described_by_them():
    rate = PrefillRate()
    for _ in range(50):
        rate.observe(5, 0.030)
    assert rate.token_s == pytest.approx(0.006)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (100, 0.0)])
def test_a_step_without_prompt_tokens_or_without_time_says_nothing(tokens, seconds):
    rate = PrefillRate()
    rate.observe(tokens, seconds)
    assert rate.token_s is None


@pytest.mark.parametrize("step_tokens", [2048, 8192, 65_536])
def test_an_engine_that_got_slower_is_believed_within_three_half_lives_whatever_its_steps(step_tokens):
    rate = PrefillRate()
    rate.observe(131_072, 131_072 * 1e-5)
    for _ in range(-(-3 * HALF_LIFE_TOKENS // step_tokens)):
        rate.observe(step_tokens, step_tokens * 1e-3)
    assert rate.token_s > 0.5e-3


def test_a_fixed_rate_is_not_moved_by_what_is_observed():
    rate = PrefillRate(8000.0)
    rate.observe(1000, 10.0)
    assert rate.token_s == 1 / 8000


# ---- a tier ------------------------------------------------------------------------------------


def taught(
    width: int, *loads: tuple[float, int], times: TierLoadTimes | None = None, now_s: float = 0.0
) -> TierLoadTimes:
    """Each load as (seconds from start to end, loads that ran at once), each taken by itself."""
    times = TierLoadTimes(width) if times is None else times
    for elapsed_s, company in loads:
        times.on_loaded(elapsed_s / company, elapsed_s, now_s)
        times.on_quiet(now_s)
    return times


def test_a_first_load_alone_is_taken_for_latency_until_company_shows_what_it_costs():
    times = taught(8, (0.050, 1))
    assert times.table()[1] == times.table()[8] == pytest.approx(0.050)
    taught(8, (0.400, 8), times=times)
    assert times.table()[8] == pytest.approx(0.400)
    assert times.table()[1] == pytest.approx(0.050)


def test_loads_in_company_say_how_soon_many_come_whatever_a_single_one_takes():
    times = taught(8, *[(0.050, 8)] * 20)
    taught(8, *[(0.050, 1)] * 20, times=times)
    assert times.interval_s == pytest.approx(0.050 / 8), "a mean over all would say 28 ms"
    assert times.table()[1] == pytest.approx(0.050)


def test_a_width_that_is_no_power_of_two_ends_between_two():
    times = taught(6, *[(0.1, 4)] * 5, (0.3, 6))
    table = times.table()
    assert len(table) == 7
    assert table[4] <= table[5] <= table[6] <= 0.3


def test_a_hiccup_of_ten_times_the_usual_does_not_double_the_estimate():
    times = taught(1, *[(0.010, 1)] * 10, (0.100, 1))
    assert 0.010 < times.table()[1] < 0.020


def test_a_lasting_slowdown_is_believed_within_a_dozen_loads():
    times = taught(1, *[(0.010, 1)] * 10, *[(0.100, 1)] * 12)
    assert times.table()[1] > 0.080


def test_of_the_first_loads_the_quickest_counts():
    times = taught(1, (2.0, 1), (0.010, 1), (1.0, 1), *[(0.020, 1)] * 6)
    assert not times.known
    assert times.table()[1] == pytest.approx(0.010)
    taught(1, (0.020, 1), times=times)
    assert times.known
    taught(1, *[(0.020, 1)] * 20, times=times)
    assert times.table()[1] == pytest.approx(0.020, rel=0.05)


def test_a_hiccup_among_loads_that_come_together_counts_as_little_more_than_the_usual():
    times = taught(8, *[(0.050, 8)] * 20)
    for elapsed_s in [0.050] * 7:
        times.on_loaded(elapsed_s / 8, elapsed_s, 0.0)
    times.on_loaded(3.0, 3.0, 0.0)
    times.on_quiet(0.0)
    assert times.interval_s < 4 * 0.050 / 8


def test_what_is_known_counts_half_after_each_half_life():
    times = taught(1, (0.1, 1), now_s=50.0)
    assert [times.kept(50.0 + HALF_LIFE_S * halves) for halves in range(4)] == [1.0, 0.5, 0.25, 0.125]


def test_one_good_load_after_a_bad_time_outweighs_it_and_one_bad_load_after_a_good_time_does_not():
    recovered = taught(1, *[(1.0, 1)] * 20)
    taught(1, (0.010, 1), times=recovered, now_s=4 * HALF_LIFE_S)
    assert recovered.table()[1] < 0.07
    hiccup = taught(1, *[(0.010, 1)] * 20)
    taught(1, (1.0, 1), times=hiccup, now_s=4 * HALF_LIFE_S)
    assert hiccup.table()[1] < 0.020


def test_a_good_load_in_little_company_lifts_the_blame_from_more_company():
    times = taught(8, *[(8.0, 8)] * 20)
    taught(8, *[(0.010, 4)] * 3, times=times, now_s=10 * HALF_LIFE_S)
    assert times.table()[8] < 0.05


def test_a_late_load_raises_what_is_known_and_never_lowers_it():
    times = taught(8, *[(0.010, 1)] * 5)
    times.on_late(10.0, 5, 0.0)
    assert times.table()[8] / 8 >= 10.0 / 5 / 2
    before = list(times.table())
    times.on_late(0.001, 1, 1.0)
    assert times.table() == before
    assert times.kept(1.0) == 1.0, "it counts from now"


def test_a_load_that_fails_at_once_gives_an_old_bad_time_no_new_weight():
    """A store that is down refuses in no time, over and over; when it is back, what its stall taught has faded."""
    times = TierLoadTimes(8)
    times.on_late(10.0, 1, 0.0)
    for step in range(1, 51):
        times.on_failed(0.0001, 1, float(step))
    assert times.kept(50.0) == pytest.approx(0.5 ** (50.0 / HALF_LIFE_S))


def test_a_load_that_fails_after_a_long_time_raises_what_is_known():
    times = taught(8, *[(0.010, 1)] * 5)
    times.on_failed(5.0, 1, 1.0)
    assert times.table()[1] >= 5.0
    assert times.kept(1.0) == 1.0


def test_a_read_that_does_not_end_counts_as_what_it_has_taken_so_far():
    times = taught(8, *[(0.010, 8)] * 5)
    times.on_opened(0.0)
    for waited_s in (0.1, 1.0, 5.0):
        times.on_stall(Spent(waited_s, waited_s / 8, waited_s / 8), waited_s)
        assert times.table()[8] == pytest.approx(waited_s)
        assert times.table()[1] == pytest.approx(waited_s / 8)
    times.on_stall(Spent.alone(0.0), 6.0)
    assert times.table()[8] == pytest.approx(0.010)


def test_one_read_that_does_not_end_says_that_of_one():
    times = TierLoadTimes(8)
    assert not times.known
    times.on_opened(0.0)
    times.on_stall(Spent.alone(1.0), 1.0)
    assert times.known
    assert times.table()[8] == pytest.approx(1.0)


def test_a_read_that_nobody_waits_for_any_more_says_nothing_of_those_that_came_after():
    times = taught(8, *[(0.010, 1)] * 5)
    times.on_opened(100.0)
    times.on_stall(Spent(60.0, 30.0, 30.0), 100.5)
    assert times.table()[8] == pytest.approx(0.5)


def test_loads_that_start_together_on_a_busy_device_are_judged_by_what_all_of_them_took():
    """Eight reads, 10 ms each, one after the other: the first ends after 10 ms, the last after 80."""
    times = TierLoadTimes(8)
    drain_s = 0.0
    for ended in range(1, 9):
        drain_s += 0.010 / (9 - ended)
        times.on_loaded(drain_s, 0.010 * ended, 0.010 * ended)
    times.on_quiet(0.080)
    assert times.table()[4] == pytest.approx(0.040, rel=0.2)


def test_a_slowdown_shows_before_all_that_is_asked_for_has_come():
    times = taught(4, *[(0.010, 4)] * 50)
    for _ in range(4):
        times.on_loaded(0.25, 1.0, 0.0)
    assert times.table()[4] == pytest.approx(1.0)


def test_without_a_quiet_moment_loads_are_taken_in_by_the_dozen():
    times = taught(4, *[(1.0, 4)] * 20)
    for _ in range(32):
        times.on_loaded(0.010 / 4, 0.010, 0.0)
    assert times.table()[4] < 0.02


@pytest.mark.parametrize("lost", [1, 3])
def test_good_loads_teach_although_some_of_them_were_lost(lost):
    times = taught(8, *[(2.0, 8)] * 20)
    times.on_opened(100.0)
    for _ in range(8 - lost):
        times.on_loaded(0.005 / 8, 0.005, 100.005)
    for _ in range(lost):
        times.on_lost()
    times.on_quiet(100.010)
    assert 0.005 <= times.table()[8] < 0.05


def test_loads_that_were_given_up_are_not_taken_for_served():
    """Eight at once on a busy device, a second for each: the last would have come after 8 s."""
    times = taught(8, *[(8.0, 8)] * 20)
    times.on_opened(100.0)
    times.on_loaded(1.0 / 8, 1.0, 101.0)
    for _ in range(7):
        times.on_lost()
    times.on_quiet(101.0)
    assert times.table()[8] == pytest.approx(8.0)


def test_what_was_lost_before_a_tier_fell_quiet_is_forgotten():
    times = taught(8, *[(2.0, 8)] * 20)
    times.on_opened(50.0)
    times.on_lost()
    times.on_quiet(60.0)
    times.on_opened(100.0)
    for _ in range(8):
        times.on_loaded(0.005 / 8, 0.005, 107.0)
    times.on_quiet(107.0)
    assert times.table()[8] < 0.05, "none of these was lost: what counts is their own time"


def test_where_one_was_lost_a_load_counts_from_its_start_though_others_were_taken_in_since():
    """Four reads at once, 0.3 s each; what ends just after the others were taken in was not read in that moment."""
    times = taught(4, *[(1.0, 4)] * 20)
    times.on_opened(100.0)
    for _ in range(16):
        times.on_loaded(0.3 / 4, 0.3, 100.3)
    known_s = times.table()[4]
    times.on_lost()
    for _ in range(3):
        times.on_loaded(0.01 / 4, 0.3, 100.31)
    times.on_quiet(100.31)
    assert times.table()[4] == known_s


def test_the_lost_ones_are_weighed_from_the_opening_of_their_own_group():
    times = taught(4, *[(2.0, 4)] * 20)
    times.on_opened(100.0)
    for _ in range(16):
        times.on_loaded(1.0 / 4, 1.0, 110.0)
    known_s = times.table()[4]
    for _ in range(7):
        times.on_loaded(0.010 / 4, 0.010, 110.020)
    times.on_lost()
    times.on_quiet(110.020)
    assert times.table()[4] < known_s / 2, "0.02 s for seven, not the ten since the tier was last quiet"


def test_a_fixed_interval_is_not_moved_by_what_happens():
    times = TierLoadTimes(8, fixed_interval_s=0.003)
    taught(8, (1.0, 1), times=times)
    times.on_late(10.0, 1, 0.0)
    assert times.table() == pytest.approx([0.003 * count for count in range(9)])
    assert times.kept(100.0) == 1.0


_SECONDS = st.floats(1e-9, 1e9)
_HAPPENS = st.lists(
    st.tuples(
        st.sampled_from(["opened", "loaded", "loaded", "late", "stall", "quiet"]),
        _SECONDS,
        st.integers(1, 40),
        st.floats(0.0, 30.0),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 20), _HAPPENS)
def test_whatever_happens_more_loads_never_come_sooner_and_company_never_delivers_less(width, happens):
    times = TierLoadTimes(width)
    now_s = 0.0
    for what, seconds, count, passed_s in happens:
        now_s += passed_s
        if what == "opened":
            times.on_opened(now_s)
        elif what == "quiet":
            times.on_quiet(now_s)
        elif what == "loaded":
            times.on_loaded(seconds / min(count, width), seconds, now_s)
        elif what == "late":
            times.on_late(seconds, count, now_s)
        else:
            times.on_stall(Spent(seconds, seconds / min(count, width), seconds / min(count, width)), now_s)
        table = times.table()
        assert len(table) == width + 1
        for before, after in itertools.pairwise(table):
            assert after >= before * (1 - 1e-9)
            assert after - before <= times.steepest_s * (1 + 1e-9)
        assert table[-1] / width <= times.steepest_s
        for at, time_s in enumerate(table[1:], start=1):
            assert table[-1] / width <= time_s / at * (1 + 1e-9)
        assert 0.0 <= times.kept(now_s) <= 1.0
