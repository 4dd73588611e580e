"""Copies without staging: the driver's batches and torch's single runs move what the host's copy moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor
from kvsluice.kernels.batched_copy import BatchedCopy, RunCopy
from kvsluice.kernels.operations import DirectCopy
from kvsluice.kernels.spans import spans_of

STREAM = 77


class Driver:
    """Copies host memory, last entry first: the entries of one batch have no order."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int, int]]] = []

    def __call__(self, destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, stream: int) -> None:
        assert stream == STREAM
        for tensor in (destinations, sources, sizes):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
            assert tensor.shape == sizes.shape
        entries = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.calls.append(entries)
        for destination, source, size in reversed(entries):
            ctypes.memmove(destination, source, size)


def batched(plan: CopyPlan) -> BatchedCopy:
    return BatchedCopy(plan, Driver(), lambda: STREAM)


WAYS = pytest.mark.parametrize("way", [batched, RunCopy], ids=["batched", "runs"])


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[PagedTensor], int]:
    """Storages, tensors in them with gaps or without, and a number of blocks."""
    num_blocks = draw(st.integers(2, 6))
    storages, paged = [], []
    for _ in range(draw(st.integers(1, 3))):
        outer, rows, inner, size = (draw(st.integers(1, 3)) for _ in range(4))
        pads = [draw(st.integers(0, 2)) for _ in range(3)]
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int64]))
        shape = (outer, num_blocks * rows + pads[0], inner + pads[1], size + pads[2])
        storage = torch.randint(256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        view = storage.view(dtype).reshape(shape)[:, : num_blocks * rows, :inner, :size]
        storages.append(storage)
        paged.append(PagedTensor(view, 1, rows))
    return storages, paged, num_blocks


@WAYS
@settings(max_examples=60, deadline=None)
@given(pools(), st.data())
def test_blocks_go_out_and_come_in_as_by_the_hosts_copy(
    way: Callable[[CopyPlan], DirectCopy], pool: tuple[list[torch.Tensor], list[PagedTensor], int], data: st.DataObject
) -> None:
    storages, paged, num_blocks = pool
    count = data.draw(st.integers(1, num_blocks))
    plan = CopyPlan(paged, count)
    copy, oracle = way(plan), HostCopy(plan)
    source_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=count, max_size=count))
    target_ids = data.draw(st.permutations(range(num_blocks)))[:count]
    skip = data.draw(st.integers(0, count))
    split = data.draw(st.integers(0, len(paged)))
    out, wanted = (torch.zeros(plan.num_bytes, dtype=torch.uint8) for _ in range(2))
    oracle.gather(source_ids, wanted)
    for tensors in (range(split), range(split, len(paged))):
        if tensors:
            copy.gather(source_ids, out, tensors)
    assert torch.equal(out, wanted)
    out.zero_()
    copy.gather(source_ids, out)
    assert torch.equal(out, wanted)

    before = [storage.clone() for storage in storages]
    oracle.scatter(target_ids, wanted, skip)
    after = [storage.clone() for storage in storages]
    for storage, kept in zip(storages, before, strict=True):
        storage.copy_(kept)
    for tensors in (range(split), range(split, len(paged))):
        if tensors:
            copy.scatter(target_ids, wanted, skip, tensors)
    assert all(torch.equal(storage, expected) for storage, expected in zip(storages, after, strict=True))


def test_a_whole_chunk_is_one_call_of_the_driver_and_neighbouring_blocks_one_copy() -> None:
    dense = PagedTensor(torch.zeros((8, 10), dtype=torch.uint8), 0)
    padded = PagedTensor(torch.zeros((8, 16), dtype=torch.uint8)[:, :10], 0)
    driver = Driver()
    plan = CopyPlan([dense, padded], 5)
    BatchedCopy(plan, driver, lambda: STREAM).gather([1, 2, 3, 7, 0], torch.zeros(plan.num_bytes, dtype=torch.uint8))
    assert [sorted(size for _, _, size in call) for call in driver.calls] == [[10] * 7 + [30]]


@WAYS
def test_a_scatter_of_nothing_makes_no_copy(way: Callable[[CopyPlan], DirectCopy]) -> None:
    paged = PagedTensor(torch.zeros((4, 10), dtype=torch.uint8), 0)
    copy = way(CopyPlan([paged], 2))
    copy.scatter([1, 1], torch.ones(20, dtype=torch.uint8), 2)
    assert not paged.tensor.any()


@WAYS
def test_the_door_is_the_plans(way: Callable[[CopyPlan], DirectCopy]) -> None:
    copy = way(CopyPlan([PagedTensor(torch.zeros((4, 10), dtype=torch.uint8), 0)], 2))
    flat = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block id 4 is outside the pool: 0 to 3"):
        copy.gather([0, 4], flat)
    with pytest.raises(ValueError, match="block id 2 is named twice"):
        copy.scatter([2, 2], flat)
    with pytest.raises(TypeError, match=r"src must be uint8, got torch\.int8"):
        copy.scatter([0, 1], flat.view(torch.int8))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_spans_name_every_id_once_in_its_place_and_are_as_long_as_can_be(ids: list[int], data: st.DataObject) -> None:
    skip = data.draw(st.integers(0, len(ids) - 1))
    spans = spans_of(ids, skip)
    named = [(first + at, place + at) for first, place, count in spans for at in range(count)]
    assert named == [(block, place) for place, block in enumerate(ids)][skip:]
    for (first, place, count), (follower, *_) in pairwise(spans):
        assert first + count != follower, f"two spans at {place} are one"
    assert spans_of(ids, skip, merge=False) == [(block, place, 1) for place, block in enumerate(ids)][skip:]
