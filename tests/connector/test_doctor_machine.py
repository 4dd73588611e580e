"""What the doctor asks of a machine: torch, GPUs in sight, packages, memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_machine import (
    CPU,
)

from kvsluice.connector.doctor import machine as machine_module
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
