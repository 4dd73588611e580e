"""A modelled storage device: processor sharing, a fixed cost per operation, slow times and hangs.

    submit ──▶ line (only past max_running) ──▶ fixed cost ──▶ shares the bandwidth ──▶ done

All operations that move bytes get an equal part of the bandwidth. Instead of the bytes that each of
them still lacks, one number is kept: the bytes that an operation would have got that had been there
from the start. It grows at the rate of one operation; an operation is done when it has grown by the
operation's bytes. So an arrival and a departure cost one step in a heap, however many are under way.

A network that several nodes share is one such device behind all of them: every operation of every
node gets an equal part of the link (plain sharing per operation, no fairness between nodes).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvsluice.connector.replay.timeline import Timeline
from kvsluice.tiers.errors import ConfigError

__all__ = ["Device", "DeviceSpec", "SlowTime"]


@dataclass(frozen=True, slots=True)
class SlowTime:
    """From `start_s` to `end_s` the device runs at `factor` times its rate; 0 is a hang.

    In a hang nothing ends, operations that move no bytes neither. Both times and the factor are finite: a hang
    without an end would leave its operations, and so a replay, without one.

    Raises:
        ConfigError: a figure out of its range, by value.
    """

    start_s: float
    end_s: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise ConfigError(f"a slow time from {self.start_s} s to {self.end_s} s is none")
        if self.end_s == math.inf:
            raise ConfigError(f"a slow time from {self.start_s} s to {self.end_s} s never ends: give it a finite end")
        if not 0 <= self.factor < math.inf:
            raise ConfigError(f"factor {self.factor} of a slow time must be at least 0 and finite")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a device can do.

    Attributes:
        bytes_per_s: all operations together.
        operation_s: fixed cost of each operation; those of several operations pass at once.
        max_running: operations that the device works on at once, others wait in line; None for any number.
        stream_bytes_per_s: the most that one operation gets alone; None for all of it.
        slow: times at which it is slower, in order and apart.
    """

    bytes_per_s: float
    operation_s: float = 0.0
    max_running: int | None = None
    stream_bytes_per_s: float | None = None
    slow: tuple[SlowTime, ...] = ()

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "stream_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name} {rate} of a device must be above 0")
        if not self.operation_s >= 0:
            raise ConfigError(f"operation_s {self.operation_s} of a device must be at least 0")
        if self.max_running is not None and self.max_running < 1:
            raise ConfigError(f"max_running {self.max_running} of a device must be at least 1")
        for before, after in itertools.pairwise(self.slow):
            if after.start_s < before.end_s:
                raise ConfigError(f"slow times overlap or are out of order: {before} and {after}")

    def mean_bytes_per_s(self, window_s: float) -> float:
        """What it can do on average from the start to `window_s`, its slow times included."""
        lost_s = sum((1 - slow.factor) * max(0.0, min(slow.end_s, window_s) - slow.start_s) for slow in self.slow)
        return self.bytes_per_s * (1 - lost_s / window_s)


class Device:
    """One device on `timeline`.

    Args:
        spec: what it can do.
        timeline: its clock, and where it plans what ends.
    """

    def __init__(self, spec: DeviceSpec, timeline: Timeline) -> None:
        self.spec = spec
        self._timeline = timeline
        self._line: deque[tuple[int, Callable[[], None]]] = deque()
        self._under_way = 0
        # Operations that move bytes: what `_attained` must reach, order of arrival, what to call then.
        self._moving: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals = 0
        self._attained_bytes = 0.0
        self._at_s = timeline.now_s
        self._factor = 1.0
        self._aims = 0
        stream = spec.stream_bytes_per_s
        self._stream_bytes_per_s = spec.bytes_per_s if stream is None else min(stream, spec.bytes_per_s)
        for slow in spec.slow:
            timeline.at(slow.start_s, partial(self._run_at, slow.factor))
            timeline.at(slow.end_s, partial(self._run_at, 1.0))

    def submit(self, num_bytes: int, done: Callable[[], None]) -> None:
        """Move `num_bytes` (0 for a question) in either direction; `done` is called when that is over."""
        if self.spec.max_running is not None and self._under_way >= self.spec.max_running:
            self._line.append((num_bytes, done))
        else:
            self._begin(num_bytes, done)

    @property
    def under_way(self) -> int:
        """Operations that have begun and not ended."""
        return self._under_way

    def _begin(self, num_bytes: int, done: Callable[[], None]) -> None:
        self._under_way += 1
        if self.spec.operation_s > 0:
            self._timeline.after(self.spec.operation_s, partial(self._move, num_bytes, done))
        else:
            self._move(num_bytes, done)

    def _move(self, num_bytes: int, done: Callable[[], None]) -> None:
        self._advance()
        self._arrivals += 1
        heapq.heappush(self._moving, (self._attained_bytes + num_bytes, self._arrivals, done))
        self._aim()

    def _run_at(self, factor: float) -> None:
        self._advance()
        self._factor = factor
        self._aim()

    def _rate(self) -> float:
        """Bytes per second of each operation that moves some."""
        return self._factor * min(self._stream_bytes_per_s, self.spec.bytes_per_s / len(self._moving))

    def _advance(self) -> None:
        now_s = self._timeline.now_s
        if self._moving:
            self._attained_bytes += (now_s - self._at_s) * self._rate()
        else:
            # Kept small, so that rounding stays far below a byte.
            self._attained_bytes = 0.0
        self._at_s = now_s

    def _aim(self) -> None:
        """Plan the end of the operation that is done first; what was planned before is void."""
        self._aims += 1
        if self._moving and (rate := self._rate()) > 0:
            left_bytes = self._moving[0][0] - self._attained_bytes
            self._timeline.after(left_bytes / rate, partial(self._end, self._aims))

    def _end(self, aim: int) -> None:
        if aim != self._aims:
            return
        # Set, not computed: no rounding leaves a rest of a byte behind.
        moving = self._moving
        self._attained_bytes = moving[0][0]
        self._at_s = self._timeline.now_s
        ended = []
        while moving and moving[0][0] <= self._attained_bytes:
            ended.append(heapq.heappop(moving)[2])
        self._under_way -= len(ended)
        self._aim()
        for done in ended:
            done()
        while self._line and self._under_way < (self.spec.max_running or 0):
            self._begin(*self._line.popleft())
