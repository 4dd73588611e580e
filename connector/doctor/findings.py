"""From what was seen to findings: software, GPU, link and memory. No question is asked here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvsluice.connector.calibrate.units import format_seconds, format_size
from kvsluice.connector.doctor.findings_copies import BATCHED_CUDA, copy_findings, format_gb_per_s, lacks_batched_copy
from kvsluice.connector.doctor.report import Finding, Level
from kvsluice.connector.doctor.seen import Seen, Wanted
from kvsluice.kernels.gpu import GpuFacts

__all__ = ["findings_of"]

_INSTALL: Final = "pip install 'kvsluice[gpu]'"
_COST: Final = {
    "cuda-bindings": "host memory cannot be pinned, and the driver's batched copy cannot be had",
    "triton": "there is no kernel for small pages",
    "nvidia-ml-py": "neither the PCIe link nor the driver's version can be read",
}
"""By distribution, what its absence costs."""
_LINK_SHARE: Final = 0.6
"""Of the link's raw rate a plain copy gets at least on a machine that is in order. A guess: packet headers leave
some 80 %, as 50 GB/s of 63 published for PCIe Gen5."""
_NEAR: Final = 0.95
"""Of a region's pages so many on the GPU's node are all of them."""


def findings_of(wanted: Wanted, seen: Seen) -> tuple[Finding, ...]:
    """What is to be told, in order."""
    found = [_torch(wanted, seen), *_device(wanted, seen), *_packages(seen)]
    if seen.gpu is not None:
        found += [*_driver(seen.gpu), *_facts(seen.gpu), *_link(seen)]
    if seen.device is not None:
        found += [_memory(wanted, seen), _memlock(seen), _region(wanted, seen)]
    if seen.gpu is not None:
        found += _numa(seen, seen.gpu)
    if seen.copies is not None:
        found += copy_findings(wanted, seen, seen.copies)
    return tuple(found)


# ---- software --------------------------------------------------------------------------------


def _torch(wanted: Wanted, seen: Seen) -> Finding:
    build = seen.torch
    if build.num_devices:
        return Finding("torch", "ok", f"{build.version}, built for CUDA {build.cuda}, finds {_gpus(build.num_devices)}")
    by_nvml = [sighting for sighting in seen.sightings if sighting.by == "NVML"]
    # The driver offers it to this process, and torch does not take it; unless nobody wants it.
    level: Level = "problem" if by_nvml and not _cpu_wanted(wanted) else "note"
    if build.cuda is None:
        text = f"{build.version}, built without CUDA"
        if by_nvml:
            text += f", though this machine has {by_nvml[0].name}: the CPU build of torch is installed"
            return Finding("torch", level, text, "install torch's CUDA build into this environment")
        if seen.sightings:
            text += f"; an NVIDIA GPU is in PCI slot {seen.sightings[0].name}"
            remedy = "to use it, install torch's CUDA build, and give the container the GPU"
            return Finding("torch", "note", text, remedy)
        return Finding("torch", "ok", text)
    text = f"{build.version}, built for CUDA {build.cuda}, finds no GPU: {build.unavailable}"
    if seen.visible_devices is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {seen.visible_devices!r}: unset it, or name the GPU's number"
        return Finding("torch", level, text, remedy)
    if by_nvml:
        remedy = f"the driver has {by_nvml[0].name}: update it, or install a torch that is built for its CUDA"
        return Finding("torch", level, text, remedy)
    if seen.sightings:
        text += f"; an NVIDIA GPU is in PCI slot {seen.sightings[0].name}"
        remedy = "install NVIDIA's driver; a container needs its toolkit and docker run --gpus all"
        return Finding("torch", "note", text, remedy)
    return Finding("torch", "note", text)


def _device(wanted: Wanted, seen: Seen) -> Iterator[Finding]:
    gpu = seen.gpu
    if seen.device is None:
        there = _gpus(seen.torch.num_devices)
        remedy = f"the last one is cuda:{seen.torch.num_devices - 1}"
        if not seen.torch.num_devices:
            remedy = "see torch above"
            if seen.torch.cuda is None:
                remedy = "install torch's CUDA build"
                if not seen.sightings:
                    remedy = f"none is in sight, either: give this process a GPU, and {remedy}"
            remedy += "; --device cpu examines the path without a GPU"
        yield Finding("device", "problem", f"{wanted.device} is not there: torch finds {there}", remedy)
    elif gpu is None:
        asked = _cpu_wanted(wanted)
        text = "the path in host memory, as asked for" if asked else "no GPU: the path in host memory is examined"
        yield Finding("device", "ok" if asked else "note", text)
    else:
        parts = [gpu.name or "a GPU without a name"]
        if gpu.memory_bytes is not None:
            parts.append(format_size(gpu.memory_bytes))
        if gpu.num_sms is not None:
            parts.append(f"{gpu.num_sms} multiprocessors")
        if gpu.pci_bus_id is not None:
            parts.append(gpu.pci_bus_id)
        yield Finding("device", "ok", f"{seen.device}: {', '.join(parts)}")


def _packages(seen: Seen) -> Iterator[Finding]:
    if seen.device is not None and seen.gpu is None:
        versions = ", ".join(f"{name} {version or 'absent'}" for name, version in seen.packages.items())
        yield Finding("packages", "ok", f"{versions}; only a GPU needs them")
        return
    for name, version in seen.packages.items():
        if version is not None:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "note", f"not installed: {_COST.get(name, 'part of the extra gpu')}", _INSTALL)


def _driver(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.driver_version is None and gpu.cuda_version is None:
        return  # the facts' own notes say why
    text = f"{gpu.driver_version or 'version unknown'}, CUDA {gpu.cuda_version or 'unknown'}"
    if lacks_batched_copy(gpu):
        first = ".".join(map(str, BATCHED_CUDA))
        yield Finding(
            "driver",
            "note",
            f"{text}: there is no batched copy before CUDA {first}",
            "update NVIDIA's driver to branch 570 or newer",
        )
    else:
        yield Finding("driver", "ok", text)


def _facts(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.notes:
        lacking = gpu.pcie_width is None or gpu.driver_version is None
        yield Finding("gpu facts", "note" if lacking else "ok", "; ".join(gpu.notes))


def _gpus(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")


def _cpu_wanted(wanted: Wanted) -> bool:
    return wanted.device is not None and wanted.device.type == "cpu"


# ---- the link --------------------------------------------------------------------------------


def _link(seen: Seen) -> Iterator[Finding]:
    gpu, plain = seen.link, _plain_bytes_per_s(seen)
    if gpu is None or gpu.pcie_generation is None or gpu.pcie_width is None:
        return  # the facts' own notes say why
    text = f"generation {gpu.pcie_generation}"
    if gpu.pcie_max_generation is not None:
        text += f" of {gpu.pcie_max_generation}"
    text += f", {gpu.pcie_width}"
    text += f" of {gpu.pcie_max_width} lanes" if gpu.pcie_max_width is not None else " lanes"
    now, most = gpu.pcie_bytes_per_s, gpu.pcie_max_bytes_per_s
    if now is not None:
        text += f": {format_gb_per_s(now)} each way at most"
    # Of these lanes, awake: an idle link is read with fewer transfers per second, hardly ever with fewer lanes.
    lanes = replace(gpu, pcie_generation=gpu.pcie_max_generation or gpu.pcie_generation).pcie_bytes_per_s
    if plain is not None and most is not None and plain > most:
        yield Finding("pcie", "ok", f"{text}; copies take a faster link than this: {format_gb_per_s(plain)}")
        return
    if (
        gpu.pcie_max_width is not None
        and gpu.pcie_width < gpu.pcie_max_width
        and not (plain is not None and lanes is not None and plain > lanes)
    ):
        remedy = "reseat the card; look for a riser, or for a slot that shares its lanes"
        yield Finding("pcie", "problem", f"{text}; the GPU and its slot can do {gpu.pcie_max_width}", remedy)
        now = lanes
    elif now is not None and plain is not None and plain > now:
        yield Finding("pcie", "ok", f"{text}; it copied at {format_gb_per_s(plain)}, so it had gone idle when asked")
        now = most
    elif seen.busy_gpu is None:
        yield Finding("pcie", "ok", f"{text}, read while idle")
    elif gpu.pcie_max_generation is not None and gpu.pcie_generation < gpu.pcie_max_generation:
        remedy = "look for a limit on the link's speed in the firmware's setup, and for a riser"
        yield Finding("pcie", "note", f"{text}, right after copying", remedy)
    else:
        yield Finding("pcie", "ok", text)
    if now is not None and plain is not None:
        yield _plain_copy(seen, plain, now)


def _plain_copy(seen: Seen, plain: float, link: float) -> Finding:
    text = f"a plain copy gets {format_gb_per_s(plain)}, {plain / link:.0%} of what the link can do"
    if plain >= link * _LINK_SHARE:
        return Finding("plain copy", "ok", text)
    if seen.region is not None and not seen.region.pinned:
        return Finding("plain copy", "note", f"{text}: the memory is not pinned", "see registration")
    remedy = "see numa; look for other traffic on the link, a PCIe switch that is shared, an IOMMU that translates"
    return Finding("plain copy", "note", text, remedy)


def _plain_bytes_per_s(seen: Seen) -> float | None:
    """The faster direction's plain copy."""
    choices = seen.copies.choices if seen.copies is not None else None
    rates = [choice.plain_bytes_per_s for choice in choices or () if choice.plain_bytes_per_s is not None]
    return max(rates, default=None)


