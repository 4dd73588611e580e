"""Device copies: their order on the streams, when blocks are free, what a fence waits for."""

from __future__ import annotations

import threading

import pytest
from bench import blocks_of, one
from doubles import FakeDevice, PickledConnector, check_order, until

from kvsluice.connector import transfers, worker
from kvsluice.connector.copier import Claim, Copier, CopyTask
from kvsluice.kernels import CopyPlan
from kvsluice.tiers import reasons

WAIT_S = 20.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    device.take_over(monkeypatch)
    return device


def settle(device: FakeDevice, connector: PickledConnector) -> None:
    """Let the device go on until nothing is under way; results and releases stay where they are."""

    def done() -> bool:
        stats = connector.stats()
        return stats.jobs_open == 0 and stats.pool.pinned == 0

    until(device.run, done)


def test_every_copy_waits_for_the_engine_and_is_timed_by_events_around_it(bench, device, keys):
    connector = bench.connect("host", "fs", device=device)
    stored = connector.store(keys[:3], blocks_of(0, 1, 2))
    settle(device, connector)
    loaded = connector.load(keys[:2], blocks_of(5, 6))
    settle(device, connector)
    results = {result.job_id: result for result in connector.poll()}
    assert results[stored].copy_s == 3 * 0.25
    assert results[loaded].copy_s == 2 * 0.25
    assert check_order(device.log) == 5


class EagerCopier(Copier):
    """Copies first and waits afterwards: what must never happen."""

    def _issue(self, task: CopyTask) -> None:
        stream = self._out if task.is_store else self._in
        task.claim.take()
        with stream.use():
            start = stream.record()
            task.copy()
            stream.wait(task.ready)
            end = stream.record()
        self._flying.append((task, start, end, None))


def test_the_order_checker_fails_on_a_copier_that_does_not_wait(bench, device, keys, monkeypatch):
    monkeypatch.setattr(worker, "Copier", EagerCopier)
    connector = bench.connect("host", device=device)
    connector.store(keys[:1], blocks_of(0))
    settle(device, connector)
    with pytest.raises(AssertionError, match="stream out"):
        check_order(device.log)


@pytest.mark.parametrize("eager", [False, True], ids=["ours", "eager"])
def test_a_store_keeps_what_the_engine_writes_late_unless_the_copier_is_broken(
    bench, device, cache, keys, monkeypatch, eager
):
    if eager:
        monkeypatch.setattr(worker, "Copier", EagerCopier)
    connector = bench.connect("host", device=device)
    tensor = cache.tensors["model.layers.0"]
    late = tensor[:2].clone() + 1.0
    device.compute.push("write", lambda: tensor[:2].copy_(late))
    connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: device.queued_copies() == 1)
    device.streams[0].run()
    settle(device, connector)
    connector.load(keys[:1], blocks_of(5))
    settle(device, connector)
    assert bool((tensor[10:12] == late).all()) is not eager


def test_blocks_are_released_when_the_end_event_has_passed_and_not_before(bench, device, keys):
    connector = bench.connect("host", "fs", device=device)
    job = connector.store(keys[:2], blocks_of(0, 1))
    until(connector.poll, lambda: device.queued_copies() == 2)
    queries = [event for event in device.events if event.name.startswith("out-")]
    until(connector.poll, lambda: all(event.queries > 1 for event in queries[1::2]))
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

    def slow(transfer: transfers.StoreTransfer) -> None:
        entered.set()
        assert go.wait(WAIT_S)
        real(transfer)

    monkeypatch.setattr(transfers.StoreTransfer, "prepare", slow)
    connector.store(keys[1:3], blocks_of(1, 2))
    assert entered.wait(WAIT_S)
    connector.load(keys[:1], blocks_of(5))
    before = len(device.log)
    go.set()
    settle(device, connector)
    copies = [what for what, *_ in device.log[before:] if what in ("gather", "scatter")]
    assert copies == ["gather", "scatter", "gather"]


# ---- failures ----------------------------------------------------------------------------------


def test_a_copy_that_raises_fails_its_chunk_alone_and_the_thread_lives_on(bench, keys, monkeypatch, caplog):
    real = CopyPlan.gather
    monkeypatch.setattr(CopyPlan, "gather", lambda *args: (_ for _ in ()).throw(RuntimeError("device says no")))
    connector = bench.connect("host", "fs")
    failed = connector.store(keys[:1], blocks_of(0))
    assert one(connector.wait([failed], WAIT_S)).failed == {keys[0]: reasons.INTERNAL}
    assert "device says no" in caplog.text
    assert failed in connector.poll_released()
    assert connector.stats().tiers["host"].failed == {reasons.INTERNAL: 1}
    monkeypatch.setattr(CopyPlan, "gather", real)
    assert not one(connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)).failed


def test_a_copy_that_fails_half_way_holds_its_blocks_until_the_device_has_passed_it(bench, device, keys, monkeypatch):
    queue_copy = CopyPlan.gather

    def half_way(*args: object) -> None:
        queue_copy(*args)
        raise RuntimeError("the second kernel did not launch")

    monkeypatch.setattr(CopyPlan, "gather", half_way)
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

    def slow(transfer: transfers.StoreTransfer) -> None:
        entered.set()
        assert go.wait(WAIT_S)

    monkeypatch.setattr(transfers.StoreTransfer, "prepare", slow)
    connector.store(keys[:1], blocks_of(0))
    assert entered.wait(WAIT_S)
    waiting = connector.store(keys[1:2], blocks_of(1))
    connector.close(timeout_s=0.05)
    go.set()
    assert one([result for result in connector.poll() if result.job_id == waiting]).failed == {keys[1]: reasons.CLOSED}
    assert waiting in connector.poll_released()


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
