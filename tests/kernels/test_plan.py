"""A copy plan knows where every byte lies, and lets nothing through that does not fit."""

from __future__ import annotations

import pytest
import torch

from kvsluice.kernels import CopyPlan, PagedTensor


def pages(blocks: int = 4, name: str = "tensor") -> PagedTensor:
    return PagedTensor(torch.zeros((blocks, 10), dtype=torch.int16), 0, name=name)


def test_a_plan_refuses_tensors_that_do_not_go_together() -> None:
    four, five = (pages(blocks, f"of {blocks}") for blocks in (4, 5))
    with pytest.raises(ValueError, match="number of blocks differs: 4 in of 4, 5 in of 5"):
        CopyPlan([four, five], 1)
    with pytest.raises(ValueError, match="at least one tensor"):
        CopyPlan([], 1)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        CopyPlan([four], 0)
    elsewhere = PagedTensor(torch.zeros((4, 2), dtype=torch.uint8, device="meta"), 0, name="elsewhere")
    with pytest.raises(ValueError, match="device differs: cpu in of 4, meta in elsewhere"):
        CopyPlan([four, elsewhere], 1)
    with pytest.raises(TypeError, match="takes PagedTensor, got Tensor"):
        CopyPlan([four, four.tensor], 1)  # type: ignore[list-item]


def test_planes_follow_each_other_in_the_payload_and_name_every_byte_of_a_block() -> None:
    storage = torch.zeros((3, 8, 5, 7), dtype=torch.uint8)
    first = PagedTensor(storage[:, :, :, :4], 1, 2, "first")
    second = PagedTensor(torch.zeros((4, 6), dtype=torch.int32), 0, name="second")
    plan = CopyPlan([first, second], 3)
    assert plan.offsets == (0, 3 * 3 * 40, 3 * 3 * 40 + 3 * 24)
    assert plan.num_bytes == plan.offsets[-1]
    assert plan.num_pool_blocks == 4
    assert [plane.tensor for plane in plan.planes] == [0, 0, 0, 1]
    assert [plane.offset for plane in plan.planes] == [0, 120, 240, 360]
    assert [plane.address - storage.data_ptr() for plane in plan.planes[:3]] == [0, 280, 560]
    for plane in plan.planes[:3]:
        assert (plane.block_bytes, plane.block_stride, plane.run_bytes) == (40, 70, 4)
        assert plane.run_offsets == tuple(range(0, 70, 7))
    last = plan.planes[3]
    assert (last.address, last.run_bytes, last.run_offsets) == (second.tensor.data_ptr(), 24, (0,))


@pytest.mark.parametrize(
    ("block_ids", "flat", "error", "message"),
    [
        ([0], torch.zeros(40, dtype=torch.uint8), ValueError, "a chunk has 2 blocks, got 1"),
        ([0, 4], torch.zeros(40, dtype=torch.uint8), ValueError, "block id 4 is outside the pool: 0 to 3"),
        ([-1, 0], torch.zeros(40, dtype=torch.uint8), ValueError, "block id -1 is outside"),
        ([0, 1], torch.zeros(40, dtype=torch.int8), TypeError, "must be uint8, got torch.int8"),
        ([0, 1], torch.zeros(41, dtype=torch.uint8), ValueError, r"of shape \(40,\), got \(41,\)"),
        ([0, 1], torch.zeros(4, 10, dtype=torch.uint8), ValueError, r"got \(4, 10\)"),
        ([0, 1], torch.zeros(80, dtype=torch.uint8)[::2], ValueError, r"strides \(2,\)"),
        ([0, 1], torch.zeros(40, dtype=torch.uint8, device="meta"), ValueError, "got meta"),
    ],
)
def test_the_door_names_what_does_not_fit(
    block_ids: list[int], flat: torch.Tensor, error: type[Exception], message: str
) -> None:
    plan = CopyPlan([pages()], 2)
    with pytest.raises(error, match=message):
        plan.check_gather(block_ids, flat)
    with pytest.raises(error, match=message):
        plan.check_scatter(block_ids, flat, 0)


def test_a_tail_is_checked_like_a_whole_chunk() -> None:
    plan = CopyPlan([pages()], 3)
    src = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    for skip_blocks in (-1, 4):
        with pytest.raises(ValueError, match=f"skip_blocks must be 0 to 3, got {skip_blocks}"):
            plan.check_scatter([0, 1, 2], src, skip_blocks)
    with pytest.raises(ValueError, match="block id 9 is outside"):
        plan.check_scatter([9, 1, 2], src, 1)


def test_a_block_may_be_read_twice_and_written_once() -> None:
    plan = CopyPlan([pages()], 3)
    flat = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    plan.check_gather([2, 2, 3], flat)
    plan.check_scatter([2, 2, 3], flat, 1)
    with pytest.raises(ValueError, match="block id 2 is named twice"):
        plan.check_scatter([2, 2, 3], flat, 0)
    with pytest.raises(ValueError, match="block id 3 is named twice"):
        plan.check_scatter([2, 3, 3], flat, 1)
