"""What a mover queues: a chunk, the copies that it is made of, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvsluice.kernels.block_ids import BlockIds
from kvsluice.kernels.pieces import Piece
from kvsluice.kernels.plan import CopyPlan

__all__ = [
    "ChunkCopy",
    "CopyDirect",
    "CopyPages",
    "CopyStaged",
    "DirectCopy",
    "Direction",
    "FetchIds",
    "PageKernel",
]

Direction = Literal["out", "in"]
"""`out` is from pages to host memory: a store."""


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk to move.

    Attributes:
        block_ids: `num_blocks` ids of the plan's pool, in order.
        host: the whole payload, uint8 (num_bytes,), contiguous host memory.
        skip_blocks: on its way in, leading blocks that are left as they are.
    """

    block_ids: tuple[int, ...]
    host: torch.Tensor
    skip_blocks: int = 0


class DirectCopy(Protocol):
    """A copy that needs no staging: between pages and host memory, put on the current stream."""

    @property
    def plan(self) -> CopyPlan: ...

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None: ...

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None: ...


class PageKernel(Protocol):
    """A kernel between pages and staging memory on the same device, put on the current stream."""

    def gather(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """Fill `staged` from the pages.

        Args:
            piece: which part of each chunk.
            ids: int64 (chunks, num_blocks), on the pages' device.
            staged: uint8, on the pages' device, 256-aligned; chunk c's part begins at byte
                `piece.shift_bytes + c * stride_bytes`.
        """
        ...

    def scatter(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """Fill the pages from `staged`: the reverse of `gather`."""
        ...


@dataclass(frozen=True, slots=True)
class CopyDirect:
    """Pages to host memory or back without staging, of one chunk, whole or some of its tensors."""

    copy: DirectCopy
    direction: Direction
    chunk: ChunkCopy
    tensors: range | None = None

    def run(self) -> None:
        if self.direction == "out":
            self.copy.gather(self.chunk.block_ids, self.chunk.host, self.tensors)
        else:
            self.copy.scatter(self.chunk.block_ids, self.chunk.host, self.chunk.skip_blocks, self.tensors)


@dataclass(frozen=True, slots=True)
class FetchIds:
    """Block ids to the device."""

    ids: BlockIds

    def run(self) -> None:
        self.ids.fetch()


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Pages to a staging slot or back, one piece of several chunks."""

    kernel: PageKernel
    direction: Direction
    piece: Piece
    ids: BlockIds
    first_chunk: int
    num_chunks: int
    slot: int
    staged: torch.Tensor
    stride_bytes: int

    def run(self) -> None:
        move = self.kernel.gather if self.direction == "out" else self.kernel.scatter
        rows = self.ids.on_device[self.first_chunk : self.first_chunk + self.num_chunks]
        move(self.piece, rows, self.staged, self.stride_bytes)


@dataclass(frozen=True, slots=True)
class CopyStaged:
    """A staging slot's piece of one chunk to host memory or back: one contiguous copy."""

    direction: Direction
    slot: int
    staged: torch.Tensor
    host: torch.Tensor

    def run(self) -> None:
        if self.direction == "out":
            self.host.copy_(self.staged, non_blocking=True)
        else:
            self.staged.copy_(self.host, non_blocking=True)
