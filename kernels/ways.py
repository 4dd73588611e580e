"""The ways between the device and host memory, what was measured of them, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.operations import Direction

__all__ = ["ALL_WAYS", "TORCH", "CopyChoice", "CopySetting", "Way", "WayMeasured", "choose"]

CopySetting = Literal["auto", "torch", "triton", "batched"]
"""What may be asked for."""
_PROGRAMS: Final = (1, 2, 4)
"""Multiprocessors that the kernel is tried with. Four are 3 % of an H100's 132; twelve, which a kernel that
writes to host memory itself needs for the link, are 9 %."""
_NEARLY: Final = 0.95
"""Rates within so much of the best are equal: of these the way that takes the fewest multiprocessors is best."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of copying in one direction.

    Attributes:
        name: as in `CopySetting`, or `host`.
        programs: multiprocessors that its kernel takes at most; 0 where the copy engines do all, None where torch
            takes as many as it likes.
    """

    name: str
    programs: int | None = 0

    def __str__(self) -> str:
        return f"{self.name} on {self.programs} SMs" if self.programs else self.name


TORCH: Final = Way("torch", None)
ALL_WAYS: Final = (Way("batched"), *(Way("triton", programs) for programs in _PROGRAMS), TORCH)
"""What `auto` tries."""


@dataclass(frozen=True, slots=True)
class WayMeasured:
    """What came of one way: its rate, or why it cannot be had.

    Attributes:
        bytes_per_s: None where it was not measured.
        unusable: None where it could be had.
    """

    way: Way
    bytes_per_s: float | None
    unusable: str | None = None


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """The way that one direction takes, and what speaks for it.

    Attributes:
        plain_bytes_per_s: a contiguous copy of as many bytes over the same link; None where none was measured.
        measured: every way that was looked at, the chosen one included.
    """

    direction: Direction
    way: Way
    plain_bytes_per_s: float | None = None
    measured: tuple[WayMeasured, ...] = ()

    def __str__(self) -> str:
        told = [
            f"{one.way} {one.bytes_per_s / 1e9:.1f} GB/s"
            if one.bytes_per_s is not None
            else f"{one.way}: {one.unusable}"
            for one in self.measured
        ]
        if self.plain_bytes_per_s is not None:
            told.append(f"plain copy {self.plain_bytes_per_s / 1e9:.1f} GB/s")
        name = "stores" if self.direction == "out" else "loads"
        return f"{name} by {self.way}" + (f" ({', '.join(told)})" if told else "")


def choose(measured: Sequence[WayMeasured]) -> Way:
    """The way that takes the fewest multiprocessors among those nearly as fast as the fastest.

    Raises:
        DeviceCopyError: none could be had; the message says why for each.
    """
    rates = {one.way: one.bytes_per_s for one in measured if one.bytes_per_s is not None}
    if not rates:
        why = "; ".join(f"{one.way}: {one.unusable}" for one in measured)
        raise DeviceCopyError(f"no way to copy between device and host memory: {why}")
    enough = _NEARLY * max(rates.values())
    return min((way for way, rate in rates.items() if rate >= enough), key=lambda way: (_taken(way), -rates[way]))


def _taken(way: Way) -> float:
    return math.inf if way.programs is None else way.programs
