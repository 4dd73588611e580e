"""A chunk's payload cut into pieces that fit a staging slot.

    payload   plane | plane | plane | plane ...
    pieces    [ whole planes ][ whole planes ][ some blocks of one large plane ][ the rest of it ] ...

A piece is contiguous in the payload, so one copy moves it. It stands in its slot as far behind a
16-byte boundary as it does in the payload: what is aligned there is aligned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from kvsluice.kernels.plan import CopyPlan, Plane

__all__ = ["Piece", "cut", "cut_by_tensor", "place_in_slot"]

_ALIGNMENT_BYTES: Final = 256
"""Of each chunk's part in a slot: a line of the device's memory, and more than any item."""
_ITEM_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Planes `first_plane` to `last_plane`, and of each the blocks `first_block` to `last_block`, both exclusive.

    Attributes:
        offset, num_bytes: of the piece as it was cut, in the payload; it covers every block of its planes, or
            some of a single plane.
    """

    first_plane: int
    last_plane: int
    first_block: int
    last_block: int
    offset: int
    num_bytes: int

    @property
    def shift_bytes(self) -> int:
        """Where the piece begins in its place in a slot."""
        return self.offset % _ITEM_BYTES

    @property
    def stride_bytes(self) -> int:
        """From one chunk's part to the next in a slot."""
        return -(-(self.shift_bytes + self.num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def chunks_in(self, slot_bytes: int) -> int:
        """Chunks whose parts fit into a slot together; at least 1."""
        return max(1, slot_bytes // self.stride_bytes)

    def without_blocks(self, skip_blocks: int) -> Piece | None:
        """The same place in payload and slot, the chunk's first blocks left out; None where none is left."""
        if skip_blocks <= self.first_block:
            return self
        return None if skip_blocks >= self.last_block else replace(self, first_block=skip_blocks)


def cut(plan: CopyPlan, slot_bytes: int) -> tuple[Piece, ...]:
    """The whole payload, in its order.

    Raises:
        ValueError: a block of one plane does not fit into a slot.
    """
    return tuple(_cut(plan, range(len(plan.planes)), slot_bytes))


def cut_by_tensor(plan: CopyPlan, slot_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each tensor, in the plan's order.

    Raises:
        ValueError: as in `cut`.
    """
    planes: list[list[int]] = [[] for _ in plan.paged]
    for number, plane in enumerate(plan.planes):
        planes[plane.tensor].append(number)
    return tuple(tuple(_cut(plan, range(own[0], own[-1] + 1), slot_bytes)) for own in planes)


def place_in_slot(piece: Piece, num_chunks: int, slot: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """The distance from chunk to chunk in a slot, and each chunk's part of it, uint8 (num_bytes,)."""
    starts = [number * piece.stride_bytes + piece.shift_bytes for number in range(num_chunks)]
    if starts[-1] + piece.num_bytes > len(slot):
        raise ValueError(f"{num_chunks} parts of {piece.num_bytes} bytes do not fit into a slot of {len(slot)}")
    return piece.stride_bytes, [slot[start : start + piece.num_bytes] for start in starts]


def _cut(plan: CopyPlan, planes: Sequence[int], slot_bytes: int) -> Iterator[Piece]:
    first: int | None = None
    for number in planes:
        plane = plan.planes[number]
        end = plane.offset + plane.block_bytes * plan.num_blocks
        if first is not None and end - plan.planes[first].offset > _room(plan.planes[first].offset, slot_bytes):
            yield _whole(plan, first, number)
            first = None
        if end - plane.offset <= _room(plane.offset, slot_bytes):
            first = number if first is None else first
        else:
            yield from _parts(plan, number, plane, slot_bytes)
    if first is not None:
        yield _whole(plan, first, planes[-1] + 1)


def _whole(plan: CopyPlan, first: int, last: int) -> Piece:
    offset = plan.planes[first].offset
    end = plan.planes[last].offset if last < len(plan.planes) else plan.num_bytes
    return Piece(first, last, 0, plan.num_blocks, offset, end - offset)


def _room(offset: int, slot_bytes: int) -> int:
    """Bytes of a slot for a piece that begins there in the payload: whole lines, less what shifts it."""
    return slot_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES - offset % _ITEM_BYTES


def _parts(plan: CopyPlan, number: int, plane: Plane, slot_bytes: int) -> Iterator[Piece]:
    first = 0
    while first < plan.num_blocks:
        offset = plane.offset + first * plane.block_bytes
        room_bytes = _room(offset, slot_bytes)
        last = min(first + room_bytes // plane.block_bytes, plan.num_blocks)
        if last == first:
            name = plan.paged[plane.tensor].name
            raise ValueError(
                f"{name}: a block of {plane.block_bytes} bytes does not fit into {room_bytes} bytes of staging"
            )
        yield Piece(number, number + 1, first, last, offset, (last - first) * plane.block_bytes)
        first = last
