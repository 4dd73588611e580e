"""The scheduler's half alone, on virtual time and with reports made by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench import blocks_of, make_key, one
from doubles import Clock

from kvsluice.connector.account import PlannedTier
from kvsluice.connector.orders import (
    CancelOrder,
    Copied,
    Ended,
    Evicted,
    Loaded,
    LoadOrder,
    Order,
    Passed,
    RankReport,
    ResetDone,
    ResetOrder,
    StoreOrder,
    TierState,
    WorkerEvent,
    Wrote,
)
from kvsluice.connector.planner import Planner, PlannerSettings
from kvsluice.connector.results import Lookup
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import BackpressureDetector, DropStorePolicy, Gate, Spent, Stall

KEYS = [make_key(number) for number in range(4096)]
CHUNK_BYTES = 512


class Detector(BackpressureDetector):
    """Lets through what the test says and notes what it is told."""

    def __init__(self) -> None:
        super().__init__(DropStorePolicy())
        self.shut = False
        self.refusing: list[bool] = []
        self.asked: list[int] = []
        self.completed: list[tuple[float, int]] = []
        self.in_flight: list[float] = []
        self.failures = 0

    def should_store(self, num_blocks: int) -> bool:
        self.asked.append(num_blocks)
        return not (self.refusing.pop(0) if self.refusing else self.shut)

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        self.completed.append((elapsed_s, num_bytes))

    def on_store_failed(self) -> None:
        self.failures += 1

    def on_store_in_flight(self, elapsed_s: float, num_bytes: int) -> None:
        self.in_flight.append(elapsed_s)

    def is_under_pressure(self) -> bool:
        return self.shut

    def reset(self) -> None:
        self.shut = False


class Bench:
    """A planner, its gates, and workers that answer as they are told."""

    def __init__(self, *tiers: str, ranks: int = 1, slots: int = 8, host_slots: int = 0, **settings: object) -> None:
        self.clock = Clock()
        self.gates = {name: Detector() for name in tiers}
        self.names = list(tiers)
        self.ranks = ranks
        limits = {key: settings.pop(key) for key in ("max_queue_chunks", "max_queue_s") if key in settings}
        self.planner = Planner(
            [PlannedTier(name, name, Gate(self.gates[name], clock=self.clock), **limits) for name in tiers],
            PlannerSettings(
                blocks_per_chunk=2,
                num_blocks=64,
                chunk_bytes=CHUNK_BYTES,
                slot_bytes=8192,
                num_slots=slots,
                host_slots=host_slots,
                num_ranks=ranks,
                **settings,
            ),
            clock=self.clock,
        )

    def orders(self) -> tuple[Order, ...]:
        return self.planner.take_orders()

    def report(self, *events: WorkerEvent, rank: int = 0, states: tuple[TierState, ...] = ()) -> None:
        self.planner.apply(RankReport(rank, events, states))
        self.planner.check_integrity()

    def finish_store(self, order: StoreOrder, reason: str | None = None, rank: int | None = None) -> None:
        """Have ranks (all if None) copy and write every part."""
        for at in range(self.ranks) if rank is None else [rank]:
            for part in order.parts:
                events: list[WorkerEvent] = []
                if part.block_ids:
                    events.append(Copied(order.job_id, part.part, None, 0.1))
                for tier in part.tiers:
                    size = 0 if reason else CHUNK_BYTES
                    events.append(Wrote(order.job_id, part.part, tier, reason, size, 0.2, Spent.alone(0.3)))
                self.report(*events, Ended(order.job_id, part.part), rank=at)

    def hold(self, *keys: bytes) -> None:
        """Store these chunks in every tier."""
        for key in keys:
            self.planner.store([key], blocks_of(0))
            for order in self.orders():
                self.finish_store(order)
        self.planner.take_results()
        self.planner.take_released()

    def finish_load(self, order: LoadOrder, tier: int, reason: str | None = None, rank: int = 0) -> None:
        for part in order.parts:
            size = 0 if reason else CHUNK_BYTES
            loaded = Loaded(order.job_id, part.part, tier, reason, size, 0.1, 0.2, 0.3)
            wrote = [
                Wrote(order.job_id, part.part, up, None, CHUNK_BYTES, 0.1, Spent.alone(0.1)) for up in part.copy_up
            ]
            self.report(loaded, *wrote, Ended(order.job_id, part.part), rank=rank)


@pytest.fixture(autouse=True)
def intact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every planner of the test is intact at its end."""
    made: list[Bench] = []
    real = Bench.__init__

    def note(bench: Bench, *tiers: str, **options: object) -> None:
        real(bench, *tiers, **options)
        made.append(bench)

    monkeypatch.setattr(Bench, "__init__", note)
    yield
    assert made
    for bench in made:
        bench.planner.check_integrity()


# ---- several ranks -----------------------------------------------------------------------------


