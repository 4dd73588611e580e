"""Planes that are alike go into one group, and a group's runs are rows that move in one call."""

from __future__ import annotations

import pytest
import torch

from kvsluice.kernels import CopyPlan, PagedTensor, rows
from kvsluice.kernels.plan import Plane
from kvsluice.kernels.rows import PlaneGroup, groups_of


def plane(
    tensor: int, *, run_bytes: int = 64, runs: int = 1, stride: int = 64, address: int = 1 << 20, offset: int = 0
) -> Plane:
    return Plane(tensor, address, offset, run_bytes * runs, stride, run_bytes, tuple(range(0, 128 * runs, 128)))


def sizes(groups: list[PlaneGroup]) -> list[int]:
    return [len(group.planes) for group in groups]


def test_all_layers_of_one_kind_are_one_group() -> None:
    groups = list(groups_of([plane(tensor) for tensor in range(32) for _ in range(2)]))
    assert sizes(groups) == [64]
    assert groups[0].bounds == tuple(range(0, 66, 2))
    assert groups[0].run_bytes == 64
    assert groups[0].dense


@pytest.mark.parametrize(
    "other",
    [
        plane(1, run_bytes=32, stride=32),
        plane(1, stride=128),
        plane(1, runs=2),
        plane(1, run_bytes=32, runs=2),
    ],
)
def test_planes_of_another_kind_begin_a_new_group(other: Plane) -> None:
    groups = list(groups_of([plane(0), plane(0), other, plane(2)]))
    assert sizes(groups) == [2, 1, 1]
    assert [group.dense for group in groups] == [True, other.block_stride == 32, True]


def test_a_tensor_is_not_divided_where_tensors_lie_too_far_apart_for_one_matrix() -> None:
    far = [plane(0), plane(0), plane(1, address=1 << 40), plane(1), plane(2), plane(3, address=1 << 60)]
    groups = list(groups_of(far))
    assert [[own.tensor for own in group.planes] for group in groups] == [[0, 0, 1, 1, 2], [3]]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (None, (0, 5)),
        (range(9), (0, 5)),
        (range(3), (0, 0)),
        (range(4), (0, 2)),
        (range(4, 5), (2, 3)),
        (range(4, 6), (2, 5)),
        (range(5, 9), (3, 5)),
        (range(6, 9), (5, 5)),
        (range(5, 5), (3, 3)),
    ],
)
def test_a_group_knows_which_of_its_planes_belong_to_a_range_of_tensors(
    tensors: range | None, expected: tuple[int, int]
) -> None:
    (group,) = groups_of([plane(tensor) for tensor in (3, 3, 4, 5, 5)])
    assert group.within(tensors) == expected


def test_only_the_rows_of_the_named_blocks_are_touched_though_the_matrix_spans_all_between() -> None:
    memory = torch.arange(40 * 64, dtype=torch.int16).remainder(251).to(torch.uint8)
    before = memory.clone()
    first, second = memory[64 * 2 :][: 64 * 4].view(4, 64), memory[64 * 31 :][: 64 * 4].view(4, 64)
    plan = CopyPlan([PagedTensor(first, 0), PagedTensor(second, 0)], 2)
    (group,) = groups_of(plan.planes)
    moved = rows.Rows(group, 2, 4)
    chunk = torch.full((4, 64), 255, dtype=torch.uint8)
    moved.scatter((0, 2), torch.tensor([[3], [0]]), chunk.data_ptr())
    changed = (memory != before).view(40, 64).any(1).nonzero().flatten().tolist()
    assert changed == [2, 5, 31, 34]


def test_the_probe_says_which_items_scatter_fastest_and_both_kinds_move_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rows.fast_by_the_byte() in (True, False)
    pages = torch.zeros((4, 64), dtype=torch.uint8)
    (group,) = groups_of(CopyPlan([PagedTensor(pages, 0)], 2).planes)
    chunk = torch.randint(256, (2, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for by_the_byte in (True, False):
        monkeypatch.setattr(rows, "fast_by_the_byte", lambda answer=by_the_byte: answer)
        pages.zero_()
        rows.Rows(group, 2, 4).scatter((0, 1), torch.tensor([[3], [1]]), chunk.data_ptr())
        assert torch.equal(pages[[3, 1]], chunk)
        assert not pages[[0, 2]].any()
