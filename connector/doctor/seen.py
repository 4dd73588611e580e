"""What is examined of the device path, and what was seen of it: plain values, no judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvsluice.connector.config import HostTierConfig, OffloadConfig
from kvsluice.connector.doctor.machine import Sighting, TorchBuild
from kvsluice.connector.doctor.pages import MAX_REGION_BYTES, Pages
from kvsluice.connector.doctor.report import one_line
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.movers import STAGING_BYTES
from kvsluice.kernels.ways import CopyChoice, CopySetting, WayMeasured
from kvsluice.tiers.errors import ConfigError

__all__ = [
    "DIRECTIONS",
    "CopiesSeen",
    "Refusal",
    "RegionSeen",
    "Seen",
    "Wanted",
    "rate_of",
    "share_of_plain",
    "unusable_because",
]

DIRECTIONS = ("stores", "loads")
"""Out of the pages and into them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be examined.

    Attributes:
        device: None takes the first CUDA device, or the CPU where there is none.
        pages: the engine's pages.
        device_copy, device_staging_bytes, pin_memory: as in the configuration.
        staging_bytes: of host memory for chunks in transit.
        host_bytes: of the host tier, which shares the region; 0 without one.

    Raises:
        ConfigError: a device that is neither the CPU nor a CUDA device; `staging_bytes` holds no chunk.
    """

    device: torch.device | None = None
    pages: Pages = field(default_factory=Pages)
    device_copy: CopySetting = "auto"
    device_staging_bytes: int = STAGING_BYTES
    pin_memory: Literal["auto", "on", "off"] = "auto"
    staging_bytes: int = 1 << 30
    host_bytes: int = 0

    def __post_init__(self) -> None:
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {str(self.device)!r}: only cpu and cuda are supported")
        if self.staging_bytes < self.pages.slot_bytes:
            raise ConfigError(
                f"staging_bytes {self.staging_bytes} holds no chunk: one takes {self.pages.slot_bytes} bytes with the"
                f" pages that are looked at ({self.pages.page_bytes} bytes, {self.pages.num_layers} layers); tell the"
                " engine's by --page-bytes and --layers, or raise it"
            )

    @classmethod
    def by(cls, config: OffloadConfig, pages: Pages, device: torch.device | None = None) -> Wanted:
        """What `config` asks for."""
        first = config.tiers[0]
        return cls(
            device=device,
            pages=pages,
            device_copy=config.device_copy,
            device_staging_bytes=config.device_staging_bytes,
            pin_memory=config.pin_memory,
            staging_bytes=config.staging_bytes,
            host_bytes=first.capacity if isinstance(first, HostTierConfig) else 0,
        )

    @property
    def num_slots(self) -> int:
        """Slots of the region that is tried: the staging's, up to `MAX_REGION_BYTES`."""
        return min(self.staging_bytes, MAX_REGION_BYTES) // self.pages.slot_bytes

    @property
    def region_bytes(self) -> int:
        """Of the region that an engine would have."""
        return self.staging_bytes + self.host_bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why memory was not pinned.

    Attributes:
        no_driver: there was no driver to ask, or no cuda-bindings to ask it with.
    """

    text: str
    no_driver: bool


@dataclass(frozen=True, slots=True)
class RegionSeen:
    """A region that was mapped, where that was wanted registered, and given back.

    Attributes:
        register_s, release_s: what that took; None where it was not registered.
        refusal: None where it was registered, or nobody asked.
        numa_node: the node that its pages were asked to come from.
        pages_by_node: where they came from; empty where nobody says.
    """

    num_bytes: int
    pinned: bool
    refusal: Refusal | None = None
    register_s: float | None = None
    release_s: float | None = None
    numa_node: int | None = None
    pages_by_node: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopiesSeen:
    """Chunks that were copied on trial.

    Attributes:
        choices: stores and loads: the way that is taken and what was measured; None where nothing could be.
        refused: why the way that the configuration names cannot be had.
        best: what would be taken if nothing were named, where something is.
        failed: what ended the trial.
        out_of_memory: of the GPU, and that is why it ended.
        same_bytes: whether a chunk came back with the bytes it went with; None where it did not get so far.
        queue_s: host time that queueing one chunk takes, stores and loads; None on the CPU, where it is the copy.
    """

    choices: tuple[CopyChoice, CopyChoice] | None = None
    refused: str | None = None
    best: tuple[CopyChoice, CopyChoice] | None = None
    failed: str | None = None
    out_of_memory: bool = False
    same_bytes: bool | None = None
    queue_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """All that was seen.

    Attributes:
        device: what was examined; None where the device that was asked for is not there.
        visible_devices: CUDA_VISIBLE_DEVICES, None where it is not set.
        packages: versions by distribution, None for one that is not installed.
        memlock_bytes: RLIMIT_MEMLOCK, soft and hard; None: unlimited.
        memory_bytes: of the machine or its control group; None: unknown.
        gpu: before the copies; None on the CPU.
        busy_gpu: right after them, while its link is still awake; None where none were made.
        numa_nodes: nodes that have memory.
        region: None where none could be mapped, or none was tried.
        unmapped: why none could be mapped.
    """

    device: torch.device | None
    torch: TorchBuild
    sightings: tuple[Sighting, ...]
    visible_devices: str | None
    packages: Mapping[str, str | None]
    memlock_bytes: tuple[int | None, int | None]
    memory_bytes: int | None
    numa_nodes: frozenset[int]
    gpu: GpuFacts | None = None
    busy_gpu: GpuFacts | None = None
    region: RegionSeen | None = None
    unmapped: str | None = None
    copies: CopiesSeen | None = None

    @property
    def link(self) -> GpuFacts | None:
        """The facts whose link was read while it was awake, as far as there are any."""
        return self.busy_gpu or self.gpu


def rate_of(choice: CopyChoice) -> float | None:
    """Bytes per second of the way that is taken; None where it was not measured."""
    return next((one.bytes_per_s for one in choice.measured if one.way == choice.way), None)


def share_of_plain(choice: CopyChoice, bytes_per_s: float | None) -> float | None:
    """A rate beside that of the plain copy; None where one of them was not measured."""
    plain = choice.plain_bytes_per_s
    return bytes_per_s / plain if plain and bytes_per_s is not None else None


def unusable_because(one: WayMeasured) -> str | None:
    """Why a way cannot be had, one line that does not repeat its name; None where it can."""
    return None if one.unusable is None else one_line(one.unusable).removeprefix(f"copying by {one.way}: ")
