"""Device copies: their order on the streams, when blocks are free, what a fence waits for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest
from bench import WIDTH, Cache, blocks_of, one, sluice_threads
from doubles import PickledConnector, until
from fake_device import OPERATION_S, FakeDevice

from kvsluice.connector import transfers, worker
from kvsluice.connector.copier import Claim, Copier
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.kernels.device import CpuDevice, Device, Event
from kvsluice.kernels.movers import Mover, OnTensor, Submission
from kvsluice.kernels.operations import ChunkCopy, CopyDirect
from kvsluice.tiers import ConfigError, reasons

WAIT_S = 20.0


@pytest.fixture
def recorder(cache: Cache) -> FakeDevice:
    """Without the check on the way out: for tests of a broken order."""
    return FakeDevice(CopyPlan(cache.layout.paged, WIDTH))


@pytest.fixture
def device(recorder: FakeDevice) -> Iterator[FakeDevice]:
    yield recorder
    recorder.check()


def settle(device: FakeDevice, connector: PickledConnector) -> None:
    """Let the device go on until nothing is under way; results and releases stay where they are."""

    def done() -> bool:
        stats = connector.stats()
        return stats.jobs_open == 0 and stats.pool.pinned == 0

    until(device.run, done)


def test_every_copy_waits_for_the_engine_and_is_timed_by_events_around_it(bench, device, keys):
    connector = bench.connect("host", "fs", device=device)
    device.engine_writes(blocks_of(0, 1, 2))
    stored = connector.store(keys[:3], blocks_of(0, 1, 2))
    settle(device, connector)
    device.engine_reads(blocks_of(5, 6))
    loaded = connector.load(keys[:2], blocks_of(5, 6))
    settle(device, connector)
    results = {result.job_id: result for result in connector.poll()}
    assert results[stored].copy_s == 3 * OPERATION_S
    assert results[loaded].copy_s == 2 * OPERATION_S
    assert directions(device) == ["out"] * 3 + ["in"] * 2
    device.check()


def directions(device: FakeDevice) -> list[str]:
    """Of the copies that were queued, in their order."""
    return [operation.direction for _, operation in device.submitted if isinstance(operation, CopyDirect)]


class _Eager:
    """A mover that waits for nothing: what must never happen."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.name = mover.name
        self.max_chunks = mover.max_chunks

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        return self._mover.submit([], copies, on_tensor)


class EagerCopier(Copier):
    def __init__(self, device: Device, out: Mover, into: Mover, **options: object) -> None:
        super().__init__(device, _Eager(out), _Eager(into), **options)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_copier_that_does_not_wait_for_the_engine_is_found(bench, recorder, keys, monkeypatch, kind):
    monkeypatch.setattr(worker, "Copier", EagerCopier)
    connector = bench.connect("host", device=recorder)
    if kind == "load":
        connector.store(keys[:1], blocks_of(0))
        settle(recorder, connector)
        recorder.engine_reads(blocks_of(5))
        connector.load(keys[:1], blocks_of(5))
    else:
        recorder.engine_writes(blocks_of(0))
        connector.store(keys[:1], blocks_of(0))
    settle(recorder, connector)
    with pytest.raises(AssertionError, match=r"Engine.* on compute\) and CopyDirect .* are not ordered"):
        recorder.check()


@pytest.mark.parametrize("eager", [False, True], ids=["ours", "eager"])
def test_a_store_keeps_what_the_engine_writes_late_unless_the_copier_is_broken(
    bench, recorder, cache, keys, monkeypatch, eager
):
    if eager:
        monkeypatch.setattr(worker, "Copier", EagerCopier)
    connector = bench.connect("host", device=recorder)
    tensor = cache.tensors["model.layers.0"]
    recorder.engine_writes(blocks_of(0))
    late = recorder.engine_reads(blocks_of(0))
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: recorder.queued_copies() == 1)
    recorder.run(only=["out"])
    settle(recorder, connector)
    connector.load(keys[:1], blocks_of(5))
    settle(recorder, connector)
    assert tensor[10:12].view_as(tensor[0:2]).equal(tensor[0:2]) is not eager
    assert late.seen[0].equal(recorder.plan.paged[0].tensor[0:2])


def test_blocks_are_released_when_the_end_event_has_passed_and_not_before(bench, device, keys):
    connector = bench.connect("host", "fs", device=device)
    job = connector.store(keys[:2], blocks_of(0, 1))
    until(connector.poll, lambda: device.queued_copies() == 2)
    ends = [event for event in device.events if event.stream == "out"][1::2]
    # The second's is not asked for while the first's has not passed.
    until(connector.poll, lambda: ends[0].queries > 1)
    assert connector.poll_released() == []
    assert connector.lookup(keys[:1]).held == 0
    assert not bench.tiers["fs"].images, "nothing is written from a slot that is not whole"
    released: list[int] = []

    def step() -> None:
        device.run()
        released.extend(connector.poll_released())

    until(step, lambda: released == [job])
    settle(device, connector)


