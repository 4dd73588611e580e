"""A device whose work waits until a test lets it go on, and that proves the order of what is queued on it.

    compute      the engine's stream: `engine_writes`, `engine_reads`
    new_stream   ours

Work runs one operation at a time, in any order that the streams' own waits allow (`run`), so a wait that is
missing spoils real bytes in some orders. Beside that every operation is checked as it is queued, by what it
reads and writes: see `happens_before`. A race is told of in `check`, not where it is queued, because whoever
queues may take an exception for a failure of the device.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from happens_before import AccessLog, Memory, ModelThread

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.block_ids import BlockIds
from kvsluice.kernels.device import Event, Operation
from kvsluice.kernels.operations import CopyDirect, CopyPages, CopyStaged, FetchIds

__all__ = ["OPERATION_S", "EngineRead", "EngineWrite", "FakeDevice", "FakeEvent", "FakeStream"]

OPERATION_S = 0.25
"""How long every operation takes; two never run at once."""


class FakeEvent:
    """A point in a stream's work; `clock` is what is over once it has passed."""

    def __init__(self, device: FakeDevice, stream: str, name: str, clock: Mapping[str, int]) -> None:
        self.stream = stream
        self.name = name
        self.passed = False
        self.at_s = 0.0
        self.queries = 0
        self.error: Exception | None = None
        self._device = device
        self._clock = clock

    def query(self) -> bool:
        with self._device.lock:
            self.queries += 1
            if self.error is not None:
                raise self.error
            if not self.passed or self._device.unseen:
                return False
            self._device.host.join(self._clock)
            return True

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, FakeEvent)
        assert start.passed, "a time was read before the start event had passed"
        assert self.passed, "a time was read before the end event had passed"
        return self.at_s - start.at_s

    def pass_on(self, stream: ModelThread) -> None:
        """`stream` goes on behind this."""
        stream.join(self._clock)


@dataclass(frozen=True, slots=True)
class _Wait:
    event: FakeEvent


@dataclass(frozen=True, slots=True)
class _Record:
    event: FakeEvent


