"""Gather and scatter move exactly the bytes of the named blocks, whatever way they take."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor, host_copy, openmp, rows
from kvsluice.kernels.host_copy import HostMethod

METHODS: tuple[HostMethod, ...] = get_args(HostMethod)
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


def expected_pages(
    storages: Sequence[torch.Tensor], paged: Sequence[PagedTensor], block_ids: Sequence[int], src: torch.Tensor
) -> list[torch.Tensor]:
    """The storages after a chunk is scattered, row by row."""
    expected = [storage.clone() for storage in storages]
    offset = 0
    for item, storage in zip(paged, expected, strict=True):
        tensor = item.tensor
        whole = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        num_bytes = item.page_bytes * len(block_ids)
        part = src[offset : offset + num_bytes].clone().view(tensor.dtype).view(item.chunk_shape(len(block_ids)))
        offset += num_bytes
        for place, block in enumerate(block_ids):
            for row in range(item.rows_per_block):
                here, there = block * item.rows_per_block + row, place * item.rows_per_block + row
                whole.select(item.block_axis, here).copy_(part.select(item.block_axis, there))
    return expected


def ranges_of(count: int, cuts: Sequence[int]) -> Iterator[range]:
    """All of `count` tensors, cut at these places."""
    bounds = sorted({0, count, *(cut for cut in cuts if cut <= count)})
    return (range(first, last) for first, last in itertools.pairwise(bounds))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    pools(),
    st.sampled_from(METHODS),
    st.integers(0, 17),
    st.sampled_from([1, host_copy.RUN_MIN_BYTES]),
    st.booleans(),
    st.sampled_from([1, rows.MAX_ELEMENTS]),
    st.lists(st.integers(0, 6), max_size=4),
)
def test_what_is_gathered_is_scattered_bit_for_bit_and_nothing_else_changes(
    pool: tuple[list[torch.Tensor], list[PagedTensor], list[int], list[int]],
    method: HostMethod,
    misaligned_bytes: int,
    run_min_bytes: int,
    by_the_byte: bool,
    max_elements: int,
    cuts: list[int],
) -> None:
    storages, paged, source_ids, target_ids = pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "RUN_MIN_BYTES", run_min_bytes)
        patch.setattr(rows, "fast_by_the_byte", lambda: by_the_byte)
        patch.setattr(rows, "MAX_ELEMENTS", max_elements)
        plan = CopyPlan(paged, len(source_ids))
        copy = HostCopy(plan, method=method)
        chunk = torch.zeros(plan.num_bytes + 40, dtype=torch.uint8)
        out = chunk.narrow(0, misaligned_bytes, plan.num_bytes)
        copy.gather(source_ids, out)
        assert torch.equal(out, expected_bytes(paged, source_ids))
        assert not chunk[:misaligned_bytes].any()
        assert not chunk[misaligned_bytes + plan.num_bytes :].any()
        whole = out.clone()
        out.zero_()
        for tensors in ranges_of(len(paged), cuts):
            assert not out[plan.offsets[tensors.start] :].any()
            copy.gather(source_ids, out, tensors=tensors)
        assert torch.equal(out, whole)

        before = [storage.clone() for storage in storages]
        expected = expected_pages(storages, paged, target_ids, out)
        copy.scatter(target_ids, out)
        assert all(map(torch.equal, storages, expected))
        for storage, old in zip(storages, before, strict=True):
            storage.copy_(old)
        for tensors in ranges_of(len(paged), cuts):
            copy.scatter(target_ids, out, tensors=tensors)
            done = [
                new if number < tensors.stop else old
                for number, (new, old) in enumerate(zip(expected, before, strict=True))
            ]
            assert all(map(torch.equal, storages, done))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip_blocks", [0, 1, 3, 5])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("tensors", [None, range(1, 2)])
def test_the_tail_of_a_chunk_is_scattered_and_the_blocks_before_it_are_left(
    method: HostMethod, skip_blocks: int, padding: int, tensors: range | None
) -> None:
    paged = [PagedTensor(random_paged((outer, 9, 8 + padding))[:, :, :8], 1) for outer in (2, 12, 12)]
    before = [item.tensor.clone() for item in paged]
    copy = HostCopy(CopyPlan(paged, 5), method=method)
    out = torch.empty(copy.plan.num_bytes, dtype=torch.uint8)
    copy.gather([8, 7, 0, 1, 2], out)
    block_ids = [3, 3, 3, 4, 6] if skip_blocks >= 2 else [3, 5, 7, 8, 6]
    copy.scatter(block_ids, out, skip_blocks, tensors)
    for number, (item, kept) in enumerate(zip(paged, before, strict=True)):
        expected = kept.clone()
        if tensors is None or number in tensors:
            expected[:, block_ids[skip_blocks:]] = kept[:, [8, 7, 0, 1, 2][skip_blocks:]]
        assert torch.equal(item.tensor, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_behind_an_odd_number_of_bytes_is_copied_like_any_other(method: HostMethod) -> None:
    odd = PagedTensor(random_paged((5, 3), torch.uint8), 0, name="odd")
    wide = PagedTensor(random_paged((5, 8), torch.int32, seed=2), 0, name="wide")
    copy = HostCopy(CopyPlan([odd, wide], 3), method=method)
    out = torch.empty(copy.plan.num_bytes, dtype=torch.uint8)
    copy.gather([4, 0, 2], out)
    assert torch.equal(out, expected_bytes([odd, wide], [4, 0, 2]))
    kept = wide.tensor.clone()
    wide.tensor.zero_()
    copy.scatter([4, 0, 2], out)
    assert torch.equal(wide.tensor[[4, 0, 2]], kept[[4, 0, 2]])
    assert not wide.tensor[[1, 3]].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run_bytes", [4096, (32 << 10) - 16, 32 << 10, (48 << 10) + 1, 512 << 10])
def test_runs_around_the_lengths_at_which_torch_changes_its_way_are_copied_whole(
    method: HostMethod, run_bytes: int
) -> None:
    paged = [PagedTensor(random_paged((4, run_bytes), torch.uint8, seed), 0) for seed in (1, 2)]
    kept = [item.tensor.clone() for item in paged]
    copy = HostCopy(CopyPlan(paged, 2), method=method)
    for misaligned_bytes in (0, 1):
        out = torch.zeros(copy.plan.num_bytes + 16, dtype=torch.uint8)[misaligned_bytes:][: copy.plan.num_bytes]
        copy.gather([3, 1], out)
        assert torch.equal(out, torch.cat([item.tensor[[3, 1]].flatten() for item in paged]))
        copy.scatter([0, 2], out)
        for item, old in zip(paged, kept, strict=True):
            assert torch.equal(item.tensor, old[[3, 1, 1, 3]])
            item.tensor.copy_(old)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run_bytes", [8, 16, 24, 32, 40])
@pytest.mark.parametrize("start_bytes", [0, 8, 16])
def test_pages_that_are_padded_to_wider_items_than_they_hold_are_copied_to_the_last_byte(
    method: HostMethod, run_bytes: int, start_bytes: int
) -> None:
    memory = random_bytes(8 * 64)
    before = memory.clone()
    paged = PagedTensor(memory.view(8, 64)[:, start_bytes : start_bytes + run_bytes], 0)
    copy = HostCopy(CopyPlan([paged], 2), method=method)
    out = torch.empty(copy.plan.num_bytes, dtype=torch.uint8)
    copy.gather([6, 1], out)
    assert torch.equal(out, expected_bytes([paged], [6, 1]))
    copy.scatter([2, 7], out)
    expected = before.view(8, 64).clone()
    expected[[2, 7], start_bytes : start_bytes + run_bytes] = before.view(8, 64)[
        [6, 1], start_bytes : start_bytes + run_bytes
    ]
    assert torch.equal(memory.view(8, 64), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_of_a_single_block_is_copied_whatever_its_stride_says(method: HostMethod) -> None:
    memory = random_bytes(64)
    paged = [PagedTensor(memory[:32].as_strided((1, 16), (stride, 1), stride), 0) for stride in (0, 16)]
    copy = HostCopy(CopyPlan(paged, 1), method=method)
    out = torch.empty(32, dtype=torch.uint8)
    copy.gather([0], out)
    assert torch.equal(out, memory[:32])
    copy.scatter([0], out.flip(0))
    assert torch.equal(memory[:32], out.flip(0))


@pytest.mark.parametrize("method", METHODS)
def test_every_bit_pattern_of_a_wide_item_survives(method: HostMethod) -> None:
    signalling_nans = torch.tensor([0x7FF0000000000001, 0x7FF4000000000000, -0x000FFFFFFFFFFFFF, -(1 << 63)])
    paged = PagedTensor(signalling_nans.repeat(4, 2), 0)
    out = torch.empty(paged.page_bytes * 4, dtype=torch.uint8)
    copy = HostCopy(CopyPlan([paged], 4), method=method)
    copy.gather([0, 1, 2, 3], out)
    assert torch.equal(out.view(torch.int64).view(4, 8), signalling_nans.repeat(4, 2))
    paged.tensor.zero_()
    copy.scatter([3, 1, 2, 0], out)
    assert torch.equal(paged.tensor, signalling_nans.repeat(4, 2))


@pytest.mark.parametrize("by_the_byte", [True, False])
@pytest.mark.parametrize("misaligned_bytes", [0, 1])
def test_every_value_of_every_byte_survives(
    monkeypatch: pytest.MonkeyPatch, by_the_byte: bool, misaligned_bytes: int
) -> None:
    monkeypatch.setattr(rows, "fast_by_the_byte", lambda: by_the_byte)
    paged = PagedTensor(torch.arange(512).remainder(256).to(torch.uint8).view(2, 256), 0)
    copy = HostCopy(CopyPlan([paged], 1), method="index")
    out = torch.zeros(272, dtype=torch.uint8)[misaligned_bytes:][:256]
    copy.gather([1], out)
    assert out.tolist() == list(range(256))
    paged.tensor.zero_()
    copy.scatter([0], out)
    assert paged.tensor.tolist() == [list(range(256)), [0] * 256]


@pytest.mark.parametrize("method", METHODS)
def test_gather_takes_a_block_as_often_as_it_is_named(method: HostMethod) -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    out = torch.empty(paged.page_bytes * 3, dtype=torch.uint8)
    HostCopy(CopyPlan([paged], 3), method=method).gather([2, 2, 3], out)
    assert torch.equal(out, expected_bytes([paged], [2, 2, 3]))


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [([3, 2, 2], "block id 2 is named twice"), ([3, 2, 4], "block id 4 is outside"), ([3, 2], "got 2 block ids")],
)
def test_what_the_door_refuses_is_refused_and_nothing_is_written(block_ids: list[int], message: str) -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    before = paged.tensor.clone()
    copy = HostCopy(CopyPlan([paged], 3))
    with pytest.raises(ValueError, match=message):
        copy.scatter(block_ids, torch.zeros(copy.plan.num_bytes, dtype=torch.uint8))
    assert torch.equal(paged.tensor, before)


@pytest.mark.parametrize("tensors", [range(3), range(-1, 1), range(0, 2, 2), range(1, 0), range(2, 3)])
def test_a_range_that_is_not_one_of_the_plans_tensors_is_refused(tensors: range) -> None:
    copy = HostCopy(CopyPlan([PagedTensor(random_paged((4, 10)), 0)] * 2, 1))
    flat = torch.zeros(copy.plan.num_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="tensors must be a range of step 1 within 0 to 2"):
        copy.gather([0], flat, tensors)
    with pytest.raises(ValueError, match="tensors must be a range of step 1 within 0 to 2"):
        copy.scatter([0], flat, tensors=tensors)


def test_memory_elsewhere_is_refused() -> None:
    elsewhere = PagedTensor(torch.zeros((4, 2), dtype=torch.uint8, device="meta"), 0)
    plan = CopyPlan([elsewhere], 1)
    with pytest.raises(ValueError, match="HostCopy is for host memory, the plan's tensors are on meta"):
        HostCopy(plan)


def test_consecutive_dense_blocks_are_one_run_and_padded_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(target: int, source: int, num_bytes: int) -> None:
        assert target != source
        lengths.append(num_bytes)

    monkeypatch.setattr("ctypes.memmove", counted)
    dense = PagedTensor(random_paged((8, 10)), 0)
    padded = PagedTensor(random_paged((8, 16))[:, :10], 0)
    copy = HostCopy(CopyPlan([dense, padded], 5), method="runs")
    copy.gather([1, 2, 3, 7, 0], torch.empty(copy.plan.num_bytes, dtype=torch.uint8))
    assert lengths == [60, 20, 20, 20, 20, 20, 20, 20]


@pytest.mark.parametrize(
    ("block_ids", "moved_expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [8]),
        ([4, 5, 6, 7, 0, 1, 2, 3], [4, 4]),
        ([4, 5, 6, 7, 0, 1, 3, 2], []),
        ([7, 0, 2, 4, 6, 1, 3, 5], []),
    ],
)
def test_long_runs_are_moved_directly_and_short_ones_are_indexed(
    monkeypatch: pytest.MonkeyPatch, block_ids: list[int], moved_expected: list[int]
) -> None:
    moved: list[int] = []
    monkeypatch.setattr("ctypes.memmove", lambda _target, _source, num_bytes: moved.append(num_bytes))
    page_bytes = host_copy.RUN_MIN_BYTES // 4
    paged = PagedTensor(torch.zeros((8, page_bytes), dtype=torch.uint8), 0)
    copy = HostCopy(CopyPlan([paged], 8))
    copy.gather(block_ids, torch.empty(copy.plan.num_bytes, dtype=torch.uint8))
    assert moved == [count * page_bytes for count in moved_expected]


@pytest.mark.parametrize(("page_bytes", "moved_expected"), [(0, 3), (-1, 0)])
def test_padded_pages_are_moved_directly_where_each_is_long(
    monkeypatch: pytest.MonkeyPatch, page_bytes: int, moved_expected: int
) -> None:
    moved: list[int] = []
    monkeypatch.setattr("ctypes.memmove", lambda _target, _source, num_bytes: moved.append(num_bytes))
    page_bytes += host_copy.RUN_MIN_BYTES
    paged = PagedTensor(torch.zeros((3, page_bytes + 64), dtype=torch.uint8)[:, :page_bytes], 0)
    copy = HostCopy(CopyPlan([paged], 3))
    copy.gather([0, 1, 2], torch.empty(copy.plan.num_bytes, dtype=torch.uint8))
    assert moved == [page_bytes] * moved_expected


def test_layers_that_are_alike_are_moved_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    scatter = rows.Rows.scatter

    def counted(self: rows.Rows, planes: tuple[int, int], block_ids: torch.Tensor, chunk_address: int) -> None:
        calls.append(planes[1] - planes[0])
        scatter(self, planes, block_ids, chunk_address)

    monkeypatch.setattr(rows.Rows, "scatter", counted)
    paged = [PagedTensor(random_paged((2, 8, 24 + layer // 30)), 1) for layer in range(32)]
    copy = HostCopy(CopyPlan(paged, 3))
    copy.scatter([5, 0, 2], torch.zeros(copy.plan.num_bytes, dtype=torch.uint8))
    assert calls == [60, 4]
    assert all(not item.tensor[:, [5, 0, 2]].any() for item in paged)


def test_tensors_far_apart_in_memory_are_moved_in_one_call_too() -> None:
    small = random_bytes(4 * 64).view(4, 64)  # as a rule in the heap, and the other in a mapping of its own
    large = torch.zeros((1 << 20, 64), dtype=torch.uint8)[-4:]
    large.copy_(small.flip(0))
    copy = HostCopy(CopyPlan([PagedTensor(small, 0), PagedTensor(large, 0)], 2), method="index")
    out = torch.empty(copy.plan.num_bytes, dtype=torch.uint8)
    copy.gather([3, 0], out)
    assert torch.equal(out.view(2, 2, 64), torch.stack([small[[3, 0]], small[[0, 3]]]))
    copy.scatter([1, 2], out)
    assert torch.equal(small[[1, 2]], small[[3, 0]])
    assert torch.equal(large[[1, 2]], large[[3, 0]])


def test_without_control_over_openmp_every_copy_is_made_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = openmp.openmp_limit()
    assert limit is not None
    paged = PagedTensor(random_paged((2, 8, 5)), 1)
    out = torch.empty(paged.page_bytes * 2, dtype=torch.uint8)

    def copy_on_a_thread_of_two() -> None:
        limit(2)
        HostCopy(CopyPlan([paged], 2), method="index").gather([5, 1], out)

    monkeypatch.setattr(openmp, "openmp_limit", lambda: None)
    monkeypatch.setattr(rows.Rows, "gather", lambda *_args: pytest.fail("an indexed copy was made"))
    with ThreadPoolExecutor(1) as executor:
        executor.submit(copy_on_a_thread_of_two).result()
    assert torch.equal(out, expected_bytes([paged], [5, 1]))


def test_a_copy_on_a_background_thread_starts_no_team_of_threads() -> None:
    paged = PagedTensor(torch.zeros((64, 1 << 15), dtype=torch.uint8), 0)
    copy = HostCopy(CopyPlan([paged], 32), method="index")
    out = torch.empty(copy.plan.num_bytes, dtype=torch.uint8)
    tasks = Path("/proc/self/task")
    counts: list[int] = []

    def act() -> None:
        counts.append(len(list(tasks.iterdir())))
        copy.gather(range(1, 64, 2), out)
        copy.scatter(range(0, 64, 2), out)
        counts.append(len(list(tasks.iterdir())))

    copy.gather(range(32), out)
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert counts[1] <= counts[0]


def test_threads_share_one_copy_on_blocks_of_their_own() -> None:
    paged = [PagedTensor(random_paged((4 * 16, 512), torch.uint8, seed), 0) for seed in (1, 2, 3)]
    twins = [PagedTensor(torch.zeros_like(item.tensor), 0) for item in paged]
    out_of, into = (HostCopy(CopyPlan(pages, 16), method="index") for pages in (paged, twins))

    def move(number: int) -> None:
        chunk = torch.empty(out_of.plan.num_bytes, dtype=torch.uint8)
        for _ in range(20):
            block_ids = range(number, 64, 4)
            out_of.gather(block_ids, chunk)
            into.scatter(block_ids, chunk)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(move, range(4)))
    assert all(torch.equal(twin.tensor, item.tensor) for twin, item in zip(twins, paged, strict=True))


def test_tensors_made_and_plans_made_in_inference_mode_are_written_outside_it() -> None:
    with torch.inference_mode():
        paged = PagedTensor(random_paged((4, 10)).clone(), 0)
        copies = [HostCopy(CopyPlan([paged], 1), method=method) for method in METHODS]
        chunks = [torch.full((copies[0].plan.num_bytes,), value, dtype=torch.uint8) for value in (7, 0)]
        for copy in copies:
            copy.gather([1], torch.empty_like(chunks[0]))
    for copy in copies:
        copy.scatter([2], chunks[0])
        assert paged.tensor[2].eq(0x0707).all()
        copy.scatter([2], chunks[1])
        copy.gather([2], chunks[1])
        assert not chunks[1].any()


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_whose_default_device_is_another_is_no_trouble(method: HostMethod) -> None:
    paged = PagedTensor(random_paged((4, 10)), 0)
    kept = paged.tensor.clone()
    out = torch.empty(paged.page_bytes * 2, dtype=torch.uint8)
    rows.fast_by_the_byte.cache_clear()
    with torch.device("meta"):
        copy = HostCopy(CopyPlan([paged], 2), method=method)
        copy.gather([3, 1], out)
        copy.scatter([0, 2], out)
    assert torch.equal(paged.tensor, kept[[3, 1, 1, 3]])
