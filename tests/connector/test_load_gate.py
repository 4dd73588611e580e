"""A hit is used where it is faster than computing, and only there; on virtual time."""

from __future__ import annotations

import logging
import math

import pytest
from bench import Bench, blocks_of, make_key
from doubles import PATIENCE_S, Clock, PickledConnector
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loads import HUNG, TOKENS, WIDTH, Distance, KnowingProber, World, look_up

from kvsluice.connector.account import PlannedTier
from kvsluice.connector.load_gate import LOG_INTERVAL_S, PROBE_CHUNKS, LoadGate, LoadTier
from kvsluice.connector.load_rates import HALF_LIFE_S, WARM_UP_LOADS
from kvsluice.connector.orders import HOST, Copied, Ended, Loaded, LoadOrder, Passed, RankReport, StoreOrder, Wrote
from kvsluice.connector.planner import Planner, PlannerSettings
from kvsluice.connector.results import Lookup
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Spent

RATE = 10_000.0
"""Tokens per second of the engine in these tests."""
CHUNK_S = TOKENS / RATE
"""So long it computes a chunk: 25.6 ms."""
SLOW_S = 4 * CHUNK_S
FAST_S = CHUNK_S / 10
MANY_KEYS = [make_key(number) for number in range(64)]


def world_with(held: int, chunk_s: float = FAST_S, **options: object) -> World:
    world = World(**options)
    world.device.chunk_s = chunk_s
    world.hold(held)
    world.prefill(RATE)
    return world


# ---- what is offered ---------------------------------------------------------------------------


def test_a_fresh_engine_uses_every_hit_and_the_first_loads_teach_it():
    world = world_with(32, SLOW_S)
    assert world.request() == Lookup(32, False)
    assert world.lookup() == Lookup(0, False, slower=32)
    stats = world.planner.stats()
    assert stats.unused == {reasons.SLOWER: 32}
    assert stats.hit_chunks == 32
    assert stats.load_gate is not None
    assert stats.load_gate.prefill_tokens_per_s == pytest.approx(RATE)
    assert stats.load_gate.load_interval_s["fs"] == pytest.approx(SLOW_S, rel=0.2)
    assert stats.load_gate.copy_s == pytest.approx(1e-6)


def test_before_anything_was_measured_the_statistics_say_so():
    stats = World().planner.stats().load_gate
    assert stats is not None
    assert (stats.prefill_tokens_per_s, stats.load_interval_s, stats.copy_s) == (None, {"fs": None}, None)


def test_a_faster_tier_goes_on_being_used():
    world = world_with(32)
    for _ in range(20):
        assert world.request() == Lookup(32, False)
    assert world.planner.stats().unused == {}


def test_an_engine_that_never_tells_its_speed_uses_every_hit_however_slow():
    world = World()
    world.device.chunk_s = SLOW_S
    world.hold(32)
    for _ in range(3):
        assert world.request() == Lookup(32, False)


def test_without_the_gate_every_hit_is_used_and_the_statistics_have_no_gate():
    world = world_with(32, SLOW_S, gate=False)
    for _ in range(3):
        assert world.request() == Lookup(32, False)
    assert world.planner.stats().load_gate is None


def test_one_lookup_counts_its_slower_chunks_once_and_a_miss_among_them_ends_it():
    world = world_with(16, SLOW_S)
    world.request()
    look_up(world.planner, [*world.keys[:3], make_key(999), *world.keys[3:]])
    assert world.planner.stats().unused == {reasons.SLOWER: 3}


@pytest.mark.parametrize(("tokens", "seconds"), [(-1, 1.0), (1, -1.0), (1, math.inf), (1, math.nan)])
@pytest.mark.parametrize("gate", [True, False])
def test_a_speed_that_cannot_be_is_refused(tokens, seconds, gate):
    with pytest.raises(ValueError, match="neither may be negative"):
        World(gate=gate).planner.observe_prefill(tokens, seconds)


