"""Streams, events and the work on them: one interface for CUDA, for the CPU and for tests.

Whatever copies is written against these few calls, so that one code path serves every device, and a
test can put a device in their place that records who waited for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "Operation", "Stream", "device_for"]


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
        """A stream of our own; `name` says what it is for."""
        ...

    def bind_thread(self) -> None:
        """Called once on each thread that queues work, before it does."""
        ...


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
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch gives no types

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def record(self) -> Event:
        return _CudaEvent(self._stream)

    def submit(self, operation: Operation) -> None:
        with torch.cuda.stream(self._stream):
            operation.run()


class CudaDevice:
    """CUDA streams and timed events. Written for a GPU and not yet run on one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self._device))

    def compute_wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def new_stream(self, name: str) -> Stream:
        return _CudaStream(self._device)

    def bind_thread(self) -> None:
        """A thread starts on device 0 whatever its process uses, and without a context for the driver's own calls."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream(self._device).query()


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
