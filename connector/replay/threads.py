"""`IoQueue` on virtual time: the same lane, the same tokens, threads that only count.

A thread takes a task and is busy until the task says that it is over. Where a reader and a writer could
both take a load, which of them does is chance in the product and always the reader here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

from kvsluice.connector.lane import IoTask, Lane, LaneState

__all__ = ["FifoLane", "VirtualTask", "VirtualThreads"]


class VirtualTask(IoTask, Protocol):
    """A task whose `run` only starts it."""

    over: Callable[[], None]
    """Set before `run`; called once, by `run` or later: the thread is free again."""


class VirtualThreads:
    """The threads of one tier on one rank.

    Args:
        lane: the queue rules.
        read_threads, write_threads: readers may be 0 where writers take everything.
        clock: seconds.
    """

    def __init__(self, lane: Lane, *, read_threads: int, write_threads: int, clock: Callable[[], float]) -> None:
        self.lane = lane
        self._clock = clock
        self._idle_readers = read_threads
        self._idle_writers = write_threads
        self._for_readers = 0
        self._for_writers = 0
        self._pumping = False

    def put_load(self, task: VirtualTask) -> None:
        self.lane.put_load(task)
        self._for_readers += 1
        self._for_writers += 1
        self._pump()

    def put_store(self, task: VirtualTask) -> None:
        self.lane.put_store(task)
        self._for_writers += 1
        self._pump()

    def shed_stores(self, reason: str, *, older_than_s: float) -> None:
        if self.lane.shed_stores(reason, older_than_s=older_than_s) or self.lane.may_be_stuck:
            self._for_writers += 1
            self._pump()

    def _pump(self) -> None:
        # A task that is over at once frees its thread within the loop: no recursion.
        if self._pumping:
            return
        self._pumping = True
        while True:
            if self._for_readers and self._idle_readers:
                self._for_readers -= 1
                self._serve(is_writer=False)
            elif self._for_writers and self._idle_writers:
                self._for_writers -= 1
                self._serve(is_writer=True)
            else:
                break
        self._pumping = False

    def _serve(self, *, is_writer: bool) -> None:
        taken = self.lane.take(is_writer=is_writer)
        if taken is None:
            return
        if is_writer:
            self._idle_writers -= 1
        else:
            self._idle_readers -= 1
        # `put_load` and `put_store` take nothing else.
        task = cast(VirtualTask, taken[0])
        task.over = partial(self._over, is_writer, taken[1])
        task.run(self._clock())

    def _over(self, is_writer: bool, is_store: bool) -> None:
        self._for_writers += self.lane.release(is_store=is_store)
        if is_writer:
            self._idle_writers += 1
        else:
            self._idle_readers += 1
        self._pump()


class FifoLane(Lane):
    """One queue for loads and stores alike, served in order of arrival: what the product does not do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(None, clock)
        self._line: deque[tuple[IoTask, bool]] = deque()
        self._queued_loads = 0

    def put_load(self, task: IoTask) -> None:
        self._queued_loads += 1
        self._line.append((task, False))

    def put_store(self, task: IoTask) -> None:
        self._line.append((task, True))

    def take(self, *, is_writer: bool) -> tuple[IoTask, bool] | None:
        if not self._line:
            return None
        task, is_store = self._line.popleft()
        if is_store:
            self._stores_on_threads += 1
        else:
            self._queued_loads -= 1
            self._loads_on_threads += 1
        return task, is_store

    def shed_stores(self, reason: str, *, older_than_s: float | None = None) -> bool:
        """Nothing is ever shed from it."""
        return False

    @property
    def busy(self) -> bool:
        return bool(self._line) or super().busy

    def state(self) -> LaneState:
        queued_stores = len(self._line) - self._queued_loads
        return replace(super().state(), queued_loads=self._queued_loads, queued_stores=queued_stores)
