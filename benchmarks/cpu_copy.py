"""Gather and scatter in host memory beside a plain memcpy of the same bytes.

    python -m benchmarks.cpu_copy [--tiny] [--json] [--order random|runs]

Every method and the memcpy take turns within one run, in a new order each round, so that what else
the machine does and what the caches hold meets all of them alike; the fastest round of each counts.
`auto` is what the connector uses; `index` and `runs` are what it chooses between. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time
from collections.abc import Callable, Sequence

import torch

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.torch_copy import Method

METHODS: tuple[Method, ...] = ("auto", "index", "runs")
PAGE_SIZES_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)


def measure(page_bytes: int, chunk_bytes: int, layers: int, order: str, rounds: int) -> dict[str, float]:
    """GB/s of each method and direction, and of the memcpy, for one page size."""
    num_blocks = max(1, chunk_bytes // (page_bytes * layers))
    pool_blocks = 4 * num_blocks
    tensors = [torch.randint(256, (pool_blocks, page_bytes), dtype=torch.uint8) for _ in range(layers)]
    paged = [PagedTensor(tensor, 0) for tensor in tensors]
    source = random.Random(7)
    if order == "random":
        block_ids = source.sample(range(pool_blocks), num_blocks)
    else:
        first = source.randrange(pool_blocks - num_blocks)
        block_ids = list(range(first, first + num_blocks))
    plans = {method: CopyPlan(paged, num_blocks, method=method) for method in METHODS}
    total_bytes = plans["auto"].num_bytes
    chunk, other = (torch.zeros(total_bytes, dtype=torch.uint8) for _ in range(2))
    other.fill_(1)

    def memcpy() -> None:
        ctypes.memmove(chunk.data_ptr(), other.data_ptr(), total_bytes)

    def gather(plan: CopyPlan) -> Callable[[], None]:
        return lambda: plan.gather(block_ids, chunk)

    def scatter(plan: CopyPlan) -> Callable[[], None]:
        return lambda: plan.scatter(block_ids, chunk)

    runners: dict[str, Callable[[], None]] = {"memcpy": memcpy}
    for method, plan in plans.items():
        runners[f"gather {method}"] = gather(plan)
        runners[f"scatter {method}"] = scatter(plan)
    taken_s: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name in source.sample(list(runners), len(runners)):
            started_s = time.perf_counter()
            runners[name]()
            taken_s[name].append(time.perf_counter() - started_s)
    return {name: total_bytes / min(times_s) / 1e9 for name, times_s in taken_s.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object per page size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few KiB, one round: only shows that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    parser.add_argument("--order", choices=("random", "runs"), default="random", help="of the chunk's block ids")
    parser.add_argument("--chunk-mib", type=int, default=32, help="payload of a chunk in MiB")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)
    sizes = PAGE_SIZES_BYTES[:2] if options.tiny else PAGE_SIZES_BYTES
    chunk_bytes = 256 << 10 if options.tiny else options.chunk_mib << 20
    rounds = 1 if options.tiny else 25
    with one_openmp_thread() as limited:
        if not limited:
            print("torch's threads cannot be limited here: every copy falls back to runs of memory")
    columns = [f"{way} {method}" for way in ("gather", "scatter") for method in METHODS]
    if not options.json:
        print(f"order {options.order}, {options.layers} layers, chunks of {chunk_bytes >> 10} KiB; shares of memcpy")
        print(f"{'page':>9} {'memcpy':>12}" + "".join(f"{name:>16}" for name in columns))
    for page_bytes in sizes:
        rates = measure(page_bytes, chunk_bytes, options.layers, options.order, rounds)
        if options.json:
            print(json.dumps({"page_bytes": page_bytes, "order": options.order, "gb_per_s": rates}))
            continue
        shares = "".join(f"{rates[name] / rates['memcpy']:>16.2f}" for name in columns)
        print(f"{page_bytes >> 10:>5} KiB {rates['memcpy']:>7.1f} GB/s{shares}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
