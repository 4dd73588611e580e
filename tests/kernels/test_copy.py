"""Gather and scatter move exactly the bytes of the named blocks, whatever way they take."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.kernels import CopyPlan, PagedTensor, gather, may_overlap_itself, openmp, scatter, torch_copy
from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.torch_copy import Method

METHODS: tuple[Method, ...] = get_args(Method)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def random_bytes(num_bytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_paged(shape: Sequence[int], dtype: torch.dtype = torch.int16, seed: int = 1) -> torch.Tensor:
    return random_bytes(torch.Size(shape).numel() * dtype.itemsize, seed).view(dtype).reshape(shape)


def expected_bytes(paged: Sequence[PagedTensor], block_ids: Sequence[int]) -> torch.Tensor:
    """The chunk by plain indexing: rows of the blocks, one after the other."""
    parts = []
    for item in paged:
        rows = [block * item.rows_per_block + row for block in block_ids for row in range(item.rows_per_block)]
        chosen = torch.stack([item.tensor.select(item.block_axis, row) for row in rows], dim=item.block_axis)
        parts.append(chosen.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[PagedTensor], list[int], list[int]]:
    """Storages, tensors that lie in them with gaps, and two lists of as many block ids."""
    num_blocks = draw(st.integers(1, 7))
    storages, paged = [], []
    for number in range(draw(st.integers(1, 3))):
        rows_per_block = draw(st.integers(1, 3))
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        if draw(st.booleans()):
            shape.append(draw(st.sampled_from([16, 24, 64])))
        axis = draw(st.integers(0, len(shape)))
        shape.insert(axis, num_blocks * rows_per_block)
        padded = [size + draw(st.sampled_from([0, 0, 1, 8])) for size in shape]
        storage = random_paged(padded, draw(st.sampled_from(INTEGERS)), seed=number)
        tensor = storage
        for dim, size in enumerate(shape):
            tensor = tensor.narrow(dim, draw(st.integers(0, padded[dim] - size)), size)
        storages.append(storage)
        paged.append(PagedTensor(tensor, axis, rows_per_block, f"tensor {number}"))
    blocks = st.integers(0, num_blocks - 1)
    target_ids = draw(st.lists(blocks, min_size=1, max_size=num_blocks, unique=True))
    source_ids = draw(st.lists(blocks, min_size=len(target_ids), max_size=len(target_ids)))
    return storages, paged, source_ids, target_ids


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pools(), st.sampled_from(METHODS), st.integers(0, 17), st.sampled_from([1, torch_copy.RUN_MIN_BYTES]))
def test_what_is_gathered_is_scattered_bit_for_bit_and_nothing_else_changes(
    pool: tuple[list[torch.Tensor], list[PagedTensor], list[int], list[int]],
    method: Method,
    misaligned_bytes: int,
    run_min_bytes: int,
) -> None:
    storages, paged, source_ids, target_ids = pool
    plan = CopyPlan(paged, len(source_ids), method=method)
    chunk = torch.zeros(plan.num_bytes + 40, dtype=torch.uint8)
    out = chunk.narrow(0, misaligned_bytes, plan.num_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_copy, "RUN_MIN_BYTES", run_min_bytes)
        plan.gather(source_ids, out)
        assert torch.equal(out, expected_bytes(paged, source_ids))
        assert not chunk[:misaligned_bytes].any()
        assert not chunk[misaligned_bytes + plan.num_bytes :].any()

        expected_storages = [storage.clone() for storage in storages]
        offset = 0
        for item, storage in zip(paged, expected_storages, strict=True):
            tensor = item.tensor
            whole = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            shape = item.chunk_shape(len(target_ids))
            num_bytes = item.page_bytes * len(target_ids)
            part = out[offset : offset + num_bytes].clone().view(tensor.dtype).view(shape)
            offset += num_bytes
            for place, block in enumerate(target_ids):
                for row in range(item.rows_per_block):
                    here, there = block * item.rows_per_block + row, place * item.rows_per_block + row
                    whole.select(item.block_axis, here).copy_(part.select(item.block_axis, there))
        plan.scatter(target_ids, out)
    for storage, expected in zip(storages, expected_storages, strict=True):
        assert torch.equal(storage, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_behind_an_odd_number_of_bytes_is_copied_like_any_other(method: Method) -> None:
    odd = PagedTensor(random_paged((5, 3), torch.uint8), 0, name="odd")
    wide = PagedTensor(random_paged((5, 8), torch.int32, seed=2), 0, name="wide")
    plan = CopyPlan([odd, wide], 3, method=method)
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    plan.gather([4, 0, 2], out)
    assert torch.equal(out, expected_bytes([odd, wide], [4, 0, 2]))
    kept = wide.tensor.clone()
    wide.tensor.zero_()
    plan.scatter([4, 0, 2], out)
    assert torch.equal(wide.tensor[[4, 0, 2]], kept[[4, 0, 2]])
    assert not wide.tensor[[1, 3]].any()


@pytest.mark.parametrize("method", METHODS)
def test_many_outer_indices_are_copied_in_one_piece_each(method: Method) -> None:
    paged = PagedTensor(random_paged((12, 6, 4)), 1)
    out = torch.empty(paged.page_bytes * 3, dtype=torch.uint8)
    plan = CopyPlan([paged], 3, method=method)
    plan.gather([5, 0, 1], out)
    assert torch.equal(out, expected_bytes([paged], [5, 0, 1]))
    before = paged.tensor.clone()
    plan.scatter([1, 5, 2], out)
    assert torch.equal(paged.tensor[:, [1, 5, 2]], before[:, [5, 0, 1]])
    assert torch.equal(paged.tensor[:, [0, 3, 4]], before[:, [0, 3, 4]])


@pytest.mark.parametrize("method", METHODS)
def test_every_bit_pattern_of_a_wide_item_survives(method: Method) -> None:
    signalling_nans = torch.tensor([0x7FF0000000000001, 0x7FF4000000000000, -0x000FFFFFFFFFFFFF, -(1 << 63)])
    paged = PagedTensor(signalling_nans.repeat(4, 2), 0)
    out = torch.empty(paged.page_bytes * 4, dtype=torch.uint8)
    plan = CopyPlan([paged], 4, method=method)
    plan.gather([0, 1, 2, 3], out)
    assert torch.equal(out.view(torch.int64).view(4, 8), signalling_nans.repeat(4, 2))
    paged.tensor.zero_()
    plan.scatter([3, 1, 2, 0], out)
    assert torch.equal(paged.tensor, signalling_nans.repeat(4, 2))


def test_gather_takes_a_block_as_often_as_it_is_named() -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    out = torch.empty(paged.page_bytes * 3, dtype=torch.uint8)
    gather([paged], [2, 2, 3], out)
    assert torch.equal(out, expected_bytes([paged], [2, 2, 3]))


def test_scatter_refuses_a_block_named_twice_and_writes_nothing() -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    before = paged.tensor.clone()
    with pytest.raises(ValueError, match="block id 2 is named twice"):
        scatter([paged], [3, 2, 2], torch.zeros(paged.page_bytes * 3, dtype=torch.uint8))
    assert torch.equal(paged.tensor, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip_blocks", [0, 1, 3, 5])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_tail_of_a_chunk_is_scattered_and_the_blocks_before_it_are_left(
    method: Method, skip_blocks: int, padding: int
) -> None:
    paged = [PagedTensor(random_paged((outer, 9, 8 + padding))[:, :, :8], 1) for outer in (2, 12)]
    before = [item.tensor.clone() for item in paged]
    plan = CopyPlan(paged, 5, method=method)
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    plan.gather([8, 7, 0, 1, 2], out)
    block_ids = [3, 3, 3, 4, 6] if skip_blocks >= 2 else [3, 5, 7, 8, 6]
    plan.scatter_tail(block_ids, out, skip_blocks)
    for item, kept in zip(paged, before, strict=True):
        expected = kept.clone()
        expected[:, block_ids[skip_blocks:]] = kept[:, [8, 7, 0, 1, 2][skip_blocks:]]
        assert torch.equal(item.tensor, expected)


def test_a_tail_is_checked_like_a_whole_chunk() -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    plan = CopyPlan([paged], 3)
    src = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    for skip_blocks in (-1, 4):
        with pytest.raises(ValueError, match=f"skip_blocks must be 0 to 3, got {skip_blocks}"):
            plan.scatter_tail([0, 1, 2], src, skip_blocks)
    with pytest.raises(ValueError, match="block id 2 is named twice"):
        plan.scatter_tail([0, 2, 2], src, 1)
    with pytest.raises(ValueError, match="block id 9 is outside"):
        plan.scatter_tail([9, 1, 2], src, 1)


def test_consecutive_dense_blocks_are_one_run_and_padded_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(target: int, source: int, num_bytes: int) -> None:
        assert target != source
        lengths.append(num_bytes)

    monkeypatch.setattr("ctypes.memmove", counted)
    dense = PagedTensor(random_paged((8, 10)), 0)
    padded = PagedTensor(random_paged((8, 16))[:, :10], 0)
    plan = CopyPlan([dense, padded], 5, method="runs")
    plan.gather([1, 2, 3, 7, 0], torch.empty(plan.num_bytes, dtype=torch.uint8))
    assert lengths == [60, 20, 20, 20, 20, 20, 20, 20]


@pytest.mark.parametrize(
    ("block_ids", "runs_expected"), [([0, 1, 2, 3, 4, 5, 6, 7], True), ([7, 0, 2, 4, 6, 1, 3, 5], False)]
)
def test_long_runs_are_moved_directly_and_short_ones_are_indexed(
    monkeypatch: pytest.MonkeyPatch, block_ids: list[int], runs_expected: bool
) -> None:
    moved: list[int] = []
    monkeypatch.setattr("ctypes.memmove", lambda _target, _source, num_bytes: moved.append(num_bytes))
    page_bytes = torch_copy.RUN_MIN_BYTES // 4
    paged = PagedTensor(torch.zeros((8, page_bytes), dtype=torch.uint8), 0)
    plan = CopyPlan([paged], 8)
    plan.gather(block_ids, torch.empty(plan.num_bytes, dtype=torch.uint8))
    assert moved == ([8 * page_bytes] if runs_expected else [])


def test_without_control_over_openmp_every_copy_is_made_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_openmp_limit", lambda: None)
    monkeypatch.setattr(torch_copy, "_move_pieces", lambda *_args, **_kwargs: pytest.fail("an indexed copy was made"))
    paged = PagedTensor(random_paged((2, 8, 5)), 1)
    out = torch.empty(paged.page_bytes * 2, dtype=torch.uint8)
    gather([paged], [5, 1], out)
    assert torch.equal(out, expected_bytes([paged], [5, 1]))


def test_limiting_openmp_touches_the_calling_thread_only_and_is_undone() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    with one_openmp_thread() as limited:
        assert limited
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [before]
    assert torch.get_num_threads() == before


def test_a_copy_on_a_background_thread_starts_no_team_of_threads() -> None:
    paged = PagedTensor(torch.zeros((64, 1 << 15), dtype=torch.uint8), 0)
    plan = CopyPlan([paged], 32, method="index")
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    tasks = Path("/proc/self/task")
    counts: list[int] = []

    def copy() -> None:
        counts.append(len(list(tasks.iterdir())))
        plan.gather(range(1, 64, 2), out)
        plan.scatter(range(0, 64, 2), out)
        counts.append(len(list(tasks.iterdir())))

    plan.gather(range(32), out)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert counts[1] <= counts[0]


def test_tensors_made_and_plans_made_in_inference_mode_are_written_outside_it() -> None:
    with torch.inference_mode():
        paged = PagedTensor(random_paged((4, 10)).clone(), 0)
        plans = [CopyPlan([paged], 1, method=method) for method in METHODS]
    for plan in plans:
        plan.scatter([2], torch.full((plan.num_bytes,), 7, dtype=torch.uint8))
        assert paged.tensor[2].eq(0x0707).all()
        plan.scatter([2], torch.zeros(plan.num_bytes, dtype=torch.uint8))


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
    plan = CopyPlan([PagedTensor(random_paged((4, 10)), 0)], 2)
    with pytest.raises(error, match=message):
        plan.gather(block_ids, flat)
    with pytest.raises(error, match=message):
        plan.scatter(block_ids, flat)


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


def test_a_plan_refuses_tensors_that_do_not_go_together() -> None:
    four, five = (PagedTensor(random_paged((size, 10)), 0, name=f"of {size}") for size in (4, 5))
    with pytest.raises(ValueError, match="number of blocks differs: 4 in of 4, 5 in of 5"):
        CopyPlan([four, five], 1)
    with pytest.raises(ValueError, match="at least one tensor"):
        CopyPlan([], 1)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        CopyPlan([four], 0)
    elsewhere = PagedTensor(torch.zeros((4, 2), dtype=torch.uint8, device="meta"), 0, name="elsewhere")
    with pytest.raises(ValueError, match="device differs: cpu in of 4, meta in elsewhere"):
        CopyPlan([four, elsewhere], 1)
    with pytest.raises(ValueError, match="method 'runs' is for host memory"):
        CopyPlan([elsewhere], 1, method="runs")


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
    assert PagedTensor(random_paged((2, 4, 6)), 1).contiguous
    assert PagedTensor(random_paged((4, 6, 6))[:, :3], 0).contiguous
    assert not PagedTensor(random_paged((4, 6, 6))[:, :, :3], 0).contiguous
    assert PagedTensor(random_paged((2, 4, 6)), 1, 2).page_bytes == 2 * 2 * 6 * 2


@pytest.mark.parametrize("order", ["random", "runs"])
def test_the_benchmark_runs_tiny(capsys: pytest.CaptureFixture[str], order: str) -> None:
    benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cpu_copy.py"))
    assert benchmark["main"](["--tiny", "--order", order]) == 0
    assert benchmark["main"](["--tiny", "--json", "--order", order]) == 0
    printed = capsys.readouterr().out
    assert "memcpy" in printed
    assert '"page_bytes": 16384' in printed
