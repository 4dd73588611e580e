"""One engine process of the demo: serves the demo's prompts and reports each step as a line of JSON.

    python demo_engine.py SPEC      SPEC: the fields of `Spec`, as JSON

`examples/demo.py` starts it, three times. The process of pass "cold" ends only when it is killed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if importlib.util.find_spec("kvsluice") is None:  # not installed: take the one beside this folder
    sys.path.append(str(Path(__file__).parents[1]))

from engine import Engine, prefix_keys
from paged_model import ModelConfig, PagedModel, new_kv_caches
from torch import cuda

from kvsluice.connector import KVLayout, OffloadConfig, OffloadConnector, OffloadStats

__all__ = ["SIZES", "Size", "Spec", "connector_config", "distinct_chunks", "expected_hit", "make_prompts"]

TIMEOUT_S = 60.0
"""For all stores to end; a local disk and a local object store need two or three seconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the demo is."""

    model: ModelConfig
    tokens_per_block: int
    blocks_per_chunk: int
    shared_tokens: int
    """What all prompts begin with: whole chunks."""
    own_tokens: tuple[int, ...]
    """How each prompt goes on, one number a prompt; ends within a chunk."""
    new_tokens: int

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk


SIZES = {
    "full": Size(ModelConfig(), 16, 16, shared_tokens=1024, own_tokens=(1000, 1013, 1022), new_tokens=24),
    "tiny": Size(
        ModelConfig(vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, weight_std=0.2),
        tokens_per_block=8,
        blocks_per_chunk=2,
        shared_tokens=32,
        own_tokens=(40, 45),
        new_tokens=12,
    ),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """What one engine process does."""

    size: str
    source: str
    """"cold", or the tier that the hits have to come from."""
    fs_root: str
    bucket: str
    endpoint_url: str
    prefix: str


def make_prompts(size: Size) -> list[list[int]]:
    """The same prompts in every process: a shared beginning, then tokens of their own."""
    source = random.Random(20)
    shared = [source.randrange(size.model.vocab) for _ in range(size.shared_tokens)]
    return [shared + [source.randrange(size.model.vocab) for _ in range(own)] for own in size.own_tokens]


def distinct_chunks(size: Size) -> int:
    """How many different chunks all prompts together have."""
    keys = [prefix_keys(prompt, size.tokens_per_block, size.blocks_per_chunk) for prompt in make_prompts(size)]
    return len({key for prompt_keys in keys for key in prompt_keys})


def expected_hit(size: Size, prompt_tokens: int) -> int:
    """Tokens that a full hit loads: every full chunk, but never the prompt's last token."""
    return (prompt_tokens - 1) // size.tokens_per_chunk * size.tokens_per_chunk


def connector_config(spec: Spec, size: Size) -> dict[str, object]:
    """Three tiers, each behind its gate with the built-in marks. Credentials come from the environment."""
    # Matrices as small as those of "tiny" are computed before an object store has answered: the load gate would
    # rightly leave its hits unused, and this program is here to show them. At full size the gate stays on.
    gate: dict[str, object] = {"load_gate": None} if spec.size == "tiny" else {}
    return {
        **gate,
        "model": f"example-{spec.size}",
        "blocks_per_chunk": size.blocks_per_chunk,
        "staging_bytes": "64MiB",
        "tiers": [
            {"type": "host", "capacity": "192MiB"},
            {"type": "fs", "root_dir": spec.fs_root, "capacity": "1GiB"},
            {"type": "obj", "bucket": spec.bucket, "endpoint_url": spec.endpoint_url, "prefix": spec.prefix},
        ],
    }


def report(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def report_stats(stats: OffloadStats) -> None:
    tiers = {
        name: {
            "stored": [tier.chunks_stored, tier.bytes_stored],
            "loaded": [tier.chunks_loaded, tier.bytes_loaded],
            "dropped": dict(tier.dropped),
            "failed": dict(tier.failed),
            "missed": dict(tier.missed),
            "gate": None if tier.gate is None else [tier.gate.under_pressure, tier.gate.store_latency_ema_s],
        }
        for name, tier in stats.tiers.items()
    }
    report("stats", tiers=tiers, skipped=dict(stats.skipped), unused=dict(stats.unused))


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int, name: str) -> None:
    """One prompt after the other, so that no first token waits for another prompt."""
    for number, prompt in enumerate(prompts):
        (completion,) = engine.generate([prompt], new_tokens, reuse=name != "cold")
        report("served", run=name, prompt=number, **asdict(completion))


def store_all(engine: Engine, connector: OffloadConnector, prompts: list[list[int]], chunks: int) -> None:
    """Serve until fs and obj hold every chunk: what a gate or a full queue turned away is offered again.

    Raises:
        TimeoutError: a tier still lacks some.
    """
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        engine.drain(timeout_s=TIMEOUT_S)
        tiers = connector.stats().tiers
        lacking = {name: chunks - tiers[name].known_chunks for name in ("fs", "obj")}
        if not any(missing > 0 for missing in lacking.values()):
            return
        if time.monotonic() > until_s:
            raise TimeoutError(f"chunks not stored after {TIMEOUT_S} s, by tier: {lacking}")
        report("again", lacking=lacking)
        time.sleep(0.5)  # a gate under pressure lets its estimate decay
        engine.generate(prompts, 1)


def main(argv: list[str]) -> int:
    spec = Spec(**json.loads(argv[0]))
    size = SIZES[spec.size]
    device = "cuda" if cuda.is_available() else "cpu"
    model = PagedModel(size.model, device)
    prompts = make_prompts(size)
    num_blocks = 2 * (max(map(len, prompts)) + size.new_tokens) // size.tokens_per_block + 2
    caches = new_kv_caches(size.model, num_blocks, size.tokens_per_block, device)
    layout = KVLayout.from_tensors(caches, tokens_per_block=size.tokens_per_block, block_dim=0)
    with OffloadConnector(OffloadConfig.from_dict(connector_config(spec, size)), layout) as connector:
        engine = Engine(model, caches, blocks_per_chunk=size.blocks_per_chunk, connector=connector)
        # The first forward pass of a process sets thread pools and kernels up: no prompt should pay for that.
        engine.generate([prompts[0][: size.tokens_per_chunk - 1]], 2, reuse=False)
        report("started")
        serve(engine, prompts, size.new_tokens, spec.source)
        if spec.source == "cold":
            engine.drain(timeout_s=TIMEOUT_S)
            serve(engine, prompts, size.new_tokens, "host")
            store_all(engine, connector, prompts, distinct_chunks(size))
        engine.drain(timeout_s=TIMEOUT_S)
        engine.check_integrity()
        connector.check_integrity()
        report_stats(connector.stats())
        if spec.source == "cold":
            report("durable")
            sys.stdin.read()  # until this process is killed; at its end the demo itself is gone
            return 1

        def zero_one(blocks: object) -> None:
            assert isinstance(blocks, list)
            for cache in caches.values():
                cache[blocks[len(blocks) // 2]] = 0

        control = Engine(model, caches, blocks_per_chunk=size.blocks_per_chunk, connector=connector, on_loaded=zero_one)
        serve(control, prompts[:1], size.new_tokens, "control")
        control.drain(timeout_s=TIMEOUT_S)
    report("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