def test_a_chunk_is_held_only_when_every_rank_has_written_its_part():
    bench = Bench("fs", ranks=2)
    bench.planner.store(KEYS[:1], [0, 1])
    [order] = bench.orders()
    bench.finish_store(order, rank=0)
    assert bench.planner.lookup(KEYS[:1]) == Lookup(0, False)
    assert bench.planner.take_results() == []
    assert bench.planner.take_released() == []
    bench.finish_store(order, rank=1)
    assert bench.planner.lookup(KEYS[:1]) == Lookup(1, False)
    result = one(bench.planner.take_results())
    assert result.bytes == 2 * CHUNK_BYTES
    assert result.copy_s == pytest.approx(0.2)
    assert bench.planner.take_released() == [1]


def test_host_memory_holds_a_chunk_only_when_every_rank_has_copied_it():
    bench = Bench("host", ranks=2, host_slots=4)
    bench.planner.store(KEYS[:1], [0, 1])
    [order] = bench.orders()
    bench.finish_store(order, rank=1)
    assert bench.planner.lookup(KEYS[:1]).held == 0
    bench.finish_store(order, rank=0)
    assert bench.planner.lookup(KEYS[:1]).held == 1


def test_one_rank_that_fails_its_write_means_not_held():
    bench = Bench("fs", ranks=2)
    bench.planner.store(KEYS[:1], [0, 1])
    [order] = bench.orders()
    bench.finish_store(order, reasons.IO_ERROR, rank=0)
    bench.finish_store(order, rank=1)
    assert bench.planner.lookup(KEYS[:1]).held == 0
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.IO_ERROR}
    assert bench.planner.stats().tiers["fs"].failed == {reasons.IO_ERROR: 1}


def test_one_rank_that_fails_its_copy_keeps_the_chunk_out_of_host_memory():
    bench = Bench("host", ranks=2, host_slots=4)
    bench.planner.store(KEYS[:1], [0, 1])
    bench.orders()
    bench.report(Copied(1, 0, reasons.INTERNAL, 0.0), Ended(1, 0), rank=0)
    bench.report(Copied(1, 0, None, 0.1), Ended(1, 0), rank=1)
    assert bench.planner.lookup(KEYS[:1]).held == 0
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.INTERNAL}
    assert bench.planner.stats().tiers["host"].chunks_stored == 0


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_that_misses_makes_the_load_a_miss_and_the_chunk_not_held(bad_rank):
    bench = Bench("fs", ranks=2)
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = bench.orders()
    for rank in range(2):
        if rank == bad_rank:
            missed = Loaded(order.job_id, 0, -1, reasons.CHECKSUM, 0, 0.0, 0.1, 0.1, ((0, reasons.CHECKSUM),))
            bench.report(missed, Passed(order.job_id, 0, 0), Ended(order.job_id, 0), rank=rank)
        else:
            bench.finish_load(order, 0, rank=rank)
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.CHECKSUM}
    assert bench.planner.lookup(KEYS[:1]).held == 0


def test_a_tier_that_served_some_ranks_only_does_not_count_as_holding_the_chunk():
    bench = Bench("fs", "obj", ranks=2)
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = bench.orders()
    fell_through = Loaded(order.job_id, 0, 1, None, CHUNK_BYTES, 0.1, 0.1, 0.1, ((0, reasons.MISSING),))
    bench.report(fell_through, Ended(order.job_id, 0), rank=0)
    bench.finish_load(order, 0, rank=1)
    assert one(bench.planner.take_results()).done_keys == (KEYS[0],)
    bench.report(Evicted(1, KEYS[0]))
    assert bench.planner.lookup(KEYS[:1]).held == 0, "fs lacks rank 0's part, obj has lost it"


def test_a_slot_is_free_only_when_every_rank_has_ended():
    bench = Bench("fs", ranks=2)
    bench.planner.store(KEYS[:1], [0, 1])
    [order] = bench.orders()
    bench.finish_store(order, rank=0)
    assert bench.planner.stats().pool.pinned == 1
    bench.finish_store(order, rank=1)
    assert bench.planner.stats().pool.pinned == 0


# ---- gates -------------------------------------------------------------------------------------


def test_each_gate_is_asked_once_per_chunk_with_its_blocks():
    bench = Bench("host", "fs", "obj", ranks=2, slots=32, host_slots=4)
    bench.planner.store(KEYS[:3], blocks_of(0, 1, 2))
    assert all(gate.asked == [2, 2, 2] for gate in bench.gates.values())
    bench.planner.store(KEYS[:3], blocks_of(0, 1, 2))
    for order in bench.orders():
        bench.finish_store(order)
    bench.planner.store(KEYS[:3], blocks_of(0, 1, 2))
    assert all(len(gate.asked) == 3 for gate in bench.gates.values()), "shared and held chunks ask nobody"


