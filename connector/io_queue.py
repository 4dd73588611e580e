"""One tier's threads and what waits for them: loads before stores, nothing waits on a lock.

The engine's thread puts work in and takes expired work out; the tier's threads take work and run it.
Both sides use deque and SimpleQueue operations alone, which the interpreter makes atomic, so a
thread that is descheduled in the middle of one never holds the other up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["IoQueue", "IoTask"]

_log = logging.getLogger(__name__)


class IoTask(Protocol):
    """One read or write that waits for a tier's thread."""

    put_s: float

    def run(self, start_s: float) -> None:
        """Do it, on a tier's thread; reports its own outcome."""
        ...

    def shed(self, reason: str) -> None:
        """It will not be run; reports that. Called on any thread."""
        ...

    def crashed(self, error: Exception) -> None:
        """`run` raised something nobody expected."""
        ...


class IoQueue:
    """Threads of one tier. Readers take loads alone; writers take loads first, then stores.

    So stores, however many and however stuck, leave the readers to the loads, and a load never waits
    behind a store that has not started.

    Args:
        name: the tier, in thread names.
        read_threads, write_threads: at least one each.
        clock: seconds, monotonic.
    """

    def __init__(
        self, name: str, *, read_threads: int, write_threads: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._loads: deque[IoTask] = deque()
        self._stores: deque[IoTask] = deque()
        # A token per task and kind of thread. A thread that finds its token's task taken goes back to waiting.
        self._for_readers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._for_writers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._running: list[float | None] = [None] * (read_threads + write_threads)
        self._storing: list[float | None] = [None] * (read_threads + write_threads)
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._serve, args=(at, at >= read_threads), name=f"kvsluice-{name}-{at}", daemon=True
            )
            for at in range(read_threads + write_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put_load(self, task: IoTask) -> None:
        """Never blocks."""
        self._loads.append(task)
        self._for_readers.put(True)
        self._for_writers.put(True)

    def put_store(self, task: IoTask) -> None:
        """Never blocks."""
        self._stores.append(task)
        self._for_writers.put(True)

    def run_alone(self, action: Callable[[], None]) -> None:
        """Run `action` on one of the threads once no store runs; ahead of all that waits. Never blocks."""
        self._exclusive.append(action)
        self._for_readers.put(True)
        self._for_writers.put(True)

    def shed_stores(self, reason: str, *, older_than_s: float | None = None) -> None:
        """Shed the stores that wait, or those put in longer ago than `older_than_s`. Never blocks."""
        limit_s = None if older_than_s is None else self._clock() - older_than_s
        self._shed(self._stores, reason, limit_s)

    def shed_loads(self, reason: str) -> None:
        """Shed the loads that wait. Never blocks."""
        self._shed(self._loads, reason, None)

    @property
    def queued_loads(self) -> int:
        return len(self._loads)

    @property
    def queued_stores(self) -> int:
        return len(self._stores)

    @property
    def running(self) -> int:
        return sum(start_s is not None for start_s in self._running)

    def oldest_store_s(self) -> float:
        """Age of the oldest store that a thread works on; 0 with none."""
        started = [start_s for start_s in list(self._storing) if start_s is not None]
        return self._clock() - min(started) if started else 0.0

    @property
    def busy(self) -> bool:
        """Whether anything waits for a thread or is on one."""
        return bool(self._loads or self._stores or self._exclusive or self.running)

    def stop(self) -> None:
        """Have each thread end after what it is at. Never blocks."""
        self._closing = True
        for _ in self._threads:
            self._for_readers.put(False)
            self._for_writers.put(False)

    def join(self, end_s: float) -> list[str]:
        """Wait for the threads after `stop`; the names of those that hang past `end_s`."""
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _shed(self, waiting: deque[IoTask], reason: str, put_before_s: float | None) -> None:
        while True:
            try:
                if put_before_s is not None and waiting[0].put_s >= put_before_s:
                    return
                task = waiting.popleft()
            except IndexError:
                return
            if put_before_s is not None and task.put_s >= put_before_s:
                # A thread took the old head between the look and the taking: put the younger one back.
                waiting.appendleft(task)
                self._for_writers.put(True)
                return
            task.shed(reason)

    def _serve(self, at: int, is_writer: bool) -> None:
        tokens = self._for_writers if is_writer else self._for_readers
        while True:
            tokens.get()
            if self._closing:
                return
            # One that loses the race for the action keeps its token: a task may stand behind it.
            if self._exclusive and self._serve_exclusive(at):
                continue
            task = self._take(self._loads)
            is_store = task is None and is_writer
            if is_store:
                task = self._take(self._stores)
            if task is None:
                continue
            start_s = self._clock()
            self._running[at] = start_s
            if is_store:
                self._storing[at] = start_s
            try:
                task.run(start_s)
            except Exception as error:  # noqa: BLE001 - a stranger's tier must not end the thread
                _log.exception("unexpected failure in a tier's thread; the job fails, the thread goes on")
                task.crashed(error)
            finally:
                self._running[at] = self._storing[at] = None

    def _serve_exclusive(self, at: int) -> bool:
        try:
            action = self._exclusive.popleft()
        except IndexError:
            return False
        self._running[at] = self._clock()
        try:
            # Stores are short or they hang; a hung one keeps the action waiting, and its asker is told nothing.
            while any(start_s is not None for start_s in list(self._storing)) and not self._closing:
                time.sleep(0.005)
            action()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("unexpected failure in a tier's thread")
        finally:
            self._running[at] = None
        return True

    @staticmethod
    def _take(waiting: deque[IoTask]) -> IoTask | None:
        try:
            return waiting.popleft()
        except IndexError:
            return None
