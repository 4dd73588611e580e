"""What a paged tensor refuses, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from kvsluice.kernels import PagedTensor, may_overlap_itself


@pytest.mark.parametrize(
    ("tensor", "axis", "rows", "error", "message"),
    [
        (torch.zeros(4, 2), 0, 1, TypeError, "dtype must be one of"),
        (torch.zeros(4, 2, dtype=torch.uint8).to_sparse(), 0, 1, TypeError, "strided"),
        (torch.zeros(4, 2, dtype=torch.uint8), 2, 1, ValueError, "block_axis 2"),
        (torch.zeros(4, 0, dtype=torch.uint8), 0, 1, ValueError, "holds nothing"),
        (torch.zeros(4, 2, dtype=torch.uint8), 0, 3, ValueError, "4 rows are no whole number of blocks of 3"),
        (torch.zeros(1, 2, dtype=torch.uint8).expand(4, 2), 0, 1, ValueError, "overlaps itself"),
    ],
)
def test_a_paged_tensor_refuses_what_a_kernel_could_not_copy(
    tensor: torch.Tensor, axis: int, rows: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"layer: .*{message}"):
        PagedTensor(tensor, axis, rows, "layer")


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (1, 3), False),
        ((3, 1), (1, 0), False),
        ((3, 2), (1, 0), True),
        ((), (), False),
    ],
)
def test_overlap_is_seen_in_the_strides(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert may_overlap_itself(shape, strides) is overlaps


def test_a_paged_tensor_says_whether_its_pages_are_contiguous() -> None:
    tensor = torch.zeros((4, 6, 6), dtype=torch.int16)
    assert PagedTensor(tensor[:2], 1).contiguous
    assert PagedTensor(tensor[:, :3], 0).contiguous
    assert not PagedTensor(tensor[:, :, :3], 0).contiguous
    assert PagedTensor(tensor, 1, 2).page_bytes == 4 * 2 * 6 * 2


def test_dimensions_that_walk_memory_as_one_are_one() -> None:
    geometry = PagedTensor(torch.zeros((2, 3, 8, 4, 6), dtype=torch.int16)[:, :, :, :, :3], 2, 2).geometry()
    assert geometry.outer == ((6, 8 * 4 * 6 * 2),)
    assert (geometry.num_blocks, geometry.block_stride) == (4, 2 * 4 * 6 * 2)
    assert geometry.inner == ((8, 12), (6, 1))
    assert (geometry.run_bytes, geometry.block_bytes, geometry.num_outer) == (6, 48, 6)
