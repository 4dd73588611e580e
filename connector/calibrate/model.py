"""What was measured of a tier, and the model that is fitted to it. Pure: no I/O, no clock.

An operation on `b` bytes with `n` of them under way takes

    T(n, b) = fixed + b * g(n)        g(n) = max(n / bandwidth, 1 / stream)

Fixed costs (a round trip, an open, a commit) pass at once, the bandwidth is shared, and one stream
alone may not fill it. `g` is left free per concurrency while fitting, so that a tier whose streams
are bounded does not bend the fixed cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, TypeAlias

__all__ = ["Fit", "Kind", "Measurement", "fit"]

Kind: TypeAlias = Literal["write", "read"]

_NO_RATE: Final = 1e-15
"""Seconds per byte of no hardware, where the fixed cost leaves nothing for the bytes."""
_TELLING: Final = 0.2
"""A transfer that is less of an operation than this cannot be told from the noise of the fixed cost."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Operations of one kind and size at one concurrency.

    Attributes:
        kind: "write" (a store) or "read" (a load).
        num_bytes: of each operation.
        concurrency: operations under way at any moment, each started as soon as one has ended.
        seconds: what each took, in the order in which they ended.
        wall_s: seconds that all of them together took at that concurrency.

    Raises:
        ValueError: a figure that is no measurement; by name and value.
    """

    kind: Kind
    num_bytes: int
    concurrency: int
    seconds: tuple[float, ...]
    wall_s: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.concurrency < 1:
            raise ValueError(f"num_bytes and concurrency are at least 1, got {self.num_bytes}, {self.concurrency}")
        if not self.seconds or not all(0 < value < math.inf for value in (*self.seconds, self.wall_s)):
            raise ValueError(f"seconds and wall_s are positive and finite, got {self.seconds}, {self.wall_s}")

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        """Nearest rank: of fewer than 100 operations the slowest."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]

    @property
    def turn_s(self) -> float:
        """From one operation of a stream to its next, on average, by the throughput."""
        return self.concurrency * self.wall_s / len(self.seconds)

    @property
    def bytes_per_s(self) -> float:
        """Of all streams together."""
        return self.num_bytes * len(self.seconds) / self.wall_s


@dataclass(frozen=True, slots=True)
class Fit:
    """The model of one kind of operation.

    Attributes:
        fixed_cost_s: seconds of an operation that do not depend on its size.
        bandwidth_bytes_per_s: what all streams together get at the most.
        stream_bytes_per_s: what one stream alone gets; the bandwidth where concurrency 1 was not measured.
        bandwidth_is_bound: no transfer was long enough to tell: the bandwidth is at least this.
        s_per_byte: `g(n)` per measured concurrency `n`.
    """

    fixed_cost_s: float
    bandwidth_bytes_per_s: float
    stream_bytes_per_s: float
    bandwidth_is_bound: bool
    s_per_byte: Mapping[int, float]

    def seconds(self, num_bytes: int, concurrency: int) -> float:
        """What the model says an operation takes."""
        rate = max(concurrency / self.bandwidth_bytes_per_s, 1 / self.stream_bytes_per_s)
        return self.fixed_cost_s + num_bytes * rate


_Point: TypeAlias = tuple[int, float]
"""Bytes of an operation, and its seconds."""
_Points: TypeAlias = Mapping[int, Sequence[_Point]]
"""By concurrency."""


def fit(measurements: Iterable[Measurement]) -> Fit:
    """The model that explains these measurements best.

    "Best" is the least sum of absolute logarithmic errors over all cells, among all values that
    explain some cells exactly: a cell that is far off counts as one, and small operations count as
    much as large ones.

    The fixed cost is taken from the cells' medians, with a rate of its own for each concurrency. It
    can be told only from two sizes at one concurrency, or, failing that, from two concurrencies;
    without it is 0. The rates are taken, with that fixed cost, from the cells' throughputs: a gate
    averages, and stalls are part of its average.

    Raises:
        ValueError: no measurements, or of both kinds.
    """
    cells = list(measurements)
    if len({cell.kind for cell in cells}) != 1:
        raise ValueError(f"a fit takes measurements of one kind, got {sorted({cell.kind for cell in cells})}")
    medians: dict[int, list[_Point]] = {}
    turns: dict[int, list[_Point]] = {}
    for cell in cells:
        medians.setdefault(cell.concurrency, []).append((cell.num_bytes, cell.median_s))
        turns.setdefault(cell.concurrency, []).append((cell.num_bytes, cell.turn_s))
    fixed_s = _fixed_cost(medians)
    slopes = {n: _best_rate(points, fixed_s)[1] for n, points in turns.items()}
    shared, alone = _shared_and_alone(turns, fixed_s)
    telling_s = _TELLING * fixed_s / (1 - _TELLING)
    largest = max(num_bytes * max(n * shared, alone) for n, points in turns.items() for num_bytes, _ in points)
    if largest < telling_s:
        bound = max(n * num_bytes for n, points in turns.items() for num_bytes, _ in points) / telling_s
        return Fit(fixed_s, bound, bound, True, slopes)
    return Fit(fixed_s, 1 / shared, 1 / alone, False, slopes)


def _fixed_cost(medians: _Points) -> float:
    groups = [points for points in medians.values() if len({num_bytes for num_bytes, _ in points}) > 1]
    if groups:
        groups = list(medians.values())
    else:
        # One size: what is left is that n of them share the bandwidth.
        groups = [[(n * num_bytes, seconds) for n, points in medians.items() for num_bytes, seconds in points]]
    # All of it, where the size makes no difference that could be told.
    tried = {0.0, *(seconds for points in groups for _, seconds in points)}
    for points in groups:
        for (bytes_a, a_s), (bytes_b, b_s) in combinations(points, 2):
            # Where the line through two cells meets size 0.
            if bytes_a != bytes_b and (slope := (b_s - a_s) / (bytes_b - bytes_a)) > 0:
                tried.add(max(0.0, a_s - slope * bytes_a))
    return min((sum(_best_rate(points, fixed_s)[0] for points in groups), fixed_s) for fixed_s in tried)[1]


def _best_rate(points: Sequence[_Point], fixed_s: float) -> tuple[float, float]:
    """The error that is left with this fixed cost, and the s/byte that leave it; always more than 0."""
    rates = [(seconds - fixed_s) / num_bytes for num_bytes, seconds in points if seconds > fixed_s]
    tried = [
        (sum(abs(math.log((fixed_s + num_bytes * rate) / seconds)) for num_bytes, seconds in points), rate)
        for rate in rates
    ]
    # Where no operation is longer than the fixed cost, that is no fixed cost.
    return min(tried, default=(math.inf, _NO_RATE))


def _shared_and_alone(turns: _Points, fixed_s: float) -> tuple[float, float]:
    """s/byte of all streams together and of one alone, which are never fewer."""
    cells = [(n, num_bytes, seconds) for n, points in turns.items() for num_bytes, seconds in points]
    rates = [(n, (seconds - fixed_s) / num_bytes) for n, num_bytes, seconds in cells if seconds > fixed_s]
    if not rates:
        return _NO_RATE, _NO_RATE
    best = (math.inf, 0.0, 0.0)
    for shared in {rate / n for n, rate in rates}:
        for alone in {shared, *(rate for _, rate in rates if rate > shared)}:
            error = 0.0
            for n, num_bytes, seconds in cells:
                error += abs(math.log((fixed_s + num_bytes * max(n * shared, alone)) / seconds))
                if error >= best[0]:
                    break
            else:
                best = (error, shared, alone)
    return best[1:]
