"""The engine's side of a device: its stream, and what it does to pages there while copies are under way.

Written once for a CUDA device and once for the CPU, where streams are threads: there too, what nobody waits
for comes in whatever order it likes, so that a missing wait spoils bytes in the rehearsal as well.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kvsluice.connector.region import HostDriver, PinnedRegion
from kvsluice.kernels.device import CudaDevice, Device, Event, Operation, Stream
from kvsluice.kernels.driver import CudaDriver, DriverError, open_driver
from kvsluice.kernels.gpu import GpuFacts

__all__ = ["PATIENCE_S", "CudaEngine", "Engine", "PretendDriver", "ThreadEngine", "until"]

PATIENCE_S = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds; it is looked at without a pause.

    Raises:
        TimeoutError: not within `PATIENCE_S`.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not after {PATIENCE_S:g} s")
        time.sleep(0)


class Engine(Protocol):
    """See above. Used by the test's thread.

    Attributes:
        where: the pages' device.
        device: what movers and copiers are given.
        is_cuda: whether this is the real thing.
    """

    where: torch.device
    device: Device
    is_cuda: bool

    @property
    def driver(self) -> HostDriver:
        """What registers host memory."""
        ...

    def queue(self, work: Callable[[], object]) -> None:
        """Put `work` on the engine's stream."""
        ...

    def delay(self, seconds: float) -> None:
        """Have the engine's stream do nothing for so long."""
        ...

    def event(self) -> Event:
        """Behind all that is on the engine's stream now."""
        ...

    def wait(self, event: Event) -> None:
        """What is put on the engine's stream from now on comes after `event`."""
        ...

    def late_event(self, seconds: float) -> Event:
        """On a stream that nobody else uses: passes after so long."""
        ...

    def finish(self) -> None:
        """Wait until the whole device is idle. Raises what it failed with."""
        ...

    def region(self, num_slots: int, slot_bytes: int, piece_bytes: int = 1 << 30) -> PinnedRegion:
        """Host memory for copies, registered."""
        ...

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether the device can reach every byte of this host memory by itself."""
        ...

    def close(self) -> None:
        """End what was started, and give the host memory back."""
        ...


# ---- CUDA --------------------------------------------------------------------------------------


class CudaEngine:
    """See `Engine`.

    Args:
        own_stream: whether the engine computes on a stream of its own, or on the legacy default one.
    """

    _cycles_per_s = 0.0

    def __init__(self, *, own_stream: bool) -> None:
        self.is_cuda = True
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.device: Device = CudaDevice(self.where)
        self.driver: CudaDriver = open_driver()
        self._stream = new_stream() if own_stream else torch.cuda.default_stream()
        self._side = new_stream()
        self._regions: list[PinnedRegion] = []
        if not CudaEngine._cycles_per_s:
            CudaEngine._cycles_per_s = _spin_rate()

    def queue(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def delay(self, seconds: float) -> None:
        with torch.cuda.stream(self._stream):
            _spin(int(seconds * self._cycles_per_s))

    def event(self) -> Event:
        with torch.cuda.stream(self._stream):
            return self.device.compute_event()

    def wait(self, event: Event) -> None:
        with torch.cuda.stream(self._stream):
            self.device.compute_wait(event)

    def late_event(self, seconds: float) -> Event:
        with torch.cuda.stream(self._side):
            _spin(int(seconds * self._cycles_per_s))
            return self.device.compute_event()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def region(self, num_slots: int, slot_bytes: int, piece_bytes: int = 1 << 30) -> PinnedRegion:
        region = PinnedRegion(num_slots, slot_bytes, device=self.where, pin="on", piece_bytes=piece_bytes)
        self._regions.append(region)
        return region

    def is_pinned(self, memory: torch.Tensor) -> bool:
        # torch asks for the attributes of the pointer alone: of the first byte.
        return all(memory[at:].is_pinned() for at in (*range(0, len(memory), 4096), len(memory) - 1))

    def close(self) -> None:
        # Memory that is unmapped while it is registered would keep its addresses from whoever gets them next.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        for region in self._regions:
            region.close()


def new_stream() -> torch.cuda.Stream:
    """One of torch's."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch gives no types


