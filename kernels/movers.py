"""Chunks on their way between pages and host memory: what goes on which stream, in which order.

    direct        stream    wait ready, start | copy ... copy                              | end

    staged, out   kernels   wait ready, start | gather a      | gather b | ...
                  copies              wait a gathered | copy a      | copy b | ...         | end

    staged, in    copies    wait ready, start | copy a      | copy b | ...
                  kernels             wait a landed | scatter a     | scatter b | ...      | end

A mover queues all of it and never waits for the device. The staging area is a ring of slots: a slot is
written again only behind the event of its last use, which the stream waits for and not the thread.
The engine's pages are read and written behind `ready`; nobody may touch them, or the host memory, before
`end` has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from kvsluice.kernels.block_ids import BlockIds, BlockIdsPool
from kvsluice.kernels.device import Device, Event, Stream
from kvsluice.kernels.operations import (
    ChunkCopy,
    CopyDirect,
    CopyPages,
    CopyStaged,
    DirectCopy,
    Direction,
    FetchIds,
    PageKernel,
)
from kvsluice.kernels.pieces import Piece, cut, cut_by_tensor, place_in_slot
from kvsluice.kernels.plan import CopyPlan

__all__ = [
    "MIN_STAGING_BYTES",
    "RING_SLOTS",
    "STAGING_BYTES",
    "DirectMover",
    "Mover",
    "OnTensor",
    "StagedMover",
    "Submission",
]

RING_SLOTS: Final = 4
"""Slots of one direction's staging. Two would let a kernel and a copy overlap; the others absorb the time that a
slot waits for the thread that queues the work."""


_SUBMISSIONS: Final = 3
"""For so many that are under way at once everything is allocated beforehand: nothing is while an engine runs."""
STAGING_BYTES: Final = 64 << 20
"""Device memory for pages on their way, both directions together, where nobody says otherwise: slots of 8 MiB."""
MIN_STAGING_BYTES: Final = 1 << 20
"""For both directions. Less would cut chunks into pieces that a copy's fixed cost outweighs."""


OnTensor = Callable[[int, Event], None]
"""Told, in the plan's order, that a tensor of every chunk is there once the event has passed."""


@dataclass(slots=True)
class Submission:
    """What one call queued.

    Attributes:
        start, end: events around the device's work, in the order of the direction's streams.
        before: the end of the submission before it in this direction; its time is not this one's.
        error: what kept the rest from being queued; what was queued is over at `end` all the same.
    """

    start: Event
    end: Event
    before: Event | None
    error: Exception | None
    _ids: BlockIds | None = None

    def query(self) -> bool:
        """Whether the device is done with it. Raises what the device failed with, where it did."""
        return self.end.query()

    def seconds(self) -> float:
        """Device time from the start, or from the end of the submission before where that is later. Once passed."""
        taken_s = self.end.seconds_since(self.start)
        return taken_s if self.before is None else min(taken_s, self.end.seconds_since(self.before))

    def release(self) -> None:
        """Give back what only this submission used; called once, when `query` has said yes."""
        ids, self._ids, self.before = self._ids, None, None
        if ids is not None:
            ids.release()


class Mover(Protocol):
    """One direction's way between pages and host memory. Used by one thread."""

    @property
    def name(self) -> str:
        """The way's name, as the configuration calls it."""
        ...

    @property
    def max_chunks(self) -> int:
        """Chunks that one submission should carry at most."""
        ...

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        """Queue `copies` behind the events `ready`.

        Args:
            ready: events of the engine's stream.
            copies: at least one, at most `max_chunks` of them unless `on_tensor` is given.
            on_tensor: move tensor by tensor, each of all chunks before the next, and tell of each.

        Raises:
            TypeError, ValueError: a copy that does not fit the plan; nothing was queued.
            Exception: what the device raised where not even an end could be marked.
        """
        ...


