"""The scheduler's half alone, on virtual time: what it makes of the steps that vLLM tells it of.

The requests and steps are stand-ins with the attributes that are read; no engine runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import Clock

# vLLM's own imports warn.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCK = 16
CHUNK = 256


class Half:
    """A scheduler's half with one rank, its requests, and an engine that runs when the test says so."""

    def __init__(self, root: Path, **config: object) -> None:
        from kvsluice.connector import OffloadConfig
        from kvsluice.connector.ladder import Geometry
        from kvsluice.connector.vllm.scheduler_half import SchedulerHalf

        self.clock = Clock()
        self._requests: dict[str, SimpleNamespace] = {}
        self._told: float | None = None
        self.half = SchedulerHalf(
            OffloadConfig.from_dict({"tiers": [{"type": "fs", "root_dir": str(root), "capacity": "1GiB"}], **config}),
            hash_block_size=BLOCK,
            block_size=BLOCK,
            clock=self.clock,
        )
        self.half.handshake([Geometry("ab" * 32, {}, CHUNK // BLOCK, BLOCK, 64, 4096, 8192, 16, 0)])

    def request(self, name: str, num_tokens: int, computed: int = 0) -> SimpleNamespace:
        request = SimpleNamespace(
            request_id=name,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=computed,
            block_hashes=[],
            skip_reading_prefix_cache=False,
        )
        self._requests[name] = request
        self.half.on_new_request(request)
        return request

    def schedule(self, **scheduled: int) -> int:
        """One step that computes so many tokens of each request; its number."""
        no_blocks = SimpleNamespace(get_block_ids=lambda name: None)
        step = SimpleNamespace(
            num_scheduled_tokens=scheduled, preempted_req_ids=None, kv_connector_block_state=no_blocks
        )
        orders = self.half.build_step(step)
        for name, count in scheduled.items():
            self._requests[name].num_computed_tokens += count
        return orders.step

    def output(self, step: int, after_s: float) -> None:
        from kvsluice.connector.vllm.wire import StepReports

        self.clock.advance(after_s)
        self.half.apply(StepReports((), step))

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """What the newest statistics say; they come where something has changed."""
        stats = self.half.stats()
        if stats is not None and stats.data["load_gate"] is not None:
            self._told = stats.data["load_gate"]["prefill_tokens_per_s"]
        return self._told


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Half]:
    made = Half(tmp_path)
    yield made
    made.half.shutdown()


def test_a_prompt_in_pieces_tells_the_engines_speed(half: Half) -> None:
    half.request("a", 4097)
    for _ in range(2):
        half.output(half.schedule(a=2048), 0.2048)
    assert half.prefill_tokens_per_s == pytest.approx(10_000)


def test_steps_that_only_decode_and_idle_time_tell_nothing(half: Half) -> None:
    request = half.request("a", 2049)
    half.output(half.schedule(a=2048), 0.2048)
    for _ in range(50):
        half.output(half.schedule(a=1), 0.05)
        request.num_tokens += 1
        half.clock.advance(10.0)
    half.output(half.schedule(), 3.0)
    assert half.prefill_tokens_per_s == pytest.approx(10_000)


def test_placeholders_and_draft_tokens_are_no_prompt(half: Half) -> None:
    half.request("ahead", 100, computed=100)
    half.request("drafting", 100, computed=99)
    half.output(half.schedule(ahead=1, drafting=5), 1.0)
    assert half.prefill_tokens_per_s is None


def test_a_step_scheduled_while_another_runs_is_charged_from_the_others_output(half: Half) -> None:
    half.request("a", 8193)
    first = half.schedule(a=2048)
    second = half.schedule(a=2048)
    half.output(first, 0.2048)
    third = half.schedule(a=2048)
    half.output(second, 0.2048)
    half.output(third, 0.2048)
    assert half.prefill_tokens_per_s == pytest.approx(10_000)


def test_tokens_that_a_preempted_request_computes_again_count_as_prefill(half: Half) -> None:
    request = half.request("a", 1025)
    request.num_tokens = 2049
    half.output(half.schedule(a=2049), 0.2048)
    assert half.prefill_tokens_per_s == pytest.approx(10_000)


def test_the_ranks_reports_of_one_step_keep_its_number() -> None:
    from kvsluice.connector.orders import RankReport
    from kvsluice.connector.vllm.wire import StepReports

    one, two = (StepReports((RankReport(rank, (), ()),), 7) for rank in range(2))
    both = one.aggregate(two)
    assert ([report.rank for report in both.reports], both.step) == ([0, 1], 7)


def test_with_the_load_gate_off_nothing_is_measured(tmp_path: Path) -> None:
    half = Half(tmp_path, load_gate=None)
    half.request("a", 4097)
    half.output(half.schedule(a=2048), 0.2048)
    assert half.prefill_tokens_per_s is None
    half.half.shutdown()
