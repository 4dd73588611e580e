"""An order that is broken on purpose is found by the checker, and spoils bytes in some interleaving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fake_device import FakeDevice, FakeEvent, FakeStream
from mover_traffic import Traffic, direct, small_pool, staged

from kvsluice.kernels.device import Event, Operation
from kvsluice.kernels.movers import DirectMover, OnTensor, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy, Direction, FetchIds

MAX_SEEDS = 40
SUBMISSIONS = 12

Break = Callable[[FakeDevice, "StagedMover | DirectMover", Direction], None]


def broken(kind: str, direction: Direction, seed: int, breaking: Break | None) -> tuple[list[str], list[str]]:
    """The races and the wrong bytes of one run over movers of both directions, one of them broken."""
    pool = small_pool()
    device = FakeDevice(pool.plan())
    device.bind_thread()
    directions: tuple[Direction, Direction] = ("out", "in")
    if kind == "direct":
        movers = {each: direct(pool, device, each) for each in directions}
    else:
        movers = {each: staged(pool, device, each) for each in directions}
    if breaking is not None:
        breaking(device, movers[direction], direction)
    traffic = Traffic(pool, device, movers, seed, timed=breaking is None)
    try:
        traffic.run(SUBMISSIONS)
    except (IndexError, ValueError) as spoilt:
        # Block ids that were not there yet, or no more.
        traffic.wrong.append(str(spoilt))
    return device.races, traffic.wrong


def two_steps(device: FakeDevice, direction: Direction) -> tuple[FakeStream, FakeStream]:
    """The streams that a chunk goes over, in their order; of a direct mover twice the same."""
    copies = device.streams[direction]
    kernels = device.streams.get(f"{direction} kernels", copies)
    return (kernels, copies) if direction == "out" else (copies, kernels)


def deaf(stream: FakeStream, to: FakeStream) -> None:
    """Waits of `stream` for events of the stream `to` come to nothing."""
    real = stream.wait

    def wait(event: Event) -> None:
        assert isinstance(event, FakeEvent)
        if event.stream != to.name:
            real(event)

    stream.wait = wait


def nothing_waits_for_ready(device: FakeDevice, mover: StagedMover | DirectMover, direction: Direction) -> None:
    deaf(two_steps(device, direction)[0], device.compute)


def the_second_step_does_not_wait_for_the_first(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    first, second = two_steps(device, direction)
    deaf(second, first)


def the_first_step_does_not_wait_for_its_slot(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    first, second = two_steps(device, direction)
    deaf(first, second)


def after_submit(mover: StagedMover | DirectMover, change: Callable[[Submission], Submission]) -> None:
    """Spoil what a submission says of itself."""
    real = mover.submit

    def submit(ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None) -> Submission:
        return change(real(ready, copies, on_tensor))

    mover.submit = submit


def the_end_stands_on_the_wrong_stream(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    after_submit(mover, lambda made: replace(made, end=two_steps(device, direction)[0].record(), before=None))


def the_end_is_the_start(device: FakeDevice, mover: StagedMover | DirectMover, direction: Direction) -> None:
    after_submit(mover, lambda made: replace(made, end=made.start, before=None))


def ids_come_back_at_once(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    def release(made: Submission) -> Submission:
        made.release()
        return made

    after_submit(mover, release)


def ids_are_fetched_on_the_copies_stream(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    kernels, copies = device.streams[f"{direction} kernels"], device.streams[direction]
    real = kernels.submit

    def submit(operation: Operation) -> None:
        (copies.submit if isinstance(operation, FetchIds) else real)(operation)

    kernels.submit = submit


def slots_count_as_free_after_their_first_step(device: FakeDevice, mover: StagedMover, direction: Direction) -> None:
    def free(made: Submission) -> Submission:
        for slot in mover._slots:  # noqa: SLF001 - what is broken here is inside
            slot.free = two_steps(device, direction)[0].record()
        return made

    after_submit(mover, free)


def tensors_are_told_of_too_early(device: FakeDevice, mover: StagedMover | DirectMover, direction: Direction) -> None:
    real = mover.submit

    def submit(ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None) -> Submission:
        if on_tensor is None:
            return real(ready, copies)
        early = two_steps(device, direction)[0] if isinstance(mover, StagedMover) else device.compute
        return real(ready, copies, lambda number, event: on_tensor(number, early.record()))

    mover.submit = submit


BROKEN: list[tuple[str, Direction, Break]] = [
    *(
        ("direct", direction, breaking)
        for direction in ("out", "in")
        for breaking in (nothing_waits_for_ready, the_end_is_the_start, tensors_are_told_of_too_early)
    ),
    *(
        ("staged", direction, breaking)
        for direction in ("out", "in")
        for breaking in (
            nothing_waits_for_ready,
            the_second_step_does_not_wait_for_the_first,
            the_first_step_does_not_wait_for_its_slot,
            slots_count_as_free_after_their_first_step,
            the_end_stands_on_the_wrong_stream,
            the_end_is_the_start,
            tensors_are_told_of_too_early,
            ids_come_back_at_once,
        )
    ),
    # A load's kernels wait for its copies, and so for ids that were fetched before these.
    ("staged", "out", ids_are_fetched_on_the_copies_stream),
]


@pytest.mark.parametrize(
    ("kind", "direction", "breaking"),
    BROKEN,
    ids=[f"{kind}-{direction}-{breaking.__name__}" for kind, direction, breaking in BROKEN],
)
def test_a_broken_order_is_found_and_spoils_bytes(kind: str, direction: Direction, breaking: Break) -> None:
    found, spoilt = 0, 0
    for seed in range(MAX_SEEDS):
        races, wrong = broken(kind, direction, seed, breaking)
        assert races or not wrong, f"seed {seed} spoils bytes and is not found: {wrong}"
        found += bool(races)
        spoilt += bool(wrong)
        if found and spoilt:
            return
    pytest.fail(f"of {MAX_SEEDS} runs {found} were found and {spoilt} spoilt bytes")


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_the_same_traffic_in_the_right_order_is_clean(kind: str) -> None:
    assert all(broken(kind, "out", seed, None) == ([], []) for seed in range(8))
