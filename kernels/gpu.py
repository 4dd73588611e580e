"""What this machine's GPU is, how it is attached, and which host memory is nearest to it.

Everything here is for reports and for placing memory; nothing depends on it. So nothing raises for a
fact that cannot be had: the fact is None and a note says why.
"""

# ruff: noqa: N802, N803 - the protocols have the names that NVML gave

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

import torch

__all__ = ["PCIE_LANE_BYTES_PER_S", "DeviceProperties", "GpuFacts", "Nvml", "NvmlHandle", "PciInfo", "gpu_facts"]

PCIE_LANE_BYTES_PER_S: Final = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Bytes per second of one lane in one direction, by generation: transfers per second times the line code's
share, as in the PCI Express Base Specification of that generation (8b/10b for 1 and 2, 128b/130b for 3 to 5,
for 6 flits of 256 bytes of which 14 are check codes). A copy gets less: the headers of the packets
come off that."""

_SYS_PCI: Final = Path("/sys/bus/pci/devices")

_AFFINITY_SCOPE_NODE: Final = 0
"""NVML_AFFINITY_SCOPE_NODE."""
_NODE_WORDS: Final = 16
"""Words of 64 nodes each that NVML is asked for: Linux knows at most 1024 nodes."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as CUDA, NVML and the kernel describe it. Any field may be None; `notes` say why.

    An idle GPU trains its link down to save power: `pcie_generation` may read 1 on a card that copies
    at generation 5 a moment later, so ask while it copies, or take the maximum. The width stays.

    Attributes:
        name: such as "NVIDIA H200".
        uuid: NVML's, "GPU-..." or "MIG-...".
        pci_bus_id: as the kernel writes it, "0000:65:00.0".
        pcie_generation, pcie_width: of the link now.
        pcie_max_generation, pcie_max_width: the most that this GPU in this slot can do.
        numa_node: of the host's memory that is nearest to the GPU.
        num_sms: multiprocessors.
        memory_bytes: of the device, or of its MIG instance.
        driver_version: NVIDIA's, such as "580.159.03".
        cuda_version: the newest that the driver can do, such as "13.0".
        notes: one for each thing that could not be found out, or that a reader must know.
    """

    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    numa_node: int | None = None
    num_sms: int | None = None
    memory_bytes: int | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """The link's raw rate in one direction as it runs now, see `PCIE_LANE_BYTES_PER_S`; low while idle."""
        return _link_bytes_per_s(self.pcie_generation, self.pcie_width)

    @property
    def pcie_max_bytes_per_s(self) -> float | None:
        """The same for the most that this GPU in this slot can do."""
        return _link_bytes_per_s(self.pcie_max_generation, self.pcie_max_width)


def _link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    lane = PCIE_LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane is not None and width else None


class DeviceProperties(Protocol):
    """What is used of `torch.cuda.get_device_properties`; where torch has them, `uuid` and `pci_*_id` too."""

    @property
    def name(self) -> str: ...

    @property
    def total_memory(self) -> int: ...

    @property
    def multi_processor_count(self) -> int: ...


class PciInfo(Protocol):
    """What is used of NVML's `nvmlPciInfo_t`."""

    @property
    def domain(self) -> int: ...

    @property
    def bus(self) -> int: ...

    @property
    def device(self) -> int: ...


class NvmlHandle(Protocol):
    """A device as NVML knows it; opaque."""


