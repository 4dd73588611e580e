"""Loads layer by layer: a layer can be used when every chunk has it, while later layers are on their way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from bench import Bench, Cache, blocks_of, one
from doubles import until

from kvsluice.connector import offload
from kvsluice.connector.by_layer import Cohort, LayerWatch
from kvsluice.connector.copier import Claim
from kvsluice.kernels import HostCopy
from kvsluice.kernels.device import CpuDevice
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.tiers import ClosedError, LayoutError, reasons

WAIT_S = 20.0
LAYERS = ("model.layers.0", "model.layers.1")


def stored(bench: Bench, keys: list[bytes], *tiers: str, chunks: int = 3, **options: object):
    """A connector that holds chunks 0, 1, ... of the cache, and a blank cache."""
    connector = bench.connect(*tiers, **options)
    connector.wait([connector.store(keys[:chunks], blocks_of(*range(chunks)))], WAIT_S)
    bench.cache.blank()
    return connector


@pytest.mark.parametrize("tiers", [("host",), ("fs",), ("host", "fs")], ids="-".join)
def test_every_layer_holds_the_stored_bytes_when_the_wait_for_it_returns(bench, cache, keys, tiers):
    connector = stored(bench, keys, *tiers)
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    for layer in LAYERS:
        assert connector.wait_for_layer(job, layer, WAIT_S)
        assert torch.equal(cache.tensors[layer][10:16], cache.first[layer][0:6])
    assert one(connector.wait([job], WAIT_S)).done_keys == tuple(keys[:3])
    assert cache.holds(blocks_of(5, 6, 7), blocks_of(0, 1, 2))


def test_a_layer_is_copied_for_all_chunks_before_the_next_layer_is_for_any(bench, cache, keys, monkeypatch):
    connector = stored(bench, keys, "fs")
    copied: list[tuple[int, int]] = []
    real = HostCopy.scatter

    def watched(self, block_ids, src, skip_blocks=0, tensors=None):
        copied.append((tensors.start, block_ids[0]))
        real(self, block_ids, src, skip_blocks, tensors)

    monkeypatch.setattr(HostCopy, "scatter", watched)
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    connector.wait([job], WAIT_S)
    assert [layer for layer, _ in copied] == [0, 0, 0, 1, 1, 1]
    assert {block for _, block in copied} == {10, 12, 14}


def test_the_first_layer_can_be_used_before_the_last_is_copied(bench, cache, keys, monkeypatch):
    connector = stored(bench, keys, "host")
    go = threading.Event()
    real = HostCopy.scatter

    def held(self, block_ids, src, skip_blocks=0, tensors=None):
        if tensors.start == 1:
            assert go.wait(WAIT_S)
        real(self, block_ids, src, skip_blocks, tensors)

    monkeypatch.setattr(HostCopy, "scatter", held)
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S)
    assert torch.equal(cache.tensors[LAYERS[0]][10:16], cache.first[LAYERS[0]][0:6])
    assert bool((cache.tensors[LAYERS[1]] == -1.0).all())
    with pytest.raises(TimeoutError, match=r"layer 'model.layers.1' of job \d+ was not there after 0\.02 s"):
        connector.wait_for_layer(job, LAYERS[1], 0.02)
    go.set()
    assert connector.wait_for_layer(job, LAYERS[1], WAIT_S)
    connector.wait([job], WAIT_S)


def test_the_engines_stream_waits_for_the_event_of_each_chunk_of_a_layer(bench, keys, monkeypatch):
    connector = stored(bench, keys, "host")
    waited: list[object] = []
    monkeypatch.setattr(CpuDevice, "compute_wait", lambda self, event: waited.append(event))
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[1], WAIT_S)
    assert len(waited) == 1, "one event stands behind the layer of all chunks that went out together"
    connector.wait([job], WAIT_S)


def test_a_chunk_that_is_missing_makes_the_wait_say_no_and_the_others_are_loaded(bench, cache, keys):
    connector = stored(bench, keys, "fs")
    bench.tiers["fs"].images.pop(next(iter(bench.tiers["fs"].images)))
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    result = one(connector.wait([job], WAIT_S))
    assert len(result.failed) == 1
    assert len(result.done_keys) == 2


def test_a_job_that_no_tier_is_asked_for_says_no(bench, keys):
    connector = bench.connect("host")
    job = connector.load(keys[:2], blocks_of(5, 6), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    assert len(one(connector.poll()).failed) == 2


def test_a_chunk_whose_tier_hangs_lets_the_others_go_when_its_deadline_has_passed(bench, cache, keys):
    connector = stored(bench, keys, "fs", "obj")
    held = bench.tiers["fs"].hold("load")
    job = connector.load(keys[:1], blocks_of(5), deadline_s=0.05, by_layer=True)
    held.wait_for()
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    assert one(connector.wait([job], WAIT_S)).failed == {keys[0]: reasons.DEADLINE}
    held.open()
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    assert cache.is_blank(range(32))


@pytest.mark.parametrize("how", ["cancel", "fence", "reset"])
def test_a_load_that_waits_for_its_companions_can_be_given_up(bench, cache, keys, how):
    connector = stored(bench, keys, "fs")
    held = bench.tiers["fs"].hold("load")
    job = connector.load(keys[:3], blocks_of(5, 6, 7), by_layer=True)
    held.wait_for()
    if how == "cancel":
        connector.cancel(job)
    elif how == "fence":
        connector.fence(blocks_of(5, 6, 7))
    else:
        bench.tiers["fs"].unhold("load")
        threading.Timer(0.05, held.open).start()
        connector.reset()
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    held.open()
    assert len(one(connector.wait([job], WAIT_S)).failed) == 3
    until(connector.poll, lambda: connector.stats().pool.pinned == 0)
    # A reset says no to what is under way and leaves it to end; its blocks hold nothing of use.
    assert how == "reset" or cache.is_blank(range(32))


def test_layers_that_were_copied_before_a_reset_are_not_offered_after_it(bench, keys, monkeypatch):
    connector = stored(bench, keys, "host")
    go = threading.Event()
    real = HostCopy.scatter

    def held(self, block_ids, src, skip_blocks=0, tensors=None):
        real(self, block_ids, src, skip_blocks, tensors)
        if tensors.start == 1:
            assert go.wait(WAIT_S)

    monkeypatch.setattr(HostCopy, "scatter", held)
    job = connector.load(keys[:2], blocks_of(5, 6), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S)
    connector.reset()
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    go.set()
    assert set(one(connector.wait([job], WAIT_S)).failed.values()) == {reasons.RESET}


def test_more_chunks_than_slots_come_in_several_orders_and_every_layer_is_right(bench, cache, keys):
    connector = stored(bench, keys, "fs", chunks=8)
    job = connector.load(keys[:8], blocks_of(*range(8, 16)), by_layer=True)
    for layer in LAYERS:
        assert connector.wait_for_layer(job, layer, WAIT_S)
    connector.wait([job], WAIT_S)
    assert cache.holds(blocks_of(*range(8, 16)), blocks_of(*range(8)))


def test_only_a_load_by_layer_can_be_waited_for_and_only_for_a_layer_there_is(bench, keys):
    connector = stored(bench, keys, "host")
    whole = connector.load(keys[:1], blocks_of(5))
    layered = connector.load(keys[:1], blocks_of(6), by_layer=True)
    for job in (whole, 12345):
        with pytest.raises(ValueError, match=f"job {job} is no load by layer"):
            connector.wait_for_layer(job, LAYERS[0])
    with pytest.raises(LayoutError, match=r"no layer 'model\.layers\.2'; the layout has 2: model\.layers\.0, "):
        connector.wait_for_layer(layered, "model.layers.2")
    connector.wait([whole, layered], WAIT_S)


def test_a_poll_between_two_layers_changes_nothing(bench, keys):
    connector = stored(bench, keys, "fs")
    job = connector.load(keys[:2], blocks_of(5, 6), by_layer=True)
    assert connector.wait_for_layer(job, LAYERS[0], WAIT_S)
    connector.wait([job], WAIT_S)
    assert connector.wait_for_layer(job, LAYERS[1]) is True
    missed = connector.load([*keys[:1], keys[7]], blocks_of(5, 6), by_layer=True)
    connector.wait([missed], WAIT_S)
    assert connector.wait_for_layer(missed, LAYERS[1]) is False
    connector.reset()
    assert connector.wait_for_layer(job, LAYERS[1]) is False


def test_a_load_of_no_chunks_is_there_at_once(bench):
    connector = bench.connect("host")
    assert connector.wait_for_layer(connector.load([], [], by_layer=True), LAYERS[0]) is True


def test_outcomes_are_remembered_up_to_a_bound(bench, keys, monkeypatch):
    monkeypatch.setattr(offload, "_LAYERED_KEPT", 2)
    connector = stored(bench, keys, "host")
    jobs = [connector.load(keys[:1], blocks_of(5), by_layer=True) for _ in range(3)]
    connector.wait(jobs, WAIT_S)
    assert [connector.wait_for_layer(job, LAYERS[0]) for job in jobs[1:]] == [True, True]
    with pytest.raises(ValueError, match=f"job {jobs[0]} is no load by layer, or one of more than 2 jobs ago"):
        connector.wait_for_layer(jobs[0], LAYERS[0])


def test_a_wait_ends_when_the_connector_was_closed_over_a_hung_tier(bench, keys):
    bench.hung = {"kvsluice-fs-read-0", "kvsluice-fs-write-0"}
    connector = stored(bench, keys, "fs")
    held = bench.tiers["fs"].hold("load")
    job = connector.load(keys[:1], blocks_of(5), by_layer=True)
    held.wait_for()
    bench.hung = set(connector.close(timeout_s=0.05))
    try:
        assert connector.wait_for_layer(job, LAYERS[0], WAIT_S) is False
    except ClosedError:
        assert one(connector.poll()).failed


def test_a_layer_of_two_tensors_is_there_with_its_second():
    tensors = {"a": [torch.zeros(4, 8), torch.zeros(4, 8)], "b": torch.zeros(4, 8)}
    tensors["c"] = tensors["b"]
    layout = Cache(4).layout.from_tensors(tensors, tokens_per_block=4)
    assert [item.name for item in layout.paged] == ["a.k", "a.v", "b"]
    assert layout.layers == {"a": (0, 1), "b": (2,), "c": (2,)}
    assert [layout.last_tensor(layer) for layer in "abc"] == [1, 2, 2]


# ---- the parts --------------------------------------------------------------------------------


@dataclass
class FakeCopier:
    lots: list[list[object]] = field(default_factory=list)

    def put_by_tensor(self, tasks):
        if tasks:
            self.lots.append(list(tasks))


class Task:
    is_store = False

    def __init__(self) -> None:
        self.claim = Claim()
        self.block_ids = (0,)

    def prepare(self) -> ChunkCopy:
        raise NotImplementedError


def test_a_cohort_goes_when_the_last_has_arrived_or_left():
    copier = FakeCopier()
    first, second, third = (Task() for _ in range(3))
    cohort = Cohort(copier, 3)
    cohort.arrive(first)
    cohort.leave(second)
    cohort.leave(second)
    assert copier.lots == []
    cohort.arrive(third)
    assert copier.lots == [[first, third]]


def test_one_that_left_and_comes_back_late_goes_alone_whatever_happened_to_the_others():
    copier = FakeCopier()
    first, late = Task(), Task()
    cohort = Cohort(copier, 2)
    cohort.leave(late)
    cohort.arrive(first)
    cohort.leave(first)
    cohort.arrive(late)
    assert copier.lots == [[first], [late]]


def test_one_that_left_and_comes_back_early_goes_with_the_others():
    copier = FakeCopier()
    first, late = Task(), Task()
    cohort = Cohort(copier, 2)
    cohort.leave(late)
    cohort.arrive(late)
    assert copier.lots == []
    cohort.arrive(first)
    assert copier.lots == [[late, first]]


def test_a_watch_gives_a_tensors_events_when_every_chunk_has_one_and_each_once():
    watch = LayerWatch(3)
    shared, own = object(), object()
    for event in (shared, shared):
        watch.on_tensor(0, event)
    assert watch.events(0) is None
    watch.on_tensor(0, own)
    assert watch.events(0) == [shared, own]
    assert watch.events(1) is None
    assert not watch.missed
    watch.on_missed()
    assert watch.missed
