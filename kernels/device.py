"""Streams, events and the work on them: one interface for CUDA, for the CPU and for tests.

Whatever copies is written against these few calls, so that one code path serves every device, and a
test can put a device in their place that records who waited for whom.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from kvsluice.kernels.driver import DriverError, relax_stream_capture

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "Operation", "Stream", "device_for"]


_log = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream has passed it. Raises what the device failed with since, where it did."""
        ...

    def seconds_since(self, start: Event) -> float:
        """Device time from `start` to this; both have passed, on streams of one device."""
        ...


class Operation(Protocol):
    """One piece of device work: a kernel, a copy. What it reads and writes stands in its fields."""

    def run(self) -> None:
        """Put it on the calling thread's current stream; on the CPU, do it."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. Used by one thread at a time."""

    def wait(self, event: Event) -> None:
        """What is queued from now on starts after `event`; does not block the caller."""
        ...

    def record(self) -> Event:
        """An event behind all that is queued so far."""
        ...

    def submit(self, operation: Operation) -> None:
        """Queue `operation`. Raises what launching it raises."""
        ...


class Device(Protocol):
    """One device: the engine's compute stream as events see it, and streams of our own."""

    def compute_event(self) -> Event:
        """An event behind all that the engine has queued on its current stream; called on its thread."""
        ...

    def compute_wait(self, event: Event) -> None:
        """What the engine queues on its current stream from now on starts after `event`; called on its thread."""
        ...

    def new_stream(self, name: str) -> Stream:
        """A stream of our own; `name` says what it is for. Asked for the same name again, it may be the same stream."""
        ...

    def bind_thread(self) -> None:
        """Called once on each thread of our own that queues work, before it does. Raises what the device raises."""
        ...


_URGENT = -1
"""torch's number for CUDA's higher priority."""


class _CpuEvent:
    """On the CPU work is over when the call returns, so an event is a point in time, passed at once."""

    __slots__ = ("at_s",)

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return True

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, _CpuEvent)
        return self.at_s - start.at_s


class _CpuStream:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def wait(self, event: Event) -> None:
        """Nothing to wait for: the engine's work was over when it called."""

    def record(self) -> Event:
        return _CpuEvent(self._clock())

    def submit(self, operation: Operation) -> None:
        operation.run()


class CpuDevice:
    """The CPU twin. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def compute_event(self) -> Event:
        return _CpuEvent(self._clock())

    def compute_wait(self, event: Event) -> None:
        """Nothing to wait for: an event that exists has passed."""

    def new_stream(self, name: str) -> Stream:
        return _CpuStream(self._clock)

    def bind_thread(self) -> None:
        """Nothing to bind."""


class _CudaEvent:
    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch gives no types
        self.event.record(stream)

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call] # as above

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, _CudaEvent)
        return float(start.event.elapsed_time(self.event)) / 1e3


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        # A kernel of ours takes a multiprocessor or two for microseconds. Were it no more urgent than the model's, it
        # would start when nothing of the model's waits to start, and the link would stand still meanwhile. And
        # torch deals its streams out of pools of 32, one for each priority: in this one an engine's own are not.
        self.stream = torch.cuda.Stream(device, priority=_URGENT)  # type: ignore[no-untyped-call] # torch gives no types

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)

    def record(self) -> Event:
        return _CudaEvent(self.stream)

    def submit(self, operation: Operation) -> None:
        with torch.cuda.stream(self.stream):
            operation.run()


class CudaDevice:
    """CUDA streams and timed events. Written for a GPU and not yet run on one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, _CudaStream] = {}

    def compute_event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self._device))

    def compute_wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def new_stream(self, name: str) -> Stream:
        """One stream for each name: a pool of torch's has 32, and the 33rd is the first one again."""
        return self._stream(name)

    def bind_thread(self) -> None:
        """See `Device.bind_thread`."""
        # A thread starts on device 0 whatever its process uses, and without a context for the driver's own calls.
        torch.cuda.set_device(self._device)
        # What this thread allocates must not come out of what the engine's stream is still at.
        torch.cuda.set_stream(self._stream("thread").stream)
        torch.cuda.current_stream(self._device).query()
        try:
            # An engine that captures a graph meanwhile would lose it to the first event that is asked for here.
            relax_stream_capture()
        except DriverError as error:
            _log.warning("an engine that captures CUDA graphs while copies run may fail to: %s", error)

    def _stream(self, name: str) -> _CudaStream:
        if name not in self._streams:
            self._streams[name] = _CudaStream(self._device)
        return self._streams[name]


def device_for(device: torch.device, clock: Callable[[], float] = time.monotonic) -> Device:
    """The twin that serves tensors on `device`.

    Raises:
        ValueError: a device that is neither the CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return CpuDevice(clock)
    if device.type == "cuda":
        return CudaDevice(device)
    raise ValueError(f"KV cache on device {device}: only cpu and cuda are supported")
