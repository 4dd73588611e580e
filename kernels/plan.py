"""Where every byte of a chunk lies, in the pages and in the chunk: what all ways of copying share.

payload of a chunk    plane | plane | plane ...            a plane is one tensor under one outer index
plane                 block | block | block ...            in the order in which the block ids are given
block in a plane      run | run ...                        a run is contiguous in the page, too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from kvsluice.kernels.paged import Geometry, PagedTensor

__all__ = ["CopyPlan", "Plane", "offsets_of"]


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor under one outer index: a chunk keeps its blocks side by side.

    Attributes:
        tensor: the tensor's place in the plan.
        address: of block 0's first byte.
        offset: of the plane's first byte in a chunk's payload.
        block_bytes: bytes of one block here; the payload's distance from block to block.
        block_stride: the pool's distance from block to block, in bytes.
        run_bytes: length of each run of a block that is contiguous in the pool.
        run_offsets: where a block's runs begin, counted from the block's first byte in the pool; in a chunk
            they stand one after another.
    """

    tensor: int
    address: int
    offset: int
    block_bytes: int
    block_stride: int
    run_bytes: int
    run_offsets: tuple[int, ...]


class CopyPlan:
    """Everything about copying chunks of one geometry that does not depend on the block ids.

    The plan holds the tensors' addresses: they must stay where they are for as long as it is used.
    Immutable to the outside; any number of threads and ways of copying may share one.

    Args:
        paged: the tensors of a chunk, in payload order; on one device, with equally many blocks.
        num_blocks: blocks in a chunk, at least 1.

    Attributes:
        num_bytes: bytes of a chunk's payload.
        num_pool_blocks: block ids run from 0 to this, exclusive.
        device: where the tensors live.
        geometries: one per tensor.
        offsets: where each tensor begins in the payload, and at the end `num_bytes`.
        planes: in payload order.

    Raises:
        TypeError: an entry is not a `PagedTensor`.
        ValueError: no tensors, num_blocks below 1, unlike devices or block counts.
    """

    def __init__(self, paged: Sequence[PagedTensor], num_blocks: int) -> None:
        self.paged = tuple(paged)
        if not self.paged:
            raise ValueError("a copy plan needs at least one tensor")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        first = self.paged[0]
        for item in self.paged:
            if not isinstance(item, PagedTensor):
                raise TypeError(f"a copy plan takes PagedTensor, got {type(item).__name__}")
            for what, here, there in (
                ("device", item.tensor.device, first.tensor.device),
                ("number of blocks", item.num_blocks, first.num_blocks),
            ):
                if here != there:
                    raise ValueError(f"{what} differs: {there} in {first.name}, {here} in {item.name}")
        self.device = first.tensor.device
        self.num_blocks = num_blocks
        self.num_pool_blocks = first.num_blocks
        self.geometries: tuple[Geometry, ...] = tuple(item.geometry() for item in self.paged)
        offsets = [0]
        for item in self.paged:
            offsets.append(offsets[-1] + item.page_bytes * num_blocks)
        self.offsets = tuple(offsets)
        self.num_bytes = offsets[-1]
        self.planes = tuple(plane for number in range(len(self.paged)) for plane in self._planes(number))

    def check_gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """The door of every copy out of the pages.

        Args:
            block_ids: `num_blocks` ids; one may be named twice.
            out: uint8 (num_bytes,), contiguous; in host memory or on the tensors' device.

        Raises:
            TypeError: `out` is not a uint8 tensor.
            ValueError: wrong number of ids, an id outside the pool, or a wrong length, stride or device.
        """
        self._check(block_ids, out, "out")

    def check_scatter(self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int) -> None:
        """The door of every copy into the pages; the first `skip_blocks` blocks are not written.

        Raises:
            TypeError, ValueError: as in `check_gather`; also ValueError where `skip_blocks` is out of
                range, or an id that is written is named twice.
        """
        self._check(block_ids, src, "src")
        if not 0 <= skip_blocks <= self.num_blocks:
            raise ValueError(f"skip_blocks must be 0 to {self.num_blocks}, got {skip_blocks}")
        written = block_ids[skip_blocks:]
        if len(set(written)) != len(written):
            twice = next(block for block in written if list(written).count(block) > 1)
            raise ValueError(f"block id {twice} is named twice: its bytes would depend on the order of writes")

    def _check(self, block_ids: Sequence[int], flat: torch.Tensor, what: str) -> None:
        if len(block_ids) != self.num_blocks:
            raise ValueError(f"a chunk has {self.num_blocks} blocks, got {len(block_ids)} block ids")
        if min(block_ids) < 0 or max(block_ids) >= self.num_pool_blocks:
            bad = next(block for block in block_ids if not 0 <= block < self.num_pool_blocks)
            raise ValueError(f"block id {bad} is outside the pool: 0 to {self.num_pool_blocks - 1}")
        if flat.dtype != torch.uint8:
            raise TypeError(f"{what} must be uint8, got {flat.dtype}")
        if flat.dim() != 1 or flat.shape[0] != self.num_bytes or not flat.is_contiguous():
            raise ValueError(
                f"{what} must be contiguous and of shape ({self.num_bytes},), "
                f"got {tuple(flat.shape)} with strides {flat.stride()}"
            )
        if not flat.is_cpu and flat.device != self.device:
            raise ValueError(f"{what} must be in host memory or on {self.device}, got {flat.device}")

    def _planes(self, number: int) -> Iterator[Plane]:
        geometry, tensor = self.geometries[number], self.paged[number].tensor
        start = tensor.untyped_storage().data_ptr() + geometry.offset
        run_offsets = tuple(offsets_of(geometry.inner[:-1]))
        for outer, outer_offset in enumerate(offsets_of(geometry.outer)):
            yield Plane(
                tensor=number,
                address=start + outer_offset,
                offset=self.offsets[number] + outer * self.num_blocks * geometry.block_bytes,
                block_bytes=geometry.block_bytes,
                block_stride=geometry.block_stride,
                run_bytes=geometry.run_bytes,
                run_offsets=run_offsets,
            )


def offsets_of(dims: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The offset of every index over dimensions of (size, stride), in row-major order."""
    for index in product(*(range(size) for size, _ in dims)):
        yield sum(place * stride for place, (_, stride) in zip(index, dims, strict=True))
