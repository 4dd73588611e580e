"""What the connector chooses by itself, what it takes when it is told to, and what that leaves on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from device_copy_flood import move_once
from gpu_engine import Engine
from gpu_pages import Geometry, Laid, Pages, payload_difference, random_bytes, sample_ids

from kvsluice.kernels import trial
from kvsluice.kernels.chooser import Movers, open_device_movers
from kvsluice.kernels.device import device_for
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.kernels.ways import CopySetting

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter moves a page in milliseconds."""
    if not engine.is_cuda:
        monkeypatch.setattr(trial, "_MEASURE_BYTES", 1)


class Opened:
    """Movers as the connector opens them, on streams of their own, and what they are to move."""

    def __init__(self, engine: Engine, setting: CopySetting, geometry: Geometry | None = None) -> None:
        items, layers, num_blocks = (8192, 16, 32) if engine.is_cuda else (64, 2, 4)
        plain = Geometry("chooser", (Laid(torch.bfloat16, (2, items), 1),) * layers, num_blocks, 3 * num_blocks)
        geometry = plain if geometry is None else geometry
        self.engine = engine
        self.pages, self.twin = Pages(geometry, engine.where), Pages(geometry, torch.device("cpu"))
        self.plan = self.pages.plan
        self.ids = sample_ids(geometry, 2, "random", 1)
        region = engine.region(3, -(-self.plan.num_bytes // 4096) * 4096)
        self.slots = [region.tensor(slot)[: self.plan.num_bytes] for slot in range(3)]
        self.staging_bytes = 32 * _MIB if engine.is_cuda else 1 << 16
        engine.finish()
        self.before = memory_of(engine)
        started_s = time.monotonic()
        self.movers: Movers = open_device_movers(
            self.plan,
            device_for(engine.where),
            setting=setting,
            staging_bytes=self.staging_bytes,
            scratch=self.slots[2],
        )
        self.took_s = time.monotonic() - started_s
        self.after = memory_of(engine)

    def check(self) -> None:
        """Both directions move the right bytes."""
        out, into = ([ChunkCopy(ids, slot) for ids, slot in zip(self.ids, self.slots, strict=False)] for _ in range(2))
        move_once(self.movers.out, out[:1], [self.engine.event()])
        expected = torch.empty(self.plan.num_bytes, dtype=torch.uint8)
        self.twin.oracle().gather(self.ids[0], expected)
        assert payload_difference(self.plan, self.slots[0], expected) is None
        self.slots[1].copy_(random_bytes(self.plan.num_bytes, 77))
        self.twin.oracle().scatter(self.ids[1], self.slots[1])
        move_once(self.movers.into, into[1:2], [self.engine.event()])
        self.engine.finish()
        assert self.pages.difference(self.twin) is None


def memory_of(engine: Engine) -> tuple[int, int]:
    """Bytes that tensors have on the device, and that torch keeps for them."""
    if not engine.is_cuda:
        return 0, 0
    return torch.cuda.memory_allocated(engine.where), torch.cuda.memory_reserved(engine.where)


def say(capsys: pytest.CaptureFixture[str], lines: Sequence[str]) -> None:
    with capsys.disabled():
        print("", *lines, sep="\n")


def test_auto_measures_every_way_and_takes_one_that_moves_the_right_bytes(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Opened(engine, "auto")
    say(capsys, [f"auto, in {opened.took_s:.2f} s: {choice}" for choice in opened.movers.choices])
    for choice in opened.movers.choices:
        assert choice.plain_bytes_per_s
        names = [str(one.way) for one in choice.measured]
        assert names == ["batched", "triton on 1 SMs", "triton on 2 SMs", "triton on 4 SMs", "torch"]
        missing = {str(one.way): one.unusable for one in choice.measured if one.bytes_per_s is None}
        assert missing == {} if engine.is_cuda else list(missing) == ["batched"]
    opened.check()


@pytest.mark.parametrize("setting", ["auto", "triton", "torch"])
def test_no_more_device_memory_stays_than_was_granted(
    engine: Engine, setting: CopySetting, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Opened(engine, setting)
    opened.check()
    assert opened.movers.staging_bytes <= opened.staging_bytes
    allocated, reserved = (after - before for before, after in zip(opened.before, opened.after, strict=True))
    granted = f"{setting}: {opened.movers.staging_bytes / _MIB:g} MiB of staging"
    say(
        capsys,
        [f"{granted}; torch has {allocated / _MIB:.2f} MiB more in tensors, {reserved / _MIB:.2f} more reserved"],
    )
    # Block ids, and the table of the pages' addresses, are some KiB.
    assert allocated <= opened.movers.staging_bytes + _MIB
    assert reserved <= opened.movers.staging_bytes + 16 * _MIB


@pytest.mark.parametrize("setting", ["triton", "torch", "batched"])
def test_a_way_that_is_asked_for_is_taken(engine: Engine, setting: CopySetting) -> None:
    if setting == "batched" and not engine.is_cuda:
        with pytest.raises(DeviceCopyError, match="copying by batched"):
            Opened(engine, setting)
        return
    opened = Opened(engine, setting)
    assert [mover.name for mover in (opened.movers.out, opened.movers.into)] == [setting, setting]
    assert [choice.way.name for choice in opened.movers.choices] == [setting, setting]
    opened.check()


def test_the_first_copy_finds_the_kernel_compiled(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    # Runs as no other test has them, so that nothing is there already.
    geometry = Geometry("compiled", (Laid(torch.float32, (2, 3 * 32), 1, padding=(0, 3, 0)),) * 2, 3, 9)
    before = compiled(engine)
    opened = Opened(engine, "triton", geometry)
    opening = compiled(engine)
    taken_s = []
    for mover in (opened.movers.out, opened.movers.into):
        for _ in range(2):
            started_s = time.monotonic()
            move_once(mover, [ChunkCopy(opened.ids[0], opened.slots[0])], [engine.event()])
            taken_s.append(time.monotonic() - started_s)
    shown = ", ".join(f"{each * 1e3:.2f}" for each in taken_s)
    say(capsys, [f"first and second copy out, first and second in: {shown} ms; kernels {before}, {opening}"])
    assert compiled(engine) == opening, "a copy compiled a kernel"
    if engine.is_cuda:
        assert opening == before + 2, "nothing was compiled at opening: one kernel for each direction was due"
        assert max(taken_s) < 0.1, f"a copy took long enough to have compiled something: {shown} ms"


def compiled(engine: Engine) -> int:
    """Kernels that Triton keeps in this process for this device; 0 under its interpreter."""
    from kvsluice.kernels.triton_kernel import copy_pages

    if not engine.is_cuda:
        return 0
    return len(copy_pages.device_caches[torch.cuda.current_device()][0])
