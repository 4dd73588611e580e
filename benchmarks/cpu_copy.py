"""Gather and scatter in host memory beside a plain memcpy of the same bytes.

    python -m benchmarks.cpu_copy [--claims] [--json] [--tiny] [--order random|runs]
                                  [--chunk-mib 4 32] [--layers 4 32]

`auto` is what the connector uses, `index` and `runs` are what it chooses between. The memcpy reads and writes as many
bytes as a copy does. Every way and the memcpy take turns within a round, in a new order each round, so that what else
the machine does meets all of them alike. What counts is the share of the memcpy of the same round: its median over
the rounds, with its quartiles. The fastest round of the one over the fastest of the other stands beside it and is no
claim: it compares different moments, and where memory is shared with other machines the memcpy gets more out of a
good one, since it waits for bandwidth and a copy in random order for latency.

Seconds are this process's, of all its threads: nothing here waits, so on an idle machine they are those of a clock,
and the turns that other programs get are not in them.

All memory is cold: blocks are drawn from a pool, and chunks lie in an area, each far larger than the caches, and a
place is used again only when all others have been. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor
from kvsluice.kernels.host_copy import HostMethod
from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.rows import fast_by_the_byte

METHODS: Final[tuple[HostMethod, ...]] = ("auto", "index", "runs")
DIRECTIONS: Final = ("gather", "scatter")
PAGE_SIZES_BYTES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
POOL_BYTES: Final = 512 << 20
AREA_BYTES: Final = 256 << 20
LEAST_SHARE: Final = 0.7
CLAIM_FROM_BYTES: Final = 16 << 10
"""The claim is for pages of this size and more."""
ROUND_BYTES: Final = 1 << 30
"""About so many bytes go through each way, in rounds of a chunk."""

Way = Callable[[Sequence[int], torch.Tensor, int], None]
"""Moves a chunk: its block ids, its memory, and the place of that."""


@dataclass(frozen=True)
class Share:
    """Of the memcpy's rate: over the rounds, and of the fastest round of each."""

    median: float
    low: float
    high: float
    best: float

    def __str__(self) -> str:
        return f"{self.median:.2f} {self.low:.2f}-{self.high:.2f} ({self.best:.2f})"


@dataclass(frozen=True)
class Cell:
    """One geometry: seconds of each round, by way."""

    chunk_bytes: int
    layers: int
    page_bytes: int
    memcpy_s: list[float]
    taken_s: dict[str, list[float]]

    def share(self, way: str) -> Share:
        """`way` is a direction and a method."""
        own_s = self.taken_s[way]
        low, median, high = _quartiles([other / own for other, own in zip(self.memcpy_s, own_s, strict=True)])
        return Share(median, low, high, min(self.memcpy_s) / min(own_s))

    @property
    def memcpy_gb_per_s(self) -> float:
        return self.chunk_bytes / statistics.median(self.memcpy_s) / 1e9

    def __str__(self) -> str:
        auto = "".join(f"  {self.share(f'{direction} auto')!s:>22}" for direction in DIRECTIONS)
        others = "".join(
            f"  {self.share(f'gather {method}').median:>6.2f} {self.share(f'scatter {method}').median:>4.2f}"
            for method in METHODS[1:]
        )
        geometry = f"{self.chunk_bytes / (1 << 20):>6g} {self.layers:>6} {self.page_bytes >> 10:>8}"
        return f"{geometry} {self.memcpy_gb_per_s:>7.1f}{auto}{others}"

    @staticmethod
    def heading() -> str:
        auto = "".join(f"  {f'{direction} auto':>22}" for direction in DIRECTIONS)
        others = "".join(f"  {method:>11}" for method in METHODS[1:])
        return f"{'MiB':>6} {'layers':>6} {'page KiB':>8} {'memcpy':>7}{auto}{others}"

    def as_json(self, order: str) -> dict[str, object]:
        return {
            "order": order,
            "chunk_bytes": self.chunk_bytes,
            "layers": self.layers,
            "page_bytes": self.page_bytes,
            "rounds": len(self.memcpy_s),
            "memcpy_gb_per_s": self.memcpy_gb_per_s,
            "shares": {way: asdict(self.share(way)) for way in self.taken_s},
        }

    def claims(self) -> Iterator[tuple[bool, str]]:
        """Whether each holds, and what it says."""
        if self.page_bytes < CLAIM_FROM_BYTES:
            return
        for direction in DIRECTIONS:
            share = self.share(f"{direction} auto").median
            says = f"chunks of {self.chunk_bytes / (1 << 20):g} MiB, {self.layers} layers, pages of "
            says += f"{self.page_bytes >> 10} KiB, {direction}: share of memcpy {share:.2f}, at least {LEAST_SHARE:.2f}"
            yield share >= LEAST_SHARE, says


