"""The questions that an examination asks of a machine, each of which a test can answer in its place."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, cast

import torch

from kvsluice.connector.doctor.pages import Pages
from kvsluice.connector.doctor.report import one_line
from kvsluice.connector.region import LinuxNuma, PinnedRegion
from kvsluice.kernels import CopyPlan
from kvsluice.kernels.chooser import Movers, open_movers
from kvsluice.kernels.device import Device, device_for
from kvsluice.kernels.gpu import GpuFacts, NvmlHandle, gpu_facts
from kvsluice.kernels.ways import CopySetting

__all__ = [
    "GpuList",
    "Machine",
    "MoversOpener",
    "Sighting",
    "TorchBuild",
    "gpus_in_sight",
    "memlock_bytes",
    "memory_bytes",
    "package_version",
    "pages_by_node",
    "torch_build",
]

_SYS_PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302")
"""PCI's class and subclass of a VGA and of a 3D controller: GPUs are one or the other."""
_NUMA_MAPS: Final = Path("/proc/self/numa_maps")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch.

    Attributes:
        cuda: of CUDA that it was built for, such as "13.0"; None in a build without.
        num_devices: CUDA devices that it can use.
        unavailable: why there are none, as torch says it; None where there are some, or in a build without CUDA.
    """

    version: str
    cuda: str | None
    num_devices: int
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """An NVIDIA GPU that this machine has, whether or not torch can use it.

    Attributes:
        name: NVML's name of it, or its PCI slot.
        by: who sees it. PCI alone: the kernel lists it, the driver does not give it to this process.
    """

    name: str
    by: Literal["NVML", "PCI"]


class GpuList(Protocol):
    """What is used of the module `pynvml` to list GPUs."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's names

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> NvmlHandle: ...  # noqa: N802

    def nvmlDeviceGetName(self, handle: NvmlHandle, /) -> str: ...  # noqa: N802


def torch_build() -> TorchBuild:
    """The torch of this process, and whether it finds a device."""
    with warnings.catch_warnings(record=True) as told:
        # torch says with a warning that the driver is too old for it.
        warnings.simplefilter("always")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    unavailable = None
    if cuda is not None and not num_devices:
        unavailable = one_line(str(told[0].message)) if told else _why_no_cuda()
    return TorchBuild(str(torch.__version__), cuda, num_devices, unavailable)


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch gives no types
    except RuntimeError as error:
        return one_line(error)
    return "there are 0 devices"


def package_version(distribution: str) -> str | None:
    """Of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus_in_sight(nvml: GpuList | None = None, sys_pci: Path = _SYS_PCI) -> tuple[Sighting, ...]:
    """The GPUs that NVML lists; where it lists none, those that the kernel lists on the PCI bus.

    Args:
        nvml: stands in for the module `pynvml`.
        sys_pci: where the kernel shows its PCI devices.
    """
    if nvml is None:
        try:
            nvml = cast("GpuList", importlib.import_module("pynvml"))
        except ImportError:
            return _on_pci(sys_pci)
    return _by_nvml(nvml) or _on_pci(sys_pci)


def _by_nvml(nvml: GpuList) -> tuple[Sighting, ...]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here, or none for this process
        return ()
    try:
        names = [
            nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
        ]
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(Sighting(name, "NVML") for name in names)


def _on_pci(sys_pci: Path) -> tuple[Sighting, ...]:
    found = []
    for device in sorted(sys_pci.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            found.append(Sighting(device.name, "PCI"))
    return tuple(found)


def memlock_bytes() -> tuple[int | None, int | None]:
    """RLIMIT_MEMLOCK of this process, soft and hard; None: unlimited."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process and all others may have: the machine's, or its control group's limit; None: unknown.

    Args:
        root: of the file system, for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        bounds = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")]
    except (OSError, ValueError, IndexError):
        return None
    for limit in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        # Where there is no limit the one file says "max", the other one a number beyond any memory.
        with contextlib.suppress(OSError, ValueError):
            bounds.append(int((root / limit).read_text()))
    return min(bounds, default=None)


def pages_by_node(address: int, numa_maps: Path = _NUMA_MAPS) -> dict[int, int]:
    """On which NUMA nodes the pages of the mapping around `address` are, in pages; empty where nobody says.

    Args:
        numa_maps: the kernel's table, a line for each mapping: `7f12c0000000 prefer:1 anon=512 N1=512 ...`
    """
    try:
        lines = numa_maps.read_text().splitlines()
    except OSError:
        return {}
    starts = {int(line.split(maxsplit=1)[0], 16): line for line in lines if line}
    around = max((start for start in starts if start <= address), default=None)
    if around is None:
        return {}
    words = [word[1:].partition("=") for word in starts[around].split() if word.startswith("N")]
    return {int(node): int(count) for node, _, count in words if node.isdecimal() and count.isdecimal()}


class MoversOpener(Protocol):
    """As `kvsluice.kernels.chooser.open_movers`."""

    def __call__(
        self,
        plan: CopyPlan,
        device: Device,
        *,
        setting: CopySetting,
        staging_bytes: int,
        scratch: torch.Tensor,
        clock: Callable[[], float],
    ) -> Movers: ...


def _new_region(num_slots: int, slot_bytes: int, device: torch.device, pin: Literal["on", "off"]) -> PinnedRegion:
    return PinnedRegion(num_slots, slot_bytes, device=device, pin=pin)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that this process runs on.

    Attributes:
        environment: variables of the process.
        torch_build: which torch there is.
        package_version: of a distribution by name, None where it is not installed.
        gpus_in_sight: GPUs, whether or not torch can use them.
        memlock_bytes: RLIMIT_MEMLOCK, soft and hard; None: unlimited.
        memory_bytes: of the machine or its control group; None: unknown.
        gpu_facts: of a CUDA device.
        numa_nodes: nodes that have memory.
        pages_by_node: where the pages around an address are.
        new_region: slots, bytes of each, the device that copies, and whether to pin; see `PinnedRegion`.
        new_pages: pages on a device.
        open_device: streams and events of a device.
        open_movers: ways of copying.
        clock: seconds, monotonic.
    """

    environment: Mapping[str, str]
    torch_build: Callable[[], TorchBuild] = torch_build
    package_version: Callable[[str], str | None] = package_version
    gpus_in_sight: Callable[[], tuple[Sighting, ...]] = gpus_in_sight
    memlock_bytes: Callable[[], tuple[int | None, int | None]] = memlock_bytes
    memory_bytes: Callable[[], int | None] = memory_bytes
    gpu_facts: Callable[[torch.device], GpuFacts] = gpu_facts
    numa_nodes: Callable[[], frozenset[int]] = LinuxNuma().nodes
    pages_by_node: Callable[[int], Mapping[int, int]] = pages_by_node
    new_region: Callable[[int, int, torch.device, Literal["on", "off"]], PinnedRegion] = _new_region
    new_pages: Callable[[Pages, torch.device], CopyPlan] = Pages.plan_on
    open_device: Callable[[torch.device], Device] = device_for
    open_movers: MoversOpener = open_movers
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def this(cls) -> Machine:
        """The one that this process runs on."""
        return cls(os.environ)
