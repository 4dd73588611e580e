"""Block ids on the device: what was written is what kernels read, and no buffer is written while it is in use."""

from __future__ import annotations

import torch

from kvsluice.kernels.block_ids import BlockIdsPool

CPU = torch.device("cpu")


def test_ids_are_on_the_device_behind_their_fetch() -> None:
    ids = BlockIdsPool(3, CPU).take([(5, 1, 2), (0, 7, 7)])
    ids.fetch()
    assert ids.on_device.dtype == torch.int64
    assert ids.on_device.tolist() == [[5, 1, 2], [0, 7, 7]]
    assert ids.on_device.is_contiguous()


def test_a_buffer_comes_back_when_it_is_released_and_holds_the_new_ids_alone() -> None:
    pool = BlockIdsPool(2, CPU)
    first = pool.take([(1, 2), (3, 4), (5, 6)])
    first.fetch()
    first.release()
    second = pool.take([(8, 9)])
    assert second is first
    second.fetch()
    assert second.on_device.tolist() == [[8, 9]]


def test_buffers_that_are_out_are_never_handed_out_again() -> None:
    pool = BlockIdsPool(1, CPU)
    taken = [pool.take([(number,)]) for number in range(5)]
    for ids in taken:
        ids.fetch()
    assert [ids.on_device.tolist() for ids in taken] == [[[number]] for number in range(5)]
    taken[3].release()
    assert pool.take([(9,)]) is taken[3]
    assert pool.take([(9,)]) not in taken


def test_ids_that_arrive_change_nothing_on_the_device_before_they_are_fetched() -> None:
    pool = BlockIdsPool(1, CPU)
    ids = pool.take([(4,)])
    ids.fetch()
    ids.fill([(6,)])
    assert ids.on_device.tolist() == [[4]]
    ids.fetch()
    assert ids.on_device.tolist() == [[6]]


def test_more_chunks_than_any_free_buffer_holds_get_one_that_is_larger() -> None:
    pool = BlockIdsPool(1, CPU)
    small = pool.take([(1,)])
    assert small.capacity >= 16
    small.release()
    many = [(number,) for number in range(100)]
    large = pool.take(many)
    assert large is not small
    large.fetch()
    assert large.on_device.tolist() == [[number] for number in range(100)]
    large.release()
    assert pool.take(many) is large
    assert pool.take([(1,)]) is not small, "it made way"


def test_the_smallest_buffer_that_holds_them_is_taken() -> None:
    pool = BlockIdsPool(1, CPU)
    large, small = pool.take([(number,) for number in range(100)]), pool.take([(1,)])
    small.release()
    large.release()
    assert pool.take([(2,)]) is small


def test_there_are_never_more_buffers_than_were_out_at_once() -> None:
    pool = BlockIdsPool(1, CPU, num_chunks=4, num_buffers=3)
    seen = set()
    for count in range(1, 200):
        first, second = pool.take([(0,)] * count), pool.take([(0,)] * count)
        seen |= {first, second}
        second.release()
        first.release()
    held = [pool.take([(0,)]) for _ in range(3)]
    assert set(held) <= seen
    assert pool.take([(0,)]) not in seen, "a fourth was kept"
