"""Pages to pinned memory and back by the driver's batched copy, without a kernel and without staging.

One call hands the driver the addresses of a chunk's runs, and the card's copy engines move them: no
multiprocessor is used. Published for an H100: near the link's rate for large pages, 5 to 7 GB/s for pages
of 4 to 24 KiB, where the engines' cost per run counts.

Written for a GPU and not yet run on one; the tests drive it with a driver that copies host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from kvsluice.kernels.plan import CopyPlan, Plane
from kvsluice.kernels.spans import spans_of

__all__ = ["BatchedCopy", "MemcpyBatch", "RunCopy"]


class MemcpyBatch(Protocol):
    """The driver's call; see `CudaDriver.memcpy_batch`."""

    def __call__(self, destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Table:
    """Runs of block 0: int64 of shape (runs, 1) each."""

    address: torch.Tensor
    block_stride: torch.Tensor
    offset: torch.Tensor
    block_bytes: torch.Tensor
    run_bytes: torch.Tensor


class BatchedCopy:
    """See `DirectCopy`. One thread at a time.

    Args:
        plan: the geometry, on a CUDA device.
        memcpy_batch: the driver's call.
        current_stream: handle of the calling thread's current stream; None asks torch.
    """

    def __init__(
        self, plan: CopyPlan, memcpy_batch: MemcpyBatch, current_stream: Callable[[], int] | None = None
    ) -> None:
        self.plan = plan
        self._memcpy_batch = memcpy_batch
        self._current_stream = current_stream or (lambda: int(torch.cuda.current_stream(plan.device).cuda_stream))
        by_tensor = {number: list(planes) for number, planes in groupby(plan.planes, key=lambda plane: plane.tensor)}
        self._tables = tuple(_table(by_tensor[number]) for number in range(len(plan.paged)))
        # Where consecutive blocks are one run in the pool they are one in the chunk, too.
        self._dense = tuple(geometry.dense for geometry in plan.geometries)
        self._whole = _joined(self._tables, self._dense, range(len(plan.paged)))

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        """Queue copies of blocks into a chunk in pinned memory; see `HostCopy.gather`.

        Raises:
            DeviceCopyError: the driver refused.
            TypeError, ValueError: see `CopyPlan.check_gather`.
        """
        self.plan.check_gather(block_ids, out)
        pages, places, sizes = self._runs(block_ids, 0, out, tensors)
        self._memcpy_batch(places, pages, sizes, self._current_stream())

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        """Queue copies of a chunk in pinned memory into blocks; see `HostCopy.scatter`.

        Raises:
            DeviceCopyError, TypeError, ValueError: as in `gather`, see `CopyPlan.check_scatter`.
        """
        self.plan.check_scatter(block_ids, src, skip_blocks)
        if skip_blocks < self.plan.num_blocks:
            pages, places, sizes = self._runs(block_ids, skip_blocks, src, tensors)
            self._memcpy_batch(pages, places, sizes, self._current_stream())

    def _runs(
        self, block_ids: Sequence[int], skip_blocks: int, flat: torch.Tensor, tensors: range | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Addresses in the pool, addresses in the chunk, sizes: int64 (copies,) each."""
        parts = self._whole if tensors is None else _joined(self._tables, self._dense, tensors)
        pages, places, sizes = [], [], []
        for table, dense in parts:
            spans = spans_of(block_ids, skip_blocks, merge=dense)
            first, place, count = torch.tensor(spans, dtype=torch.int64, device="cpu").unbind(1)
            pages.append((table.address + first * table.block_stride).flatten())
            places.append((table.offset + place * table.block_bytes + flat.data_ptr()).flatten())
            sizes.append((table.run_bytes * count).flatten())
        return torch.cat(pages), torch.cat(places), torch.cat(sizes)


class RunCopy:
    """See `DirectCopy`: each run by a copy of its own, through torch alone.

    For pages so large that the cost of a call does not count, on a machine without the batched copy.

    Args:
        plan: the geometry.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        with torch.inference_mode(False):  # views made in inference mode could not be written outside it
            self._pools = tuple(
                torch.empty(0, dtype=torch.uint8, device=plan.device).set_(item.tensor.untyped_storage())
                for item in plan.paged
            )

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        """Queue copies of blocks into a chunk; see `HostCopy.gather`."""
        self.plan.check_gather(block_ids, out)
        for page, place in self._runs(block_ids, 0, out, tensors):
            place.copy_(page, non_blocking=True)

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        """Queue copies of a chunk into blocks; see `HostCopy.scatter`."""
        self.plan.check_scatter(block_ids, src, skip_blocks)
        if skip_blocks < self.plan.num_blocks:
            for page, place in self._runs(block_ids, skip_blocks, src, tensors):
                page.copy_(place, non_blocking=True)

    def _runs(
        self, block_ids: Sequence[int], skip_blocks: int, flat: torch.Tensor, tensors: range | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        runs = []
        for plane in self.plan.planes:
            if tensors is not None and plane.tensor not in tensors:
                continue
            pool = self._pools[plane.tensor]
            dense = self.plan.geometries[plane.tensor].dense
            for first, place, count in spans_of(block_ids, skip_blocks, merge=dense):
                num_bytes = count * plane.run_bytes
                for run, run_offset in enumerate(plane.run_offsets):
                    at = plane.address - pool.data_ptr() + first * plane.block_stride + run_offset
                    to = plane.offset + place * plane.block_bytes + run * plane.run_bytes
                    runs.append((pool[at : at + num_bytes], flat[to : to + num_bytes]))
        return runs


def _table(planes: Sequence[Plane]) -> _Table:
    rows = [
        (
            plane.address + run_offset,
            plane.block_stride,
            plane.offset + run * plane.run_bytes,
            plane.block_bytes,
            plane.run_bytes,
        )
        for plane in planes
        for run, run_offset in enumerate(plane.run_offsets)
    ]
    return _Table(*torch.tensor(rows, dtype=torch.int64, device="cpu").unsqueeze(2).unbind(1))


def _joined(tables: Sequence[_Table], dense: Sequence[bool], tensors: range) -> tuple[tuple[_Table, bool], ...]:
    """One table for the dense tensors and one for the others, where there are any."""
    parts = []
    for wanted in (True, False):
        chosen = [tables[number] for number in tensors if dense[number] is wanted]
        if chosen:
            columns = (
                [table.address for table in chosen],
                [table.block_stride for table in chosen],
                [table.offset for table in chosen],
                [table.block_bytes for table in chosen],
                [table.run_bytes for table in chosen],
            )
            parts.append((_Table(*(torch.cat(column) for column in columns)), wanted))
    return tuple(parts)
