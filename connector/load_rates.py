"""What is known of two speeds: how fast chunks come from a tier, and how fast the engine computes them.

Both are learned from what happened, and both forget: what happened last counts most.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from kvsluice.tiers.backpressure import Spent

__all__ = ["HALF_LIFE_S", "PrefillRate", "TierLoadTimes"]

ALPHA: Final = 0.2
"""Weight of a new load."""
WARM_UP_LOADS: Final = 10
"""Of the first ones the quickest counts: connections come up, kernels are compiled. The store gate's own number."""
MOST_RISE: Final = 4.0
"""What one load, or very few, took longer than so many times the usual counts as that: a hiccup must not cost all hits
for seconds, and what lasts is believed a load or two later."""
HALF_LIFE_S: Final = 2.0
"""What is known of a tier counts half after so long without a load; the store gate's own half-life."""
HALF_LIFE_TOKENS: Final = 16_384
"""What is known of the engine counts half after so many more tokens: two full steps of a large engine."""
LARGE_STEP_TOKENS: Final = 2048
"""From so many tokens on, what a step takes beside them hardly shows: each token counts alike."""
_MANY: Final = 4
"""Loads that are taken together without a quiet moment, in widths: what starts and ends in between hardly shows."""
_SEVERAL: Final = 4
"""Loads that came together of which one may be an exception."""
_FEW: Final = 8
"""One load in so many may be lost without a word about how long it would have taken."""
_NOTHING: Final = Spent.alone(0.0)


class PrefillRate:
    """Seconds per token of a prompt. Not thread-safe: the planner's alone.

    A step of few tokens takes about as long as an empty one, so it says little of what a long prompt
    would take, and it counts little: by the square of its tokens, as in the line through the origin
    that comes closest to what was observed. Of large steps each token counts alike. An engine that
    only ever takes small steps is described by them all the same.

    Args:
        fixed_tokens_per_s: what to answer instead of what is observed.
    """

    def __init__(self, fixed_tokens_per_s: float | None = None) -> None:
        self._fixed_s = None if fixed_tokens_per_s is None else 1.0 / fixed_tokens_per_s
        self._sum_s = 0.0
        self._sum_tokens = 0.0

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """Prefill of `num_tokens` tokens took `elapsed_s`; one without tokens, or without time, says nothing."""
        if num_tokens <= 0 or elapsed_s <= 0:
            return
        # Forgotten by tokens, not by steps: a hundred small ones must not displace a large one.
        kept = math.pow(0.5, num_tokens / HALF_LIFE_TOKENS)
        weight = min(num_tokens, LARGE_STEP_TOKENS)
        self._sum_s = self._sum_s * kept + weight * elapsed_s
        self._sum_tokens = self._sum_tokens * kept + weight * num_tokens

    @property
    def token_s(self) -> float | None:
        """None before the first observation."""
        if self._fixed_s is not None:
            return self._fixed_s
        return self._sum_s / self._sum_tokens if self._sum_tokens else None


class _Sums:
    """Of loads that came together. Of several the longest counts as the second: one may have hung in the network."""

    __slots__ = ("_drain_s", "_elapsed_s", "_longest", "_second", "begun_s", "count", "lost")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        """No later than the start of any that came."""
        self.count = 0
        self.lost = 0
        """Loads among them that did not come: what they took of the time is not in the sums."""
        self._drain_s = 0.0
        self._elapsed_s = 0.0
        self._longest = self._second = (0.0, 0.0)

    def add(self, drain_s: float, elapsed_s: float, now_s: float) -> None:
        self.count += 1
        # One may have been under way already when those before were taken in.
        self.begun_s = min(self.begun_s, now_s - elapsed_s)
        # The longest stands beside the sums, so that leaving it out is no difference of large numbers.
        if drain_s > self._longest[0]:
            self._longest, self._second = (drain_s, elapsed_s), self._longest
            drain_s, elapsed_s = self._second
        elif drain_s > self._second[0]:
            self._second = (drain_s, elapsed_s)
        self._drain_s += drain_s
        self._elapsed_s += elapsed_s

    @property
    def several(self) -> bool:
        return self.count >= _SEVERAL

    @property
    def interval_s(self) -> float:
        """From one to the next."""
        return (self._drain_s + self._last[0]) / self.count

    @property
    def company(self) -> float:
        """How many ran at once, on the average over the time in which any did."""
        drain_s, elapsed_s = self._last
        return (self._elapsed_s + elapsed_s) / (self._drain_s + drain_s)

    @property
    def _last(self) -> tuple[float, float]:
        return self._second if self.several else self._longest


