"""The doctor: each fault of a device path is told once, with what to do, and a machine in order has none."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from kvsluice.connector import OffloadConfig
from kvsluice.connector.cli import main
from kvsluice.connector.doctor import DevicePath, Finding, Machine, Pages, Report, Wanted, examine_device_path
from kvsluice.connector.doctor import machine as machine_module
from kvsluice.connector.doctor.copies import bytes_come_back, measure_host
from kvsluice.connector.doctor.machine import (
    Sighting,
    TorchBuild,
    gpus_in_sight,
    memory_bytes,
    package_version,
    pages_by_node,
    torch_build,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.chooser import Movers, open_movers
from kvsluice.kernels.device import CpuDevice, Device
from kvsluice.kernels.driver import NO_DRIVER, DriverError
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.movers import DirectMover
from kvsluice.kernels.operations import Direction
from kvsluice.kernels.ways import CopyChoice, CopySetting, Way, WayMeasured, choose
from kvsluice.tiers.errors import ConfigError

CPU = torch.device("cpu")
PAGES = Pages(page_bytes=4096, num_layers=2, blocks_per_chunk=4)
SMALL = ["--page-bytes", "4KiB", "--layers", "2", "--blocks-per-chunk", "4"]
FACTS = GpuFacts(
    name="NVIDIA H200",
    uuid="GPU-aaaa",
    pci_bus_id="0000:65:00.0",
    pcie_generation=5,
    pcie_width=16,
    pcie_max_generation=5,
    pcie_max_width=16,
    numa_node=1,
    num_sms=132,
    memory_bytes=141 << 30,
    driver_version="580.159.03",
    cuda_version="13.0",
)
BUILD = TorchBuild("2.13.0+cu130", "13.0", 2)
CPU_BUILD = TorchBuild("2.13.0+cpu", None, 0)
BATCHED, TRITON, TORCH = Way("batched"), Way("triton", 2), Way("torch")
RATES = {BATCHED: 9e9, TRITON: 46e9, TORCH: 30e9}
MEMLOCK_REFUSED = DriverError("cuMemHostRegister of 1 bytes failed: CUDA_ERROR_OUT_OF_MEMORY", code=2, name="x")
NO_BINDINGS = DriverError("cuda-bindings cannot be imported", code=NO_DRIVER, name="no cuda-bindings")


class FakeDriver:
    """CUDA's driver as the region uses it."""

    def __init__(self, refusal: DriverError | None) -> None:
        self.refusal = refusal
        self.registered: set[int] = set()

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        yield

    def register(self, address: int, num_bytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


class FakeNuma:
    def nodes(self) -> frozenset[int]:
        return frozenset({0, 1})

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        """Does as it is told."""


class SpoilingCopy(HostCopy):
    """Gets the last byte wrong in one direction."""

    def __init__(self, plan: CopyPlan, direction: Direction) -> None:
        super().__init__(plan)
        self._spoils = direction

    def gather(self, block_ids: Sequence[int], out: torch.Tensor, tensors: range | None = None) -> None:
        super().gather(block_ids, out, tensors)
        if self._spoils == "out":
            out[-1] ^= 1

    def scatter(
        self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int = 0, tensors: range | None = None
    ) -> None:
        super().scatter(block_ids, src, skip_blocks, tensors)
        if self._spoils == "in":
            self.plan.paged[-1].tensor[-1, block_ids[-1], -1] ^= 1


class GpuMachine:
    """A machine with a GPU that is in order; what a test changes is at fault. `machine` is what the doctor asks.

    Its pages are in host memory and so are its copies; how fast they are is made up.
    """

    def __init__(self) -> None:
        self.facts = [FACTS]
        """One answer after the other; the last one stays."""
        self.build = BUILD
        self.packages: dict[str, str] = {"cuda-bindings": "13.0.1", "triton": "3.9.0", "nvidia-ml-py": "13.580.65"}
        self.driver = FakeDriver(None)
        self.node_pages = {1: 100}
        self.rates = dict(RATES)
        self.plain = 52e9
        self.unusable: dict[Way, str] = {}
        self.spoils: Direction | None = None
        self.fails: RuntimeError | None = None
        self.regions: list[PinnedRegion] = []
        self.sightings = (Sighting("NVIDIA H200", "NVML"),)
        self.environment: dict[str, str] = {}
        self.memory_bytes: int | None = 1 << 40

    @property
    def machine(self) -> Machine:
        facts = list(self.facts)
        return Machine(
            self.environment,
            torch_build=lambda: self.build,
            package_version=self.packages.get,
            gpus_in_sight=lambda: self.sightings,
            memlock_bytes=lambda: (8 << 20, None),
            memory_bytes=lambda: self.memory_bytes,
            gpu_facts=lambda device: facts.pop(0) if len(facts) > 1 else facts[0],
            numa_nodes=FakeNuma().nodes,
            pages_by_node=lambda address: self.node_pages,
            new_region=self.new_region,
            new_pages=lambda pages, device: pages.plan_on(CPU),
            open_device=lambda device: CpuDevice(),
            open_movers=self.open_movers,
        )

    def new_region(
        self, num_slots: int, slot_bytes: int, device: torch.device, pin: Literal["on", "off"]
    ) -> PinnedRegion:
        region = PinnedRegion(
            num_slots,
            slot_bytes,
            device=device,
            pin=pin,
            driver=self.driver,
            facts=self.facts[0],
            numa=FakeNuma(),
        )
        self.regions.append(region)
        return region

    def open_movers(
        self,
        plan: CopyPlan,
        device: Device,
        *,
        setting: CopySetting,
        staging_bytes: int,
        scratch: torch.Tensor,
        clock: Callable[[], float],
    ) -> Movers:
        if self.fails is not None:
            raise self.fails
        measured = tuple(
            WayMeasured(way, None, self.unusable[way]) if way in self.unusable else WayMeasured(way, self.rates[way])
            for way in self.rates
        )
        if setting == "auto":
            way, told, plain = choose(measured), measured, self.plain
        else:
            way, told, plain = next(way for way in self.rates if way.name == setting), (), None
            if way in self.unusable:
                raise DeviceCopyError(self.unusable[way])
        movers = [
            DirectMover(
                HostCopy(plan) if self.spoils != direction else SpoilingCopy(plan, direction),
                device,
                direction,
                name=way.name,
            )
            for direction in ("out", "in")
        ]
        choices = (CopyChoice("out", way, plain, told), CopyChoice("in", way, plain, told))
        return Movers(movers[0], movers[1], choices, staging_bytes)

    def examine(self, **changed: object) -> DevicePath:
        given: dict[str, object] = {"pages": PAGES, "staging_bytes": 4 * PAGES.slot_bytes}
        section = examine_device_path(Wanted(**(given | changed)), self.machine)
        assert not self.driver.registered, "memory stayed registered"
        return section


@pytest.fixture
def there() -> GpuMachine:
    return GpuMachine()


def found(section: DevicePath, name: str) -> Finding:
    (finding,) = [finding for finding in section.findings if finding.name == name]
    return finding


def levels(section: DevicePath) -> dict[str, str]:
    """What is not as it should be, by name."""
    return {finding.name: finding.level for finding in section.findings if finding.level != "ok"}


def levels_but_rates(section: DevicePath) -> dict[str, str]:
    """The same where this machine's own memory was measured, which is as fast as it is."""
    return {name: level for name, level in levels(section).items() if name not in ("stores", "loads")}


# ---- a GPU -----------------------------------------------------------------------------------


def test_a_gpu_in_order_has_neither_problems_nor_notes(there):
    section = there.examine()
    assert levels(section) == {}
    assert Report((section,)).level == "ok"
    told = {finding.name: finding.text for finding in section.findings}
    assert told["device"] == "cuda:0: NVIDIA H200, 141 GiB, 132 multiprocessors, 0000:65:00.0"
    assert told["driver"] == "580.159.03, CUDA 13.0"
    assert told["pcie"] == "generation 5 of 5, 16 of 16 lanes: 63 GB/s each way at most"
    assert told["plain copy"] == "a plain copy gets 52 GB/s, 83% of what the link can do"
    assert told["numa"] == "nodes 0, 1; the GPU is next to node 1, 100% of the region's pages are there"
    assert told["stores"] == "by triton on 2 SMs: 46 GB/s, 88% of a plain copy; the fastest"
    assert told["loads"] == told["stores"]
    assert told["round trip"] == "a chunk of 64 KiB came back with the bytes it went with"
    assert told["registration"].startswith("256 KiB pinned in ")
    assert "a chunk of 64 KiB costs a thread" in told["queueing"]


def test_every_finding_that_is_at_fault_is_one_line_with_a_remedy(there):
    there.facts = [replace(FACTS, pcie_width=8, numa_node=0, cuda_version="12.4")]
    there.driver = FakeDriver(MEMLOCK_REFUSED)
    there.packages.clear()
    there.rates = {BATCHED: 2e9, TORCH: 3e9}
    there.unusable = {BATCHED: "no\nbatch"}
    there.plain = 20e9
    section = there.examine(pin_memory="on", device_copy="batched")
    bad = [finding for finding in section.findings if finding.level != "ok"]
    assert len(bad) >= 8
    for finding in bad:
        assert finding.remedy, finding
    for finding in section.findings:
        assert "\n" not in finding.text + (finding.remedy or "")


def test_an_idle_link_is_read_again_right_after_the_copies(there):
    idle = replace(FACTS, pcie_generation=1)
    there.facts = [idle, FACTS]
    section = there.examine()
    assert levels(section) == {}
    assert found(section, "pcie").text.startswith("generation 5 of 5")
    gpu = section.document()["gpu"]
    assert (gpu["pcie_generation"], gpu["pcie_generation_before"]) == (5, 1)


def test_a_link_that_copies_faster_than_it_reads_had_gone_idle_again(there):
    there.facts = [replace(FACTS, pcie_generation=1)]
    section = there.examine()
    assert levels(section) == {}
    assert "so it had gone idle when asked" in found(section, "pcie").text
    assert "83% of what the link can do" in found(section, "plain copy").text


def test_a_link_of_half_its_lanes_is_a_problem_even_where_it_is_read_idle(there):
    there.plain = 26e9
    for generation in (5, 1):
        there.facts = [replace(FACTS, pcie_generation=generation, pcie_width=8)]
        section = there.examine()
        assert levels(section) == {"pcie": "problem"}
        assert "8 of 16 lanes" in found(section, "pcie").text
        assert "riser" in found(section, "pcie").remedy
        assert "83% of what the link can do" in found(section, "plain copy").text


def test_a_link_that_stays_below_its_generation_under_load_is_a_note(there):
    there.facts = [replace(FACTS, pcie_generation=4)]
    there.plain = 26e9
    section = there.examine()
    assert levels(section) == {"pcie": "note"}
    assert "generation 4 of 5" in found(section, "pcie").text


def test_copies_that_are_faster_than_the_slot_do_not_take_it(there):
    there.plain = 180e9
    there.rates[TRITON] = 170e9
    section = there.examine()
    assert levels(section) == {}
    assert "copies take a faster link than this: 180 GB/s" in found(section, "pcie").text


def test_a_plain_copy_that_leaves_the_link_half_empty_is_a_note(there):
    full = FACTS.pcie_bytes_per_s
    there.plain, there.rates = 0.59 * full, {TRITON: 29e9}
    section = there.examine()
    assert levels(section) == {"plain copy": "note"}
    assert "59% of what the link can do" in found(section, "plain copy").text
    there.plain = 0.61 * full
    assert levels(there.examine()) == {}


@pytest.mark.parametrize(("pin", "level"), [("auto", "note"), ("on", "problem")])
def test_refused_registration_says_what_to_raise_and_copies_go_on_pageable(there, pin, level):
    there.driver = FakeDriver(MEMLOCK_REFUSED)
    section = there.examine(pin_memory=pin)
    assert levels(section) == {"registration": level}
    finding = found(section, "registration")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in finding.text
    assert "ulimit -l unlimited" in finding.remedy
    assert "memlock=-1" in finding.remedy
    region = section.document()["region"]
    assert (region["pinned"], region["register_s"]) == (False, None)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in region["refused"]
    assert section.seen.copies.same_bytes


def test_memory_that_is_not_to_be_pinned_is_a_note_and_nothing_is_registered(there):
    there.driver = FakeDriver(DriverError("was asked", code=1, name="x"))
    section = there.examine(pin_memory="off")
    assert levels(section) == {"registration": "note"}
    assert "pin_memory is 'off'" in found(section, "registration").text


def test_a_region_that_cannot_be_mapped_is_a_problem(there):
    def refuse(*size: object) -> PinnedRegion:
        raise ConfigError("cannot map 4 slots of 65536 bytes: no memory")

    section = examine_device_path(Wanted(pages=PAGES), replace(there.machine, new_region=refuse))
    assert levels(section) == {"registration": "problem"}
    assert "cannot map 4 slots" in found(section, "registration").text


def test_the_time_for_an_engines_whole_region_is_told(there):
    section = there.examine(host_bytes=60 * PAGES.slot_bytes)
    assert "the 4 MiB of an engine take about" in found(section, "registration").text


@pytest.mark.parametrize(
    ("node_pages", "words"),
    [({0: 90, 1: 10}, "10% of the region's pages are there"), ({}, "the region prefers node 1")],
)
def test_pages_on_another_node_than_the_gpus_are_a_note(there, node_pages, words):
    there.node_pages = node_pages
    section = there.examine()
    assert levels(section) == ({"numa": "note"} if node_pages else {})
    finding = found(section, "numa")
    assert words in finding.text
    if node_pages:
        assert "--preferred=1" in finding.remedy
        assert "SYS_NICE" in finding.remedy


def test_a_region_that_was_not_placed_is_a_note(there, monkeypatch):
    def refuse(self: FakeNuma, address: int, num_bytes: int, node: int) -> None:
        raise PermissionError(1, "mbind")

    monkeypatch.setattr(FakeNuma, "prefer", refuse)
    there.node_pages = {}
    section = there.examine()
    assert levels(section) == {"numa": "note"}
    assert "the region could not be placed" in found(section, "numa").text


def test_a_gpu_whose_node_is_not_known_is_a_note_on_a_machine_of_several(there):
    there.facts = [replace(FACTS, numa_node=None)]
    section = there.examine()
    assert levels(section) == {"numa": "note"}
    one_node = replace(there.machine, numa_nodes=lambda: frozenset({0}))
    assert levels(examine_device_path(Wanted(pages=PAGES), one_node)) == {}


def test_without_cuda_bindings_pinning_and_batched_copies_are_told_with_what_to_install(there):
    del there.packages["cuda-bindings"]
    there.driver = FakeDriver(NO_BINDINGS)
    there.unusable = {BATCHED: "copying by batched: cuda-bindings cannot be imported"}
    section = there.examine()
    assert levels(section) == {"cuda-bindings": "note", "registration": "note"}
    assert found(section, "cuda-bindings").remedy == "pip install 'kvsluice[gpu]'"
    assert "pinned" in found(section, "cuda-bindings").text
    assert "pip install 'kvsluice[gpu]'" in found(section, "registration").remedy


def test_without_triton_the_next_way_is_taken_and_triton_told_of_once(there):
    del there.packages["triton"]
    there.unusable = {TRITON: "copying by triton on 2 SMs: the Triton kernel needs Triton"}
    section = there.examine()
    assert levels(section) == {"triton": "note"}
    assert found(section, "stores").text == "by torch: 30 GB/s, 58% of a plain copy; the fastest"


def test_triton_that_is_installed_and_does_not_work_is_told_with_its_reason(there):
    there.unusable = {TRITON: "copying by triton on 2 SMs: gcc:\n  not found"}
    section = there.examine()
    assert levels(section) == {"way triton": "note"}
    assert found(section, "way triton").text == "cannot be had: gcc:; not found"
    assert "C compiler" in found(section, "way triton").remedy


def test_without_nvml_the_link_is_left_out_and_the_reason_told(there):
    del there.packages["nvidia-ml-py"]
    there.facts = [
        GpuFacts(name="NVIDIA H200", numa_node=1, num_sms=132, notes=("NVML is not asked (no pynvml)",)),
    ]
    section = there.examine()
    assert levels(section) == {"nvidia-ml-py": "note", "gpu facts": "note"}
    assert {"pcie", "plain copy", "driver"}.isdisjoint(finding.name for finding in section.findings)
    there.packages["nvidia-ml-py"] = "13.580.65"
    there.facts = [replace(FACTS, driver_version=None, notes=("no driver version: Unknown Error",))]
    assert levels(there.examine()) == {"gpu facts": "note"}
    there.facts = [replace(FACTS, notes=("MIG is on",))]
    assert levels(there.examine()) == {}


def test_a_driver_without_batched_copies_is_told_once(there):
    there.facts = [replace(FACTS, driver_version="550.54.15", cuda_version="12.4")]
    there.unusable = {BATCHED: "copying by batched: the driver has no batched copy: it needs CUDA 12.8"}
    section = there.examine()
    assert levels(section) == {"driver": "note"}
    assert found(section, "driver").text == "550.54.15, CUDA 12.4: there is no batched copy before CUDA 12.8"
    assert "570" in found(section, "driver").remedy


def test_a_driver_of_twelve_eight_has_them(there):
    there.facts = [replace(FACTS, cuda_version="12.8")]
    assert levels(there.examine()) == {}


def test_a_way_far_below_the_plain_copy_is_a_note(there):
    there.rates = {BATCHED: 6e9}
    section = there.examine()
    assert levels(section) == {"stores": "note", "loads": "note"}
    assert found(section, "loads").text == ("by batched: 6 GB/s, 12% of a plain copy; the only one that can be had")
    assert "block size" in found(section, "loads").remedy
    there.rates = {BATCHED: 0.49 * there.plain}
    assert levels(there.examine()) == {"stores": "note", "loads": "note"}
    there.rates = {BATCHED: 0.51 * there.plain}
    assert levels(there.examine()) == {}


def test_a_slower_way_that_spares_multiprocessors_is_taken_with_that_reason(there):
    there.rates = {BATCHED: 45e9, TRITON: 46e9}
    section = there.examine()
    assert found(section, "stores").text.endswith("nearly the fastest, and it leaves more multiprocessors to the model")


def test_a_named_way_that_cannot_be_had_is_a_problem_that_names_it(there):
    there.unusable = {TRITON: "copying by triton: the Triton kernel needs Triton"}
    section = there.examine(device_copy="triton")
    assert levels(section) == {"device_copy": "problem", "way triton": "note"}
    assert found(section, "device_copy").text == (
        "device_copy is 'triton', which cannot be had: the Triton kernel needs Triton; an engine would not start"
    )
    assert found(section, "stores").text == "by torch: 30 GB/s, 58% of a plain copy; the fastest"


def test_a_named_way_is_measured_beside_the_others(there):
    section = there.examine(device_copy="batched")
    assert levels(section) == {"stores": "note", "loads": "note"}
    assert found(section, "stores").text == (
        "by batched: 9 GB/s, 17% of a plain copy; device_copy is 'batched'; 'auto' would take triton on 2 SMs, 46 GB/s"
    )
    assert found(section, "stores").remedy == "set device_copy to 'auto'"
    assert levels(there.examine(device_copy="triton")) == {}


@pytest.mark.parametrize("direction", ["out", "in"])
def test_bytes_that_change_on_the_way_are_a_problem(there, direction):
    there.spoils = direction
    section = there.examine()
    assert levels(section) == {"round trip": "problem"}
    assert section.document()["copies"]["same_bytes"] is False


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), "stop what fills the GPU"),
        (DeviceCopyError("no way to copy"), "dmesg"),
    ],
)
def test_copies_that_fail_are_a_problem_and_the_memory_is_given_back(there, error, remedy):
    there.fails = error
    section = there.examine()
    assert levels(section) == {"copies": "problem"}
    assert remedy in found(section, "copies").remedy
    assert found(section, "pcie").text.endswith("read while idle")
    json.dumps(Report((section,)).document(), allow_nan=False)


