"""How many stores may run at once on one tier: computed here from what ran, enforced by whoever runs them.

Two limits, because two things are wanted:

    no load there    the fewest that keep the device at its full rate. More would not move a byte
                     sooner, and the load that comes next would wait behind all of them.
    loads there      as many as the loads do not feel, at least one.

The first is found as TCP Vegas finds its window: with n under way and a latency of T where one alone
takes T_alone, `n * (1 - T_alone / T)` of them only queue in the device; few is right. The second
rises by addition while loads take about as long as without stores, and falls by multiplication when
they take longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from kvsluice.tiers.backpressure.traffic import Spent

__all__ = ["StoreLimit"]

QUEUED_FEW: Final = 1.0
"""With fewer than this many only queueing in the device, one more may run."""
QUEUED_MANY: Final = 2.5
"""With more, one less: the device has been full for some while."""
TOLERATED_SLOWDOWN: Final = 1.25
"""A load beside stores may take this much of what it takes without; a guess between 1 and the 2 that is promised."""
BESIDE_STEP: Final = 0.1
BESIDE_CUT: Final = 0.8
WINDOW_S: Final = 30.0
"""How long the fastest operation seen stands for the device: a minute at most, two of these windows."""
PROBE_INTERVAL_S: Final = 10.0
PROBE_STORES: Final = 2
"""Every ten seconds two stores run alone, so that what one alone takes stays known."""


class _WindowedMin:
    """The smallest of the last one to two windows."""

    __slots__ = ("_before", "_current", "_since_s")

    def __init__(self) -> None:
        self._current = math.inf
        self._before = math.inf
        self._since_s = -math.inf

    def add(self, value: float, now_s: float) -> None:
        if now_s - self._since_s >= WINDOW_S:
            # After a longer silence the window before the last one says nothing any more.
            self._before = self._current if now_s - self._since_s < 2 * WINDOW_S else math.inf
            self._current = math.inf
            self._since_s = now_s
        self._current = min(self._current, value)

    @property
    def value(self) -> float:
        """Infinite while nothing was added."""
        return min(self._current, self._before)


class StoreLimit:
    """Not thread-safe: called under the lock of whoever enforces it.

    Args:
        max_stores: what is never exceeded: the tier's write threads.
        clock: seconds, monotonic.
    """

    def __init__(self, max_stores: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_stores < 1:
            raise ValueError(f"max_stores must be at least 1, got {max_stores}")
        self.max_stores = max_stores
        self._clock = clock
        self._idle = float(min(2, max_stores))
        self._beside = 1.0
        self._store_alone_s = _WindowedMin()
        self._load_alone_s = _WindowedMin()
        self._load_drain_s = _WindowedMin()
        self._probe_at_s = clock() + PROBE_INTERVAL_S
        self._probing = 0

    def allowed(self, *, loads: bool) -> int:
        """Stores that may run now; `loads` says whether any load waits or runs."""
        if loads:
            return int(min(self._beside, self._idle))
        return 1 if self._probing else int(self._idle)

    def on_store_ended(self, spent: Spent) -> None:
        """A store that really wrote a whole chunk has ended; others teach nothing."""
        if not spent.elapsed_s > 0:
            return
        now_s = self._clock()
        if now_s >= self._probe_at_s and not self._probing:
            self._probing = PROBE_STORES
        # Of one that loads ran beside, nobody can say what it would have taken without.
        if spent.share_s < 0.98 * spent.drain_s:
            return
        under_way = spent.elapsed_s / spent.drain_s
        if self._probing and under_way < 1.1:
            self._probing -= 1
            if not self._probing:
                self._probe_at_s = now_s + PROBE_INTERVAL_S
        self._store_alone_s.add(spent.elapsed_s, now_s)
        queued = under_way * (1 - self._store_alone_s.value / spent.elapsed_s)
        if queued > QUEUED_MANY:
            self._idle = max(1.0, self._idle - 1 / self._idle)
        elif queued < QUEUED_FEW and under_way > 0.6 * int(self._idle):
            self._idle = min(float(self.max_stores), self._idle + 1 / self._idle)

    def on_load_ended(self, spent: Spent) -> None:
        """A load that really read a whole chunk has ended."""
        if not spent.elapsed_s > 0:
            return
        now_s = self._clock()
        under_way = spent.elapsed_s / spent.drain_s
        beside = spent.share_s < 0.95 * spent.drain_s
        if not beside:
            self._load_alone_s.add(spent.elapsed_s, now_s)
        self._load_drain_s.add(spent.drain_s, now_s)
        alone_s = self._load_alone_s.value
        if not beside or math.isinf(alone_s):
            return
        expected_s = alone_s + (under_way - 1) * min(alone_s, self._load_drain_s.value)
        if spent.elapsed_s > TOLERATED_SLOWDOWN * expected_s:
            self._beside = max(1.0, self._beside * BESIDE_CUT)
        else:
            self._beside = min(float(self.max_stores), self._beside + BESIDE_STEP / self._beside)
