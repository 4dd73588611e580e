"""One rank's half alone: orders in, reports out."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from bench import SLOT_BYTES, WIDTH, Cache, blocks_of, make_key
from doubles import Clock, MemoryTier, until

from kvsluice.connector import worker as worker_module
from kvsluice.connector.orders import (
    CancelOrder,
    Copied,
    Ended,
    Evicted,
    Loaded,
    LoadOrder,
    LoadPart,
    Passed,
    RankReport,
    ResetDone,
    ResetOrder,
    StoreOrder,
    StorePart,
    WorkerEvent,
    Wrote,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.transfers import LoadTransfer
from kvsluice.connector.worker import RankWorker, WorkerTier
from kvsluice.tiers import reasons
from kvsluice.tiers.chunk_file import ChunkFormat, stored_key

WAIT_S = 20.0
KEYS = [make_key(number) for number in range(64)]


class Rank:
    """A worker over the small cache and doubles, and all events it has reported."""

    def __init__(self, tiers: Sequence[str], clock: Clock, rank: int = 0, slots: int = 8) -> None:
        self.cache = Cache()
        self.doubles = [MemoryTier(name) for name in tiers]
        self.fmt = ChunkFormat(
            self.cache.layout.chunk_tensors(WIDTH), namespace="ab12", num_tokens=8, rank=rank, num_ranks=rank + 1
        )
        assert self.fmt.slot_bytes == SLOT_BYTES
        self.region = PinnedRegion(slots, SLOT_BYTES, device=self.cache.layout.device, pin="auto")
        self.worker = RankWorker(
            self.cache.layout,
            self.fmt,
            self.region,
            [WorkerTier(at, double, 1, 1, 5.0) for at, double in enumerate(self.doubles)],
            blocks_per_chunk=WIDTH,
            rank=rank,
            clock=clock,
        )
        self.events: list[WorkerEvent] = []
        self.last: RankReport = self.worker.collect()

    def collect(self) -> None:
        self.last = pickle.loads(pickle.dumps(self.worker.collect()))
        self.events.extend(self.last.events)

    def until_ended(self, count: int = 1) -> None:
        until(self.collect, lambda: sum(isinstance(event, Ended) for event in self.events) >= count)

    def store(self, *keys: bytes, first_slot: int = 0, tiers: tuple[int, ...] = (0,)) -> None:
        """Put these chunks into the tiers, chunk n from blocks of chunk n."""
        parts = [StorePart(at, key, tuple(blocks_of(at)), first_slot + at, tiers) for at, key in enumerate(keys)]
        self.worker.submit([StoreOrder(1, tuple(parts))])
        self.until_ended(len(keys))
        self.events.clear()

    def load(self, job: int = 2, **changes: object) -> LoadOrder:
        part = {"part": 0, "key": KEYS[0], "block_ids": (10, 11), "slot": 7, "sources": (0,), "copy_up": ()}
        return LoadOrder(job, (LoadPart(**{**part, **changes}),), 10.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_rank(clock: Clock) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(*tiers: str, **options: object) -> Rank:
        made.append(Rank(tiers, clock, **options))
        return made[-1]

    yield make
    for rank in made:
        for double in rank.doubles:
            double.open_all()
        until(lambda: None, lambda rank=rank: not any(queue.busy for queue in rank.worker._queues.values()))  # noqa: SLF001
        assert rank.worker.close(0.0) == []
        assert rank.worker.close(0.0) == []


def test_a_store_reports_its_copy_then_each_write_then_its_end(make_rank):
    rank = make_rank("fs", "obj")
    rank.worker.submit([StoreOrder(1, (StorePart(0, KEYS[0], (0, 1), 3, (0, 1)),))])
    rank.until_ended()
    assert isinstance(rank.events[0], Copied)
    assert sorted(event.tier for event in rank.events[1:3] if isinstance(event, Wrote)) == [0, 1]
    assert rank.events[3] == Ended(1, 0)
    assert all(event.num_bytes == rank.fmt.file_bytes for event in rank.events[1:3])
    assert rank.doubles[0].images == rank.doubles[1].images


def test_a_part_is_named_after_its_rank_in_the_tier(make_rank):
    ranks = [make_rank("fs", rank=at) for at in range(2)]
    for rank in ranks:
        rank.store(KEYS[0])
    names = [next(iter(rank.doubles[0].images)) for rank in ranks]
    assert names == [stored_key(KEYS[0], 0, 0), stored_key(KEYS[0], 0, 1)]


def test_a_part_of_another_rank_is_foreign(make_rank):
    ranks = [make_rank("fs", rank=at) for at in range(2)]
    ranks[0].store(KEYS[0])
    ranks[1].doubles[0].images[stored_key(KEYS[0], 0, 1)] = ranks[0].doubles[0].images[stored_key(KEYS[0], 0, 0)]
    ranks[1].worker.submit([ranks[1].load()])
    ranks[1].until_ended()
    [loaded] = [event for event in ranks[1].events if isinstance(event, Loaded)]
    assert loaded.reason in (reasons.FOREIGN, reasons.HEADER)


def test_a_load_leaves_the_blocks_it_is_told_to_skip(make_rank):
    rank = make_rank("fs")
    rank.store(KEYS[0])
    rank.cache.blank()
    rank.worker.submit([rank.load(skip_blocks=1)])
    rank.until_ended()
    assert rank.cache.is_blank([10])
    assert rank.cache.holds([11], [1])


def test_a_load_that_falls_through_says_where_it_missed_and_passes_on(make_rank):
    rank = make_rank("fs", "obj")
    rank.store(KEYS[0], tiers=(1,))
    rank.worker.submit([rank.load(sources=(0, 1))])
    rank.until_ended()
    assert rank.events[0] == Passed(2, 0, 0)
    loaded = rank.events[1]
    assert isinstance(loaded, Loaded)
    assert (loaded.tier, loaded.reason, loaded.misses) == (1, None, ((0, reasons.MISSING),))


def test_what_was_read_is_written_to_the_tiers_above_byte_for_byte(make_rank):
    rank = make_rank("fs", "obj")
    rank.store(KEYS[0], tiers=(1,))
    rank.worker.submit([rank.load(sources=(1,), copy_up=(0,))])
    rank.until_ended()
    assert [type(event) for event in rank.events] == [Loaded, Wrote, Ended]
    assert rank.doubles[0].images == rank.doubles[1].images


def test_a_fence_of_blocks_that_were_loaded_leaves_the_writes_above_alone(make_rank):
    rank = make_rank("fs", "obj")
    rank.store(KEYS[0], tiers=(1,))
    hold = rank.doubles[0].hold("store")
    rank.worker.submit([StoreOrder(5, (StorePart(0, KEYS[9], (4, 5), 3, (0,)),))])
    hold.wait_for()
    rank.worker.submit([rank.load(sources=(1,), copy_up=(0,))])
    until(rank.collect, lambda: any(isinstance(event, Loaded) for event in rank.events))
    until(rank.collect, lambda: rank.last.tiers[0].queued_stores == 1)
    rank.worker.fence([10, 11])
    hold.open()
    rank.until_ended(2)
    assert [event.reason for event in rank.events if isinstance(event, Wrote)] == [None, None]


def test_the_end_of_a_load_never_overtakes_its_outcome(make_rank, monkeypatch):
    rank = make_rank("fs")
    rank.store(KEYS[0])
    hold = rank.doubles[0].hold("load")
    real = LoadTransfer._report  # noqa: SLF001 - the moment between a claim and its report
    idle = rank.worker._queues[0]  # noqa: SLF001

    def late(transfer: LoadTransfer, *args: object) -> None:
        # The tier's thread sees the claim taken, gives up and leaves before the outcome is told.
        hold.open()
        until(lambda: None, lambda: not idle.busy and not rank.worker._copier.busy)  # noqa: SLF001
        real(transfer, *args)

    monkeypatch.setattr(LoadTransfer, "_report", late)
    rank.worker.submit([rank.load()])
    hold.wait_for()
    rank.worker.submit([CancelOrder(2)])
    rank.until_ended()
    assert [type(event) for event in rank.events] == [Loaded, Ended]
    assert rank.events[0].reason == reasons.CANCELLED


@pytest.mark.parametrize("source", ["held", "missing", "damaged", "cancelled", "late", "fenced"])
def test_each_part_ends_exactly_once_whatever_becomes_of_it(make_rank, clock, source):
    rank = make_rank("fs", "obj")
    rank.store(KEYS[0])
    if source == "missing":
        rank.doubles[0].images.clear()
    if source == "damaged":
        rank.doubles[0].spoil(lambda image: image[:-1] + b"?")
    hold = rank.doubles[0].hold("load")
    rank.worker.submit([rank.load(copy_up=(1,))])
    hold.wait_for()
    if source == "cancelled":
        rank.worker.submit([CancelOrder(2), CancelOrder(2)])
    if source == "late":
        clock.advance(10.0)
        rank.collect()
    if source == "fenced":
        rank.worker.fence([11])
    hold.open()
    until(rank.collect, lambda: any(isinstance(event, Ended) for event in rank.events))
    for _ in range(3):
        rank.collect()
    counts = {kind: sum(isinstance(event, kind) for event in rank.events) for kind in (Loaded, Wrote, Ended)}
    assert counts == {Loaded: 1, Wrote: 1, Ended: 1}
    [loaded] = [event for event in rank.events if isinstance(event, Loaded)]
    expected = {
        "held": None,
        "missing": reasons.MISSING,
        "damaged": reasons.CHECKSUM,
        "cancelled": reasons.CANCELLED,
        "late": reasons.DEADLINE,
        "fenced": reasons.FENCED,
    }
    assert loaded.reason == expected[source]


def test_spared_parts_of_a_cancelled_job_go_on(make_rank):
    rank = make_rank("fs")
    hold = rank.doubles[0].hold("store")
    parts = [StorePart(at, KEYS[at], tuple(blocks_of(at)), at, (0,)) for at in range(3)]
    rank.worker.submit([StoreOrder(1, tuple(parts))])
    hold.wait_for()
    until(rank.collect, lambda: rank.last.tiers[0].queued_stores == 2)
    rank.worker.submit([CancelOrder(1, spared=(1,))])
    hold.open()
    rank.until_ended(3)
    outcomes = {event.part: event.reason for event in rank.events if isinstance(event, Wrote)}
    assert outcomes == {0: None, 1: None, 2: reasons.CANCELLED}


def test_a_reset_sheds_what_waits_empties_the_tiers_and_answers_once_for_each(make_rank):
    rank = make_rank("fs", "obj")
    rank.store(KEYS[5], tiers=(0, 1))
    hold = rank.doubles[0].hold("store")
    parts = [StorePart(at, KEYS[at], tuple(blocks_of(at)), at, (0,)) for at in range(3)]
    rank.worker.submit([StoreOrder(4, tuple(parts))])
    hold.wait_for()
    until(rank.collect, lambda: rank.last.tiers[0].queued_stores == 2)
    rank.worker.submit([ResetOrder(1)])
    until(rank.collect, lambda: ResetDone(1, 1, None) in rank.events)
    assert ResetDone(1, 0, None) not in rank.events, "a store still runs in fs"
    hold.open()
    until(rank.collect, lambda: ResetDone(1, 0, None) in rank.events)
    assert [len(double.images) for double in rank.doubles] == [0, 0]
    outcomes = {event.part: event.reason for event in rank.events if isinstance(event, Wrote)}
    assert outcomes == {0: None, 1: reasons.RESET, 2: reasons.RESET}
    rank.until_ended(3)


def test_a_tiers_evictions_are_reported_under_the_engines_key(make_rank):
    rank = make_rank("fs")
    rank.store(KEYS[0])
    rank.doubles[0].evict(stored_key(KEYS[0], 0, 0))
    rank.collect()
    assert rank.events == [Evicted(0, KEYS[0])]


def test_a_report_is_bounded_and_says_when_there_is_more(make_rank, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_EVENTS_PER_REPORT", 2)
    rank = make_rank("fs")
    parts = [StorePart(at, KEYS[at], tuple(blocks_of(at)), at, (0,)) for at in range(4)]
    rank.worker.submit([StoreOrder(1, tuple(parts))])
    until(lambda: None, lambda: len(rank.worker._shared.events) == 12)  # noqa: SLF001 - all of it is there
    more = []
    for _ in range(6):
        rank.collect()
        assert len(rank.last.events) == 2
        more.append(rank.last.more)
    assert more == [True] * 5 + [False]


def test_the_copies_of_one_submission_come_after_all_that_the_engine_queued(make_rank, monkeypatch):
    rank = make_rank("fs")
    taken = []
    device = rank.worker._device  # noqa: SLF001
    real = device.compute_event
    monkeypatch.setattr(device, "compute_event", lambda: taken.append(threading.current_thread()) or real())
    rank.store(KEYS[0], KEYS[1])
    assert taken == [threading.current_thread()]


def test_a_read_that_ends_after_close_writes_no_block(make_rank):
    rank = make_rank("fs")
    rank.store(KEYS[0])
    rank.cache.blank()
    hold = rank.doubles[0].hold("load")
    rank.worker.submit([rank.load()])
    hold.wait_for()
    closed: list[str] = []
    thread = threading.Thread(target=lambda: closed.extend(rank.worker.close(0.0)))
    thread.start()
    thread.join(WAIT_S)
    assert len(closed) == 1
    rank.collect()
    assert [event.reason for event in rank.events if isinstance(event, Loaded)] == [reasons.CLOSED]
    hold.open()
    until(lambda: None, lambda: not rank.worker._queues[0].state().running)  # noqa: SLF001
    assert rank.cache.is_blank(range(32))
    rank.worker._closed = ()  # noqa: SLF001 - the thread has come home since


def test_a_region_gives_each_slot_its_own_aligned_bytes():
    region = PinnedRegion(3, SLOT_BYTES, device=Cache().layout.device, pin="auto")
    for slot in range(3):
        region.tensor(slot).fill_(slot + 1)
        assert region.tensor(slot).data_ptr() % 4096 == 0
    assert [region.view(slot)[-1] for slot in range(3)] == [1, 2, 3]
    region.close()
    region.close()


def test_touching_a_slot_twice_leaves_what_it_holds():
    region = PinnedRegion(1, SLOT_BYTES, device=Cache().layout.device, pin="off")
    region.touch(0)
    region.tensor(0).fill_(7)
    region.touch(0)
    assert bool((region.tensor(0) == 7).all())


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 8192), (-1, 8192), (1, 4097)])
def test_a_region_of_no_slots_or_of_odd_ones_is_refused(slots, slot_bytes):
    with pytest.raises(ValueError, match=str(slots if slots < 1 else slot_bytes)):
        PinnedRegion(slots, slot_bytes, device=Cache().layout.device, pin="off")
