"""Chunk after chunk without a pause: through movers, by one thread that does nothing else, and through a copier."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from kvsluice.connector.copier import MAX_FLYING, Claim, Copier
from kvsluice.kernels.device import Event
from kvsluice.kernels.movers import Mover, Submission
from kvsluice.kernels.operations import ChunkCopy, Direction

__all__ = ["PATIENCE_S", "ChunkTask", "CopierFlood", "Moved", "flood", "move_once"]

PATIENCE_S = 20.0
"""A device that is silent for so long is taken for hung."""
_PER_SUBMISSION = 2
"""Chunks. The connector's copier hands over what waits; with two it never has a chunk alone."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one flood moved.

    Attributes:
        num_bytes, chunks: payload, in all directions together.
        wall_s: from the first call to the moment when the last submission was seen to be over.
        device_s: between the events around all of it, where there is one direction; None for two, and where
            a copier had the events.
        call_s: of the thread that called the movers, in their calls alone.
    """

    num_bytes: int
    chunks: int
    wall_s: float
    device_s: float | None = None
    call_s: float | None = None

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.wall_s / 1e9

    @property
    def device_gb_per_s(self) -> float | None:
        return None if not self.device_s else self.num_bytes / self.device_s / 1e9

    @property
    def call_us_per_chunk(self) -> float | None:
        return None if self.call_s is None else self.call_s / self.chunks * 1e6


class _Feeder:
    """One direction: as many submissions under way as the connector's copier has."""

    def __init__(self, mover: Mover, copies: Sequence[ChunkCopy]) -> None:
        self._mover = mover
        self._copies = cycle(copies)
        self._flying: deque[Submission] = deque()
        self._count = min(_PER_SUBMISSION, mover.max_chunks, max(1, len(copies) // MAX_FLYING))
        self.first: Event | None = None
        self.last: Event | None = None
        self.chunks = 0
        self.num_bytes = 0
        self.call_s = 0.0

    def step(self, *, more: bool) -> bool:
        """Take back what is over and, where `more`, hand over the next; whether anything is under way."""
        while self._flying and self._flying[0].query():
            self._flying.popleft().release()
        while more and len(self._flying) < MAX_FLYING:
            copies = [next(self._copies) for _ in range(self._count)]
            started_s = time.perf_counter()
            submission = self._mover.submit((), copies)
            self.call_s += time.perf_counter() - started_s
            if submission.error is not None:
                raise submission.error
            self.first = self.first or submission.start
            self.last = submission.end
            self.chunks += len(copies)
            self.num_bytes += sum(len(chunk.host) for chunk in copies)
            self._flying.append(submission)
        return bool(self._flying)


def flood(movers: Mapping[Direction, Mover], copies: Mapping[Direction, Sequence[ChunkCopy]], seconds: float) -> Moved:
    """Move chunks for `seconds`, all directions at once, and wait until they are there.

    One thread calls the movers and looks at the events without a pause: what is measured is the device, as
    long as the calls take less time than the copies.

    Raises:
        TimeoutError: the device was silent for `PATIENCE_S`.
        Exception: what the mover or the device raised.
    """
    feeders = [_Feeder(mover, copies[direction]) for direction, mover in movers.items()]
    started_s = time.perf_counter()
    until_s = started_s + seconds
    while True:
        now_s = time.perf_counter()
        more = now_s < until_s or not feeders[0].chunks
        # Not any(): each of them is to have its turn.
        if not sum([feeder.step(more=more) for feeder in feeders]) and not more:
            break
        if now_s > until_s + PATIENCE_S:
            raise TimeoutError(f"the device was not done {PATIENCE_S:g} s after the last copy was queued")
    wall_s = time.perf_counter() - started_s
    device_s = None
    if len(feeders) == 1:
        first, last = feeders[0].first, feeders[0].last
        assert first is not None
        assert last is not None
        device_s = last.seconds_since(first)
    return Moved(
        num_bytes=sum(feeder.num_bytes for feeder in feeders),
        chunks=sum(feeder.chunks for feeder in feeders),
        wall_s=wall_s,
        device_s=device_s,
        call_s=sum(feeder.call_s for feeder in feeders),
    )


def move_once(mover: Mover, copies: Sequence[ChunkCopy], ready: Sequence[Event] = ()) -> None:
    """One submission, and wait until it is over.

    Raises:
        TimeoutError, Exception: as `flood`.
    """
    submission = mover.submit(ready, copies)
    until_s = time.perf_counter() + PATIENCE_S
    while not submission.query():
        if time.perf_counter() > until_s:
            raise TimeoutError(f"{mover.name}: the device was not done after {PATIENCE_S:g} s")
        time.sleep(0)
    submission.release()
    if submission.error is not None:
        raise submission.error


class ChunkTask:
    """A chunk for a copier; see `CopyTask`.

    Args:
        chunk: what is copied.
        is_store: True from blocks to the slot.
        ready: the compute stream's event that the copy comes after.
        on_over: told of the task once it is copied, revoked or failed, on the copier's thread.
        on_tensor: told of each tensor where they go one by one.

    Attributes:
        copied: whether the copier said that the copy is over; `error` and `revoked` are the other ends.
        copy_s: what the copier said that it took.
    """

    def __init__(
        self,
        chunk: ChunkCopy,
        *,
        is_store: bool,
        ready: Event,
        on_over: Callable[[ChunkTask], None],
        on_tensor: Callable[[int, Event], None] | None = None,
    ) -> None:
        self.chunk = chunk
        self.is_store = is_store
        self.ready = ready
        self.claim = Claim()
        self.block_ids = chunk.block_ids
        self.copied = False
        self.revoked = False
        self.copy_s = 0.0
        self.error: Exception | None = None
        self._on_over = on_over
        self._on_tensor = on_tensor

    def prepare(self) -> ChunkCopy:
        return self.chunk

    def on_tensor(self, number: int, event: Event) -> None:
        if self._on_tensor is not None:
            self._on_tensor(number, event)

    def on_copied(self, copy_s: float) -> None:
        self.copy_s = copy_s
        self.copied = True
        self._on_over(self)

    def on_revoked(self) -> None:
        self.revoked = True
        self._on_over(self)

    def on_copy_failed(self, error: Exception) -> None:
        self.error = error
        self._on_over(self)


class CopierFlood:
    """Chunks go round through a copier: each is put again as soon as it is over.

    Args:
        copier: the connector's own; its thread does all the work.
        copies: by direction, each chunk with a slot of its own; more than two submissions carry.
        ready: an event that has passed: an engine whose stream is full would hold the copies up.
    """

    def __init__(self, copier: Copier, copies: Mapping[Direction, Sequence[ChunkCopy]], ready: Event) -> None:
        self._copier = copier
        self._copies = copies
        self._ready = ready
        self._stopping = False
        self._under_way = 0
        self._idle = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self.num_bytes = 0
        """Copied so far; grows while it runs."""
        self.chunks = 0

    def run(self, seconds: float) -> Moved:
        """Move chunks for `seconds`, and wait until they are there.

        Raises:
            TimeoutError, Exception: as `flood`.
        """
        started_s = time.perf_counter()
        self.start()
        time.sleep(seconds)
        self.stop()
        return Moved(self.num_bytes, self.chunks, time.perf_counter() - started_s)

    def start(self) -> None:
        """Put all chunks."""
        self._stopping = False
        self._idle.clear()
        tasks = [self._task(chunk, direction) for direction, chunks in self._copies.items() for chunk in chunks]
        with self._lock:
            self._under_way = len(tasks)
        self._copier.put(tasks)

    def stop(self) -> None:
        """Put none again, and wait for those that are under way.

        Raises:
            TimeoutError, Exception: as `flood`.
        """
        self._stopping = True
        if not self._idle.wait(PATIENCE_S):
            raise TimeoutError(f"the copier was not done after {PATIENCE_S:g} s")
        if self._error is not None:
            raise self._error

    def _task(self, chunk: ChunkCopy, direction: Direction) -> ChunkTask:
        return ChunkTask(chunk, is_store=direction == "out", ready=self._ready, on_over=self._over)

    def _over(self, task: ChunkTask) -> None:
        self._error = self._error or task.error
        self.num_bytes += len(task.chunk.host)
        self.chunks += 1
        if self._stopping or self._error is not None:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.set()
        else:
            self._copier.put([self._task(task.chunk, "out" if task.is_store else "in")])
