"""Make a small Llama on disk whose tokens depend on its KV cache.

The weights are drawn from a seed, without any network, wide enough (`initializer_range` 0.08) that
greedy tokens change when the cache holds other bytes. vLLM's own `load_format="dummy"` draws such
tiny weights that the tokens are the same whatever the cache holds, which proves nothing.

    python examples/vllm_model.py DIRECTORY
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ModelShape", "make_model", "random_tokens", "shared_prefix_prompts"]

VOCAB_SIZE = 2000
FIRST_PLAIN_TOKEN = 8
"""Ids below are left to special tokens (begin, end, padding)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the tests and the demo use: small, and still with several layers and KV heads."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    """vLLM's CPU attention takes head sizes that are multiples of 32."""
    max_positions: int = 4096
    initializer_range: float = 0.08


def make_model(directory: Path, *, seed: int = 0, shape: ModelShape | None = None) -> Path:
    """Write `config.json`, `generation_config.json` and `model.safetensors` into `directory`.

    The same seed and shape give the same weights. A directory that already holds a model is left
    as it is, so that two runs can share it.

    Args:
        directory: made if it is not there.
        seed: of torch's generator while the weights are drawn.
        shape: the sizes of the model; the defaults give about 4 million parameters in float32.

    Returns:
        `directory`, which vLLM takes as `model`.
    """
    if (directory / "model.safetensors").exists():
        return directory
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would run into the caller's own
    shape = shape or ModelShape()
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def random_tokens(count: int, *, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`count` token ids, the same for the same seed, none of them special."""
    generator = random.Random(seed)
    return [generator.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(count)]


def shared_prefix_prompts(prefix_tokens: int, tail_tokens: Sequence[int], *, seed: int = 1) -> list[list[int]]:
    """One prompt per entry of `tail_tokens`: a common prefix, then a tail of that many tokens of its own."""
    prefix = random_tokens(prefix_tokens, seed=seed)
    return [prefix + random_tokens(tail, seed=seed + 1 + index) for index, tail in enumerate(tail_tokens)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model in the directory that the command line names."""
    parser = argparse.ArgumentParser(description="make a small Llama whose tokens depend on its KV cache")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(make_model(options.directory, seed=options.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