def measure(chunk_bytes: int, layers: int, page_bytes: int, order: str, *, tiny: bool) -> Cell:
    """A chunk has at least one block, however large that is."""
    num_blocks = max(1, chunk_bytes // (page_bytes * layers))
    chunk_bytes = num_blocks * page_bytes * layers
    pool_blocks = max(4 * num_blocks, 0 if tiny else POOL_BYTES // (page_bytes * layers))
    places = max(4, 0 if tiny else AREA_BYTES // chunk_bytes)
    paged = [PagedTensor(torch.ones((pool_blocks, page_bytes), dtype=torch.uint8), 0) for _ in range(layers)]
    area, other = (torch.ones((places, chunk_bytes), dtype=torch.uint8) for _ in range(2))
    plan = CopyPlan(paged, num_blocks)

    def memcpy(_block_ids: Sequence[int], chunk: torch.Tensor, place: int) -> None:
        ctypes.memmove(chunk.data_ptr(), other[place].data_ptr(), chunk_bytes)

    ways: dict[str, Way] = {"memcpy": memcpy}
    for method in METHODS:
        copy = HostCopy(plan, method=method)
        ways[f"gather {method}"] = _gather(copy)
        ways[f"scatter {method}"] = _scatter(copy)

    source = random.Random(7)
    taken_s: dict[str, list[float]] = {way: [] for way in ways}
    place = 0
    rounds = 1 if tiny else max(15, ROUND_BYTES // chunk_bytes)
    for number in range(1 + rounds):
        for way in source.sample(list(ways), len(ways)):
            if order == "random":
                block_ids: Sequence[int] = source.sample(range(pool_blocks), num_blocks)
            else:
                first = source.randrange(pool_blocks - num_blocks)
                block_ids = range(first, first + num_blocks)
            place = (place + 1) % places
            chunk = area[place]
            start_s = time.process_time()
            ways[way](block_ids, chunk, place)
            if number:  # the first round makes what later ones find
                taken_s[way].append(time.process_time() - start_s)
    return Cell(chunk_bytes, layers, page_bytes, taken_s.pop("memcpy"), taken_s)


def _gather(copy: HostCopy) -> Way:
    return lambda block_ids, chunk, _: copy.gather(block_ids, chunk)


def _scatter(copy: HostCopy) -> Way:
    return lambda block_ids, chunk, _: copy.scatter(block_ids, chunk)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _how() -> str:
    with one_openmp_thread() as limited:
        if not limited:
            return "torch's threads cannot be limited here: every copy falls back to runs"
    items = "single bytes" if fast_by_the_byte() else "items of 16 bytes"
    return f"one thread; scatter moves {items}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object per line; 1 where a claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few KiB, one round: only shows that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    parser.add_argument("--claims", action="store_true", help="say which hold; exit code 1 where one is missed")
    parser.add_argument("--order", choices=("random", "runs"), default="random", help="of the chunk's block ids")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[4, 32], help="payloads of a chunk in MiB")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    options = parser.parse_args(arguments)
    sizes = PAGE_SIZES_BYTES[:2] if options.tiny else PAGE_SIZES_BYTES
    chunks = [256 << 10] if options.tiny else [mib << 20 for mib in options.chunk_mib]
    if not options.json:
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        print(f"{platform.machine()}, {versions}, {torch.backends.cpu.get_cpu_capability()}; {_how()}")
        print(f"order {options.order}; memcpy in GB/s; shares of it: median, quartiles, (best of each); else medians")
        print(Cell.heading())
    claims: list[tuple[bool, str]] = []
    for chunk_bytes in chunks:
        for layers in options.layers:
            for page_bytes in sizes:
                cell = measure(chunk_bytes, layers, page_bytes, options.order, tiny=options.tiny)
                print(json.dumps(cell.as_json(options.order)) if options.json else cell, flush=True)
                claims += cell.claims()
    if not options.claims:
        return 0
    for holds, says in claims:
        print(f"{'ok    ' if holds else 'MISSED'}  {says}", file=sys.stderr if options.json else sys.stdout)
    return 0 if all(holds for holds, _ in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
