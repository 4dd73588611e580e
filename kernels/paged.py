"""One layer's KV memory as the copy kernels see it: bytes, strides, and one axis of blocks.

    tensor (memory order)   outer ... | rows of blocks | inner ...
    in a chunk              outer ... | rows of the chosen blocks | inner ...   row-major, dense

A kernel knows neither layers nor dtypes: a tensor comes as integers of its item size, so that no
bit pattern (a signalling NaN, a float8) can change on its way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["INTEGER_DTYPES", "Geometry", "PagedTensor", "may_overlap_itself"]

INTEGER_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype under which a kernel sees items of that many bytes."""


def may_overlap_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may name one element: the strides do not nest, taken from the smallest on.

    Exotic strides that interleave without a collision count as overlapping; no engine lays out a
    cache so, and telling them apart is an integer programme.
    """
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the bytes of a paged tensor lie, in bytes, with neighbouring dimensions merged where they are dense.

    Attributes:
        offset: of the first byte within the storage.
        outer: (size, stride) of the dimensions before the block axis.
        num_blocks, block_stride: the block axis, one entry per block.
        inner: (size, stride) of what one block holds under one outer index; the last stride is 1.
    """

    offset: int
    outer: tuple[tuple[int, int], ...]
    num_blocks: int
    block_stride: int
    inner: tuple[tuple[int, int], ...]

    @property
    def run_bytes(self) -> int:
        """Length of the longest runs of memory that always belong to one block."""
        return self.inner[-1][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block under one outer index."""
        return math.prod(size for size, _ in self.inner)

    @property
    def num_outer(self) -> int:
        """How many outer indices there are; 1 where the block axis comes first."""
        return math.prod(size for size, _ in self.outer)

    @property
    def contiguous(self) -> bool:
        """Whether a block's bytes under one outer index are one run."""
        return len(self.inner) == 1

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks are one run, too."""
        return self.contiguous and self.block_stride == self.run_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PagedTensor:
    """A strided integer tensor, one of whose axes counts rows of blocks. Immutable and thread-safe.

    Args:
        tensor: uint8, int16, int32 or int64, strided, not overlapping itself, no size of 0; a view of
            an engine's cache with its dimensions in the order in which a chunk keeps them.
        block_axis: the axis that counts rows, 0 <= block_axis < tensor.dim().
        rows_per_block: consecutive rows that make one block; divides the axis' size.
        name: what errors call this tensor.

    Raises:
        TypeError: not a tensor, or one of another dtype or layout.
        ValueError: any other of the conditions above does not hold.
    """

    tensor: torch.Tensor
    block_axis: int
    rows_per_block: int = 1
    name: str = "tensor"

    def __post_init__(self) -> None:
        tensor = self.tensor
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{self.name}: needs a strided tensor, got {type(tensor).__name__}")
        if INTEGER_DTYPES.get(tensor.element_size()) != tensor.dtype:
            raise TypeError(f"{self.name}: dtype must be one of {list(INTEGER_DTYPES.values())}, got {tensor.dtype}")
        if not 0 <= self.block_axis < tensor.dim():
            raise ValueError(f"{self.name}: block_axis {self.block_axis} is not an axis of shape {tuple(tensor.shape)}")
        if tensor.numel() == 0:
            raise ValueError(f"{self.name}: shape {tuple(tensor.shape)} holds nothing")
        rows = tensor.shape[self.block_axis]
        if self.rows_per_block < 1 or rows % self.rows_per_block:
            raise ValueError(f"{self.name}: {rows} rows are no whole number of blocks of {self.rows_per_block} rows")
        if may_overlap_itself(tensor.shape, tensor.stride()):
            raise ValueError(f"{self.name}: shape {tuple(tensor.shape)} overlaps itself with strides {tensor.stride()}")

    @property
    def num_blocks(self) -> int:
        """Blocks in the whole tensor."""
        return self.tensor.shape[self.block_axis] // self.rows_per_block

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, over all outer indices."""
        return self.tensor.numel() * self.tensor.element_size() // self.num_blocks

    @property
    def contiguous(self) -> bool:
        """Whether a block's bytes under one outer index are one run of memory."""
        return self.geometry().contiguous

    def chunk_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape in which a chunk of `num_blocks` blocks keeps this tensor, row-major."""
        shape = list(self.tensor.shape)
        shape[self.block_axis] = num_blocks * self.rows_per_block
        return tuple(shape)

    def geometry(self) -> Geometry:
        """The same tensor in bytes; rows of one block become an inner dimension."""
        item = self.tensor.element_size()
        dims = [(size, stride * item) for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True)]
        row_stride = dims[self.block_axis][1]
        inner = [(self.rows_per_block, row_stride), *dims[self.block_axis + 1 :], (item, 1)]
        merged = _merge(inner)
        return Geometry(
            offset=int(self.tensor.storage_offset()) * item,
            outer=_merge(dims[: self.block_axis]),
            num_blocks=self.num_blocks,
            block_stride=row_stride * self.rows_per_block,
            inner=merged if merged and merged[-1][1] == 1 else (*merged, (1, 1)),
        )


def _merge(dims: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Drop dimensions of size 1 and merge each pair that walks memory as one dimension would."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)
