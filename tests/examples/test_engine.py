"""The example engine, alone and with a connector that lives in a dict."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from block_pool import BlockPool
from engine import Completion, Engine, prefix_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import ModelConfig, PagedModel, new_kv_caches
from torch import Tensor

TINY = ModelConfig(vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, weight_std=0.2)
BLOCK, BLOCKS_PER_CHUNK = 4, 2
CHUNK = BLOCK * BLOCKS_PER_CHUNK
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return PagedModel(TINY)


def make_prompt(length: int, seed: int = 1, shared: int = 0) -> list[int]:
    """Random tokens; prompts of any seed have their first `shared` tokens in common."""
    common, own = random.Random("shared"), random.Random(seed)
    return [common.randrange(TINY.vocab) for _ in range(shared)] + [
        own.randrange(TINY.vocab) for _ in range(length - shared)
    ]


@dataclass
class FakeLookup:
    held: int
    pending: bool


@dataclass
class FakeResult:
    job_id: int
    done_keys: tuple[bytes, ...]
    failed: dict[bytes, str] = field(default_factory=dict)


@dataclass
class FakeConnector:
    """Keeps chunks in a dict. Copies are late: a store reads its blocks `delay` polls after it was asked for."""

    caches: Mapping[str, Tensor]
    chunks: dict[bytes, list[Tensor]] = field(default_factory=dict)
    delay: int = 3
    always_pending: bool = False
    failing: set[bytes] = field(default_factory=set)
    zero_block: int | None = None
    """Which of a load's blocks comes back zeroed."""
    cancelled: list[int] = field(default_factory=list)
    prefilled: list[tuple[int, float]] = field(default_factory=list)
    asked: list[tuple[str, tuple[bytes, ...], tuple[int, ...]]] = field(default_factory=list)
    _clock: int = 0
    _waiting: list[tuple[int, int, str, tuple[bytes, ...], tuple[int, ...]]] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _answered: set[tuple[bytes, ...]] = field(default_factory=set)

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        self.prefilled.append((num_tokens, elapsed_s))

    def lookup(self, keys: Sequence[bytes]) -> FakeLookup:
        held = 0
        while held < len(keys) and keys[held] in self.chunks:
            held += 1
        first_time = tuple(keys) not in self._answered
        self._answered.add(tuple(keys))
        return FakeLookup(held, self.always_pending or first_time)

    def _ask(self, kind: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        self.asked.append((kind, tuple(keys), tuple(block_ids)))
        assert len(block_ids) == len(keys) * BLOCKS_PER_CHUNK
        self._waiting.append((len(self.asked), self._clock + self.delay, kind, tuple(keys), tuple(block_ids)))
        return len(self.asked)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        return self._ask("store", keys, block_ids)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, deadline_s: float | None) -> int:
        assert deadline_s is not None
        return self._ask("load", keys, block_ids)

    def poll(self) -> list[FakeResult]:
        self._clock += 1
        due = [item for item in self._waiting if item[1] <= self._clock]
        self._waiting = [item for item in self._waiting if item[1] > self._clock]
        return [self._carry_out(job, kind, keys, blocks) for job, _, kind, keys, blocks in due]

    def _carry_out(self, job: int, kind: str, keys: tuple[bytes, ...], blocks: tuple[int, ...]) -> FakeResult:
        done = []
        for index, key in enumerate(keys):
            ids = list(blocks[index * BLOCKS_PER_CHUNK : (index + 1) * BLOCKS_PER_CHUNK])
            if kind == "store":
                self.chunks.setdefault(key, [cache[ids].clone() for cache in self.caches.values()])
            elif key in self.failing:
                continue
            else:
                for cache, chunk in zip(self.caches.values(), self.chunks[key], strict=True):
                    cache[ids] = chunk
            done.append(key)
        if kind == "store":
            self._released.append(job)
        elif self.zero_block is not None:
            for cache in self.caches.values():
                cache[blocks[self.zero_block]] = 0
        return FakeResult(job, tuple(done), {key: "missing" for key in keys if key not in done})

    def poll_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)

    def wait(self, *, timeout_s: float | None) -> list[FakeResult]:
        results = []
        while self._waiting:
            results += self.poll()
        return results


def make_engine(
    model: PagedModel,
    chunks: dict[bytes, list[Tensor]] | None = None,
    *,
    num_blocks: int = 64,
    max_running: int = 4,
    delay: int = 3,
) -> tuple[Engine, FakeConnector]:
    """An engine with KV memory and a connector of its own, over the chunks of an earlier one."""
    caches = new_kv_caches(model.config, num_blocks, BLOCK)
    connector = FakeConnector(caches, {} if chunks is None else chunks, delay)
    return Engine(
        model, caches, blocks_per_chunk=BLOCKS_PER_CHUNK, connector=connector, max_running=max_running
    ), connector


def serve(engine: Engine, prompt: Sequence[int], *, reuse: bool = True) -> Completion:
    (completion,) = engine.generate([prompt], NEW_TOKENS, reuse=reuse)
    engine.drain(timeout_s=5)
    engine.check_integrity()
    assert engine.pool.free == engine.pool.num_blocks
    return completion


