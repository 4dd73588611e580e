"""Random stores and loads through movers on a fake device, beside an engine that uses the same pages.

What must come of it is worked out at once on a second set of pages, with `HostCopy`, in the order in which
the calls were made. The engine writes a block only when nobody reads or writes it any more, as far as the
submissions' own `query` says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from fake_device import EngineRead, EngineWrite, FakeDevice, FakeEvent
from hypothesis import strategies as st

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor
from kvsluice.kernels.chooser import Movers
from kvsluice.kernels.movers import RING_SLOTS, DirectMover, Mover, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy, Direction
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.ways import CopyChoice, Way

__all__ = ["Pool", "Traffic", "direct", "pools", "small_pool", "stage_everything", "staged"]

_UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Pool:
    """Storages, the tensors that lie in them with gaps, and how many blocks a chunk has."""

    storages: tuple[torch.Tensor, ...]
    paged: tuple[PagedTensor, ...]
    num_blocks: int

    def plan(self) -> CopyPlan:
        return CopyPlan(self.paged, self.num_blocks)

    def twin(self) -> Pool:
        """The same bytes in the same places of memory of its own."""
        storages = tuple(storage.clone() for storage in self.storages)
        paged = tuple(
            PagedTensor(
                storage.as_strided(item.tensor.shape, item.tensor.stride(), item.tensor.storage_offset()),
                item.block_axis,
                item.rows_per_block,
                item.name,
            )
            for storage, item in zip(storages, self.paged, strict=True)
        )
        return Pool(storages, paged, self.num_blocks)

    @property
    def slot_bytes(self) -> int:
        """The smallest staging slot that holds a block of every plane."""
        largest = max(plane.block_bytes for plane in self.plan().planes)
        return -(-(largest + 16) // 256) * 256


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    pool_blocks, num_blocks = draw(st.integers(4, 10)), draw(st.integers(1, 4))
    storages, paged = [], []
    for number in range(draw(st.integers(1, 3))):
        rows_per_block = draw(st.integers(1, 2))
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=0, max_size=3))
        if draw(st.booleans()):
            shape.append(draw(st.sampled_from([16, 24, 37])))
        axis = draw(st.integers(0, len(shape)))
        shape.insert(axis, pool_blocks * rows_per_block)
        padded = [size + draw(st.sampled_from([0, 0, 1, 8])) for size in shape]
        dtype = draw(st.sampled_from((torch.uint8, torch.int16, torch.int32, torch.int64)))
        num_bytes = torch.Size(padded).numel() * dtype.itemsize
        generator = torch.Generator().manual_seed(number)
        storage = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(padded)
        tensor = storage
        for dim, size in enumerate(shape):
            tensor = tensor.narrow(dim, draw(st.integers(0, padded[dim] - size)), size)
        storages.append(storage)
        paged.append(PagedTensor(tensor, axis, rows_per_block, f"tensor {number}"))
    return Pool(tuple(storages), tuple(paged), num_blocks)


def small_pool() -> Pool:
    """Two tensors with gaps; a chunk needs seven of the smallest slots: one per block and K or V, one for the rest."""
    a = torch.randint(256, (2, 12, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    b = torch.randint(-9, 9, (12, 3, 5), dtype=torch.int16, generator=torch.Generator().manual_seed(2))
    return Pool((a, b), (PagedTensor(a[:, :, 3:190], 1, name="a"), PagedTensor(b[:, :2], 0, name="b")), 3)


def staged(
    pool: Pool, device: FakeDevice, direction: Direction, slots: float = 1.0, *, max_chunks: int = 32
) -> StagedMover:
    """A mover whose staging slots are `slots` times the smallest that will do, and end in an odd place."""
    plan = pool.plan()
    staging = torch.empty(RING_SLOTS * int(pool.slot_bytes * slots) + 100, dtype=torch.uint8)
    return StagedMover(plan, TorchPages(plan), device, direction, staging, name="torch", max_chunks=max_chunks)


def stage_everything(monkeypatch: pytest.MonkeyPatch, max_chunks: int = 32) -> None:
    """Have connectors move chunks as on a GPU: through staging memory, with slots of the smallest size."""

    def open_staged(plan: CopyPlan, device: FakeDevice, **options: object) -> Movers:
        pool = Pool(tuple(item.tensor for item in plan.paged), plan.paged, plan.num_blocks)
        out, into = (staged(pool, device, direction, max_chunks=max_chunks) for direction in ("out", "in"))
        return Movers(out, into, (CopyChoice("out", Way("torch")), CopyChoice("in", Way("torch"))), 0)

    monkeypatch.setattr("kvsluice.connector.worker.open_movers", open_staged)


def direct(pool: Pool, device: FakeDevice, direction: Direction) -> DirectMover:
    return DirectMover(HostCopy(pool.plan()), device, direction, name="host", max_chunks=32)


@dataclass
class _Flight:
    """A submission under way. `told` are the tensors that `on_tensor` named and nobody looked at yet."""

    direction: Direction
    submission: Submission
    copies: list[ChunkCopy]
    memory: list[torch.Tensor]
    expected: list[torch.Tensor]
    told: list[tuple[int, FakeEvent]] = field(default_factory=list)

    def blocks(self) -> list[int]:
        """Those it reads, or writes."""
        return [block for chunk in self.copies for block in chunk.block_ids[chunk.skip_blocks :]]


class Traffic:
    """See above. `wrong` says which bytes were not what they must be; the device knows of the races.

    Attributes:
        seconds: what the submissions of each direction say they took, unless not `timed`.
    """

    def __init__(
        self, pool: Pool, device: FakeDevice, movers: Mapping[Direction, Mover], seed: int, *, timed: bool = True
    ) -> None:
        self.wrong: list[str] = []
        self.seconds: Counter[Direction] = Counter()
        self._pool = pool
        self._device = device
        self._movers = dict(movers)
        self._rng = random.Random(seed)
        self._timed = timed
        self._plan = pool.plan()
        self._twin = pool.twin()
        self._oracle = HostCopy(self._twin.plan())
        self._flights: list[_Flight] = []
        self._reads: list[tuple[EngineRead, list[torch.Tensor], str]] = []
        self._stored: Counter[int] = Counter()
        self._loaded: set[int] = set()

    def run(self, submissions: int) -> None:
        """Make so many submissions, and go on until all are over."""
        rng = self._rng
        while submissions:
            match rng.randrange(6):
                case 0:
                    self._engine_writes()
                case 1:
                    self._engine_reads()
                case 2 | 3:
                    submissions -= self._submit(rng.choice(list(self._movers)))
                case _:
                    self._go_on()
        while self._flights:
            self._go_on()
        self._device.run(rng)
        for read, expected, what in self._reads:
            if not all(map(torch.equal, read.seen, expected)):
                self.wrong.append(f"the engine read other bytes {what}")
        if not all(map(torch.equal, self._pool.storages, self._twin.storages)):
            self.wrong.append("pages hold other bytes at the end")

    def _go_on(self) -> None:
        streams = list(self._device.streams)
        # One that stands still shows who should have waited for it.
        held_up = self._rng.choice([None, *streams])
        going = [name for name in streams if name != held_up]
        self._device.run(self._rng, steps=self._rng.choice((1, 3, 10, 1000)), only=going)
        self._look()

    def _some(self, blocks: Sequence[int]) -> list[int]:
        return self._rng.sample(blocks, min(len(blocks), self._rng.randint(1, 4)))

    def _engine_writes(self) -> None:
        free = [block for block in self._all() if not self._stored[block] and block not in self._loaded]
        if free:
            write = self._device.engine_writes(self._some(free))
            EngineWrite(self._twin.paged, write.block_ids, write.seed).run()

    def _engine_reads(self) -> None:
        stable = [block for block in self._all() if block not in self._loaded]
        if stable:
            self._read(self._some(stable), None, "before a load")

    def _read(self, block_ids: Sequence[int], tensors: range | None, what: str) -> None:
        paged = self._twin.paged if tensors is None else self._twin.paged[tensors.start : tensors.stop]
        expected = EngineRead(paged, tuple(block_ids))
        expected.run()
        self._reads.append((self._device.engine_reads(block_ids, tensors), expected.seen, what))

    def _all(self) -> range:
        return range(self._plan.num_pool_blocks)

    def _submit(self, direction: Direction) -> int:
        copies = self._stores() if direction == "out" else self._loads()
        if not copies:
            return 0
        memory, chunks, expected = [], [], []
        for block_ids, skip_blocks in copies:
            gap = self._rng.randrange(18)
            whole = torch.full((self._plan.num_bytes + 40,), _UNTOUCHED, dtype=torch.uint8)
            chunk = ChunkCopy(block_ids, whole[gap : gap + self._plan.num_bytes], skip_blocks)
            if direction == "in":
                self._device.host_writes(chunk.host)
                chunk.host.copy_(torch.frombuffer(bytearray(self._rng.randbytes(len(chunk.host))), dtype=torch.uint8))
            there = whole.clone()
            payload = there[gap : gap + self._plan.num_bytes]
            if direction == "out":
                self._oracle.gather(block_ids, payload)
            else:
                self._oracle.scatter(block_ids, payload, skip_blocks)
            memory.append(whole)
            chunks.append(chunk)
            expected.append(there)
        told: list[tuple[int, FakeEvent]] = []
        on_tensor = self._rng.choice((None, lambda number, event: told.append((number, event))))
        submission = self._movers[direction].submit([self._device.compute_event()], chunks, on_tensor)
        assert submission.error is None, submission.error
        if on_tensor is not None:
            assert [number for number, _ in told] == list(range(len(self._plan.paged)))
        flight = _Flight(direction, submission, chunks, memory, expected, told)
        if direction == "out":
            self._stored.update(flight.blocks())
        else:
            self._loaded.update(flight.blocks())
        self._flights.append(flight)
        return 1

    def _stores(self) -> list[tuple[tuple[int, ...], int]]:
        stable = [block for block in self._all() if block not in self._loaded]
        count = self._rng.choice((1, 1, 2, 5))
        return [(tuple(self._rng.choices(stable, k=self._plan.num_blocks)), 0) for _ in range(count)] if stable else []

    def _loads(self) -> list[tuple[tuple[int, ...], int]]:
        free = [block for block in self._all() if not self._stored[block] and block not in self._loaded]
        self._rng.shuffle(free)
        loads = []
        for _ in range(self._rng.choice((1, 1, 2, 5))):
            skip_blocks = self._rng.choice((0, 0, self._rng.randint(0, self._plan.num_blocks)))
            written = self._plan.num_blocks - skip_blocks
            if written > len(free):
                break
            # What is left out may be anybody's.
            skipped = self._rng.choices(self._all(), k=skip_blocks)
            loads.append(((*skipped, *(free.pop() for _ in range(written))), skip_blocks))
        return loads

    def _look(self) -> None:
        for flight in list(self._flights):
            while flight.told and self._rng.random() < 0.5:
                number, event = flight.told[0]
                if flight.direction == "in":
                    # The engine waits for its layers one by one, and never asks the host.
                    self._device.compute_wait(event)
                    blocks = sorted(set(flight.blocks()))
                    self._read(blocks, range(number, number + 1), f"of tensor {number} of a load")
                elif event.query():
                    self._compare_tensor(flight, number)
                else:
                    break
                del flight.told[0]
            if self._rng.random() < 0.5 and flight.submission.query():
                self._over(flight)

    def _compare_tensor(self, flight: _Flight, number: int) -> None:
        begin, end = self._plan.offsets[number], self._plan.offsets[number + 1]
        for chunk, expected in zip(flight.copies, flight.expected, strict=True):
            self._device.host_reads(chunk.host[begin:end])
            at = int(chunk.host.storage_offset())
            if not torch.equal(chunk.host[begin:end], expected[at + begin : at + end]):
                self.wrong.append(f"a store's tensor {number} holds other bytes once it is told of")

    def _over(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        if self._timed:
            self.seconds[flight.direction] += flight.submission.seconds()
        flight.submission.release()
        if flight.direction == "out":
            self._stored.subtract(flight.blocks())
            for whole, expected in zip(flight.memory, flight.expected, strict=True):
                self._device.host_reads(whole)
                if not torch.equal(whole, expected):
                    self.wrong.append("a stored chunk holds other bytes")
        else:
            self._loaded.difference_update(flight.blocks())
            if flight.blocks():
                self._read(flight.blocks(), None, "after a load")
            for chunk in flight.copies:
                # Its slot goes to somebody else.
                self._device.host_writes(chunk.host)
                chunk.host.fill_(_UNTOUCHED)