# ---- which device ----------------------------------------------------------------------------


@pytest.mark.parametrize(("memory_bytes", "level"), [(1 << 30, "problem"), ((1 << 30) + 1, "ok"), (None, "ok")])
def test_a_region_that_no_memory_holds_is_a_problem(there, memory_bytes, level):
    there.memory_bytes = memory_bytes
    finding = found(there.examine(staging_bytes=1 << 29, host_bytes=1 << 29), "memory")
    assert finding.level == level
    assert "1 GiB" in finding.text
    assert (finding.remedy is not None) is (level == "problem")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 1024 kB\nMemFree: 1 kB\n"}, 1 << 20),
        ({"proc/meminfo": "MemTotal: 1024 kB\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        ({"proc/meminfo": "MemTotal: 1024 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 1 << 20),
        (
            {"proc/meminfo": "MemTotal: 1024 kB\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 63}\n"},
            1 << 20,
        ),
        ({"proc/meminfo": "MemTotal:"}, None),
        ({}, None),
    ],
)
def test_memory_is_the_machines_or_what_a_container_may_have_of_it(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_bytes(tmp_path) == expected


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda", 2)])
def test_a_gpu_that_is_asked_for_and_not_there_is_a_problem(there, device):
    if device.index is None:
        there.build, there.sightings = CPU_BUILD, ()
    section = there.examine(device=device)
    assert levels(section) == {"device": "problem"}
    assert found(section, "device").text.startswith(f"{device} is not there: torch finds ")
    assert ("cuda:1" if device.index else "CUDA build") in found(section, "device").remedy
    assert section.document()["device"] is None
    assert there.regions == []


def test_the_second_gpu_is_examined_where_it_is_asked_for(there):
    section = there.examine(device=torch.device("cuda", 1))
    assert section.document()["device"] == "cuda:1"
    assert there.examine(device=torch.device("cuda")).document()["device"] == "cuda:0"


def test_the_cpu_build_of_torch_beside_a_gpu_is_a_problem(there):
    there.build = CPU_BUILD
    machine = replace(there.machine, open_movers=open_movers)
    wanted = Wanted(pages=PAGES)
    section = examine_device_path(wanted, machine)
    assert levels_but_rates(section) == {"torch": "problem", "device": "note"}
    assert "NVIDIA H200: the CPU build of torch is installed" in found(section, "torch").text
    assert "CUDA build" in found(section, "torch").remedy
    on_purpose = examine_device_path(replace(wanted, device=CPU), machine)
    assert levels_but_rates(on_purpose) == {"torch": "note"}


def test_a_gpu_that_only_the_kernel_sees_is_a_note(there):
    there.build, there.sightings = CPU_BUILD, (Sighting("0000:65:00.0", "PCI"),)
    section = there.examine(device=CPU, device_copy="auto")
    assert found(section, "torch").level == "note"
    assert "PCI slot 0000:65:00.0" in found(section, "torch").text


@pytest.mark.parametrize(
    ("environment", "sightings", "level", "remedy"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, (Sighting("NVIDIA H200", "NVML"),), "problem", "CUDA_VISIBLE_DEVICES is ''"),
        ({}, (Sighting("NVIDIA H200", "NVML"),), "problem", "update it"),
        ({}, (Sighting("0000:65:00.0", "PCI"),), "note", "--gpus all"),
        ({}, (), "note", None),
    ],
)
def test_a_cuda_build_that_finds_no_gpu_says_why(there, environment, sightings, level, remedy):
    there.build = TorchBuild("2.13.0+cu130", "13.0", 0, "the driver is too old")
    there.environment, there.sightings = environment, sightings
    machine = replace(there.machine, open_movers=open_movers)
    section = examine_device_path(Wanted(pages=PAGES), machine)
    assert levels_but_rates(section) == {"torch": level, "device": "note"}
    finding = found(section, "torch")
    assert "finds no GPU: the driver is too old" in finding.text
    assert finding.remedy is None if remedy is None else remedy in finding.remedy


