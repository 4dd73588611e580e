"""The thread that copies between KV blocks and slots: what is copied when, and what is told of it.

    engine thread          copier thread                                       device
    compute_event() ─────▶ claim, a mover's submission of several chunks ─────▶ ...
                           its end passed? ─▶ on_copied, of each chunk

One thread issues all copies and watches their end events. How bytes move is a mover's affair (see
`kvsluice.kernels.movers`). On the CPU an issued copy is over when the call returns; on a GPU it is over
when its end event has passed. The code is the same.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvsluice.kernels.device import Device, Event
from kvsluice.kernels.movers import Mover, OnTensor, Submission
from kvsluice.kernels.operations import ChunkCopy

__all__ = ["JOIN_S", "Claim", "Copier", "CopyTask"]

_log = logging.getLogger(__name__)

JOIN_S = 0.25
"""What closing may take past its time: a thread that waits for work ends within a millisecond of being told,
yet not in no time, and only one that hangs is to be named."""

_POLL_S = 0.0002
"""How often unpassed end events are looked at: a tenth of what a 50 GB/s link needs for 100 MB."""

MAX_FLYING = 2
"""Submissions of one direction in the device's hands: the second keeps the link busy while the first is reaped.
What comes meanwhile waits here, where it can be revoked, and goes out together."""


_EXIT_S = 1.0
"""What a copier that nobody closed gets when the interpreter ends."""

_ABANDONED: list[Copier] = []
"""Copiers whose copies the device had not finished when they were closed, for the life of the process."""


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

    def prepare(self) -> ChunkCopy:
        """What to copy, after all that must not count as the copy's time."""
        ...

    def on_tensor(self, number: int, event: Event) -> None:
        """A tensor is in the blocks once `event` has passed; told where tensors are copied one by one."""
        ...

    def on_copied(self, copy_s: float) -> None:
        """The device is done. On the copier's thread, as are all of these."""
        ...

    def on_revoked(self) -> None:
        """Somebody else took the claim before the copy started."""
        ...

    def on_copy_failed(self, error: Exception) -> None:
        """The copy raised."""
        ...


@dataclass(frozen=True, slots=True)
class _Lot:
    """Tasks that go out together, tensor by tensor; or one that goes out with whatever else waits."""

    tasks: tuple[CopyTask, ...]
    by_tensor: bool = False


