"""Gather and scatter in host memory, in plain torch: fallback of every other way, and their oracle.

Two ways to move the same bytes:

- `index`: one `index_select` or `index_put_` for all tensors that are alike; see `kvsluice.kernels.rows`.
- `runs`: one `memmove` for each run of consecutive bytes; neighbouring blocks become one run.

Measured with `benchmarks/cpu_copy.py` on two shared cores of an AMD EPYC without a GPU, 2026-11-30: blocks in random
order, cold memory, chunks of 4 and 32 MiB, 4 and 32 layers, three runs. Shares of a plain memcpy of the same bytes:

    page        gather by index   scatter by index   either by runs
      4 KiB        0.48-0.70         0.48-0.68          0.24-0.30
     16 KiB        0.77-0.92         0.74-0.82          0.49-0.58
     64 KiB        0.93-1.09         0.90-1.12          0.76-0.96
    256 KiB        0.90-1.15         0.90-1.21          0.97-1.15
      2 MiB        0.79-1.01         0.95-1.27          1.01-1.14

So runs of `RUN_MIN_BYTES` and more are moved one by one, all others indexed. A call of `memmove` costs about 1 us in
the interpreter, gives the GIL up and asks for it again.

Where 490 us of a scatter of 4 MiB in pages of 16 KiB go: 410 are torch's loop over the rows, 20 read ahead (see
`rows`), 60 are operators, checks and the interpreter, twice what these take alone, since a copy drives their code out
of the caches. The plain memcpy takes 370, and 385 in a loop of C over the same pages. The best moments of these shared
cores favour it: it has a third more bandwidth then, the random order costs the same, and the share is 0.6 to 0.8.

Tried for such pages, and slower: an indexed copy for each layer (0.58 to 0.66 into the pages, with 32 layers and chunks
of 4 MiB), items of 8 bytes, `process_vm_readv` (5 GB/s: the kernel pins every 4 KiB), `memmove` without giving the GIL
up (no faster than with). A compiled loop of stores past the caches scatters these pages in 250 us; the memcpy of this C
library has such stores from 240 MiB on.

An indexed copy is kept on the calling thread (see `kvsluice.kernels.openmp`). Where that is not possible (another
threading runtime), every copy is made of runs.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import torch

from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.plan import CopyPlan, Plane
from kvsluice.kernels.rows import PlaneGroup, Rows, groups_of
from kvsluice.kernels.spans import spans_of

__all__ = ["RUN_MIN_BYTES", "HostCopy", "HostMethod"]

HostMethod = Literal["auto", "index", "runs"]

RUN_MIN_BYTES: Final = 256 << 10
"""Up to here indexed copies lead, from here on a call for each run costs nothing; see above."""


class HostCopy:
    """Copies between pages and chunks that both lie in host memory; done on return.

    Several threads may use one at once, on different blocks.

    Args:
        plan: the geometry; its tensors are in host memory.
        method: `auto` chooses by the length of the runs; any other is taken as it is.

    Raises:
        ValueError: the plan's tensors are somewhere else.
    """

    def __init__(self, plan: CopyPlan, *, method: HostMethod = "auto") -> None:
        if plan.device.type != "cpu":
            raise ValueError(f"HostCopy is for host memory, the plan's tensors are on {plan.device}")
        self.plan = plan
        self._method = method
        self._groups = tuple(groups_of(plan.planes))
        self._rows: dict[int, Rows] = {}

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        """Copy blocks into a chunk.

        Args:
            block_ids: `num_blocks` ids; one may be named twice.
            out: the whole chunk, uint8 (num_bytes,), contiguous, in host memory.
            tensors: places in the plan of those that are copied, a range of step 1; None for all.

        Raises:
            TypeError, ValueError: see `CopyPlan.check_gather`; also ValueError for tensors that are not in the plan.
        """
        self.plan.check_gather(block_ids, out)
        self._copy(block_ids, 0, out, tensors, into_pages=False)

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        """Copy a chunk into blocks, the reverse of `gather`; the first `skip_blocks` blocks are left as they are.

        Raises:
            TypeError, ValueError: see `CopyPlan.check_scatter`; also ValueError for tensors that are not in the plan.
        """
        self.plan.check_scatter(block_ids, src, skip_blocks)
        if skip_blocks < self.plan.num_blocks:
            self._copy(block_ids, skip_blocks, src, tensors, into_pages=True)

    def _copy(
        self,
        block_ids: Sequence[int],
        skip_blocks: int,
        flat: torch.Tensor,
        tensors: range | None,
        *,
        into_pages: bool,
    ) -> None:
        if not flat.is_cpu:
            raise ValueError(f"HostCopy is for host memory, the chunk is on {flat.device}")
        count = len(self.plan.paged)
        if tensors is not None and not (tensors.step == 1 and 0 <= tensors.start <= tensors.stop <= count):
            raise ValueError(f"tensors must be a range of step 1 within 0 to {count}, got {tensors}")
        address = flat.data_ptr()
        ids = block_ids[skip_blocks:] if skip_blocks else block_ids
        index: torch.Tensor | None = None
        with one_openmp_thread() as limited:
            for number, group in enumerate(self._groups):
                planes = group.within(tensors)
                if planes[0] == planes[1]:
                    continue
                if not limited or self._by_runs(group, ids):
                    spans = spans_of(block_ids, skip_blocks, merge=group.dense)
                    _move_runs(group.planes[slice(*planes)], spans, address, into_pages=into_pages)
                    continue
                if index is None:
                    index = torch.frombuffer(array("q", ids), dtype=torch.int64).unsqueeze(1)
                rows = self._rows_of(number)
                (rows.scatter if into_pages else rows.gather)(planes, index, address)

    def _by_runs(self, group: PlaneGroup, block_ids: Sequence[int]) -> bool:
        """Whether runs are long, on average over these blocks; in a random order that is settled by the first few."""
        if self._method != "auto":
            return self._method == "runs"
        most_runs = group.run_bytes * len(block_ids) // RUN_MIN_BYTES
        if not group.dense:
            return len(block_ids) <= most_runs
        runs, expected = 0, -1
        for block in block_ids:
            if block != expected:
                runs += 1
                if runs > most_runs:
                    return False
            expected = block + 1
        return True

    def _rows_of(self, number: int) -> Rows:
        rows = self._rows.get(number)
        if rows is None:
            # Two threads may both get here; what they make is the same.
            rows = self._rows[number] = Rows(self._groups[number], self.plan.num_blocks, self.plan.num_pool_blocks)
        return rows


def _move_runs(
    planes: Sequence[Plane], spans: Sequence[tuple[int, int, int]], chunk_address: int, *, into_pages: bool
) -> None:
    in_pages: list[int] = []
    in_chunk: list[int] = []
    lengths: list[int] = []
    for plane in planes:
        base = chunk_address + plane.offset
        for run, run_offset in enumerate(plane.run_offsets):
            start = plane.address + run_offset
            in_pages += [start + block * plane.block_stride for block, _, _ in spans]
            in_chunk += [base + place * plane.block_bytes + run * plane.run_bytes for _, place, _ in spans]
            lengths += [count * plane.run_bytes for _, _, count in spans]
    target, source = (in_pages, in_chunk) if into_pages else (in_chunk, in_pages)
    # The fastest loop that the interpreter has: at 16 KiB a run, its own time is half of the whole.
    deque(map(ctypes.memmove, target, source, lengths), maxlen=0)