def test_a_margin_decides_what_a_load_may_take():
    assert world_with(32, 1.5 * CHUNK_S, margin=2.0).request().held == 32
    spared = world_with(32, 1.5 * CHUNK_S, margin=2.0)
    spared.request()
    assert spared.lookup().held == 32
    plain = world_with(32, 1.5 * CHUNK_S)
    plain.request()
    assert plain.lookup().held == 0


@pytest.mark.parametrize(("interval_s", "held"), [(SLOW_S, 0), (FAST_S, 32)])
def test_fixed_rates_decide_from_the_start_and_whatever_happens(interval_s, held):
    world = World(prefill_tokens_per_s=RATE, interval_s=interval_s)
    world.device.chunk_s = SLOW_S if held else FAST_S
    world.hold(32)
    world.prefill(1.0)
    for _ in range(5):
        assert world.request() == Lookup(held, False, 32 - held)
        world.run(10 * HALF_LIFE_S)


def test_a_fixed_rate_of_the_engine_is_weighed_against_a_measured_tier():
    world = World(prefill_tokens_per_s=RATE)
    world.device.chunk_s = SLOW_S
    world.hold(32)
    assert world.request().held == 32
    assert world.lookup().held == 0


# ---- the least time of all ---------------------------------------------------------------------


def gate_of(*intervals_s: float, copy_s: float = 0.0) -> LoadGate:
    gate = LoadGate(
        {at: LoadTier(f"tier {at}", 1, interval_s) for at, interval_s in enumerate(intervals_s)},
        tokens_per_chunk=1,
        prefill_tokens_per_s=1.0,
    )
    for _ in range(WARM_UP_LOADS):
        gate.on_copied(copy_s, 0.0)
    return gate


def test_the_prefix_in_host_memory_is_used_and_the_rest_on_a_slow_tier_is_not():
    assert gate_of(5.0, copy_s=0.1).offer([HOST] * 4 + [0] * 6, {}, 0.0, probe_keys=MANY_KEYS) == 4


def test_a_little_of_a_slow_tier_is_worth_it_for_what_a_fast_one_has_behind_it():
    served_by = [0, *[1] * 20]
    assert gate_of(5.0, 0.1).offer(served_by, {}, 0.0, probe_keys=MANY_KEYS) == 21
    assert gate_of(30.0, 0.1).offer(served_by, {}, 0.0, probe_keys=MANY_KEYS) == 0


def test_a_chunk_that_would_wait_behind_a_line_is_not_worth_it_for_being_quick_itself():
    """1 s to wait for it, and 1 s to compute it: what has a line before it is weighed on its own."""
    assert gate_of(0.125).offer([HOST, 0], {0: 8}, 0.0, probe_keys=None) == 1


def test_tiers_serve_side_by_side():
    """One after the other they would take 18 s for what is computed in 20."""
    assert gate_of(0.9, 0.9).offer([0, 1] * 10, {0: 10, 1: 10}, 0.0, probe_keys=MANY_KEYS) == 20
    assert gate_of(0.9).offer([0] * 20, {0: 10}, 0.0, probe_keys=MANY_KEYS) == 0


def test_copies_that_are_slower_than_computing_keep_host_hits_from_being_used():
    assert gate_of(copy_s=2.0).offer([HOST] * 8, {}, 0.0, probe_keys=MANY_KEYS) == 0
    assert gate_of(copy_s=0.5).offer([HOST] * 8, {}, 0.0, probe_keys=MANY_KEYS) == 8
    assert gate_of(copy_s=0.5).offer([HOST] * 8, {HOST: 9}, 0.0, probe_keys=MANY_KEYS) == 0


