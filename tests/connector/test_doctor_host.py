"""The doctor without a GPU, and the copies that it makes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_machine import (
    CPU,
    PAGES,
    SpoilingCopy,
    found,
    levels_but_rates,
)

from kvsluice.connector.doctor import Wanted, examine_device_path
from kvsluice.connector.doctor.copies import bytes_come_back, measure_host
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.chooser import Movers
from kvsluice.kernels.device import CpuDevice
from kvsluice.kernels.movers import DirectMover
from kvsluice.kernels.operations import Direction
from kvsluice.kernels.ways import CopyChoice, Way, WayMeasured


def test_without_a_gpu_one_line_says_so_and_the_path_in_host_memory_is_measured(no_gpu):
    section = examine_device_path(Wanted(pages=PAGES), no_gpu)
    assert levels_but_rates(section) == {"device": "note"}
    assert found(section, "device").text == "no GPU: the path in host memory is examined"
    assert found(section, "registration").text == "1 GiB, pageable: there is no GPU to pin it for"
    assert found(section, "round trip").level == "ok"
    copies = section.document()["copies"]
    for name in ("stores", "loads"):
        assert copies[name]["way"] == "host"
        assert copies[name]["bytes_per_s"] > 0
        assert copies[name]["plain_bytes_per_s"] > 0
    assert {"pcie", "numa", "driver", "triton"}.isdisjoint(finding.name for finding in section.findings)


def test_without_a_gpu_what_needs_one_is_a_problem(no_gpu):
    section = examine_device_path(Wanted(pages=PAGES, device_copy="triton", pin_memory="on"), no_gpu)
    bad = [finding.name for finding in section.findings if finding.level == "problem"]
    assert bad == ["registration", "device_copy"]
    assert "copying by triton needs a CUDA device" in found(section, "device_copy").text
    assert found(section, "registration").text.startswith("pin_memory is 'on'")
    assert found(section, "stores").text.startswith("by host")


def test_host_copies_and_the_memcpy_are_timed_alike():
    plan = PAGES.plan_on(CPU)
    chunk = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    times = (16 << 20) // plan.num_bytes
    now_s = 0.0
    took_s = iter([1.0, 2.0, 4.0] * 4 + [0.5, 2.0, 4.0])

    def clock() -> float:
        """Every second reading is later, by what the copy between took."""
        nonlocal now_s, started
        if started:
            now_s += next(took_s)
        started = not started
        return now_s

    started = False
    out, into = measure_host(plan, chunk, clock)
    total = times * plan.num_bytes
    assert out.plain_bytes_per_s == into.plain_bytes_per_s == total / 0.5
    assert out.measured == (WayMeasured(Way("host"), total / 2),)
    assert into.measured == (WayMeasured(Way("host"), total / 4),)


class IdleCopy(HostCopy):
    """Copies nothing in one direction."""

    def __init__(self, plan: CopyPlan, direction: Direction) -> None:
        super().__init__(plan)
        self._idles = direction

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        if self._idles != "out":
            super().gather(block_ids, out, tensors)

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        if self._idles != "in":
            super().scatter(block_ids, src, skip_blocks, tensors)


class BesideCopy(HostCopy):
    """Writes into a block that it was not given."""

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        super().scatter(block_ids, src, skip_blocks, tensors)
        other = next(block for block in range(self.plan.num_pool_blocks) if block not in block_ids)
        self.plan.paged[0].tensor[0, other, 0] = 1


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (HostCopy, True),
        (BesideCopy, False),
        *((lambda plan, at=at: SpoilingCopy(plan, at), False) for at in ("out", "in")),
        *((lambda plan, at=at: IdleCopy(plan, at), False) for at in ("out", "in")),
    ],
)
def test_a_round_trip_notices_every_byte_that_is_not_as_it_should_be(make, same):
    plan = PAGES.plan_on(CPU)
    device, copy = CpuDevice(), make(plan)
    movers = Movers(
        DirectMover(copy, device, "out", name="host"),
        DirectMover(copy, device, "in", name="host"),
        (CopyChoice("out", Way("host")), CopyChoice("in", Way("host"))),
        0,
    )
    chunk = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    assert bytes_come_back(plan, movers, device, chunk, lambda: 0.0) is same
