"""The connector as an engine sees it: stores, loads, lookups, bad input, cancel, reset, close."""

from __future__ import annotations

import threading

import pytest
import torch
from bench import SLOT_BYTES, Cache, blocks_of, make_key, one, sluice_threads
from doubles import Clock, Hold, PickledConnector, until

from kvsluice.connector import KVLayout, Lookup, OffloadConfig, OffloadConnector, worker
from kvsluice.connector.orders import Ended
from kvsluice.tiers import ClosedError, ConfigError, LayoutError, TierUnavailableError, reasons
from kvsluice.tiers.chunk_file import stored_key

WAIT_S = 20.0


def settled(connector: OffloadConnector, keys: list[bytes]) -> Lookup:
    """The lookup's answer once no tier is being asked any more."""
    until(lambda: None, lambda: not connector.lookup(keys).pending)
    return connector.lookup(keys)


# ---- the way out and back ----------------------------------------------------------------------


def test_what_is_stored_is_held_and_comes_back_into_other_blocks(bench, cache, keys):
    connector = bench.connect("host", "fs")
    stored = one(connector.wait([connector.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S))
    assert stored.done_keys == tuple(keys[:3])
    assert not stored.failed
    assert connector.lookup(keys[:5]) in (Lookup(3, True), Lookup(3, False))
    cache.blank()
    loaded = one(connector.wait([connector.load(keys[:3], blocks_of(9, 4, 7))], WAIT_S))
    assert loaded.done_keys == tuple(keys[:3])
    assert cache.holds(blocks_of(9, 4, 7), blocks_of(0, 1, 2))
    assert cache.is_blank(blocks_of(0, 1, 2, 3, 5, 6, 8, 10, 11, 12, 13, 14, 15))


def test_a_result_counts_the_bytes_that_were_moved(bench, keys):
    connector = bench.connect("host", "fs")
    stored = one(connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S))
    assert stored.bytes == 2 * 512 + sum(len(image) for image in bench.tiers["fs"].images.values())
    loaded = one(connector.wait([connector.load(keys[:2], blocks_of(4, 5))], WAIT_S))
    assert loaded.bytes == 2 * 512


def test_each_store_job_is_released_once(bench, keys):
    connector = bench.connect("host", "fs")
    jobs = [connector.store([key], blocks_of(at)) for at, key in enumerate(keys[:4])]
    released: list[int] = []
    until(lambda: released.extend(connector.poll_released()), lambda: len(released) >= 4)
    connector.wait(jobs, WAIT_S)
    assert sorted(released) == jobs
    assert connector.poll_released() == []


def test_jobs_without_keys_are_over_and_released_at_once(bench):
    connector = bench.connect("host")
    store, load = connector.store([], []), connector.load([], [])
    assert sorted(result.job_id for result in connector.poll()) == [store, load]
    assert connector.poll_released() == [store]