_INTERVAL_S = st.floats(0.0, 3.0)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(_INTERVAL_S, min_size=1, max_size=3),
    st.floats(0.0, 1.5),
    st.data(),
)
def test_no_other_number_of_chunks_would_take_less(intervals_s, copy_s, data):
    count = len(intervals_s)
    served_by = data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=40))
    ahead = {at: data.draw(st.integers(0, 20)) for at in range(-1, count)}

    def total_s(loaded: int) -> float:
        """The time to load that many and to compute the others, straight from its definition."""
        if not loaded:
            return float(len(served_by))
        wanted = served_by[:loaded]
        tiers_s = [(ahead[at] + wanted.count(at)) * intervals_s[at] for at in set(wanted) if at != HOST]
        return max([*tiers_s, (sum(ahead.values()) + loaded) * copy_s]) + len(served_by) - loaded

    gate = gate_of(*intervals_s, copy_s=copy_s)
    found = gate.offer(served_by, ahead, 0.0, probe_keys=None)
    assert total_s(found) <= min(total_s(loaded) for loaded in range(len(served_by) + 1)) + 1e-9


# ---- company -----------------------------------------------------------------------------------


def test_short_hits_on_a_distant_tier_do_not_condemn_long_ones():
    """Alone each takes twice as long as computing it; eight at once take no longer than one."""
    world = World(Distance(2 * CHUNK_S))
    world.hold(64)
    world.prefill(RATE)
    for _ in range(20):
        world.request(1)
    assert world.lookup(1).held == 0
    assert world.lookup(64).held == 64
    assert world.request(64).held == 64
    assert world.lookup(64).held == 64


def test_a_long_queue_is_part_of_what_a_load_takes():
    """The tier is two and a half times as fast as computing: a prompt behind two others has none of that left."""
    world = world_with(64, CHUNK_S / 2.5)
    world.request(32)
    jobs = []
    answers = []
    for _ in range(12):
        found = world.lookup(32)
        answers.append(found.held)
        if found.held:
            jobs.append(world.load(found.held))
    assert answers[:2] == [32, 32]
    assert answers[2:] == [0] * 10, "behind 64 chunks, 32 more come later than they are computed"
    assert world.open_loads == 64
    world.run_until(lambda: not any(world.planner.is_open(job) for job in jobs))
    assert max(result.total_s for result in world.results) < 64 * CHUNK_S / 2.5 * 1.2
    assert world.lookup(32).held == 32


# ---- a tier that is slow for a while -----------------------------------------------------------


def requests_for(world: World, seconds: float, count: int = 32, every_s: float = 0.25) -> list[int]:
    """Requests one after the other for so long; what each was offered."""
    end_s = world.clock() + seconds
    offered = []
    while world.clock() < end_s:
        start_s = world.clock()
        offered.append(world.request(count).held)
        world.prefill(RATE)
        world.run(max(0.001, every_s - (world.clock() - start_s)))
    return offered


@pytest.mark.parametrize("factor", [2, 4, 16, 64])
def test_a_tier_that_was_slow_for_a_while_is_probed_with_few_chunks_and_used_again_soon_after(factor):
    world = world_with(32)
    assert set(requests_for(world, 2.0)) == {32}
    world.device.chunk_s = factor * CHUNK_S
    before = world.chunks_read
    offered = requests_for(world, 60.0)
    assert offered[0] == 32, "nobody can know"
    probes = [held for held in offered[1:] if held]
    # So long it takes until what is known has faded to where the tier would be worth it.
    fades_s = HALF_LIFE_S * math.log2(factor)
    assert 60.0 / fades_s * 0.5 <= len(probes) <= 60.0 / fades_s + 1
    assert max(probes) <= PROBE_CHUNKS
    assert world.chunks_read - before <= 32 + PROBE_CHUNKS * len(probes)
    world.device.chunk_s = FAST_S
    recovered_s = world.clock()
    while requests_for(world, 0.25)[-1] < 32:
        assert world.clock() - recovered_s < fades_s + 1.0, "that, and the probe itself"
    assert set(requests_for(world, 5.0)) == {32}


def test_the_worse_a_tier_is_the_rarer_it_is_probed():
    counts = []
    for factor in (2, 8, 64):
        world = world_with(32)
        requests_for(world, 1.0)
        world.device.chunk_s = factor * CHUNK_S
        counts.append(sum(held > 0 for held in requests_for(world, 60.0)))
    assert counts[0] > counts[1] > counts[2] >= 2


