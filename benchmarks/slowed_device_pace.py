"""When each request to a slow device ends: all that are in flight share its rate evenly.

A request is a stretch of device time: its bytes at the device's rate and a fixed time per request.
With n in flight each gets an n-th of the device, which is what a disk or a server behind a fair
queue gives. Nothing here waits or reads a clock, so it can be followed on virtual time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Speed:
    """`bytes_per_s` for all requests together, and `per_request_s` of device time for each."""

    bytes_per_s: float
    per_request_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.per_request_s >= 0:
            raise ValueError(
                f"bytes_per_s {self.bytes_per_s} must be positive, per_request_s {self.per_request_s} not negative"
            )

    def device_s(self, num_bytes: int) -> float:
        """Seconds that one request takes of an otherwise idle device."""
        return num_bytes / self.bytes_per_s + self.per_request_s


class SharedPace(Generic[T]):
    """Requests in flight and when they end. Not thread-safe.

    Args:
        speed: of the requests to come.
        now_s: seconds; every later call gives a time that is not before the last one.
    """

    def __init__(self, speed: Speed, now_s: float) -> None:
        self.speed = speed
        """May be set at any time; requests in flight keep the device time they came with."""
        self.busy_s = 0.0
        """Seconds with anything in flight, frozen ones not counted."""
        self._at_s = now_s
        # Device time that a request in flight since ever would have had by `_at_s`.
        self._attained_s = 0.0
        self._ends: list[tuple[float, int, T]] = []
        self._arrivals = 0
        self._ended: list[tuple[float, T]] = []
        self._frozen = False

    @property
    def in_flight(self) -> int:
        return len(self._ends)

    def arrive(self, now_s: float, request: T, num_bytes: int) -> float:
        """Take a request; the device time it needs."""
        self._advance(now_s)
        device_s = self.speed.device_s(num_bytes)
        self._arrivals += 1
        heapq.heappush(self._ends, (self._attained_s + device_s, self._arrivals, request))
        return device_s

    def take_ended(self, now_s: float) -> list[tuple[float, T]]:
        """When each request that has ended since the last call did so; the first to end first."""
        self._advance(now_s)
        ended, self._ended = self._ended, []
        return ended

    def next_end_s(self) -> float | None:
        """When the next request ends if none comes before; `None` with none in flight, or frozen."""
        if not self._ends or self._frozen:
            return None
        return self._at_s + max(0.0, self._ends[0][0] - self._attained_s) * len(self._ends)

    def freeze(self, now_s: float) -> None:
        """The device hangs: what is in flight gets no further."""
        self._advance(now_s)
        self._frozen = True

    def thaw(self, now_s: float) -> None:
        """It goes on where it was."""
        self._advance(now_s)
        self._frozen = False

    def _advance(self, now_s: float) -> None:
        # Each end is taken at its own time, however late the caller is: no rate is lost to that.
        while self._ends and not self._frozen:
            end_s = self._at_s + max(0.0, self._ends[0][0] - self._attained_s) * len(self._ends)
            if end_s > now_s:
                self._attained_s += (now_s - self._at_s) / len(self._ends)
                self.busy_s += now_s - self._at_s
                break
            self.busy_s += end_s - self._at_s
            self._at_s = end_s
            self._attained_s, _, request = heapq.heappop(self._ends)
            self._ended.append((end_s, request))
        self._at_s = now_s