def _spin(cycles: int) -> None:
    """Keep the current stream busy on one multiprocessor; torch has no public name for it."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call] # noqa: SLF001


def _spin_rate() -> float:
    """Cycles in a second, at the highest clock that was seen."""
    cycles = 20_000_000
    rates: list[float] = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        _spin(cycles)
        end.record()
        end.synchronize()
        rates.append(cycles / float(begin.elapsed_time(end)) * 1e3)
    return max(rates)


# ---- the CPU, with threads for streams ---------------------------------------------------------


class _ThreadEvent:
    def __init__(self, device: _ThreadDevice) -> None:
        self.device = device
        self.passed = threading.Event()
        self.at_s = 0.0

    def query(self) -> bool:
        if self.device.failures:
            raise self.device.failures[0]
        return self.passed.is_set()

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, _ThreadEvent)
        return self.at_s - start.at_s

    def mark(self) -> None:
        self.at_s = time.monotonic()
        self.passed.set()


class _ThreadStream:
    """Work in order, on a thread of its own."""

    def __init__(self, device: _ThreadDevice) -> None:
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait(self, event: Event) -> None:
        assert isinstance(event, _ThreadEvent)
        self._work.put(event.passed.wait)

    def record(self) -> Event:
        event = _ThreadEvent(self._device)
        self._work.put(event.mark)
        return event

    def submit(self, operation: Operation) -> None:
        self.put(operation.run)

    def put(self, work: Callable[[], object], *, alone: bool = True) -> None:
        """Queue `work`; two pieces that run alone never run at once: Triton's interpreter is one for all threads."""
        self._work.put(self._device.alone(work) if alone else work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            self._device.run(work)


class _ThreadDevice:
    """See `Device`."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.streams: list[_ThreadStream] = []
        self._lock = threading.Lock()
        self.compute = self.new_thread()

    def new_thread(self) -> _ThreadStream:
        self.streams.append(_ThreadStream(self))
        return self.streams[-1]

    def new_stream(self, name: str) -> Stream:
        return self.new_thread()

    def compute_event(self) -> Event:
        return self.compute.record()

    def compute_wait(self, event: Event) -> None:
        self.compute.wait(event)

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def run(self, work: Callable[[], object]) -> None:
        """What it raises is told where somebody asks, as a device does."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.failures.append(error)

    def alone(self, work: Callable[[], object]) -> Callable[[], object]:
        def locked() -> None:
            with self._lock:
                work()

        return locked


class PretendDriver:
    """Registers memory in name, and refuses what CUDA's driver refuses; see `HostDriver`."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def current(self, ordinal: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def register(self, address: int, num_bytes: int) -> None:
        if any(address < at + length and at < address + num_bytes for at, length in self.registered.items()):
            raise _refusal(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        if self.registered.pop(address, None) is None:
            raise _refusal(713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")


def _refusal(code: int, name: str) -> DriverError:
    return DriverError(f"a pretended driver says {name}", code=code, name=name)


class ThreadEngine:
    """See `Engine`."""

    def __init__(self) -> None:
        self.is_cuda = False
        self.where = torch.device("cpu")
        self._threads = _ThreadDevice()
        self.device: Device = self._threads
        self.driver = PretendDriver()
        self._regions: list[PinnedRegion] = []

    def queue(self, work: Callable[[], object]) -> None:
        self._threads.compute.put(work)

    def delay(self, seconds: float) -> None:
        self._threads.compute.put(lambda: time.sleep(seconds), alone=False)

    def event(self) -> Event:
        return self._threads.compute_event()

    def wait(self, event: Event) -> None:
        self._threads.compute_wait(event)

    def late_event(self, seconds: float) -> Event:
        side = self._threads.new_thread()
        side.put(lambda: time.sleep(seconds), alone=False)
        return side.record()

    def finish(self) -> None:
        for stream in self._threads.streams:
            event = stream.record()
            until(event.query, "a stream's work")

    def region(self, num_slots: int, slot_bytes: int, piece_bytes: int = 1 << 30) -> PinnedRegion:
        # As for a device: the driver that it is registered with is the pretended one.
        region = PinnedRegion(
            num_slots,
            slot_bytes,
            device=torch.device("cuda", 0),
            pin="on",
            piece_bytes=piece_bytes,
            driver=self.driver,
            facts=GpuFacts(),
        )
        self._regions.append(region)
        return region

    def is_pinned(self, memory: torch.Tensor) -> bool:
        at, end = memory.data_ptr(), memory.data_ptr() + len(memory)
        for address, length in sorted(self.driver.registered.items()):
            if address <= at < address + length:
                at = min(end, address + length)
        return at == end

    def close(self) -> None:
        for stream in self._threads.streams:
            stream.close()
        for region in self._regions:
            region.close()
        assert not self.driver.registered, "memory is left registered"


@contextlib.contextmanager
def opened(*, cuda: bool, own_stream: bool) -> Iterator[Engine]:
    """An engine whose device is idle on the way out."""
    engine: Engine = CudaEngine(own_stream=own_stream) if cuda else ThreadEngine()
    try:
        yield engine
        engine.finish()
    finally:
        engine.close()