def _check(plan: CopyPlan, direction: Direction, copies: Sequence[ChunkCopy]) -> None:
    if not copies:
        raise ValueError("a submission needs at least one chunk")
    for chunk in copies:
        if chunk.host.device.type != "cpu":
            raise ValueError(f"a chunk is moved to and from host memory, got {chunk.host.device}")
        if direction == "out":
            if chunk.skip_blocks:
                raise ValueError(f"skip_blocks is for chunks on their way in, got {chunk.skip_blocks}")
            plan.check_gather(chunk.block_ids, chunk.host)
        else:
            plan.check_scatter(chunk.block_ids, chunk.host, chunk.skip_blocks)


class DirectMover:
    """Each chunk in one go, on one stream: host memory, and the driver's batched copy.

    Args:
        copy: what makes the copies.
        device: gives the stream.
        direction: see `Direction`.
        name: of the way.
        max_chunks: chunks in one submission; 1 where a copy is over when the call returns, so that each
            chunk is told of as soon as it is there.
    """

    def __init__(
        self, copy: DirectCopy, device: Device, direction: Direction, *, name: str, max_chunks: int = 1
    ) -> None:
        self.name = name
        self.max_chunks = max_chunks
        self._copy = copy
        self._direction = direction
        self._stream = device.new_stream(direction)

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        """See `Mover.submit`."""
        plan = self._copy.plan
        _check(plan, self._direction, copies)
        stream = self._stream
        for event in ready:
            stream.wait(event)
        start = stream.record()
        error: Exception | None = None
        try:
            if on_tensor is None:
                for chunk in copies:
                    stream.submit(CopyDirect(self._copy, self._direction, chunk))
            else:
                for number in range(len(plan.paged)):
                    for chunk in copies:
                        stream.submit(CopyDirect(self._copy, self._direction, chunk, range(number, number + 1)))
                    on_tensor(number, stream.record())
        except Exception as failure:  # noqa: BLE001 - torch and the driver raise what they like
            # Part of it may be on the device: the blocks are free when that has passed, not now.
            error = failure
        # On one stream a start is never before the end of what went before.
        return Submission(start, stream.record(), None, error)


@dataclass(slots=True)
class _Slot:
    """A part of the staging ring and the event behind its last use."""

    number: int
    memory: torch.Tensor
    free: Event | None = None


@dataclass(slots=True)
class _Underway:
    """What one submission has queued so far."""

    ids: BlockIds
    slots: list[_Slot] = field(default_factory=list)


