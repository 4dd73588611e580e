"""A planner with its load gate, and a tier on virtual time that serves what it orders.

One event after the other, without threads: what the tier takes is said by the test, and what the
worker would measure is measured by the worker's own `Traffic`.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from bench import make_key
from doubles import Clock

from kvsluice.connector import OffloadConnector
from kvsluice.connector.account import PlannedTier
from kvsluice.connector.load_gate import LoadGate, LoadTier
from kvsluice.connector.orders import (
    CancelOrder,
    Ended,
    Loaded,
    LoadOrder,
    LoadPart,
    RankReport,
    StoreOrder,
    TierState,
    WorkerEvent,
)
from kvsluice.connector.planner import Planner, PlannerSettings
from kvsluice.connector.prober import Answer
from kvsluice.connector.results import Lookup, TransferResult
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Operation, Spent, Stall, Traffic

TOKENS = 256
"""Per chunk."""
WIDTH = 8
"""Loads that the tier serves at once."""
CHUNK_BYTES = 512
STEP_S = 0.005
"""How often the planner hears from its worker."""
HUNG = math.inf

Serve = Callable[[float], float]
"""From the time at which a read starts to the time at which it ends."""


class KnowingProber:
    """Answers at once and without asking: what each tier holds is said by the test."""

    def __init__(self) -> None:
        self.held: defaultdict[int, set[bytes]] = defaultdict(set)
        self._answers: list[Answer] = []

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        held = next((at for at, key in enumerate(keys) if key not in self.held[tier]), len(keys))
        self._answers.append(Answer(0, tier, keys, held, None))
        return True

    def answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def listed(self) -> None:
        """Nothing is listed here."""

    def forget(self) -> None:
        self._answers.clear()


def look_up(planner: Planner | OffloadConnector, keys: Sequence[bytes]) -> Lookup:
    """What it says when nothing is pending any more."""
    found = planner.lookup(keys)
    while found.pending:
        found = planner.lookup(keys)
    return found


class Device:
    """A tier that takes `chunk_s` for each chunk, one after the other: bandwidth alone."""

    def __init__(self, clock: Clock, chunk_s: float) -> None:
        self._clock = clock
        self._chunk_s = chunk_s
        self._free_s = 0.0

    @property
    def chunk_s(self) -> float:
        return self._chunk_s

    @chunk_s.setter
    def chunk_s(self, chunk_s: float) -> None:
        if self._chunk_s == HUNG:
            self._free_s = self._clock()
        self._chunk_s = chunk_s

    def __call__(self, start_s: float) -> float:
        self._free_s = max(start_s, self._free_s) + self._chunk_s
        return self._free_s


class Distance:
    """A tier that takes `latency_s` for each chunk, however many come at once."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def __call__(self, start_s: float) -> float:
        return start_s + self.latency_s


class _Read:
    def __init__(self, job_id: int, part: LoadPart, put_s: float, expires_s: float) -> None:
        self.job_id = job_id
        self.part = part
        self.put_s = put_s
        self.expires_s = expires_s
        self.decided = False
        self.operation: Operation | None = None
        self.queue_s = 0.0


