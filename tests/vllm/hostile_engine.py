"""One vLLM engine in this very process, stepped by hand, and what may go wrong while it serves.

Run as a script: serves every scenario, then writes what came of each, as JSON, for the tests to judge.
In one process the scenarios can end a request, hang a tier or reset a cache between two given steps,
and count vLLM's blocks afterwards.

    python hostile_engine.py MODEL ROOT_DIR RESULTS
"""

# ruff: noqa: SLF001 - what is proven here, that nothing was kept, stands in private state alone
from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm_model import random_tokens

from kvsluice.connector.vllm import SluiceConnector, scheduler_half
from kvsluice.tiers.errors import ConfigError, TierUnavailableError
from kvsluice.tiers.fs import FileSystemTier

BLOCK = 32
CHUNK = 2 * BLOCK
NUM_BLOCKS = 40
"""Two requests of the preemption scenario fill it."""
NUM_TOKENS = 10
LOAD_TIMEOUT_S = 0.5
STORE_PATIENCE_S = 1.0
"""In place of the adapter's own, which tests would sit out."""
PUMP_TIMEOUT_S = 60.0
PROMPT = random_tokens(8 * CHUNK + 5, seed=77)

_load, _store, _held_prefix = FileSystemTier.load, FileSystemTier.store, FileSystemTier.held_prefix


class Faults:
    """What every `FileSystemTier` of the process suffers from: operations that wait, or that fail."""

    loads_wait_for: threading.Event | None = None
    stores_wait_for: threading.Event | None = None
    failing = False

    @staticmethod
    def check() -> None:
        if Faults.failing:
            raise TierUnavailableError("a test lets it fail", reason="io_error")


def load(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
    if Faults.loads_wait_for is not None:
        Faults.loads_wait_for.wait(PUMP_TIMEOUT_S)
    Faults.check()
    return _load(self, key, buffer, num_bytes)


def store(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
    if Faults.stores_wait_for is not None:
        Faults.stores_wait_for.wait(PUMP_TIMEOUT_S)
    Faults.check()
    return _store(self, key, buffer, num_bytes)


def held_prefix(self: FileSystemTier, keys: Sequence[bytes]) -> int:
    Faults.check()
    return _held_prefix(self, keys)


@contextmanager
def hung(*, loads: bool = False, stores: bool = False) -> Iterator[None]:
    """Inside, the tiers' operations do not return; afterwards those that hang do."""
    release = threading.Event()
    Faults.loads_wait_for = release if loads else None
    Faults.stores_wait_for = release if stores else None
    try:
        yield
    finally:
        Faults.loads_wait_for = Faults.stores_wait_for = None
        release.set()


def engine_args(model: Path, transfer: dict[str, object]) -> EngineArgs:
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        seed=0,
        block_size=BLOCK,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        kv_transfer_config=transfer,
    )


def transfer_config(root: Path) -> dict[str, object]:
    return {
        "kv_connector": "SluiceConnector",
        "kv_connector_module_path": "kvsluice.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "staging_bytes": "4MiB",
            "load_timeout_s": LOAD_TIMEOUT_S,
            "lookup_timeout_s": 30.0,
            "negative_ttl_s": 0.001,
            "backpressure": None,
            # Each scenario means its loads to be made, however slow it lets them be; one sets its own.
            "load_gate": {"margin": 1e9},
            "tiers": [{"type": "fs", "root_dir": str(root), "capacity": "1GiB"}],
        },
    }