# ---- host memory -----------------------------------------------------------------------------


def _memory(wanted: Wanted, seen: Seen) -> Finding:
    text = f"staging and host tier take {format_size(wanted.region_bytes)}"
    if seen.memory_bytes is None:
        return Finding("memory", "ok", text)
    text += f" of {format_size(seen.memory_bytes)} that this machine or container has"
    if wanted.region_bytes < seen.memory_bytes:
        return Finding("memory", "ok", text)
    remedy = "lower the host tier's capacity or staging_bytes: an engine would not start, or be ended"
    return Finding("memory", "problem", text, remedy)


def _memlock(seen: Seen) -> Finding:
    soft, hard = ("unlimited" if limit is None else format_size(limit) for limit in seen.memlock_bytes)
    text = f"RLIMIT_MEMLOCK {soft}" + (f", hard limit {hard}" if hard != soft else "")
    region = seen.region
    if region is not None and region.pinned and seen.memlock_bytes[0] is not None:
        held = "within it" if region.num_bytes <= seen.memlock_bytes[0] else "beyond it: the driver does not heed it"
        text += f"; {format_size(region.num_bytes)} were pinned {held}"
    return Finding("memlock", "ok", text)


def _region(wanted: Wanted, seen: Seen) -> Finding:
    region = seen.region
    if region is None:
        return Finding(
            "registration", "problem", f"{seen.unmapped}", "lower staging_bytes, or raise the limit (ulimit -v)"
        )
    size = format_size(region.num_bytes)
    if region.pinned:
        text = f"{size} pinned in {format_seconds(region.register_s or 0.0)}"
        text += f", released in {format_seconds(region.release_s or 0.0)}"
        if wanted.region_bytes > region.num_bytes:
            whole_s = (region.register_s or 0.0) * wanted.region_bytes / region.num_bytes
            text += f"; the {format_size(wanted.region_bytes)} of an engine take about {format_seconds(whole_s)}"
        return Finding("registration", "ok", text)
    if seen.gpu is None:
        text = f"{size}, pageable: there is no GPU to pin it for"
        if wanted.pin_memory == "on":
            return Finding("registration", "problem", f"pin_memory is 'on': {text}", "set pin_memory to 'auto'")
        return Finding("registration", "ok", text)
    if region.refusal is None:
        text = f"{size}, pageable: pin_memory is 'off', and copies are slower"
        return Finding("registration", "note", text, "set pin_memory to 'auto'")
    level: Level = "problem" if wanted.pin_memory == "on" else "note"
    text = f"{size} could not be pinned: {region.refusal.text}"
    if region.refusal.no_driver:
        remedy = f"{_INSTALL}; the driver's library (libcuda) has to be in reach"
    else:
        remedy = (
            "raise RLIMIT_MEMLOCK (ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a"
            " systemd unit), or lower staging_bytes"
        )
    consequence = "an engine would not start" if level == "problem" else "copies are slower"
    return Finding("registration", level, f"{text}; {consequence}", remedy)