def test_a_key_that_every_tier_holds_is_not_copied_again(bench, keys):
    connector = bench.connect("host", "fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    again = one(connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S))
    assert again.done_keys == (keys[0],)
    assert again.bytes == 0
    assert bench.tiers["fs"].count("store") == 1


def test_a_chunk_in_host_memory_is_written_to_a_tier_that_lacks_it_without_its_blocks(bench, cache, keys):
    fs = bench.double("fs")
    fs.fail("store", TierUnavailableError("full", reason=reasons.DISK_FULL))
    connector = bench.connect("host", "fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    assert not fs.images
    cache.blank()
    job = connector.store(keys[:1], blocks_of(0))
    assert connector.poll_released()[-1] == job
    connector.wait([job], WAIT_S)
    assert stored_key(keys[0], 0, 0) in fs.images
    connector.wait([connector.load(keys[:1], blocks_of(3))], WAIT_S)
    assert cache.holds(blocks_of(3), blocks_of(0))


def test_two_jobs_that_store_one_key_share_one_copy_and_one_outcome(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("fs")
    first = connector.store(keys[:1], blocks_of(0))
    second = connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    hold.open()
    results = connector.wait([first, second], WAIT_S)
    assert [result.done_keys for result in results] == [(keys[0],), (keys[0],)]
    assert fs.count("store") == 1


def test_a_load_is_served_by_the_next_tier_when_the_first_is_damaged(bench, cache, keys):
    fs, obj = bench.double("fs"), bench.double("obj")
    connector = bench.connect("fs", "obj")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    fs.spoil(lambda image: image[:-1] + bytes([image[-1] ^ 1]))
    cache.blank()
    loaded = one(connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S))
    assert loaded.done_keys == (keys[0],)
    assert cache.holds(blocks_of(5), blocks_of(0))
    assert connector.stats().tiers["fs"].missed == {reasons.CHECKSUM: 1}
    assert connector.stats().tiers["obj"].chunks_loaded == 1
    assert not fs.images
    assert obj.count("load") == 1


def test_a_chunk_read_from_a_slow_tier_is_brought_up_into_the_faster_ones(bench, cache, keys):
    obj = bench.double("obj")
    with bench.connect("obj") as first:
        first.wait([first.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    fs = bench.double("fs")
    connector = bench.connect("host", "fs", "obj")
    assert settled(connector, keys[:2]).held == 2
    connector.wait([connector.load(keys[:2], blocks_of(4, 5))], WAIT_S)
    until(connector.poll, lambda: len(fs.images) == 2 and connector.stats().pool.pinned == 0)
    assert fs.images == obj.images
    assert connector.stats().pool.held == 2
    cache.blank()
    reads = obj.count("load") + fs.count("load")
    connector.wait([connector.load(keys[:2], blocks_of(8, 9))], WAIT_S)
    assert obj.count("load") + fs.count("load") == reads, "host memory holds them now"
    assert cache.holds(blocks_of(8, 9), blocks_of(0, 1))


def test_a_tier_of_another_process_is_asked_and_its_chunks_are_found(bench, cache, keys, tmp_path):
    fs = {"type": "fs", "root_dir": str(tmp_path), "capacity": "64MiB"}
    one_engine, other_engine = bench.connect(fs), bench.connect(fs)
    assert settled(other_engine, keys[:3]) == Lookup(0, False)
    one_engine.wait([one_engine.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S)
    late_engine = bench.connect(fs)
    assert settled(late_engine, keys[:4]) == Lookup(3, False)
    cache.blank()
    late_engine.wait([late_engine.load(keys[:3], blocks_of(6, 7, 8))], WAIT_S)
    assert cache.holds(blocks_of(6, 7, 8), blocks_of(0, 1, 2))


def test_an_answer_of_not_held_is_believed_for_its_time_and_then_asked_again(bench, keys):
    clock = Clock()
    fs = bench.double("fs")
    connector = bench.connect("fs", clock=clock, negative_ttl_s=5.0)
    assert settled(connector, keys[:1]) == Lookup(0, False)
    asked = fs.count("held_prefix")
    assert connector.lookup(keys[:1]) == Lookup(0, False)
    assert fs.count("held_prefix") == asked
    fs.images[stored_key(keys[0], 0, 0)] = b"something"
    clock.advance(5.0)
    assert settled(connector, keys[:1]) == Lookup(1, False)


def test_two_connectors_in_one_process_do_not_touch_each_other(bench, keys):
    caches = [Cache(seed=seed) for seed in (1, 2)]
    bench.double("fs")
    connectors = [bench.connect("host", "fs", cache=caches[0])]
    bench.tiers["fs"] = type(bench.tiers["fs"])("fs")
    connectors.append(bench.connect("host", "fs", cache=caches[1]))
    for connector in connectors:
        connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    for connector, cache in zip(connectors, caches, strict=True):
        cache.blank()
        connector.wait([connector.load(keys[:2], blocks_of(2, 3))], WAIT_S)
        assert cache.holds(blocks_of(2, 3), blocks_of(0, 1))


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, k: c.store(k[:1], [0, 32]), LayoutError, "block id 32 does not lie in 0 .. 31"),
        (lambda c, k: c.load(k[:1], [-1, 0]), LayoutError, "block id -1 does not lie in 0 .. 31"),
        (lambda c, k: c.store(k[:1], [0, 1.0]), LayoutError, r"block id 1\.0 is of type float, not int"),
        (lambda c, k: c.lookup(["text"]), ValueError, "a key is 1 to 64 bytes, got 'text'"),
        (lambda c, k: c.lookup([k[0], bytes(65)]), ValueError, "a key is 1 to 64 bytes, got 65 bytes"),
        (lambda c, k: c.store(k[:2], [0, 1, 2]), LayoutError, "2 keys of 2 blocks each need 4 block ids, got 3"),
        (lambda c, k: c.load(k[:1], []), LayoutError, "need 2 block ids, got 0"),
        (lambda c, k: c.store([k[0], k[0]], [0, 1, 2, 3]), ValueError, "stands twice in one job"),
        (lambda c, k: c.load(k[:2], [0, 1, 1, 2]), LayoutError, "block id 1 is the target of two chunks"),
        (lambda c, k: c.store([b"x" * 65], [0, 1]), ValueError, "1 to 64 bytes, got 65 bytes"),
        (lambda c, k: c.store([b""], [0, 1]), ValueError, "1 to 64 bytes, got 0 bytes"),
        (lambda c, k: c.load(["text"], [0, 1]), ValueError, "got 'text'"),
        (lambda c, k: c.store(k[:1], [0, 1], group=1), ValueError, "group 1"),
        (lambda c, k: c.load(k[:1], [0, 1], group=-1), ValueError, "group -1"),
        (lambda c, k: c.lookup(k, group=7), ValueError, "group 7"),
        (lambda c, k: c.load(k[:1], [0, 1], deadline_s=0.0), ValueError, r"deadline_s 0\.0"),
        (lambda c, k: c.load(k[:1], [0, 1], deadline_s=float("nan")), ValueError, "deadline_s nan"),
        (lambda c, k: c.cancel(99), ValueError, "job 99 was never issued"),
        (lambda c, k: c.wait([99]), ValueError, "job 99 was never issued"),
    ],
)
def test_bad_input_is_named_and_nothing_is_copied_or_left_open(bench, cache, keys, call, error, message):
    connector = bench.connect("host", "fs")
    threads = threading.active_count()
    cache.blank()
    with pytest.raises(error, match=message):
        call(connector, keys)
    assert connector.poll() == []
    stats = connector.stats()
    assert (stats.jobs_open, stats.stores_waiting, stats.pool.free) == (0, 0, stats.pool.total)
    assert cache.is_blank(range(32))
    assert not bench.tiers["fs"].calls
    assert threading.active_count() == threads


def start(cache: Cache, **options: object) -> None:
    tier = {"type": "host", "capacity": 8 * SLOT_BYTES}
    config = {"blocks_per_chunk": 2, "staging_bytes": 8 * SLOT_BYTES, "tiers": [tier], **options}
    PickledConnector(OffloadConfig.from_dict(config), cache.layout)


def test_an_unknown_key_is_named_and_nothing_starts(cache):
    before = sluice_threads()
    with pytest.raises(ConfigError, match="stagin_bytes"):
        start(cache, stagin_bytes=1)
    assert sluice_threads() == before


def test_a_directory_that_cannot_be_made_is_named_and_nothing_is_left_running(cache, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    good = {"type": "fs", "root_dir": str(tmp_path / "good"), "capacity": "1MiB"}
    bad = {"type": "fs", "root_dir": str(in_the_way / "kv"), "capacity": "1MiB"}
    before = sluice_threads()
    with pytest.raises(ConfigError, match="file"):
        start(cache, tiers=[good, bad])
    assert sluice_threads() == before


@pytest.mark.parametrize(
    "options", [{"staging_bytes": 100}, {"tiers": [{"type": "host", "capacity": 100}]}], ids=["staging", "host"]
)
def test_a_size_that_holds_no_chunk_is_named(cache, options):
    before = sluice_threads()
    with pytest.raises(ConfigError, match="100 holds no chunk: one takes 8192 bytes"):
        start(cache, **options)
    assert sluice_threads() == before


def test_pinning_by_force_needs_a_device_and_leaves_nothing_running(cache, bench):
    fs = bench.double("fs")
    before = sluice_threads()
    with pytest.raises(ConfigError, match="pin_memory 'on'"):
        bench.connect("fs", pin_memory="on")
    assert sluice_threads() == before
    assert fs.closed == 1


def test_a_worker_that_cannot_start_leaves_nothing_running(bench, monkeypatch):
    fs = bench.double("fs")
    before = sluice_threads()

    def refuse(*args: object) -> None:
        raise LayoutError("these tensors cannot be copied")

    monkeypatch.setattr(worker, "CopyPlan", refuse)
    with pytest.raises(LayoutError, match="cannot be copied"):
        bench.connect("fs")
    assert sluice_threads() == before
    assert fs.closed == 1


def test_layers_that_disagree_about_the_blocks_are_refused_by_name():
    with pytest.raises(LayoutError, match="b has 5 blocks, a has 4"):
        KVLayout.from_tensors({"a": torch.zeros(4, 8), "b": torch.zeros(5, 8)}, tokens_per_block=4)


# ---- wait --------------------------------------------------------------------------------------


def test_waiting_for_a_job_that_is_over_gives_its_result_once(bench, keys):
    connector = bench.connect("host")
    job = connector.store(keys[:1], blocks_of(0))
    until(connector.poll_released, lambda: connector.stats().jobs_open == 0)
    assert one(connector.wait([job], WAIT_S)).job_id == job
    assert connector.wait([job], WAIT_S) == []
    assert connector.wait(None, WAIT_S) == []


def test_waiting_past_its_time_leaves_the_results_for_poll(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("host", "fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    hold = fs.hold("store")
    stuck = connector.store(keys[1:2], blocks_of(1))
    quick = connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    with pytest.raises(TimeoutError, match=rf"jobs \[{stuck}\]"):
        connector.wait([quick, stuck], timeout_s=0.05)
    until(connector.poll_released, lambda: connector.stats().jobs_open == 1)
    assert one(connector.poll()).job_id == quick
    hold.open()
    assert one(connector.wait(timeout_s=WAIT_S)).job_id == stuck


# ---- cancel ------------------------------------------------------------------------------------


def test_a_cancelled_store_that_waits_for_a_slot_is_shed_and_released(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("fs", slots=4)
    first = connector.store(keys[:8], blocks_of(*range(8)))
    waiting = connector.store(keys[8:9], blocks_of(8))
    hold.wait_for()
    connector.poll()
    assert connector.stats().stores_waiting > 0
    connector.cancel(waiting)
    assert one([r for r in connector.poll() if r.job_id == waiting]).failed == {keys[8]: reasons.CANCELLED}
    assert waiting in connector.poll_released()
    hold.open()
    assert not one(connector.wait([first], WAIT_S)).failed


def test_a_cancelled_store_sheds_its_queued_writes_and_finishes_the_running_one(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect({"type": "fs", "name": "fs", "root_dir": "x", "n_write_threads": 1}, slots=16)
    job = connector.store(keys[:4], blocks_of(0, 1, 2, 3))
    hold.wait_for()
    until(connector.poll, lambda: connector.stats().tiers["fs"].queued_stores == 3)
    connector.cancel(job)
    hold.open()
    result = one(connector.wait([job], WAIT_S))
    assert result.done_keys == (keys[0],)
    assert result.failed == dict.fromkeys(keys[1:4], reasons.CANCELLED)
    assert connector.stats().tiers["fs"].dropped == {reasons.CANCELLED: 3}


def test_a_cancelled_load_that_is_being_read_is_over_at_once_and_never_writes_its_blocks(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    hold = fs.hold("load")
    cache.blank()
    job = connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    connector.cancel(job)
    assert one(connector.wait([job], WAIT_S)).failed == {keys[0]: reasons.CANCELLED}
    assert connector.stats().pool.pinned == 1, "the read still has the slot"
    hold.open()
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    assert cache.is_blank(range(32))


def test_a_cancelled_load_that_waits_for_a_slot_is_over_at_once(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs", slots=2)
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    hold = fs.hold("load")
    first = connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    second = connector.load(keys[:1], blocks_of(6))
    assert connector.stats().loads_waiting == 1
    connector.cancel(second)
    assert one(connector.poll()).failed == {keys[0]: reasons.CANCELLED}
    assert connector.stats().unused == {reasons.CANCELLED: 1}
    hold.open()
    assert not one(connector.wait([first], WAIT_S)).failed


def test_cancelling_a_job_that_is_over_does_nothing(bench, keys):
    connector = bench.connect("host")
    job = connector.store(keys[:1], blocks_of(0))
    connector.wait([job], WAIT_S)
    connector.cancel(job)
    assert connector.poll() == []


def test_cancelling_one_of_two_jobs_that_share_a_store_leaves_it_to_the_other(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect({"type": "fs", "name": "fs", "root_dir": "x", "n_write_threads": 1}, slots=16)
    busy = connector.store(keys[8:9], blocks_of(8))
    hold.wait_for()
    leader = connector.store(keys[:2], blocks_of(0, 1))
    follower = connector.store(keys[:1], blocks_of(0))
    dropped = connector.store(keys[:1], blocks_of(0))
    until(connector.poll, lambda: connector.stats().tiers["fs"].queued_stores == 2)
    connector.cancel(dropped)
    assert one(connector.poll()).failed == {keys[0]: reasons.CANCELLED}
    connector.cancel(leader)
    hold.open()
    _, led, followed = connector.wait([busy, leader, follower], WAIT_S)
    assert followed.done_keys == (keys[0],)
    assert led.done_keys == (keys[0],)
    assert led.failed == {keys[1]: reasons.CANCELLED}


def test_a_shared_store_that_waits_for_a_slot_is_not_shed_by_one_jobs_cancel(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("fs", slots=2)
    connector.store(keys[8:9], blocks_of(8))
    hold.wait_for()
    leader = connector.store(keys[:1], blocks_of(0))
    follower = connector.store(keys[:1], blocks_of(0))
    assert connector.stats().stores_waiting == 1
    connector.cancel(leader)
    assert leader not in connector.poll_released(), "its blocks are still to be copied"
    hold.open()
    assert one(connector.wait([follower], WAIT_S)).done_keys == (keys[0],)


# ---- reset -------------------------------------------------------------------------------------


def test_after_a_reset_nothing_older_is_held_anywhere(bench, keys):
    connector = bench.connect("host", "fs", "obj")
    connector.wait([connector.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S)
    assert connector.reset(WAIT_S) == {}
    assert not bench.tiers["fs"].images
    assert not bench.tiers["obj"].images
    assert settled(connector, keys[:3]) == Lookup(0, False)
    missed = one(connector.wait([connector.load(keys[:1], blocks_of(4))], WAIT_S))
    assert missed.failed == {keys[0]: reasons.MISSING}
    assert connector.stats().pool.held == 0


def test_a_reset_empties_the_tier_behind_the_store_that_was_running(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("host", "fs")
    job = connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    assert connector.reset(timeout_s=0.05) == {"fs": reasons.DEADLINE}
    assert connector.stats().tiers["fs"].serving is False
    assert connector.lookup(keys[:1]) == Lookup(0, False)
    hold.open()
    until(connector.poll_released, lambda: connector.stats().tiers["fs"].serving)
    assert not fs.images, "the running store ended, then the tier was emptied"
    connector.wait([job], WAIT_S)
    assert settled(connector, keys[:1]) == Lookup(0, False)


def test_a_reset_makes_loads_in_flight_misses(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    hold = fs.hold("load")
    job = connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    threading.Timer(0.05, hold.open).start()
    connector.reset(WAIT_S)
    assert one(connector.wait([job], WAIT_S)).failed == {keys[0]: reasons.RESET}
    assert settled(connector, keys[:1]).held == 0


def test_a_store_after_a_reset_does_not_share_the_fate_of_one_before_it(bench, cache, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    connector = bench.connect("host", "fs")
    old = connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    connector.reset(timeout_s=0.01)
    new = connector.store(keys[:1], blocks_of(1))
    assert one(connector.wait([new], WAIT_S)).done_keys == (keys[0],)
    hold.open()
    connector.wait([old], WAIT_S)
    cache.blank()
    connector.wait([connector.load(keys[:1], blocks_of(5))], WAIT_S)
    assert cache.holds(blocks_of(5), blocks_of(1))


def test_a_tier_that_cannot_be_emptied_is_reported_and_out_of_use_until_one_reset_empties_it(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    fs.fail("clear", TierUnavailableError("no", reason=reasons.IO_ERROR))
    assert connector.reset(WAIT_S) == {"fs": reasons.IO_ERROR}
    assert settled(connector, keys[:1]) == Lookup(0, False)
    refused = one(connector.wait([connector.store(keys[1:2], blocks_of(1))], WAIT_S))
    assert refused.failed == {keys[1]: reasons.RESET}
    missed = one(connector.wait([connector.load(keys[:1], blocks_of(4))], WAIT_S))
    assert missed.failed == {keys[0]: reasons.MISSING}
    assert connector.reset(WAIT_S) == {}
    assert one(connector.wait([connector.store(keys[1:2], blocks_of(1))], WAIT_S)).done_keys == (keys[1],)


def test_a_tier_that_breaks_while_it_is_emptied_is_reported_too(bench, keys):
    fs = bench.double("fs")
    fs.fail("clear", RuntimeError("a stranger's mistake"))
    connector = bench.connect("fs")
    assert connector.reset(WAIT_S) == {"fs": reasons.IO_ERROR}
    assert connector.stats().tiers["fs"].serving is False


def test_an_answer_from_before_a_reset_is_not_believed_after_it(bench, keys):
    fs = bench.double("fs")
    fs.images[stored_key(keys[0], 0, 0)] = b"old"
    # The answer is worked out before the reset and arrives after it, while the next question is being asked.
    real, first, second = fs.held_prefix, Hold(), Hold()
    holds = iter([first, second])

    def slow(asked):
        held = real(asked)
        next(holds)()
        return held

    fs.held_prefix = slow
    connector = bench.connect("fs")
    assert connector.lookup(keys[:1]) == Lookup(0, True)
    first.wait_for()
    assert connector.reset(WAIT_S) == {}
    assert connector.lookup(keys[:1]) == Lookup(0, True)
    first.open()
    second.wait_for()
    assert connector.lookup(keys[:1]) == Lookup(0, True)
    second.open()
    assert settled(connector, keys[:1]) == Lookup(0, False)


# ---- close -------------------------------------------------------------------------------------


def test_close_finishes_what_is_under_way_and_is_idempotent(bench, keys):
    connector = bench.connect("host", "fs")
    job = connector.store(keys[:4], blocks_of(0, 1, 2, 3))
    assert connector.close(WAIT_S) == []
    assert connector.close() == []
    assert one(connector.poll()).job_id == job
    assert connector.poll_released() == [job]
    assert len(bench.tiers["fs"].images) == 4
    assert bench.tiers["fs"].closed == 1


def test_after_close_every_call_for_work_says_that_it_is_closed(bench, keys):
    connector = bench.connect("host", "fs")
    connector.close()
    for call in (
        lambda: connector.lookup(keys[:1]),
        lambda: connector.store(keys[:1], [0, 1]),
        lambda: connector.load(keys[:1], [0, 1]),
        connector.reset,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert connector.poll() == []
    assert connector.stats().jobs_open == 0
    connector.check_integrity()


def test_close_with_a_hung_store_is_bounded_and_names_the_threads_that_hang_alone(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    bench.hung = {"kvsluice-fs-4", "kvsluice-fs-5", "kvsluice-fs-6", "kvsluice-fs-7"}
    connector = bench.connect("fs", "obj")
    job = connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    started = threading.Event()
    left: list[str] = []
    closer = threading.Thread(target=lambda: (started.set(), left.extend(connector.close(timeout_s=0.2))))
    closer.start()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert len(left) == 1
    assert set(left) <= bench.hung
    assert bench.tiers["obj"].closed == 1
    assert fs.closed == 0, "a thread is still in it"
    with pytest.raises(ClosedError, match=rf"jobs \[{job}\]"):
        connector.wait([job])
    assert connector.close() == left


def test_what_waits_for_a_slot_at_close_is_shed_as_closed_and_released(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("store")
    bench.hung = {f"kvsluice-fs-{at}" for at in range(8)}
    connector = bench.connect("fs", slots=2)
    connector.store(keys[:1], blocks_of(0))
    hold.wait_for()
    waiting = connector.store(keys[1:2], blocks_of(1))
    connector.close(timeout_s=0.2)
    assert one(connector.poll()).failed == {keys[1]: reasons.CLOSED}
    assert waiting in connector.poll_released()
    hold.open()


def test_close_with_a_hung_load_makes_it_a_miss(bench, cache, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    hold = fs.hold("load")
    bench.hung = {f"kvsluice-fs-{at}" for at in range(8)}
    cache.blank()
    job = connector.load(keys[:1], blocks_of(5))
    hold.wait_for()
    assert len(connector.close(timeout_s=0.1)) == 1
    assert one(connector.poll()).job_id == job
    hold.open()
    assert cache.is_blank(range(32))


def test_close_with_a_hung_lookup_is_bounded(bench, keys):
    fs = bench.double("fs")
    hold = fs.hold("held_prefix")
    bench.hung = {"kvsluice-lookup-fs"}
    connector = bench.connect("fs")
    assert connector.lookup(keys[:1]).pending
    hold.wait_for()
    assert connector.close(timeout_s=0.2) == ["kvsluice-lookup-fs"]


def test_a_lookup_that_was_under_way_while_its_keys_were_stored_does_not_unmake_them(bench, keys):
    fs = bench.double("fs")
    connector = bench.connect("fs", negative_ttl_s=1000.0)
    asked = []
    real = fs.held_prefix

    def answer_from_before(names):
        answer = real(names)
        asked.append(answer)
        return answer

    bench.monkeypatch.setattr(fs, "held_prefix", answer_from_before)
    assert connector.lookup(keys[:2]).pending
    until(lambda: None, lambda: bool(asked))
    assert asked == [0]
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], 20.0)
    assert connector.lookup(keys[:2]) == Lookup(2, False)
    assert connector.lookup(keys[:2]) == Lookup(2, False)


def test_what_is_no_configuration_and_no_layout_is_named(cache):
    with pytest.raises(TypeError, match="got dict and KVLayout"):
        OffloadConnector({}, cache.layout)


def test_a_burst_of_evictions_does_not_hold_up_a_transfers_report(bench):
    fs = bench.double("fs")
    connector = bench.connect("fs")
    fs.evicted = [make_key(number) + bytes(4) for number in range(10 * worker.MAX_EVENTS_PER_REPORT)]
    connector.poll()
    job = connector.store([make_key(-1)], blocks_of(0))
    events = connector._worker._shared.events  # noqa: SLF001 - polling would take them one report at a time
    until(lambda: None, lambda: any(isinstance(event, Ended) for event in events))
    (result,) = connector.poll()
    assert (result.job_id, result.failed) == (job, {})
