"""The way chunks take is what was asked for, or what was measured to be best; and it says so."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor, trial, triton_pages
from kvsluice.kernels.chooser import open_device_movers, open_movers
from kvsluice.kernels.device import CpuDevice
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.movers import DirectMover, Mover, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.kernels.ways import TORCH, CopyChoice, CopySetting, Way, WayMeasured, choose

STAGING = 1 << 20


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter moves a page in milliseconds."""
    monkeypatch.setattr(trial, "_MEASURE_BYTES", 1)


def plan_of(page_bytes: int = 512, num_blocks: int = 4, layers: int = 3) -> CopyPlan:
    pages = [torch.randint(256, (16, page_bytes), dtype=torch.uint8) for _ in range(layers)]
    return CopyPlan([PagedTensor(tensor, 0) for tensor in pages], num_blocks)


def scratch_of(plan: CopyPlan) -> torch.Tensor:
    return torch.zeros(plan.num_bytes, dtype=torch.uint8)


def measured(**rates: float | str) -> list[WayMeasured]:
    ways = {"batched": Way("batched"), "torch": TORCH, **{f"triton{n}": Way("triton", n) for n in (1, 2, 4)}}
    return [
        WayMeasured(ways[name], None, rate) if isinstance(rate, str) else WayMeasured(ways[name], rate)
        for name, rate in rates.items()
    ]


@pytest.mark.parametrize(
    ("rates", "way"),
    [
        ({"batched": 6.0, "triton1": 30.0, "triton2": 48.0, "triton4": 49.0, "torch": 20.0}, Way("triton", 2)),
        ({"batched": 50.0, "triton1": 48.0, "triton2": 50.5, "triton4": 50.5, "torch": 30.0}, Way("batched")),
        ({"batched": 47.0, "triton4": 50.0}, Way("triton", 4)),
        ({"batched": "no driver", "triton1": "no Triton", "torch": 1.0}, TORCH),
        ({"batched": 9.0, "torch": 10.2}, TORCH),
        ({"batched": 9.0, "triton4": 9.8, "torch": 10.2}, Way("triton", 4)),
    ],
)
def test_of_the_ways_nearly_as_fast_as_the_fastest_the_one_that_takes_the_fewest_multiprocessors_is_chosen(
    rates: dict[str, float | str], way: Way
) -> None:
    assert choose(measured(**rates)) == way


def test_where_nothing_can_be_had_the_error_says_why_for_each() -> None:
    with pytest.raises(DeviceCopyError, match=r"no way .*: batched: no driver; torch: out of memory"):
        choose(measured(batched="no driver", torch="out of memory"))


@pytest.mark.parametrize("setting", ["auto", "torch"])
def test_pages_in_host_memory_go_by_the_hosts_copy(setting: CopySetting) -> None:
    plan = plan_of()
    movers = open_movers(plan, CpuDevice(), setting=setting, scratch=scratch_of(plan))
    assert [str(choice) for choice in movers.choices] == ["stores by host", "loads by host"]
    assert movers.staging_bytes == 0
    assert movers.out.max_chunks == movers.into.max_chunks == 1
    assert_moves(plan, movers.out, movers.into)


@pytest.mark.parametrize("setting", ["triton", "batched"])
def test_a_way_that_needs_a_gpu_is_refused_loudly_without_one(setting: CopySetting) -> None:
    plan = plan_of()
    with pytest.raises(DeviceCopyError, match=f"copying by {setting} needs a CUDA device"):
        open_movers(plan, CpuDevice(), setting=setting, scratch=scratch_of(plan))


def test_a_setting_that_is_none_is_refused() -> None:
    plan = plan_of()
    with pytest.raises(ValueError, match="one of auto, torch, triton, batched, got 'fast'"):
        open_movers(plan, CpuDevice(), setting="fast", scratch=scratch_of(plan))  # type: ignore[arg-type] # on purpose


def assert_moves(plan: CopyPlan, out: Mover, into: Mover) -> None:
    """A chunk goes out and comes back into other blocks as by the host's copy."""
    oracle = HostCopy(plan)
    wanted, host = scratch_of(plan), scratch_of(plan)
    oracle.gather((7, 0, 3, 12), wanted)
    done = out.submit([], [ChunkCopy((7, 0, 3, 12), host)])
    assert done.error is None
    assert done.query()
    done.release()
    assert torch.equal(host, wanted)
    into.submit([], [ChunkCopy((1, 15, 2, 9), host)]).release()
    again = scratch_of(plan)
    oracle.gather((1, 15, 2, 9), again)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize(("setting", "programs"), [("triton", 2), ("torch", None)])