class TierLoadTimes:
    """How long loads of one tier take, by how many of them are wanted. Not thread-safe: the planner's alone.

    A request to a distant store takes as long alone as among eight; a read from a disk that is busy
    takes eight times as long among eight. Which of the two a tier is like, only loads can tell that ran
    in such company. So one figure is kept for each of 1, 2, 4, ... loads at once, the time of one of
    them, and two things are taken for granted: in more company no load gets faster, and no device
    delivers less. They bound what one measurement leaves open about the other companies:

        company   1        2        4        8
        measured  50 ms
        bounds    50       50..100  50..200  50..400     with nothing better known, the lower ones
        measured                             80 ms
        bounds    10..80   20..80   40..80   80          so the first three stay 50, 50, 50

    Single loads would mislead: of eight that start together on a busy disk the first comes at once and
    the last after all others. Their sums do not, so loads are taken together, from the first that opens
    to a quiet moment or until there are many.

    Args:
        width: loads that may run at once on a rank.
        fixed_interval_s: seconds from one load to the next, instead of what is measured.
    """

    def __init__(self, width: int, fixed_interval_s: float | None = None) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width = width
        self._fixed_interval_s = fixed_interval_s
        self._elapsed_s = [0.0] * ((width - 1).bit_length() + 1)
        """Of one load among 1, 2, 4, ...; all 0 before the first."""
        self._seen = [False] * len(self._elapsed_s)
        """Whether it was measured, or only bounded by the others."""
        self._measured_s: float | None = None
        self._loads = 0
        self._late = False
        self._sums = _Sums(math.inf)
        self._stall = _NOTHING
        self._stalled_s = 0.0
        self._opened_s = 0.0
        self._table: list[float] | None = None
        self.steepest_s = 0.0
        """No chunk more adds more than this; as of the last `table`."""

    # ---- what happened -----------------------------------------------------------------------

    def on_opened(self, now_s: float) -> None:
        """A load was asked for where none was open."""
        self._opened_s = self._sums.begun_s = now_s

    def on_loaded(self, drain_s: float, elapsed_s: float, now_s: float) -> None:
        """A load has come.

        Args:
            drain_s: its part of the time among the loads that ran.
            elapsed_s: from its start to its end.
            now_s: by the planner's clock.
        """
        if drain_s <= 0:
            return
        self._sums.add(drain_s, max(drain_s, elapsed_s), now_s)
        self._table = None
        if self._sums.count >= _MANY * self.width:
            self._learn(now_s)

    def on_lost(self) -> None:
        """A load has been given up, or came from elsewhere."""
        self._sums.lost += 1

    def on_quiet(self, now_s: float) -> None:
        """No load is open any more: what was out has come, or nobody waits for it."""
        self._learn(now_s)
        self.on_stall(_NOTHING, now_s)

    def on_late(self, waited_s: float, place: int, now_s: float) -> None:
        """A load has not come: all that is known is that it would have taken more than `waited_s`.

        `place` counts the loads that were to come up to and with it. What is known is never lowered by it,
        and counts from now: it was waited for as long as it would have been worth.
        """
        self.on_failed(waited_s, place, now_s)
        self._measured_s = now_s

    def on_failed(self, waited_s: float, place: int, now_s: float) -> None:
        """A load failed after `waited_s`, as `on_late`.

        What is known is raised by one that took longer. One that took less says nothing about how long
        loads take: a tier that is down refuses at once, and is as fast as before when it is back.
        """
        company, at = self._company(place)
        least_s = waited_s / place * company
        if least_s > self._elapsed_s[at]:
            self._set(at, least_s)
            self._measured_s = now_s
        self._late = True

    def on_stall(self, stall: Spent, now_s: float) -> None:
        """What the load that is next to end has taken so far, as of a report; all 0 for none under way."""
        if stall.drain_s <= 0:
            stall = _NOTHING
        elif stall.elapsed_s > now_s - self._opened_s:
            # A read that nobody waits for any more may be out for ever, and says nothing of those that came after.
            own = max(0.0, now_s - self._opened_s) / stall.elapsed_s
            stall = Spent(stall.elapsed_s * own, stall.share_s * own, stall.drain_s * own)
        if stall is not self._stall:
            self._stall, self._stalled_s = stall, now_s
            self._table = None

    # ---- what to expect ----------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether enough is known to decide by."""
        return (
            self._fixed_interval_s is not None
            or self._loads >= WARM_UP_LOADS
            or self._late
            or self._sums.count >= self._enough
            or self._stall.drain_s > 0
        )

    def table(self) -> list[float]:
        """Seconds until the last of n chunks has come that are asked for at once, for n of 0 to the width.

        More take in proportion to the last entry.
        """
        if self._table is None:
            self._table = [0.0, *(self._time_s(count) for count in range(1, self.width + 1))]
            steps = (after - before for before, after in pairwise(self._table))
            self.steepest_s = max(*steps, self._table[-1] / self.width)
        return self._table

    def kept(self, now_s: float) -> float:
        """By what the table is to be multiplied where what is known must not count for ever."""
        if self._fixed_interval_s is not None:
            return 1.0
        last_s = now_s if self._measured_s is None or self._sums.count else self._measured_s
        if self._stall.drain_s > 0:
            last_s = max(last_s, self._stalled_s)
        return self._kept(now_s - last_s)

    @property
    def interval_s(self) -> float | None:
        """Seconds from one load to the next where many are wanted; None where nothing was measured."""
        return self.table()[-1] / self.width if self.known or self._measured_s is not None else None

    # ---- the rest ----------------------------------------------------------------------------

    @property
    def _enough(self) -> int:
        """Loads whose sums say something before all of them have come."""
        return _SEVERAL if self._loads >= WARM_UP_LOADS else WARM_UP_LOADS

    def _learn(self, now_s: float) -> None:
        """Take in the loads that came together."""
        sums, self._sums = self._sums, _Sums(now_s)
        if not sums.count:
            return
        company, at = self._company(sums.company)
        sample_s = sums.interval_s * company
        known_s = self._elapsed_s[at]
        if sums.lost * _FEW > sums.count and sample_s < known_s:
            # What the lost ones took is not in the sample. The tier took no longer for those that came than
            # since the first of them started, whatever it did for the others.
            sample_s = max(sample_s, (now_s - sums.begun_s) / sums.count * company)
            if sample_s >= known_s:
                return
        kept = math.pow(1 - ALPHA, sums.count)
        if not self._seen[at] or self._measured_s is None:
            kept = 0.0
        elif self._loads < WARM_UP_LOADS:
            kept = 1.0 if sample_s > known_s else 0.0
        elif sample_s < known_s:
            # What is known has lost weight while nothing was loaded: good loads after a bad time count much.
            kept *= self._kept(now_s - self._measured_s)
        elif not sums.several:
            sample_s = min(sample_s, MOST_RISE * known_s)
        self._loads += sums.count
        self._set(at, sample_s + kept * (known_s - sample_s))
        self._seen[at] = True
        self._measured_s = now_s

    @staticmethod
    def _kept(idle_s: float) -> float:
        return math.pow(0.5, max(0.0, idle_s) / HALF_LIFE_S)

    def _company(self, count: float) -> tuple[int, int]:
        """The nearest of 1, 2, 4, ... by ratio, and its index."""
        at, last = 0, len(self._elapsed_s) - 1
        while at < last and count * count > (1 << at) * (2 << at):
            at += 1
        return 1 << at, at

    def _set(self, at: int, elapsed_s: float) -> None:
        """Take in the time of one company, and keep the others within what it leaves possible."""
        for other in range(len(self._elapsed_s)):
            in_proportion_s = elapsed_s * 2.0 ** (other - at)
            low_s, high_s = min(elapsed_s, in_proportion_s), max(elapsed_s, in_proportion_s)
            self._elapsed_s[other] = min(max(self._elapsed_s[other], low_s), high_s)
        self._table = None

    def _time_s(self, count: int) -> float:
        if self._fixed_interval_s is not None:
            return count * self._fixed_interval_s
        at = count.bit_length() - 1
        time_s = self._elapsed_s[at]
        if count > 1 << at:
            time_s += (self._elapsed_s[at + 1] - time_s) * (count - (1 << at)) / (1 << at)
        # As many others will take this much at the least: those that came before all have tell of the
        # quicker ones, and those under way have taken so much already.
        if self._sums.count >= self._enough:
            time_s = max(time_s, self._sums.interval_s * min(count, self._sums.company))
        if self._stall.drain_s > 0:
            time_s = max(time_s, self._stall.drain_s * min(count, self._stall.elapsed_s / self._stall.drain_s))
        return time_s
