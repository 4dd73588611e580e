"""Copies between KV blocks and slots, on one stream per direction, in order, timed by events.

    engine thread          copier thread                                  device
    compute_event() ─────▶ claim, wait(ready), record, copy, record ─────▶ ...
                           end passed? ─▶ on_copied

One thread issues all copies and watches their end events. On the CPU an issued copy is over when
the call returns; on a GPU it is over when its end event has passed. The code is the same.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kvsluice.connector.device import Device, Event, Stream

__all__ = ["JOIN_S", "Claim", "Copier", "CopyTask"]

_log = logging.getLogger(__name__)

JOIN_S = 0.25
"""What closing may take past its time: a thread that waits for work ends within a millisecond of being told,
yet not in no time, and only one that hangs is to be named."""

_POLL_S = 0.0002
"""How often unpassed end events are looked at: a tenth of what a 50 GB/s link needs for 100 MB."""


class Claim:
    """Who decides a piece of work: the first to take it, on whatever thread. Taken once, never given back."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for exactly one caller; never waits."""
        return self._lock.acquire(blocking=False)

    @property
    def taken(self) -> bool:
        return self._lock.locked()


class CopyTask(Protocol):
    """One chunk to copy between blocks and its slot."""

    ready: Event
    """The compute stream's event that the copy must come after."""
    claim: Claim
    block_ids: tuple[int, ...]

    @property
    def is_store(self) -> bool:
        """True for blocks to slot."""
        ...

    def prepare(self) -> None:
        """Whatever the copy needs that must not count as its time."""
        ...

    def copy(self) -> None:
        """Queue the copy on the current stream."""
        ...

    def on_copied(self, copy_s: float) -> None:
        """The copy is over. On the copier's thread."""
        ...

    def on_revoked(self) -> None:
        """Somebody else took the claim before the copy started. On the copier's thread."""
        ...

    def on_copy_failed(self, error: Exception) -> None:
        """The copy raised. On the copier's thread."""
        ...


class Copier:
    """The thread, its two queues (loads first) and its two streams.

    `put` may be called from any thread and never blocks; `fence` may wait for the device.
    """

    def __init__(self, device: Device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._out: Stream = device.new_stream()
        self._in: Stream = device.new_stream()
        self._loads: deque[CopyTask] = deque()
        self._stores: deque[CopyTask] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # All that was put and is neither over nor revoked, for `fence`; entries come and go atomically.
        self._live: dict[int, CopyTask] = {}
        self._flying: deque[tuple[CopyTask, Event, Event, Exception | None]] = deque()
        self._progress = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="kvsluice-copy", daemon=True)
        self._thread.start()

    def put(self, tasks: Iterable[CopyTask]) -> None:
        """Queue copies. Never blocks."""
        for task in tasks:
            self._live[id(task)] = task
            (self._stores if task.is_store else self._loads).append(task)
            self._wake.put(True)

    @property
    def busy(self) -> bool:
        """Whether any copy that was put is neither over nor revoked."""
        return bool(self._live)

    def fence(self, block_ids: frozenset[int], timeout_s: float) -> None:
        """Return once no copy that was put before touches any of `block_ids`.

        Raises:
            TimeoutError: the device was not done within `timeout_s`.
        """
        touching = [(at, task) for at, task in self._live.copy().items() if not block_ids.isdisjoint(task.block_ids)]
        end_s = self._clock() + timeout_s
        with self._progress:
            for at, task in touching:
                while self._live.get(at) is task:
                    left_s = end_s - self._clock()
                    if left_s <= 0:
                        raise TimeoutError(f"{len(touching)} copies touch the fenced blocks after {timeout_s} s")
                    self._progress.wait(left_s)

    def close(self, end_s: float) -> list[str]:
        """Finish what is queued, then stop; the thread's name where it hangs past `end_s`."""
        while self._live and self._clock() < end_s and self._thread.is_alive():
            time.sleep(0.001)
        self._closing = True
        self._wake.put(False)
        self._thread.join(max(JOIN_S, end_s - self._clock()))
        # What flies past the end is still in the device's hands, whether or not the thread has gone.
        return [self._thread.name] if self._thread.is_alive() or self._flying else []

    def shed(self) -> None:
        """After `close`: revoke what was put and never started."""
        while (task := self._take()) is not None:
            task.claim.take()
            self._over(task)
            task.on_revoked()

    def _serve(self) -> None:
        while not self._closing:
            try:
                self._wake.get(timeout=_POLL_S if self._flying else None)
            except queue.Empty:
                pass
            else:
                task = self._take()
                if task is not None:
                    self._issue(task)
            self._reap()

    def _take(self) -> CopyTask | None:
        for waiting in (self._loads, self._stores):
            with contextlib.suppress(IndexError):
                return waiting.popleft()
        return None

    def _issue(self, task: CopyTask) -> None:
        if not task.claim.take():
            self._over(task)
            task.on_revoked()
            return
        stream = self._out if task.is_store else self._in
        error = None
        try:
            task.prepare()
            with stream.use():
                stream.wait(task.ready)
                start = stream.record()
                try:
                    task.copy()
                except Exception as failure:  # noqa: BLE001 - torch raises what it likes; the thread must go on
                    # Part of it may be on the device: the blocks are free when that has passed, not now.
                    error = failure
                end = stream.record()
        except Exception as failure:  # noqa: BLE001 - as above
            self._failed(task, failure)
            return
        self._flying.append((task, start, end, error))

    def _reap(self) -> None:
        # Each direction's events pass in order, the two interleave: one that has not passed holds up no other.
        for _ in range(len(self._flying)):
            task, start, end, error = self._flying.popleft()
            copy_s = 0.0
            try:
                if not end.query():
                    self._flying.append((task, start, end, error))
                    continue
                copy_s = end.seconds_since(start)
            except Exception as failure:  # noqa: BLE001 - a device that fails asynchronously says so here
                error = error or failure
            if error is None:
                self._over(task)
                task.on_copied(copy_s)
            else:
                self._failed(task, error)

    def _failed(self, task: CopyTask, error: Exception) -> None:
        _log.error("a device copy failed; its job fails, the thread goes on", exc_info=error)
        self._over(task)
        task.on_copy_failed(error)

    def _over(self, task: CopyTask) -> None:
        with self._progress:
            del self._live[id(task)]
            self._progress.notify_all()