def test_a_chunk_that_the_host_gate_refuses_still_goes_to_the_next_tier():
    bench = Bench("host", "fs", host_slots=4)
    bench.gates["host"].shut = True
    bench.planner.store(KEYS[:1], [0, 1])
    [order] = bench.orders()
    assert [part.tiers for part in order.parts] == [(1,)]
    bench.finish_store(order)
    assert one(bench.planner.take_results()).done_keys == (KEYS[0],)
    assert bench.planner.stats().tiers["host"].dropped == {reasons.GATE: 1}
    assert bench.planner.stats().pool.held == 0


def test_a_chunk_that_every_gate_refuses_is_skipped_counted_and_released_at_once():
    bench = Bench("host", "fs", host_slots=4)
    for gate in bench.gates.values():
        gate.shut = True
    bench.planner.store(KEYS[:2], blocks_of(0, 1))
    assert bench.orders() == ()
    assert one(bench.planner.take_results()).failed == dict.fromkeys(KEYS[:2], reasons.GATE)
    assert bench.planner.take_released() == [1]
    stats = bench.planner.stats()
    assert stats.skipped == {reasons.GATE: 2}
    assert [tier.dropped for tier in stats.tiers.values()] == [{reasons.GATE: 2}] * 2
    assert stats.tiers["fs"].gate is not None
    assert stats.tiers["fs"].gate.dropped_stores == 2


def test_a_gate_learns_the_tiers_own_time_and_the_bytes_really_written():
    bench = Bench("host", "fs", host_slots=4)
    bench.hold(KEYS[0])
    assert bench.gates["fs"].completed == [(0.3, CHUNK_BYTES)]
    assert bench.gates["host"].completed == [(0.1, CHUNK_BYTES)]


def test_a_gate_learns_nothing_from_a_chunk_that_was_held_already_or_shed():
    bench = Bench("fs")
    bench.planner.store(KEYS[:3], blocks_of(0, 1, 2))
    bench.orders()
    bench.report(
        *(Copied(1, part, None, 0.1) for part in range(3)),
        Wrote(1, 0, 0, None, 0, 0.0, Spent.alone(0.001)),
        Wrote(1, 1, 0, reasons.QUEUE_TIMEOUT, 0, 6.0, Spent.alone(0.0)),
        Wrote(1, 2, 0, reasons.IO_ERROR, 0, 0.0, Spent.alone(0.1)),
        *(Ended(1, part) for part in range(3)),
    )
    assert bench.gates["fs"].completed == []
    assert bench.gates["fs"].failures == 1
    stats = bench.planner.stats().tiers["fs"]
    assert stats.chunks_already_held == 1
    assert stats.dropped == {reasons.QUEUE_TIMEOUT: 1}
    assert stats.failed == {reasons.IO_ERROR: 1}
    result = one(bench.planner.take_results())
    assert result.done_keys == (KEYS[0],)
    assert result.failed == {KEYS[1]: reasons.QUEUE_TIMEOUT, KEYS[2]: reasons.IO_ERROR}


def test_of_a_job_of_which_a_gate_lets_half_through_the_first_half_is_stored():
    bench = Bench("host", "fs", slots=32, host_slots=16)
    bench.gates["fs"].refusing = [False, True] * 4
    job = bench.planner.store(KEYS[:8], blocks_of(*range(8)))
    order = one(bench.orders())
    assert [part.tiers for part in order.parts] == [(1,)] * 4 + [()] * 4
    assert len(bench.gates["fs"].asked) == len(bench.gates["host"].asked) == 8
    assert bench.planner.stats().tiers["fs"].dropped == {reasons.GATE: 4}
    bench.finish_store(order)
    assert {result.job_id: result.failed for result in bench.planner.take_results()} == {job: {}}


def test_a_full_queue_refuses_without_asking_the_gate():
    bench = Bench("fs", max_queue_chunks=2)
    bench.planner.store(KEYS[:3], blocks_of(0, 1, 2))
    assert len(bench.gates["fs"].asked) == 2
    assert bench.planner.stats().tiers["fs"].dropped == {reasons.QUEUE_FULL: 1}


def test_a_store_that_could_not_start_in_time_at_the_measured_rate_takes_no_slot():
    bench = Bench("fs", slots=16, max_queue_s=1.0, max_queue_chunks=100)
    for number in range(4):
        bench.planner.store(KEYS[number : number + 1], blocks_of(number))
        bench.finish_store(one(bench.orders()))
    # 0.3 s from one store to the next: three before it are 0.9 s, four are too many.
    job = bench.planner.store(KEYS[10:16], blocks_of(*range(6)))
    stats = bench.planner.stats()
    assert stats.tiers["fs"].dropped == {reasons.QUEUE_SLOW: 2}
    assert stats.pool.pinned == 4
    assert len(bench.gates["fs"].asked) == 8
    bench.finish_store(one(bench.orders()))
    result = {result.job_id: result for result in bench.planner.take_results()}[job]
    assert dict(result.failed) == {KEYS[14]: reasons.QUEUE_SLOW, KEYS[15]: reasons.QUEUE_SLOW}


