"""The EMA detector, rule by rule, on a clock that moves only when told to."""

from __future__ import annotations

import math

import pytest
from gates import FAST, HIGH, LOW, MIB, MIDDLE, SLOW, Clock, answers, complete, make

from kvsluice.tiers.backpressure import DropStorePolicy, EMABackpressureDetector
from kvsluice.tiers.errors import ConfigError


@pytest.fixture
def clock() -> Clock:
    return Clock()


# Presets and validation.


@pytest.mark.parametrize(
    ("tier_type", "locality", "expected"),
    [
        ("host", None, {"high_water_s": 0.010, "low_water_s": 0.002}),
        ("host", "remote", {"high_water_s": 0.050, "low_water_s": 0.010}),
        ("fs", None, {"high_water_s": 0.010, "low_water_s": 0.002, "failure_threshold": 3}),
        ("fs", "LOCAL", {"high_water_s": 0.010, "low_water_s": 0.002, "failure_threshold": 3}),
        ("fs", "REMOTE", {"high_water_s": 0.050, "low_water_s": 0.010, "failure_threshold": 3}),
        ("fs", "Remote", {"high_water_s": 0.050, "low_water_s": 0.010, "failure_threshold": 3}),
        ("obj", None, {"high_water_s": 0.050, "low_water_s": 0.010, "failure_threshold": 3}),
        ("obj", "LOCAL", {"high_water_s": 0.050, "low_water_s": 0.010, "failure_threshold": 3}),
        ("p2p", None, {"high_water_s": 0.010, "low_water_s": 0.002}),
    ],
)
def test_presets(tier_type, locality, expected):
    assert EMABackpressureDetector.default_config(tier_type, locality=locality) == expected


