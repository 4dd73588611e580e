"""A decoder-only transformer over paged KV memory, in plain torch: what the example engine computes with.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. The weights are random and seeded: no
download, and still every token depends on the whole KV cache, because the weights are drawn wide
enough for attention to pick single positions instead of averaging over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name every torch program uses)
from torch import Tensor

__all__ = ["ModelConfig", "PagedModel", "layer_name", "new_kv_caches"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model. The defaults have about 25 million weights and 16 KiB of KV per token."""

    vocab: int = 2048
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 1408
    rope_theta: float = 10_000.0
    weight_std: float = 0.08
    """A guess that `tests/examples` holds: at this width one zeroed KV block changes the greedy tokens."""
    seed: int = 7


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor
    """`(hidden, (heads + 2 * kv_heads) * head_dim)`"""
    out: Tensor
    """`(heads * head_dim, hidden)`"""
    gate_up: Tensor
    """`(hidden, 2 * ffn)`"""
    down: Tensor
    """`(ffn, hidden)`"""


def layer_name(layer: int) -> str:
    """What layer number `layer` is called in the KV caches, and so in the chunks."""
    return f"model.layers.{layer}.self_attn"


def new_kv_caches(config: ModelConfig, num_blocks: int, block_size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Paged KV memory, zeroed: per layer one float32 tensor `(num_blocks, 2, block_size, kv_heads, head_dim)`."""
    shape = (num_blocks, 2, block_size, config.kv_heads, config.head_dim)
    return {layer_name(layer): torch.zeros(shape, device=device) for layer in range(config.layers)}


class PagedModel:
    """The transformer. Not thread-safe: a forward pass writes into the caches that it is given."""

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        self.config = config
        self.device = device
        # Drawn on the CPU whatever the device, so that every process and every machine has the same weights.
        source = torch.Generator().manual_seed(config.seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=source) * config.weight_std).to(device)

        heads_width = config.heads * config.head_dim
        self._embed = draw(config.vocab, config.hidden)
        self._layers = [
            _Layer(
                qkv=draw(config.hidden, heads_width + 2 * config.kv_heads * config.head_dim),
                out=draw(heads_width, config.hidden),
                gate_up=draw(config.hidden, 2 * config.ffn),
                down=draw(config.ffn, config.hidden),
            )
            for _ in range(config.layers)
        ]
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        self._frequencies = 1.0 / config.rope_theta**exponents

    def forward(self, tokens: list[int], start: int, blocks: list[int], caches: Mapping[str, Tensor]) -> Tensor:
        """Compute `tokens`, which stand at positions `start` onwards, and write their K and V into `caches`.

        Args:
            tokens: at least one token id, each below `vocab`.
            start: how many tokens the blocks hold already.
            blocks: the block table: enough block ids for `start + len(tokens)` tokens, in order.
            caches: as `new_kv_caches` makes them.

        Returns:
            The logits after the last token, float32 `(vocab,)`.
        """
        config = self.config
        block_size = next(iter(caches.values())).shape[2]
        end = start + len(tokens)
        table = torch.tensor(blocks[: -(-end // block_size)], device=self.device)
        positions = torch.arange(start, end, device=self.device)
        pages, offsets = table[positions // block_size], positions % block_size
        mask = torch.arange(end, device=self.device)[None, :] <= positions[:, None]
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

        x = self._embed[torch.tensor(tokens, device=self.device)]
        for number, layer in enumerate(self._layers):
            q, k, v = torch.split(_rms_norm(x) @ layer.qkv, [q_width, kv_width, kv_width], dim=-1)
            q = _rotate(q.view(-1, config.heads, config.head_dim), cos, sin)
            k = _rotate(k.view(-1, config.kv_heads, config.head_dim), cos, sin)
            cache = caches[layer_name(number)]
            cache[pages, 0, offsets] = k
            cache[pages, 1, offsets] = v.view(-1, config.kv_heads, config.head_dim)
            # Everything that attention sees comes back out of the pages, this piece's own tokens included:
            # a block that a load got wrong can't hide behind values that were computed a moment ago.
            keys, values = cache[table].unbind(1)
            keys, values = keys.flatten(0, 1)[:end], values.flatten(0, 1)[:end]
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            x = x + attended[0].transpose(0, 1).flatten(1) @ layer.out
            gate, up = (_rms_norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer.down
        return _rms_norm(x[-1]) @ self._embed.T


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `(tokens, heads, head_dim)`; the two halves of a head are a pair's two sides."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
