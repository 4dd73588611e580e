"""An engine's loads and stores at given rates, and what became of each of them.

One thread plays the engine. Batches of loads and of stores come at random (Poisson) times that are
drawn before, so every run with one seed sees the same, and a load's time counts from when it should
have been asked for. A store that is offered is looked up once, `reuse_s` later: that is its hit.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduling_path import key, layout
from slowed_device_mount import SlowedDevice
from slowed_device_server import Counters

from kvsluice.connector import KVLayout, OffloadConnector, TransferResult

BLOCKS_PER_CHUNK = 32
"""Of `scheduling_path.layout`, which makes chunks of 1 MiB."""
CHUNK_BYTES = BLOCKS_PER_CHUNK * 32768
_SOURCES = 8
"""Chunks of the cache that stores take turns to read."""
_STEP_S = 0.001
_FIRST_OFFERED = 1_000_000


@dataclass(frozen=True)
class Demand:
    """What is asked for.

    Attributes:
        loads_per_s, stores_per_s: chunks, on average.
        load_batch, store_batch: chunks that are asked for at once.
        prepared: chunks that lie in the tier and are loaded, each as likely as the other.
        reuse_s: from the offer of a store to the lookup of its chunk.
        deadline_s: of a load.
        seed: of all that is random.
    """

    loads_per_s: float
    stores_per_s: float
    load_batch: int = 2
    store_batch: int = 4
    prepared: int = 64
    reuse_s: float = 5.0
    deadline_s: float = 5.0
    seed: int = 1


@dataclass(frozen=True)
class Window:
    """Seconds since the start of a run: `warm_s` that do not count, then `counted_s` that do."""

    warm_s: float
    counted_s: float

    def __contains__(self, at_s: float) -> bool:
        return self.warm_s <= at_s < self.warm_s + self.counted_s


@dataclass(frozen=True)
class Hang:
    """Of the device, in seconds since the start of a run."""

    begin_s: float
    end_s: float


@dataclass
class Record:
    """Everything that happened in one run; times in seconds since its start.

    Attributes:
        loads: when each batch should have been asked for, how long it took, and the chunks that missed.
        missed: chunks that missed, by reason.
        offered: when each store was offered.
        admitted: when each store was offered that was not refused at once.
        stored: when each store was known to be done.
        dropped: when each store was known to be dropped or failed, and why.
        open_stores, open_loads: jobs of which nothing was heard within the patience after the run.
        reused: when each lookup was due, and whether it hit.
        device_begin, device_end: the device's counters at the ends of the window.
        window_s: how long the window really was.
    """

    loads: list[tuple[float, float, int]] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    offered: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    dropped: list[tuple[float, str]] = field(default_factory=list)
    open_stores: int = 0
    open_loads: int = 0
    reused: list[tuple[float, bool]] = field(default_factory=list)
    device_begin: Counters = field(default_factory=Counters)
    device_end: Counters = field(default_factory=Counters)
    window_s: float = 0.0


def num_targets(demand: Demand) -> int:
    """Chunks of the cache that loads may be under way into at once."""
    return int((demand.deadline_s + 2.0) * demand.loads_per_s) + 8 * demand.load_batch


def cache(demand: Demand) -> KVLayout:
    """What `Engine` stores from and loads into."""
    return layout((_SOURCES + num_targets(demand)) * BLOCKS_PER_CHUNK)


def prepared_keys(demand: Demand) -> list[bytes]:
    return [key(number) for number in range(demand.prepared)]


def source_blocks(number: int) -> list[int]:
    first = number % _SOURCES * BLOCKS_PER_CHUNK
    return list(range(first, first + BLOCKS_PER_CHUNK))


def target_blocks(place: int) -> list[int]:
    first = (_SOURCES + place) * BLOCKS_PER_CHUNK
    return list(range(first, first + BLOCKS_PER_CHUNK))


def arrivals(chunks_per_s: float, batch: int, seed: int) -> Iterator[float]:
    """Times at which batches come, for ever; none where the rate is 0."""
    chance = random.Random(seed)
    at_s = 0.0
    while chunks_per_s > 0.0:
        at_s += chance.expovariate(chunks_per_s / batch)
        yield at_s


class Engine:
    """Asks `conn` for what `demand` says and writes down what comes back. One run each."""

    def __init__(self, conn: OffloadConnector, device: SlowedDevice, demand: Demand) -> None:
        self._conn = conn
        self._device = device
        self._demand = demand
        self._record = Record()
        self._chance = random.Random(demand.seed)
        self._prepared = prepared_keys(demand)
        self._free = deque(range(num_targets(demand)))
        self._waiting: deque[float] = deque()
        self._loading: dict[int, tuple[float, list[int]]] = {}
        self._storing: set[int] = set()
        self._to_reuse: deque[tuple[float, bytes]] = deque()
        self._offers = 0
        self._start_s = 0.0

    def run(self, window: Window, hang: Hang | None = None, *, patience_s: float = 20.0) -> Record:
        """Ask for the window's length, then wait up to `patience_s` for what is under way."""
        demand = self._demand
        loads = arrivals(demand.loads_per_s, demand.load_batch, demand.seed)
        stores = arrivals(demand.stores_per_s, demand.store_batch, demand.seed + 1)
        next_load_s, next_store_s = next(loads, None), next(stores, None)
        begun_s = ended_s = None
        events = deque([] if hang is None else [(hang.begin_s, self._device.hang), (hang.end_s, self._device.resume)])
        self._start_s = time.monotonic()
        while ended_s is None:
            now_s = self._now_s()
            if begun_s is None and now_s >= window.warm_s:
                self._record.device_begin, begun_s = self._device.counters(), now_s
            if now_s >= window.warm_s + window.counted_s:
                self._record.device_end, ended_s = self._device.counters(), now_s
                break
            while events and events[0][0] <= now_s:
                events.popleft()[1]()
            while next_load_s is not None and next_load_s <= now_s:
                self._waiting.append(next_load_s)
                next_load_s = next(loads)
            while next_store_s is not None and next_store_s <= now_s:
                self._offer()
                next_store_s = next(stores)
            self._step()
            time.sleep(_STEP_S)
        self._record.window_s = ended_s - (begun_s or 0.0)
        for _, event in events:
            event()
        while (self._storing or self._loading or self._waiting) and self._now_s() < ended_s + patience_s:
            self._step()
            time.sleep(_STEP_S)
        self._record.open_stores = len(self._storing)
        self._record.open_loads = len(self._loading) + len(self._waiting)
        return self._record

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _step(self) -> None:
        self._take_results()
        while self._waiting and len(self._free) >= self._demand.load_batch:
            self._load(self._waiting.popleft())
        self._look_up()
        self._conn.poll_released()

    def _load(self, due_s: float) -> None:
        demand = self._demand
        keys = self._chance.sample(self._prepared, demand.load_batch)
        places = [self._free.popleft() for _ in keys]
        blocks = [block for place in places for block in target_blocks(place)]
        # What it has already waited for blocks counts against its deadline.
        left_s = max(_STEP_S, due_s + demand.deadline_s - self._now_s())
        self._loading[self._conn.load(keys, blocks, deadline_s=left_s)] = (due_s, places)

    def _offer(self) -> None:
        now_s = self._now_s()
        begun = []
        for _ in range(self._demand.store_batch):
            name = key(_FIRST_OFFERED + self._offers)
            job = self._conn.store([name], source_blocks(self._offers))
            self._offers += 1
            begun.append(job)
            self._record.offered.append(now_s)
            self._to_reuse.append((now_s + self._demand.reuse_s, name))
        self._storing.update(begun)
        # A refusal is known at once, an end never so soon.
        self._take_results()
        self._record.admitted += [now_s for job in begun if job in self._storing]

    def _take_results(self) -> None:
        results = self._conn.poll()
        now_s = self._now_s()
        for result in results:
            if result.kind == "load":
                self._loaded(result, now_s)
            elif result.job_id in self._storing:
                self._storing.remove(result.job_id)
                for reason in result.failed.values():
                    self._record.dropped.append((now_s, reason))
                self._record.stored += [now_s] * len(result.done_keys)

    def _loaded(self, result: TransferResult, now_s: float) -> None:
        due_s, places = self._loading.pop(result.job_id)
        self._free.extend(places)
        self._record.loads.append((due_s, now_s - due_s, len(result.failed)))
        self._record.missed.update(result.failed.values())

    def _look_up(self) -> None:
        now_s = self._now_s()
        again = []
        while self._to_reuse and self._to_reuse[0][0] <= now_s:
            due_s, name = self._to_reuse.popleft()
            answer = self._conn.lookup([name])
            if answer.pending:
                again.append((due_s, name))
            else:
                self._record.reused.append((due_s, answer.held == 1))
        self._to_reuse.extendleft(reversed(again))