def test_cold_tokens_are_the_same_in_every_engine_with_or_without_a_connector(model: PagedModel) -> None:
    prompt = make_prompt(45)
    plain = Engine(PagedModel(TINY), new_kv_caches(TINY, 64, BLOCK), blocks_per_chunk=BLOCKS_PER_CHUNK)
    (alone,) = plain.generate([prompt], NEW_TOKENS)
    engine, _ = make_engine(model)
    assert serve(engine, prompt).tokens == alone.tokens
    assert alone.hit_tokens == 0
    assert len(set(alone.tokens)) > NEW_TOKENS // 2, "tokens that repeat would say little about the KV cache"


def test_a_prefix_hit_gives_identical_tokens(model: PagedModel) -> None:
    prompt = make_prompt(45)
    first, fake = make_engine(model)
    cold = serve(first, prompt)
    second, _ = make_engine(model, fake.chunks)
    warm = serve(second, prompt)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 40)
    assert warm.tokens == cold.tokens


def test_logits_after_a_hit_are_bit_for_bit_those_of_a_cold_prefill(model: PagedModel) -> None:
    prompt = make_prompt(45)
    answers = []
    chunks: dict[bytes, list[Tensor]] = {}
    for _ in range(2):
        engine, fake = make_engine(model, chunks)
        serve(engine, prompt)
        answers.append([fake.chunks[key] for key in prefix_keys(prompt, BLOCK, BLOCKS_PER_CHUNK)])
        # The KV of the tail was computed from the prefix: equal bytes there mean equal sums all the way.
        tail = make_prompt(48)
        serve(engine, tail)
        answers[-1] += [fake.chunks.pop(key) for key in prefix_keys(tail, BLOCK, BLOCKS_PER_CHUNK)[5:]]
    for cold, warm in zip(*answers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))


@pytest.mark.parametrize("block", range(10))
def test_the_comparison_fails_when_one_loaded_block_is_zeroed(model: PagedModel, block: int) -> None:
    prompt = make_prompt(45)
    first, fake = make_engine(model)
    cold = serve(first, prompt)
    second, broken = make_engine(model, fake.chunks)
    broken.zero_block = block
    warm = serve(second, prompt)
    assert warm.hit_tokens == 40
    assert warm.tokens != cold.tokens


def test_a_failed_key_cuts_the_prefix_there_and_the_rest_is_computed(model: PagedModel) -> None:
    prompt = make_prompt(45)
    first, fake = make_engine(model)
    cold = serve(first, prompt)
    second, flaky = make_engine(model, fake.chunks)
    flaky.failing = {prefix_keys(prompt, BLOCK, BLOCKS_PER_CHUNK)[2]}
    warm = serve(second, prompt)
    assert warm.hit_tokens == 2 * CHUNK
    assert warm.tokens == cold.tokens


def test_a_lookup_that_stays_pending_is_given_up_and_what_is_held_is_used(model: PagedModel) -> None:
    prompt = make_prompt(45)
    first, fake = make_engine(model)
    cold = serve(first, prompt)
    times = iter(range(1_000_000))
    caches = new_kv_caches(TINY, 64, BLOCK)
    slow = FakeConnector(caches, fake.chunks, always_pending=True)
    engine = Engine(model, caches, blocks_per_chunk=BLOCKS_PER_CHUNK, connector=slow, clock=lambda: float(next(times)))
    warm = serve(engine, prompt)
    assert warm.hit_tokens == 40
    assert warm.tokens == cold.tokens


def test_only_full_chunks_are_stored_and_the_last_token_is_always_computed(model: PagedModel) -> None:
    engine, fake = make_engine(model)
    serve(engine, make_prompt(5 * CHUNK))
    (_, keys, blocks) = fake.asked[-1]
    assert (len(keys), len(blocks)) == (5, 10)
    assert serve(engine, make_prompt(5 * CHUNK)).hit_tokens == 4 * CHUNK
    before = len(fake.asked)
    assert serve(engine, make_prompt(CHUNK - 1)).hit_tokens == 0
    assert len(fake.asked) == before


def test_reuse_false_computes_every_token(model: PagedModel) -> None:
    engine, fake = make_engine(model)
    prompt = make_prompt(45)
    cold = serve(engine, prompt)
    again = serve(engine, prompt, reuse=False)
    assert again.hit_tokens == 0
    assert again.tokens == cold.tokens
    assert [kind for kind, _, _ in fake.asked] == ["store", "store"]


def test_prompts_with_a_shared_prefix_share_its_chunks(model: PagedModel) -> None:
    engine, _ = make_engine(model)
    serve(engine, make_prompt(45, seed=1, shared=3 * CHUNK))
    assert serve(engine, make_prompt(45, seed=2, shared=3 * CHUNK)).hit_tokens == 3 * CHUNK


