"""Virtual time: what happens next, in order, without waiting for it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Timeline"]


class Timeline:
    """Actions in order of their time; those of one time in the order in which they were planned.

    Calling it reads the clock, so that it stands wherever the product takes one. Not thread-safe.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self.now_s

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `time_s`, or now where that has passed."""
        if time_s < self.now_s:
            time_s = self.now_s
        self._sequence += 1
        heapq.heappush(self._planned, (time_s, self._sequence, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` seconds, 0 or more."""
        self._sequence += 1
        heapq.heappush(self._planned, (self.now_s + delay_s, self._sequence, action))

    def run(self) -> None:
        """Until nothing is planned any more."""
        planned = self._planned
        while planned:
            self.now_s, _, action = heapq.heappop(planned)
            action()
