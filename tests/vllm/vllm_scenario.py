"""What the two engines of these tests are asked, and what they leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_engine import EngineProcess, Served
from vllm_model import random_tokens, shared_prefix_prompts

TOKENS_PER_BLOCK = 128
"""vLLM's default on a CPU."""
TOKENS_PER_CHUNK = 256
PROMPTS = shared_prefix_prompts(1280, [300, 400, 530])
LONE_PROMPT = random_tokens(1400, seed=99)
"""Shares nothing with the others, so that its files can be damaged without touching theirs."""


def full_chunk_tokens(prompt: list[int]) -> int:
    return len(prompt) // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK


def sluice_config(root: Path, *, host: bool) -> dict[str, object]:
    """Without gates: these tests are about bytes, and wait for every chunk on machines of any speed.

    The load gate measures, and lets through what takes a million times as long as computing.
    """
    tiers: list[dict[str, object]] = [{"type": "fs", "root_dir": str(root), "capacity": "1GiB"}]
    if host:
        tiers.insert(0, {"type": "host", "capacity": "64MiB"})
    return {
        "tokens_per_chunk": TOKENS_PER_CHUNK,
        "staging_bytes": "32MiB",
        "load_timeout_s": 60.0,
        "lookup_timeout_s": 30.0,
        "backpressure": None,
        "load_gate": {"margin": 1e6},
        "tiers": tiers,
    }


@dataclass(frozen=True)
class First:
    """What the first engine left behind.

    Attributes:
        cold: how it served `PROMPTS` when it computed them whole.
        lone: how it served `LONE_PROMPT`, likewise.
        again: how it served `PROMPTS` after its own prefix cache and all chunk files were gone.
        root: a copy of the folder of chunk files, from before they were deleted.
        lone_files: the files below `root` that hold chunks of `LONE_PROMPT`.
        stats: the connector's, after all of that.
    """

    cold: list[Served]
    lone: Served
    again: list[Served]
    root: Path
    lone_files: list[Path]
    stats: dict[str, object]


@dataclass(frozen=True)
class Second:
    """A live engine on `First.root`; `zero_switch` exists while its loads are to be spoiled."""

    engine: EngineProcess
    zero_switch: Path