class _Direction:
    """What waits and what is under way in one direction."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.waiting: deque[_Lot] = deque()
        self.flying: deque[tuple[list[tuple[CopyTask, float]], Submission]] = deque()


class Copier:
    """The thread and its two queues, loads first.

    `put` may be called from any thread and never blocks; `fence` may wait for the device.

    Args:
        device: the movers' device.
        out, into: move chunks to slots and to blocks; the copier's thread alone uses them.
        clock: seconds, monotonic.

    Raises:
        Exception: what the device raised when the thread was bound to it.
    """

    def __init__(self, device: Device, out: Mover, into: Mover, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._device = device
        self._out = _Direction(out)
        self._in = _Direction(into)
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # All that was put and is neither over nor revoked, for `fence`; entries come and go atomically.
        self._live: dict[int, CopyTask] = {}
        self._progress = threading.Condition()
        self._closing = False
        self._bound = threading.Event()
        self._unbound: Exception | None = None
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvsluice-copy", daemon=True)
        self._thread.start()
        self._bound.wait()
        if self._unbound is not None:
            raise self._unbound
        # A thread that is inside torch when the interpreter goes may take the process down with it.
        self._at_exit = partial(_stop, weakref.ref(self))
        atexit.register(self._at_exit)

    def put(self, tasks: Iterable[CopyTask]) -> None:
        """Queue copies. Never blocks."""
        for task in tasks:
            self._live[id(task)] = task
            (self._out if task.is_store else self._in).waiting.append(_Lot((task,)))
        self._wake.put(True)

    def put_by_tensor(self, tasks: Sequence[CopyTask]) -> None:
        """Queue loads that are copied together, each tensor of all before the next. Never blocks."""
        for task in tasks:
            self._live[id(task)] = task
        if tasks:
            self._in.waiting.append(_Lot(tuple(tasks), by_tensor=True))
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
        atexit.unregister(self._at_exit)
        self._stop(max(0.0, end_s - self._clock()))
        if not (self._thread.is_alive() or self._out.flying or self._in.flying):
            return []
        # What flies past the end is still in the device's hands, whether or not the thread has gone: what it reads
        # and writes, the staging memory and the region among it, must not become somebody else's.
        _ABANDONED.append(self)
        return [self._thread.name]

    def _stop(self, timeout_s: float) -> None:
        """Issue nothing more, and end the thread when nothing flies, at the latest after `timeout_s` and a little."""
        self._closing = True
        self._wake.put(False)
        self._thread.join(timeout_s)
        self._abandoned.set()
        self._thread.join(JOIN_S)

    def shed(self) -> None:
        """After `close`: revoke what was put and never started."""
        for direction in (self._in, self._out):
            while (lot := _pop(direction.waiting)) is not None:
                for task in lot.tasks:
                    task.claim.take()
                    self._over(task)
                    _tell(task.on_revoked)

    def _serve(self) -> None:
        try:
            self._device.bind_thread()
        except Exception as error:  # noqa: BLE001 - torch raises what it likes; whoever made the copier is told
            self._unbound = error
            return
        finally:
            self._bound.set()
        while not self._closing:
            # What waits here has had its token: it goes out when something comes back, whoever else asks.
            busy = any(direction.waiting or direction.flying for direction in (self._in, self._out))
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_POLL_S if busy else None)
            moved = True
            while moved and not self._closing:
                moved = self._issue_next()
                moved = self._reap() or moved
            self._reap()
        while (self._out.flying or self._in.flying) and not self._abandoned.wait(_POLL_S):
            self._reap()

    def _issue_next(self) -> bool:
        """Hand one submission to the device, loads first; whether there was anything to do."""
        for direction in (self._in, self._out):
            if direction.waiting and len(direction.flying) < MAX_FLYING:
                tasks, by_tensor = self._take(direction)
                if tasks:
                    self._issue(direction, tasks, by_tensor=by_tensor)
                return True
        return False

    def _take(self, direction: _Direction) -> tuple[list[CopyTask], bool]:
        """Claim what one submission shall carry, and whether it goes tensor by tensor."""
        tasks: list[CopyTask] = []
        written: set[int] = set()
        while len(tasks) < direction.mover.max_chunks:
            lot = _pop(direction.waiting)
            if lot is None:
                break
            if tasks and (lot.by_tensor or not written.isdisjoint(lot.tasks[0].block_ids)):
                # What is in one submission has no order: two chunks for the same block go one after the other.
                direction.waiting.appendleft(lot)
                break
            for task in lot.tasks:
                if task.claim.take():
                    tasks.append(task)
                    if not task.is_store:
                        written.update(task.block_ids)
                else:
                    self._over(task)
                    _tell(task.on_revoked)
            if lot.by_tensor and tasks:
                return tasks, True
        return tasks, False

    def _issue(self, direction: _Direction, tasks: list[CopyTask], *, by_tensor: bool) -> None:
        ready: dict[int, Event] = {}
        chunks: list[ChunkCopy] = []
        carried: list[CopyTask] = []
        for task in tasks:
            chunk = self._prepared(task)
            if chunk is not None:
                chunks.append(chunk)
                carried.append(task)
                ready[id(task.ready)] = task.ready
        if not carried:
            return
        on_tensor: OnTensor | None = None
        if by_tensor:

            def on_tensor(number: int, event: Event) -> None:
                for task in carried:
                    task.on_tensor(number, event)

        try:
            submission = direction.mover.submit(list(ready.values()), chunks, on_tensor)
        except Exception as failure:  # noqa: BLE001 - torch raises what it likes; the thread must go on
            for task in carried:
                self._failed(task, failure)
            return
        shares = _shares(chunks)
        direction.flying.append((list(zip(carried, shares, strict=True)), submission))

    def _prepared(self, task: CopyTask) -> ChunkCopy | None:
        try:
            return task.prepare()
        except Exception as failure:  # noqa: BLE001 - as above
            self._failed(task, failure)
            return None

    def _reap(self) -> bool:
        """Tell of every submission that has ended; whether any had."""
        ended = False
        for direction in (self._in, self._out):
            # A direction's submissions pass in order.
            while direction.flying:
                tasks, submission = direction.flying[0]
                error, copy_s = submission.error, 0.0
                try:
                    if not submission.query():
                        break
                    copy_s = submission.seconds()
                    submission.release()
                except Exception as failure:  # noqa: BLE001 - a device that fails asynchronously says so here
                    error = error or failure
                ended = True
                direction.flying.popleft()
                for task, share in tasks:
                    if error is None:
                        self._over(task)
                        _tell(partial(task.on_copied, copy_s * share))
                    else:
                        self._failed(task, error)
        return ended

    def _failed(self, task: CopyTask, error: Exception) -> None:
        _log.error("a device copy failed; its job fails, the thread goes on", exc_info=error)
        self._over(task)
        _tell(partial(task.on_copy_failed, error))

    def _over(self, task: CopyTask) -> None:
        with self._progress:
            del self._live[id(task)]
            self._progress.notify_all()


def _stop(of: weakref.ref[Copier]) -> None:
    """At the interpreter's end: what is in the device's hands gets a moment to come home."""
    copier = of()
    if copier is not None:
        copier._stop(_EXIT_S)  # noqa: SLF001 - its own module


def _tell(callback: Callable[[], None]) -> None:
    """Call back a task. One that raises does not take the thread, and so all others', with it."""
    try:
        callback()
    except Exception:  # noqa: BLE001 - whatever it is, the others go on
        _log.exception("a copy's end could not be told")


def _pop(waiting: deque[_Lot]) -> _Lot | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _shares(chunks: Sequence[ChunkCopy]) -> list[float]:
    """Each chunk's part of the bytes that they move together."""
    moved = [len(chunk.block_ids) - chunk.skip_blocks for chunk in chunks]
    total = sum(moved)
    return [blocks / total if total else 1 / len(chunks) for blocks in moved]