def _numa(seen: Seen, gpu: GpuFacts) -> Iterator[Finding]:
    region = seen.region
    if region is None:
        return
    if len(seen.numa_nodes) < 2:
        yield Finding("numa", "ok", "one memory node")
        return
    nodes = f"nodes {', '.join(map(str, sorted(seen.numa_nodes)))}"
    if gpu.numa_node is None:
        yield Finding(
            "numa",
            "note",
            f"{nodes}; which one is next to the GPU could not be found out",
            "nvidia-smi topo -m tells it; start the engine under numactl --preferred=NODE",
        )
        return
    pages = sum(region.pages_by_node.values())
    if pages:
        share = region.pages_by_node.get(gpu.numa_node, 0) / pages
        near, where = share >= _NEAR, f"{share:.0%} of the region's pages are there"
    elif region.numa_node is not None:
        near, where = region.numa_node == gpu.numa_node, f"the region prefers node {region.numa_node}"
    else:
        near, where = False, "the region could not be placed"
    text = f"{nodes}; the GPU is next to node {gpu.numa_node}, {where}"
    if near:
        yield Finding("numa", "ok", text)
    else:
        yield Finding(
            "numa",
            "note",
            f"{text}: copies cross between the sockets",
            f"start the engine under numactl --preferred={gpu.numa_node}, or let it place its memory (docker run"
            " --cap-add SYS_NICE); see whether that node has memory left",
        )
