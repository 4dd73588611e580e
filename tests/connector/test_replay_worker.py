"""The modelled worker and its virtual threads do what the real ones do; the modelled tier what a tier does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from bench import SLOT_BYTES, WIDTH, Cache, make_key
from doubles import Clock, MemoryTier, until

from kvsluice.connector.lane import Lane
from kvsluice.connector.orders import (
    CancelOrder,
    Copied,
    Ended,
    Evicted,
    Loaded,
    LoadOrder,
    LoadPart,
    Order,
    Passed,
    StoreOrder,
    StorePart,
    WorkerEvent,
    Wrote,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.replay.device import Device, DeviceSpec, SlowTime
from kvsluice.connector.replay.threads import FifoLane, VirtualThreads
from kvsluice.connector.replay.tier import ModelledProber, ModelledTier, TierContent
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.transfers import ModelledRung
from kvsluice.connector.replay.worker import ModelledWorker
from kvsluice.connector.worker import RankWorker, WorkerTier
from kvsluice.tiers import reasons
from kvsluice.tiers.chunk_file import ChunkFormat, stored_key

CHUNK = 1000
KEYS = [make_key(number) for number in range(8)]
BLOCKS = (0, 1)


def word(event: WorkerEvent) -> tuple[object, ...]:
    """What an event says, times and bytes aside."""
    match event:
        case Copied():
            return "copied", event.part, event.reason
        case Wrote():
            return "wrote", event.part, event.tier, event.reason, event.num_bytes > 0, event.started
        case Loaded():
            return "loaded", event.part, event.tier, event.reason, event.num_bytes > 0, event.misses
        case Passed():
            return "passed", event.part, event.tier
        case Ended():
            return "ended", event.part
    raise AssertionError(event)


def words(events: Sequence[WorkerEvent]) -> list[tuple[object, ...]]:
    """Of events in order; two tiers are written by threads of their own, in either order."""
    said = [word(event) for event in events]
    for at in range(1, len(said)):
        if said[at - 1][0] == said[at][0] == "wrote" and said[at][2] < said[at - 1][2]:
            said[at - 1], said[at] = said[at], said[at - 1]
    return said


class Modelled:
    """A modelled worker over modelled tiers, one reader and one writer each."""

    def __init__(self, num_tiers: int, *, max_queue_s: float = 5.0, capacity_bytes: int | None = None) -> None:
        self.timeline = Timeline()
        self.contents = [
            TierContent(CHUNK, capacity_bytes=capacity_bytes, clock=self.timeline) for _ in range(num_tiers)
        ]
        self.devices = [Device(DeviceSpec(1000.0), self.timeline) for _ in range(num_tiers)]
        self.rungs = {
            at: ModelledRung(
                ModelledTier(content, device, CHUNK),
                VirtualThreads(Lane(None, self.timeline), read_threads=1, write_threads=1, clock=self.timeline),
                max_queue_s,
            )
            for at, (content, device) in enumerate(zip(self.contents, self.devices, strict=True))
        }
        self.worker = ModelledWorker(
            self.timeline,
            self.rungs,
            chunk_bytes=CHUNK,
            copy_bytes_per_s=10_000.0,
            on_decided=lambda *told: None,
        )

    def run(self, order: Order) -> list[WorkerEvent]:
        self.worker.submit([order])
        self.timeline.run()
        return list(self.worker.collect().events)


class Real:
    """A rank worker over tiers in memory."""

    def __init__(self, num_tiers: int) -> None:
        cache = Cache()
        self.tiers = [MemoryTier(f"t{at}") for at in range(num_tiers)]
        fmt = ChunkFormat(cache.layout.chunk_tensors(WIDTH), namespace="ab12", num_tokens=8)
        region = PinnedRegion(8, SLOT_BYTES, device=cache.layout.device, pin="off")
        rungs = [WorkerTier(at, tier, 1, 1, 5.0) for at, tier in enumerate(self.tiers)]
        self.worker = RankWorker(cache.layout, fmt, region, rungs, blocks_per_chunk=WIDTH, clock=Clock())

    def run(self, order: Order) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        self.worker.submit([order])
        until(
            lambda: events.extend(self.worker.collect().events),
            lambda: sum(isinstance(event, Ended) for event in events) == len(order.parts),
        )
        return events


@pytest.fixture
def real() -> Iterator[Real]:
    made = Real(2)
    yield made
    assert made.worker.close(5.0) == []


def store(*tiers: int, key: int = 0, blocks: tuple[int, ...] = BLOCKS) -> StoreOrder:
    return StoreOrder(1, (StorePart(0, KEYS[key], blocks, 0, tiers),))


def load(*sources: int, key: int = 0, copy_up: tuple[int, ...] = ()) -> LoadOrder:
    return LoadOrder(2, (LoadPart(0, KEYS[key], BLOCKS, 1, sources, copy_up),), 10.0)


@pytest.mark.parametrize(
    "orders",
    [
        [store(0)],
        [store(0, 1)],
        [store()],
        [store(0), store(0)],
        [store(0), load(0)],
        [store(1), load(1, copy_up=(0,)), load(0)],
        [store(1), load(0, 1)],
        [load(0)],
        [load(0, 1, copy_up=())],
        [load(1, copy_up=(0,))],
        [store(0), StoreOrder(3, (StorePart(0, KEYS[0], (), 0, (1,)),)), load(1)],
        [store(0), load()],
    ],
    ids=lambda orders: " then ".join(type(order).__name__[:5].lower() for order in orders),
)
def test_every_order_is_answered_with_the_events_of_the_rank_worker(real, orders):
    modelled = Modelled(2)
    for order in orders:
        assert words(modelled.run(order)) == words(real.run(order))
    for content, tier in zip(modelled.contents, real.tiers, strict=True):
        assert [content.holds(key) for key in KEYS] == [stored_key(key, 0, 0) in tier.images for key in KEYS]
    assert modelled.worker.idle


def test_a_chunk_is_held_from_the_end_of_its_write_on():
    modelled = Modelled(1)
    held: list[bool] = []
    for moment_s in (0.05, 1.05, 1.15):
        modelled.timeline.at(moment_s, lambda: held.append(modelled.contents[0].holds(KEYS[0])))
    events = modelled.run(store(0))
    assert held == [False, False, True]
    [wrote] = [event for event in events if isinstance(event, Wrote)]
    # 0.1 s of copy, then 1000 bytes at 1000 bytes/s.
    assert (wrote.queue_s, wrote.spent.elapsed_s) == pytest.approx((0.0, 1.0))


def test_loads_go_before_stores_that_wait():
    modelled = Modelled(1)
    modelled.run(store(0))
    parts = tuple(StorePart(at, KEYS[at + 1], BLOCKS, at, (0,)) for at in range(3))
    modelled.worker.submit([StoreOrder(3, parts)])
    # A second load finds the reader busy and takes the writer when it is free, before the other stores.
    loads = tuple(LoadPart(at, KEYS[0], BLOCKS, 4 + at, (0,), ()) for at in range(2))
    modelled.timeline.after(0.5, lambda: modelled.worker.submit([LoadOrder(4, loads, 10.0)]))
    modelled.timeline.run()
    order = [
        (type(event).__name__, event.part)
        for event in modelled.worker.collect().events
        if isinstance(event, (Wrote, Loaded))
    ]
    assert order == [("Wrote", 0), ("Loaded", 0), ("Loaded", 1), ("Wrote", 1), ("Wrote", 2)]


def test_a_load_past_its_deadline_is_a_miss_although_its_read_still_hangs():
    modelled = Modelled(1)
    modelled.run(store(0))
    device = Device(DeviceSpec(1000.0, slow=(SlowTime(0.0, 100.0, 0.0),)), modelled.timeline)
    modelled.rungs[0].tier._device = device  # noqa: SLF001 - the device is replaced by one that hangs
    modelled.worker.submit([load(0)])
    modelled.timeline.at(12.0, lambda: reported.extend(modelled.worker.collect().events))
    reported: list[WorkerEvent] = []
    modelled.timeline.run()
    assert [word(event) for event in reported] == [("loaded", 0, -1, reasons.DEADLINE, False, ((0, reasons.DEADLINE),))]
    assert [word(event) for event in modelled.worker.collect().events][-1] == ("ended", 0)


def test_a_store_that_waited_too_long_is_shed_and_one_that_runs_is_finished():
    modelled = Modelled(1, max_queue_s=0.5)
    parts = tuple(StorePart(at, KEYS[at], BLOCKS, at, (0,)) for at in range(2))
    modelled.worker.submit([StoreOrder(1, parts)])
    reported: list[WorkerEvent] = []
    modelled.timeline.at(0.9, lambda: reported.extend(modelled.worker.collect().events))
    modelled.timeline.run()
    assert ("wrote", 1, 0, reasons.QUEUE_TIMEOUT, False, False) in words(reported)
    assert ("wrote", 0, 0, None, True, True) in words(modelled.worker.collect().events)


def test_what_a_cancel_finds_waiting_is_shed():
    modelled = Modelled(1)
    parts = tuple(StorePart(at, KEYS[at], BLOCKS, at, (0,)) for at in range(2))
    modelled.worker.submit([StoreOrder(1, parts), CancelOrder(1)])
    modelled.timeline.run()
    said = words(modelled.worker.collect().events)
    # The first copy had started; what it would have been written by had not.
    assert ("copied", 0, None) in said
    assert ("copied", 1, reasons.CANCELLED) in said
    assert [entry[3] for entry in said if entry[0] == "wrote"] == [reasons.CANCELLED] * 2


def test_one_queue_serves_in_order_of_arrival_whatever_it_is():
    timeline = Timeline()
    lane = FifoLane(timeline)
    threads = VirtualThreads(lane, read_threads=0, write_threads=1, clock=timeline)
    log: list[str] = []

    class Task:
        put_s = 0.0
        job_id = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, start_s: float) -> None:
            log.append(f"{self.name} {start_s}")
            timeline.after(1.0, self.over)

    for at, put in enumerate((threads.put_store, threads.put_store, threads.put_load, threads.put_store)):
        put(Task(str(at)))
    assert (lane.state().queued_loads, lane.state().queued_stores, lane.state().running) == (1, 2, 1)
    assert lane.busy
    timeline.run()
    assert log == ["0 0.0", "1 1.0", "2 2.0", "3 3.0"]
    assert not lane.busy


def test_a_thousand_tasks_that_are_over_at_once_are_no_recursion():
    timeline = Timeline()
    threads = VirtualThreads(Lane(None, timeline), read_threads=1, write_threads=1, clock=timeline)
    ran: list[float] = []

    class Task:
        put_s = 0.0
        job_id = 1

        def __init__(self, lasts_s: float) -> None:
            self.lasts_s = lasts_s

        def run(self, start_s: float) -> None:
            ran.append(start_s)
            if self.lasts_s:
                timeline.after(self.lasts_s, self.over)
            else:
                self.over()

    for lasts_s in (1.0, *([0.0] * 5000)):
        threads.put_store(Task(lasts_s))
    timeline.run()
    assert len(ran) == 5001


# ---- content and questions -------------------------------------------------------------------


def filled(capacity_chunks: int, keys: int) -> tuple[TierContent, Clock, list[bytes]]:
    clock = Clock()
    content = TierContent(CHUNK, capacity_bytes=capacity_chunks * CHUNK, clock=clock)
    names = [b"%03d" % at for at in range(keys)]
    for name in names:
        clock.advance(1.0)
        assert content.reserve()
        assert content.keep(name) == (True, [])
    return content, clock, names


def test_a_full_tier_drops_the_coldest_down_to_the_low_mark():
    content, _, names = filled(10, 10)
    content.note_hit(names[0])
    assert content.reserve()
    is_new, evicted = content.keep(b"new")
    assert is_new
    assert evicted == names[1:3]
    assert content.used_bytes == 9 * CHUNK
    assert content.holds(names[0])


def test_a_chunk_that_two_writers_bring_is_kept_once():
    content, _, _ = filled(10, 0)
    assert content.reserve()
    assert content.reserve()
    assert content.keep(b"twice") == (True, [])
    assert content.keep(b"twice") == (False, [])
    assert content.used_bytes == CHUNK
    assert content.chunks_written == 1


def test_a_tier_that_cannot_evict_in_time_refuses():
    content, _, _ = filled(10, 0)
    reserved = 0
    while content.reserve():
        reserved += 1
    assert reserved == 12


def test_only_who_evicts_is_told():
    timeline = Timeline()
    content = TierContent(CHUNK, capacity_bytes=2 * CHUNK, clock=timeline)
    device = Device(DeviceSpec(1000.0), timeline)
    mine, theirs = ModelledTier(content, device, CHUNK), ModelledTier(content, device, CHUNK)
    for at, tier in enumerate((mine, mine, theirs)):
        timeline.at(2.0 * at, lambda at=at, tier=tier: tier.store(KEYS[at], lambda num_bytes, reason: None))
    timeline.run()
    assert mine.take_evicted(10) == []
    assert theirs.take_evicted(10) == [KEYS[0], KEYS[1]]


def test_a_worker_reports_what_its_tier_evicted():
    modelled = Modelled(1, capacity_bytes=CHUNK)
    modelled.run(store(0))
    assert Evicted(0, KEYS[0]) in modelled.run(store(0, key=1))


def prober(max_waiting: int = 64) -> tuple[Timeline, ModelledProber, TierContent]:
    timeline = Timeline()
    content = TierContent(CHUNK, clock=timeline)
    device = Device(DeviceSpec(1000.0, operation_s=0.01), timeline)
    for key in KEYS[:2]:
        content.reserve()
        content.keep(key)
    return timeline, ModelledProber({0: content}, {0: device}, timeline, max_waiting=max_waiting), content


def test_questions_are_answered_one_after_another_each_after_its_time():
    timeline, asked, _ = prober()
    assert asked.ask(0, tuple(KEYS[:4]))
    assert asked.ask(0, (KEYS[3],))
    seen: list[tuple[float, list[int]]] = []
    for moment_s in (0.005, 0.015, 0.025):
        timeline.at(moment_s, lambda: seen.append((timeline(), [answer.held for answer in asked.answers()])))
    timeline.run()
    assert seen == [(0.005, []), (0.015, [2]), (0.025, [0])]


def test_too_many_questions_are_refused():
    timeline, asked, _ = prober(max_waiting=2)
    assert [asked.ask(0, (key,)) for key in KEYS[:3]] == [True, True, False]
    timeline.run()
    assert len(asked.answers()) == 2
    assert asked.ask(0, (KEYS[0],))


def test_what_was_asked_before_a_reset_is_not_answered():
    timeline, asked, _ = prober()
    asked.ask(0, (KEYS[0],))
    asked.forget()
    asked.ask(0, (KEYS[1],))
    timeline.run()
    assert [answer.keys for answer in asked.answers()] == [(KEYS[1],)]
