"""A machine with a GPU as the doctor sees it, and what a test asks of its findings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from kvsluice.connector.doctor import DevicePath, Finding, Machine, Pages, Wanted, examine_device_path
from kvsluice.connector.doctor.machine import (
    Sighting,
    TorchBuild,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.chooser import Movers
from kvsluice.kernels.device import CpuDevice, Device
from kvsluice.kernels.driver import NO_DRIVER, DriverError
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.movers import DirectMover
from kvsluice.kernels.operations import Direction
from kvsluice.kernels.ways import CopyChoice, CopySetting, Way, WayMeasured, choose

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


def found(section: DevicePath, name: str) -> Finding:
    (finding,) = [finding for finding in section.findings if finding.name == name]
    return finding


def levels(section: DevicePath) -> dict[str, str]:
    """What is not as it should be, by name."""
    return {finding.name: finding.level for finding in section.findings if finding.level != "ok"}


def levels_but_rates(section: DevicePath) -> dict[str, str]:
    """The same where this machine's own memory was measured, which is as fast as it is."""
    return {name: level for name, level in levels(section).items() if name not in ("stores", "loads")}