class Engine:
    """The engine, its scheduler and the scheduler's half of the connector."""

    def __init__(self, model: Path, root: Path) -> None:
        self.model = model
        self.root = root
        self.llm = LLMEngine.from_engine_args(engine_args(model, transfer_config(root)))
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.half = self.scheduler.connector._scheduler_half
        self.planner = self.half._planner
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.preemptions = 0
        self._count = 0
        preempt = self.scheduler._preempt_request

        def counting(*args: object, **kwargs: object) -> object:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counting
        self.cold = self.serve([PROMPT], read_caches=False)[0]
        self.settle()

    def add(self, name: str, prompt: Sequence[int], *, max_tokens: int = NUM_TOKENS, read_caches: bool = True) -> None:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=not read_caches,
        )
        self.llm.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)

    def step(self) -> None:
        for output in self.llm.step():
            (completion,) = output.outputs
            self.tokens[output.request_id] = tuple(completion.token_ids)
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finished:
                self.finished[output.request_id] = str(completion.finish_reason)

    def pump(self, until: Callable[[], bool]) -> None:
        """Step until `until` is true; the engine must go on meanwhile."""
        end_s = time.monotonic() + PUMP_TIMEOUT_S
        while not until():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.planner.stats()}, requests {list(self.scheduler.requests)}")
            self.step()
            # As vLLM's own loop does where it had nothing to compute: a moment for the other threads.
            time.sleep(0)

    def serve(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = NUM_TOKENS, read_caches: bool = True
    ) -> list[tuple[int, ...]]:
        self._count += 1
        names = [f"serve-{self._count}-{at}" for at in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt, max_tokens=max_tokens, read_caches=read_caches)
        self.pump(lambda: all(name in self.finished for name in names))
        return [self.tokens[name] for name in names]

    def serve_one(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The tokens, and how many of the prompt's were not computed."""
        (tokens,) = self.serve([prompt])
        return tokens, self.cached[f"serve-{self._count}-0"]

    def settle(self) -> None:
        """Step until nothing is under way, then prove that nothing was kept: blocks, slots, requests."""
        self.pump(lambda: not self.scheduler.has_requests())
        end_s = time.monotonic() + PUMP_TIMEOUT_S
        while not self.planner.idle and time.monotonic() < end_s:
            # An idle engine takes no step by itself, and reports come with steps.
            self.serve([[8]], max_tokens=1, read_caches=False)
            self.pump(lambda: not self.scheduler.has_requests())
        assert self.planner.idle, self.planner.stats()
        self.planner.check_integrity()
        half = self.half
        for left in (half._held_blocks, half._loads, half._failed_loads, half._requests, self.scheduler.requests):
            assert not left
        free = self.pool.get_num_free_blocks()
        assert free == NUM_BLOCKS - 1, f"{free} of {NUM_BLOCKS - 1} blocks are free"
        assert self.llm.reset_prefix_cache() is True

    def store_prompt(self) -> list[Path]:
        """Have all of `PROMPT`'s chunks in the tier, and nothing of it in vLLM; the chunks' files."""
        self.serve([PROMPT])
        self.settle()
        files = sorted(self.root.rglob("*.safetensors"))
        assert len(files) >= len(PROMPT) // CHUNK
        return files

    @property
    def fs(self) -> dict[str, object]:
        tier = self.planner.stats().tiers["fs"]
        return {"loaded": tier.chunks_loaded, "missed": dict(tier.missed), "dropped": dict(tier.dropped)}


def preempted_while_stores_and_loads_run(engine: Engine) -> dict[str, object]:
    heads = [random_tokens(5 * CHUNK, seed=seed) for seed in range(3)]
    prompts = [
        heads[at % 3][: (2 + at % 9) * BLOCK + at] + random_tokens(20 + 7 * at, seed=100 + at) for at in range(16)
    ]
    cold = [engine.serve([prompt], max_tokens=48, read_caches=False)[0] for prompt in prompts]
    engine.settle()
    before = engine.preemptions
    loaded = engine.planner.stats().tiers["fs"].chunks_loaded
    same = []
    for _ in range(2):
        same.append(engine.serve(prompts, max_tokens=48) == cold)
        engine.settle()
        for path in sorted(engine.root.rglob("*.safetensors"))[::3]:
            path.unlink()
    same.append(engine.serve(prompts, max_tokens=48) == cold)
    return {
        "same": same,
        "preempted": engine.preemptions - before,
        "loaded": engine.planner.stats().tiers["fs"].chunks_loaded - loaded,
    }


def chunks_lost_between_lookup_and_load(engine: Engine) -> dict[str, object]:
    """The index still says that every chunk is held; each in turn is gone, cut or changed."""
    outcomes = []
    for at in range(len(PROMPT) // CHUNK):
        paths = engine.store_prompt()
        keys = engine.half._chunk_keys(_FakeRequest(engine))
        (path,) = [path for path in paths if path.name.startswith(keys[at].hex())]
        content = path.read_bytes()
        if at % 3 == 0:
            path.unlink()
        elif at % 3 == 1:
            path.write_bytes(content[: len(content) // 2])
        else:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        lookups = engine.planner.stats().lookups
        misses = sum(engine.planner.stats().tiers["fs"].missed.values())
        tokens, _ = engine.serve_one(PROMPT)
        engine.settle()
        outcomes.append(
            {
                "same": tokens == engine.cold,
                "lookups": engine.planner.stats().lookups - lookups,
                "misses": sum(engine.planner.stats().tiers["fs"].missed.values()) - misses,
                "stored again": path.exists() and path.stat().st_size == len(content),
            }
        )
    return {"outcomes": outcomes}


class _FakeRequest:
    """Only the hashes of `PROMPT`, as vLLM computes them."""

    def __init__(self, engine: Engine) -> None:
        engine.add("hashes", PROMPT, max_tokens=1)
        (request,) = engine.scheduler.requests.values()
        self.block_hashes = list(request.block_hashes)
        engine.llm.abort_request(["hashes"])
        engine.pump(lambda: not engine.scheduler.has_requests())


def a_load_that_hangs(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    with hung(loads=True):
        engine.add("hung 1", PROMPT)
        engine.add("hung 2", PROMPT)
        tokens = engine.serve([random_tokens(100, seed=5)])
        others_first = "hung 1" not in engine.finished
        engine.pump(lambda: {"hung 1", "hung 2"} <= engine.finished.keys())
        engine.pump(lambda: not engine.scheduler.has_requests())
        free = engine.pool.get_num_free_blocks()
    engine.settle()
    return {
        "same": [engine.tokens[name] == engine.cold for name in ("hung 1", "hung 2")],
        "others first": others_first and bool(tokens),
        "free while it hangs": free == NUM_BLOCKS - 1,
        "missed": engine.fs["missed"],
    }


def stores_that_hang(engine: Engine) -> dict[str, object]:
    """Far more chunks than slots: those that wait for one must not keep their blocks from requests."""
    prompts = [random_tokens(8 * CHUNK, seed=900 + at) for at in range(8)]
    begin_s = time.monotonic()
    engine.serve(prompts, max_tokens=2, read_caches=False)
    healthy_s = time.monotonic() - begin_s
    engine.settle()
    with hung(stores=True):
        prompts = [random_tokens(8 * CHUNK, seed=950 + at) for at in range(8)]
        begin_s = time.monotonic()
        engine.serve(prompts, max_tokens=2)
        hung_s = time.monotonic() - begin_s
        preempted = engine.preemptions
        engine.pump(lambda: not engine.scheduler.has_requests())
        idle_s = time.monotonic() - begin_s
        reset = engine.llm.reset_prefix_cache()
    engine.settle()
    return {
        "healthy_s": healthy_s,
        "hung_s": hung_s,
        "idle_s": idle_s,
        "reset while it hangs": reset,
        "preempted": engine.preemptions - preempted,
        "given up": engine.planner.stats().skipped,
    }


def requests_that_end_early(engine: Engine) -> dict[str, object]:
    """Aborted while queued, while loading, while stores are queued; each time the id comes again."""
    engine.store_prompt()
    same = []
    engine.add("again", PROMPT)
    engine.llm.abort_request(["again"])
    engine.add("again", PROMPT)
    engine.pump(lambda: "again" in engine.finished)
    same.append(engine.tokens["again"] == engine.cold)
    engine.settle()
    with hung(loads=True):
        engine.add("loading", PROMPT)
        engine.pump(lambda: bool(engine.half._loads))
        engine.llm.abort_request(["loading"])
        engine.add("loading", PROMPT)
        engine.pump(lambda: "loading" in engine.finished)
    same.append(engine.tokens["loading"] == engine.cold)
    engine.settle()
    fresh = random_tokens(8 * CHUNK, seed=321)
    (cold,) = engine.serve([fresh], read_caches=False, max_tokens=4)
    engine.settle()
    with hung(stores=True):
        engine.add("storing", random_tokens(8 * CHUNK, seed=322))
        engine.pump(lambda: bool(engine.half._store_started_s))
        engine.llm.abort_request(["storing"])
        engine.add("storing", fresh, max_tokens=4)
        engine.pump(lambda: "storing" in engine.finished)
    same.append(engine.tokens["storing"] == cold)
    engine.settle()
    return {"same": same}


def one_prefix_at_once(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    loaded = engine.planner.stats().tiers["fs"].chunks_loaded
    tokens = engine.serve([PROMPT, PROMPT, PROMPT])
    return {
        "same": [one == engine.cold for one in tokens],
        "loaded": engine.planner.stats().tiers["fs"].chunks_loaded - loaded,
    }


def a_local_hit_inside_a_chunk(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    engine.serve([PROMPT[: 5 * BLOCK + 1]])
    loaded = engine.planner.stats().tiers["fs"].chunks_loaded
    tokens, cached = engine.serve_one(PROMPT)
    loaded = engine.planner.stats().tiers["fs"].chunks_loaded - loaded
    return {"same": tokens == engine.cold, "cached": cached, "loaded": loaded}


def a_prompt_of_whole_chunks(engine: Engine) -> dict[str, object]:
    prompt = PROMPT[: 8 * CHUNK]
    (cold,) = engine.serve([prompt], read_caches=False)
    engine.settle()
    tokens, cached = engine.serve_one(prompt)
    return {"same": tokens == cold, "cached": cached}


def reset_while_a_load_runs(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    with hung(loads=True):
        engine.add("reset", PROMPT)
        engine.pump(lambda: bool(engine.half._loads))
        engine.llm.reset_prefix_cache(False, True)
    engine.pump(lambda: "reset" in engine.finished)
    engine.settle()
    return {"same": engine.tokens["reset"] == engine.cold}


def reset_of_the_connector(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    reset = engine.llm.reset_prefix_cache(False, True)
    tokens, cached = engine.serve_one(PROMPT)
    same = tokens == engine.cold
    engine.settle()
    engine.llm.reset_prefix_cache(False, True)
    engine.pump(lambda: not engine.scheduler.has_requests())
    return {"reset": reset, "same": same, "cached": cached, "files": len(list(engine.root.rglob("*.safetensors")))}


def a_running_request_stores_nothing_after_a_reset(engine: Engine) -> dict[str, object]:
    """What it computes builds on KV from before, which may be of other weights."""
    engine.add("running", PROMPT[: 3 * CHUNK - BLOCK], max_tokens=CHUNK + BLOCK)
    engine.pump(lambda: "running" in engine.tokens)
    engine.llm.reset_prefix_cache(False, True)
    engine.pump(lambda: "running" in engine.finished)
    engine.pump(lambda: not engine.scheduler.has_requests())
    return {"files": len(list(engine.root.rglob("*.safetensors")))}


def a_tier_that_fails_at_everything(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    Faults.failing = True
    try:
        tokens = engine.serve([PROMPT, random_tokens(300, seed=6)])
        engine.settle()
        again = engine.serve([PROMPT, random_tokens(300, seed=6)])
        engine.settle()
    finally:
        Faults.failing = False
    return {"same": [tokens[0] == engine.cold, again == tokens]}


def a_folder_that_is_gone(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    for found in engine.root.iterdir():
        shutil.rmtree(found)
    tokens, _ = engine.serve_one(PROMPT)
    engine.settle()
    return {"same": tokens == engine.cold}


def hits_that_are_slower_than_recompute(engine: Engine) -> dict[str, object]:
    engine.store_prompt()
    gate = engine.planner._load_gate
    margin = gate._margin
    outcomes = []
    engine.serve_one(PROMPT)
    engine.settle()
    for margin_now in (1e-9, margin):
        gate._margin = margin_now
        unused = engine.planner.stats().unused.get("slower_than_recompute", 0)
        tokens, cached = engine.serve_one(PROMPT)
        engine.settle()
        unused = engine.planner.stats().unused.get("slower_than_recompute", 0) - unused
        outcomes.append({"same": tokens == engine.cold, "cached": cached, "unused": unused})
    return {"outcomes": outcomes, "measured": asdict(gate.stats)}


def configurations_that_are_refused(engine: Engine) -> dict[str, object]:
    told = {}
    for what, change in (
        ("policy", {"kv_load_failure_policy": "fail"}),
        ("key", {}),
        ("role", {"kv_role": "kv_consumer"}),
    ):
        transfer = {**transfer_config(engine.root), **change}
        if what == "key":
            extra = transfer["kv_connector_extra_config"]
            assert isinstance(extra, dict)
            transfer["kv_connector_extra_config"] = {**extra, "staging_byte": 1}
        vllm_config = engine_args(engine.model, transfer).create_engine_config()
        try:
            SluiceConnector(vllm_config, KVConnectorRole.SCHEDULER, engine.scheduler.kv_cache_config)
        except ConfigError as error:
            told[what] = str(error)
    return told


def shutdown_with_everything_hung(engine: Engine) -> dict[str, object]:
    """Last: the engine's tier is closed afterwards, and its requests still get their tokens."""
    engine.store_prompt()
    with hung(loads=True, stores=True):
        engine.serve([random_tokens(8 * CHUNK, seed=2900 + at) for at in range(3)], max_tokens=1)
        engine.add("last", PROMPT)
        engine.pump(lambda: bool(engine.half._loads) or "last" in engine.finished)
        begin_s = time.monotonic()
        for _ in range(2):
            get_kv_transfer_group().shutdown()
            engine.scheduler.connector.shutdown()
        took_s = time.monotonic() - begin_s
    engine.pump(lambda: "last" in engine.finished)
    return {"took_s": took_s, "same": engine.tokens["last"] == engine.cold}


SCENARIOS: tuple[Callable[[Engine], dict[str, object]], ...] = (
    preempted_while_stores_and_loads_run,
    chunks_lost_between_lookup_and_load,
    a_load_that_hangs,
    stores_that_hang,
    requests_that_end_early,
    one_prefix_at_once,
    a_local_hit_inside_a_chunk,
    a_prompt_of_whole_chunks,
    reset_while_a_load_runs,
    reset_of_the_connector,
    a_running_request_stores_nothing_after_a_reset,
    a_tier_that_fails_at_everything,
    a_folder_that_is_gone,
    hits_that_are_slower_than_recompute,
    configurations_that_are_refused,
    shutdown_with_everything_hung,
)


def main(model: Path, root: Path, results: Path) -> None:
    FileSystemTier.load, FileSystemTier.store, FileSystemTier.held_prefix = load, store, held_prefix
    scheduler_half.STORE_PATIENCE_S = STORE_PATIENCE_S
    engine = Engine(model, root)
    told: dict[str, object] = {}
    for scenario in SCENARIOS:
        begin_s = time.monotonic()
        try:
            outcome = scenario(engine)
            if scenario is not shutdown_with_everything_hung:
                engine.settle()
        except Exception:  # noqa: BLE001 - the test of this scenario shows it, the others go on
            outcome = {"error": traceback.format_exc()}
        told[scenario.__name__] = {**outcome, "seconds": time.monotonic() - begin_s}
        print(scenario.__name__, told[scenario.__name__], flush=True)
    told["finish reasons"] = sorted(set(engine.finished.values()))
    results.write_text(json.dumps(told))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
