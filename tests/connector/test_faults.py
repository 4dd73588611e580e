"""Tiers that hang, fail, lie and lose chunks: misses with a reason, bounded memory, everybody else goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import blocks_of, make_key, one
from doubles import Clock, PickledConnector, until

from kvsluice.connector import Lookup
from kvsluice.connector.index import UNKNOWN_TTL_S
from kvsluice.connector.worker import MAX_FAILURE_KINDS
from kvsluice.kernels import HostCopy
from kvsluice.tiers import ChunkDamagedError, ChunkMissingError, ClosedError, TierUnavailableError, reasons
from kvsluice.tiers.chunk_file import stored_key

WAIT_S = 20.0


def slow_fs(**options: object) -> dict[str, object]:
    """The double called fs, with one thread each way."""
    return {"type": "fs", "name": "fs", "root_dir": "x", "n_read_threads": 1, "n_write_threads": 1, **options}


def settled(connector: PickledConnector, keys: list[bytes]) -> Lookup:
    until(lambda: None, lambda: not connector.lookup(keys).pending)
    return connector.lookup(keys)


# ---- damaged chunks ----------------------------------------------------------------------------


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda image: image[:at] + bytes([image[at] ^ 0x40]) + image[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "first payload byte": (flip(4096), reasons.CHECKSUM),
    "last payload byte": (flip(4096 + 511), reasons.CHECKSUM),
    "torn: the second half is zeros": (lambda image: image[:4352] + bytes(len(image) - 4352), reasons.CHECKSUM),
    "header length": (flip(0), reasons.HEADER),
    "header json": (flip(9), reasons.HEADER),
    "padding of the header": (flip(4095), reasons.HEADER),
    "short by one": (lambda image: image[:-1], reasons.SHORT),
    "empty": (lambda image: b"", reasons.SHORT),
    "long by one": (lambda image: image + b"\0", reasons.OVERSIZE),
    "random": (lambda image: bytes(range(256)) * (len(image) // 256), reasons.HEADER),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_chunk_is_a_miss_under_its_reason_is_removed_and_not_held_again(bench, cache, keys, damage, reason):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    fs.images[stored_key(keys[0], 0, 0)] = damage(fs.images[stored_key(keys[0], 0, 0)])
    cache.blank()
    result = one(connector.wait([connector.load(keys[:2], blocks_of(5, 6))], WAIT_S))
    assert result.failed == {keys[0]: reason}
    assert result.done_keys == (keys[1],)
    assert cache.holds(blocks_of(6), blocks_of(1))
    assert cache.is_blank(blocks_of(5)), "not one wrong byte"
    assert stored_key(keys[0], 0, 0) not in fs.images
    assert connector.lookup(keys[:2]) == Lookup(0, False)
    assert connector.stats().tiers["fs"].missed == {reason: 1}


def test_a_file_that_was_changed_on_disk_is_a_miss_and_is_removed(bench, cache, keys, tmp_path):
    connector = bench.connect({"type": "fs", "root_dir": str(tmp_path), "capacity": "64MiB"})
    connector.wait([connector.store(keys[:4], blocks_of(0, 1, 2, 3))], WAIT_S)

    def path(key: bytes) -> Path:
        [found] = tmp_path.rglob(f"*{key.hex()}*.safetensors")
        return found

    paths = [path(key) for key in keys[:4]]
    image = bytearray(paths[0].read_bytes())
    image[4200] ^= 1
    paths[0].write_bytes(image)
    paths[1].write_bytes(paths[1].read_bytes()[:4097])
    paths[2].unlink()
    paths[3].write_bytes(paths[0].read_bytes())
    cache.blank()
    result = one(connector.wait([connector.load(keys[:4], blocks_of(5, 6, 7, 8))], WAIT_S))
    assert result.failed == {
        keys[0]: reasons.CHECKSUM,
        keys[1]: reasons.SHORT,
        keys[2]: reasons.MISSING,
        keys[3]: reasons.FOREIGN,
    }
    assert cache.is_blank(range(32))
    assert not any(file.exists() for file in paths)
    assert connector.lookup(keys[:1]).held == 0


def test_a_chunk_of_another_key_or_another_engine_is_foreign(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    other = bench.connect("fs", salt="another tenant")
    first, second = stored_key(keys[0], 0, 0), stored_key(keys[1], 0, 0)
    fs.images[first] = fs.images[second]
    cache.blank()
    for engine, key in ((connector, keys[0]), (other, keys[1])):
        result = one(engine.wait([engine.load([key], blocks_of(5))], WAIT_S))
        assert result.failed == {key: reasons.FOREIGN}
    assert cache.is_blank(range(32))


@pytest.mark.parametrize("damage", [lambda image: image[:-1], flip(9), lambda image: image + b"\0"])
def test_without_checksums_length_and_header_are_still_proven(bench, cache, keys, damage):
    fs = bench.double("fs")
    connector = bench.connect("fs", verify=False)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    fs.spoil(damage)
    cache.blank()
    assert one(connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S)).failed
    assert cache.is_blank(range(32))


def test_a_tier_that_reads_less_than_it_says_is_found_out(bench, cache, keys, monkeypatch):
    fs = bench.double("fs")
    connector = bench.connect("fs", verify=False)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    cache.blank()
    monkeypatch.setattr(fs, "load", lambda key, buffer, num_bytes: num_bytes - 1)
    assert one(connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S)).failed == {keys[0]: reasons.SHORT}
    assert cache.is_blank(range(32))


def test_a_damaged_chunk_that_cannot_be_removed_is_still_a_miss(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    fs.spoil(flip(5000 - 800))
    fs.fail("delete", TierUnavailableError("read-only", reason=reasons.IO_ERROR))
    result = one(connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S))
    assert result.failed == {keys[0]: reasons.CHECKSUM}


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TierUnavailableError("EIO", reason=reasons.IO_ERROR), reasons.IO_ERROR),
        (TierUnavailableError("ENOSPC", reason=reasons.DISK_FULL), reasons.DISK_FULL),
        (OSError(5, "a stranger's tier lets it out"), reasons.INTERNAL),
        (KeyError("a bug"), reasons.INTERNAL),
        (ClosedError("too late"), reasons.INTERNAL),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_store_that_raises_fails_its_chunk_alone_and_the_thread_lives_on(bench, keys, caplog, error, reason):
    fs = bench.double("fs")
    fs.fail("store", error)
    connector = bench.connect(slow_fs(), "obj", slots=16)
    result = one(connector.wait([connector.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S))
    assert not result.failed, "obj took them all"
    stats = connector.stats().tiers
    assert stats["fs"].failed == {reason: 1}
    assert (stats["fs"].chunks_stored, stats["obj"].chunks_stored) == (2, 3)
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == (reason == reasons.INTERNAL), "one traceback for what nobody expected"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ChunkMissingError("gone", reason=reasons.MISSING), reasons.MISSING),
        (ChunkDamagedError("torn", reason=reasons.SHORT), reasons.SHORT),
        (TierUnavailableError("EIO", reason=reasons.IO_ERROR), reasons.IO_ERROR),
        (OSError(5, "a stranger's tier lets it out"), reasons.INTERNAL),
        (ZeroDivisionError("a bug"), reasons.INTERNAL),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_load_that_raises_is_a_miss_under_its_reason_and_the_thread_lives_on(bench, cache, keys, error, reason):
    fs = bench.double("fs")
    connector = bench.connect(slow_fs(), slots=16)
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    fs.fail("load", error)
    cache.blank()
    result = one(connector.wait([connector.load(keys[:2], blocks_of(5, 6))], WAIT_S))
    assert result.failed == {keys[0]: reason}
    assert cache.holds(blocks_of(6), blocks_of(1))
    assert connector.stats().tiers["fs"].missed == {reason: 1}
    assert connector.lookup(keys[:1]) == Lookup(0, False)


def test_a_read_that_fails_teaches_nothing_to_the_gate_of_the_tier_that_was_to_be_filled(bench, keys):
    fs, obj = bench.double("fs"), bench.double("obj")
    connector = bench.connect("fs", "obj", backpressure={})
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    assert connector.stats().tiers["obj"].chunks_stored == 1
    fs.evict(stored_key(keys[0], 0, 0))
    until(connector.stats, lambda: connector.stats().tiers["fs"].known_chunks == 0)
    obj.fail("load", TierUnavailableError("no answer", reason=reasons.IO_ERROR))
    result = one(connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S))
    assert result.failed == {keys[0]: reasons.IO_ERROR}
    seen = connector.stats().tiers["fs"]
    assert seen.failed == {}
    assert seen.dropped == {reasons.IO_ERROR: 1}
    assert seen.gate.detector["failure_streak"] == 0


def test_a_device_copy_that_fails_teaches_nothing_to_the_gates_of_the_tiers_behind_it(bench, keys, monkeypatch):
    def fail(copy: HostCopy, block_ids: object, out: object, tensors: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(HostCopy, "gather", fail)
    connector = bench.connect("fs", backpressure={})
    result = one(connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S))
    assert result.failed == {keys[0]: reasons.INTERNAL}
    seen = connector.stats().tiers["fs"]
    assert (seen.failed, seen.dropped) == ({}, {reasons.INTERNAL: 1})
    assert seen.gate.detector["failure_streak"] == 0


def test_a_lookup_that_raises_counts_as_not_held_and_the_thread_lives_on(bench, keys):
    clock = Clock()
    fs = bench.double("fs")
    fs.images[stored_key(keys[0], 0, 0)] = b""
    fs.fail("held_prefix", TierUnavailableError("down", reason=reasons.IO_ERROR), RuntimeError("a bug"))
    connector = bench.connect("fs", clock=clock)
    for _ in range(2):
        assert settled(connector, keys[:1]) == Lookup(0, False)
        clock.advance(10.0)
    assert settled(connector, keys[:1]) == Lookup(1, False)
    assert connector.stats().tiers["fs"].missed == {"lookup_failed": 2}


def test_a_tier_that_comes_back_serves_again_soon(bench, cache, keys):
    clock = Clock()
    obj = bench.double("obj")
    connector = bench.connect("obj", clock=clock, negative_ttl_s=60.0)
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    down = TierUnavailableError("503 SlowDown", reason=reasons.IO_ERROR)
    for operation in ("load", "held_prefix"):
        obj.fail_always(operation, down)
    result = one(connector.wait([connector.load(keys[:2], blocks_of(5, 6))], WAIT_S))
    assert result.failed == dict.fromkeys(keys[:2], reasons.IO_ERROR)
    for _ in range(3):
        clock.advance(UNKNOWN_TTL_S)
        assert settled(connector, keys[:2]) == Lookup(0, False)
    assert obj.count("held_prefix") == 3, "asked once in that time"
    for operation in ("load", "held_prefix"):
        obj.recover(operation)
    clock.advance(UNKNOWN_TTL_S)
    assert settled(connector, keys[:2]) == Lookup(2, False)
    cache.blank()
    assert not one(connector.wait([connector.load(keys[:2], blocks_of(5, 6))], WAIT_S)).failed
    assert cache.holds(blocks_of(5, 6), blocks_of(0, 1))


def test_an_object_that_a_lifecycle_rule_removed_is_forgotten(bench, keys):
    clock = Clock()
    obj = bench.double("obj")
    connector = bench.connect("obj", clock=clock, negative_ttl_s=5.0)
    connector.wait([connector.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S)
    del obj.images[stored_key(keys[1], 0, 0)]
    result = one(connector.wait([connector.load(keys[:3], blocks_of(5, 6, 7))], WAIT_S))
    assert result.failed == {keys[1]: reasons.MISSING}
    assert connector.lookup(keys[:3]) == Lookup(1, False)
    clock.advance(4.9)
    assert connector.lookup(keys[:3]) == Lookup(1, False)
    assert obj.count("held_prefix") == 0
    clock.advance(0.1)
    assert settled(connector, keys[:3]) == Lookup(1, False)
    assert obj.count("held_prefix") == 1


def test_what_a_tier_met_with_is_shown_by_kind_and_stays_bounded(bench):
    obj = bench.double("obj")
    connector = bench.connect("obj", "fs")
    assert connector.stats().tiers["obj"].failures == {}
    obj.failures["503 SlowDown"] = 3
    obj.failures["timeout"] = 1
    shown = connector.stats()
    assert shown.tiers["obj"].failures == {"503 SlowDown": 3, "timeout": 1}
    assert shown.tiers["fs"].failures == {}
    obj.failures["timeout"] = 2
    assert shown.tiers["obj"].failures["timeout"] == 1, "a snapshot"
    assert connector.stats().tiers["obj"].failures["timeout"] == 2
    # A tier that puts names into its words.
    obj.failures.update({f"no object {number}": 1 for number in range(1000)})
    failures = connector.stats().tiers["obj"].failures
    assert len(failures) == MAX_FAILURE_KINDS
    assert (failures["503 SlowDown"], failures["timeout"]) == (3, 2)
    assert sum(failures.values()) == 1005


def test_an_eviction_that_a_tier_tells_of_is_known_to_the_next_lookup(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    fs.evict(stored_key(keys[0], 0, 0))
    connector.poll()
    assert connector.lookup(keys[:2]) == Lookup(0, False)


# ---- deadlines ---------------------------------------------------------------------------------


def test_a_late_chunk_is_a_miss_at_its_deadline_and_never_reaches_its_blocks(bench, cache, keys):
    clock = Clock()
    fs = bench.double("fs")
    connector = bench.connect("host", "fs", clock=clock)
    with bench.connect("fs") as other:
        other.wait([other.store(keys[:1], blocks_of(0))], WAIT_S)
    cache.blank()
    hold = fs.hold("load")
    connector.load(keys[:1], blocks_of(5), deadline_s=2.0)
    hold.wait_for()
    clock.advance(1.9)
    assert connector.poll() == []
    clock.advance(0.1)
    assert one(connector.poll()).failed == {keys[0]: reasons.DEADLINE}
    assert connector.stats().tiers["fs"].missed == {reasons.DEADLINE: 1}
    assert connector.lookup(keys[:1]) == Lookup(0, False)
    hold.open()
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    assert cache.is_blank(range(32))
    assert connector.stats().pool.held == 0


def test_a_chunk_that_comes_late_is_a_miss_although_nobody_polled_since(bench, cache, keys):
    clock = Clock()
    fs = bench.double("fs")
    connector = bench.connect("fs", clock=clock)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    cache.blank()
    hold = fs.hold("load")
    job = connector.load(keys[:1], blocks_of(5), deadline_s=2.0)
    hold.wait_for()
    clock.advance(2.0)
    hold.open()
    # The tier's own thread has to see that it is late: the worker's report alone is awaited here.
    worker = connector._worker  # noqa: SLF001 - polling would decide it first
    transfer = worker._by_job[job][0]  # noqa: SLF001 - as above
    until(lambda: None, lambda: transfer.decided)
    assert one(connector.poll()).failed == {keys[0]: reasons.DEADLINE}
    assert cache.is_blank(range(32))


def test_a_store_that_waits_too_long_in_the_queue_is_shed_and_a_running_one_is_finished(bench, keys):
    clock = Clock()
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect(slow_fs(max_queue_s=5.0), clock=clock, slots=16)
    job = connector.store(keys[:3], blocks_of(0, 1, 2))
    hold.wait_for()
    until(connector.poll, lambda: connector.stats().tiers["fs"].queued_stores == 2)
    clock.advance(5.1)
    until(connector.poll, lambda: connector.stats().tiers["fs"].queued_stores == 0)
    hold.open()
    result = one(connector.wait([job], WAIT_S))
    assert result.done_keys == (keys[0],)
    assert result.failed == dict.fromkeys(keys[1:3], reasons.QUEUE_TIMEOUT)
    assert len(fs.images) == 1
    assert connector.stats().tiers["fs"].dropped == {reasons.QUEUE_TIMEOUT: 2}


def test_the_age_of_a_hung_store_is_seen(bench, keys):
    clock = Clock()
    hold = bench.double("fs").hold("store")
    connector = bench.connect("fs", clock=clock)
    connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    clock.advance(7.0)
    connector.poll()
    assert connector.stats().tiers["fs"].oldest_store_s == 7.0


# ---- tiers that hang ---------------------------------------------------------------------------


def test_no_scheduling_call_waits_for_a_tier_that_hangs_in_everything(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs", slots=16)
    connector.wait([connector.store(keys[:4], blocks_of(0, 1, 2, 3))], WAIT_S)
    holds = [fs.hold(operation) for operation in ("store", "load", "held_prefix")]
    finished = threading.Event()

    def schedule() -> None:
        for number in range(40):
            connector.lookup(keys[number : number + 4])
            connector.store([keys[8 + number]], blocks_of(number % 16))
            job = connector.load([keys[number % 4]], blocks_of(number % 16), deadline_s=100.0)
            connector.poll()
            connector.poll_released()
            connector.stats()
            connector.cancel(job)
            connector.fence([number % 32])
        finished.set()

    thread = threading.Thread(target=schedule)
    thread.start()
    assert finished.wait(WAIT_S), "a call waited for the tier"
    thread.join()
    for hold in holds:
        hold.open()
    connector.wait(timeout_s=WAIT_S)


def test_a_tier_that_hangs_leaves_the_other_tiers_stores_and_loads_alone(bench, cache, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("host", "fs", "obj", slots=12)
    for number in range(40):
        connector.store([keys[number]], blocks_of(number % 16))
        until(connector.poll, lambda number=number: len(bench.tiers["obj"].images) == number + 1)
    stats = connector.stats()
    assert stats.tiers["obj"].chunks_stored == 40
    assert stats.pool.pinned <= 20 // 3
    cache.blank()
    loaded = one(connector.wait([connector.load(keys[:2], blocks_of(8, 9))], WAIT_S))
    assert not loaded.failed
    assert cache.holds(blocks_of(8, 9), blocks_of(0, 1))
    hold.open()
    connector.wait(timeout_s=WAIT_S)


def test_reads_that_hang_in_one_tier_leave_another_tiers_loads_alone(bench, cache, keys):
    fs, obj = bench.double("fs"), bench.double("obj")
    with bench.connect("fs") as first:
        first.wait([first.store(keys[:1], blocks_of(0))], WAIT_S)
    connector = bench.connect("fs", "obj", slots=9)
    hold = obj.hold("load")
    # Chunks that nobody has: fs says so at once, obj hangs.
    for number in range(1, 21):
        connector.load([keys[number]], blocks_of(number % 8), deadline_s=100.0)
        until(lambda: None, lambda number=number: fs.count("load") >= min(number, 9))
        connector.poll()
    cache.blank()
    loaded = one(connector.wait([connector.load(keys[:1], blocks_of(9), deadline_s=100.0)], WAIT_S))
    assert not loaded.failed
    assert cache.holds(blocks_of(9), blocks_of(0))
    hold.open()
    connector.wait(timeout_s=WAIT_S)


def test_a_lookup_of_a_tier_that_hangs_is_pending_for_its_time_and_then_not_held(bench, keys):
    clock = Clock()
    fs = bench.double("fs")
    connector = bench.connect("fs", "obj", clock=clock, lookup_timeout_s=1.0)
    bench.tiers["obj"].images[stored_key(keys[0], 0, 0)] = b""
    hold = fs.hold("held_prefix")
    assert connector.lookup(keys[:1]).pending
    until(lambda: None, lambda: connector.lookup(keys[:1]).held == 1)
    assert connector.lookup(keys[1:2]).pending
    clock.advance(1.0)
    until(lambda: None, lambda: not connector.lookup(keys[1:2]).pending)
    assert connector.stats().tiers["fs"].missed["lookup_timeout"] >= 1
    hold.open()


def test_a_flood_of_lookups_of_a_tier_that_hangs_stays_bounded(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("held_prefix")
    connector = bench.connect("fs")
    for number in range(1000):
        connector.lookup([make_key(number)])
    stats = connector.stats()
    assert stats.tiers["fs"].missed["lookup_shed"] == 1000 - 64
    hold.open()


# ---- slow tiers --------------------------------------------------------------------------------


EMA = {
    "backpressure_cls": "EMABackpressureDetector",
    "policy_cls": "DropStorePolicy",
    "warmup_completions": 3,
    "high_water_s": 10.0,
    "low_water_s": 1.0,
    "decay_half_life_s": 1.0,
    "cooldown_s": 0.0,
}


def test_a_slow_tiers_gate_drops_stores_in_a_flood_and_lets_them_through_again(bench, keys, monkeypatch):
    clock = Clock()
    fs = bench.double("fs")
    pace = {"s": 1.0}
    real = fs.store

    def slow(key: bytes, buffer: memoryview, num_bytes: int) -> int:
        clock.advance(pace["s"])
        return real(key, buffer, num_bytes)

    monkeypatch.setattr(fs, "store", slow)
    connector = bench.connect(slow_fs(max_queue_chunks=16, max_queue_s=1e6), clock=clock, slots=12, backpressure=EMA)
    largest = {"waiting": 0, "queued": 0, "pinned": 0, "jobs": 0, "events": 0}

    def flood(first: int, count: int) -> int:
        """Store so many chunks, the tier's answers taken in between; how many the gate dropped."""
        before = connector.stats().tiers["fs"].dropped.get(reasons.GATE, 0)
        for number in range(first, first + count):
            connector.store([make_key(number)], blocks_of(number % 16))
            stats = connector.stats()
            largest["waiting"] = max(largest["waiting"], stats.stores_waiting)
            largest["queued"] = max(largest["queued"], stats.tiers["fs"].queued_stores)
            largest["pinned"] = max(largest["pinned"], stats.pool.pinned)
            largest["jobs"] = max(largest["jobs"], stats.jobs_open)
            largest["events"] = max(largest["events"], len(connector._worker._shared.events))  # noqa: SLF001
            until(connector.poll, lambda: connector.stats().jobs_open <= 4)
        connector.wait(timeout_s=1e9)
        return connector.stats().tiers["fs"].dropped.get(reasons.GATE, 0) - before

    dropped = flood(0, 200)
    assert dropped > 150, "a tier of 1 s per 4.5 KiB is far over its mark"
    assert connector.stats().tiers["fs"].gate is not None
    assert connector.stats().tiers["fs"].gate.under_pressure
    pace["s"] = 0.0
    clock.advance(60.0)
    assert flood(1000, 50) == 0
    assert not connector.stats().tiers["fs"].gate.under_pressure
    assert largest["pinned"] <= 9
    assert largest["queued"] + largest["waiting"] <= 16
    assert largest["jobs"] <= 16
    assert largest["events"] <= 64
    connector.check_integrity()


