"""Every way put to the test: on the engine's own pages whether it works, on scratch pages how fast it is."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvsluice.kernels.batched_copy import BatchedCopy, MemcpyBatch, RunCopy
from kvsluice.kernels.device import Device
from kvsluice.kernels.driver import open_driver
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.movers import DirectMover, Mover, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy, Direction, PageKernel
from kvsluice.kernels.plan import CopyPlan
from kvsluice.kernels.scratch import PlainCopy, scratch_plan
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.triton_pages import DEFAULT_PROGRAMS, TritonPages
from kvsluice.kernels.ways import ALL_WAYS, CopyChoice, Way, WayMeasured, choose

__all__ = ["MAX_CHUNKS", "SUBMISSION_BYTES", "Opener", "Trial", "finish", "max_chunks"]

MAX_CHUNKS: Final = 32
SUBMISSION_BYTES: Final = 64 << 20
"""One submission on a device carries so many chunks, or so many bytes where that is less: enough that small chunks
fill the link, and little enough, 1.3 ms at 50 GB/s, that a chunk need not wait long for its companions to be over."""
_MEASURE_BYTES: Final = 64 << 20
_MOST_CHUNKS: Final = 256
"""For each way, direction and round, so that small chunks take no longer to measure than large ones."""
_ROUNDS: Final = 3
_PATIENCE_S: Final = 10.0
_SCRATCH_BYTES: Final = 32 << 20
"""At most so much device memory holds scratch pages while ways are measured; it is freed again."""
_ABANDONED: Final[list[object]] = []
"""What a device had not given back when nobody waited any longer: kept for the life of the process."""


def max_chunks(plan: CopyPlan) -> int:
    """Chunks in one submission on a device."""
    return max(1, min(MAX_CHUNKS, SUBMISSION_BYTES // plan.num_bytes))


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


def finish(mover: Mover, chunk: ChunkCopy, submissions: Sequence[Submission], clock: Callable[[], float]) -> None:
    """Wait until the device is done with `submissions` of `chunk`, one at least, and release them.

    Raises:
        DeviceCopyError: one failed, or took longer than anybody waits; what the device may still have is kept.
    """
    try:
        end_s = clock() + _PATIENCE_S
        for submission in submissions:
            while not submission.query():
                if clock() > end_s:
                    raise DeviceCopyError(f"not done after {_PATIENCE_S} s")
                time.sleep(0)
        if submissions[-1].error is not None:
            raise submissions[-1].error
    except Exception as error:
        raise _failure(mover, chunk, submissions, error) from error
    for submission in submissions:
        submission.release()


def _failure(mover: Mover, chunk: ChunkCopy, submissions: Sequence[Submission], error: Exception) -> DeviceCopyError:
    """What is raised for `error`, once what the device may still be at is safe."""
    if not (submissions and _over(submissions[-1])):
        # Nothing that it reads or writes may become somebody else's.
        _ABANDONED.append((mover, chunk, submissions))
    return DeviceCopyError(f"copying by {mover.name}: {error}")


def _over(submission: Submission) -> bool:
    """Whether the device is known to be done with it, and so with what came before it."""
    try:
        return submission.query()
    except Exception:  # noqa: BLE001 - a device that fails tells nothing of what it is still at
        return False


class Opener:
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
        except Exception as error:
            raise _failure(mover, chunk, waiting, error) from error
        finish(mover, chunk, waiting, self._clock)
        taken_s = waiting[-1].end.seconds_since(waiting[0].start)
        return done * len(chunk.host) / max(taken_s, 1e-9)

    def _staging_for(self, device: torch.device, direction: Direction) -> torch.Tensor:
        """One area for all ways of a direction, of which one at a time is under way."""
        if direction not in self._staging:
            self._staging[direction] = torch.empty(self._staging_bytes, dtype=torch.uint8, device=device)
        return self._staging[direction]

    def _direct(self, copy: BatchedCopy | RunCopy, direction: Direction, way: Way) -> Mover:
        return DirectMover(copy, self.device, direction, name=way.name, max_chunks=max_chunks(copy.plan))


class Trial:
    """Every way on scratch pages of the plan's own sizes, side by side; the device is idle before and after."""

    def __init__(self, plan: CopyPlan, opener: Opener, scratch: torch.Tensor, clock: Callable[[], float]) -> None:
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
        for way in ALL_WAYS:
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
        for way in ALL_WAYS:
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
            for way in list(movers):
                rate = self._try_rate(movers[way], times)
                if isinstance(rate, str):
                    unusable[way] = rate
                    del movers[way], rates[way]
                else:
                    rates[way].append(rate)
        measured = tuple(
            WayMeasured(way, statistics.median(rates[way])) if way in rates else WayMeasured(way, None, unusable[way])
            for way in ALL_WAYS
        )
        return CopyChoice(direction, choose(measured), statistics.median(plain_rates), measured)

    def _try(self, way: Way, direction: Direction) -> Mover | str:
        """The mover after its first chunk, or why it cannot be had."""
        try:
            mover = self._opener.open(self._plan, way, direction)
        except DeviceCopyError as error:
            return str(error)
        rate = self._try_rate(mover, 1)
        return rate if isinstance(rate, str) else mover

    def _try_rate(self, mover: Mover, times: int) -> float | str:
        """How fast it is, or why that cannot be said."""
        try:
            return self._opener.rate(mover, self._chunk, times)
        except DeviceCopyError as error:
            return str(error)