def test_a_way_that_is_asked_for_is_taken_unmeasured(setting: CopySetting, programs: int | None) -> None:
    plan = plan_of()
    movers = open_device_movers(plan, CpuDevice(), setting=setting, staging_bytes=STAGING, scratch=scratch_of(plan))
    assert movers.choices == (CopyChoice("out", Way(setting, programs)), CopyChoice("in", Way(setting, programs)))
    assert movers.staging_bytes == STAGING
    assert_moves(plan, movers.out, movers.into)


def test_a_way_that_is_asked_for_and_cannot_be_had_is_an_error_that_says_why() -> None:
    plan = plan_of()
    with pytest.raises(DeviceCopyError, match="copying by batched: "):
        open_device_movers(plan, CpuDevice(), setting="batched", staging_bytes=STAGING, scratch=scratch_of(plan))


def test_auto_measures_every_way_chooses_and_says_what_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of()
    scratch = scratch_of(plan)
    with caplog.at_level(logging.INFO, "kvsluice.kernels.chooser"):
        movers = open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch)
    for choice, mover in zip(movers.choices, (movers.out, movers.into), strict=True):
        by_way = {one.way: one for one in choice.measured}
        assert list(by_way) == [Way("batched"), *(Way("triton", n) for n in (1, 2, 4)), TORCH]
        assert by_way[Way("batched")].unusable, "there is no driver here"
        assert by_way[choice.way].bytes_per_s is not None
        assert choice.plain_bytes_per_s is not None
        assert mover.name == choice.way.name
    (message,) = (record.getMessage() for record in caplog.records)
    assert "stores by" in message
    assert "loads by" in message
    assert "plain copy" in message
    assert "batched: " in message
    assert f"{STAGING} bytes of staging" in message
    assert_moves(plan, movers.out, movers.into)