def test_memory_stays_bounded_in_a_flood_that_a_stuck_tier_never_takes(bench, keys):
    hold = bench.double("fs").hold("store")
    connector = bench.connect(slow_fs(max_queue_chunks=32), "obj", slots=12)
    obj_hold = bench.tiers["obj"].hold("store")
    for number in range(500):
        connector.store([make_key(number)], blocks_of(number % 16))
        connector.poll()
    stats = connector.stats()
    assert stats.pool.pinned <= 9
    assert stats.stores_waiting <= 1024
    assert len(connector._worker._by_job) <= 9  # noqa: SLF001 - what the worker remembers
    assert stats.tiers["fs"].dropped[reasons.QUEUE_FULL] >= 500 - 32 - 64
    hold.open()
    obj_hold.open()
    connector.wait(timeout_s=WAIT_S)


def test_many_mixed_jobs_with_faults_never_bring_a_wrong_byte(bench, keys):
    """A small storm: stores, loads, cancels, fences and a reset over tiers that fail at random places."""
    cache = bench.cache
    fs, obj = bench.double("fs"), bench.double("obj")
    connector = bench.connect("host", "fs", "obj", slots=6, load_timeout_s=5.0)
    open_loads: dict[int, tuple[list[int], list[int]]] = {}

    def check(results: list) -> None:
        for result in results:
            if result.kind == "load":
                targets, sources = open_loads.pop(result.job_id)
                for at, number in enumerate(sources):
                    if make_key(number) in result.done_keys:
                        two = targets[2 * at : 2 * at + 2]
                        assert cache.holds(two, blocks_of(number)), (result.job_id, number)

    for number in range(300):
        if number % 11 == 0:
            fs.fail("store", TierUnavailableError("EIO", reason=reasons.IO_ERROR), OSError(5, "eio"))
        if number % 13 == 0:
            fs.spoil(flip(4100 + number % 400))
        if number % 17 == 0:
            obj.fail("load", TierUnavailableError("503", reason=reasons.IO_ERROR))
        # Chunk n lives in blocks of chunk n, 0 to 7; loads go to chunks 8 to 15, one at a time each.
        job = connector.store([make_key(number % 8)], blocks_of(number % 8))
        target = 8 + number % 8
        if not any(blocks_of(target)[0] in targets for targets, _ in open_loads.values()):
            sources = [(number * 5) % 8]
            load = connector.load([make_key(sources[0])], blocks_of(target))
            open_loads[load] = (blocks_of(target), sources)
            if number % 19 == 0:
                connector.cancel(load)
        if number % 23 == 0:
            connector.cancel(job)
        if number == 150:
            connector.reset(WAIT_S)
        if number % 29 == 0:
            connector.fence(blocks_of(target))
        connector.lookup([make_key(at) for at in range(8)])
        check(connector.poll())
        connector.check_integrity()
    end_s = time.monotonic() + WAIT_S
    while connector.stats().jobs_open and time.monotonic() < end_s:
        check(connector.poll())
    check(connector.poll())
    assert not open_loads
