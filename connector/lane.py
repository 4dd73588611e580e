"""What waits for one tier and what runs on it: the rules without the threads.

    put_load ──▶ loads ──┬──▶ readers
                         └──▶ writers, before any store
    put_store ─▶ stores ────▶ writers, as many at once as the limit lets

`IoQueue` runs these rules with threads, the simulator with virtual ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kvsluice.connector.orders import TierState
from kvsluice.tiers.backpressure import LOST_S, Operation, Spent, Stall, StoreLimit, Traffic

__all__ = ["IoTask", "Lane", "LaneState"]


class IoTask(Protocol):
    """One read or write that waits for a tier's thread."""

    put_s: float
    job_id: int

    def run(self, start_s: float) -> None:
        """Do it, on a tier's thread; reports its own outcome."""
        ...

    def shed(self, reason: str) -> None:
        """It will not be run; reports that. Called on any thread."""
        ...

    def crashed(self, error: Exception) -> None:
        """`run` raised something nobody expected."""
        ...


@dataclass(frozen=True, slots=True)
class LaneState:
    """A frozen look at one lane."""

    queued_loads: int
    queued_stores: int
    running: int
    stall: Stall
    store_limit: int
    load_stall: Spent

    def report(
        self,
        tier: int,
        used_bytes: int | None,
        capacity_bytes: int | None,
        failures: Mapping[str, int] = MappingProxyType({}),
    ) -> TierState:
        """The same, as the planner is told of it, beside what the tier itself knows."""
        return TierState(
            tier,
            self.queued_loads,
            self.queued_stores,
            self.running,
            self.stall,
            used_bytes,
            capacity_bytes,
            self.store_limit,
            self.load_stall,
            # A copy: a tier's own mapping may change, or go through no pickle.
            dict(failures),
        )


class Lane:
    """The queue rules of one tier.

    Thread-safety: putting and shedding use deque operations alone, which the interpreter makes
    atomic, so that an engine's thread never waits for one that was descheduled in the middle of
    something. Whoever takes, releases, begins and finishes holds a lock for a moment.

    Args:
        limit: how many stores may run at once; None for as many as there are writers.
        clock: seconds, monotonic.
    """

    def __init__(self, limit: StoreLimit | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = limit
        self._traffic = Traffic(clock)
        self._lock = threading.Lock()
        self._loads: deque[IoTask] = deque()
        self._stores: deque[IoTask] = deque()
        self._loads_on_threads = 0
        self._stores_on_threads = 0
        self._held_back = 0

    # ---- the engine's side -------------------------------------------------------------------

    def put_load(self, task: IoTask) -> None:
        """Never blocks."""
        self._loads.append(task)

    def put_store(self, task: IoTask) -> None:
        """Never blocks."""
        self._stores.append(task)

    def shed_stores(self, reason: str, *, older_than_s: float | None = None) -> bool:
        """Shed the stores that wait, or those put in longer ago than `older_than_s` with the rest of their jobs.

        Never blocks.

        Returns:
            True where a store was put back that a thread may have missed meanwhile.
        """
        limit_s = None if older_than_s is None else self._clock() - older_than_s
        return self._shed(self._stores, reason, limit_s)

    def shed_loads(self, reason: str) -> None:
        """Shed the loads that wait. Never blocks."""
        self._shed(self._loads, reason, None)

    def state(self) -> LaneState:
        """What waits and what runs. Never blocks."""
        return LaneState(
            len(self._loads),
            len(self._stores),
            self._loads_on_threads + self._stores_on_threads,
            self._traffic.stall(),
            self.store_limit,
            self._traffic.load_stall(),
        )

    @property
    def may_be_stuck(self) -> bool:
        """Whether a writer that was sent away should ask again although nothing has ended. Never blocks."""
        return self._held_back > 0 and self._traffic.stall().oldest_s > LOST_S

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on a thread."""
        return bool(self._loads or self._stores or self._loads_on_threads or self._stores_on_threads)

    @property
    def running_stores(self) -> int:
        """Stores that threads work on."""
        return self._stores_on_threads

    @property
    def store_limit(self) -> int:
        """Stores that may run at this moment; 0 says as many as there are writers."""
        return 0 if self._limit is None else self._limit.allowed(loads=bool(self._loads or self._loads_on_threads))

    # ---- the threads' side -------------------------------------------------------------------

    def take(self, *, is_writer: bool) -> tuple[IoTask, bool] | None:
        """The next task and whether it is a store; None where nothing may start. Ended by `release`."""
        with self._lock:
            # Counted before it is taken, so that `busy` never misses it.
            self._loads_on_threads += 1
            task = self._pop(self._loads)
            if task is not None:
                return task, False
            self._loads_on_threads -= 1
            if not is_writer or not self._stores:
                return None
            if self._full():
                self._held_back += 1
                return None
            self._stores_on_threads += 1
            task = self._pop(self._stores)
            if task is not None:
                return task, True
            self._stores_on_threads -= 1
            return None

    def release(self, *, is_store: bool) -> int:
        """A task that was taken is over. How many writers that `take` sent away should ask again."""
        with self._lock:
            if is_store:
                self._stores_on_threads -= 1
            else:
                self._loads_on_threads -= 1
            return self._freed()

    def begin(self, *, is_store: bool) -> Operation:
        """The tier's own I/O starts."""
        return self._traffic.start(is_store=is_store)

    def finish(self, operation: Operation, *, whole_chunk: bool) -> Spent:
        """The tier's own I/O is over; `whole_chunk` where it really moved one, else it teaches no limit."""
        spent = self._traffic.finish(operation)
        if whole_chunk and self._limit is not None:
            with self._lock:
                if operation.is_store:
                    self._limit.on_store_ended(spent)
                else:
                    self._limit.on_load_ended(spent)
        return spent

    def _room(self, limit: StoreLimit) -> int:
        """Stores that may start now. The lock is held."""
        # What is stuck holds its thread and nobody else: one lost request must not hold up all others.
        loads = bool(self._loads) or self._loads_on_threads > self._traffic.stuck(stores=False)
        return limit.allowed(loads=loads) - self._stores_on_threads + self._traffic.stuck(stores=True)

    def _full(self) -> bool:
        limit = self._limit
        if limit is None or self._stores_on_threads < limit.allowed(loads=self._loads_on_threads > 0):
            return False
        return self._room(limit) <= 0

    def _freed(self) -> int:
        if not self._held_back or self._limit is None:
            return 0
        freed = max(0, min(self._held_back, self._room(self._limit)))
        self._held_back -= freed
        return freed

    def _shed(self, waiting: deque[IoTask], reason: str, put_before_s: float | None) -> bool:
        late_job: int | None = None
        while True:
            try:
                head = waiting[0]
                if put_before_s is not None and head.put_s >= put_before_s and head.job_id != late_job:
                    return False
                task = waiting.popleft()
            except IndexError:
                return False
            if put_before_s is not None and task.put_s >= put_before_s and task.job_id != late_job:
                # A thread took the old head between the look and the taking: put the younger one back.
                waiting.appendleft(task)
                return True
            # Behind a chunk of a prompt that is not stored nothing of it can be found: its job goes with it.
            late_job = task.job_id
            task.shed(reason)

    @staticmethod
    def _pop(waiting: deque[IoTask]) -> IoTask | None:
        try:
            return waiting.popleft()
        except IndexError:
            return None
