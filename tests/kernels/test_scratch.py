"""Scratch pages have the sizes, runs and block count of the real ones, and a bound."""

from __future__ import annotations

import pytest
import torch

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.scratch import PlainCopy, scratch_plan


def plan_of(*shapes: tuple[int, ...], axis: int = 0, num_blocks: int = 4, keep: int | None = None) -> CopyPlan:
    tensors = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
    return CopyPlan([PagedTensor(tensor[..., :keep], axis) for tensor in tensors], num_blocks)


def kinds(plan: CopyPlan) -> list[tuple[int, int, int, bool]]:
    return [
        (plane.block_bytes, plane.run_bytes, len(plane.run_offsets), plan.geometries[plane.tensor].dense)
        for plane in plan.planes
    ]


@pytest.mark.parametrize(
    "plan",
    [
        plan_of((8, 4096), (8, 512)),
        plan_of((2, 8, 100), axis=1),
        plan_of((8, 6, 40), keep=32),
        plan_of((8, 100), keep=99),
    ],
    ids=["dense", "outer", "runs", "padded"],
)
def test_scratch_pages_are_laid_out_as_the_real_ones(plan: CopyPlan) -> None:
    scratch = scratch_plan(plan, 1 << 20)
    assert kinds(scratch) == kinds(plan)
    assert scratch.num_blocks == plan.num_blocks
    assert scratch.num_bytes == plan.num_bytes
    real = {item.tensor.untyped_storage().data_ptr() for item in plan.paged}
    assert not real & {item.tensor.untyped_storage().data_ptr() for item in scratch.paged}


@pytest.mark.parametrize(("max_bytes", "planes", "num_blocks"), [(1 << 15, 1, 4), (1 << 16, 2, 4), (9000, 1, 1)])
def test_scratch_pages_take_no_more_than_they_may(max_bytes: int, planes: int, num_blocks: int) -> None:
    scratch = scratch_plan(plan_of((8, 4096), (8, 4096), (8, 4096)), max_bytes)
    assert (len(scratch.planes), scratch.num_blocks) == (planes, num_blocks)
    assert sum(item.tensor.untyped_storage().nbytes() for item in scratch.paged) <= max_bytes


def test_two_blocks_of_one_plane_are_the_least() -> None:
    scratch = scratch_plan(plan_of((8, 4096)), 100)
    assert (scratch.num_blocks, scratch.num_pool_blocks) == (1, 2)


def test_the_plain_copy_moves_a_chunks_bytes_there_and_back() -> None:
    plan = plan_of((8, 16))
    copy = PlainCopy(plan)
    sent = torch.randint(256, (plan.num_bytes,), dtype=torch.uint8)
    copy.scatter((0, 1, 2, 3), sent)
    got = torch.zeros_like(sent)
    copy.gather((0, 1, 2, 3), got)
    assert torch.equal(got, sent)
