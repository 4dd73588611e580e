"""How many stores may run at once on one tier: computed here from what ran, enforced by whoever runs them.

Two limits, because two things are wanted:

    no load there    the fewest that keep the device at its full rate. More would not move a byte
                     sooner, and the load that comes next would wait behind all of them.
    loads there      as many as the loads do not feel, at least one.

The first climbs by trial: some stores at the level that holds, some a step beside it, and goodput
says which is kept. It needs no model of the device, so one disk, a striped array and a distant
object store are treated alike. The second compares loads beside more stores with loads beside one at
most: it rises while they take about as long, and falls by multiplication when they take longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from kvsluice.tiers.backpressure.traffic import Spent

__all__ = ["StoreLimit"]

GOOD_ENOUGH: Final = 0.97
"""A step down is kept where it keeps this part of the goodput; steps end near 90 % of the device's best."""
WORTH_MORE: Final = 1.04
"""A step up is kept where it brings this much; above 1 / GOOD_ENOUGH, so that the two do not chase each other."""
STEP: Final = 0.25
"""A step is a quarter of the level, at least one store."""
MIN_SAMPLES: Final = 16
PAUSE_S: Final = 2.0
"""After a step that was not kept the level holds for this long."""

TOLERATED_SLOWDOWN: Final = 1.15
"""A load beside several stores may take this much of what it takes beside one; a guess."""
BESIDE_ALPHA: Final = 0.2
"""Weight of one load in what loads take."""
BESIDE_GROWTH: Final = 0.1
BESIDE_STEP: Final = 0.03
"""Before loads first feel it the level grows by a tenth a load, afterwards by this much over itself."""
BESIDE_CUT: Final = 0.8
ONE_STORE: Final = 1.2
"""Stores beside a load, on the average over its life, that still count as one."""
COMPARED_LOADS: Final = 8
COMPARE_INTERVAL_S: Final = 30.0
"""So often so many loads run beside one store at most, so that what they take then stays known."""


class _Climb:
    """The level that gives the most goodput for the fewest stores, by trial."""

    __slots__ = ("_base", "_count", "_down", "_pause_until_s", "_settling", "_share_s", "_trial", "level", "max_level")

    def __init__(self, max_level: int) -> None:
        # From the top: goodput is whole from the first store on, and a step down is tried at once.
        self.level = max_level
        self.max_level = max_level
        self._trial = 0
        self._base = 0.0
        self._down = True
        self._pause_until_s = -math.inf
        self._settling = 0
        self._count = 0
        self._share_s = 0.0

    @property
    def current(self) -> int:
        """What holds, or what is being tried."""
        return self._trial or self.level

    def disturbed(self) -> None:
        """Something else ran beside: what was measured so far is not the stores' own."""
        self._settling = self.current
        self._count = 0
        self._share_s = 0.0

    def add(self, spent: Spent, now_s: float) -> None:
        level = self.current
        if self._settling:
            # Began at another level.
            self._settling -= 1
            return
        # Where too few stores come to fill the level, nothing can be said of it.
        if now_s < self._pause_until_s or spent.elapsed_s < 0.8 * level * spent.share_s:
            return
        self._count += 1
        self._share_s += spent.share_s
        if self._count < max(MIN_SAMPLES, 4 * level):
            return
        goodput = self._count / self._share_s
        if not self._trial:
            self._base = goodput
        elif goodput >= self._base * (GOOD_ENOUGH if self._down else WORTH_MORE):
            self.level = self._trial
            self._base = max(self._base, goodput)
        else:
            self._down = not self._down
            self._pause_until_s = now_s + PAUSE_S
            self._try(0)
            return
        self._try(self._next())

    def _next(self) -> int:
        for _ in range(2):
            step = max(1, int(self.level * STEP))
            trial = self.level - step if self._down else self.level + step
            trial = min(self.max_level, max(1, trial))
            if trial != self.level:
                return trial
            self._down = not self._down
        return 0

    def _try(self, trial: int) -> None:
        self._trial = trial
        self.disturbed()


class _Beside:
    """The most stores that loads do not feel."""

    __slots__ = ("_base_s", "_compare_at_s", "_comparing", "_felt", "_max_level", "_rising", "level")

    def __init__(self, max_level: int) -> None:
        self.level = 1.0
        self._max_level = max_level
        self._rising = True
        """Whether no load has felt it yet."""
        self._felt = 1.0
        self._base_s = [0.0] * 16
        """By 1, 2, 4, ... loads at once: what one of them takes beside one store at most; 0 where not known."""
        self._comparing = 0
        self._compare_at_s = math.inf

    @property
    def current(self) -> int:
        return 1 if self._comparing else int(self.level)

    def add(self, spent: Spent, now_s: float) -> None:
        loads = spent.elapsed_s / spent.drain_s
        stores = spent.elapsed_s / spent.share_s - loads
        at = min(len(self._base_s) - 1, max(0, round(math.log2(loads))))
        if stores <= ONE_STORE:
            base_s = self._base_s[at]
            self._base_s[at] += BESIDE_ALPHA * (spent.elapsed_s - base_s) if base_s else spent.elapsed_s
            if self._comparing:
                self._comparing -= 1
                if not self._comparing:
                    self._compare_at_s = now_s + COMPARE_INTERVAL_S
            elif self.level < 2.0 and stores >= 0.5:
                self._rise(now_s)
            return
        if now_s >= self._compare_at_s and not self._comparing:
            self._comparing = COMPARED_LOADS
        if not self._base_s[at]:
            return
        self._felt += BESIDE_ALPHA * (spent.elapsed_s / self._base_s[at] - self._felt)
        if self._felt > TOLERATED_SLOWDOWN:
            self.level = max(1.0, self.level * BESIDE_CUT)
            self._felt = 1.0
            self._rising = False
        elif stores >= 0.5 * int(self.level):
            self._rise(now_s)

    def _rise(self, now_s: float) -> None:
        step = BESIDE_GROWTH * self.level if self._rising else BESIDE_STEP / self.level
        self.level = min(float(self._max_level), self.level + step)
        self._compare_at_s = min(self._compare_at_s, now_s + COMPARE_INTERVAL_S)


class StoreLimit:
    """Not thread-safe: called under the lock of whoever enforces it.

    Args:
        max_stores: what is never exceeded: the tier's write threads.
        clock: seconds, monotonic.
    """

    def __init__(self, max_stores: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_stores < 1:
            raise ValueError(f"max_stores must be at least 1, got {max_stores}")
        self._clock = clock
        self._climb = _Climb(max_stores)
        self._beside = _Beside(max_stores)

    def allowed(self, *, loads: bool) -> int:
        """Stores that may run now; `loads` says whether any load waits or runs."""
        return min(self._beside.current, self._climb.level) if loads else self._climb.current

    def on_store_ended(self, spent: Spent) -> None:
        """A store that really wrote a whole chunk has ended; others teach nothing."""
        if not spent.share_s > 0:
            return
        if spent.share_s < 0.98 * spent.drain_s:
            self._climb.disturbed()
        else:
            self._climb.add(spent, self._clock())

    def on_load_ended(self, spent: Spent) -> None:
        """A load that really read a whole chunk has ended."""
        if not spent.share_s > 0:
            return
        self._beside.add(spent, self._clock())
