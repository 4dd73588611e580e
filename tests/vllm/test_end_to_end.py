"""A real vLLM serves the same tokens from our tiers as from its own computation, or computes again."""

from __future__ import annotations

import pytest
from vllm_engine import Served, wait_until
from vllm_scenario import LONE_PROMPT, PROMPTS, TOKENS_PER_BLOCK, TOKENS_PER_CHUNK, First, Second, full_chunk_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HIT_TOKENS = [full_chunk_tokens(prompt) for prompt in PROMPTS]
REPLACED_TIMEOUT_S = 30.0


def tokens_of(served: list[Served]) -> list[tuple[int, ...]]:
    return [one.tokens for one in served]


def cached_of(served: list[Served]) -> list[int]:
    return [one.cached_tokens for one in served]


def test_cold_prompts_are_computed_whole(first: First) -> None:
    assert cached_of(first.cold) == [0, 0, 0]


def test_after_vllm_forgot_its_cache_and_the_files_are_gone_the_host_tier_serves_the_same_tokens(first: First) -> None:
    assert cached_of(first.again) == HIT_TOKENS
    assert tokens_of(first.again) == tokens_of(first.cold)


def test_the_load_gate_measures_the_engine_and_its_own_copies_live(first: First) -> None:
    measured = first.stats["load_gate"]
    assert isinstance(measured, dict)
    # Seen from outside a prompt takes a little longer than its prefill, and on a busy machine sometimes much longer.
    seen = [served.prompt_tokens / served.first_token_s for served in first.cold]
    assert 0.2 * min(seen) < measured["prefill_tokens_per_s"] < 10 * max(seen)
    assert 0 < measured["copy_s"] < 1.0
    assert measured["load_interval_s"] == {"fs": None}, "every hit came from host memory"


def test_a_new_engine_process_serves_the_same_tokens_from_the_files(first: First, second: Second) -> None:
    second.engine.reset_prefix_cache()
    served = second.engine.generate(PROMPTS)
    assert cached_of(served) == HIT_TOKENS
    assert tokens_of(served) == tokens_of(first.cold)


def test_prompts_with_one_prefix_that_arrive_at_once_get_their_own_tokens(first: First, second: Second) -> None:
    second.engine.reset_prefix_cache()
    served = second.engine.generate(PROMPTS, at_once=True)
    assert cached_of(served) == HIT_TOKENS
    assert tokens_of(served) == tokens_of(first.cold)


def test_a_local_hit_that_ends_inside_a_chunk_is_continued_with_the_same_tokens(first: First, second: Second) -> None:
    local_tokens = HIT_TOKENS[0] - TOKENS_PER_BLOCK
    assert local_tokens % TOKENS_PER_CHUNK != 0
    second.engine.reset_prefix_cache()
    second.engine.generate([PROMPTS[0][: local_tokens + 1]])  # leaves whole blocks of vLLM's own up to local_tokens
    (served,) = second.engine.generate([PROMPTS[0]])
    assert served.cached_tokens in (local_tokens, HIT_TOKENS[0])
    assert served.tokens == first.cold[0].tokens


def test_one_zeroed_block_of_a_load_changes_the_tokens(first: First, second: Second) -> None:
    second.engine.reset_prefix_cache()
    second.zero_switch.touch()
    try:
        (served,) = second.engine.generate([PROMPTS[0]])
    finally:
        second.zero_switch.unlink()
        second.engine.reset_prefix_cache()  # the zeroed block is in vLLM's prefix cache now
    assert len(list(second.zero_switch.parent.glob("*.zeroed"))) == 1
    assert served.cached_tokens == HIT_TOKENS[0]
    assert served.tokens != first.cold[0].tokens


def test_damaged_chunk_files_are_recomputed_and_not_kept(first: First, second: Second) -> None:
    assert len(first.lone_files) == full_chunk_tokens(LONE_PROMPT) // TOKENS_PER_CHUNK
    damaged = {}
    for path in first.lone_files:
        content = bytearray(path.read_bytes())
        content[len(content) * 3 // 4] ^= 1
        path.write_bytes(content)
        damaged[path] = bytes(content)
    second.engine.reset_prefix_cache()
    (served,) = second.engine.generate([LONE_PROMPT])
    assert served.tokens == first.lone.tokens
    assert served.cached_tokens == 0
    assert wait_until(
        lambda: not any(path.exists() and path.read_bytes() == content for path, content in damaged.items()),
        timeout_s=REPLACED_TIMEOUT_S,
    )
    second.engine.reset_prefix_cache()
    (again,) = second.engine.generate([LONE_PROMPT])
    assert again.tokens == first.lone.tokens