def test_a_stall_that_a_rank_reports_counts_in_the_expected_wait_until_one_comes_home():
    bench = Bench("fs", slots=8, max_queue_s=1.0, max_queue_chunks=100)
    bench.hold(KEYS[0])
    bench.planner.store(KEYS[1:3], blocks_of(0, 1))
    bench.report(states=(TierState(0, 0, 0, 2, Stall(4.0, 4.0, 3.0, 3.0), None, None),))
    bench.planner.store(KEYS[3:4], blocks_of(3))
    assert bench.planner.stats().tiers["fs"].dropped == {reasons.QUEUE_SLOW: 1}
    bench.report(states=(TierState(0, 0, 0, 2, Stall(), None, None),))
    bench.planner.store(KEYS[4:5], blocks_of(4))
    assert bench.planner.stats().tiers["fs"].dropped == {reasons.QUEUE_SLOW: 1}
    for order in bench.orders():
        bench.finish_store(order)


def test_the_rank_whose_stores_stall_longest_speaks_for_its_tier():
    bench = Bench("fs", ranks=2)
    bench.report(rank=0, states=(TierState(0, 0, 0, 1, Stall(9.0, 9.0, 9.0, 9.0), None, None),))
    bench.report(rank=1, states=(TierState(0, 0, 0, 1, Stall(), None, None),))
    bench.report(rank=0, states=(TierState(0, 0, 0, 1, Stall(), None, None),))
    assert bench.gates["fs"].in_flight == [9.0, 9.0, 0.0]


# ---- slots and shares --------------------------------------------------------------------------


def test_a_store_that_finds_no_slot_waits_and_is_then_shed_as_pool_full():
    bench = Bench("fs", slots=4, max_queue_s=5.0)
    job = bench.planner.store(KEYS[:6], blocks_of(*range(6)))
    assert bench.planner.stats().stores_waiting > 0
    waiting = bench.planner.stats().stores_waiting
    bench.clock.advance(4.9)
    bench.report()
    assert bench.planner.stats().stores_waiting == waiting
    bench.clock.advance(0.1)
    bench.report()
    stats = bench.planner.stats()
    assert stats.stores_waiting == 0
    assert stats.skipped == {reasons.POOL_FULL: waiting}
    assert stats.tiers["fs"].dropped == {reasons.POOL_FULL: waiting}
    for order in bench.orders():
        bench.finish_store(order)
    result = one(bench.planner.take_results())
    assert result.job_id == job
    assert len(result.failed) == waiting
    assert bench.planner.take_released() == [job]


def test_no_more_stores_wait_for_a_slot_than_are_allowed():
    bench = Bench("fs", slots=2, max_stores_waiting=3, max_queue_chunks=10_000)
    bench.planner.store(KEYS[:20], blocks_of(*range(20)))
    stats = bench.planner.stats()
    assert stats.stores_waiting <= 3
    assert stats.pool.pinned + stats.stores_waiting + sum(stats.skipped.values()) == 20