# ---- without a GPU ---------------------------------------------------------------------------


@pytest.fixture
def no_gpu() -> Machine:
    machine = replace(Machine.this(), torch_build=lambda: CPU_BUILD, gpus_in_sight=lambda: ())
    return replace(machine, package_version=lambda name: None)


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


# ---- what is asked of the machine ------------------------------------------------------------


def test_torch_of_this_process_is_described():
    build = torch_build()
    assert build.version == torch.__version__
    assert build.cuda == torch.version.cuda
    assert build.num_devices == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_why_torch_has_no_device_is_its_own_warning_or_its_error(monkeypatch):
    def too_old() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver is too old\n (found 11040)", stacklevel=1)
        return False

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\n")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_build() == TorchBuild(torch.__version__, "13.0", 0, "Found no NVIDIA driver on your system.")
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    assert torch_build().unavailable == "CUDA initialization: The NVIDIA driver is too old; (found 11040)"


class FakeNvml:
    # ruff: noqa: N802 - NVML's names
    class NVMLError(Exception):
        pass

    def __init__(self, names: Sequence[str], fails: str = "") -> None:
        self.names = names
        self.fails = fails
        self.started = 0

    def nvmlInit(self) -> None:
        if self.fails == "init":
            raise self.NVMLError("no driver")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        if self.fails == "name":
            raise self.NVMLError("lost")
        return self.names[handle]