def test_a_probe_that_takes_too_long_is_given_up_so_that_a_request_loses_little():
    world = world_with(32, timeout_s=10.0)
    requests_for(world, 1.0)
    world.device.chunk_s = 64 * CHUNK_S
    requests_for(world, 10.0)
    taken = []
    while len(taken) < 3:
        before_s = world.clock()
        if world.request(32).held:
            taken.append(world.clock() - before_s)
        world.run(0.1)
    assert max(taken) <= 2 * PROBE_CHUNKS * CHUNK_S + 0.02


def world_with_a_probe_offered() -> World:
    """Of 64 chunks the first eight; the tier is far slower than twice what they take to compute."""
    world = world_with(64, 64 * CHUNK_S)
    world.request(32)
    world.run(10 * HALF_LIFE_S)
    assert world.lookup(32).held == PROBE_CHUNKS
    return world


def taken_s(world: World, job: int) -> float:
    world.run_until(lambda: not world.planner.is_open(job))
    return next(result.total_s for result in world.results if result.job_id == job)


def test_a_probes_patience_is_for_the_chunks_that_it_offered_and_for_no_others():
    world = world_with_a_probe_offered()
    other = world.load(PROBE_CHUNKS, first=32)
    probe = world.load(PROBE_CHUNKS)
    assert taken_s(world, probe) == pytest.approx(2 * PROBE_CHUNKS * CHUNK_S, abs=0.02)
    assert taken_s(world, other) == pytest.approx(10.0, abs=0.02)


def test_a_probes_patience_is_given_once():
    world = world_with_a_probe_offered()
    probe = world.load(PROBE_CHUNKS)
    again = world.load(PROBE_CHUNKS)
    assert taken_s(world, probe) < 1.0
    assert taken_s(world, again) == pytest.approx(10.0, abs=0.02)


@pytest.mark.parametrize("deadline_s", [1.5, 10.0], ids=["its own", "what is also the default"])
def test_a_deadline_that_the_caller_named_stands_for_a_probe_too(deadline_s):
    world = world_with_a_probe_offered()
    assert taken_s(world, world.load(PROBE_CHUNKS, deadline_s=deadline_s)) == pytest.approx(deadline_s, abs=0.02)


def test_a_tier_that_is_well_again_is_used_although_each_probe_has_a_chunk_that_is_gone():
    world = world_with(32)
    requests_for(world, 2.0)
    world.device.chunk_s = 16 * CHUNK_S
    requests_for(world, 10.0)
    world.device.chunk_s = FAST_S
    end_s = world.clock() + 30.0
    offered = 0
    while offered < 32:
        assert world.clock() < end_s, "the probes teach nothing"
        world.gone = {world.keys[3]}
        offered = world.request(32).held
        world.prefill(RATE)
        world.run(0.1)


def test_there_is_one_probe_at_a_time_and_none_that_nobody_acts_upon():
    world = world_with(32, SLOW_S)
    world.request()
    world.run(4 * HALF_LIFE_S)
    assert 0 < world.lookup().held <= PROBE_CHUNKS
    assert world.lookup().held == 0, "the probe that was offered may still be asked for"
    world.run(HALF_LIFE_S + 0.01)
    assert world.lookup().held > 0, "it was not"
    job = world.load(8)
    assert world.lookup().held == 0, "the load that is open will tell"
    world.run_until(lambda: not world.planner.is_open(job))