class Nvml(Protocol):
    """What is used of the module `pynvml` (package nvidia-ml-py). Its functions raise `NVMLError`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str: ...

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> NvmlHandle: ...

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str, /) -> NvmlHandle: ...

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: NvmlHandle, /) -> NvmlHandle: ...

    def nvmlDeviceGetMigMode(self, handle: NvmlHandle, /) -> Sequence[int]: ...

    def nvmlDeviceGetUUID(self, handle: NvmlHandle, /) -> str: ...

    def nvmlDeviceGetPciInfo(self, handle: NvmlHandle, /) -> PciInfo: ...

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: NvmlHandle, /) -> int: ...

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: NvmlHandle, /) -> int: ...

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: NvmlHandle, /) -> int: ...

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: NvmlHandle, /) -> int: ...

    def nvmlDeviceGetNumaNodeId(self, handle: NvmlHandle, /) -> int: ...

    def nvmlDeviceGetMemoryAffinity(self, handle: NvmlHandle, nodeSetSize: int, scope: int, /) -> Iterable[int]: ...


def gpu_facts(
    device: torch.device,
    *,
    properties: DeviceProperties | None = None,
    nvml: Nvml | None = None,
    sys_pci: Path = _SYS_PCI,
) -> GpuFacts:
    """Ask CUDA, NVML and the kernel about one CUDA device. Takes some milliseconds; thread-safe.

    The device is found in NVML by its UUID or its PCI address, since CUDA_VISIBLE_DEVICES renumbers
    the devices for CUDA alone.

    Args:
        device: as torch names it; for any other than a CUDA device nothing is asked.
        properties: stands in for `torch.cuda.get_device_properties(device)`.
        nvml: stands in for the module `pynvml`.
        sys_pci: where the kernel shows its PCI devices.
    """
    if device.type != "cuda":
        return GpuFacts(notes=(f"{device} is not a CUDA device",))
    notes: list[str] = []
    if properties is None:
        try:
            properties = cast("DeviceProperties", torch.cuda.get_device_properties(device))
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            notes.append(f"torch knows nothing of {device}: {error}")
    if nvml is None:
        try:
            nvml = cast("Nvml", importlib.import_module("pynvml"))
        except ImportError as error:
            notes.append(f"NVML is not asked ({error}): pip install kvsluice[gpu]")
    uuid, pci_bus_id = _identity(properties)
    seen = _Seen(uuid=f"GPU-{uuid}" if uuid else None, pci_bus_id=pci_bus_id)
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            notes.append(f"NVML does not start: {error}")
        else:
            try:
                seen = _Questions(nvml, notes).ask_all(uuid, pci_bus_id)
            finally:
                _shut_down(nvml, notes)
    node = seen.numa_node
    if node is None:
        node = _node_of_kernel(seen.pci_bus_id, seen.own_node, sys_pci, notes)
    return GpuFacts(
        name=properties.name if properties else None,
        uuid=seen.uuid,
        pci_bus_id=seen.pci_bus_id,
        pcie_generation=seen.generation,
        pcie_width=seen.width,
        pcie_max_generation=seen.max_generation,
        pcie_max_width=seen.max_width,
        numa_node=node,
        num_sms=properties.multi_processor_count if properties else None,
        memory_bytes=properties.total_memory if properties else None,
        driver_version=seen.driver_version,
        cuda_version=seen.cuda_version,
        notes=tuple(notes),
    )


def _shut_down(nvml: Nvml, notes: list[str]) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        notes.append(f"NVML does not shut down: {error}")


def _identity(properties: DeviceProperties | None) -> tuple[str | None, str | None]:
    """UUID without a prefix, and PCI address, where this version of torch tells them."""
    uuid = getattr(properties, "uuid", None)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    known = isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int)
    bare = str(uuid).removeprefix("GPU-").removeprefix("MIG-") if uuid is not None else None
    return bare, f"{domain:04x}:{bus:02x}:{slot:02x}.0" if known else None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What NVML said. `own_node`: the node that the GPU's own memory is to the kernel, where it is one."""

    uuid: str | None = None
    pci_bus_id: str | None = None
    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None
    numa_node: int | None = None
    own_node: int | None = None
    driver_version: str | None = None
    cuda_version: str | None = None