def test_gpus_are_those_of_nvml_else_those_on_the_pci_bus(tmp_path):
    for slot, vendor, kind in (
        ("0000:65:00.0", "0x10de", "0x030200"),
        ("0000:66:00.0", "0x10de", "0x060400"),
        ("0000:67:00.0", "0x8086", "0x030000"),
    ):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(vendor + "\n")
        (tmp_path / slot / "class").write_text(kind + "\n")
    (tmp_path / "0000:68:00.0").mkdir()
    on_pci = (Sighting("0000:65:00.0", "PCI"),)
    nvml = FakeNvml(["NVIDIA H200", "NVIDIA H200"])
    assert gpus_in_sight(nvml, tmp_path) == (Sighting("NVIDIA H200", "NVML"),) * 2
    assert nvml.started == 0
    for broken in (FakeNvml([]), FakeNvml(["x"], "init"), FakeNvml(["x"], "name")):
        assert gpus_in_sight(broken, tmp_path) == on_pci
        assert broken.started == 0
    assert gpus_in_sight(FakeNvml([]), tmp_path / "none") == ()


def test_without_nvidia_ml_py_the_pci_bus_is_looked_at(tmp_path, monkeypatch):
    def absent(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(machine_module.importlib, "import_module", absent)
    assert gpus_in_sight(None, tmp_path) == ()


def test_a_version_is_that_of_the_distribution_or_none():
    assert package_version("torch") == torch.__version__
    assert package_version("kvsluice-of-another-world") is None


def test_pages_by_node_are_those_of_the_mapping_around_the_address(tmp_path):
    table = tmp_path / "numa_maps"
    table.write_text(
        "7f0000000000 default file=/lib/N9 mapped=2 N0=2 kernelpagesize_kB=4\n"
        "7f0000100000 prefer:1 anon=512 dirty=512 N0=12 N1=500 kernelpagesize_kB=4\n"
        "7f0000300000 default\n"
    )
    assert pages_by_node(0x7F0000100000, table) == {0: 12, 1: 500}
    assert pages_by_node(0x7F0000200000, table) == {0: 12, 1: 500}
    assert pages_by_node(0x7F0000300000, table) == {}
    assert pages_by_node(0x1000, table) == {}
    assert pages_by_node(0x7F0000100000, tmp_path / "none") == {}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel was built without NUMA")
def test_the_pages_of_a_region_are_found_in_the_kernels_table():
    with contextlib.closing(PinnedRegion(4, 1 << 20, device=CPU)) as region:
        region.tensor(0).fill_(1)
        region.tensor(1).fill_(1)
        pages = pages_by_node(region.tensor(0).data_ptr())
        assert sum(pages.values()) >= 512


# ---- wanted ----------------------------------------------------------------------------------


def test_a_configuration_says_what_is_wanted():
    config = OffloadConfig.from_dict(
        {
            "tiers": [{"type": "host", "capacity": "8GiB"}],
            "device_copy": "torch",
            "device_staging_bytes": "32MiB",
            "pin_memory": "off",
            "staging_bytes": "2GiB",
        }
    )
    wanted = Wanted.by(config, PAGES)
    assert (wanted.device_copy, wanted.device_staging_bytes, wanted.pin_memory) == ("torch", 32 << 20, "off")
    assert wanted.region_bytes == 10 << 30
    assert wanted.num_slots * PAGES.slot_bytes == 1 << 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pages(page_bytes=0), "page_bytes must be at least 1, got 0"),
        (lambda: Pages(num_layers=-1), "num_layers must be at least 1, got -1"),
        (lambda: Pages(page_bytes=1 << 20, num_layers=64), "has 2147483648 bytes: up to 1073741824 are tried"),
        (lambda: Wanted(device=torch.device("meta")), "device 'meta': only cpu and cuda"),
        (lambda: Wanted(staging_bytes=4096), "staging_bytes 4096 holds no chunk: one takes 33554432 bytes"),
    ],
)
def test_what_cannot_be_examined_is_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---- the command -----------------------------------------------------------------------------