class FakeStream:
    """Work in order; it goes on when the device is told to."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.name = name
        self.queued: deque[_Wait | _Record | Operation] = deque()
        self._device = device
        self._thread = ModelThread(name)
        self._recorded = 0

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self._device.lock:
            self._device.bound(self)
            event.pass_on(self._thread)
            self.queued.append(_Wait(event))

    def record(self) -> FakeEvent:
        with self._device.lock:
            self._device.bound(self)
            failure = self._device.failure_of("record", self)
            if failure is not None:
                raise failure.error
            self._thread.join(self._device.host.stamp())
            self._recorded += 1
            event = FakeEvent(self._device, self.name, f"{self.name}-{self._recorded}", self._thread.stamp())
            self._device.events.append(event)
            self.queued.append(_Record(event))
            return event

    def submit(self, operation: Operation) -> None:
        with self._device.lock:
            self._device.bound(self)
            self._device.submitted.append((self.name, operation))
            failure = self._device.failure_of("submit", self)
            if failure is None or failure.queued:
                # What is queued happens after all that the host did before.
                self._thread.join(self._device.host.stamp())
                self._device.saw(self._thread, operation, len(self._device.submitted))
                self.queued.append(operation)
            if failure is not None:
                raise failure.error

    @property
    def ready(self) -> bool:
        """Whether the first of what is queued can go on."""
        if not self.queued:
            return False
        head = self.queued[0]
        return not isinstance(head, _Wait) or head.event.passed

    def step(self) -> None:
        """Do the first of what is queued."""
        head = self.queued.popleft()
        match head:
            case _Wait():
                pass
            case _Record():
                head.event.at_s = self._device.now_s
                head.event.passed = True
            case _:
                head.run()
                self._device.now_s += OPERATION_S


@dataclass(slots=True)
class _Failure:
    """A call on a stream of ours that is to raise, once `calls_before` others of its kind were made."""

    call: str
    calls_before: int
    error: Exception
    queued: bool


@dataclass(frozen=True, slots=True)
class EngineWrite:
    """A kernel of the engine's: new bytes in some blocks, by a seed."""

    paged: tuple[PagedTensor, ...]
    block_ids: tuple[int, ...]
    seed: int

    def run(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for item in self.paged:
            rows = _rows(item, self.block_ids)
            shape = item.chunk_shape(len(self.block_ids))
            new = torch.randint(256, (*shape, item.tensor.element_size()), dtype=torch.uint8, generator=generator)
            item.tensor.index_copy_(item.block_axis, rows, new.view(item.tensor.dtype).view(shape))


@dataclass(frozen=True, slots=True)
class EngineRead:
    """A kernel of the engine's that reads some blocks; `seen` is what they held, tensor by tensor."""

    paged: tuple[PagedTensor, ...]
    block_ids: tuple[int, ...]
    seen: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        for item in self.paged:
            self.seen.append(item.tensor.index_select(item.block_axis, _rows(item, self.block_ids)))


def _rows(item: PagedTensor, block_ids: Sequence[int]) -> torch.Tensor:
    rows = [block * item.rows_per_block + row for block in block_ids for row in range(item.rows_per_block)]
    return torch.tensor(rows, dtype=torch.int64)


class FakeDevice:
    """See above. Thread-safe; `plan` says where the pages lie that its operations move.

    Attributes:
        submitted: (stream, operation) of all that was submitted to any stream, whether or not it failed.
        unseen: while it is set, `query` says no whatever has passed, as when nobody has looked yet.
        now_s: the device's time.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self.lock = threading.RLock()
        self.host = ModelThread("host")
        self.events: list[FakeEvent] = []
        self.submitted: list[tuple[str, Operation]] = []
        self.now_s = 0.0
        self.unseen = False
        self._addresses: dict[int, list[int]] = {item.tensor.data_ptr(): [] for item in plan.paged}
        for plane in plan.planes:
            self._addresses[plan.paged[plane.tensor].tensor.data_ptr()].append(plane.address)
        self._log = AccessLog()
        self._bound: set[int] = set()
        self._misused: list[str] = []
        self._failures: list[_Failure] = []
        self._seed = 0
        self.compute = FakeStream(self, "compute")
        self.streams: dict[str, FakeStream] = {"compute": self.compute}

    # ---- what a device does ------------------------------------------------------------------

    def compute_event(self) -> FakeEvent:
        return self.compute.record()

    def compute_wait(self, event: Event) -> None:
        self.compute.wait(event)

    def new_stream(self, name: str) -> FakeStream:
        with self.lock:
            unique = f"{name} {len(self.streams)}" if name in self.streams else name
            stream = self.streams[unique] = FakeStream(self, unique)
            return stream

    def bind_thread(self) -> None:
        self._bound.add(threading.get_ident())

    # ---- what a test makes happen ------------------------------------------------------------

    def run(self, rng: random.Random | None = None, *, steps: int | None = None, only: Sequence[str] = ()) -> int:
        """Let the streams go on, as far as they can or for `steps`; the steps that were made.

        Args:
            rng: picks who goes next: one stream for a while, then another. Without it each goes as far as it
                can in turn, the engine's first.
            steps: how many operations, waits and records at most.
            only: the names of those that go on; all where there are none.
        """
        order = [stream for name, stream in list(self.streams.items()) if not only or name in only]
        made = 0
        while steps is None or made < steps:
            if rng is not None and (made == 0 or rng.random() < 0.2):
                rng.shuffle(order)
            with self.lock:
                stream = next((stream for stream in order if stream.ready), None)
                if stream is None:
                    break
                stream.step()
            made += 1
        return made

    def engine_writes(self, block_ids: Iterable[int]) -> EngineWrite:
        """The engine queues a kernel that writes these blocks."""
        self._seed += 1
        write = EngineWrite(self.plan.paged, tuple(block_ids), self._seed)
        self.compute.submit(write)
        return write

    def engine_reads(self, block_ids: Iterable[int], tensors: range | None = None) -> EngineRead:
        """The engine queues a kernel that reads these blocks, of all tensors or some."""
        paged = self.plan.paged if tensors is None else self.plan.paged[tensors.start : tensors.stop]
        read = EngineRead(paged, tuple(block_ids))
        self.compute.submit(read)
        return read

    def host_reads(self, memory: torch.Tensor, what: str = "the host's read") -> None:
        """The host reads host memory now."""
        with self.lock:
            self._log.add(self.host, what, [_host_memory(memory)], [])

    def host_writes(self, memory: torch.Tensor, what: str = "the host's write") -> None:
        """The host writes host memory now."""
        with self.lock:
            self._log.add(self.host, what, [], [_host_memory(memory)])

    def fail(self, call: str, calls_before: int, error: Exception, *, queued: bool = False) -> None:
        """Have a coming `submit` or `record` on a stream of ours raise: the next one behind `calls_before` others.

        `queued`: a submit raises after the work has reached the device.
        """
        with self.lock:
            self._failures.append(_Failure(call, calls_before, error, queued))

    # ---- what a test asks --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not any(stream.queued for stream in self.streams.values())

    def queued_copies(self) -> int:
        """Operations that move pages and have not run."""
        with self.lock:
            queued = [work for stream in self.streams.values() for work in stream.queued]
        return sum(isinstance(work, CopyDirect | CopyPages) for work in queued)

    @property
    def races(self) -> list[str]:
        """Pairs of accesses that nothing ordered, in words."""
        return list(self._log.races)

    def check(self) -> None:
        """Raise `AssertionError` where two accesses were not ordered, or a thread used a stream unbound."""
        found = self._misused + self._log.races
        assert not found, f"{len(found)} faults, the first: " + "; ".join(found[:3])

    # ---- what its parts tell it --------------------------------------------------------------

    def bound(self, stream: FakeStream) -> None:
        """A stream of ours is used on this thread."""
        if stream is not self.compute and threading.get_ident() not in self._bound:
            self._misused.append(f"{threading.current_thread().name} uses stream {stream.name} and was never bound")

    def failure_of(self, call: str, stream: FakeStream) -> _Failure | None:
        """How this call fails, if it does."""
        if stream is self.compute:
            return None
        planned = [failure for failure in self._failures if failure.call == call]
        due = next((failure for failure in planned if failure.calls_before == 0), None)
        for failure in planned:
            failure.calls_before -= 1
        if due is not None:
            self._failures.remove(due)
        return due

    def saw(self, thread: ModelThread, operation: Operation, number: int) -> None:
        """An operation was queued."""
        match operation:
            case CopyDirect():
                reads, writes = self._of_copy_direct(operation)
            case FetchIds():
                # Who submits this has filled the buffer just before.
                filled = Memory(("ids in host memory", id(operation.ids)), owner=operation.ids)
                self._log.add(self.host, f"fill of ids {number}", [], [filled])
                thread.join(self.host.stamp())
                reads, writes = [filled], [_ids_on_device(operation.ids)]
            case CopyPages():
                reads, writes = self._of_copy_pages(operation)
            case CopyStaged():
                reads, writes = [_slot(operation)], [_host_memory(operation.host)]
                if operation.direction == "in":
                    reads, writes = writes, reads
            case EngineWrite():
                reads, writes = [], self._pages(operation.paged, operation.block_ids)
            case EngineRead():
                reads, writes = self._pages(operation.paged, operation.block_ids), []
            case _:
                raise TypeError(f"what does {type(operation).__name__} read and write?")
        self._log.add(thread, f"{type(operation).__name__} {number}", reads, writes)

    def _of_copy_direct(self, operation: CopyDirect) -> tuple[list[Memory], list[Memory]]:
        chunk, offsets = operation.chunk, operation.copy.plan.offsets
        numbers = range(len(self.plan.paged)) if operation.tensors is None else operation.tensors
        paged = [operation.copy.plan.paged[number] for number in numbers]
        pages = self._pages(paged, chunk.block_ids[chunk.skip_blocks :])
        host = [_host_memory(chunk.host[offsets[number] : offsets[number + 1]]) for number in numbers]
        return (pages, host) if operation.direction == "out" else (host, pages)

    def _of_copy_pages(self, operation: CopyPages) -> tuple[list[Memory], list[Memory]]:
        piece = operation.piece
        rows = operation.ids._host[operation.first_chunk : operation.first_chunk + operation.num_chunks]  # noqa: SLF001
        pages = [
            _page(plane.address, block)
            for row in rows.tolist()
            for plane in self.plan.planes[piece.first_plane : piece.last_plane]
            for block in row[piece.first_block : piece.last_block]
        ]
        reads, writes = (pages, [_slot(operation)]) if operation.direction == "out" else ([_slot(operation)], pages)
        return [*reads, _ids_on_device(operation.ids)], writes

    def _pages(self, paged: Iterable[PagedTensor], block_ids: Iterable[int]) -> list[Memory]:
        blocks = set(block_ids)
        addresses = [address for item in paged for address in self._addresses[item.tensor.data_ptr()]]
        return [_page(address, block) for address in addresses for block in blocks]


def _page(address: int, block: int) -> Memory:
    return Memory((f"page {address:#x}", block))


def _ids_on_device(ids: BlockIds) -> Memory:
    return Memory(("ids on the device", id(ids)), owner=ids)


def _slot(operation: CopyPages | CopyStaged) -> Memory:
    storage = operation.staged.untyped_storage()
    return Memory((f"{operation.direction} staging {storage.data_ptr():#x}", operation.slot), owner=storage)


def _host_memory(tensor: torch.Tensor) -> Memory:
    start = tensor.data_ptr()
    return Memory("host memory", start, start + tensor.numel() * tensor.element_size(), owner=tensor.untyped_storage())