@pytest.mark.parametrize(
    ("slow", "chosen"), [(("torch",), "triton"), (("triton",), "torch")], ids=["torch slow", "Triton slow"]
)
def test_auto_takes_what_was_faster_here_not_what_a_constant_says(
    monkeypatch: pytest.MonkeyPatch, slow: tuple[str, ...], chosen: str
) -> None:
    plan = plan_of()
    ticks = itertools.count()
    now_s = [0.0]

    def clock() -> float:
        return now_s[0]

    def timed(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def move(*args: object, **kwargs: object) -> None:
            next(ticks)
            now_s[0] += 1.0 if name in slow else 0.001
            real(*args, **kwargs)

        return move

    for kernel, name in ((trial.TorchPages, "torch"), (trial.TritonPages, "triton")):
        for method in ("gather", "scatter"):
            monkeypatch.setattr(kernel, method, timed(name, getattr(kernel, method)))
    movers = open_device_movers(plan, CpuDevice(clock), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert [choice.way.name for choice in movers.choices] == [chosen, chosen]


def test_a_way_that_breaks_while_it_is_tried_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()

    def broken(*_args: object) -> None:
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(trial.TritonPages, "gather", broken)
    movers = open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert movers.choices[0].way == TORCH
    reasons = [one.unusable for one in movers.choices[0].measured if one.way.name == "triton"]
    assert all(reason is not None and "misaligned address" in reason for reason in reasons)


def test_pages_larger_than_the_staging_go_run_by_run() -> None:
    plan = plan_of(page_bytes=STAGING // 4, layers=1)
    movers = open_device_movers(plan, CpuDevice(), setting="torch", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert isinstance(movers.out, DirectMover)
    assert movers.staging_bytes == 0
    assert_moves(plan, movers.out, movers.into)
    with pytest.raises(DeviceCopyError, match="does not fit into"):
        open_device_movers(plan, CpuDevice(), setting="triton", staging_bytes=STAGING, scratch=scratch_of(plan))


@pytest.mark.parametrize(("page_bytes", "chunks"), [(1, 32), (1 << 20, 16), (1 << 25, 1)])
def test_a_submission_carries_so_many_chunks_or_bytes_and_at_least_one(page_bytes: int, chunks: int) -> None:
    plan = plan_of()
    plan.num_bytes = 4 * page_bytes
    assert trial.max_chunks(plan) == chunks


def test_a_way_that_cannot_copy_the_engines_own_pages_is_left_out_however_fast_it_was_on_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of()
    real = trial.TritonPages.gather

    def only_scratch(self: trial.TritonPages, *args: object) -> None:
        if self.plan is plan:
            raise RuntimeError("invalid argument")
        real(self, *args)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(trial.TritonPages, "gather", only_scratch)
    movers = open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert [choice.way for choice in movers.choices] == [TORCH, TORCH], "for loads, too: nothing is tried on them"
    with pytest.raises(DeviceCopyError, match="copying by triton: invalid argument"):
        open_device_movers(plan, CpuDevice(), setting="triton", staging_bytes=STAGING, scratch=scratch_of(plan))


def test_what_is_measured_comes_behind_the_engines_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, device = plan_of(), CpuDevice()
    asked: list[object] = []
    seen: list[object] = []
    real_event, real_submit = CpuDevice.compute_event, StagedMover.submit

    def compute_event(self: CpuDevice) -> object:
        asked.append(real_event(self))
        return asked[-1]

    def submit(self: StagedMover, ready: list[object], *args: object) -> object:
        seen.extend(ready)
        assert ready
        return real_submit(self, ready, *args)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(CpuDevice, "compute_event", compute_event)
    monkeypatch.setattr(StagedMover, "submit", submit)
    open_device_movers(plan, device, setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert seen
    assert all(event in asked for event in seen)


def test_a_device_that_never_answers_ends_the_trial_and_keeps_what_it_still_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of()
    now_s = itertools.count()
    monkeypatch.setattr(trial.Submission, "query", lambda self: False)
    kept = len(trial._ABANDONED)  # noqa: SLF001 - what it is about
    with pytest.raises(DeviceCopyError, match=r"copying by torch: not done after 10\.0 s"):
        open_device_movers(
            plan,
            CpuDevice(),
            setting="torch",
            staging_bytes=STAGING,
            scratch=scratch_of(plan),
            clock=lambda: float(next(now_s)),
        )
    (left,) = trial._ABANDONED[kept:]  # noqa: SLF001 - as above
    assert isinstance(left, tuple)
    assert [type(part).__name__ for part in left] == ["StagedMover", "ChunkCopy", "list"]
    assert isinstance(left[2][0], Submission), "it has the ids that the device has not read"


def test_a_way_that_fails_only_when_it_is_repeated_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of()
    calls = itertools.count()
    real = trial.TorchPages.gather

    def sometimes(self: trial.TorchPages, *args: object) -> None:
        if next(calls) > 2:
            raise RuntimeError("the queue is full")
        real(self, *args)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(trial.TorchPages, "gather", sometimes)
    movers = open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    (torch_ways,) = [one for one in movers.choices[0].measured if one.way == TORCH]
    assert torch_ways.unusable == "copying by torch: the queue is full"
    assert movers.choices[0].way.name == "triton"


@pytest.mark.parametrize("setting", ["auto", "torch", "triton"])
def test_movers_made_in_inference_mode_are_used_outside_it(setting: CopySetting) -> None:
    plan = plan_of()
    scratch = scratch_of(plan)
    with torch.inference_mode():
        movers = open_device_movers(plan, CpuDevice(), setting=setting, staging_bytes=STAGING, scratch=scratch)
    assert_moves(plan, movers.out, movers.into)


def test_an_interpreter_is_not_given_a_gpus_addresses() -> None:
    with pytest.raises(
        DeviceCopyError, match=r"interprets kernels \(TRITON_INTERPRET\), and the KV cache is on cuda:0"
    ):
        triton_pages._kernel(torch.device("cuda", 0))  # noqa: SLF001 - no plan can be made for a GPU here


def test_measuring_leaves_the_pages_as_they_were() -> None:
    plan = plan_of()
    before = [item.tensor.clone() for item in plan.paged]
    open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert all(torch.equal(item.tensor, kept) for item, kept in zip(plan.paged, before, strict=True))


def test_staging_is_shared_by_the_ways_of_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    seen: set[int] = set()
    real = StagedMover.__init__

    def watched(self: StagedMover, *args: object, **kwargs: object) -> None:
        seen.add(args[4].data_ptr())  # type: ignore[attr-defined] # the staging tensor
        real(self, *args, **kwargs)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(StagedMover, "__init__", watched)
    open_device_movers(plan, CpuDevice(), setting="auto", staging_bytes=STAGING, scratch=scratch_of(plan))
    assert len(seen) == 2
