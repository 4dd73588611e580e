"""One tier's threads. What they do next is the lane's to say: loads before stores, few stores at once.

The engine's thread puts work in and takes expired work out; the tier's threads take work and run it.
The engine's side uses deque and SimpleQueue operations alone, which the interpreter makes atomic, so
a thread that is descheduled in the middle of something never holds it up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from kvsluice.connector.lane import IoTask, Lane, LaneState
from kvsluice.tiers.backpressure import StoreLimit

__all__ = ["IoQueue"]

_log = logging.getLogger(__name__)


class IoQueue:
    """Threads of one tier. Readers take loads alone; writers take loads first, then stores.

    So stores, however many and however stuck, leave the readers to the loads, and a load never waits
    behind a store that has not started.

    Args:
        name: the tier, in thread names.
        read_threads, write_threads: at least one each.
        adapt_stores: let `StoreLimit` say how many stores run at once; else all writers may.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        *,
        read_threads: int,
        write_threads: int,
        adapt_stores: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.lane = Lane(StoreLimit(write_threads, clock) if adapt_stores else None, clock)
        # A token per task and kind of thread. A thread that finds its token's task taken goes back to waiting;
        # the lane counts those it sends away because enough stores run, and each gets its token back.
        self._for_readers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._for_writers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._clearing: list[None] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(at >= read_threads,), name=f"kvsluice-{name}-{at}", daemon=True)
            for at in range(read_threads + write_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put_load(self, task: IoTask) -> None:
        """Never blocks."""
        self.lane.put_load(task)
        self._for_readers.put(True)
        self._for_writers.put(True)

    def put_store(self, task: IoTask) -> None:
        """Never blocks."""
        self.lane.put_store(task)
        self._for_writers.put(True)

    def run_alone(self, action: Callable[[], None]) -> None:
        """Run `action` on one of the threads once no store runs; ahead of all that waits. Never blocks."""
        self._exclusive.append(action)
        self._for_readers.put(True)
        self._for_writers.put(True)

    def shed_stores(self, reason: str, *, older_than_s: float | None = None) -> None:
        """Shed the stores that wait, or those put in longer ago than `older_than_s`. Never blocks."""
        if self.lane.shed_stores(reason, older_than_s=older_than_s) or self.lane.may_be_stuck:
            self._for_writers.put(True)

    def shed_loads(self, reason: str) -> None:
        """Shed the loads that wait. Never blocks."""
        self.lane.shed_loads(reason)
        # Without loads more stores may run: those that were sent away ask again.
        for _ in self._threads:
            self._for_writers.put(True)

    def state(self) -> LaneState:
        """What waits and what runs. Never blocks."""
        return self.lane.state()

    @property
    def busy(self) -> bool:
        """Whether anything waits for a thread or is on one."""
        return bool(self._exclusive or self._clearing or self.lane.busy)

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

    def _serve(self, is_writer: bool) -> None:
        tokens = self._for_writers if is_writer else self._for_readers
        while True:
            tokens.get()
            if self._closing:
                return
            # One that loses the race for the action keeps its token: a task may stand behind it.
            if self._exclusive and self._serve_exclusive():
                continue
            taken = self.lane.take(is_writer=is_writer)
            if taken is None:
                continue
            task, is_store = taken
            try:
                task.run(self._clock())
            except Exception as error:  # noqa: BLE001 - a stranger's tier must not end the thread
                _log.exception("unexpected failure in a tier's thread; the job fails, the thread goes on")
                task.crashed(error)
            finally:
                for _ in range(self.lane.release(is_store=is_store)):
                    self._for_writers.put(True)

    def _serve_exclusive(self) -> bool:
        # Counted before it leaves the queue, so that `busy` never misses it.
        self._clearing.append(None)
        try:
            action = self._exclusive.popleft()
        except IndexError:
            self._clearing.pop()
            return False
        try:
            # Stores are short or they hang; a hung one keeps the action waiting, and its asker is told nothing.
            while self.lane.running_stores and not self._closing:
                time.sleep(0.005)
            action()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("unexpected failure in a tier's thread")
        finally:
            self._clearing.pop()
        return True