def test_a_tier_that_hangs_is_left_alone_within_a_bounded_number_of_loads_and_used_again_when_it_recovers():
    world = world_with(32, timeout_s=10.0)
    requests_for(world, 1.0)
    world.device.chunk_s = HUNG
    before = world.chunks_read
    start_s = world.clock()
    offered: list[int] = []
    while world.clock() < start_s + 120.0:
        # Many requests at once: none waits for another one's load.
        found = world.lookup(32)
        offered.append(found.held)
        if found.held:
            world.load(found.held)
        world.prefill(RATE)
        world.run(0.05)
    first_s = 0.05 * next(at for at, held in enumerate(offered) if held == 0)
    assert first_s < 1.0, "the age of what is out tells, long before a deadline does"
    assert sum(held > PROBE_CHUNKS for held in offered) * 0.05 <= 1.0
    assert sum(held > 0 for held in offered) < 40
    assert world.chunks_read - before <= WIDTH, "no read came back, so no thread read a second one"
    world.device.chunk_s = FAST_S
    world.unhang()
    recovered_s = world.clock()
    while requests_for(world, 0.25)[-1] < 32:
        assert world.clock() - recovered_s < 20.0
    assert set(requests_for(world, 5.0)) == {32}


def test_one_read_that_never_returns_does_not_keep_a_tier_out_of_use():
    lost = {"left": 1}
    world = World(lambda start_s: HUNG if lost.pop("left", 0) else start_s + FAST_S, timeout_s=2.0)
    world.hold(32)
    world.prefill(RATE)
    requests_for(world, 30.0)
    assert world.planner.stats().load_gate is not None
    assert set(requests_for(world, 5.0)) == {32}


def test_reads_that_all_come_too_late_are_known_to_be_slow():
    world = world_with(8, 2.0, timeout_s=1.0)
    world.prefill(2 * TOKENS)
    world.request()
    world.run(20.0)
    assert world.planner.stats().tiers["fs"].missed == {reasons.DEADLINE: 8}
    assert world.planner.stats().load_gate is not None
    interval_s = world.planner.stats().load_gate.load_interval_s["fs"]
    assert interval_s is not None
    assert interval_s > 0.1


# ---- what teaches nothing ----------------------------------------------------------------------


def test_a_cancelled_load_teaches_nothing():
    world = world_with(8, 5.0)
    job = world.load(8)
    world.planner.cancel(job)
    world.run(0.1)
    world.device.chunk_s = FAST_S
    world.run(60.0)
    assert world.planner.stats().load_gate is not None
    assert world.planner.stats().load_gate.load_interval_s == {"fs": None}
    assert world.lookup().held == 8


def test_an_answer_that_is_pending_offers_no_probe_and_counts_nothing():
    world = world_with(32, SLOW_S)
    world.request()
    world.run(4 * HALF_LIFE_S)
    keys = [*world.keys, make_key(999)]
    assert world.planner.lookup(keys) == Lookup(0, True, slower=32)
    assert world.planner.stats().unused == {}
    assert world.planner.lookup(keys) == Lookup(PROBE_CHUNKS, False, slower=32 - PROBE_CHUNKS)
    assert world.planner.stats().unused == {reasons.SLOWER: 32 - PROBE_CHUNKS}