def test_stores_leave_a_slot_to_loads_in_the_middle_of_a_flood():
    bench = Bench("host", host_slots=4, slots=8)
    bench.planner.store(KEYS[:32], blocks_of(*range(32)))
    assert bench.planner.stats().pool.free == 2


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8, 24])
def test_a_dead_tier_keeps_at_most_its_share_and_the_other_goes_on(slots):
    bench = Bench("fs", "obj", slots=max(slots, 2), max_queue_chunks=10_000)
    stored = 0
    for number in range(100):
        bench.planner.store([KEYS[number]], blocks_of(number % 32))
        for order in bench.orders():
            for part in order.parts:
                # fs never answers; obj does at once.
                bench.report(Copied(order.job_id, part.part, None, 0.1))
                if 1 in part.tiers:
                    bench.report(Wrote(order.job_id, part.part, 1, None, CHUNK_BYTES, 0.0, Spent.alone(0.1)))
                    stored += 1
                if 0 not in part.tiers:
                    bench.report(Ended(order.job_id, part.part))
    assert stored == 100
    assert bench.planner.stats().pool.pinned <= max(1, slots // 3)


def test_a_store_that_only_a_dead_tier_wants_is_in_nobodys_way():
    bench = Bench("fs", "obj", slots=6)
    bench.gates["obj"].shut = True
    bench.planner.store(KEYS[:10], blocks_of(*range(10)))
    bench.gates["obj"].shut = False
    bench.orders()
    assert bench.planner.stats().stores_waiting > 0, "fs holds its share and never answers"
    bench.planner.store(KEYS[20:21], blocks_of(20))
    [order] = bench.orders()
    assert [part.tiers for part in order.parts] == [(1,)]
    assert bench.planner.stats().tiers["fs"].dropped == {reasons.SLOT_SHARE: 1}


def test_chunks_in_host_memory_that_a_dead_tier_wants_do_not_pin_more_than_its_share():
    bench = Bench("host", "fs", slots=16, host_slots=12)
    bench.gates["fs"].shut = True
    bench.hold(*KEYS[:12])
    bench.gates["fs"].shut = False
    bench.planner.store(KEYS[:12], blocks_of(*range(12)))
    stats = bench.planner.stats()
    assert stats.pool.pinned <= 8
    dropped = stats.tiers["fs"].dropped[reasons.SLOT_SHARE]
    assert stats.pool.pinned + dropped == 12
    for order in bench.orders():
        bench.finish_store(order)
    assert len(one(bench.planner.take_results()).done_keys) == 12, "host memory holds them all"


def test_a_load_that_goes_on_to_the_next_source_gives_its_share_of_the_first_back():
    bench = Bench("fs", "obj", slots=6)
    bench.planner.load(KEYS[:2], blocks_of(0, 1), None)
    [order] = bench.orders()
    assert [part.sources for part in order.parts] == [(0, 1), (0, 1)]
    bench.planner.load(KEYS[2:3], blocks_of(2), None)
    assert bench.planner.stats().loads_waiting == 1
    bench.report(Passed(order.job_id, 0, 0), Passed(order.job_id, 1, 0))
    [later] = bench.orders()
    assert [part.sources for part in later.parts] == [(0,)], "obj has its share of hung reads already"
    assert bench.planner.stats().tiers["obj"].missed == {reasons.SLOT_SHARE: 1}


def test_a_load_waits_for_a_slot_and_is_a_miss_at_its_deadline():
    bench = Bench("fs", slots=4)
    bench.hold(*KEYS[:4])
    first = bench.planner.load(KEYS[:2], blocks_of(0, 1), 100.0)
    late = bench.planner.load(KEYS[2:4], blocks_of(2, 3), 2.0)
    bench.clock.advance(2.0)
    bench.report()
    result = one(bench.planner.take_results())
    assert result.job_id == late
    assert result.failed == dict.fromkeys(KEYS[2:4], reasons.DEADLINE)
    assert bench.planner.stats().tiers["fs"].missed == {reasons.DEADLINE: 2}
    assert bench.planner.lookup(KEYS[2:4]).held == 0, "no retry loop"
    assert first != late


def test_the_deadline_that_workers_hear_counts_from_the_call():
    bench = Bench("fs")
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [0, 1], 8.0)
    bench.clock.advance(3.0)
    [order] = bench.orders()
    assert order.deadline_s == 5.0


def test_idle_chunks_give_way_to_new_ones_and_pinned_ones_never_do():
    bench = Bench("host", slots=5, host_slots=4)
    bench.hold(*KEYS[:4])
    bench.planner.load(KEYS[:1], [0, 1], None)
    [loading] = bench.orders()
    bench.hold(*KEYS[10:14])
    assert bench.planner.lookup(KEYS[:1]).held == 1
    for key in KEYS[1:4]:
        assert bench.planner.lookup([key]).held == 0
    bench.finish_load(loading, -1)
    bench.hold(*KEYS[20:24])
    assert bench.planner.lookup(KEYS[:1]).held == 0


def test_a_store_that_finds_all_of_host_memory_pinned_is_counted_as_dropped_not_as_stored():
    bench = Bench("host", slots=4, host_slots=1)
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [0, 1], None)
    [loading] = bench.orders()
    bench.planner.store(KEYS[1:2], [2, 3])
    [order] = bench.orders()
    bench.finish_store(order)
    result = one(bench.planner.take_results())
    assert result.failed == {KEYS[1]: reasons.POOL_FULL}
    assert result.bytes == 0
    stats = bench.planner.stats().tiers["host"]
    assert (stats.chunks_stored, stats.dropped) == (1, {reasons.POOL_FULL: 1})
    bench.finish_load(loading, -1)


def test_a_store_of_a_chunk_that_a_load_has_brought_into_host_memory_meanwhile_is_done():
    bench = Bench("host", "fs", host_slots=2)
    bench.gates["host"].shut = True
    bench.hold(KEYS[0])
    bench.gates["host"].shut = False
    bench.planner.load(KEYS[:1], [0, 1], None)
    [loading] = bench.orders()
    bench.planner.store(KEYS[:1], [2, 3])
    [storing] = bench.orders()
    bench.finish_load(loading, 1)
    bench.planner.take_results()
    bench.finish_store(storing)
    assert one(bench.planner.take_results()).done_keys == (KEYS[0],)
    assert bench.planner.stats().tiers["host"].chunks_already_held == 1


