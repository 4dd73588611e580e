"""Every way of copying as a mover."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable

import torch

from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.batched_copy import BatchedCopy, RunCopy
from kvsluice.kernels.device import CudaDevice, Device, Event, Operation, Stream
from kvsluice.kernels.driver import open_driver
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.movers import DirectMover, Mover, StagedMover
from kvsluice.kernels.operations import DirectCopy, Direction, PageKernel
from kvsluice.kernels.scratch import PlainCopy
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.trial import max_chunks
from kvsluice.kernels.triton_pages import DEFAULT_PROGRAMS, TritonPages
from kvsluice.kernels.ways import TORCH, Way

__all__ = ["PLAIN", "WAYS", "PlainStreams", "batched_copy", "label_of", "open_way"]

PLAIN = Way("plain")
"""As many bytes in one contiguous copy, over the same streams and by the same mover."""
WAYS = (Way("batched"), Way("triton", 1), Way("triton", 2), Way("triton", 4), TORCH)


class _PlainStream:
    """A CUDA stream as an engine has it, no more urgent than others; see `Stream`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch gives no types

    def wait(self, event: Event) -> None:
        with torch.cuda.stream(self._stream):
            self._device.compute_wait(event)

    def record(self) -> Event:
        with torch.cuda.stream(self._stream):
            return self._device.compute_event()

    def submit(self, operation: Operation) -> None:
        with torch.cuda.stream(self._stream):
            operation.run()


class PlainStreams:
    """A device whose streams for copies have the priority of an engine's; see `Device`.

    Args:
        device: the real one, whose streams are urgent.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}

    def compute_event(self) -> Event:
        return self._device.compute_event()

    def compute_wait(self, event: Event) -> None:
        self._device.compute_wait(event)

    def new_stream(self, name: str) -> Stream:
        if not isinstance(self._device, CudaDevice):
            return self._device.new_stream(name)
        # One for each name, as the real one has it: torch deals 32 out in turns.
        if name not in self._streams:
            self._streams[name] = _PlainStream(self._device)
        return self._streams[name]

    def bind_thread(self) -> None:
        self._device.bind_thread()


def label_of(way: Way) -> str:
    """A name for a table."""
    return f"{way.name} {way.programs}" if way.programs else way.name


def batched_copy(plan: CopyPlan) -> BatchedCopy:
    """The driver's batched copy; without a device what it does, by the host.

    Raises:
        DeviceCopyError: this driver has none.
        DriverError: there is no driver.
    """
    if plan.device.type == "cpu":
        return BatchedCopy(plan, _host_batch, current_stream=lambda: _SOME_STREAM)
    driver = open_driver()
    driver.make_current(plan.device.index or 0)
    if not driver.has_memcpy_batch:
        raise DeviceCopyError(f"no batched copy: {driver.memcpy_batch_reason}")
    return BatchedCopy(plan, driver.memcpy_batch)


_SOME_STREAM = 2

_DIRECT: dict[str, Callable[[CopyPlan], DirectCopy]] = {
    "plain": PlainCopy,
    "batched": batched_copy,
    "runs": RunCopy,
    "host": HostCopy,
}


def open_way(plan: CopyPlan, way: Way, direction: Direction, device: Device, staging: torch.Tensor) -> Mover:
    """The mover of `way`.

    Args:
        plan: the pages.
        way: "plain", "host" and "runs" (each run by a copy of torch's) beside those that the connector takes.
        direction: see `Direction`.
        device: gives the streams.
        staging: uint8 (bytes,), on the plan's device, of this direction alone; one mover at a time uses it.

    Raises:
        RuntimeError, ValueError: it cannot be had; the message says why.
    """
    if way.name in _DIRECT:
        copy = _DIRECT[way.name](plan)
        return DirectMover(copy, device, direction, name=label_of(way), max_chunks=max_chunks(plan))
    kernel: PageKernel
    if way.name == "triton":
        pages = TritonPages(plan, programs=way.programs or DEFAULT_PROGRAMS)
        pages.compile(staging, into_pages=direction == "in")
        kernel = pages
    elif way.name == "torch":
        kernel = TorchPages(plan)
    else:
        raise ValueError(f"no way of copying is called {way.name!r}")
    return StagedMover(plan, kernel, device, direction, staging, name=label_of(way), max_chunks=max_chunks(plan))


def _host_batch(destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, stream: int) -> None:
    deque(map(ctypes.memmove, destinations.tolist(), sources.tolist(), sizes.tolist()), maxlen=0)
