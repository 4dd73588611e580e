"""The recording device: what it takes for ordered, and what it finds."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from fake_device import OPERATION_S, FakeDevice
from happens_before import AccessLog, Memory, ModelThread
from mover_traffic import small_pool

from kvsluice.kernels import HostCopy
from kvsluice.kernels.operations import ChunkCopy, CopyDirect, Direction


@pytest.fixture
def device() -> FakeDevice:
    device = FakeDevice(small_pool().plan())
    device.bind_thread()
    return device


def copy(device: FakeDevice, direction: Direction, *block_ids: int, host: torch.Tensor | None = None) -> CopyDirect:
    memory = torch.zeros(device.plan.num_bytes, dtype=torch.uint8) if host is None else host
    return CopyDirect(HostCopy(device.plan), direction, ChunkCopy(block_ids, memory))


# ---- what is ordered ---------------------------------------------------------------------------


def test_an_access_is_ordered_by_its_own_thread_and_by_clocks_that_were_joined() -> None:
    log, one, two = AccessLog(), ModelThread("one"), ModelThread("two")
    page = [Memory("page")]
    log.add(one, "a", [], page)
    log.add(one, "b", [], page)
    two.join(one.stamp())
    log.add(two, "c", [], page)
    assert log.races == []
    log.add(one, "d", page, [])
    assert log.races == ["c (write on two) and d (read on one) are not ordered at page"]


def test_what_a_thread_does_after_its_clock_was_taken_is_not_covered_by_it() -> None:
    log, one, two = AccessLog(), ModelThread("one"), ModelThread("two")
    early = one.stamp()
    log.add(one, "a", [], [Memory("page")])
    two.join(early)
    log.add(two, "b", [Memory("page")], [])
    assert len(log.races) == 1


def test_order_is_passed_on_from_thread_to_thread() -> None:
    log, threads = AccessLog(), [ModelThread(name) for name in "abc"]
    log.add(threads[0], "first", [], [Memory("page")])
    threads[1].join(threads[0].stamp())
    threads[2].join(threads[1].stamp())
    log.add(threads[2], "last", [], [Memory("page")])
    assert log.races == []


def test_reads_do_not_race_and_a_write_races_with_each_of_them() -> None:
    log, threads = AccessLog(), [ModelThread(name) for name in "abc"]
    for thread in threads:
        log.add(thread, "look", [Memory("page")], [])
    assert log.races == []
    log.add(threads[0], "change", [], [Memory("page")])
    assert len(log.races) == 2


def test_bytes_race_where_they_overlap_and_nowhere_else() -> None:
    log, one, two = AccessLog(), ModelThread("one"), ModelThread("two")
    log.add(one, "a", [], [Memory("host", 0, 100)])
    log.add(two, "b", [], [Memory("host", 100, 200), Memory("other", 0, 100)])
    assert log.races == []
    log.add(two, "c", [Memory("host", 99, 101)], [])
    assert log.races == ["a (write on one) and c (read on two) are not ordered at host[99:101]"]


def test_a_write_over_a_part_leaves_the_rest_known() -> None:
    log, one, two = AccessLog(), ModelThread("one"), ModelThread("two")
    log.add(one, "whole", [], [Memory("host", 0, 100)])
    two.join(one.stamp())
    log.add(one, "part", [], [Memory("host", 0, 50)])
    log.add(two, "rest", [Memory("host", 50, 100)], [])
    assert log.races == []
    log.add(ModelThread("three"), "late", [Memory("host", 50, 100)], [])
    assert log.races == ["whole (write on one) and late (read on three) are not ordered at host[50:100]"]


def test_two_streams_are_ordered_by_an_event_and_not_by_having_run_one_after_the_other(device: FakeDevice) -> None:
    stream = device.new_stream("ours")
    device.engine_writes([1, 2, 3])
    ready = device.compute_event()
    device.run()
    stream.submit(copy(device, "out", 1, 2, 3))
    assert len(device.races) == 9, "three blocks of three planes"
    assert "EngineWrite 1 (write on compute) and CopyDirect 2 (read on ours)" in device.races[0]
    stream.wait(ready)
    stream.submit(copy(device, "out", 1, 2, 3))
    assert len(device.races) == 9
    with pytest.raises(AssertionError, match="9 faults"):
        device.check()


def test_only_a_query_that_said_yes_orders_the_host(device: FakeDevice) -> None:
    host = torch.zeros(device.plan.num_bytes, dtype=torch.uint8)
    device.new_stream("ours").submit(copy(device, "out", 1, 2, 3, host=host))
    end = device.streams["ours"].record()
    assert not end.query()
    device.host_reads(host[:10])
    assert len(device.races) == 1
    device.run()
    device.host_reads(host[:10])
    assert len(device.races) == 2, "it has run, and nobody looked"
    assert end.query()
    device.host_writes(host)
    assert len(device.races) == 2


def test_what_is_queued_comes_after_all_that_the_host_knew(device: FakeDevice) -> None:
    host = torch.zeros(device.plan.num_bytes, dtype=torch.uint8)
    device.host_writes(host)
    device.new_stream("in").submit(copy(device, "in", 1, 2, 3, host=host))
    end = device.streams["in"].record()
    device.run()
    assert end.query()
    device.engine_writes([1, 2, 3])
    device.check()
    device.host_writes(host)
    device.check()


def test_a_thread_that_was_never_bound_is_found(device: FakeDevice) -> None:
    stream = device.new_stream("ours")
    thread = threading.Thread(target=stream.record, name="stray")
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match="stray uses stream ours and was never bound"):
        device.check()


# ---- how it runs -------------------------------------------------------------------------------


def test_work_waits_for_the_device_and_a_stream_for_its_events(device: FakeDevice) -> None:
    stream = device.new_stream("ours")
    read = device.engine_reads([1])
    ready = device.compute_event()
    stream.wait(ready)
    start = stream.record()
    stream.submit(copy(device, "in", 1, 2, 3))
    end = stream.record()
    assert device.run(only=["ours"]) == 0
    assert not read.seen
    assert device.run(steps=1) == 1
    assert read.seen
    assert device.queued_copies() == 1
    assert device.run() == 5
    assert device.idle
    assert (start.at_s, end.at_s) == (OPERATION_S, 2 * OPERATION_S)
    assert end.seconds_since(start) == OPERATION_S


def test_some_order_is_found_in_which_either_of_two_streams_goes_first() -> None:
    firsts = set()
    for seed in range(20):
        device = FakeDevice(small_pool().plan())
        device.bind_thread()
        for name in ("one", "two"):
            device.new_stream(name).submit(copy(device, "out", 1, 2, 3))
        events = {name: device.streams[name].record() for name in ("one", "two")}
        device.run(random.Random(seed))
        firsts.add(min(events, key=lambda name: events[name].at_s))
    assert firsts == {"one", "two"}


def test_a_time_is_not_read_before_both_events_have_passed(device: FakeDevice) -> None:
    start = device.compute_event()
    device.run()
    device.engine_writes([1])
    end = device.compute_event()
    with pytest.raises(AssertionError, match="before the end event had passed"):
        end.seconds_since(start)


def test_a_call_fails_where_it_is_told_to_with_or_without_its_work(device: FakeDevice) -> None:
    stream = device.new_stream("ours")
    error = RuntimeError("no")
    device.fail("submit", 1, error)
    device.fail("submit", 2, error, queued=True)

    def submitted() -> bool:
        try:
            stream.submit(copy(device, "out", 1, 2, 3))
        except RuntimeError:
            return False
        return True

    assert [(submitted(), len(stream.queued)) for _ in range(4)] == [(True, 1), (False, 1), (False, 2), (True, 3)]
