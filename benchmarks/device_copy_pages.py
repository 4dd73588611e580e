"""Pages of a KV cache on a device, chunks of random blocks of them, and slots of pinned memory for the chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.operations import ChunkCopy

__all__ = ["Pool", "Shape", "open_region", "shape_of"]

_MAX_LAYERS = 32
_SLOT_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A chunk: of each layer K and V apart, in pages of one block each."""

    page_bytes: int
    layers: int
    num_blocks: int

    @property
    def chunk_bytes(self) -> int:
        return 2 * self.layers * self.num_blocks * self.page_bytes

    @property
    def pages(self) -> int:
        return 2 * self.layers * self.num_blocks


def shape_of(page_bytes: int, chunk_bytes: int) -> Shape:
    """The chunk of at most `chunk_bytes` with 32 layers or as many fewer as leave it two blocks."""
    layers = max(1, min(_MAX_LAYERS, chunk_bytes // (4 * page_bytes)))
    return Shape(page_bytes, layers, max(1, chunk_bytes // (2 * layers * page_bytes)))


class Pool:
    """A cache of random bytes whose blocks belong to `num_chunks` chunks, dealt out at random.

    Args:
        shape: of a chunk.
        num_chunks: so many that all of them exceed the device's cache by far.
        device: where the pages are.
        seed: of bytes and blocks.

    Attributes:
        tensors: by layer int16 (K and V, blocks, items of a page).
        plan: of a chunk.
        block_ids: by chunk; no block is in two.
    """

    def __init__(self, shape: Shape, num_chunks: int, device: torch.device, seed: int = 1) -> None:
        self.shape = shape
        self.device = device
        num_blocks = num_chunks * shape.num_blocks
        generator = torch.Generator(device).manual_seed(seed)
        self.tensors = [
            torch.randint(
                -(1 << 15),
                1 << 15,
                (2, num_blocks, shape.page_bytes // 2),
                dtype=torch.int16,
                device=device,
                generator=generator,
            )
            for _ in range(shape.layers)
        ]
        paged = [PagedTensor(tensor, 1, name=f"layer {number}") for number, tensor in enumerate(self.tensors)]
        self.plan = CopyPlan(paged, shape.num_blocks)
        dealt = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.block_ids = tuple(
            tuple(dealt[chunk * shape.num_blocks : (chunk + 1) * shape.num_blocks]) for chunk in range(num_chunks)
        )

    def payload(self, chunk: int) -> torch.Tensor:
        """What the chunk's blocks hold once the device is idle: uint8 (chunk_bytes,) in host memory."""
        ids = self._ids(chunk)
        parts = [tensor.index_select(1, ids).flatten() for tensor in self.tensors]
        return torch.cat(parts).cpu().view(torch.uint8)

    def blank(self, chunk: int) -> None:
        """Have the chunk's blocks hold nothing, on the current stream."""
        ids = self._ids(chunk)
        for tensor in self.tensors:
            tensor.index_fill_(1, ids, 0)

    def copies(self, chunks: Sequence[int], region: PinnedRegion) -> list[ChunkCopy]:
        """For each of these chunks its blocks and the slot of its number."""
        return [ChunkCopy(self.block_ids[chunk], region.tensor(chunk)[: self.plan.num_bytes]) for chunk in chunks]

    def _ids(self, chunk: int) -> torch.Tensor:
        return torch.tensor(self.block_ids[chunk], device=self.device)


def open_region(num_slots: int, payload_bytes: int, device: torch.device) -> PinnedRegion:
    """Slots as the connector has them, full of random bytes. For a device they are registered, unless that is refused.

    Raises:
        ConfigError: the memory cannot be had.
    """
    slot_bytes = -(-payload_bytes // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES
    region = PinnedRegion(num_slots, slot_bytes, device=device, pin="auto")
    some = torch.randint(256, (slot_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(slot_bytes))
    for slot in range(num_slots):
        # No two slots alike, and every page of them is there before anything is measured.
        region.tensor(slot).copy_(some.roll(slot + 1))
    return region