# ---- misses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason",
    [
        reasons.MISSING,
        reasons.SHORT,
        reasons.OVERSIZE,
        reasons.CHECKSUM,
        reasons.FOREIGN,
        reasons.HEADER,
        reasons.DEADLINE,
        reasons.IO_ERROR,
        reasons.INTERNAL,
    ],
)
def test_a_miss_is_counted_under_its_reason_and_the_next_lookup_does_not_say_held(reason):
    bench = Bench("fs")
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = bench.orders()
    bench.report(
        Loaded(order.job_id, 0, -1, reason, 0, 0.0, 0.1, 0.1, ((0, reason),)),
        Passed(order.job_id, 0, 0),
        Ended(order.job_id, 0),
    )
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reason}
    assert bench.planner.stats().tiers["fs"].missed == {reason: 1}
    assert bench.planner.lookup(KEYS[:1]) == Lookup(0, False)
    bench.planner.load(KEYS[:1], [4, 5], None)
    assert bench.orders() == (), "asked for again only when the answer has expired"
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.MISSING}
    assert bench.planner.stats().unused == {reasons.MISSING: 1}


def test_a_late_end_of_a_load_that_was_given_up_frees_its_slot_and_changes_nothing_else():
    bench = Bench("host", "fs", host_slots=2)
    bench.gates["host"].shut = True
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], 1.0)
    [order] = bench.orders()
    bench.report(Loaded(order.job_id, 0, -1, reasons.DEADLINE, 0, 0.0, 0.1, 0.0, ((1, reasons.DEADLINE),)))
    one(bench.planner.take_results())
    stats = bench.planner.stats()
    assert (stats.pool.pinned, stats.jobs_open) == (1, 0)
    assert not bench.planner.idle
    bench.report(Passed(order.job_id, 0, 1), Ended(order.job_id, 0))
    assert bench.planner.idle
    assert bench.planner.stats().pool.held == 0, "late bytes are not kept"
    assert bench.planner.take_results() == []


def test_a_chunk_that_the_tier_evicted_is_not_held_any_more():
    bench = Bench("fs")
    bench.hold(KEYS[0])
    bench.report(Evicted(0, KEYS[0]))
    assert bench.planner.lookup(KEYS[:1]).held == 0


def test_a_lookup_counts_leading_chunks_only():
    bench = Bench("fs")
    bench.hold(KEYS[0], KEYS[1], KEYS[3])
    assert bench.planner.lookup(KEYS[:4]) == Lookup(2, False)


def test_copy_up_asks_the_faster_tiers_gate_and_is_accounted_as_a_store_there():
    bench = Bench("fs", "obj", slots=16)
    bench.gates["fs"].shut = True
    bench.hold(KEYS[0], KEYS[1])
    bench.gates["fs"].shut = False
    asked = len(bench.gates["fs"].asked)
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = bench.orders()
    assert [part.copy_up for part in order.parts] == [(0,)]
    assert len(bench.gates["fs"].asked) == asked + 1
    bench.finish_load(order, 1)
    assert bench.planner.stats().tiers["fs"].chunks_stored == 1
    bench.gates["fs"].shut = True
    bench.planner.load(KEYS[1:2], [4, 5], None)
    [order] = bench.orders()
    assert [part.copy_up for part in order.parts] == [()]
    bench.finish_load(order, 1)


# ---- orders ------------------------------------------------------------------------------------


def test_loads_stand_before_stores_in_what_workers_hear():
    bench = Bench("fs", slots=16)
    bench.hold(KEYS[0])
    bench.planner.store(KEYS[1:2], [2, 3])
    bench.planner.load(KEYS[:1], [4, 5], None)
    assert [type(order) for order in bench.orders()] == [LoadOrder, StoreOrder]


def test_a_cancel_follows_the_orders_that_it_cancels():
    bench = Bench("fs", slots=16)
    job = bench.planner.store(KEYS[:1], [2, 3])
    bench.planner.cancel(job)
    assert [type(order) for order in bench.orders()] == [StoreOrder, CancelOrder]


def test_a_job_that_is_over_is_not_cancelled_again():
    bench = Bench("fs")
    job = bench.planner.store(KEYS[:1], [2, 3])
    [order] = bench.orders()
    bench.finish_store(order)
    bench.planner.cancel(job)
    assert bench.orders() == ()


def test_results_and_releases_are_given_once():
    bench = Bench("fs")
    job = bench.planner.store(KEYS[:1], [2, 3])
    [order] = bench.orders()
    bench.report(Copied(job, 0, None, 0.1))
    assert bench.planner.take_released() == [job]
    assert bench.planner.take_results() == []
    bench.report(Wrote(job, 0, 0, None, CHUNK_BYTES, 0.0, Spent.alone(0.1)), Ended(job, 0))
    assert bench.planner.take_released() == []
    assert one(bench.planner.take_results()).job_id == job
    assert bench.planner.take_results() == []
    assert order.job_id == job


# ---- reset -------------------------------------------------------------------------------------


