"""What goes to the device together: batches, how many at once, and loads whose layers an engine takes one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from bench import WIDTH, Bench, Cache, blocks_of
from doubles import PickledConnector, until
from fake_device import OPERATION_S, FakeDevice
from mover_traffic import stage_everything

from kvsluice.connector import worker
from kvsluice.connector.copier import MAX_FLYING
from kvsluice.kernels import CopyPlan
from kvsluice.kernels.device import Event
from kvsluice.kernels.movers import OnTensor, StagedMover, Submission
from kvsluice.kernels.operations import ChunkCopy, FetchIds
from kvsluice.tiers import reasons

LAYERS = ("model.layers.0", "model.layers.1")


@pytest.fixture
def recorder(cache: Cache) -> FakeDevice:
    """Without the check on the way out: for tests of a broken order."""
    return FakeDevice(CopyPlan(cache.layout.paged, WIDTH))


@pytest.fixture
def device(recorder: FakeDevice) -> Iterator[FakeDevice]:
    yield recorder
    recorder.check()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The block ids of every submission's chunks; at most three chunks go together."""
    stage_everything(monkeypatch, max_chunks=3)
    made: list[list[tuple[int, ...]]] = []
    real = StagedMover.submit

    def submit(
        mover: StagedMover, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        submission = real(mover, ready, copies, on_tensor)
        made.append([chunk.block_ids for chunk in copies])
        return submission

    monkeypatch.setattr(StagedMover, "submit", submit)
    return made


def chunks(*numbers: int) -> list[tuple[int, ...]]:
    return [tuple(blocks_of(number)) for number in numbers]


def settle(device: FakeDevice, connector: PickledConnector) -> None:
    until(device.run, lambda: connector.stats().jobs_open == 0 and connector.stats().pool.pinned == 0)


def fill(connector: PickledConnector, device: FakeDevice, keys: Sequence[bytes], batches: list[object]) -> None:
    """As many stores as may be are in the device's hands: those of chunks 0 and 1."""
    for number in range(MAX_FLYING):
        connector.store(keys[number : number + 1], blocks_of(number))
        until(lambda: None, lambda number=number: len(batches) == number + 1)


def until_looked(device: FakeDevice) -> None:
    """The copier has looked at what waits, and at what is under way, since this was called."""
    asked = sum(event.queries for event in device.events)
    until(lambda: None, lambda: sum(event.queries for event in device.events) > asked + 2)


# ---- batches -----------------------------------------------------------------------------------


def test_what_waits_goes_out_together_and_by_itself_when_all_before_it_ended_at_once(bench, device, keys, batches):
    connector = bench.connect("host", device=device)
    fill(connector, device, keys, batches)
    for number in range(2, 7):
        connector.store(keys[number : number + 1], blocks_of(number))
    until_looked(device)
    device.unseen = True
    device.run()
    assert batches == [chunks(0), chunks(1)], "no more than two submissions are in the device's hands"
    # Nobody asks for anything from here on: what waits must not wait for that.
    device.unseen = False
    until(lambda: None, lambda: len(batches) == 4)
    assert batches[2:] == [chunks(2, 3, 4), chunks(5, 6)]
    settle(device, connector)


def test_the_time_of_a_batch_is_shared_out_among_its_chunks(bench, device, keys, batches):
    connector = bench.connect("host", device=device)
    fill(connector, device, keys, batches)
    job = connector.store(keys[2:5], blocks_of(2, 3, 4))
    device.unseen = True
    device.run()
    before_s = device.now_s
    device.unseen = False
    settle(device, connector)
    assert batches[2:] == [chunks(2, 3, 4)]
    (result,) = (result for result in connector.poll() if result.job_id == job)
    # The ids, and for each chunk and layer a gather and a copy: all of it is the submission's.
    assert device.now_s - before_s == (1 + 3 * 2 * 2) * OPERATION_S
    assert result.copy_s == pytest.approx(device.now_s - before_s)


def test_a_store_that_is_cancelled_while_it_waits_is_left_out_of_its_batch(bench, device, keys, batches):
    connector = bench.connect("host", device=device)
    fill(connector, device, keys, batches)
    jobs = [connector.store(keys[number : number + 1], blocks_of(number)) for number in (2, 3, 4)]
    connector.cancel(jobs[1])
    settle(device, connector)
    assert batches[2:] == [chunks(2, 4)]
    failed = {result.job_id: result.failed for result in connector.poll()}
    assert failed[jobs[1]] == {keys[3]: reasons.CANCELLED}
    assert not failed[jobs[0]]
    assert not failed[jobs[2]]


def test_loads_for_one_block_go_one_after_the_other(bench, device, cache, keys, batches):
    connector = bench.connect("host", device=device)
    connector.store(keys[:4], blocks_of(0, 1, 2, 3))
    settle(device, connector)
    del batches[:]
    for number in range(MAX_FLYING):
        connector.load(keys[number : number + 1], blocks_of(10 + number))
        until(lambda: None, lambda number=number: len(batches) == number + 1)
    connector.load(keys[2:3], blocks_of(12))
    connector.load(keys[3:4], blocks_of(12)[:1] + blocks_of(13)[:1])
    settle(device, connector)
    assert batches[2:] == [chunks(12), [(24, 26)]]
    assert cache.holds([24, 26], blocks_of(3))
    assert cache.holds([25], blocks_of(2)[1:])


@pytest.mark.parametrize("queued", [False, True], ids=["refused", "queued"])
def test_a_batch_that_fails_fails_its_chunks_and_the_next_goes_on(bench, device, keys, batches, queued):
    connector = bench.connect("host", device=device)
    fill(connector, device, keys, batches)
    failing = connector.store(keys[2:5], blocks_of(2, 3, 4))
    following = connector.store(keys[5:6], blocks_of(5))
    device.fail("submit", 3, RuntimeError("no"), queued=queued)
    released: list[int] = []

    def step() -> None:
        device.run(steps=1)
        for job in connector.poll_released():
            released.append(job)
            if job == failing:
                device.engine_writes(blocks_of(2, 3, 4))

    until(step, lambda: {failing, following} <= set(released))
    settle(device, connector)
    results = {result.job_id: result for result in connector.poll()}
    assert results[failing].failed == dict.fromkeys(keys[2:5], reasons.INTERNAL)
    assert results[following].done_keys == (keys[5],)


def test_the_ids_of_a_submission_that_is_over_are_the_next_one_s(bench, device, keys, batches):
    connector = bench.connect("host", device=device)
    for number in range(6):
        connector.store(keys[number : number + 1], blocks_of(number))
        settle(device, connector)
    assert len(batches) == 6
    assert len({id(operation.ids) for _, operation in device.submitted if isinstance(operation, FetchIds)}) == 1


# ---- layer by layer ----------------------------------------------------------------------------


def stored(bench: Bench, device: FakeDevice, cache: Cache, keys: Sequence[bytes]) -> PickledConnector:
    """A connector that holds chunks 0 and 1."""
    connector = bench.connect("host", device=device)
    connector.store(keys[:2], blocks_of(0, 1))
    settle(device, connector)
    connector.poll()
    return connector


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_an_engine_that_takes_layer_by_layer_reads_each_behind_its_copies(bench, device, cache, keys, monkeypatch, way):
    if way == "staged":
        stage_everything(monkeypatch)
    connector = stored(bench, device, cache, keys)
    device.engine_reads(blocks_of(10, 11))
    job = connector.load(keys[:2], blocks_of(10, 11), by_layer=True)
    reads = []
    for layer in LAYERS:
        assert connector.wait_for_layer(job, layer, timeout_s=20.0)
        number = cache.layout.last_tensor(layer)
        reads.append(device.engine_reads(blocks_of(10, 11), range(number, number + 1)))
    # Nobody has asked the device for anything: all of this waits for its layers on the streams alone.
    assert not any(read.seen for read in reads)
    device.run()
    for layer, read in zip(LAYERS, reads, strict=True):
        assert torch.equal(read.seen[0].view(torch.float32).flatten(), cache.first[layer][blocks_of(0, 1)].flatten())
    until(device.run, lambda: [result.job_id for result in connector.poll()] == [job])
    device.engine_writes(blocks_of(10, 11))
    device.run()


def test_an_engine_that_does_not_wait_for_a_layer_is_found(bench, recorder, cache, keys, monkeypatch):
    stage_everything(monkeypatch)
    connector = stored(bench, recorder, cache, keys)
    monkeypatch.setattr(worker.RankWorker, "compute_wait", lambda worker, events: None)
    job = connector.load(keys[:2], blocks_of(10, 11), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], timeout_s=20.0)
    recorder.engine_reads(blocks_of(10, 11), range(1))
    settle(recorder, connector)
    with pytest.raises(AssertionError, match=r"CopyPages \d+ \(write on in kernels\) and EngineRead"):
        recorder.check()


def test_blocks_of_a_load_by_layer_are_the_engines_to_write_only_when_it_is_over(bench, recorder, cache, keys):
    connector = stored(bench, recorder, cache, keys)
    job = connector.load(keys[:2], blocks_of(10, 11), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], timeout_s=20.0)
    recorder.engine_writes(blocks_of(10))
    settle(recorder, connector)
    with pytest.raises(AssertionError, match=r"CopyDirect \d+ \(write on in\) and EngineWrite"):
        recorder.check()
