"""The engine's pages that copies are tried with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.tiers.base import ALIGNMENT_BYTES
from kvsluice.tiers.errors import ConfigError

__all__ = ["MAX_REGION_BYTES", "TOKENS_PER_BLOCK", "Pages"]

TOKENS_PER_BLOCK: Final = 16
"""Of the pages by default, as vLLM has it for most GPU backends."""
MAX_REGION_BYTES: Final = 1 << 30
"""Of host memory at most are mapped for the trial: enough to see what registering costs, little beside a node's."""


@dataclass(frozen=True, slots=True)
class Pages:
    """A KV cache whose layers have a page of keys and a page of values for each block.

    The default is a layer of Llama 3.1 8B and 70B in bfloat16: 8 KV heads of 128 for 16 tokens are 32 KiB.

    Attributes:
        page_bytes: of a block's keys, or values, in one layer: one run of memory.
        num_layers: layers of this rank.
        blocks_per_chunk: blocks of one chunk.

    Raises:
        ConfigError: one of them is below 1, or a chunk exceeds `MAX_REGION_BYTES`.
    """

    page_bytes: int = 32 << 10
    num_layers: int = 32
    blocks_per_chunk: int = 256 // TOKENS_PER_BLOCK

    def __post_init__(self) -> None:
        for name in ("page_bytes", "num_layers", "blocks_per_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.slot_bytes > MAX_REGION_BYTES:
            raise ConfigError(
                f"a chunk of {self.blocks_per_chunk} blocks of {self.num_layers} layers with two pages of"
                f" {self.page_bytes} bytes has {self.chunk_bytes} bytes: up to {MAX_REGION_BYTES} are tried"
            )

    @property
    def chunk_bytes(self) -> int:
        """Payload of a chunk."""
        return 2 * self.page_bytes * self.num_layers * self.blocks_per_chunk

    @property
    def slot_bytes(self) -> int:
        """The least room for it in a region."""
        return -(-self.chunk_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def plan_on(self, device: torch.device) -> CopyPlan:
        """Pages in new memory on `device`, twice a chunk's; raises what torch raises where they do not fit."""
        shape = (2, 2 * self.blocks_per_chunk, self.page_bytes)
        # Written once: memory that nobody wrote is read from one page of zeros, faster than any other.
        layers = [torch.ones(shape, dtype=torch.uint8, device=device) for _ in range(self.num_layers)]
        paged = [PagedTensor(layer, 1, name=f"layer {number}") for number, layer in enumerate(layers)]
        return CopyPlan(paged, self.blocks_per_chunk)