def test_preempted_requests_give_the_tokens_they_give_alone(model: PagedModel) -> None:
    prompts = [make_prompt(45, seed=seed) for seed in range(4)]
    alone = [serve(make_engine(model)[0], prompt).tokens for prompt in prompts]
    # 32 blocks hold two of these requests and a half; late copies keep the blocks of those that went.
    engine, fake = make_engine(model, num_blocks=32, delay=9)
    together = engine.generate(prompts, NEW_TOKENS)
    assert engine.preemptions > 0
    assert [completion.tokens for completion in together] == alone
    engine.drain(timeout_s=5)
    engine.check_integrity()
    assert engine.pool.free == 32
    # What was stored late is still each prompt's own KV: every one hits, and its tokens stay the same.
    reader, _ = make_engine(model, fake.chunks)
    for prompt, tokens in zip(prompts, alone, strict=True):
        warm = serve(reader, prompt)
        assert (warm.hit_tokens, warm.tokens) == (40, tokens)


def test_a_request_preempted_while_loading_keeps_its_blocks_until_the_load_has_ended(model: PagedModel) -> None:
    prompts = [make_prompt(45, seed=seed) for seed in range(2)]
    first, fake = make_engine(model)
    alone = [serve(first, prompt).tokens for prompt in prompts]
    engine, slow = make_engine(model, fake.chunks, num_blocks=22, delay=12)
    engine.submit(prompts[0], NEW_TOKENS, reuse=False)
    engine.submit(prompts[1], NEW_TOKENS)
    # The first prompt takes 12 blocks, the load 10: the first generated token past the 12 preempts.
    for _ in range(12):
        engine.step()
        engine.check_integrity()
    assert engine.preemptions == 1
    assert len(slow.cancelled) == 1
    assert engine.pool.pinned_jobs, "the load still runs"
    assert engine.pool.free == 0
    (third,) = engine.generate([prompts[1]], NEW_TOKENS)
    assert third.tokens == alone[1]
    engine.drain(timeout_s=5)
    engine.check_integrity()
    assert engine.pool.free == 22


def test_the_connector_is_told_what_each_piece_of_a_prompt_took_and_nothing_of_decoding(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    forward = PagedModel.forward

    def slow_forward(self: PagedModel, tokens: list[int], *rest: object) -> Tensor:
        clock[0] += 0.25 * len(tokens)
        return forward(self, tokens, *rest)

    monkeypatch.setattr(PagedModel, "forward", slow_forward)
    caches = new_kv_caches(TINY, 64, BLOCK)
    connector = FakeConnector(caches)
    engine = Engine(model, caches, blocks_per_chunk=BLOCKS_PER_CHUNK, connector=connector, clock=lambda: clock[0])
    prompt = make_prompt(45)
    serve(engine, prompt)
    assert connector.prefilled == [(tokens, 0.25 * tokens) for tokens in (CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, 5)]
    assert serve(engine, prompt).hit_tokens == 40
    assert connector.prefilled[6:] == [(5, 1.25)], "what was loaded is not prefill"


def test_keys_are_stable_across_processes_and_name_the_whole_prefix() -> None:
    tokens = list(range(100, 133))
    keys = prefix_keys(tokens, BLOCK, BLOCKS_PER_CHUNK)
    script = f"from engine import prefix_keys; print([k.hex() for k in prefix_keys({tokens}, {BLOCK}, 2)])"
    folder = Path(__file__).parents[2] / "examples"
    child = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str([key.hex() for key in keys])
    assert [len(key) for key in keys] == [32] * 4
    assert prefix_keys([0, *tokens[1:]], BLOCK, BLOCKS_PER_CHUNK)[3] != keys[3]


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 4), ([1], 0), ([1] * 300, 4)])
def test_a_request_that_can_never_be_served_is_refused(model: PagedModel, prompt: list[int], new_tokens: int) -> None:
    engine, _ = make_engine(model)
    with pytest.raises(ValueError, match=r"nothing to do|needs \d+ KV blocks"):
        engine.submit(prompt, new_tokens)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["take", "pin", "release", "unpin"]), st.integers(1, 6)), max_size=40))
def test_no_block_is_lost_or_taken_while_pinned(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    owned: list[list[int]] = []
    pinned: dict[int, list[int]] = {}
    for job, (move, amount) in enumerate(moves):
        if move == "take" and (blocks := pool.take(amount)) is not None:
            assert not set(blocks) & {block for held in pinned.values() for block in held}
            owned.append(blocks)
        elif move == "pin" and owned:
            pinned[job] = owned[amount % len(owned)]
            pool.pin(job, pinned[job])
        elif move == "release" and owned:
            pool.release(owned.pop(amount % len(owned)))
        elif move == "unpin" and pinned:
            oldest = next(iter(pinned))
            pool.unpin(oldest)
            del pinned[oldest]
        pool.check_integrity()
    for blocks in owned:
        pool.release(blocks)
    for job in pinned:
        pool.unpin(job)
    assert pool.free == pool.num_blocks
    with pytest.raises(KeyError):
        pool.release([0])