def test_answers_to_an_earlier_reset_are_worthless():
    bench = Bench("fs", ranks=2)
    first = bench.planner.reset()
    second = bench.planner.reset()
    bench.report(ResetDone(first, 0, None), rank=0)
    bench.report(ResetDone(first, 0, None), rank=1)
    assert bench.planner.reset_outcome() is None
    bench.report(ResetDone(second, 0, None), rank=0)
    assert bench.planner.reset_outcome() is None
    bench.report(ResetDone(second, 0, None), rank=1)
    assert bench.planner.reset_outcome() == {}
    assert [type(order) for order in bench.orders()] == [ResetOrder, ResetOrder]


def test_one_rank_that_cannot_empty_a_tier_keeps_it_out_of_use():
    bench = Bench("fs", "obj", ranks=2)
    reset = bench.planner.reset()
    for rank, reason in enumerate([None, reasons.IO_ERROR]):
        bench.report(ResetDone(reset, 0, reason), ResetDone(reset, 1, None), rank=rank)
    assert bench.planner.reset_outcome() == {"fs": reasons.IO_ERROR}
    bench.planner.store(KEYS[:1], [0, 1])
    orders = [order for order in bench.orders() if isinstance(order, StoreOrder)]
    assert [part.tiers for part in one(orders).parts] == [(1,)]
    bench.finish_store(one(orders))


@pytest.mark.parametrize("when", ["waiting", "copying", "writing"])
def test_a_store_from_before_a_reset_is_never_held(when):
    bench = Bench("host", "fs", host_slots=4, slots=8)
    job = bench.planner.store(KEYS[:1], [0, 1])
    if when == "waiting":
        # Not yet taken: the order goes out before the reset's.
        reset = bench.planner.reset()
        order, _ = bench.orders()
    else:
        [order] = bench.orders()
        if when == "writing":
            bench.report(Copied(job, 0, None, 0.1))
        reset = bench.planner.reset()
        bench.orders()
    events: list[WorkerEvent] = [] if when == "writing" else [Copied(job, 0, None, 0.1)]
    bench.report(*events, Wrote(job, 0, 1, None, CHUNK_BYTES, 0.0, Spent.alone(0.1)), Ended(job, 0))
    bench.report(ResetDone(reset, 1, None))
    assert bench.planner.lookup(KEYS[:1]).held == 0
    result = one(bench.planner.take_results())
    assert result.failed == ({} if when == "writing" else {KEYS[0]: reasons.RESET})
    assert bench.planner.stats().pool.pinned == 0
    assert order.job_id == job


def test_a_write_from_before_a_reset_that_is_reported_after_it_is_not_held():
    bench = Bench("fs")
    job = bench.planner.store(KEYS[:1], [0, 1])
    bench.orders()
    reset = bench.planner.reset()
    bench.report(Copied(job, 0, None, 0.1), ResetDone(reset, 0, None))
    assert bench.planner.reset_outcome() == {}
    bench.report(Wrote(job, 0, 0, None, CHUNK_BYTES, 0.0, Spent.alone(0.1)), Ended(job, 0))
    assert bench.planner.lookup(KEYS[:1]).held == 0
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.RESET}


def test_a_load_that_ends_after_a_reset_is_a_miss_and_is_not_kept():
    bench = Bench("host", "fs", host_slots=4)
    bench.gates["host"].shut = True
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = bench.orders()
    reset = bench.planner.reset()
    bench.finish_load(order, 1)
    bench.report(ResetDone(reset, 1, None))
    assert one(bench.planner.take_results()).failed == {KEYS[0]: reasons.RESET}
    assert bench.planner.lookup(KEYS[:1]).held == 0
    assert bench.planner.stats().pool.held == 0


def test_what_waits_for_a_slot_is_shed_by_a_reset():
    bench = Bench("fs", slots=2)
    bench.planner.store(KEYS[:6], blocks_of(*range(6)))
    waiting = bench.planner.stats().stores_waiting
    assert waiting
    bench.planner.reset()
    assert bench.planner.stats().stores_waiting == 0
    assert bench.planner.stats().skipped == {reasons.RESET: waiting}


def test_a_chunk_of_host_memory_that_is_being_read_at_a_reset_is_freed_after_its_last_use():
    bench = Bench("host", host_slots=4)
    bench.hold(KEYS[0])
    bench.planner.load(KEYS[:1], [4, 5], None)
    [order] = [order for order in bench.orders() if isinstance(order, LoadOrder)]
    bench.planner.reset()
    stats = bench.planner.stats().pool
    assert (stats.held, stats.pinned) == (0, 1)
    bench.finish_load(order, -1)
    assert bench.planner.stats().pool.free == 8


# ---- bounds ------------------------------------------------------------------------------------


