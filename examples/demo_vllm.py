"""Show that a real vLLM serves the same tokens from chunks that an earlier engine left behind.

Makes a small model, serves three prompts with a long common prefix cold, in one engine process, ends
that process, and serves them again in a new one, where their prefixes are hits. Compares the tokens
and prints what it took. `make demo-vllm` runs this with a Python that has vLLM.

Exit code 0 means identical tokens and every expected hit; 1 means that one of the two failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from vllm_engine import (
    EngineError,
    EngineProcess,
    Served,
    chunk_files,
    distinct_chunks,
    kv_transfer_config,
    wait_until,
)
from vllm_model import make_model, shared_prefix_prompts

TOKENS_PER_CHUNK: Final = 256
"""Two of vLLM's CPU blocks."""
PREFIX_TOKENS: Final = 2304
TAIL_TOKENS: Final = (300, 600, 900)
"""Each prompt ends in a part of a chunk, which is never stored."""
STORES_TIMEOUT_S: Final = 60.0
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine process did.

    Attributes:
        served: one entry per prompt.
        start_s: what the engine took to start.
        stats: the connector's statistics when all was done: `OffloadStats` as nested dicts.
    """

    served: list[Served]
    start_s: float
    stats: dict[str, object]


def sluice_config(root: Path) -> dict[str, object]:
    """A host tier above a folder that outlives the engine."""
    # The gate's marks are for a disk shared with the engine's own computation on a few cores: the built-in ones, made
    # for local drives beside a GPU, would rightly hold stores back here, and this program waits for all of them.
    gate = {"high_water_s": 1.0, "low_water_s": 0.5}
    return {
        "tokens_per_chunk": TOKENS_PER_CHUNK,
        "staging_bytes": "64MiB",
        "tiers": [
            {"type": "host", "capacity": "128MiB", "backpressure": gate},
            {"type": "fs", "root_dir": str(root), "capacity": "1GiB", "backpressure": gate},
        ],
    }


def serve_cold(console: Console, model: Path, root: Path, work_dir: Path, prompts: list[list[int]]) -> Run:
    """Serve `prompts` in a new engine that computes all of them, and wait until their chunks are on disk.

    Raises:
        EngineError: the engine failed, or the chunks did not come.
    """
    with ExitStack() as stack:
        with console.status("first engine: starting"):
            engine = stack.enter_context(
                EngineProcess(model, work_dir, kv_transfer=kv_transfer_config(sluice_config(root)))
            )
        with console.status("first engine: serving the prompts cold"):
            served = engine.generate(prompts, read_caches=False)
        # The last generated token was never an input, so it has no place in the cache.
        whole = [prompt + list(one.tokens[:-1]) for prompt, one in zip(prompts, served, strict=True)]
        expected = distinct_chunks(whole, TOKENS_PER_CHUNK)
        with console.status(f"first engine: waiting for {expected} chunk files") as status:

            def all_there() -> bool:
                count = len(chunk_files(root))
                status.update(f"first engine: {count} of {expected} chunk files on disk")
                return count >= expected

            arrived = wait_until(all_there, timeout_s=STORES_TIMEOUT_S)
        stats = engine.connector_stats()
        if not arrived:
            raise EngineError(
                f"{len(chunk_files(root))} of {expected} chunk files after {STORES_TIMEOUT_S:g} s; statistics: {stats}"
            )
        with console.status("first engine: ending its process"):
            engine.close()
        return Run(served, engine.start_s, stats)


def serve_hits(console: Console, model: Path, root: Path, work_dir: Path, prompts: list[list[int]]) -> Run:
    """Serve `prompts` in a new engine that finds their chunks in the tiers.

    Raises:
        EngineError: the engine failed.
    """
    with ExitStack() as stack:
        with console.status("second engine: starting"):
            engine = stack.enter_context(
                EngineProcess(model, work_dir, kv_transfer=kv_transfer_config(sluice_config(root)))
            )
        served = []
        for number, prompt in enumerate(prompts, 1):
            with console.status(f"second engine: serving prompt {number} of {len(prompts)}"):
                # Otherwise the common prefix of the later prompts would come from vLLM's own cache, not from a tier.
                engine.reset_prefix_cache()
                served += engine.generate([prompt])
        stats = engine.connector_stats()
        with console.status("second engine: ending its process"):
            engine.close()
        return Run(served, engine.start_s, stats)


def expected_hit_tokens(prompt_tokens: int) -> int:
    """All full chunks of a prompt."""
    return prompt_tokens // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK


def request_table(cold: Run, hits: Run) -> Table:
    """One line per prompt: what was hit, and what that did to the first token."""
    table = Table(title="requests")
    for heading in ("prompt tokens", "hit tokens", "first token cold", "on a hit", "same tokens"):
        table.add_column(heading, justify="right")
    for before, after in zip(cold.served, hits.served, strict=True):
        table.add_row(
            str(after.prompt_tokens),
            str(after.cached_tokens),
            f"{before.first_token_s * 1e3:.0f} ms",
            f"{after.first_token_s * 1e3:.0f} ms",
            "yes" if before.tokens == after.tokens else "[red]no[/red]",
        )
    return table


def tier_table(runs: Mapping[str, Run]) -> Table:
    """One line per engine and tier: traffic, gate and what was not stored or not used."""
    table = Table(title="tiers")
    for heading in ("engine", "tier"):
        table.add_column(heading, no_wrap=True)
    for heading in ("stored", "loaded", "gate", "dropped", "failed", "missed"):
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        for tier, counts in _mapping(run.stats.get("tiers")).items():
            stats = _mapping(counts)
            table.add_row(
                name,
                tier,
                _traffic(stats, "stored"),
                _traffic(stats, "loaded"),
                _gate(stats.get("gate")),
                *(_reasons(stats.get(outcome)) for outcome in ("dropped", "failed", "missed")),
            )
    return table


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _traffic(stats: Mapping[str, object], verb: str) -> str:
    chunks, num_bytes = stats.get(f"chunks_{verb}"), stats.get(f"bytes_{verb}")
    if not isinstance(chunks, int) or not isinstance(num_bytes, int):
        return "unknown"
    return f"{chunks}, {num_bytes / MIB:.0f} MiB"


def _gate(gate: object) -> str:
    if not isinstance(gate, dict):
        return "none"
    return "pressed" if gate.get("under_pressure") else "open"


def _reasons(counts: object) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in _mapping(counts).items() if count) or "0"


def load_gate_line(stats: Mapping[str, object]) -> str:
    """What the load gate weighed when it let the hits through."""
    gate = _mapping(stats.get("load_gate"))
    rate, copy_s = gate.get("prefill_tokens_per_s"), gate.get("copy_s")
    known = [f"the engine computes {rate:.0f} tokens/s"] if isinstance(rate, float) else []
    known += [
        f"a chunk comes from {tier} in {interval_s * 1e3:.1f} ms"
        for tier, interval_s in _mapping(gate.get("load_interval_s")).items()
        if isinstance(interval_s, float)
    ]
    known += [f"its copy takes {copy_s * 1e3:.1f} ms"] if isinstance(copy_s, float) else []
    return f"load gate: {', '.join(known) or 'nothing measured'}"


def judge(console: Console, cold: Run, hits: Run) -> bool:
    """Print the verdict; whether the tokens are identical and every expected hit was there."""
    missing = [
        f"prompt of {one.prompt_tokens} tokens: {one.cached_tokens} hit tokens instead of "
        f"{expected_hit_tokens(one.prompt_tokens)}"
        for one in hits.served
        if one.cached_tokens != expected_hit_tokens(one.prompt_tokens)
    ]
    for line in missing:
        console.print(f"[red]missing hit[/red]: {line}")
    identical = [one.tokens for one in cold.served] == [one.tokens for one in hits.served]
    console.print(f"identical tokens: {'yes' if identical else 'no'}")
    return identical and not missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; the exit code."""
    parser = argparse.ArgumentParser(description="serve prompts cold, then on hits in a new vLLM engine process")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and keep it: model, chunk files, logs")
    options = parser.parse_args(arguments)
    console = Console()
    with ExitStack() as stack:
        base: Path = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsluice-demo-")))
        root = base / "chunks"
        root.mkdir(parents=True, exist_ok=True)
        with console.status("making the model"):
            model = make_model(base / "model")
        prompts = shared_prefix_prompts(PREFIX_TOKENS, TAIL_TOKENS)
        try:
            cold = serve_cold(console, model, root, base / "first-engine", prompts)
            hits = serve_hits(console, model, root, base / "second-engine", prompts)
        except EngineError as error:
            console.print(f"[red]the demonstration failed[/red]: {error}", highlight=False)
            return 1
    console.print(request_table(cold, hits))
    console.print(tier_table({"first": cold, "second": hits}))
    console.print(load_gate_line(hits.stats), highlight=False, soft_wrap=True)
    console.print(f"engine start: {cold.start_s:.0f} s and {hits.start_s:.0f} s, each a process of its own")
    return 0 if judge(console, cold, hits) else 1


if __name__ == "__main__":
    sys.exit(main())
