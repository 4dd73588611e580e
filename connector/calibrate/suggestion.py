"""From measurements to a gate's marks and a tier's threads, each with its reason. Pure.

A gate is fed seconds per MiB (2**20 bytes) of one store, less the fixed cost and divided by the
stores under way: on a tier that is well, the inverse of its rate. It compares the moving average of
these samples with its marks. So the marks are multiples of the healthy sample, and the samples that
were really measured are sent through the same average to see how far a healthy tier strays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.calibrate.model import Fit, Kind, Measurement, fit
from kvsluice.connector.calibrate.units import format_pace, format_rate, format_seconds, format_size
from kvsluice.tiers.backpressure import EMABackpressureDetector

__all__ = ["Suggestion", "best_concurrency", "suggest"]

MIB: Final = 1 << 20
LOW_MULTIPLE: Final = 2.0
HIGH_MULTIPLE: Final = 4.0
"""A tier at a quarter of its rate is under pressure, and well again at half of it."""
LOW_STRAY: Final = 4.0
HIGH_STRAY: Final = 8.0
"""Standard deviations of the average by which a mark lies above the mean of healthy samples, where they are wild."""
PEAK_MARGIN: Final = 1.5
"""The high mark lies this far above the highest average seen: a longer run strays further."""
ALPHA: Final = EMABackpressureDetector.DEFAULT_ALPHA
ALPHA_STRAY: Final = math.sqrt(ALPHA / (2 - ALPHA))
"""The standard deviation of a moving average, of that of its independent samples."""
GOOD_SHARE: Final = 0.95
"""Threads that get this much of the best rate are enough: more of them only delay loads."""
OUTLIER: Final = 3.0
"""A cell this far off the model is taken for a disturbance and teaches nothing about the spread."""
TIMER_S: Final = 1e-4
"""What a busy machine adds to a timed call: its thread waits for a core, or for the interpreter. A guess."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to write into a tier's configuration.

    Attributes:
        high_water_s, low_water_s: s/MiB of one store, less the fixed cost and shared among the stores under way.
        fixed_cost_s: seconds of a store that do not depend on its size.
        n_read_threads, n_write_threads: the fewest that get nearly the best rate.
        read_bytes_per_s: what that many readers get together.
        reasons: one line for each of the above, and what is uncertain.
    """

    high_water_s: float
    low_water_s: float
    fixed_cost_s: float
    n_read_threads: int
    n_write_threads: int
    read_bytes_per_s: float
    reasons: tuple[str, ...]


def suggest(measurements: Iterable[Measurement], chunk_bytes: int) -> Suggestion:
    """Marks and threads for chunks of `chunk_bytes`; where that size was not measured, for the nearest one.

    Raises:
        ValueError: writes or reads are missing.
    """
    cells = list(measurements)
    writes, reads = _of_interest(cells, "write", chunk_bytes), _of_interest(cells, "read", chunk_bytes)
    write_fit = fit(cell for cell in cells if cell.kind == "write")
    fixed_s = _two_digits(write_fit.fixed_cost_s)
    n_write = best_concurrency(writes)
    n_read = best_concurrency(reads)
    health = _health(writes, write_fit, fixed_s, n_write.concurrency)
    low_s, high_s, mark_reasons = _marks(health, writes[0].num_bytes / MIB)
    fixed_why = f"a write takes {format_seconds(fixed_s)} whatever its size" if fixed_s else "none was found"
    reasons = [
        f"fixed_cost_s {fixed_s:g}: {fixed_why}",
        *mark_reasons,
        *_health_reasons(health, write_fit),
        _threads_reason("n_write_threads", writes, n_write),
        _threads_reason("n_read_threads", reads, n_read),
    ]
    measured = writes[0].num_bytes
    if measured != chunk_bytes:
        reasons.append(f"chunks of {format_size(chunk_bytes)} were not measured: taken from {format_size(measured)}")
    return Suggestion(
        high_water_s=high_s,
        low_water_s=low_s,
        fixed_cost_s=fixed_s,
        n_read_threads=n_read.concurrency,
        n_write_threads=n_write.concurrency,
        read_bytes_per_s=n_read.bytes_per_s,
        reasons=tuple(reasons),
    )


def best_concurrency(cells: Sequence[Measurement]) -> Measurement:
    """Of measurements of one size, the one of the smallest concurrency that gets `GOOD_SHARE` of the best rate."""
    best = max(cell.bytes_per_s for cell in cells)
    return min((cell for cell in cells if cell.bytes_per_s >= GOOD_SHARE * best), key=lambda cell: cell.concurrency)


def _of_interest(cells: Sequence[Measurement], kind: Kind, chunk_bytes: int) -> list[Measurement]:
    """The cells of the size nearest to `chunk_bytes`, by concurrency."""
    of_kind = [cell for cell in cells if cell.kind == kind]
    if not of_kind:
        raise ValueError(f"there is no measurement of a {kind}")
    nearest = min({cell.num_bytes for cell in of_kind}, key=lambda size: abs(math.log(size / chunk_bytes)))
    return sorted((cell for cell in of_kind if cell.num_bytes == nearest), key=lambda cell: cell.concurrency)


@dataclass(frozen=True, slots=True)
class _Health:
    """What the gate would see of the tier as it was measured, in s/MiB.

    Attributes:
        pace_s: the middle sample at the concurrency where it is largest: one stream alone may not
            fill the tier, and what the gate sees then is healthy too.
        concurrency: that concurrency.
        mean_s, stray_s: largest mean of samples, and there the standard deviation of the gate's average of them.
        peak_s: the highest that this average rose.
        usual, unusual: the cells that this is taken from, and those that it is not.
    """

    pace_s: float
    concurrency: int
    mean_s: float
    stray_s: float
    peak_s: float
    usual: tuple[Measurement, ...]
    unusual: tuple[Measurement, ...]


def _health(writes: Sequence[Measurement], write_fit: Fit, fixed_s: float, n_threads: int) -> _Health:
    """Of writes of one size, up to `n_threads` at once."""
    paces = {n: rate / n * MIB for n, rate in write_fit.s_per_byte.items() if n <= n_threads}
    slowest = max(paces, key=lambda n: (paces[n], -n))
    in_use = [cell for cell in writes if cell.concurrency <= n_threads]
    limit = math.log(OUTLIER)
    usual = [cell for cell in in_use if abs(math.log(cell.median_s / _expected_s(cell, write_fit))) <= limit]
    samples = [_samples(cell, fixed_s) for cell in usual]
    means = [(statistics.fmean(values), ALPHA_STRAY * statistics.pstdev(values)) for values in samples]
    mean_s, stray_s = max(means, key=lambda pair: pair[0] + LOW_STRAY * pair[1], default=(0.0, 0.0))
    return _Health(
        pace_s=paces[slowest],
        concurrency=slowest,
        mean_s=mean_s,
        stray_s=stray_s,
        peak_s=max((_peak_average(values) for values in samples), default=0.0),
        usual=tuple(usual),
        unusual=tuple(cell for cell in in_use if cell not in usual),
    )


def _marks(health: _Health, chunk_mib: float) -> tuple[float, float, list[str]]:
    """Low and high mark, and why."""
    stray = format_pace(health.stray_s)
    low_s, low_why = max(
        (LOW_MULTIPLE * health.pace_s, f"{LOW_MULTIPLE:g} x the healthy {format_pace(health.pace_s)}"),
        (
            health.mean_s + LOW_STRAY * health.stray_s,
            f"the mean sample, {format_pace(health.mean_s)}, and {LOW_STRAY:g} x the stray of its average, {stray}",
        ),
        (TIMER_S / chunk_mib, f"the least that can be told, {format_seconds(TIMER_S)} a chunk"),
    )
    ratio = HIGH_MULTIPLE / LOW_MULTIPLE
    high_s, high_why = max(
        (HIGH_MULTIPLE * health.pace_s, f"{HIGH_MULTIPLE:g} x the healthy {format_pace(health.pace_s)}"),
        (
            health.mean_s + HIGH_STRAY * health.stray_s,
            f"the mean sample and {HIGH_STRAY:g} x the stray of its average, {stray}",
        ),
        (PEAK_MARGIN * health.peak_s, f"{PEAK_MARGIN:g} x the highest average, {format_pace(health.peak_s)}"),
        (ratio * low_s, f"{ratio:g} x the low mark"),
    )
    low_s, high_s = _round_up(low_s), _round_up(high_s)
    return low_s, high_s, [f"low_water_s {low_s:g}: {low_why}", f"high_water_s {high_s:g}: {high_why}"]


def _health_reasons(health: _Health, write_fit: Fit) -> list[str]:
    pace = f"{format_pace(health.pace_s)} ({format_rate(MIB / health.pace_s)})"
    reasons = [f"healthy is {pace} beyond the fixed cost: at its slowest, with {health.concurrency} at once"]
    if health.usual:
        spread, at = max((cell.p99_s / cell.median_s, cell.concurrency) for cell in health.usual)
        reasons.append(
            f"spread: p99 is {spread:.2g} x the median at worst, with {at} at once; the gate's average of what was"
            f" measured rose to {format_pace(health.peak_s)}"
        )
    for cell in health.unusual:
        took, expected = format_seconds(cell.median_s), format_seconds(_expected_s(cell, write_fit))
        reasons.append(
            f"left out: writes with {cell.concurrency} at once took {took} where the others make it {expected}; was"
            " the tier disturbed?"
        )
    return reasons


def _expected_s(cell: Measurement, write_fit: Fit) -> float:
    return write_fit.fixed_cost_s + cell.num_bytes * write_fit.s_per_byte[cell.concurrency]


def _samples(cell: Measurement, fixed_s: float) -> list[float]:
    """s/MiB, as the gate is fed them."""
    share = cell.concurrency * cell.num_bytes / MIB
    return [max(0.0, seconds - fixed_s) / share for seconds in cell.seconds]


def _peak_average(samples: Sequence[float]) -> float:
    """How high the gate's moving average rises over these samples, beginning at their mean as after a warm-up."""
    average = peak = statistics.fmean(samples)
    for sample in samples:
        average = ALPHA * sample + (1 - ALPHA) * average
        peak = max(peak, average)
    return peak


def _threads_reason(key: str, cells: Sequence[Measurement], chosen: Measurement) -> str:
    best = max(cells, key=lambda cell: cell.bytes_per_s)
    what = (
        f"{key} {chosen.concurrency}: {format_rate(chosen.bytes_per_s)} for chunks of {format_size(chosen.num_bytes)}"
    )
    if chosen is cells[-1]:
        more = "only this was measured" if len(cells) == 1 else "the most that was measured, more may get more"
        return f"{what}; {more}"
    if chosen is best:
        return f"{what}, the best rate; more only make loads wait"
    share = f"{chosen.bytes_per_s / best.bytes_per_s:.0%}"
    return f"{what}, {share} of the best ({best.concurrency} threads); more only make loads wait"


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}") if value >= 1e-6 else 0.0


def _round_up(value: float) -> float:
    """To two significant digits, never down."""
    exponent = math.floor(math.log10(value)) - 1
    scaled = value / 10.0**exponent
    # A value that has two digits already must not go up for the error of a division.
    return float(f"{math.ceil(scaled - 1e-9)}e{exponent}")
