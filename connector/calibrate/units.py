"""Figures as people read them: three digits and a unit; bytes in powers of 1024, as the gate's MiB is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["format_pace", "format_pair", "format_rate", "format_seconds", "format_size"]

_SIZES: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_seconds(seconds: float) -> str:
    """`4.21 ms`."""
    scale, unit = _unit(seconds, _TIMES)
    return f"{_digits(seconds / scale, 3)} {unit}"


def format_pair(seconds: float, longer_s: float) -> str:
    """`4.2/16 ms`, both in the unit of the longer and shorter by a digit, for tables."""
    scale, unit = _unit(longer_s, _TIMES)
    return f"{_digits(seconds / scale, 2)}/{_digits(longer_s / scale, 2)} {unit}"


def format_pace(s_per_mib: float) -> str:
    """`430 us/MiB`."""
    return f"{format_seconds(s_per_mib)}/MiB"


def format_size(num_bytes: float) -> str:
    """`4 MiB`."""
    scale, unit = _unit(num_bytes, _SIZES)
    return f"{_digits(num_bytes / scale, 3)} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """`1.91 GiB/s`."""
    return f"{format_size(bytes_per_s)}/s"


def _unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    # Half a step of rounding below the next unit, 999.6 is already 1000.
    return next((unit for unit in units if value >= 0.9995 * unit[0]), units[-1])


def _digits(value: float, digits: int) -> str:
    # Not 1.2e+02 for 123.
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