def test_what_is_not_worth_it_yet_waits_for_an_answer_that_would_make_it_so():
    """Eight at once take no longer than one: one alone is not worth it, with more behind it it is."""
    gate = LoadGate({0: LoadTier("fs", 8)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    for company in [8] * WARM_UP_LOADS + [1] * WARM_UP_LOADS:
        gate.on_loaded(0, 2.0 / company, 2.0, 0.0)
        gate.on_quiet(0, 0.0)
    planner = planner_of(gate, {"fs": set(KEYS)})
    assert look_up(planner, KEYS[:1]) == Lookup(0, False, slower=1)
    assert planner.lookup(KEYS) == Lookup(0, True, slower=1)
    assert planner.lookup(KEYS) == Lookup(16, False)


def test_no_probe_stands_in_line_behind_loads_that_will_tell_as_much():
    gate = LoadGate({0: LoadTier("fs", 1)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    gate.on_late(0, 4.0, 1, 0.0)
    assert gate.offer([0] * 8, {0: 1}, 8 * HALF_LIFE_S, probe_keys=MANY_KEYS) == 0
    assert gate.offer([0] * 8, {}, 8 * HALF_LIFE_S, probe_keys=MANY_KEYS) == 1


def test_a_tier_that_was_gone_and_answers_again_is_probed_at_once_and_once():
    gate = LoadGate({0: LoadTier("obj", 16)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    gate.on_late(0, 1000.0, 1, 0.0)
    now_s = HALF_LIFE_S
    assert gate.offer([0] * 32, {}, now_s, probe_keys=MANY_KEYS) == 0, "far slower than computing, and that is fresh"
    gate.on_asked(0, answered=True)
    assert gate.offer([0] * 32, {}, now_s, probe_keys=MANY_KEYS) == 0, "slow, and never gone"
    gate.on_asked(0, answered=False)
    assert gate.offer([0] * 32, {}, now_s, probe_keys=MANY_KEYS) == 0, "gone"
    for _ in range(2):
        gate.on_asked(0, answered=True)
    assert gate.offer([0] * 32, {}, now_s, probe_keys=None) == 0, "an answer that is not acted upon takes no probe"
    assert gate.offer([0] * 32, {0: 1}, now_s, probe_keys=MANY_KEYS) == 0, "loads that are open will tell"
    assert gate.offer([0] * 32, {}, now_s, probe_keys=MANY_KEYS) == PROBE_CHUNKS
    assert gate.offer([0] * 32, {}, now_s + HALF_LIFE_S, probe_keys=MANY_KEYS) == 0


def test_a_tier_that_is_back_and_has_been_loaded_from_since_needs_no_probe():
    gate = LoadGate({0: LoadTier("obj", 16)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    gate.on_asked(0, answered=False)
    gate.on_asked(0, answered=True)
    gate.on_late(0, 1000.0, 1, 0.0)
    gate.on_loaded(0, 1.0, 1.0, 1.0)
    assert gate.offer([0] * 32, {}, HALF_LIFE_S, probe_keys=MANY_KEYS) == 0


def test_a_tier_that_answers_questions_and_fails_loads_is_probed_no_more_than_every_half_life():
    gate = LoadGate({0: LoadTier("obj", 16)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    gate.on_late(0, 1e9, 1, 0.0)
    probes = 0
    for step in range(1, 201):
        now_s = step * HALF_LIFE_S / 20
        gate.on_asked(0, answered=True)
        probed = gate.offer([0] * 32, {}, now_s, probe_keys=MANY_KEYS)
        probes += probed > 0
        gate.on_failed(0, 0.001, 1, now_s)
    assert probes == 10


# ---- several ranks, several tiers --------------------------------------------------------------


KEYS = [make_key(number) for number in range(16)]


def planner_of(gate: LoadGate, held: dict[str, set[bytes]], *, ranks: int = 1, host_slots: int = 0) -> Planner:
    """A ladder of these tiers, each with the keys that it holds."""
    settings = PlannerSettings(
        blocks_per_chunk=1,
        num_blocks=64,
        chunk_bytes=512,
        slot_bytes=8192,
        num_slots=32,
        host_slots=host_slots,
        num_ranks=ranks,
        negative_ttl_s=1e-9,
    )
    prober = KnowingProber()
    prober.held.update(enumerate(held.values()))
    return Planner(
        [PlannedTier(name, name, None) for name in held],
        settings,
        prober=prober,
        load_gate=gate,
        clock=lambda: 0.0,
    )


def test_a_chunk_is_there_when_the_slowest_rank_has_its_part():
    gate = LoadGate({0: LoadTier("fs", 1)}, tokens_per_chunk=1)
    planner = planner_of(gate, {"fs": set(KEYS)}, ranks=3)
    planner.load(KEYS[:1], [0], None)
    (order,) = planner.take_orders()
    assert isinstance(order, LoadOrder)
    for rank, drain_s in enumerate([0.1, 0.7, 0.2]):
        loaded = Loaded(order.job_id, 0, 0, None, 512, 0.01, 0.0, drain_s, (), drain_s)
        planner.apply(RankReport(rank, (loaded, Ended(order.job_id, 0)), ()))
        planner.check_integrity()
    assert gate.stats.load_interval_s == {"fs": pytest.approx(0.7)}


def test_a_load_counts_at_the_tier_that_it_waits_for_now():
    gate = LoadGate({0: LoadTier("fs", 1), 1: LoadTier("obj", 1, 0.9)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    planner = planner_of(gate, {"fs": set(KEYS[:1]), "obj": set(KEYS)})
    assert look_up(planner, KEYS[:1]).held == 1
    assert look_up(planner, KEYS[1:2]).held == 1
    job = planner.load(KEYS[:1], [0], None)
    planner.take_orders()
    assert look_up(planner, KEYS[1:2]).held == 1, "it stands in fs's line"
    planner.apply(RankReport(0, (Passed(job, 0, 0),), ()))
    planner.check_integrity()
    assert look_up(planner, KEYS[1:2]) == Lookup(0, False, slower=1), "it stands in obj's line"
    missed = ((0, reasons.MISSING),)
    planner.apply(RankReport(0, (Loaded(job, 0, 1, None, 512, 0.0, 0.0, 9.0, missed, 9.0), Ended(job, 0)), ()))
    planner.check_integrity()
    assert look_up(planner, KEYS[1:2]).held == 1


def test_a_load_that_came_from_the_second_tier_teaches_neither():
    gate = LoadGate({0: LoadTier("fs", 1), 1: LoadTier("obj", 1)}, tokens_per_chunk=1)
    planner = planner_of(gate, {"fs": set(KEYS), "obj": set(KEYS)})
    job = planner.load(KEYS[:1], [0], None)
    planner.take_orders()
    missed = ((0, reasons.MISSING),)
    loaded = Loaded(job, 0, 1, None, 512, 0.1, 0.0, 9.0, missed, 9.0)
    planner.apply(RankReport(0, (Passed(job, 0, 0), loaded, Ended(job, 0)), ()))
    planner.check_integrity()
    assert gate.stats.load_interval_s == {"fs": None, "obj": None}, "the time is that of both"
    assert gate.stats.copy_s == pytest.approx(0.1)


def test_a_read_that_fails_after_a_long_time_counts_as_a_long_time():
    gate = LoadGate({0: LoadTier("fs", 1)}, tokens_per_chunk=1)
    planner = planner_of(gate, {"fs": set(KEYS)})
    for key, reason, waited_s in ((KEYS[0], reasons.MISSING, 3.0), (KEYS[1], reasons.IO_ERROR, 5.0)):
        job = planner.load([key], [0], None)
        planner.take_orders()
        lost = Loaded(job, 0, -1, reason, 0, 0.0, 1.0, waited_s, ((0, reason),))
        planner.apply(RankReport(0, (lost, Ended(job, 0)), ()))
        known = {"fs": None} if reason == reasons.MISSING else {"fs": pytest.approx(6.0)}
        assert gate.stats.load_interval_s == known
    planner.check_integrity()


def test_a_chunk_in_host_memory_is_reckoned_with_its_copy_alone():
    gate = LoadGate({1: LoadTier("fs", 1, 100.0)}, tokens_per_chunk=1, prefill_tokens_per_s=1.0)
    planner = planner_of(gate, {"host": set(), "fs": set(KEYS)}, host_slots=8)
    planner.store(KEYS[:2], [0, 1])
    for order in planner.take_orders():
        assert isinstance(order, StoreOrder)
        for part in order.parts:
            copied = Copied(order.job_id, part.part, None, 0.1)
            wrote = Wrote(order.job_id, part.part, 1, None, 512, 0.0, Spent.alone(0.1))
            planner.apply(RankReport(0, (copied, wrote, Ended(order.job_id, part.part)), ()))
    assert look_up(planner, KEYS[:6]) == Lookup(2, False, slower=4)


# ---- what is told ------------------------------------------------------------------------------


def test_unused_hits_are_told_with_both_figures_and_not_at_every_lookup(caplog):
    world = world_with(32, SLOW_S)
    world.request()
    with caplog.at_level(logging.WARNING, "kvsluice.connector.load_gate"):
        for _ in range(50):
            world.lookup()
        (record,) = caplog.records
        told = record.getMessage()
        assert "hits of fs are not used" in told
        assert f"{RATE:.0f} tokens/s" in told
        assert f"to compute them takes {32 * CHUNK_S:.3f} s" in told
        assert "to load 32 chunks takes 3." in told
        assert "for fs alone: behind 0 others, 99." in told
        world.run(LOG_INTERVAL_S)
        world.prefill(RATE)
        world.request()
        world.lookup()
        assert len(caplog.records) == 2


# ---- through the whole connector ---------------------------------------------------------------


def stored(bench: Bench, **options: object) -> tuple[PickledConnector, list[bytes]]:
    """A connector on one tier, `fs`, that holds four chunks."""
    keys = [make_key(number) for number in range(4)]
    conn = bench.connect("fs", **options)
    conn.wait([conn.store(keys, blocks_of(0, 1, 2, 3))], timeout_s=PATIENCE_S)
    return conn, keys


def test_an_engine_that_computes_in_no_time_uses_no_hit_once_a_load_was_measured(bench):
    conn, keys = stored(bench)
    conn.observe_prefill(10**9, 1e-3)
    for _ in range(-(-WARM_UP_LOADS // 4)):
        assert conn.lookup(keys) == Lookup(4, False)
        conn.wait([conn.load(keys, blocks_of(4, 5, 6, 7))], timeout_s=PATIENCE_S)
    assert conn.lookup(keys) == Lookup(0, False, slower=4)
    stats = conn.stats()
    assert stats.unused == {reasons.SLOWER: 4}
    assert stats.load_gate is not None
    assert stats.load_gate.prefill_tokens_per_s == pytest.approx(1e12)
    assert all(known is not None for known in [*stats.load_gate.load_interval_s.values(), stats.load_gate.copy_s])


def test_an_engine_that_takes_for_ever_uses_every_hit(bench):
    conn, keys = stored(bench)
    for _ in range(4):
        conn.observe_prefill(1, 1e6)
        conn.wait([conn.load(keys, blocks_of(4, 5, 6, 7))], timeout_s=PATIENCE_S)
        assert conn.lookup(keys) == Lookup(4, False)


def test_configured_rates_decide_and_null_switches_the_gate_off(bench):
    bench.double("fs")
    slow = {"type": "fs", "name": "fs", "root_dir": "unused", "load_bytes_per_s": 1}
    keys = [make_key(number) for number in range(4)]
    for gate, found in (({"prefill_tokens_per_s": 1000}, Lookup(0, False, slower=4)), (None, Lookup(4, False))):
        conn = bench.connect(slow, load_gate=gate)
        assert look_up(conn, keys).held == 0
        conn.wait([conn.store(keys, blocks_of(0, 1, 2, 3))], timeout_s=PATIENCE_S)
        assert conn.lookup(keys) == found
        bench.tiers["fs"].images.clear()


@pytest.mark.parametrize(("slots", "at_once"), [(32, 8), (8, 4)])
def test_a_read_that_hangs_is_seen_while_it_hangs(bench, slots, at_once):
    """As many as there are threads would hang with it, or as there are slots for the tier."""
    clock = Clock()
    conn, keys = stored(bench, clock=clock, slots=slots)
    conn.observe_prefill(4096, 0.4096)
    hold = bench.tiers["fs"].hold("load")
    job = conn.load(keys[:1], blocks_of(4))
    hold.wait_for(1)
    assert conn.lookup(keys).held == 4
    clock.advance(5.0)
    assert conn.lookup(keys).held == 4, "no report has come yet"
    conn.poll()
    assert conn.lookup(keys) == Lookup(0, False, slower=4)
    known = conn.stats().load_gate
    assert known is not None
    assert known.load_interval_s == {"fs": pytest.approx(5.0 / at_once)}
    hold.open()
    conn.wait([job], timeout_s=PATIENCE_S)
