"""A payload cut into pieces: every byte once, in order, and no piece too large for its slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mover_traffic import Pool, pools, small_pool

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.pieces import Piece, cut, cut_by_tensor, place_in_slot

SLOT_STEPS = st.integers(0, 40)
"""Slots that are so many times 100 bytes larger than the smallest that will do."""


def check(plan: CopyPlan, pieces: list[Piece], slot_bytes: int) -> None:
    """Every block of every plane once, in the payload's order, each piece within a slot."""
    end = 0
    blocks: list[tuple[int, int]] = []
    for piece in pieces:
        assert piece.offset == end
        assert piece.num_bytes > 0
        end = piece.offset + piece.num_bytes
        covered = [
            (plane, block)
            for plane in range(piece.first_plane, piece.last_plane)
            for block in range(piece.first_block, piece.last_block)
        ]
        assert piece.num_bytes == sum(plan.planes[plane].block_bytes for plane, _ in covered)
        first, first_block = covered[0]
        assert piece.offset == plan.planes[first].offset + first_block * plan.planes[first].block_bytes
        blocks += covered
        assert piece.shift_bytes == piece.offset % 16
        assert piece.stride_bytes % 256 == 0
        assert piece.shift_bytes + piece.num_bytes <= piece.stride_bytes <= slot_bytes
    assert end == plan.num_bytes
    assert blocks == [(plane, block) for plane in range(len(plan.planes)) for block in range(plan.num_blocks)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(pools(), SLOT_STEPS)
def test_a_cut_covers_the_payload_once_and_in_order(pool: Pool, steps: int) -> None:
    plan, slot_bytes = pool.plan(), pool.slot_bytes + 100 * steps
    check(plan, list(cut(plan, slot_bytes)), slot_bytes)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(pools(), SLOT_STEPS)
def test_a_cut_by_tensor_covers_each_tensor_alone(pool: Pool, steps: int) -> None:
    plan, slot_bytes = pool.plan(), pool.slot_bytes + 100 * steps
    by_tensor = cut_by_tensor(plan, slot_bytes)
    check(plan, [piece for pieces in by_tensor for piece in pieces], slot_bytes)
    assert len(by_tensor) == len(plan.paged)
    for number, pieces in enumerate(by_tensor):
        assert pieces[0].offset == plan.offsets[number]
        assert pieces[-1].offset + pieces[-1].num_bytes == plan.offsets[number + 1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pools(), SLOT_STEPS)
def test_chunks_that_fit_a_slot_together_have_parts_of_their_own_there(pool: Pool, steps: int) -> None:
    plan, slot_bytes = pool.plan(), pool.slot_bytes + 100 * steps
    slot = torch.zeros(slot_bytes, dtype=torch.uint8)
    for piece in cut(plan, slot_bytes):
        count = piece.chunks_in(slot_bytes)
        slot.zero_()
        stride_bytes, parts = place_in_slot(piece, count, slot)
        for number, part in enumerate(parts):
            assert len(part) == piece.num_bytes
            assert part.data_ptr() - slot.data_ptr() == piece.shift_bytes + number * stride_bytes
            part.add_(1)
        assert int(slot.max()) == 1, "two chunks share a byte"
        assert int(slot.sum()) == count * piece.num_bytes
        with pytest.raises(ValueError, match=f"{count + 1} parts of {piece.num_bytes} bytes do not fit"):
            place_in_slot(piece, count + 1, slot[: count * stride_bytes])


def plan_of(*block_bytes: int, num_blocks: int = 4) -> CopyPlan:
    """A tensor for each size of a block."""
    return CopyPlan(
        [PagedTensor(torch.zeros(8, size, dtype=torch.uint8), 0, name=f"layer {size}") for size in block_bytes],
        num_blocks,
    )


def test_planes_share_a_piece_while_they_fit_and_a_large_one_is_cut_by_blocks() -> None:
    plan = plan_of(40, 50, 200, 10)
    pieces = cut(plan, 512)
    # The third begins 8 bytes behind a boundary, and so it does in its slots: 504 bytes are left of each.
    assert [(piece.first_plane, piece.last_plane, piece.first_block, piece.last_block) for piece in pieces] == [
        (0, 2, 0, 4),
        (2, 3, 0, 2),
        (2, 3, 2, 4),
        (3, 4, 0, 4),
    ]
    assert [piece.offset for piece in pieces] == [0, 360, 760, 1160]
    assert [piece.shift_bytes for piece in pieces] == [0, 8, 8, 8]


def test_a_piece_fills_its_slot_to_the_last_byte_whatever_its_shift_is() -> None:
    (together,) = cut(plan_of(15, 497, num_blocks=1), 512)
    assert (together.num_bytes, together.shift_bytes, together.stride_bytes) == (512, 0, 512)
    first, second = cut(plan_of(31, 497, num_blocks=1), 512)
    assert (first.num_bytes, second.num_bytes, second.shift_bytes, second.stride_bytes) == (31, 497, 15, 512)
    with pytest.raises(ValueError, match="layer 498: a block of 498 bytes does not fit into 497 bytes of staging"):
        cut(plan_of(31, 498, num_blocks=1), 512)


def test_pages_of_a_power_of_two_fill_slots_of_one() -> None:
    pieces = cut(plan_of(*[64] * 8, num_blocks=2), 256)
    assert [piece.num_bytes for piece in pieces] == [256, 256, 256, 256]
    assert [piece.num_bytes for piece in cut(plan_of(64, num_blocks=8), 256)] == [256, 256]


@pytest.mark.parametrize("slot_bytes", [512, 600, 767])
def test_what_a_slot_has_beyond_whole_lines_is_not_used(slot_bytes: int) -> None:
    assert cut(plan_of(100, num_blocks=5), slot_bytes) == cut(plan_of(100, num_blocks=5), 512)


def test_a_block_that_fits_no_slot_is_named_by_its_tensor() -> None:
    for cutting in (cut, cut_by_tensor):
        with pytest.raises(ValueError, match="layer 300: a block of 300 bytes does not fit into 248 bytes of staging"):
            cutting(plan_of(10, 300), 256)


def test_leading_blocks_are_left_out_of_the_pieces_that_have_them() -> None:
    plan = plan_of(40, 200)
    whole, first, second = cut(plan, 512)
    for skip_blocks in range(5):
        left = [piece.without_blocks(skip_blocks) for piece in (whole, first, second)]
        blocks = [None if piece is None else (piece.first_block, piece.last_block) for piece in left]
        assert blocks == [
            (skip_blocks, 4) if skip_blocks < 4 else None,
            (skip_blocks, 2) if skip_blocks < 2 else None,
            (max(2, skip_blocks), 4) if skip_blocks < 4 else None,
        ]
        for piece, kept in zip(left, (whole, first, second), strict=True):
            if piece is not None:
                assert (piece.offset, piece.num_bytes, piece.stride_bytes) == (
                    kept.offset,
                    kept.num_bytes,
                    kept.stride_bytes,
                )


def test_the_small_pool_is_cut_as_the_movers_tests_need_it() -> None:
    pool = small_pool()
    assert pool.slot_bytes == 256
    assert len(cut(pool.plan(), pool.slot_bytes)) == 7
