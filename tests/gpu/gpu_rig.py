"""A copier over pages that an engine uses at the same time, and movers that are broken on purpose."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from device_copy_flood import ChunkTask
from device_copy_ways import open_way
from gpu_engine import PATIENCE_S, Engine
from gpu_pages import Geometry, Laid, Pages, payload_difference, random_bytes, sample_ids

from kvsluice.connector.copier import Copier
from kvsluice.kernels.device import Device, Event
from kvsluice.kernels.movers import RING_SLOTS, Mover, OnTensor, Submission
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.kernels.ways import Way

__all__ = ["Break", "Rig", "hasty", "heedless"]

NUM_SLOTS: Final = 8
_NUM_CHUNKS: Final = 16

Break = Callable[[Mover, Device], Mover]


class _Heedless:
    """Does not wait for the engine."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.name = mover.name
        self.max_chunks = mover.max_chunks

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        return self._mover.submit((), copies, on_tensor)


class _Hasty:
    """Says that it is done before it is."""

    def __init__(self, mover: Mover, device: Device) -> None:
        self._mover = mover
        self._idle = device.new_stream("hasty")
        self.name = mover.name
        self.max_chunks = mover.max_chunks

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        self._mover.submit(ready, copies, on_tensor)
        now = self._idle.record()
        return Submission(now, now, None, None)


def heedless(mover: Mover, device: Device) -> Mover:
    """See `_Heedless`."""
    return _Heedless(mover)


def hasty(mover: Mover, device: Device) -> Mover:
    """See `_Hasty`."""
    return _Hasty(mover, device)


class Rig:
    """K and V of some layers, `_NUM_CHUNKS` chunks, and a slot for each of `NUM_SLOTS` of them.

    Args:
        engine: on whose stream the pages are used.
        way: of both directions.
        broken: what is done to the movers.
        layers: of 256 KiB a chunk on a GPU.

    Attributes:
        ids: by chunk, blocks at random.
        contents: two fillings of all memory, on the device; it holds the first.
    """

    def __init__(self, engine: Engine, way: Way, *, broken: Break | None = None, layers: int = 4) -> None:
        self.engine = engine
        items, num_blocks = (4096, 16) if engine.is_cuda else (64, 2)
        geometry = Geometry(
            "rig", (Laid(torch.bfloat16, (2, items), 1),) * layers, num_blocks, _NUM_CHUNKS * num_blocks
        )
        self.pages = Pages(geometry, engine.where)
        self.plan = self.pages.plan
        self._twin = Pages(geometry, torch.device("cpu"))
        self.ids = sample_ids(geometry, _NUM_CHUNKS, "random", 5)
        first = self.pages.memory[0].clone()
        self.contents = (first, first.flip(0))
        self._on_host = tuple(content.cpu() for content in self.contents)
        slot_bytes = -(-(4096 + self.plan.num_bytes) // 4096) * 4096
        # Three slots to a registration: copies end beside its borders.
        self._region = engine.region(NUM_SLOTS, slot_bytes, 3 * slot_bytes)
        # A slot of the staging ring holds a third of a chunk, so that each goes round the ring.
        staging_bytes = RING_SLOTS * (self.plan.num_bytes // 3 // 256 * 256 + 256)
        staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=engine.where) for _ in range(2)]
        engine.finish()
        out = open_way(self.plan, way, "out", engine.device, staging[0])
        into = open_way(self.plan, way, "in", engine.device, staging[1])
        if broken is not None:
            out, into = broken(out, engine.device), broken(into, engine.device)
        self.over: queue.SimpleQueue[ChunkTask] = queue.SimpleQueue()
        self.copier = Copier(engine.device, out, into)

    def slot(self, number: int) -> torch.Tensor:
        """Its payload."""
        return self._region.tensor(number)[4096 : 4096 + self.plan.num_bytes]

    def fill_slot(self, number: int, seed: int) -> torch.Tensor:
        """Random bytes in it; a copy of them."""
        self.slot(number).copy_(random_bytes(self.plan.num_bytes, seed))
        return self.slot(number).clone()

    def store(self, chunk: int, slot: int, ready: Event) -> ChunkTask:
        """Put it."""
        return self._put(chunk, slot, ready, is_store=True)

    def load(self, chunk: int, slot: int, ready: Event) -> ChunkTask:
        """Put it."""
        return self._put(chunk, slot, ready, is_store=False)

    def _put(self, chunk: int, slot: int, ready: Event, *, is_store: bool) -> ChunkTask:
        copy = ChunkCopy(self.ids[chunk], self.slot(slot))
        task = ChunkTask(copy, is_store=is_store, ready=ready, on_over=self.over.put)
        self.copier.put([task])
        return task

    def until_over(self) -> ChunkTask:
        """The next task that is over, with no pause in between."""
        try:
            task = self.over.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise TimeoutError(f"no copy was over after {PATIENCE_S:g} s") from None
        if task.error is not None:
            raise task.error
        assert task.copied
        return task

    def write(self, content: int) -> None:
        """Have the engine write the whole memory."""
        self.engine.queue(lambda: self.pages.memory[0].copy_(self.contents[content]))

    def stored_difference(self, chunk: int, slot: int, content: int) -> str | None:
        """Where the slot is not what the chunk's blocks held with that content."""
        self._twin.memory[0].copy_(self._on_host[content])
        expected = torch.empty(self.plan.num_bytes, dtype=torch.uint8)
        self._twin.oracle().gather(self.ids[chunk], expected)
        return payload_difference(self.plan, self.slot(slot), expected)

    def loaded_difference(self, chunk: int, payload: torch.Tensor, content: int) -> str | None:
        """Where the idle device's memory is not that content with the payload in the chunk's blocks."""
        self._twin.memory[0].copy_(self._on_host[content])
        self._twin.oracle().scatter(self.ids[chunk], payload)
        return self.pages.difference(self._twin)

    def close(self) -> None:
        """End the copier's thread."""
        self.engine.finish()
        assert self.copier.close(time.monotonic() + PATIENCE_S) == []
