"""What does not fit is refused at a page kernel's door, before a byte is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from paged_cases import DEVICE, MakeKernel, random_bytes

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.pieces import Piece, cut
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.triton_pages import TritonPages

POOL_BLOCKS, NUM_BLOCKS, CHUNKS = 9, 3, 2


@dataclass(frozen=True)
class Call:
    """The arguments of a call that fits, to be spoilt."""

    piece: Piece
    ids: torch.Tensor
    staged: torch.Tensor
    stride_bytes: int


def make_plan() -> CopyPlan:
    """Planes of 600, 600 and 120 bytes; a piece is whole planes, and the large ones are cut where a slot is small."""
    large = random_bytes(2 * POOL_BLOCKS * 200, 1).view(2, POOL_BLOCKS, 200).to(DEVICE)
    small = random_bytes(POOL_BLOCKS * 40, 2).view(torch.int16).view(POOL_BLOCKS, 20).to(DEVICE)
    return CopyPlan([PagedTensor(large, 1, name="large"), PagedTensor(small, 0, name="small")], NUM_BLOCKS)


def fitting(plan: CopyPlan, piece: Piece) -> Call:
    ids = torch.arange(CHUNKS * NUM_BLOCKS, device=DEVICE).view(CHUNKS, NUM_BLOCKS)
    needed_bytes = (CHUNKS - 1) * piece.stride_bytes + piece.shift_bytes + piece.num_bytes
    return Call(piece, ids, random_bytes(needed_bytes, 3).to(DEVICE), piece.stride_bytes)


def foreign(call: Call) -> Piece:
    """A piece of a plan that has as many planes and blocks, but other pages."""
    pages = torch.zeros((3, POOL_BLOCKS, 24), dtype=torch.uint8)
    return cut(CopyPlan([PagedTensor(pages, 1)], NUM_BLOCKS), 4096)[0]


Spoil = Callable[[Call], Call]
WHOLE: list[tuple[str, Spoil, type[Exception], str]] = [
    ("a plane too many", lambda it: replace(it, piece=replace(it.piece, last_plane=4)), ValueError, "no part of"),
    (
        "a plane before the first",
        lambda it: replace(it, piece=replace(it.piece, first_plane=-1)),
        ValueError,
        "no part",
    ),
    ("no plane", lambda it: replace(it, piece=replace(it.piece, first_plane=3)), ValueError, "no part of"),
    ("a block too many", lambda it: replace(it, piece=replace(it.piece, last_block=4)), ValueError, "no part of"),
    (
        "a block before the first",
        lambda it: replace(it, piece=replace(it.piece, first_block=-1)),
        ValueError,
        "no part",
    ),
    ("no block", lambda it: replace(it, piece=replace(it.piece, first_block=3)), ValueError, "no part of"),
    ("a block too few", lambda it: replace(it, piece=replace(it.piece, last_block=2)), ValueError, "no part of"),
    ("an offset too high", lambda it: replace(it, piece=replace(it.piece, offset=16)), ValueError, "no part of"),
    ("another plan's piece", lambda it: replace(it, piece=foreign(it)), ValueError, "of 3 planes, 3 blocks and 1320"),
    ("ids of 32 bits", lambda it: replace(it, ids=it.ids.int()), TypeError, "ids must be int64, got torch.int32"),
    ("ids of one chunk, flat", lambda it: replace(it, ids=it.ids[0]), ValueError, r"\(chunks, 3\), got \(3,\)"),
    ("an id too few", lambda it: replace(it, ids=it.ids[:, :2].contiguous()), ValueError, r"got \(2, 2\)"),
    ("ids of no chunk", lambda it: replace(it, ids=it.ids[:0]), ValueError, r"got \(0, 3\)"),
    (
        "ids across the table",
        lambda it: replace(it, ids=it.ids.t().contiguous().t()),
        ValueError,
        r"got \(2, 3\) with strides \(1, 2\)",
    ),
    ("ids elsewhere", lambda it: replace(it, ids=it.ids.to("meta")), ValueError, "ids must be on .*, got meta"),
    ("signed staging", lambda it: replace(it, staged=it.staged.view(torch.int8)), TypeError, "uint8, got torch.int8"),
    ("staging elsewhere", lambda it: replace(it, staged=it.staged.to("meta")), ValueError, "memory must be on .* meta"),
    ("staging of two axes", lambda it: replace(it, staged=it.staged[None]), ValueError, r"contiguous .* shape \(1, "),
    (
        "every other byte of staging",
        lambda it: replace(it, staged=it.staged.repeat(2)[::2]),
        ValueError,
        r"with strides \(2,\)",
    ),
    (
        "staging between two lines",
        lambda it: replace(it, staged=torch.cat([it.staged[:8], it.staged])[8:]),
        ValueError,
        "aligned to 16 bytes, got shape",
    ),
    ("staging a byte too short", lambda it: replace(it, staged=it.staged[:-1]), ValueError, "2 chunks need 2856 bytes"),
    (
        "staging of one chunk for two",
        lambda it: replace(it, staged=it.staged[: it.stride_bytes]),
        ValueError,
        "2 chunks need 2856 bytes of staging memory, got 1536",
    ),
    ("chunks over each other", lambda it: replace(it, stride_bytes=1312), ValueError, "1312 bytes from chunk to chunk"),
    ("chunks between two lines", lambda it: replace(it, stride_bytes=1528), ValueError, "1528 bytes from chunk to"),
    ("chunks backwards", lambda it: replace(it, stride_bytes=-1536), ValueError, "-1536 bytes from chunk to chunk"),
]
PARTS: list[tuple[str, Spoil, type[Exception], str]] = [
    ("blocks of another part", lambda it: replace(it, piece=replace(it.piece, last_block=3)), ValueError, "no part of"),
    (
        "another plane",
        lambda it: replace(it, piece=replace(it.piece, first_plane=1, last_plane=2)),
        ValueError,
        "no pa",
    ),
    ("a byte too many", lambda it: replace(it, piece=replace(it.piece, num_bytes=401)), ValueError, "no part of"),
]


def refused(make: MakeKernel, plan: CopyPlan, call: Call, error: type[Exception], message: str) -> None:
    kernel = make(plan)
    memory = [item.tensor.clone() for item in plan.paged]
    staged = call.staged.clone()
    for move in (kernel.gather, kernel.scatter):
        with pytest.raises(error, match=message):
            move(call.piece, call.ids, call.staged, call.stride_bytes)
    for item, before in zip(plan.paged, memory, strict=True):
        assert torch.equal(item.tensor, before)
    if staged.device.type != "meta":
        assert torch.equal(call.staged, staged)


@pytest.mark.parametrize("make", [TorchPages, TritonPages])
@pytest.mark.parametrize(("spoil", "error", "message"), [it[1:] for it in WHOLE], ids=[it[0] for it in WHOLE])
def test_a_call_that_does_not_fit_is_refused_and_nothing_is_written(
    make: MakeKernel, spoil: Spoil, error: type[Exception], message: str
) -> None:
    plan = make_plan()
    (piece,) = cut(plan, 4096)
    refused(make, plan, spoil(fitting(plan, piece)), error, message)


@pytest.mark.parametrize("make", [TorchPages, TritonPages])
@pytest.mark.parametrize(("spoil", "error", "message"), [it[1:] for it in PARTS], ids=[it[0] for it in PARTS])
def test_a_part_of_a_plane_that_does_not_fit_is_refused_and_nothing_is_written(
    make: MakeKernel, spoil: Spoil, error: type[Exception], message: str
) -> None:
    plan = make_plan()
    piece = cut(plan, 512)[0]
    assert (piece.last_plane, piece.last_block) == (1, 2)
    refused(make, plan, spoil(fitting(plan, piece)), error, message)


@pytest.mark.parametrize("make", [TorchPages, TritonPages])
@pytest.mark.parametrize("slot_bytes", [512, 4096])
@pytest.mark.parametrize("skip_blocks", [0, 1, 2])
def test_what_fits_is_let_in_trimmed_or_whole(make: MakeKernel, slot_bytes: int, skip_blocks: int) -> None:
    plan = make_plan()
    kernel = make(plan)
    for piece in cut(plan, slot_bytes):
        trimmed = piece.without_blocks(skip_blocks)
        if trimmed is not None:
            call = fitting(plan, trimmed)
            kernel.gather(trimmed, call.ids, call.staged, call.stride_bytes)
            kernel.scatter(trimmed, call.ids, call.staged, call.stride_bytes)


@pytest.mark.parametrize("make", [TorchPages, TritonPages])
def test_a_single_chunk_needs_no_distance_to_the_next(make: MakeKernel) -> None:
    plan = make_plan()
    (piece,) = cut(plan, 4096)
    call = fitting(plan, piece)
    make(plan).gather(piece, call.ids[:1], call.staged[: piece.num_bytes], 0)