def words(text: str) -> str:
    """Without a table's line breaks and spaces."""
    return " ".join(text.split())


def test_the_command_runs_on_this_machine_as_it_is(capsys):
    code = main(["doctor", "--json", *SMALL])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert code == (1 if document["problems"] else 0)
    assert document["device_path"]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert document["device_path"]["copies"]["same_bytes"] is True
    assert "doctor: copying chunks" in err


def test_on_the_cpu_nothing_is_wrong_with_this_machine(capsys):
    assert main(["doctor", "--device", "cpu", *SMALL]) == 0
    out = words(capsys.readouterr().out)
    assert "the path in host memory, as asked for" in out
    assert "stores plain copy" in out
    assert "nothing is wrong" in out


def test_the_text_of_a_gpu_with_a_fault_names_it_and_what_to_do(there, capsys, monkeypatch):
    there.facts = [replace(FACTS, pcie_width=8)]
    there.plain = 26e9
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    assert main(["doctor", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "doctor: pinning 1 GiB of host memory" in err
    text = words(out)
    assert "ok device cuda:0: NVIDIA H200, 141 GiB" in text
    assert "problem pcie generation 5 of 5, 8 of 16 lanes: 31.5 GB/s each way at most; the GPU and its slot can" in text
    assert "-> reseat the card" in text
    assert "stores plain copy 26" in text
    assert "stores batched 9 35% 0 stores triton 46 177% 2 taken" in text
    assert "loads torch 30 115% any" in text
    assert text.endswith("1 problem")


KEYS = {
    "": {"level", "problems", "notes", "device_path"},
    "device_path": {
        *(
            "findings",
            "device",
            "settings",
            "pages",
            "torch",
            "gpus_in_sight",
            "packages",
            "memlock",
            "memory_bytes",
            "gpu",
        ),
        *("numa_nodes", "region", "copies"),
    },
    "device_path.settings": {"device_copy", "device_staging_bytes", "pin_memory", "region_bytes"},
    "device_path.pages": {"page_bytes", "num_layers", "blocks_per_chunk", "chunk_bytes"},
    "device_path.torch": {"version", "cuda", "num_devices", "unavailable"},
    "device_path.packages": {"cuda-bindings", "triton", "nvidia-ml-py"},
    "device_path.memlock": {"soft_bytes", "hard_bytes"},
    "device_path.gpu": {
        *("name", "uuid", "pci_bus_id", "numa_node", "num_sms", "memory_bytes", "driver_version", "cuda_version"),
        *("pcie_generation", "pcie_width", "pcie_max_generation", "pcie_max_width", "notes"),
        *("pcie_generation_before", "pcie_width_before", "pcie_bytes_per_s", "pcie_max_bytes_per_s"),
    },
    "device_path.region": {
        *("bytes", "pinned", "refused", "register_s", "release_s", "numa_node", "pages_by_node"),
    },
    "device_path.copies": {"refused", "failed", "same_bytes", "stores", "loads"},
    "device_path.copies.stores": {
        *("way", "multiprocessors", "why", "bytes_per_s", "plain_bytes_per_s", "share_of_plain", "queue_s", "ways"),
    },
}
"""By path, the keys of every document that has something there: others build on them."""


@pytest.mark.parametrize("gpu", [True, False])
def test_the_document_has_the_keys_that_are_promised(there, capsys, monkeypatch, gpu):
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    if not gpu:
        there.build = CPU_BUILD
    assert main(["doctor", "--json", *SMALL, *([] if gpu else ["--device", "cpu"])]) == 0
    document = json.loads(capsys.readouterr().out)
    for path, keys in KEYS.items():
        value = document
        for name in path.split(".") if path else ():
            value = value[name]
        if path == "device_path.gpu" and not gpu:
            assert value is None
            continue
        assert set(value) == keys, path
    ways = document["device_path"]["copies"]["loads"]["ways"]
    assert set(ways[0]) == {"way", "multiprocessors", "bytes_per_s", "share_of_plain", "unusable"}
    assert set(document["device_path"]["findings"][0]) == {"name", "level", "text", "remedy"}
    assert document["device_path"]["memlock"] == {"soft_bytes": 8 << 20, "hard_bytes": "unlimited"}


def test_the_document_of_a_gpu_that_is_not_there_is_complete(there, capsys, monkeypatch):
    there.build, there.sightings = CPU_BUILD, ()
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    assert main(["doctor", "--device", "cuda", "--json"]) == 1
    section = json.loads(capsys.readouterr().out)["device_path"]
    assert set(section) == KEYS["device_path"]
    assert (section["device"], section["region"], section["copies"]) == (None, None, None)


def test_every_key_of_the_document_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "device-path.md").read_text(encoding="utf-8")
    told = {key for keys in KEYS.values() for key in keys} | {"share_of_plain", "unusable"}
    missing = {key for key in told if f"`{key}`" not in text}
    assert not missing


def test_every_line_is_documented(there):
    text = (Path(__file__).parents[2] / "docs" / "device-path.md").read_text(encoding="utf-8")
    section = there.examine()
    names = {finding.name for finding in section.findings}
    names |= {"packages", "gpu facts", "device_copy", "copies", "way triton"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_a_configuration_file_gives_settings_and_the_chunks_size(there, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    path = tmp_path / "c.json"
    values = {
        "tiers": [{"type": "host", "capacity": "64MiB"}],
        "staging_bytes": "1MiB",
        "tokens_per_chunk": 32,
        "device_copy": "torch",
    }
    path.write_text(json.dumps(values))
    assert main(["doctor", str(path), "--page-bytes", "4KiB", "--layers", "2", "--json"]) == 0
    section = json.loads(capsys.readouterr().out)["device_path"]
    assert section["pages"]["blocks_per_chunk"] == 2
    assert section["settings"]["region_bytes"] == 65 << 20
    assert section["region"]["bytes"] == 1 << 20
    assert section["copies"]["stores"]["way"] == "torch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{here}/none.json"], "configuration file '{here}/none.json'"),
        (["{here}/wrong.json"], "device_copy is 'sideways'"),
        (["--device", "elsewhere"], "--device 'elsewhere': give cuda, cuda:1 or cpu"),
        (["--device", "meta"], "device 'meta': only cpu and cuda are supported"),
        (["--page-bytes", "two"], "--page-bytes 'two': a size is"),
        (["--layers", "0"], "num_layers must be at least 1, got 0"),
        (["--blocks-per-chunk", "0"], "blocks_per_chunk must be at least 1, got 0"),
        (["--page-bytes", "1GiB"], "are tried"),
    ],
)
def test_wrong_use_is_one_line_on_stderr_and_exit_code_2(tmp_path, capsys, arguments, message):
    wrong = {"tiers": [{"type": "host", "capacity": "1GiB"}], "device_copy": "sideways"}
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert main(["doctor", *(argument.format(here=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message.format(here=tmp_path) in line