def test_a_cancelled_store_whose_copy_is_under_way_holds_its_blocks_until_it_is_over(bench, device, keys):
    connector = bench.connect("host", device=device)
    job = connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    connector.cancel(job)
    assert connector.poll_released() == []
    assert connector.poll() == []
    settle(device, connector)
    assert one(connector.poll()).job_id == job


def test_a_load_is_over_only_when_its_end_event_has_passed(bench, device, cache, keys):
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    settle(device, connector)
    connector.poll()
    cache.blank()
    job = connector.load(keys[:1], blocks_of(5))
    until(connector.poll_released, lambda: device.queued_copies() == 1)
    assert connector.poll() == []
    assert cache.is_blank(range(32))
    settle(device, connector)
    assert one(connector.poll()).job_id == job
    assert cache.holds(blocks_of(5), blocks_of(0))


def test_a_fence_waits_for_copies_that_touch_its_blocks(bench, device, keys):
    connector = bench.connect("host", device=device)
    connector.store(keys[:2], blocks_of(0, 1))
    until(connector.poll, lambda: device.queued_copies() == 2)
    connector.fence(blocks_of(7))
    fenced = threading.Event()
    thread = threading.Thread(target=lambda: (connector.fence([blocks_of(1)[0]]), fenced.set()))
    thread.start()
    assert not fenced.wait(0.05)
    until(device.run, fenced.is_set)
    thread.join()
    settle(device, connector)


def test_a_fence_that_the_device_does_not_answer_times_out(bench, device, keys):
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    with pytest.raises(TimeoutError, match=r"1 copies touch the fenced blocks after 0\.05 s"):
        connector._worker.fence(blocks_of(0), timeout_s=0.05)  # noqa: SLF001 - the connector's own waits 10 s
    settle(device, connector)