class _Questions:
    """Questions to NVML, each of which may stay without an answer."""

    def __init__(self, nvml: Nvml, notes: list[str]) -> None:
        self._nvml = nvml
        self._notes = notes

    def ask_all(self, uuid: str | None, pci_bus_id: str | None) -> _Seen:
        nvml, ask = self._nvml, self._ask
        driver = ask("driver version", nvml.nvmlSystemGetDriverVersion)
        cuda = ask("CUDA version", nvml.nvmlSystemGetCudaDriverVersion_v2)
        seen = _Seen(
            uuid=f"GPU-{uuid}" if uuid else None,
            pci_bus_id=pci_bus_id,
            driver_version=driver,
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda is not None else None,
        )
        found = self._find(uuid, pci_bus_id)
        if found is None:
            return seen
        named, gpu = found
        pci = ask("PCI address", lambda: nvml.nvmlDeviceGetPciInfo(gpu))
        # Only where the GPU's memory is a node of its own (Grace Hopper) has this an answer, and then it is
        # the last place for host memory.
        own_node = self._try(lambda: nvml.nvmlDeviceGetNumaNodeId(gpu))
        return _Seen(
            uuid=ask("UUID", lambda: nvml.nvmlDeviceGetUUID(named)) or seen.uuid,
            pci_bus_id=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci is not None else pci_bus_id,
            generation=ask("PCIe generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
            width=ask("PCIe width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
            max_generation=ask("largest PCIe generation", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
            max_width=ask("largest PCIe width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
            numa_node=self._nearest_node(gpu, own_node),
            own_node=own_node,
            driver_version=seen.driver_version,
            cuda_version=seen.cuda_version,
        )

    def _find(self, uuid: str | None, pci_bus_id: str | None) -> tuple[NvmlHandle, NvmlHandle] | None:
        """The device as CUDA sees it and the whole GPU, which differ for a MIG instance."""
        nvml = self._nvml
        if uuid is not None:
            whole = self._try(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            if whole is not None:
                self._note_mig(whole)
                return whole, whole
            instance = self._try(lambda: nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
            if instance is not None:
                whole = self._ask(
                    "GPU of the MIG instance", lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
                )
                if whole is not None:
                    self._note_mig(whole)
                    return instance, whole
        if pci_bus_id is not None:
            whole = self._try(lambda: nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id))
            if whole is not None:
                self._note_mig(whole)
                return whole, whole
        self._notes.append(f"NVML knows no device with UUID {uuid} or PCI address {pci_bus_id}")
        return None

    def _note_mig(self, gpu: NvmlHandle) -> None:
        mode = self._try(lambda: self._nvml.nvmlDeviceGetMigMode(gpu))
        if mode is not None and mode[0]:
            self._notes.append("MIG is on: the PCIe link is the whole GPU's, shared by all its instances")

    def _nearest_node(self, gpu: NvmlHandle, own_node: int | None) -> int | None:
        words = self._ask(
            "memory affinity",
            lambda: list(self._nvml.nvmlDeviceGetMemoryAffinity(gpu, _NODE_WORDS, _AFFINITY_SCOPE_NODE)),
        )
        nodes = [
            64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if int(word) >> bit & 1
        ]
        nodes = [node for node in nodes if node != own_node]
        if len(nodes) > 1:
            self._notes.append(f"NVML names several nearest NUMA nodes: {nodes}")
        return nodes[0] if len(nodes) == 1 else None

    def _ask(self, what: str, question: Callable[[], _T]) -> _T | None:
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError) as error:  # a function that this pynvml does not have yet
            self._notes.append(f"no {what}: {error}")
            return None

    def _try(self, question: Callable[[], _T]) -> _T | None:
        """The same where no answer is nothing to tell."""
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError):
            return None


def _node_of_kernel(pci_bus_id: str | None, own_node: int | None, sys_pci: Path, notes: list[str]) -> int | None:
    """The node that the kernel names for the PCI slot."""
    if pci_bus_id is None:
        notes.append("no NUMA node: the PCI address is not known")
        return None
    path = sys_pci / pci_bus_id / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError) as error:
        notes.append(f"no NUMA node from the kernel: {error}")
        return None
    if node < 0 or node == own_node:
        notes.append(f"no NUMA node from the kernel: {path} says {node}")
        return None
    return node
