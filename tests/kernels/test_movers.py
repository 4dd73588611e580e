"""Chunks between pages and host memory: the right bytes, behind the engine's work, in every interleaving."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from fake_device import OPERATION_S, FakeDevice
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mover_traffic import Pool, Traffic, direct, pools, small_pool, staged

from kvsluice.kernels import HostCopy
from kvsluice.kernels.device import CpuDevice, Device, Event
from kvsluice.kernels.movers import RING_SLOTS, Mover, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy, CopyPages, CopyStaged, Direction, FetchIds
from kvsluice.kernels.torch_pages import TorchPages

Make = Callable[[Pool, Device, Direction], Mover]
MOVERS = pytest.mark.parametrize("make", [direct, staged])
DIRECTIONS: tuple[Direction, Direction] = ("out", "in")
# What goes wrong hangs on a seed: a smaller case is a different one.
PROPERTY = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


@pytest.fixture
def pool() -> Pool:
    return small_pool()


@pytest.fixture
def device(pool: Pool) -> Iterator[FakeDevice]:
    device = FakeDevice(pool.plan())
    device.bind_thread()
    yield device
    device.check()


def payload(pool: Pool, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (pool.plan().num_bytes,), dtype=torch.uint8, generator=generator)


def gathered(pool: Pool, block_ids: Sequence[int]) -> torch.Tensor:
    """What these blocks hold now."""
    out = torch.empty(pool.plan().num_bytes, dtype=torch.uint8)
    HostCopy(pool.plan()).gather(block_ids, out)
    return out


# ---- bytes in every interleaving ---------------------------------------------------------------


@settings(PROPERTY, max_examples=80)
@given(pools(), st.integers(0, 1 << 32), st.sampled_from([1.0, 1.6, 3.0, 20.0]))
def test_staged_chunks_arrive_whole_beside_an_engine_at_work(pool: Pool, seed: int, slots: float) -> None:
    device = FakeDevice(pool.plan())
    device.bind_thread()
    traffic = Traffic(pool, device, {each: staged(pool, device, each, slots) for each in DIRECTIONS}, seed)
    traffic.run(8)
    assert traffic.wrong == []
    device.check()
    assert device.idle
    assert max(traffic.seconds.values()) <= device.now_s


@settings(PROPERTY, max_examples=40)
@given(pools(), st.integers(0, 1 << 32))
def test_direct_chunks_arrive_whole_beside_an_engine_at_work(pool: Pool, seed: int) -> None:
    device = FakeDevice(pool.plan())
    device.bind_thread()
    traffic = Traffic(pool, device, {each: direct(pool, device, each) for each in DIRECTIONS}, seed)
    traffic.run(8)
    assert traffic.wrong == []
    device.check()
    assert device.idle
    assert max(traffic.seconds.values()) <= device.now_s


@MOVERS
def test_on_the_cpu_a_chunk_is_there_when_the_call_returns(make: Make, pool: Pool) -> None:
    device = CpuDevice()
    out, into = (make(pool, device, direction) for direction in DIRECTIONS)
    expected = gathered(pool, (7, 0, 7))
    host = torch.zeros_like(expected)
    assert out.submit([device.compute_event()], [ChunkCopy((7, 0, 7), host)]).query()
    assert torch.equal(host, expected)
    before = gathered(pool, (1, 2, 3))
    told: list[int] = []
    submission = into.submit(
        [device.compute_event()], [ChunkCopy((1, 4, 5), host, 1)], lambda number, event: told.append(number)
    )
    assert submission.query()
    assert submission.seconds() >= 0.0
    assert told == [0, 1]
    assert torch.equal(gathered(pool, (0, 4, 5)), gathered(pool, (0, 0, 7)))
    assert torch.equal(gathered(pool, (1, 2, 3)), before)


# ---- order against the engine and the host -----------------------------------------------------


@MOVERS
def test_a_store_takes_what_the_engine_wrote_before_it(make: Make, pool: Pool, device: FakeDevice) -> None:
    mover = make(pool, device, "out")
    host = torch.zeros(pool.plan().num_bytes, dtype=torch.uint8)
    device.engine_writes((3, 4, 5))
    submission = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), host)])
    device.run(only=[name for name in device.streams if name != "compute"])
    assert not host.any()
    assert not submission.query()
    device.run()
    assert submission.query()
    device.host_reads(host)
    assert torch.equal(host, gathered(pool, (3, 4, 5)))


@MOVERS
def test_a_load_lets_the_engine_read_the_old_bytes_first(make: Make, pool: Pool, device: FakeDevice) -> None:
    mover = make(pool, device, "in")
    old = pool.paged[0].tensor[:, [3, 4, 5]].clone()
    read = device.engine_reads((3, 4, 5))
    submission = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), payload(pool))])
    device.run(only=[name for name in device.streams if name != "compute"])
    assert not submission.query()
    device.run()
    assert torch.equal(read.seen[0], old)
    assert submission.query()
    assert torch.equal(gathered(pool, (3, 4, 5)), payload(pool))


@MOVERS
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_event_that_is_named_is_waited_for(
    make: Make, direction: Direction, pool: Pool, device: FakeDevice
) -> None:
    mover = make(pool, device, direction)
    ready = []
    for block in (3, 4, 5):
        device.engine_writes([block])
        ready.append(device.compute_event())
    # The last to pass stands first: to wait for the last of the list would not do.
    submission = mover.submit(ready[::-1], [ChunkCopy((3, 4, 5), payload(pool))])
    device.run(only=["compute"], steps=4)
    device.run(only=[name for name in device.streams if name != "compute"])
    assert not submission.start.query()
    device.run()
    assert submission.query()


@MOVERS
def test_host_memory_is_free_for_others_once_the_end_has_passed(make: Make, pool: Pool, device: FakeDevice) -> None:
    host = payload(pool)
    mover = make(pool, device, "in")
    submission = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), host)])
    device.run(steps=2)
    assert not submission.query()
    device.run()
    assert submission.query()
    device.host_writes(host)


@MOVERS
def test_host_memory_that_is_written_before_the_end_was_seen_is_found(make: Make, pool: Pool) -> None:
    device = FakeDevice(pool.plan())
    device.bind_thread()
    host = payload(pool)
    make(pool, device, "in").submit([device.compute_event()], [ChunkCopy((3, 4, 5), host)])
    device.run()
    device.host_writes(host)
    with pytest.raises(AssertionError, match=r"read on in\) and the host's write \(write on host\) are not ordered"):
        device.check()


@MOVERS
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_mover_never_waits_for_the_device(make: Make, direction: Direction, pool: Pool, device: FakeDevice) -> None:
    mover = make(pool, device, direction)
    chunks = [ChunkCopy((3, 4, 5), payload(pool, seed)) for seed in range(12)]
    submissions = [mover.submit([device.compute_event()], [chunk]) for chunk in chunks]
    assert device.now_s == 0.0, "nothing has run, and far more than the ring holds is queued"
    assert device.queued_copies() >= 12
    device.run(random.Random(5))
    assert all(submission.query() for submission in submissions)
    for submission in submissions:
        submission.release()


# ---- what goes through the ring ----------------------------------------------------------------


def pages_of(device: FakeDevice) -> list[CopyPages]:
    return [operation for _, operation in device.submitted if isinstance(operation, CopyPages)]


def test_a_chunk_that_is_larger_than_a_slot_goes_through_all_slots_again_and_again(
    pool: Pool, device: FakeDevice
) -> None:
    mover = staged(pool, device, "out")
    for _ in range(3):
        mover.submit([], [ChunkCopy((3, 4, 5), payload(pool))])
    uses = Counter(operation.slot for operation in pages_of(device))
    assert sorted(uses) == list(range(RING_SLOTS))
    assert min(uses.values()) >= 5
    assert all(operation.num_chunks == 1 for operation in pages_of(device))


def test_chunks_that_are_smaller_than_a_slot_share_it_where_they_leave_out_the_same_blocks(
    pool: Pool, device: FakeDevice
) -> None:
    mover = staged(pool, device, "in", slots=20.0)
    skips = [0, 0, 0, 1, 1, 0, 3, 2]
    host = payload(pool)
    copies = [ChunkCopy((0, 1, 2), host, skip_blocks) for skip_blocks in skips]
    mover.submit([], copies)
    shared = [(operation.first_chunk, operation.num_chunks) for operation in pages_of(device)]
    assert shared == [(0, 3), (3, 2), (5, 1), (7, 1)]
    slots = [operation.slot for operation in pages_of(device)]
    assert slots == [0, 1, 2, 3]
    copied = [operation for _, operation in device.submitted if isinstance(operation, CopyStaged)]
    assert len(copied) == 7, "one contiguous copy for each chunk that is moved at all"


@pytest.mark.parametrize("slots", [1.0, 20.0])
def test_tensor_by_tensor_all_chunks_of_one_come_before_the_next(slots: float, pool: Pool, device: FakeDevice) -> None:
    mover = staged(pool, device, "in", slots)
    moved: list[list[int]] = [[]]
    seen = 0

    def told(number: int, event: Event) -> None:
        nonlocal seen
        operations = pages_of(device)[seen:]
        seen += len(operations)
        tensors = {pool.plan().planes[operation.piece.first_plane].tensor for operation in operations}
        moved.append([number, *tensors])

    mover.submit([], [ChunkCopy((0, 1, 2), payload(pool)), ChunkCopy((3, 4, 5), payload(pool))], told)
    assert moved[1:] == [[0, 0], [1, 1]]


@MOVERS
def test_a_chunk_that_leaves_out_every_block_touches_none(make: Make, pool: Pool, device: FakeDevice) -> None:
    before = [storage.clone() for storage in pool.storages]
    mover = make(pool, device, "in")
    submission = mover.submit([device.compute_event()], [ChunkCopy((0, 0, 11), payload(pool), 3)])
    # The stream that ends it must not be ahead of the one that begins it.
    device.run(only=["in kernels"])
    assert not submission.query()
    device.run()
    assert submission.query()
    assert submission.seconds() >= 0.0
    assert all(map(torch.equal, before, pool.storages))


# ---- block ids ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ids_are_written_again_only_when_their_submission_was_released(
    direction: Direction, pool: Pool, device: FakeDevice
) -> None:
    mover = staged(pool, device, direction)

    def submit() -> Submission:
        return mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), payload(pool))])

    first, second = submit(), submit()
    device.run()
    assert first.query()
    first.release()
    third = submit()
    device.run()
    assert second.query()
    assert third.query()
    ids = [operation.ids for _, operation in device.submitted if isinstance(operation, FetchIds)]
    assert ids[0] is not ids[1]
    assert ids[2] is ids[0]


# ---- times -------------------------------------------------------------------------------------


def device_time(device: FakeDevice) -> float:
    """What the operations of ours took together."""
    return OPERATION_S * sum(name != "compute" for name, _ in device.submitted)


@MOVERS
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_submission_is_timed_from_its_first_operation_to_its_last(
    make: Make, direction: Direction, pool: Pool, device: FakeDevice
) -> None:
    mover = make(pool, device, direction)
    for _ in range(3):
        device.engine_writes((3, 4, 5))
    submission = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), payload(pool))])
    # Ours would go first if they could: the engine's time before `ready` is none of the copy's.
    order = [name for name in device.streams if name != "compute"]
    device.run(only=order)
    device.run()
    assert submission.query()
    assert submission.seconds() == device_time(device)


@MOVERS
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_submissions_that_overlap_are_not_counted_twice(
    make: Make, direction: Direction, seed: int, pool: Pool, device: FakeDevice
) -> None:
    mover = make(pool, device, direction)
    submissions = [
        mover.submit([device.compute_event()], [ChunkCopy((at, at + 1, at + 2), payload(pool))]) for at in (0, 3, 6, 9)
    ]
    device.run(random.Random(seed))
    assert all(submission.query() for submission in submissions)
    total_s = sum(submission.seconds() for submission in submissions)
    assert total_s == pytest.approx(submissions[-1].end.seconds_since(submissions[0].start))


@MOVERS
def test_the_time_between_two_submissions_is_neither_s(make: Make, pool: Pool, device: FakeDevice) -> None:
    mover = make(pool, device, "out")
    first = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), payload(pool))])
    device.run()
    assert first.query()
    device.engine_writes((3, 4, 5))
    device.engine_writes((3, 4, 5))
    device.run()
    second = mover.submit([device.compute_event()], [ChunkCopy((3, 4, 5), payload(pool, 1))])
    device.run()
    assert second.query()
    assert first.seconds() == second.seconds() == device_time(device) / 2


# ---- what is refused ---------------------------------------------------------------------------


@MOVERS
def test_what_does_not_fit_the_plan_is_refused_and_nothing_is_queued(
    make: Make, pool: Pool, device: FakeDevice
) -> None:
    out, into = (make(pool, device, direction) for direction in DIRECTIONS)
    host = payload(pool)
    good = ChunkCopy((0, 1, 2), host)
    refused: list[tuple[Mover, list[ChunkCopy], str]] = [
        (out, [], "at least one chunk"),
        (out, [good, ChunkCopy((0, 1), host)], "3 blocks, got 2"),
        (out, [good, ChunkCopy((0, 1, 12), host)], "block id 12 is outside"),
        (out, [ChunkCopy((0, 1, 2), host[:-1])], "out must be contiguous and of shape"),
        (out, [ChunkCopy((0, 1, 2), host, 1)], "skip_blocks is for chunks on their way in, got 1"),
        (out, [ChunkCopy((0, 1, 2), host.to("meta"))], "host memory, got meta"),
        (into, [good, ChunkCopy((0, 3, 3), host)], "block id 3 is named twice"),
        (into, [ChunkCopy((0, 1, 2), host, 4)], "skip_blocks must be 0 to 3, got 4"),
        (into, [ChunkCopy((0, -1, 2), host)], "block id -1 is outside"),
    ]
    for mover, copies, why in refused:
        with pytest.raises(ValueError, match=why):
            mover.submit([device.compute_event()], copies)
    with pytest.raises(TypeError, match="src must be uint8"):
        into.submit([], [ChunkCopy((0, 1, 2), host.view(torch.int8))])
    assert not any(stream.queued for name, stream in device.streams.items() if name != "compute")


def test_staging_that_holds_no_block_is_refused_by_name(pool: Pool, device: FakeDevice) -> None:
    plan = pool.plan()
    staging = torch.empty(RING_SLOTS * 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a: a block of 187 bytes does not fit into 0 bytes of staging"):
        StagedMover(plan, TorchPages(plan), device, "out", staging, name="torch", max_chunks=1)
