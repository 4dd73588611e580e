"""Which operations of one tier run at this moment, and what part of its time falls to each.

Eight stores that run at once on a device each take eight times as long as one alone, and the device
is no slower for it. So beside the time that an operation takes, its *share* is counted: while n
operations run, each of them is charged 1/n of every second. Shares add up to the time in which
anything ran at all, however the operations overlap, which makes `share / bytes` the device's own
seconds per byte, the inverse of its goodput.

    n(t)     1111222221111      a: 9 s from start to end, 6.5 s of share
    store a  |=======|          b: 9 s,                   6.5 s
    store b      |=======|      something ran for 13 s = 6.5 s + 6.5 s

It costs two additions per start and end: a virtual clock runs at 1/n, and a share is the difference
of two readings.

An operation may never end: a request that the network lost, a thread in the hands of a dead mount.
One that others of its kind have *overtaken*, which began after it and have ended, says nothing of the
tier any more, and after `LOST_S` it is lost: it does not share the time of those that are alive.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["LOST_S", "NOTHING", "Operation", "Spent", "Stall", "Traffic"]

LOST_S: Final = 5.0
"""A load under way for longer, or a store that was overtaken besides, is taken for lost. A guess: a tier's default
`max_queue_s`, after which nobody would wait for it any more."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one operation took, in seconds.

    Attributes:
        elapsed_s: from start to end.
        share_s: its part where every operation under way is charged alike, loads and stores.
        drain_s: its part among those of its own kind alone: the time from one of them to the next.
    """

    elapsed_s: float
    share_s: float
    drain_s: float

    @classmethod
    def alone(cls, elapsed_s: float) -> Spent:
        """Of an operation that nothing ran beside."""
        return cls(elapsed_s, elapsed_s, elapsed_s)


NOTHING: Final = Spent.alone(0.0)
"""Of an operation that never started."""


@dataclass(frozen=True, slots=True)
class Stall:
    """How long stores have been under way without one coming home; all 0 with none under way.

    Stores that were overtaken do not count but in `oldest_s`: that others came home proves that the tier works.

    Attributes:
        oldest_s: age of the oldest store under way.
        quiet_s: time since the last one ended, or since the oldest that counts began where that is later.
        share_s: what falls to one store of that time: what the next to end will have cost at the least.
        drain_s: the same among stores alone.
    """

    oldest_s: float = 0.0
    quiet_s: float = 0.0
    share_s: float = 0.0
    drain_s: float = 0.0


class Operation:
    """One operation under way; made by `Traffic.start`, given back to `Traffic.finish`."""

    __slots__ = ("all_s", "is_store", "kind_s", "lost_spent", "overtaken", "start_s")

    def __init__(self, is_store: bool, start_s: float, all_s: float, kind_s: float) -> None:
        self.is_store = is_store
        self.start_s = start_s
        self.all_s = all_s
        self.kind_s = kind_s
        self.overtaken = False
        self.lost_spent: tuple[float, float] | None = None
        """Its shares as of when it was taken for lost."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """Where time, the clock of all and that of one kind stood at some moment."""

    at_s: float
    all_s: float
    kind_s: float


@dataclass(frozen=True, slots=True)
class _Now:
    """What a reader needs for `stall`, replaced as a whole so that it is never read half changed."""

    at_s: float = 0.0
    num_all: int = 0
    num_stores: int = 0
    all_s: float = 0.0
    stores_s: float = 0.0
    loads_s: float = 0.0
    oldest_start_s: float | None = None
    store: _Marks | None = None
    """When a store last ended, or the oldest that counts began where that is later; None where none counts."""
    load: _Marks | None = None
    """The same of loads."""
    lost_load_since_s: float | None = None
    """Since when no load has ended although one that is taken for lost was under way; None with no such one."""
    num_loads_ever: int = 0
    """Loads under way, lost ones too."""


class Traffic:
    """The operations of one tier on one rank.

    Thread-safety: `start` and `finish` may be called by any number of threads; they hold a lock for a
    few additions, never across I/O. `stall` takes no lock, so that a scheduling path may ask.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at_s = clock()
        self._all_s = 0.0
        self._loads_s = 0.0
        self._stores_s = 0.0
        self._ended_store = _Marks(-math.inf, 0.0, 0.0)
        self._ended_load = _Marks(-math.inf, 0.0, 0.0)
        # A dict keeps the order of starting, so its first entry is the oldest.
        self._stores: dict[Operation, None] = {}
        self._loads: dict[Operation, None] = {}
        self._lost: dict[Operation, None] = {}
        self._now = _Now()

    def start(self, *, is_store: bool) -> Operation:
        """An operation begins now."""
        with self._lock:
            now_s = self._advance()
            operation = Operation(is_store, now_s, self._all_s, self._stores_s if is_store else self._loads_s)
            (self._stores if is_store else self._loads)[operation] = None
            self._publish()
            return operation

    def finish(self, operation: Operation) -> Spent:
        """It has ended now, in whatever way."""
        with self._lock:
            now_s = self._advance()
            all_s, kind_s = self._all_s, self._stores_s if operation.is_store else self._loads_s
            if operation.lost_spent is None:
                spent = Spent(now_s - operation.start_s, all_s - operation.all_s, kind_s - operation.kind_s)
                live = self._stores if operation.is_store else self._loads
                for other in (*self._lost, *live):
                    # Those of a kind are in the order of starting.
                    if other is operation:
                        break
                    other.overtaken = other.overtaken or other.is_store == operation.is_store
                del live[operation]
            else:
                spent = Spent(now_s - operation.start_s, *operation.lost_spent)
                del self._lost[operation]
            ended = _Marks(now_s, all_s, kind_s)
            if operation.is_store:
                self._ended_store = ended
            else:
                self._ended_load = ended
            self._publish()
            return spent

    def stuck(self, *, stores: bool) -> int:
        """Stores, or loads, that have been under way for longer than `LOST_S`."""
        with self._lock:
            limit_s = self._clock() - LOST_S
            live = self._stores if stores else self._loads
            lost = sum(operation.is_store == stores for operation in self._lost)
            return lost + sum(operation.start_s < limit_s for operation in live)

    def stall(self) -> Stall:
        """How long stores have been under way without one ending."""
        now = self._now
        if now.oldest_start_s is None:
            return Stall()
        now_s = self._clock()
        if now.store is None:
            return Stall(now_s - now.oldest_start_s)
        passed_s = max(0.0, now_s - now.at_s)
        return Stall(
            now_s - now.oldest_start_s,
            now_s - now.store.at_s,
            now.all_s + passed_s / now.num_all - now.store.all_s,
            now.stores_s + passed_s / now.num_stores - now.store.kind_s,
        )

    def load_stall(self) -> Spent:
        """What the load that is next to end will have taken at the least; all 0 with none under way.

        Counted since the last one ended, or since the oldest began where that is later.
        """
        now = self._now
        now_s = self._clock()
        if now.lost_load_since_s is not None:
            # Those that are lost keep no clock going: what is known is that nothing came in all this time.
            quiet_s = now_s - now.lost_load_since_s
            return Spent(quiet_s, quiet_s / (now.num_loads_ever + now.num_stores), quiet_s / now.num_loads_ever)
        if now.load is None:
            return NOTHING
        passed_s = max(0.0, now_s - now.at_s)
        return Spent(
            now_s - now.load.at_s,
            now.all_s + passed_s / now.num_all - now.load.all_s,
            now.loads_s + passed_s / (now.num_all - now.num_stores) - now.load.kind_s,
        )

    def _advance(self) -> float:
        # The clock is read under the lock, so that no two readings come in the wrong order.
        now_s = self._clock()
        passed_s = now_s - self._at_s
        self._lose(now_s - LOST_S)
        stores, loads = len(self._stores), len(self._loads)
        if stores:
            self._stores_s += passed_s / stores
        if loads:
            self._loads_s += passed_s / loads
        if stores or loads:
            self._all_s += passed_s / (stores + loads)
        self._at_s = now_s
        return now_s

    def _lose(self, limit_s: float) -> None:
        """Leave out what began before `limit_s` and is lost; its shares are what they were at the last event."""
        for live, clock_s in ((self._stores, self._stores_s), (self._loads, self._loads_s)):
            lost = []
            for operation in live:
                if operation.start_s >= limit_s:
                    break
                if operation.overtaken or not operation.is_store:
                    lost.append(operation)
            for operation in lost:
                operation.lost_spent = (self._all_s - operation.all_s, clock_s - operation.kind_s)
                del live[operation]
                self._lost[operation] = None

    def _publish(self) -> None:
        oldest = next((one for one in (*self._lost, *self._stores) if one.is_store), None)
        store = next((one for one in self._stores if not one.overtaken), None)
        load = next(iter(self._loads), None)
        lost_loads = [one for one in self._lost if not one.is_store]
        waiting = next((one for one in lost_loads if not one.overtaken), None)
        self._now = _Now(
            self._at_s,
            len(self._stores) + len(self._loads),
            len(self._stores),
            self._all_s,
            self._stores_s,
            self._loads_s,
            None if oldest is None else oldest.start_s,
            None if store is None else _later(store, self._ended_store),
            None if load is None else _later(load, self._ended_load),
            None if waiting is None else max(waiting.start_s, self._ended_load.at_s),
            len(self._loads) + len(lost_loads),
        )


def _later(operation: Operation, ended: _Marks) -> _Marks:
    """The start of `operation`, or `ended` where that is later."""
    return ended if ended.at_s >= operation.start_s else _Marks(operation.start_s, operation.all_s, operation.kind_s)
