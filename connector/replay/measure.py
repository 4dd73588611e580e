"""What is noted during a run: each load's times, and how things stood from moment to moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Latency", "LoadLog", "LoadRecord", "Series", "percentile", "slowdowns"]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; NaN of none. `values` are sorted."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, of loads that failed too: they were waited for.

    Attributes:
        count: how many.
        p50_s, p99_s, max_s: NaN where there are none.
    """

    count: int
    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency:
        ordered = sorted(values)
        last_s = ordered[-1] if ordered else math.nan
        return cls(len(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99), last_s)


@dataclass(slots=True)
class LoadRecord:
    """One load.

    Attributes:
        start_s: when it was asked for.
        keys: its chunks.
        latency_s: seconds to the last of them.
        failed: those that did not come.
        chunks_s: seconds to each that was decided, in that order.
        served: by index in `keys`, the tier that served the chunk and the seconds that it took; -1 for the host tier.
    """

    start_s: float
    keys: tuple[bytes, ...]
    latency_s: float = 0.0
    failed: int = 0
    chunks_s: list[float] = field(default_factory=list)
    served: dict[int, tuple[int, float]] = field(default_factory=dict)


class LoadLog:
    """The loads of one node, in the order in which they were asked for.

    A chunk's time ends when it is in its blocks, or is known to be a miss, by the worker's clock: what a
    scheduler hears a step later says less about the tier.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[int, LoadRecord] = {}
        self.records: list[LoadRecord] = []

    def opened(self, job_id: int, keys: Sequence[bytes]) -> None:
        record = LoadRecord(self._clock(), tuple(keys))
        self._open[job_id] = record
        self.records.append(record)

    def decided(self, job_id: int, part: int, tier: int, reason: str | None) -> None:
        """One chunk of the load is over."""
        record = self._open[job_id]
        record.latency_s = self._clock() - record.start_s
        record.chunks_s.append(record.latency_s)
        if reason is None:
            record.served[part] = tier, record.latency_s

    def closed(self, job_id: int, num_failed: int) -> None:
        """The scheduler has the result."""
        record = self._open.pop(job_id)
        record.failed = num_failed
        # Chunks that no worker heard of (no slot came free in time, no tier holds them) end now.
        if left := len(record.keys) - len(record.chunks_s):
            record.latency_s = self._clock() - record.start_s
            record.chunks_s.extend([record.latency_s] * left)

    @property
    def num_open(self) -> int:
        return len(self._open)


def slowdowns(loads: Sequence[LoadRecord], alone: Sequence[LoadRecord]) -> list[float]:
    """Of each load, its time over its own time alone; both in one order.

    Raises:
        ValueError: these are not the same loads.
    """
    if [record.start_s for record in loads] != [record.start_s for record in alone]:
        raise ValueError(f"{len(loads)} loads and {len(alone)} alone are not the same ones")
    return [mine.latency_s / its.latency_s for mine, its in zip(loads, alone, strict=True)]


@dataclass(frozen=True, slots=True)
class Series:
    """How things went, one value per interval; NaN where there was nothing to measure.

    Attributes:
        end_s: of each interval.
        load_p99_s: of requests whose load was asked for in it.
        store_bytes_per_s: newly written, all nodes together.
        ema_s: s/MiB, the highest of all nodes' gates at its end.
        drop_share: of the chunks that were offered in it.
        queued_stores: waiting for a thread at its end, all nodes together.
    """

    end_s: tuple[float, ...]
    load_p99_s: tuple[float, ...]
    store_bytes_per_s: tuple[float, ...]
    ema_s: tuple[float, ...]
    drop_share: tuple[float, ...]
    queued_stores: tuple[int, ...]
