"""The doctor: each fault of a device path is told once, with what to do, and a machine in order has none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from gpu_machine import (
    BATCHED,
    CPU,
    CPU_BUILD,
    FACTS,
    MEMLOCK_REFUSED,
    NO_BINDINGS,
    PAGES,
    TORCH,
    TRITON,
    FakeDriver,
    FakeNuma,
    found,
    levels,
    levels_but_rates,
)

from kvsluice.connector.doctor import Report, Wanted, examine_device_path
from kvsluice.connector.doctor.machine import (
    Sighting,
    TorchBuild,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels.chooser import open_movers
from kvsluice.kernels.driver import DriverError
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.tiers.errors import ConfigError


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