def test_constructor_defaults_are_the_documented_ones(clock):
    detector = EMABackpressureDetector(HIGH, LOW, clock=clock)
    complete(detector, SLOW, 9)
    assert (detector.store_latency_ema, detector.is_under_pressure()) == (0.0, False)
    complete(detector, SLOW)
    assert detector.store_latency_ema == pytest.approx(SLOW)
    complete(detector, FAST)
    ema = 0.15 * FAST + 0.85 * SLOW
    assert detector.store_latency_ema == pytest.approx(ema)
    clock.now_s = 2.0
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(ema / 2)
    for _ in range(50):
        detector.on_store_failed()
    assert detector.store_latency_ema == pytest.approx(ema / 2)
    detector.store_latency_ema = 0.0
    assert answers(detector, 2) == [True, False]
    clock.now_s = 3.0
    assert answers(detector, 2) == [True, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", value) for value in (0, -0.1, 1.5, math.nan, "fast", None, True)),
        *(("high_water_s", value) for value in (math.nan, math.inf, "1", None, False)),
        *(("low_water_s", value) for value in (0.0101, math.nan, -math.inf, "1")),
        *(("failure_threshold", value) for value in (0, -1, 2.0, True, "3")),
        *(("warmup_completions", value) for value in (-1, 1.5, None)),
        *(("decay_half_life_s", value) for value in (math.nan, "2", None)),
        *(("cooldown_s", value) for value in (math.nan, "1", None)),
    ],
)
def test_an_argument_out_of_range_is_refused_with_name_and_value(clock, name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be .*got {value!r}"):
        make(clock, **{name: value})


def test_limits_of_the_ranges_are_allowed(clock):
    make(clock, alpha=1, failure_threshold=1, low_water_s=HIGH, warmup_completions=0)
    make(clock, decay_half_life_s=math.inf, cooldown_s=math.inf)


# Samples.


def test_jobs_of_any_size_compare(clock):
    small, large = make(clock), make(clock)
    small.on_store_completed(0.001, MIB // 8)
    large.on_store_completed(0.512, 64 * MIB)
    assert small.store_latency_ema == large.store_latency_ema == pytest.approx(0.008)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_store_that_wrote_nothing_teaches_nothing(clock, num_bytes):
    detector = make(clock, failure_threshold=2)
    complete(detector, SLOW)
    detector.on_store_failed()
    before = detector.stats
    clock.now_s = 1.0
    detector.on_store_completed(0.0, num_bytes)
    assert detector.stats == before


@pytest.mark.parametrize("elapsed_s", [-0.001, math.nan, math.inf])
def test_an_elapsed_time_that_is_none_is_counted_and_not_averaged(clock, elapsed_s):
    detector = make(clock, failure_threshold=2)
    complete(detector, FAST)
    detector.on_store_failed()
    detector.on_store_completed(elapsed_s, MIB)
    detector.on_store_failed()
    assert detector.store_latency_ema == FAST
    assert detector.stats["ignored_samples"] == 1
    assert not detector.is_under_pressure()


def test_warm_up_only_collects_and_its_last_sample_sets_the_mean(clock):
    detector = make(clock, warmup_completions=3, alpha=0.5)
    complete(detector, 0.03)
    complete(detector, 0.06)
    assert detector.store_latency_ema == 0.0
    complete(detector, 0.09)
    assert detector.store_latency_ema == pytest.approx(0.06)
    assert not detector.is_under_pressure()
    complete(detector, 0.02)
    assert detector.store_latency_ema == pytest.approx(0.04)
    assert detector.is_under_pressure()


def test_after_the_warm_up_each_sample_is_folded_in_with_weight_alpha(clock):
    detector = make(clock, warmup_completions=2, alpha=0.15)
    complete(detector, 0.004, 2)
    complete(detector, 0.008)
    assert detector.store_latency_ema == pytest.approx(0.15 * 0.008 + 0.85 * 0.004)
    complete(detector, 0.001)
    assert detector.store_latency_ema == pytest.approx(0.15 * 0.001 + 0.85 * (0.15 * 0.008 + 0.85 * 0.004))


def test_is_healthy_is_a_query_that_changes_nothing(clock):
    detector = make(clock)
    complete(detector, SLOW)
    clock.now_s = 100.0
    before = detector.stats
    assert not detector.is_healthy()
    assert detector.stats == before
    assert before["store_latency_ema"] == SLOW


def test_stats_say_what_a_question_would_answer_and_change_nothing(clock):
    detector = make(clock, cooldown_s=10.0)
    complete(detector, SLOW)
    assert detector.stats["under_pressure"] == 1.0
    clock.now_s = 100.0
    assert [detector.stats["under_pressure"] for _ in range(3)] == [0.0] * 3
    # The cooldown starts with the first question, not with a look at the statistics.
    clock.now_s = 105.0
    assert not detector.is_under_pressure()
    clock.now_s = 114.0
    assert answers(detector, 4) == [True, False, True, False]


def test_warm_up_samples_are_no_healthy_streak(clock):
    detector = make(clock, warmup_completions=10)
    complete(detector, FAST, 19)
    assert not detector.is_healthy()
    complete(detector, FAST)
    assert detector.is_healthy()


# Transitions.


def test_pressure_starts_above_high_and_not_at_it(clock):
    detector = make(clock)
    complete(detector, HIGH)
    assert not detector.is_under_pressure()
    complete(detector, math.nextafter(HIGH, 1.0))
    assert detector.is_under_pressure()


def test_pressure_ends_below_low_and_not_at_it(clock):
    detector = make(clock)
    complete(detector, SLOW)
    complete(detector, LOW)
    assert detector.is_under_pressure()
    complete(detector, math.nextafter(LOW, 0.0))
    assert not detector.is_under_pressure()


def test_between_the_marks_the_state_stays(clock):
    detector = make(clock)
    complete(detector, MIDDLE)
    assert not detector.is_under_pressure()
    complete(detector, SLOW)
    complete(detector, MIDDLE)
    assert detector.is_under_pressure()


@pytest.mark.parametrize("interruption", [MIDDLE, SLOW])
def test_ten_sub_low_completions_in_a_row_are_healthy_and_any_other_starts_again(clock, interruption):
    detector = make(clock)
    complete(detector, FAST, 9)
    assert not detector.is_healthy()
    complete(detector, FAST)
    assert detector.is_healthy()
    complete(detector, interruption)
    assert not detector.is_healthy()
    complete(detector, FAST, 9)
    assert not detector.is_healthy()
    complete(detector, FAST)
    assert detector.is_healthy()


def test_a_healthy_tier_is_admitted_without_policy_and_cooldown(clock):
    class Never(DropStorePolicy):
        def should_store(self, detector) -> bool:
            return False

    detector = make(clock, policy=Never())
    complete(detector, SLOW)
    complete(detector, FAST, 9)
    assert not any(answers(detector, 4))
    complete(detector, FAST)
    assert all(answers(detector, 4))
    assert detector.policy.pop_stores_dropped() == (4, 4)


def test_in_a_cooldown_every_second_request_is_refused_and_counted(clock):
    detector = make(clock, cooldown_s=1.0, policy=DropStorePolicy())
    complete(detector, SLOW)
    clock.now_s = 10.0
    complete(detector, FAST)
    clock.now_s = 10.999
    assert [detector.should_store(2) for _ in range(6)] == [True, False] * 3
    assert detector.policy.pop_stores_dropped() == (3, 6)
    clock.now_s = 11.0
    assert all(answers(detector, 6))


def test_a_cooldown_starts_only_where_pressure_was(clock):
    detector = make(clock)
    complete(detector, FAST)
    assert all(answers(detector, 6))


def test_staying_below_low_does_not_prolong_the_cooldown(clock):
    detector = make(clock, cooldown_s=1.0)
    complete(detector, SLOW)
    complete(detector, FAST)
    clock.now_s = 0.9
    complete(detector, FAST)
    clock.now_s = 1.0
    assert all(answers(detector, 4))


def test_new_pressure_ends_the_cooldown_and_the_next_one_counts_afresh(clock):
    detector = make(clock, cooldown_s=1.0)
    complete(detector, SLOW)
    complete(detector, FAST)
    assert answers(detector, 3) == [True, False, True]
    complete(detector, HIGH * 1.001)
    assert answers(detector, 4) == [True, True, True, True]
    complete(detector, FAST)
    assert answers(detector, 3) == [True, False, True]


def test_a_policy_still_decides_about_what_the_cooldown_lets_through(clock):
    class Never(DropStorePolicy):
        def should_store(self, detector) -> bool:
            return False

    detector = make(clock, policy=Never())
    complete(detector, SLOW)
    complete(detector, FAST)
    assert not any(answers(detector, 4))
    assert detector.policy.pop_stores_dropped() == (4, 4)


def test_silence_under_pressure_halves_the_ema_when_asked(clock):
    detector = make(clock, decay_half_life_s=2.0)
    complete(detector, 0.08)
    clock.now_s = 4.0
    assert detector.store_latency_ema == 0.08
    assert detector.stats["store_latency_ema"] == 0.08
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(0.02)
    clock.now_s = 6.0
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(0.01)


def test_decay_below_low_ends_the_pressure_and_starts_the_cooldown(clock):
    detector = make(clock, decay_half_life_s=1.0, cooldown_s=1.0)
    complete(detector, 0.016)
    clock.now_s = 3.0
    assert detector.is_under_pressure()
    clock.now_s = 3.5
    assert answers(detector, 4) == [True, False, True, False]
    clock.now_s = 4.5
    assert all(answers(detector, 4))


def test_a_completion_is_not_decayed_and_counts_as_the_last_update(clock):
    detector = make(clock, alpha=0.5, decay_half_life_s=1.0)
    complete(detector, 0.2)
    clock.now_s = 10.0
    complete(detector, 0.0)
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(0.05)


def test_without_pressure_nothing_decays(clock):
    detector = make(clock)
    complete(detector, MIDDLE)
    clock.now_s = 1e6
    assert detector.should_store(1)
    assert detector.store_latency_ema == MIDDLE


@pytest.mark.parametrize("half_life_s", [0.0, -1.0])
def test_a_half_life_of_zero_or_less_switches_decay_off(clock, half_life_s):
    detector = make(clock, decay_half_life_s=half_life_s)
    complete(detector, SLOW)
    clock.now_s = 1e6
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == SLOW


def test_a_clock_that_stands_or_runs_backwards_decays_nothing(clock):
    detector = make(clock)
    complete(detector, SLOW)
    clock.now_s = -5.0
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == SLOW


# Failures, reset, observation.


def test_a_failure_zeroes_the_healthy_streak_even_where_failures_are_no_pressure(clock):
    detector = make(clock, failure_threshold=None)
    complete(detector, FAST, 10)
    detector.on_store_failed()
    assert not detector.is_healthy()
    complete(detector, FAST, 9)
    assert not detector.is_healthy()


@pytest.mark.parametrize("warmup_completions", [0, 100])
def test_failures_in_a_row_are_pressure_at_four_times_high_even_in_warm_up(clock, warmup_completions):
    detector = make(clock, failure_threshold=3, warmup_completions=warmup_completions)
    complete(detector, FAST, 5)
    detector.on_store_failed()
    detector.on_store_failed()
    assert not detector.is_under_pressure()
    detector.on_store_failed()
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(4 * HIGH)
    assert not any(answers(detector, 10))


def test_a_success_resets_the_failure_streak_in_warm_up_too(clock):
    detector = make(clock, failure_threshold=2, warmup_completions=100)
    for _ in range(10):
        detector.on_store_failed()
        complete(detector, FAST)
    assert not detector.is_under_pressure()


def test_failures_never_lower_the_ema(clock):
    detector = make(clock, failure_threshold=1)
    complete(detector, 50 * HIGH)
    detector.on_store_failed()
    assert detector.store_latency_ema == 50 * HIGH


def test_decay_lets_probes_through_after_failures_and_a_failing_probe_is_pressure_again(clock):
    detector = make(clock, failure_threshold=3, warmup_completions=100, decay_half_life_s=1.0)
    for _ in range(3):
        detector.on_store_failed()
    assert not detector.should_store(1)
    clock.now_s = 1.0
    assert answers(detector, 4) == [True, False, True, False]
    detector.on_store_failed()
    assert not any(answers(detector, 4))
    assert detector.store_latency_ema == pytest.approx(4 * HIGH)
    clock.now_s = 6.0
    assert not detector.is_under_pressure()


def test_failures_end_a_cooldown(clock):
    detector = make(clock, failure_threshold=1, policy=DropStorePolicy())
    complete(detector, SLOW)
    complete(detector, FAST)
    detector.on_store_failed()
    assert not any(answers(detector, 3))


def test_the_mean_of_the_warm_up_replaces_what_failures_in_it_left(clock):
    detector = make(clock, failure_threshold=1, warmup_completions=2, decay_half_life_s=0.0)
    detector.on_store_failed()
    complete(detector, FAST, 2)
    assert answers(detector, 4) == [True, False, True, False]


def test_the_end_of_the_warm_up_is_an_update_from_which_decay_counts(clock):
    detector = make(clock, failure_threshold=1, warmup_completions=1, decay_half_life_s=1.0)
    detector.on_store_failed()
    clock.now_s = 50.0
    complete(detector, 2 * HIGH)
    clock.now_s = 51.0
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(HIGH)


# A store that has not come home.


def test_a_store_in_flight_counts_as_a_sample_that_is_not_folded_in(clock):
    detector = make(clock, alpha=0.5)
    detector.store_latency_ema = MIDDLE
    detector.on_store_in_flight(0.010 * 2, 2 * MIB)
    assert detector.stats["in_flight_ema"] == pytest.approx(0.0075)
    assert detector.store_latency_ema == MIDDLE
    assert not detector.is_under_pressure()
    detector.on_store_in_flight(0.016 * 2, 2 * MIB)
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == MIDDLE
    assert detector.severity() == pytest.approx(0.05)


def test_pressure_from_a_store_in_flight_does_not_decay_while_it_is_there(clock):
    detector = make(clock)
    detector.store_latency_ema = MIDDLE
    detector.on_store_in_flight(1.0, MIB)
    clock.now_s = 1000.0
    assert detector.is_under_pressure()
    assert answers(detector, 5) == [False] * 5
    detector.on_store_in_flight(0.0, MIB)
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == MIDDLE
    clock.now_s += 2.0
    detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(MIDDLE / 2)


def test_pressure_from_a_store_in_flight_ends_with_the_report_that_none_is_late(clock):
    detector = make(clock, cooldown_s=0.0)
    detector.on_store_in_flight(1.0, MIB)
    detector.on_store_in_flight(0.0, MIB)
    assert not detector.is_under_pressure()
    assert answers(detector, 3) == [True] * 3


@pytest.mark.parametrize(("elapsed_s", "num_bytes"), [(1.0, 0), (math.nan, MIB), (math.inf, MIB), (-1.0, MIB)])
def test_a_time_in_flight_that_is_none_counts_as_none_in_flight(clock, elapsed_s, num_bytes):
    detector = make(clock)
    detector.on_store_in_flight(elapsed_s, num_bytes)
    assert not detector.is_under_pressure()


def test_what_comes_home_late_counts_four_high_marks_until_one_is_below_the_mark(clock):
    detector = make(clock)
    detector.on_store_in_flight(60.0, MIB)
    complete(detector, 30.0)
    assert detector.store_latency_ema == pytest.approx(4 * HIGH)
    complete(detector, FAST)
    complete(detector, 30.0)
    assert detector.store_latency_ema == 30.0


def test_a_store_that_comes_home_late_without_having_been_seen_in_flight_counts_in_full(clock):
    detector = make(clock)
    complete(detector, 30.0)
    assert detector.store_latency_ema == 30.0


def test_reset_forgets_everything_and_resets_the_policy(clock):
    detector = make(clock, failure_threshold=2, warmup_completions=2, cooldown_s=9.0)
    fresh = detector.stats
    complete(detector, SLOW, 2)
    complete(detector, FAST, 12)
    detector.on_store_completed(-1.0, MIB)
    detector.on_store_failed()
    complete(detector, SLOW, 2)
    answers(detector, 3)
    complete(detector, FAST)
    answers(detector, 3)
    detector.on_store_failed()
    detector.reset()
    assert detector.stats == fresh
    assert detector.policy.pop_stores_dropped() == (0, 0)
    assert all(answers(detector, 4))
    detector.on_store_failed()
    complete(detector, SLOW)
    assert not detector.is_under_pressure()
    complete(detector, 3 * SLOW)
    assert detector.store_latency_ema == pytest.approx(2 * SLOW)


def test_the_ema_can_be_set_and_counts_as_an_update(clock):
    detector = make(clock, decay_half_life_s=1.0)
    complete(detector, SLOW)
    clock.now_s = 100.0
    detector.store_latency_ema = 2 * HIGH
    assert detector.store_latency_ema == 2 * HIGH
    assert answers(detector, 4) == [True, False, True, False]
    detector.store_latency_ema = 2 * HIGH
    clock.now_s = 101.0
    assert detector.is_under_pressure()
    assert detector.store_latency_ema == pytest.approx(HIGH)


def test_stats_say_what_the_state_is(clock):
    detector = make(clock)
    complete(detector, FAST, 3)
    assert detector.stats == {
        "store_latency_ema": FAST,
        "under_pressure": 0.0,
        "in_flight_ema": 0.0,
        "completions": 3.0,
        "healthy_streak": 3.0,
        "failure_streak": 0.0,
        "ignored_samples": 0.0,
    }
    complete(detector, SLOW)
    detector.on_store_failed()
    assert detector.stats["under_pressure"] == 1.0
    assert detector.stats["failure_streak"] == 1.0


def test_severity_counts_high_marks_above_the_high_mark(clock):
    detector = make(clock)
    for marks, severity in ((0.5, 0.0), (1.0, 0.0), (3.0, 2.0)):
        detector.store_latency_ema = marks * HIGH
        assert detector.severity() == pytest.approx(severity)
