"""Which operations are made: cells of size and concurrency, the most telling first, within a bound of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.calibrate.units import format_size
from kvsluice.tiers.errors import ConfigError

__all__ = [
    "DEFAULT_CONCURRENCIES",
    "DEFAULT_SIZES_BYTES",
    "MIN_CHUNK_BYTES",
    "Cell",
    "Plan",
    "default_sizes",
    "make_plan",
    "warm_up",
]

DEFAULT_SIZES_BYTES: Final = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEFAULT_CONCURRENCIES: Final = (1, 2, 4, 8, 16)
MIN_CHUNK_BYTES: Final = 8192
"""A chunk file's header takes 4096."""
TARGET_OPS: Final = 32
"""Operations of a cell: the slowest of so many is a fair picture of the spread."""
MAX_OPS: Final = 128
CHEAP_BYTES: Final = 16 << 20
"""Small operations are made more often, up to this many bytes a cell: they are over soon, and tell the fixed cost."""
MIN_OPS: Final = 8
MIN_ROUNDS: Final = 2
"""Operations without which a cell says nothing: some, and each thread's share of them."""
MAX_IN_FLIGHT_BYTES: Final = 64 << 20
"""Sizes other than the one of interest are measured up to this: beyond it they only cost bytes and memory."""
MAX_MEMORY_BYTES: Final = 2 << 30
"""Nor is the size of interest measured beyond this: each operation under way has a buffer."""
WARM_UP_OPS: Final = 128
KINDS: Final = 2
"""Every cell is written, then read."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Operations of one size at one concurrency, first written, then read.

    Attributes:
        num_ops: wanted per kind; `min_ops` of them make a measurement.
    """

    num_bytes: int
    concurrency: int
    num_ops: int

    @property
    def min_ops(self) -> int:
        return max(MIN_OPS, MIN_ROUNDS * self.concurrency)

    @property
    def max_started(self) -> int:
        """Operations of one kind at the most: as many as threads warm up, as many are under way at the end."""
        return self.num_ops + 2 * self.concurrency

    @property
    def written_bytes(self) -> int:
        """Written at the most, and so the space it takes."""
        return self.max_started * self.num_bytes

    @property
    def moved_bytes(self) -> int:
        """Written and read at the most."""
        return KINDS * self.written_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells in the order of measuring, and those that do not fit the bound of bytes."""

    chunk_bytes: int
    cells: tuple[Cell, ...]
    left_out: tuple[Cell, ...]

    @property
    def space_bytes(self) -> int:
        """What its largest cell takes on the tier."""
        return max(cell.written_bytes for cell in self.cells)

    @property
    def max_concurrency(self) -> int:
        return max(cell.concurrency for cell in self.cells)


def warm_up(concurrency: int) -> Cell:
    """What is written first and not measured."""
    return Cell(MIN_CHUNK_BYTES, concurrency, WARM_UP_OPS)


def default_sizes(chunk_bytes: int) -> tuple[int, ...]:
    """The default sizes with `chunk_bytes` in the place of those it is near to."""
    others = [size for size in DEFAULT_SIZES_BYTES if not chunk_bytes / 2 < size < chunk_bytes * 2]
    return tuple(sorted({*others, chunk_bytes}))


def make_plan(chunk_bytes: int, *, sizes: Sequence[int] | None, concurrencies: Sequence[int], max_bytes: int) -> Plan:
    """The cells for chunks of `chunk_bytes`.

    Args:
        chunk_bytes: the size of interest; always measured.
        sizes: bytes of the other operations; None for `default_sizes`.
        concurrencies: threads that operate at once.
        max_bytes: written and read, all together.

    Raises:
        ConfigError: a size or a concurrency that cannot be, or not one cell fits `max_bytes`.
    """
    wanted = sorted({*(default_sizes(chunk_bytes) if sizes is None else sizes), chunk_bytes})
    threads = sorted(set(concurrencies))
    if wanted[0] < MIN_CHUNK_BYTES:
        raise ConfigError(f"a size of {wanted[0]} bytes: a chunk file has at least {MIN_CHUNK_BYTES}")
    if not threads or threads[0] < 1:
        raise ConfigError(f"concurrency {threads}: give at least one, from 1 on")
    if threads[0] * chunk_bytes > MAX_MEMORY_BYTES:
        largest = format_size(MAX_MEMORY_BYTES)
        raise ConfigError(f"{threads[0]} chunks of {format_size(chunk_bytes)} at once: up to {largest} are measured")

    least = [Cell(size, n, Cell(size, n, 0).min_ops) for size, n in _by_worth(wanted, threads, chunk_bytes)]
    left_bytes = max_bytes - warm_up(threads[-1]).written_bytes
    if least[0].moved_bytes > left_bytes:
        needed = max_bytes - left_bytes + least[0].moved_bytes
        raise ConfigError(f"max_bytes is {max_bytes}: chunks of {format_size(chunk_bytes)} need at least {needed}")
    cells: list[Cell] = []
    left_out: list[Cell] = []
    for cell in least:
        fits = cell.moved_bytes <= left_bytes
        (cells if fits else left_out).append(cell)
        left_bytes -= cell.moved_bytes if fits else 0
    # What is left goes to the spread, the most telling cells first.
    for at, cell in enumerate(cells):
        affordable = left_bytes // (KINDS * cell.num_bytes)
        target = max(TARGET_OPS, min(MAX_OPS, CHEAP_BYTES // cell.num_bytes))
        more = max(0, min(target - cell.num_ops, affordable))
        cells[at] = Cell(cell.num_bytes, cell.concurrency, cell.num_ops + more)
        left_bytes -= KINDS * more * cell.num_bytes
    return Plan(chunk_bytes, tuple(cells), tuple(left_out))


def _by_worth(sizes: Sequence[int], threads: Sequence[int], chunk_bytes: int) -> list[tuple[int, int]]:
    """One thread and no more than a chunk tells the fixed cost; chunks tell the threads; the rest confirms."""

    def worth(cell: tuple[int, int]) -> tuple[int, int, int]:
        size, concurrency = cell
        if concurrency == threads[0] and size <= chunk_bytes:
            return 0, int(size != chunk_bytes), size
        if size == chunk_bytes:
            return 1, concurrency, 0
        return 2, size * concurrency, concurrency

    def is_wanted(size: int, concurrency: int) -> bool:
        return size * concurrency <= (MAX_MEMORY_BYTES if size == chunk_bytes else MAX_IN_FLIGHT_BYTES)

    return sorted(((size, n) for size in sizes for n in threads if is_wanted(size, n)), key=worth)