class StagedMover:
    """Through a ring of staging slots on the device: a kernel for the scattered pages, one copy for the link.

    Kernels and copies have a stream each, so that the link is busy while the next piece is gathered.

    Args:
        plan: the geometry; no block under one outer index may exceed a slot.
        kernel: moves pages to and from staging memory.
        device: gives the streams.
        direction: see `Direction`.
        staging: uint8 (bytes,), contiguous, on the plan's device; this mover's alone.
        name: of the way.
        max_chunks: chunks in one submission.

    Raises:
        ValueError: a block does not fit into a slot.
    """

    def __init__(
        self,
        plan: CopyPlan,
        kernel: PageKernel,
        device: Device,
        direction: Direction,
        staging: torch.Tensor,
        *,
        name: str,
        max_chunks: int,
    ) -> None:
        self.name = name
        self.max_chunks = max_chunks
        self._plan = plan
        self._kernel = kernel
        self._direction: Direction = direction
        slot_bytes = len(staging) // RING_SLOTS // 256 * 256
        self._slots = [
            _Slot(number, staging[number * slot_bytes : (number + 1) * slot_bytes]) for number in range(RING_SLOTS)
        ]
        self._at = 0
        self._pieces = cut(plan, slot_bytes)
        self._layers = cut_by_tensor(plan, slot_bytes)
        self._slot_bytes = slot_bytes
        self._kernels = device.new_stream(f"{direction} kernels")
        self._copies = device.new_stream(direction)
        self._ids = BlockIdsPool(plan.num_blocks, plan.device, num_chunks=max_chunks, num_buffers=_SUBMISSIONS)
        self._last: Event | None = None

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        """See `Mover.submit`."""
        _check(self._plan, self._direction, copies)
        first, last = (self._kernels, self._copies) if self._direction == "out" else (self._copies, self._kernels)
        for event in ready:
            first.wait(event)
        start = first.record()
        # The engine is through with the pages before either goes on, and nothing is over before it was begun: a
        # load that leaves every block as it is has no copy that its kernels would wait for.
        last.wait(start)
        work = _Underway(self._ids.take([chunk.block_ids for chunk in copies]))
        error: Exception | None = None
        try:
            self._kernels.submit(FetchIds(work.ids))
            if on_tensor is None:
                self._move(work, copies)
            else:
                self._move_by_tensor(work, copies, on_tensor)
        except Exception as failure:  # noqa: BLE001 - torch, Triton and the driver raise what they like
            error = failure
        if error is not None:
            last.wait(first.record())
        end = last.record()
        if error is not None:
            # Which of a slot's two uses was queued is not known: both are over at the end.
            for slot in work.slots:
                slot.free = end
        submission = Submission(start, end, self._last, error, work.ids)
        self._last = end
        return submission

    def _move(self, work: _Underway, copies: Sequence[ChunkCopy]) -> None:
        # Chunks that need more than a slot come one by one; of small ones several share it.
        together = self._pieces[0].chunks_in(self._slot_bytes) if len(self._pieces) == 1 else 1
        for first, count in _groups(copies, together):
            for piece in self._pieces:
                self._move_piece(work, copies, first, count, piece)

    def _move_by_tensor(self, work: _Underway, copies: Sequence[ChunkCopy], on_tensor: OnTensor) -> None:
        for number, pieces in enumerate(self._layers):
            for piece in pieces:
                for first, count in _groups(copies, piece.chunks_in(self._slot_bytes)):
                    self._move_piece(work, copies, first, count, piece)
            on_tensor(number, (self._copies if self._direction == "out" else self._kernels).record())

    def _move_piece(self, work: _Underway, copies: Sequence[ChunkCopy], first: int, count: int, piece: Piece) -> None:
        trimmed = piece.without_blocks(copies[first].skip_blocks)
        if trimmed is None:
            return
        slot = self._slots[self._at]
        self._at = (self._at + 1) % len(self._slots)
        work.slots.append(slot)
        stride_bytes, parts = place_in_slot(piece, count, slot.memory)
        pages = CopyPages(
            self._kernel,
            self._direction,
            trimmed,
            work.ids,
            first,
            count,
            slot.number,
            slot.memory,
            stride_bytes,
        )
        staged = [
            CopyStaged(self._direction, slot.number, part, chunk.host[piece.offset : piece.offset + piece.num_bytes])
            for part, chunk in zip(parts, copies[first : first + count], strict=True)
        ]
        if self._direction == "out":
            _wait(self._kernels, slot.free)
            self._kernels.submit(pages)
            self._copies.wait(self._kernels.record())
            for copy in staged:
                self._copies.submit(copy)
            slot.free = self._copies.record()
        else:
            _wait(self._copies, slot.free)
            for copy in staged:
                self._copies.submit(copy)
            self._kernels.wait(self._copies.record())
            self._kernels.submit(pages)
            slot.free = self._kernels.record()


def _wait(stream: Stream, event: Event | None) -> None:
    if event is not None:
        stream.wait(event)


def _groups(copies: Sequence[ChunkCopy], together: int) -> Iterator[tuple[int, int]]:
    """(first, count) of chunks that share a slot: neighbours that leave out the same blocks."""
    first = 0
    while first < len(copies):
        count = 1
        while (
            count < together
            and first + count < len(copies)
            and copies[first + count].skip_blocks == copies[first].skip_blocks
        ):
            count += 1
        yield first, count
        first += count
