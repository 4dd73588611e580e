"""Which way chunks take between the device and host memory: forced, or measured once at start.

    host      pages are in host memory
    batched   the driver's batched copy, page by page; no multiprocessor
    triton    a kernel gathers pages into staging memory on the device, one copy moves them on
    torch     the same with torch's indexing, or page by page where a page exceeds the staging

A way that is asked for by name is taken or its absence raised. `auto` measures each that can be had, on
scratch memory with the chunk's own page sizes and page count, beside a plain copy of the same bytes, and
takes per direction the one that costs the engine least among the fastest.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from kvsluice.kernels.batched_copy import BatchedCopy, MemcpyBatch, RunCopy
from kvsluice.kernels.device import Device
from kvsluice.kernels.driver import open_driver
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.host_copy import HostCopy
from kvsluice.kernels.movers import ChunkCopy, Direction, DirectMover, Mover, PageKernel, StagedMover, Submission
from kvsluice.kernels.plan import CopyPlan
from kvsluice.kernels.scratch import PlainCopy, scratch_plan
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.triton_pages import DEFAULT_PROGRAMS, TritonPages

__all__ = [
    "MAX_CHUNKS",
    "SUBMISSION_BYTES",
    "CopyChoice",
    "CopySetting",
    "Movers",
    "Way",
    "WayMeasured",
    "choose",
    "max_chunks",
    "open_device_movers",
    "open_movers",
]

_log = logging.getLogger(__name__)

CopySetting = Literal["auto", "torch", "triton", "batched"]
"""What may be asked for."""
MAX_CHUNKS: Final = 32
SUBMISSION_BYTES: Final = 64 << 20
"""One submission on a device carries so many chunks, or so many bytes where that is less: enough that small chunks
fill the link, and little enough, 1.3 ms at 50 GB/s, that a chunk need not wait long for its companions to be over."""
_PROGRAMS: Final = (1, 2, 4)
"""Multiprocessors that the kernel is tried with. Four are 3 % of an H100's 132; twelve, which a kernel that
writes to host memory itself needs for the link, are 9 %."""
_NEARLY: Final = 0.95
"""Rates within so much of the best are equal: of these the way that takes the fewest multiprocessors is best."""
_MEASURE_BYTES: Final = 64 << 20
_MOST_CHUNKS: Final = 256
"""For each way, direction and round, so that small chunks take no longer to measure than large ones."""
_ROUNDS: Final = 3
_PATIENCE_S: Final = 10.0
_SCRATCH_BYTES: Final = 32 << 20
"""At most so much device memory holds scratch pages while ways are measured; it is freed again."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of copying in one direction.

    Attributes:
        name: as in `CopySetting`, or `host`.
        programs: multiprocessors that its kernel takes at most; 0 where the copy engines do all, None where torch
            takes as many as it likes.
    """

    name: str
    programs: int | None = 0

    def __str__(self) -> str:
        return f"{self.name} on {self.programs} SMs" if self.programs else self.name


TORCH: Final = Way("torch", None)


_ALL_WAYS: Final = (Way("batched"), *(Way("triton", programs) for programs in _PROGRAMS), TORCH)
_ABANDONED: Final[list[object]] = []
"""What a device had not given back when nobody waited any longer: kept for the life of the process."""


@dataclass(frozen=True, slots=True)
class WayMeasured:
    """What came of one way: its rate, or why it cannot be had.

    Attributes:
        bytes_per_s: None where it was not measured.
        unusable: None where it could be had.
    """

    way: Way
    bytes_per_s: float | None
    unusable: str | None = None


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """The way that one direction takes, and what speaks for it.

    Attributes:
        plain_bytes_per_s: a contiguous copy of as many bytes over the same link; None where none was measured.
        measured: every way that was looked at, the chosen one included.
    """

    direction: Direction
    way: Way
    plain_bytes_per_s: float | None = None
    measured: tuple[WayMeasured, ...] = ()

    def __str__(self) -> str:
        told = [
            f"{one.way} {one.bytes_per_s / 1e9:.1f} GB/s"
            if one.bytes_per_s is not None
            else f"{one.way}: {one.unusable}"
            for one in self.measured
        ]
        if self.plain_bytes_per_s is not None:
            told.append(f"plain copy {self.plain_bytes_per_s / 1e9:.1f} GB/s")
        name = "stores" if self.direction == "out" else "loads"
        return f"{name} by {self.way}" + (f" ({', '.join(told)})" if told else "")


@dataclass(frozen=True, slots=True)
class Movers:
    """Both directions, and how they were chosen."""

    out: Mover
    into: Mover
    choices: tuple[CopyChoice, CopyChoice]
    staging_bytes: int


def max_chunks(plan: CopyPlan) -> int:
    """Chunks in one submission on a device."""
    return max(1, min(MAX_CHUNKS, SUBMISSION_BYTES // plan.num_bytes))


def choose(measured: Sequence[WayMeasured]) -> Way:
    """The way that takes the fewest multiprocessors among those nearly as fast as the fastest.

    Raises:
        DeviceCopyError: none could be had; the message says why for each.
    """
    rates = {one.way: one.bytes_per_s for one in measured if one.bytes_per_s is not None}
    if not rates:
        why = "; ".join(f"{one.way}: {one.unusable}" for one in measured)
        raise DeviceCopyError(f"no way to copy between device and host memory: {why}")
    enough = _NEARLY * max(rates.values())
    return min((way for way, rate in rates.items() if rate >= enough), key=lambda way: (_taken(way), -rates[way]))


def _taken(way: Way) -> float:
    return math.inf if way.programs is None else way.programs


def open_movers(
    plan: CopyPlan,
    device: Device,
    *,
    setting: CopySetting = "auto",
    staging_bytes: int = 64 << 20,
    scratch: torch.Tensor,
    clock: Callable[[], float] = time.monotonic,
) -> Movers:
    """The movers of both directions for `plan`; on a CUDA device it allocates staging memory and may take seconds.

    Args:
        plan: the geometry.
        device: gives streams and events.
        setting: "auto" measures and chooses; a name takes that way, or raises.
        staging_bytes: of device memory, for both directions together.
        scratch: a chunk's payload in the host memory that copies will use, uint8 (plan.num_bytes,); its bytes
            are lost.
        clock: seconds, monotonic.

    Raises:
        ValueError: a setting that is none.
        DeviceCopyError: the way that was asked for cannot be had, or none at all.
    """
    if setting not in get_args(CopySetting):
        raise ValueError(f"a way to copy is one of {', '.join(get_args(CopySetting))}, got {setting!r}")
    if plan.device.type == "cpu":
        if setting in ("triton", "batched"):
            raise DeviceCopyError(f"copying by {setting} needs a CUDA device, the KV cache is in host memory")
        return _host_movers(plan, device)
    return open_device_movers(plan, device, setting=setting, staging_bytes=staging_bytes, scratch=scratch, clock=clock)


def open_device_movers(
    plan: CopyPlan,
    device: Device,
    *,
    setting: CopySetting,
    staging_bytes: int,
    scratch: torch.Tensor,
    clock: Callable[[], float] = time.monotonic,
) -> Movers:
    """What `open_movers` does for a CUDA device; with pages in host memory it is what tests and rehearsals run.

    Raises:
        DeviceCopyError: as in `open_movers`.
    """
    on_device = torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()
    # The engine's thread gets its device back; and what an engine makes in inference mode could not be written on
    # our threads, which are not in it.
    with on_device, torch.inference_mode(False):
        opener = _Opener(device, staging_bytes // 2, clock)
        if setting == "auto":
            choices = _Trial(plan, opener, scratch, clock).choose_both()
        else:
            choices = (CopyChoice("out", _named(setting)), CopyChoice("in", _named(setting)))
            opener.prove(plan, choices[0].way, scratch)
        movers, used_bytes = [], 0
        for choice in choices:
            mover = opener.open(plan, choice.way, choice.direction)
            used_bytes += staging_bytes // 2 if isinstance(mover, StagedMover) else 0
            movers.append(mover)
        if setting == "auto":
            del opener
            # Scratch pages, and the staging of ways that were not chosen, are the engine's again.
            torch.cuda.empty_cache()
    _log.info("device copies on %s: %s; %s; %d bytes of staging on the device", plan.device, *choices, used_bytes)
    return Movers(movers[0], movers[1], choices, used_bytes)


def _named(setting: CopySetting) -> Way:
    return {"triton": Way("triton", DEFAULT_PROGRAMS), "torch": TORCH}.get(setting, Way(setting))


def _memcpy_batch(device: torch.device) -> MemcpyBatch:
    """The driver's batched copy.

    Raises:
        DeviceCopyError: the driver has none, or host memory goes by other addresses on the device.
    """
    driver = open_driver()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    driver.make_current(ordinal)
    if not driver.has_memcpy_batch:
        raise DeviceCopyError(f"no batched copy: {driver.memcpy_batch_reason}")
    if not driver.uses_host_addresses(ordinal):
        raise DeviceCopyError(f"{device} sees pinned memory under other addresses than the host")
    return driver.memcpy_batch


def _host_movers(plan: CopyPlan, device: Device) -> Movers:
    copy = HostCopy(plan)
    out, into = (DirectMover(copy, device, direction, name="host") for direction in ("out", "in"))
    return Movers(out, into, (CopyChoice("out", Way("host")), CopyChoice("in", Way("host"))), 0)


class _Opener:
    """Makes the mover of a way for a plan, and moves chunks by it to see whether it works, and how fast."""

    def __init__(self, device: Device, staging_bytes: int, clock: Callable[[], float]) -> None:
        self.device = device
        self._staging_bytes = staging_bytes
        self._staging: dict[Direction, torch.Tensor] = {}
        self._clock = clock

    def open(self, plan: CopyPlan, way: Way, direction: Direction) -> Mover:
        """The mover of `way`.

        Raises:
            DeviceCopyError: it cannot be had.
        """
        try:
            if way.name == "batched":
                return self._direct(BatchedCopy(plan, _memcpy_batch(plan.device)), direction, way)
            staging = self._staging_for(plan.device, direction)
            kernel: PageKernel = TorchPages(plan)
            if way.name == "triton":
                kernel = TritonPages(plan, programs=way.programs or DEFAULT_PROGRAMS)
                kernel.compile(staging, into_pages=direction == "in")
            try:
                return StagedMover(
                    plan, kernel, self.device, direction, staging, name=way.name, max_chunks=max_chunks(plan)
                )
            except ValueError:
                if way.name == "triton":
                    raise
                return self._direct(RunCopy(plan), direction, way)
        except (ValueError, RuntimeError) as error:
            # A page that exceeds the staging is a ValueError; the driver's and torch's errors are RuntimeErrors.
            raise DeviceCopyError(f"copying by {way}: {error}") from error

    def prove(self, plan: CopyPlan, way: Way, scratch: torch.Tensor) -> None:
        """Copy a chunk out of the engine's own pages, which may lie in memory that scratch pages do not lie in.

        Nothing is copied into them: who knows what else writes there.

        Raises:
            DeviceCopyError: it did not work.
        """
        ids = tuple(block % plan.num_pool_blocks for block in range(plan.num_blocks))
        self.rate(self.open(plan, way, "out"), ChunkCopy(ids, scratch[: plan.num_bytes]), 1)

    def rate(self, mover: Mover, chunk: ChunkCopy, times: int) -> float:
        """Bytes per second of device time over `chunk`, `times` times; the device is done with it on return.

        Raises:
            DeviceCopyError: it did not work, or took longer than anybody waits.
        """
        ready = (self.device.compute_event(),)
        waiting: list[Submission] = []
        done = 0
        try:
            while done < times and (not waiting or waiting[-1].error is None):
                count = min(mover.max_chunks, times - done)
                waiting.append(mover.submit(ready, [chunk] * count))
                done += count
            end_s = self._clock() + _PATIENCE_S
            for submission in waiting:
                while not submission.query():
                    if self._clock() > end_s:
                        # The device still has it: nothing that it reads or writes may become somebody else's.
                        _ABANDONED.append((mover, chunk))
                        raise DeviceCopyError(f"not done after {_PATIENCE_S} s")
                    time.sleep(0)
                submission.release()
            if waiting[-1].error is not None:
                raise waiting[-1].error
            taken_s = waiting[-1].end.seconds_since(waiting[0].start)
        except Exception as error:
            raise DeviceCopyError(f"copying by {mover.name}: {error}") from error
        return done * len(chunk.host) / max(taken_s, 1e-9)

    def _staging_for(self, device: torch.device, direction: Direction) -> torch.Tensor:
        """One area for all ways of a direction, of which one at a time is under way."""
        if direction not in self._staging:
            self._staging[direction] = torch.empty(self._staging_bytes, dtype=torch.uint8, device=device)
        return self._staging[direction]

    def _direct(self, copy: BatchedCopy | RunCopy, direction: Direction, way: Way) -> Mover:
        return DirectMover(copy, self.device, direction, name=way.name, max_chunks=max_chunks(copy.plan))


class _Trial:
    """Every way on scratch pages of the plan's own sizes, side by side; the device is idle before and after."""

    def __init__(self, plan: CopyPlan, opener: _Opener, scratch: torch.Tensor, clock: Callable[[], float]) -> None:
        self._real = plan
        self._plan = scratch_plan(plan, _SCRATCH_BYTES)
        self._opener = opener
        self._clock = clock
        self._scratch = scratch
        source = random.Random(self._plan.num_bytes)
        ids = tuple(source.sample(range(self._plan.num_pool_blocks), self._plan.num_blocks))
        self._chunk = ChunkCopy(ids, scratch[: self._plan.num_bytes])
        self._unusable: dict[Way, str] = {}

    def choose_both(self) -> tuple[CopyChoice, CopyChoice]:
        """The ways for both directions.

        Raises:
            DeviceCopyError: none could be had.
        """
        for way in _ALL_WAYS:
            self._prove(way)
        return self._choose("out"), self._choose("in")

    def _prove(self, way: Way) -> None:
        try:
            self._opener.prove(self._real, way, self._scratch)
        except DeviceCopyError as error:
            self._unusable[way] = str(error)

    def _choose(self, direction: Direction) -> CopyChoice:
        unusable = dict(self._unusable)
        movers: dict[Way, Mover] = {}
        for way in _ALL_WAYS:
            if way not in unusable:
                mover = self._try(way, direction)
                if isinstance(mover, str):
                    unusable[way] = mover
                else:
                    movers[way] = mover
        plain = DirectMover(
            PlainCopy(self._plan), self._opener.device, direction, name="plain", max_chunks=max_chunks(self._plan)
        )
        times = min(_MOST_CHUNKS, max(2, _MEASURE_BYTES // self._plan.num_bytes))
        plain_rates: list[float] = []
        rates: dict[Way, list[float]] = {way: [] for way in movers}
        for _ in range(_ROUNDS):
            plain_rates.append(self._opener.rate(plain, self._chunk, times))
            for way, mover in movers.items():
                rates[way].append(self._opener.rate(mover, self._chunk, times))
        measured = tuple(
            WayMeasured(way, statistics.median(rates[way])) if way in rates else WayMeasured(way, None, unusable[way])
            for way in _ALL_WAYS
        )
        return CopyChoice(direction, choose(measured), statistics.median(plain_rates), measured)

    def _try(self, way: Way, direction: Direction) -> Mover | str:
        """The mover after its first chunk, or why it cannot be had."""
        try:
            mover = self._opener.open(self._plan, way, direction)
            self._opener.rate(mover, self._chunk, 1)
        except DeviceCopyError as error:
            return str(error)
        return mover
