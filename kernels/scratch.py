"""Pages to measure on: laid out as a chunk's are, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvsluice.kernels.paged import PagedTensor
from kvsluice.kernels.plan import CopyPlan, Plane

__all__ = ["PlainCopy", "scratch_plan"]

_GAP_BYTES: Final = 64
"""Between runs that are not neighbours in the real pool either, so that they cannot be moved as one."""


def scratch_plan(plan: CopyPlan, max_bytes: int) -> CopyPlan:
    """A plan over new memory with the page sizes, runs and block count of `plan`.

    The pool holds twice a chunk's blocks. Planes are left out, and where one alone is too large blocks, until
    it takes at most `max_bytes`; two blocks of one plane are the least.
    """
    planes: list[Plane] = []
    num_blocks = plan.num_blocks
    left_bytes = max_bytes
    for plane in plan.planes:
        pool_bytes = 2 * num_blocks * plane.block_bytes
        if planes and pool_bytes > left_bytes:
            break
        if pool_bytes > left_bytes:
            num_blocks = max(1, left_bytes // (2 * plane.block_bytes))
        planes.append(plane)
        left_bytes -= pool_bytes
    return CopyPlan([_pages(plan, plane, 2 * num_blocks) for plane in planes], num_blocks)


def _pages(plan: CopyPlan, plane: Plane, pool_blocks: int) -> PagedTensor:
    dense = plan.geometries[plane.tensor].dense
    runs = len(plane.run_offsets)
    run_stride = plane.run_bytes if runs == 1 else plane.run_bytes + _GAP_BYTES
    block_stride = runs * run_stride + (0 if dense else _GAP_BYTES)
    memory = torch.empty(pool_blocks * block_stride, dtype=torch.uint8, device=plan.device)
    shape, strides = (pool_blocks, runs, plane.run_bytes), (block_stride, run_stride, 1)
    return PagedTensor(memory.as_strided(shape, strides), 0, name=plan.paged[plane.tensor].name)


class PlainCopy:
    """See `DirectCopy`: a chunk's bytes to or from one contiguous run on the device, whatever the ids.

    What the link gives, to hold the others against.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self._run = torch.empty(plan.num_bytes, dtype=torch.uint8, device=plan.device)

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        """Queue the copy to host memory."""
        out.copy_(self._run, non_blocking=True)

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        """Queue the copy from host memory."""
        self._run.copy_(src, non_blocking=True)
