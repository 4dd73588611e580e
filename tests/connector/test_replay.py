"""A whole replay: what is offered is accounted for, runs repeat to the digit, tiers and caches do what they should."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.replay import plot as plot_module
from kvsluice.connector.replay.device import DeviceSpec, SlowTime
from kvsluice.connector.replay.document import document
from kvsluice.connector.replay.engine import PrefixCache
from kvsluice.connector.replay.measure import Latency, LoadRecord, percentile, slowdowns
from kvsluice.connector.replay.rows import ROW_NAMES, Row, make_rows
from kvsluice.connector.replay.run import RowResult, run_row, run_rows
from kvsluice.connector.replay.scene import Scene, TierModel, World
from kvsluice.connector.replay.trace import TOKENS_PER_BLOCK, Request, make_trace, spread
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import PLAIN, Signals
from kvsluice.tiers.errors import ConfigError

CHUNK = 4 << 20
FS = {"type": "fs", "root_dir": "/modelled", "name": "fs", "n_read_threads": 4, "n_write_threads": 4}
OBJ = {"type": "obj", "bucket": "modelled", "name": "obj", "n_read_threads": 4, "n_write_threads": 4}


def scene(bytes_per_s: float = 1e9, **changes: object) -> Scene:
    model = TierModel(DeviceSpec(bytes_per_s, 1e-4))
    return Scene(**{"tiers": {"fs": model}, "chunk_bytes": CHUNK, "gpu_chunks": 64, **changes})


def ours(*tiers: dict[str, object]) -> Row:
    return make_rows(tiers or (FS,), ("ours",))[0]


def prompt(time_s: float, *blocks: int, node: int = 0) -> Request:
    keys = tuple(block.to_bytes(8, "big") for block in blocks)
    return Request(time_s, len(keys) * TOKENS_PER_BLOCK, 1, keys, node)


def as_json(results: Sequence[RowResult], of: Scene) -> str:
    return json.dumps(document(scene=of, rows=results, claims=(), facts={}), allow_nan=False)


@pytest.fixture(scope="module")
def overloaded() -> list[Request]:
    """Nearly all that the tier of `scene(1e8)` can take, at times more; five times what that of `scene(3e7)` can."""
    return make_trace(seed=4, num_requests=150, requests_per_s=20)


@pytest.mark.parametrize("name", ROW_NAMES)
def test_every_chunk_that_is_offered_is_kept_dropped_or_failed_and_every_load_ends(name, overloaded):
    (row,) = make_rows((FS,), (name,))
    world = World(scene(1e8), row)
    for request in overloaded:
        world.timeline.at(request.time_s, partial(world.engines[0].arrive, request))
    world.timeline.run()
    (node,), (engine,) = world.nodes, world.engines
    node.planner.check_integrity()
    assert node.planner.idle
    assert node.offered_chunks == sum(len(request.keys) for request in overloaded)
    assert node.offered_chunks == node.kept_chunks + node.failed_stores.total()
    assert node.loads.num_open == 0
    stats = node.planner.stats()
    tier = stats.tiers["fs"]
    assert tier.chunks_stored == world.contents["fs"][0].chunks_written
    # A job that stores what another one is storing shares its outcome, and the tier counts that once.
    assert set(node.failed_stores) == set(tier.dropped) | set(tier.failed)
    assert all(node.failed_stores[reason] >= count for reason, count in tier.dropped.items())
    loaded = sum(len(record.keys) - record.failed for record in node.loads.records)
    assert loaded == tier.chunks_loaded
    assert engine.tier_hits <= loaded
    assert engine.requests == len(overloaded)
    assert all(len(record.chunks_s) == len(record.keys) for record in node.loads.records)


def test_an_overloaded_tier_drops_and_one_that_is_not_does_not(overloaded):
    dropped = run_row(scene(3e7), ours(), overloaded).tiers["fs"]
    assert sum(dropped.dropped.values()) > 0.3 * dropped.offered
    kept = run_row(scene(2e10), ours(), overloaded).tiers["fs"]
    assert kept.dropped == {}
    assert kept.stored == kept.offered


def test_a_run_repeats_to_the_digit_in_one_process_or_in_two(overloaded):
    rows = make_rows((FS,), ("one queue", "ours"))
    first = as_json(run_rows(scene(1e8), rows, overloaded), scene(1e8))
    assert as_json(run_rows(scene(1e8), rows, overloaded), scene(1e8)) == first
    told: list[str] = []
    two = run_rows(scene(1e8), rows, overloaded, jobs=2, on_done=lambda row: told.append(row.row))
    assert as_json(two, scene(1e8)) == first
    assert told == ["one queue", "ours"]


def test_the_gpu_keeps_the_beginning_of_a_prefix_longest():
    cache = PrefixCache(3)
    keys = [b"a", b"b", b"c", b"d"]
    cache.use(keys)
    assert cache.match(keys) == 3
    cache.use([b"x"])
    assert cache.match(keys) == 2
    assert cache.match([b"x"]) == 1
    cache.use(keys[:2])
    cache.use([b"y"])
    assert cache.match(keys) == 2
    assert PrefixCache(0).match(keys) == 0


def test_what_the_gpu_forgot_comes_from_the_tier_and_is_not_stored_again():
    first, second = tuple(range(6)), tuple(range(10, 16))
    requests = [prompt(0.0, *first), prompt(5.0, *second), prompt(10.0, *first, 7), prompt(15.0, *first, 7)]
    result = run_row(scene(gpu_chunks=7), ours(), requests)
    # Of the first prompt its beginning alone was left in the GPU.
    assert (result.gpu_hits, result.tier_hits, result.failed_hits) == (1 + 7, 5, 0)
    assert result.tiers["fs"].stored == result.tiers["fs"].offered == 6 + 6 + 1
    assert result.load.count == 1


def test_a_load_alone_takes_what_the_device_takes():
    requests = [prompt(0.0, 1, 2, 3, 4), prompt(5.0, 1, 2, 3, 4)]
    result = run_row(scene(gpu_chunks=0), ours(), requests)
    copy_s = CHUNK / 50e9
    assert result.load.p99_s == pytest.approx(4 * CHUNK / 1e9 + 1e-4 + 4 * copy_s, rel=0.02)
    assert result.load.p99_s == result.alone.p99_s
    assert result.each_slowdown.max_s == pytest.approx(1.0)


def quick_to_compute(row: str, *, prefill_tokens_per_s: float = 1e6) -> RowResult:
    """Prompts that come back again and again from a tier that takes 4 ms for a chunk; to compute one takes 0.5 ms."""
    requests = [prompt(0.5 * turn, *range(8 * number, 8 * number + 8)) for turn, number in enumerate([0, 1] * 6)]
    (one,) = make_rows((FS,), (row,))
    return run_row(scene(gpu_chunks=8, prefill_tokens_per_s=prefill_tokens_per_s), one, requests)


def test_only_ours_leaves_hits_unused_that_are_slower_to_load_than_to_compute():
    without = quick_to_compute("+ queue in time")
    assert without.slower_hits == 0
    assert without.tier_hits == 10 * 8
    gated = quick_to_compute("ours")
    # What loads take is known after the first of them; probes aside, no other is made.
    assert gated.slower_hits + gated.tier_hits + gated.failed_hits == 10 * 8
    assert gated.slower_hits > gated.tier_hits > 0
    assert gated.tiers["fs"].read == gated.tier_hits + gated.failed_hits
    assert gated.load.count < without.load.count


def test_a_load_gate_warns_of_no_modelled_tier_and_of_others_as_before(caplog):
    assert quick_to_compute("ours").slower_hits > 0
    assert caplog.records == []
    logging.getLogger(LoadGate.__module__).warning("of a real one")
    assert caplog.messages == ["of a real one"]


def test_hits_that_are_faster_to_load_are_all_loaded():
    requests = [prompt(5.0 * turn, *range(8 * number, 8 * number + 8)) for turn, number in enumerate([0, 1] * 6)]
    result = run_row(scene(gpu_chunks=8), ours(), requests)
    assert (result.slower_hits, result.tier_hits) == (0, 10 * 8)


def test_an_engine_of_endless_speed_tells_no_rate_and_loads_all_it_can():
    result = quick_to_compute("ours", prefill_tokens_per_s=math.inf)
    assert (result.slower_hits, result.tier_hits + result.failed_hits) == (0, 10 * 8)


def test_the_load_gate_knows_the_rate_that_is_modelled():
    world = World(scene(prefill_tokens_per_s=12_345.0), ours())
    world.timeline.at(0.0, partial(world.engines[0].arrive, prompt(0.0, 1, 2, 3)))
    world.timeline.run()
    gate = world.nodes[0].planner.stats().load_gate
    assert gate is not None
    assert gate.prefill_tokens_per_s == pytest.approx(12_345.0)
    others = [World(scene(), row) for row in make_rows((FS,)) if row.name != "ours"]
    assert [world.nodes[0].planner.stats().load_gate for world in others] == [None] * len(others)


def test_requests_that_want_what_is_being_loaded_wait_for_it():
    early = [prompt(0.0, *range(8))]
    together = [prompt(5.0, *range(8)), prompt(5.001, *range(8), 20), prompt(5.002, *range(8), 30)]
    result = run_row(scene(gpu_chunks=64), ours(), [*early, prompt(2.0, *range(100, 164)), *together])
    assert result.load.count == 1
    assert (result.tier_hits, result.gpu_hits) == (8, 16)


def test_a_node_hits_what_another_stored_on_a_shared_tier_and_only_there():
    requests = [prompt(0.0, 1, 2, 3), prompt(5.0, 1, 2, 3, node=1)]
    two = scene(num_nodes=2, tiers={"fs": TierModel(DeviceSpec(1e9, 1e-4), shared=True)})
    shared = run_row(two, ours(), requests)
    assert shared.tier_hits == 3
    assert shared.tiers["fs"].capacity_bytes_per_s == 1e9
    own = run_row(replace(two, tiers={"fs": TierModel(DeviceSpec(1e9, 1e-4))}), ours(), requests)
    assert own.tier_hits == 0
    assert own.tiers["fs"].capacity_bytes_per_s == 2e9


def test_many_nodes_on_one_link_share_it():
    slow_link = {"fs": TierModel(DeviceSpec(1e8, 1e-4), shared=True)}
    requests = [prompt(0.0, *range(8 * node, 8 * node + 8), node=node) for node in range(10)]
    again = [replace(request, time_s=60.0) for request in requests]
    many = scene(num_nodes=10, gpu_chunks=0, tiers=slow_link, prefill_tokens_per_s=math.inf)
    result = run_row(many, ours(), [*requests, *again])
    assert result.tier_hits == 80
    assert result.load.max_s == pytest.approx(80 * CHUNK / 1e8, rel=0.05)


def test_a_chunk_that_comes_too_late_is_computed_and_the_run_goes_on():
    hang = {"fs": TierModel(DeviceSpec(1e9, 1e-4, slow=(SlowTime(4.0, 40.0, 0.0),)))}
    result = run_row(scene(gpu_chunks=0, tiers=hang), ours(), [prompt(0.0, 1, 2), prompt(5.0, 1, 2)])
    assert (result.tier_hits, result.failed_hits) == (0, 2)
    # The deadline is looked at once a step.
    assert result.load.p99_s == pytest.approx(10.0, abs=0.021)


def test_a_tier_at_its_capacity_evicts_and_what_is_gone_is_no_hit():
    small = {"fs": TierModel(DeviceSpec(1e9, 1e-4), capacity_bytes=10 * CHUNK)}
    requests = [prompt(5.0 * at, *range(8 * at, 8 * at + 8)) for at in range(3)]
    result = run_row(scene(gpu_chunks=0, tiers=small), ours(), [*requests, prompt(20.0, *range(8))])
    assert result.tiers["fs"].evicted > 0
    assert result.tier_hits == 0


def test_a_host_tier_serves_before_the_tier_below_it_is_asked():
    requests = [prompt(0.0, 1, 2, 3), prompt(5.0, 1, 2, 3), prompt(9.0, 4)]
    host = {"type": "host", "capacity": 16 * CHUNK}
    result = run_row(scene(gpu_chunks=0), ours(host, FS), requests)
    assert result.tier_hits == 3
    assert result.tiers["fs"].read == 0
    assert result.tiers["fs"].stored == 3
    assert result.load.max_s < 0.001
    assert result.each_slowdown.max_s == pytest.approx(1.0)


def test_alone_a_load_comes_from_the_tiers_that_served_it():
    # Two slots of host memory: of the three chunks the tier below serves those that had to give way.
    host = {"type": "host", "capacity": 2 * CHUNK}
    requests = [prompt(0.0, 1, 2, 3), prompt(5.0, 1, 2, 3), prompt(9.0, 4)]
    result = run_row(scene(1e8, gpu_chunks=0), ours(host, FS), requests)
    assert 0 < result.tiers["fs"].read < 3
    assert result.alone.p99_s == pytest.approx(result.load.p99_s, rel=0.01)


def test_a_ladder_of_two_stores_in_both_and_loads_from_the_first():
    both = scene(gpu_chunks=0, tiers={"fs": TierModel(DeviceSpec(1e9)), "obj": TierModel(DeviceSpec(1e8, 0.03))})
    result = run_row(both, ours(FS, OBJ), [prompt(0.0, 1, 2, 3), prompt(5.0, 1, 2, 3), prompt(9.0, 4)])
    assert (result.tiers["fs"].stored, result.tiers["obj"].stored) == (3, 3)
    assert (result.tiers["fs"].read, result.tiers["obj"].read) == (3, 0)


def test_the_rows_differ_by_the_rules_they_are_named_after():
    rows = {row.name: row.config.tiers[0] for row in make_rows((FS,))}
    assert rows["one queue"].backpressure is None
    assert rows["loads first"].backpressure is None
    assert rows["loads first"].max_queue_s > 1e6
    signals = {
        name: Signals(**tier.backpressure.get("signals", {}))
        for name, tier in rows.items()
        if tier.backpressure is not None
    }
    assert signals["drop"] == signals["throttle"] == PLAIN
    assert rows["drop"].backpressure["policy_cls"] == "DropStorePolicy"
    assert "policy_cls" not in rows["throttle"].backpressure
    assert signals["+ own time"] == Signals(in_flight=False, queue_time=False)
    assert signals["+ in flight"] == Signals(queue_time=False)
    assert signals["+ queue in time"] == signals["ours"] == Signals()
    assert {name for name, tier in rows.items() if tier.store_concurrency == "adaptive"} == {"ours"}


def test_a_row_keeps_the_marks_it_is_given_and_an_unknown_one_is_refused():
    marked = {**FS, "backpressure": {"high_water_s": 1.0, "low_water_s": 0.5}}
    (row,) = make_rows((marked,), ("drop",))
    assert row.config.tiers[0].backpressure["high_water_s"] == 1.0
    with pytest.raises(ConfigError, match=r"'best'.*'ours'"):
        make_rows((FS,), ("best",))
    with pytest.raises(ConfigError, match="None"):
        make_rows(({**FS, "backpressure": None},), ("drop",))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes 0"),
        ({"num_nodes": 0}, "num_nodes 0"),
        ({"gpu_chunks": -1}, "gpu_chunks -1"),
        ({"step_s": 0.0}, r"step_s 0\.0"),
        ({"staging_bytes": CHUNK - 1}, f"staging_bytes {CHUNK - 1}"),
    ],
)
def test_a_scene_that_cannot_be_is_refused_by_name_and_value(change, named):
    with pytest.raises(ConfigError, match=named):
        scene(**change)


def test_requests_and_tiers_that_the_scene_has_not_are_refused():
    with pytest.raises(ConfigError, match="no request"):
        run_row(scene(), ours(), [])
    with pytest.raises(ConfigError, match="node 3"):
        run_row(scene(), ours(), [prompt(0.0, 1, node=3)])
    with pytest.raises(ConfigError, match="'obj'"):
        run_row(scene(), ours(OBJ), [prompt(0.0, 1)])
    with pytest.raises(ConfigError, match="jobs is 0"):
        run_rows(scene(), [ours()], [prompt(0.0, 1)], jobs=0)


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed():
    values = [float(at) for at in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0
    assert math.isnan(percentile([], 0.5))
    assert Latency.of([3.0, 1.0, 2.0]) == Latency(3, 2.0, 3.0, 3.0)


def test_a_slowdown_compares_each_load_with_itself():
    loads = [LoadRecord(0.0, (b"a",), 2.0), LoadRecord(1.0, (b"b",), 3.0)]
    alone = [LoadRecord(0.0, (b"a",), 1.0), LoadRecord(1.0, (b"b",), 3.0)]
    assert slowdowns(loads, alone) == [2.0, 1.0]
    with pytest.raises(ValueError, match="not the same"):
        slowdowns(loads, alone[:1])


def test_the_document_has_null_where_nothing_could_be_measured(overloaded):
    results = run_rows(scene(1e8), make_rows((FS,), ("loads first",)), overloaded[:20])
    (row,) = json.loads(as_json(results, scene(1e8)))["rows"]
    assert row["tiers"]["fs"]["ema_mean_s"] is None
    assert row["tiers"]["fs"]["series"]["ema_s"] == [None] * 120
    assert row["requests"] == 20


def test_the_picture_is_a_png(tmp_path, overloaded):
    results = run_rows(scene(1e8), make_rows((FS,), ("drop", "ours")), overloaded[:40])
    path = tmp_path / "rows.png"
    plot_module.plot(results, "fs", path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ConfigError, match="nowhere"):
        plot_module.plot(results, "fs", Path(tmp_path / "nowhere" / "x.png"), "a title")


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path, overloaded, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"kvsluice\[plot\]"):
        plot_module.plot([], "fs", tmp_path / "x.png", "a title")


def test_a_trace_over_many_nodes_conserves_too():
    requests = spread(make_trace(seed=4, num_requests=200, requests_per_s=20), 8, "affinity")
    many = scene(1e8, num_nodes=8, tiers={"fs": TierModel(DeviceSpec(1e8, 1e-4), shared=True)})
    result = run_row(many, ours(), requests)
    assert result.requests == 200
    assert result.prompt_chunks == sum(len(request.keys) for request in requests)
    assert result.tiers["fs"].dropped.get(reasons.INTERNAL, 0) == 0