def test_what_the_planner_remembers_is_bounded_in_a_flood_that_no_worker_answers():
    bench = Bench("host", "fs", "obj", slots=16, host_slots=8, max_queue_chunks=64, max_stores_waiting=32)
    for number in range(2000):
        bench.planner.store([KEYS[number]], blocks_of(number % 32))
        bench.planner.take_results()
        bench.planner.take_released()
        bench.orders()
        bench.clock.advance(0.001)
    stats = bench.planner.stats()
    assert stats.stores_waiting <= 32
    assert stats.jobs_open <= 32 + 16
    assert stats.pool.pinned <= 12
    for tier in stats.tiers.values():
        assert sum(tier.dropped.values()) >= 2000 - 64


def test_counts_add_up_every_chunk_is_done_or_has_a_reason():
    bench = Bench("host", "fs", slots=6, host_slots=3, max_queue_chunks=5)
    done = failed = 0
    for number in range(500):
        bench.gates["host"].shut = number % 3 == 0
        bench.gates["fs"].shut = number % 5 == 0
        bench.planner.store([KEYS[number]], blocks_of(number % 32))
        if number % 4 == 0:
            for order in bench.orders():
                bench.finish_store(order, reasons.IO_ERROR if number % 7 == 0 else None)
    while orders := bench.orders():
        for order in orders:
            bench.finish_store(order)
    for result in bench.planner.take_results():
        done += len(result.done_keys)
        failed += len(result.failed)
        assert all(result.failed.values())
    assert done + failed == 500
    assert sorted(bench.planner.take_released()) == list(range(1, 501))
    stats = bench.planner.stats()
    assert stats.pool.pinned == 0
    for tier in stats.tiers.values():
        asked = tier.chunks_stored + tier.chunks_already_held + sum(tier.dropped.values()) + sum(tier.failed.values())
        assert asked == 500


def test_the_state_that_ranks_report_is_shown_as_the_worst_of_them():
    bench = Bench("fs", ranks=2)
    bench.report(rank=0, states=(TierState(0, 1, 2, 3, Stall(4.0, 4.0, 1.0, 1.0), 100, 1000, 2),))
    bench.report(rank=1, states=(TierState(0, 10, 20, 30, Stall(40.0, 40.0, 10.0, 10.0), 100, 1000, 3),))
    stats = bench.planner.stats().tiers["fs"]
    assert (stats.queued_loads, stats.queued_stores, stats.running) == (11, 22, 33)
    assert (stats.oldest_store_s, stats.used_bytes, stats.capacity_bytes) == (40.0, 100, 1000)
    assert stats.store_limit == 2


def test_what_a_tier_met_with_is_shown_by_kind_the_newest_word_of_each_rank_added_up():
    bench = Bench("fs", "obj", ranks=2)
    assert bench.planner.stats().tiers["obj"].failures == {}

    def state(**failures: int) -> tuple[TierState, ...]:
        return (TierState(1, 0, 0, 0, Stall(), None, None, failures=failures),)

    bench.report(rank=0, states=state(timeout=1))
    bench.report(rank=0, states=state(timeout=2, reset=1))
    bench.report(rank=1, states=state(timeout=40))
    shown = bench.planner.stats().tiers
    assert shown["obj"].failures == {"timeout": 42, "reset": 1}
    assert shown["fs"].failures == {}


def test_loads_that_hang_in_one_tier_leave_the_others_share_alone():
    bench = Bench("fs", "obj", slots=9)
    for key in KEYS[:3]:
        # Nothing is known of the keys, so both tiers are sources; the first one hangs.
        bench.planner.load([key], [0, 1], 1.0)
    for order in bench.orders():
        hung = Loaded(order.job_id, 0, -1, reasons.DEADLINE, 0, 0.0, 0.0, 0.0, ((0, reasons.DEADLINE),))
        bench.report(hung)
    bench.planner.load([KEYS[3]], [2, 3], 1.0)
    bench.planner.load([KEYS[0]], [4, 5], 1.0)
    sources = [part.sources for order in bench.orders() for part in order.parts]
    assert sources == [(1,)], "what the live tier can serve is sent to it"


def test_a_store_after_a_cancelled_one_of_its_key_does_not_share_its_fate():
    bench = Bench("fs")
    first = bench.planner.store(KEYS[:1], [0, 1])
    bench.planner.cancel(first)
    second = bench.planner.store(KEYS[:1], [2, 3])
    orders = [order for order in bench.orders() if hasattr(order, "parts")]
    assert [order.job_id for order in orders] == [first, second]
    bench.finish_store(orders[0], reasons.CANCELLED)
    bench.finish_store(orders[1])
    failed = {result.job_id: dict(result.failed) for result in bench.planner.take_results()}
    assert failed == {first: {KEYS[0]: reasons.CANCELLED}, second: {}}


def test_a_store_that_fails_on_several_ranks_is_one_failure_to_the_gate():
    bench = Bench("fs", ranks=3)
    bench.planner.store(KEYS[:1], [0, 1])
    bench.finish_store(one(bench.orders()), reasons.IO_ERROR)
    assert bench.gates["fs"].failures == 1
    assert bench.planner.stats().tiers["fs"].failed == {reasons.IO_ERROR: 3}
