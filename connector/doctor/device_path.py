"""The way between a GPU and host memory, as this machine has it; on a machine without a GPU the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from kvsluice.connector.calibrate.units import format_size
from kvsluice.connector.doctor.copies import try_copies
from kvsluice.connector.doctor.findings import findings_of
from kvsluice.connector.doctor.findings_copies import why_chosen
from kvsluice.connector.doctor.machine import Machine, TorchBuild
from kvsluice.connector.doctor.report import Finding, one_line
from kvsluice.connector.doctor.seen import (
    DIRECTIONS,
    CopiesSeen,
    Refusal,
    RegionSeen,
    Seen,
    Wanted,
    rate_of,
    share_of_plain,
    unusable_because,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels.driver import NO_DRIVER, DriverError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.ways import CopyChoice
from kvsluice.tiers.errors import ConfigError

__all__ = ["PACKAGES", "DevicePath", "examine_device_path"]

PACKAGES: Final = ("cuda-bindings", "triton", "nvidia-ml-py")
"""The distributions of the extra `gpu`."""

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DevicePath:
    """A section of the report, see `Section`."""

    wanted: Wanted
    seen: Seen
    findings: tuple[Finding, ...]

    @property
    def name(self) -> str:
        """Its key in the document."""
        return "device_path"

    def document(self) -> dict[str, object]:
        """What was seen as JSON values; what could not be found out, or was not tried, is null."""
        seen, pages = self.seen, self.wanted.pages
        soft_bytes, hard_bytes = seen.memlock_bytes
        return {
            "device": None if seen.device is None else str(seen.device),
            "settings": {
                "device_copy": self.wanted.device_copy,
                "device_staging_bytes": self.wanted.device_staging_bytes,
                "pin_memory": self.wanted.pin_memory,
                "region_bytes": self.wanted.region_bytes,
            },
            "pages": {**asdict(pages), "chunk_bytes": pages.chunk_bytes},
            "torch": asdict(seen.torch),
            "gpus_in_sight": [asdict(sighting) for sighting in seen.sightings],
            "packages": dict(seen.packages),
            "memlock": {
                "soft_bytes": "unlimited" if soft_bytes is None else soft_bytes,
                "hard_bytes": "unlimited" if hard_bytes is None else hard_bytes,
            },
            "memory_bytes": seen.memory_bytes,
            "gpu": _gpu_document(seen.gpu, seen.busy_gpu),
            "numa_nodes": sorted(seen.numa_nodes),
            "region": _region_document(seen.region),
            "copies": _copies_document(self.wanted, seen.copies),
        }


def examine_device_path(
    wanted: Wanted,
    machine: Machine | None = None,
    *,
    on_step: Callable[[str], None] = lambda step: None,
) -> DevicePath:
    """Look at software, GPU, link and memory, register a region, and copy chunks every way that can be had.

    On a GPU it takes some seconds, some memory there, and up to `MAX_REGION_BYTES` of host memory. All of it
    is given back, except the CUDA context, which lives as long as the process.

    Args:
        machine: stands in for the one that this process runs on.
        on_step: told what comes next, before each step that takes time.
    """
    machine = machine or Machine.this()
    build = machine.torch_build()
    device = _device(wanted.device, build)
    seen = Seen(
        device=device,
        torch=build,
        sightings=machine.gpus_in_sight(),
        visible_devices=machine.environment.get("CUDA_VISIBLE_DEVICES"),
        packages={name: machine.package_version(name) for name in PACKAGES},
        memlock_bytes=machine.memlock_bytes(),
        memory_bytes=machine.memory_bytes(),
        numa_nodes=machine.numa_nodes(),
    )
    if device is not None:
        if device.type == "cuda":
            seen = replace(seen, gpu=machine.gpu_facts(device))
        seen = _with_copies(seen, device, wanted, machine, on_step)
    return DevicePath(wanted, seen, findings_of(wanted, seen))


def _device(wanted: torch.device | None, build: TorchBuild) -> torch.device | None:
    """The device to examine, with its number; None where it is not there."""
    if wanted is None:
        return torch.device("cuda", 0) if build.num_devices else _CPU
    if wanted.type != "cuda":
        return wanted
    number = wanted.index or 0
    return torch.device("cuda", number) if number < build.num_devices else None


def _with_copies(
    seen: Seen, device: torch.device, wanted: Wanted, machine: Machine, on_step: Callable[[str], None]
) -> Seen:
    """The same with a region and copies to and from it."""
    pinning = device.type == "cuda" and wanted.pin_memory != "off"
    size = format_size(wanted.num_slots * wanted.pages.slot_bytes)
    on_step(f"{'pinning' if pinning else 'mapping'} {size} of host memory")
    start_s = machine.clock()
    try:
        region, refusal = _open_region(device, wanted, machine)
    except ConfigError as error:
        return replace(seen, unmapped=one_line(error))
    register_s = machine.clock() - start_s
    try:
        on_step("copying chunks, which takes some seconds on a GPU" if device.type == "cuda" else "copying chunks")
        copies = try_copies(wanted, device, region.tensor(0), machine)
        # An idle link is slow on purpose: it is read while it is still awake.
        busy_gpu = machine.gpu_facts(device) if device.type == "cuda" and copies.choices is not None else None
        found = RegionSeen(
            num_bytes=region.num_slots * region.slot_bytes,
            pinned=region.pinned,
            refusal=refusal,
            register_s=register_s if region.pinned else None,
            numa_node=region.numa_node,
            pages_by_node=machine.pages_by_node(region.tensor(0).data_ptr()),
        )
    finally:
        start_s = machine.clock()
        region.close()
        release_s = machine.clock() - start_s
    if found.pinned:
        found = replace(found, release_s=release_s)
    return replace(seen, region=found, copies=copies, busy_gpu=busy_gpu)


def _open_region(device: torch.device, wanted: Wanted, machine: Machine) -> tuple[PinnedRegion, Refusal | None]:
    """A region, pinned where that is wanted and can be had, and why it is not.

    Raises:
        ConfigError: it cannot be mapped.
    """
    size = (wanted.num_slots, wanted.pages.slot_bytes)
    refusal = None
    if device.type == "cuda" and wanted.pin_memory != "off":
        # "on", whatever is wanted: its error says why it was refused, where "auto" would only log that.
        try:
            return machine.new_region(*size, device, "on"), None
        except ConfigError as error:
            if not isinstance(error.__cause__, DriverError):
                raise
            refusal = Refusal(one_line(error.__cause__), error.__cause__.code == NO_DRIVER)
    return machine.new_region(*size, device, "off"), refusal


# ---- JSON ------------------------------------------------------------------------------------


def _gpu_document(gpu: GpuFacts | None, busy: GpuFacts | None) -> dict[str, object] | None:
    if gpu is None:
        return None
    link = busy or gpu
    return {
        **asdict(gpu),
        "pcie_generation": link.pcie_generation,
        "pcie_width": link.pcie_width,
        "pcie_generation_before": gpu.pcie_generation,
        "pcie_width_before": gpu.pcie_width,
        "pcie_bytes_per_s": link.pcie_bytes_per_s,
        "pcie_max_bytes_per_s": link.pcie_max_bytes_per_s,
    }


def _region_document(region: RegionSeen | None) -> dict[str, object] | None:
    if region is None:
        return None
    return {
        "bytes": region.num_bytes,
        "pinned": region.pinned,
        "refused": None if region.refusal is None else region.refusal.text,
        "register_s": region.register_s,
        "release_s": region.release_s,
        "numa_node": region.numa_node,
        "pages_by_node": {str(node): count for node, count in sorted(region.pages_by_node.items())},
    }


def _copies_document(wanted: Wanted, copies: CopiesSeen | None) -> dict[str, object] | None:
    if copies is None:
        return None
    document: dict[str, object] = {
        "refused": copies.refused,
        "failed": copies.failed,
        "same_bytes": copies.same_bytes,
    }
    for at, name in enumerate(DIRECTIONS):
        choice = copies.choices[at] if copies.choices is not None else None
        queue_s = copies.queue_s[at] if copies.queue_s is not None else None
        document[name] = None if choice is None else _choice_document(wanted, copies, choice, queue_s)
    return document


def _choice_document(
    wanted: Wanted, copies: CopiesSeen, choice: CopyChoice, queue_s: float | None
) -> dict[str, object]:
    rate = rate_of(choice)
    ways = [
        {
            "way": one.way.name,
            "multiprocessors": one.way.programs,
            "bytes_per_s": one.bytes_per_s,
            "share_of_plain": share_of_plain(choice, one.bytes_per_s),
            "unusable": unusable_because(one),
        }
        for one in choice.measured
    ]
    return {
        "way": choice.way.name,
        "multiprocessors": choice.way.programs,
        "why": why_chosen(wanted, copies, choice),
        "bytes_per_s": rate,
        "plain_bytes_per_s": choice.plain_bytes_per_s,
        "share_of_plain": share_of_plain(choice, rate),
        "queue_s": queue_s,
        "ways": ways,
    }