def test_a_fenced_load_whose_tier_hangs_never_writes_its_blocks(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    cache.blank()
    hold = fs.hold("load")
    connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    connector.fence(blocks_of(5)[:1])
    assert one(connector.poll()).failed == {keys[0]: reasons.FENCED}
    hold.open()
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    assert cache.is_blank(range(32))


def test_a_fence_does_not_wait_for_a_tier_that_hangs_in_a_store(bench, keys):
    hold = bench.double("fs").hold("store")
    connector = bench.connect("fs")
    connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    connector.fence(blocks_of(0))


def test_a_fenced_store_that_waits_for_a_slot_is_never_made(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("fs", slots=2)
    first = connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    waiting = connector.store(keys[1:2], blocks_of(1))
    assert connector.stats().stores_waiting == 1
    connector.fence(blocks_of(1))
    assert one(connector.poll()).failed == {keys[1]: reasons.FENCED}
    hold.open()
    connector.wait([first], WAIT_S)
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    assert len(fs.images) == 1
    assert waiting in connector.poll_released()


def test_a_fenced_load_that_waits_for_a_slot_never_writes_its_blocks(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs", slots=2)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    cache.blank()
    hold = fs.hold("load")
    first = connector.load(keys[:1], blocks_of(4))
    hold.wait_for()
    connector.load(keys[:1], blocks_of(5))
    assert connector.stats().loads_waiting == 1
    connector.fence(blocks_of(5))
    assert one(connector.poll()).failed == {keys[0]: reasons.FENCED}
    hold.open()
    connector.wait([first], WAIT_S)
    assert cache.is_blank(blocks_of(5))


def test_loads_are_copied_before_stores_that_wait(bench, device, keys, monkeypatch):
    connector = bench.connect("host", device=device, slots=16)
    connector.store(keys[:1], blocks_of(0))
    settle(device, connector)
    entered, go = threading.Event(), threading.Event()
    real = transfers.StoreTransfer.prepare

    def slow(transfer: transfers.StoreTransfer) -> ChunkCopy:
        entered.set()
        assert go.wait(WAIT_S)
        return real(transfer)

    monkeypatch.setattr(transfers.StoreTransfer, "prepare", slow)
    connector.store(keys[1:3], blocks_of(1, 2))
    assert entered.wait(WAIT_S)
    connector.load(keys[:1], blocks_of(5))
    before = len(directions(device))
    go.set()
    settle(device, connector)
    assert directions(device)[before:] == ["out", "in", "out"]


# ---- failures ----------------------------------------------------------------------------------


def test_a_copy_that_raises_fails_its_chunk_alone_and_the_thread_lives_on(bench, keys, monkeypatch, caplog):
    real = HostCopy.gather
    monkeypatch.setattr(HostCopy, "gather", lambda *args: (_ for _ in ()).throw(RuntimeError("device says no")))
    connector = bench.connect("host", "fs")
    failed = connector.store(keys[:1], blocks_of(0))
    assert one(connector.wait([failed], WAIT_S)).failed == {keys[0]: reasons.INTERNAL}
    assert "device says no" in caplog.text
    assert failed in connector.poll_released()
    assert connector.stats().tiers["host"].failed == {reasons.INTERNAL: 1}
    monkeypatch.setattr(HostCopy, "gather", real)
    assert not one(connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)).failed


def test_a_copy_that_fails_half_way_holds_its_blocks_until_the_device_has_passed_it(bench, device, keys):
    device.fail("submit", 0, RuntimeError("the second kernel did not launch"), queued=True)
    connector = bench.connect("host", device=device)
    job = connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    assert connector.poll_released() == []
    assert connector.poll() == []
    settle(device, connector)
    assert one(connector.poll()).failed == {keys[0]: reasons.INTERNAL}
    assert connector.lookup(keys[:1]).held == 0
    assert connector.poll_released() == [job]


def test_an_event_that_reports_a_failed_device_fails_its_chunk_and_the_thread_lives_on(bench, device, keys):
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    device.events[-1].error = RuntimeError("illegal address")
    until(connector.poll_released, lambda: connector.stats().jobs_open == 0)
    assert one(connector.poll()).failed == {keys[0]: reasons.INTERNAL}
    device.events[-1].error = None
    device.run()
    connector.store(keys[1:2], blocks_of(1))
    settle(device, connector)
    assert one(connector.poll()).done_keys == (keys[1],)


def test_close_names_the_copier_while_the_device_still_has_a_copy(bench, device, keys):
    bench.hung = {"kvsluice-copy"}
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    assert connector.close(timeout_s=0.05) == ["kvsluice-copy"]
    assert connector.poll_released() == [], "the device still reads the blocks"


def test_copies_that_never_started_are_shed_at_close(bench, device, keys, monkeypatch):
    bench.hung = {"kvsluice-copy"}
    connector = bench.connect("host", device=device)
    entered, go = threading.Event(), threading.Event()

    real = transfers.StoreTransfer.prepare

    def slow(transfer: transfers.StoreTransfer) -> ChunkCopy:
        entered.set()
        assert go.wait(WAIT_S)
        return real(transfer)

    monkeypatch.setattr(transfers.StoreTransfer, "prepare", slow)
    connector.store(keys[:1], blocks_of(0))
    assert entered.wait(WAIT_S)
    waiting = connector.store(keys[1:2], blocks_of(1))
    connector.close(timeout_s=0.05)
    go.set()
    assert one([result for result in connector.poll() if result.job_id == waiting]).failed == {keys[1]: reasons.CLOSED}
    assert waiting in connector.poll_released()


def test_a_device_that_a_thread_cannot_be_bound_to_is_an_error_at_once_and_leaves_no_thread(monkeypatch):
    def lost(self):
        raise RuntimeError("no such device")

    monkeypatch.setattr(CpuDevice, "bind_thread", lost)
    with pytest.raises(RuntimeError, match="no such device"):
        Copier(CpuDevice(), object(), object())
    assert "kvsluice-copy" not in sluice_threads()


def test_close_waits_for_a_copy_that_comes_home_in_time(bench, device, keys):
    connector = bench.connect("host", device=device)
    job = connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    threading.Timer(0.05, device.run).start()
    assert connector.close(timeout_s=0.0) == []
    assert connector.poll_released() == [job]


def test_what_the_device_still_has_at_close_lives_on(bench, device, keys):
    bench.hung = {"kvsluice-copy"}
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    region = weakref.ref(connector._worker.region)  # noqa: SLF001 - nobody else may hold it
    bench.made.remove(connector)
    connector.close(timeout_s=0.0)
    del connector
    gc.collect()
    assert region() is not None, "the copy under way writes to the region"


def test_a_process_that_does_not_close_ends_all_the_same():
    script = (
        "from kvsluice.connector.copier import Copier\n"
        "from kvsluice.kernels.device import CpuDevice\n"
        "copier = Copier(CpuDevice(), object(), object())\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_a_device_that_threads_cannot_use_refuses_the_connector_and_leaves_nothing(bench, monkeypatch):
    def lost(self):
        raise RuntimeError("no such device")

    monkeypatch.setattr(CpuDevice, "bind_thread", lost)
    with pytest.raises(ConfigError, match="a thread of our own cannot use cpu: no such device"):
        bench.connect("host", "fs")
    assert not sluice_threads()


def test_a_chunk_whose_end_cannot_be_told_does_not_take_the_thread_with_it(bench, keys, monkeypatch, caplog):
    connector = bench.connect("host", "fs")
    real = transfers.StoreTransfer.on_copied

    def broken(transfer, copy_s):
        monkeypatch.setattr(transfers.StoreTransfer, "on_copied", real)
        real(transfer, copy_s)
        raise KeyError("nobody is listening")

    monkeypatch.setattr(transfers.StoreTransfer, "on_copied", broken)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    assert one(connector.wait([connector.store(keys[1:2], blocks_of(1))], WAIT_S)).done_keys == (keys[1],)
    assert "a copy's end could not be told" in caplog.text


# ---- claims ------------------------------------------------------------------------------------


def test_of_many_threads_exactly_one_takes_a_claim():
    for _ in range(50):
        claim, taken = Claim(), []
        barrier = threading.Barrier(4)
        threads = [
            threading.Thread(target=lambda c=claim, t=taken, b=barrier: (b.wait(), t.append(c.take())))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == [False, False, False, True]
        assert claim.taken
