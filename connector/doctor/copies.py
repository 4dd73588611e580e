"""Chunks copied on trial: every way beside a plain copy, and one chunk there and back.

On a GPU the ways are measured by what chooses between them at start. On the CPU there is one way, which is
measured here beside a memcpy.
"""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from kvsluice.connector.doctor.machine import Machine
from kvsluice.connector.doctor.report import one_line
from kvsluice.connector.doctor.seen import CopiesSeen, Wanted
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.chooser import Movers
from kvsluice.kernels.device import Device
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.movers import Mover
from kvsluice.kernels.operations import ChunkCopy, Direction
from kvsluice.kernels.trial import finish
from kvsluice.kernels.ways import CopyChoice, CopySetting, Way, WayMeasured

__all__ = ["bytes_come_back", "measure_host", "queue_seconds", "try_copies"]

_ROUNDS: Final = 5
_ROUND_BYTES: Final = 16 << 20
"""Of each copy in a round at least: some milliseconds, which a clock can tell."""
_MOST_CHUNKS: Final = 256
"""But no more calls than that, which take as long whatever a chunk holds."""


def try_copies(wanted: Wanted, device: torch.device, scratch: torch.Tensor, machine: Machine) -> CopiesSeen:
    """Copy chunks between new pages on `device` and host memory; takes up to some seconds.

    Args:
        scratch: host memory for a chunk at least, uint8; its bytes are lost.
    """
    trial = _Trial(wanted, machine)
    try:
        return trial.run(device, scratch[: wanted.pages.chunk_bytes])
    except RuntimeError as error:  # what torch and the driver raise, and our own for a way that cannot be had
        return replace(trial.seen, failed=one_line(error), out_of_memory=isinstance(error, torch.cuda.OutOfMemoryError))


class _Trial:
    """Fills in `seen` as it goes, so that what came before a failure is told, too."""

    def __init__(self, wanted: Wanted, machine: Machine) -> None:
        self.seen = CopiesSeen()
        self._wanted = wanted
        self._machine = machine

    def run(self, torch_device: torch.device, chunk: torch.Tensor) -> CopiesSeen:
        plan = self._machine.new_pages(self._wanted.pages, torch_device)
        device = self._machine.open_device(torch_device)
        device.bind_thread()
        named = self._wanted.device_copy
        movers: Movers | None = None
        if named != "auto":
            try:
                movers = self._open(plan, device, named, chunk)
            except DeviceCopyError as error:
                self.seen = replace(self.seen, refused=one_line(error))
        if torch_device.type == "cpu":
            movers = movers or self._open(plan, device, "auto", chunk)
            self.seen = replace(self.seen, choices=measure_host(plan, chunk, self._machine.clock))
        else:
            measured = self._open(plan, device, "auto", chunk)
            choices = measured.choices
            if movers is not None:
                choices = (
                    replace(choices[0], way=movers.choices[0].way),
                    replace(choices[1], way=movers.choices[1].way),
                )
                self.seen = replace(self.seen, best=measured.choices)
            self.seen = replace(self.seen, choices=choices)
            movers = movers or measured
        same_bytes = bytes_come_back(plan, movers, device, chunk, self._machine.clock)
        self.seen = replace(self.seen, same_bytes=same_bytes)
        if torch_device.type != "cpu":
            queue_s = queue_seconds(plan, movers, device, chunk, self._machine.clock)
            self.seen = replace(self.seen, queue_s=queue_s)
        return self.seen

    def _open(self, plan: CopyPlan, device: Device, setting: CopySetting, chunk: torch.Tensor) -> Movers:
        return self._machine.open_movers(
            plan,
            device,
            setting=setting,
            staging_bytes=self._wanted.device_staging_bytes,
            scratch=chunk,
            clock=self._machine.clock,
        )


def measure_host(plan: CopyPlan, chunk: torch.Tensor, clock: Callable[[], float]) -> tuple[CopyChoice, CopyChoice]:
    """Gather and scatter in host memory beside a memcpy of the same bytes, taking turns; the best round counts.

    Args:
        plan: pages in host memory.
        chunk: uint8 (plan.num_bytes,); its bytes are lost.
    """
    copy = HostCopy(plan)
    block_ids = _block_ids(plan)
    other = torch.ones_like(chunk)
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: ctypes.memmove(chunk.data_ptr(), other.data_ptr(), plan.num_bytes),
        "out": lambda: copy.gather(block_ids, chunk),
        "in": lambda: copy.scatter(block_ids, chunk),
    }
    times = min(_MOST_CHUNKS, max(1, _ROUND_BYTES // plan.num_bytes))
    best: dict[str, float] = dict.fromkeys(runs, 0.0)
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start_s = clock()
            for _ in range(times):
                run()
            best[name] = max(best[name], times * plan.num_bytes / max(clock() - start_s, 1e-9))
    way = Way("host")

    def choice(direction: Direction) -> CopyChoice:
        return CopyChoice(direction, way, best["plain"], (WayMeasured(way, best[direction]),))

    return choice("out"), choice("in")


def bytes_come_back(
    plan: CopyPlan, movers: Movers, device: Device, chunk: torch.Tensor, clock: Callable[[], float]
) -> bool:
    """Whether a chunk of random bytes is the same in host memory, and again in pages that were emptied meanwhile.

    Args:
        plan: pages, whose bytes are lost.
        chunk: uint8 (plan.num_bytes,) in host memory; its bytes are lost.

    Raises:
        RuntimeError: what the device failed with, `DeviceCopyError` where that is late.
    """
    block_ids = _block_ids(plan)
    generator = torch.Generator(plan.device).manual_seed(plan.num_bytes)
    for item in plan.paged:
        item.tensor.random_(generator=generator)
    sent = _payload(plan, block_ids)
    chunk.zero_()
    _move(movers.out, block_ids, chunk, device, clock)
    if not torch.equal(chunk, sent.cpu()):
        return False
    for item in plan.paged:
        item.tensor.zero_()
    _move(movers.into, block_ids, chunk, device, clock)
    others = sorted(set(range(plan.num_pool_blocks)) - set(block_ids))
    return torch.equal(_payload(plan, block_ids), sent) and not bool(_payload(plan, others).any())


def queue_seconds(
    plan: CopyPlan, movers: Movers, device: Device, chunk: torch.Tensor, clock: Callable[[], float]
) -> tuple[float, float]:
    """Host time that queueing a chunk takes, out and in: the median of some, one at a time."""
    block_ids = _block_ids(plan)

    def median(mover: Mover) -> float:
        return statistics.median(_move(mover, block_ids, chunk, device, clock) for _ in range(_ROUNDS))

    return median(movers.out), median(movers.into)


def _block_ids(plan: CopyPlan) -> list[int]:
    return random.Random(plan.num_bytes).sample(range(plan.num_pool_blocks), plan.num_blocks)


def _payload(plan: CopyPlan, block_ids: Sequence[int]) -> torch.Tensor:
    """Those blocks as a chunk keeps them, by torch's own indexing."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=plan.device)
    return torch.cat([item.tensor.index_select(item.block_axis, ids).flatten() for item in plan.paged])


def _move(
    mover: Mover, block_ids: Sequence[int], chunk: torch.Tensor, device: Device, clock: Callable[[], float]
) -> float:
    """Copy one chunk and wait for it; the seconds that queueing it took."""
    start_s = clock()
    copy = ChunkCopy(tuple(block_ids), chunk)
    submission = mover.submit((device.compute_event(),), [copy])
    queued_s = clock() - start_s
    finish(mover, copy, [submission], clock)
    return queued_s