class World:
    """The planner, its tier `fs` (the first of the ladder), and the time.

    Args:
        serve: what a read takes.
        gate: off with None; by default an engine that nobody has told of yet.
    """

    def __init__(
        self,
        serve: Serve | None = None,
        *,
        gate: bool = True,
        margin: float = 1.0,
        prefill_tokens_per_s: float | None = None,
        interval_s: float | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.clock = Clock()
        self.device = Device(self.clock, 0.002)
        self._serve = self.device if serve is None else serve
        self._prober = KnowingProber()
        load_gate = LoadGate(
            {0: LoadTier("fs", WIDTH, interval_s)},
            tokens_per_chunk=TOKENS,
            prefill_tokens_per_s=prefill_tokens_per_s,
            margin=margin,
        )
        self.planner = Planner(
            [PlannedTier("fs", "fs", None)],
            PlannerSettings(
                blocks_per_chunk=1,
                num_blocks=4096,
                chunk_bytes=CHUNK_BYTES,
                slot_bytes=8192,
                num_slots=256,
                host_slots=0,
                load_timeout_s=timeout_s,
                # A chunk that came too late is asked for again at once.
                negative_ttl_s=1e-9,
            ),
            prober=self._prober,
            load_gate=load_gate if gate else None,
            clock=self.clock,
        )
        self._traffic = Traffic(self.clock)
        self._queue: deque[_Read] = deque()
        self._running: list[tuple[float, int, _Read]] = []
        self._hung: list[_Read] = []
        self._open: list[_Read] = []
        self._events: list[WorkerEvent] = []
        self._started = 0
        self.keys: list[bytes] = []
        self.results: list[TransferResult] = []
        self.chunks_read = 0
        self.gone: set[bytes] = set()
        """Chunks of which the tier finds, when it is to read them, that it holds them no more."""

    # ---- what a test does ----------------------------------------------------------------------

    def hold(self, count: int) -> None:
        """The tier holds this many chunks more."""
        first = len(self.keys)
        self.keys += [make_key(first + at) for at in range(count)]
        self._prober.held[0].update(self.keys)

    def prefill(self, tokens_per_s: float = 10_000.0, num_tokens: int = 4096) -> None:
        """The engine tells of a step."""
        self.planner.observe_prefill(num_tokens, num_tokens / tokens_per_s)

    def lookup(self, count: int | None = None, first: int = 0) -> Lookup:
        return look_up(self.planner, self.keys[first : len(self.keys) if count is None else first + count])

    def load(self, count: int, first: int = 0, deadline_s: float | None = None) -> int:
        """Load that many chunks, without waiting."""
        job = self.planner.load(self.keys[first : first + count], list(range(count)), deadline_s)
        self._exchange()
        return job

    def request(self, count: int | None = None, first: int = 0) -> Lookup:
        """Look up, load what is offered, and wait for it as an engine does."""
        found = self.lookup(count, first)
        if found.held:
            job = self.load(found.held, first)
            self.run_until(lambda: not self.planner.is_open(job))
        return found

    def run(self, seconds: float) -> None:
        end_s = self.clock() + seconds
        while self.clock() < end_s - 1e-9:
            self._step(min(STEP_S, end_s - self.clock()))

    def run_until(self, done: Callable[[], bool], limit_s: float = 100.0) -> None:
        end_s = self.clock() + limit_s
        while not done():
            assert self.clock() < end_s, "nothing came of it"
            self._step(STEP_S)

    def unhang(self) -> None:
        """Reads that hang end now, each after the other."""
        for read in self._hung:
            self._push(self._serve(self.clock()), read)
        self._hung.clear()

    @property
    def open_loads(self) -> int:
        return sum(not read.decided for read in self._open)

    # ---- the worker ----------------------------------------------------------------------------

    def _step(self, seconds: float) -> None:
        end_s = self.clock() + seconds
        while self._running and self._running[0][0] <= end_s:
            at_s, _, read = heapq.heappop(self._running)
            self.clock.now_s = max(self.clock.now_s, at_s)
            self._finish(read)
            self._start()
        self.clock.now_s = end_s
        for read in self._open:
            if not read.decided and read.expires_s <= end_s:
                self._decide(read, reasons.DEADLINE)
        self._exchange()

    def _exchange(self) -> None:
        for order in self.planner.take_orders():
            assert not isinstance(order, StoreOrder)
            if isinstance(order, CancelOrder):
                for read in self._open:
                    if read.job_id == order.job_id and not read.decided:
                        self._decide(read, reasons.CANCELLED)
            elif isinstance(order, LoadOrder):
                now_s = self.clock()
                for part in order.parts:
                    read = _Read(order.job_id, part, now_s, now_s + order.deadline_s)
                    self._open.append(read)
                    self._queue.append(read)
        self._start()
        self._open = [read for read in self._open if not read.decided]
        events, self._events = tuple(self._events), []
        running = len(self._running) + len(self._hung)
        state = TierState(0, len(self._queue), 0, running, Stall(), None, None, 0, self._traffic.load_stall())
        self.planner.apply(RankReport(0, events, (state,)))
        self.planner.check_integrity()
        self.results += self.planner.take_results()

    def _start(self) -> None:
        while self._queue and len(self._running) + len(self._hung) < WIDTH:
            read = self._queue.popleft()
            if read.decided:
                self._events.append(Ended(read.job_id, read.part.part))
                continue
            read.operation = self._traffic.start(is_store=False)
            read.queue_s = self.clock() - read.put_s
            if read.part.key in self.gone:
                self._traffic.finish(read.operation)
                self._decide(read, reasons.MISSING)
                self._events.append(Ended(read.job_id, read.part.part))
                continue
            self.chunks_read += 1
            end_s = self._serve(self.clock())
            if end_s == HUNG:
                self._hung.append(read)
            else:
                self._push(end_s, read)

    def _push(self, end_s: float, read: _Read) -> None:
        self._started += 1
        heapq.heappush(self._running, (end_s, self._started, read))

    def _finish(self, read: _Read) -> None:
        assert read.operation is not None
        spent = self._traffic.finish(read.operation)
        if not read.decided:
            self._decide(read, None, spent)
        self._events.append(Ended(read.job_id, read.part.part))

    def _decide(self, read: _Read, reason: str | None, spent: Spent | None = None) -> None:
        read.decided = True
        missed = ((0, reason),) if reason in (reasons.DEADLINE, reasons.MISSING) else ()
        num_bytes, served_by = (CHUNK_BYTES, 0) if reason is None else (0, -1)
        tier_s, drain_s = (0.0, 0.0) if spent is None else (spent.elapsed_s, spent.drain_s)
        self._events.append(
            Loaded(
                read.job_id,
                read.part.part,
                served_by,
                reason,
                num_bytes,
                1e-6,
                read.queue_s,
                tier_s,
                missed,
                drain_s,
            )
        )
