"""From configuration to tiers, gates and geometry."""

from __future__ import annotations

import pickle

import pytest
from bench import SLOT_BYTES, Cache, blocks_of, one
from doubles import MemoryTier

from kvsluice.connector import OffloadConfig, ladder
from kvsluice.connector.namespace import ModelIdentity
from kvsluice.tiers import ConfigError, FileSystemTier, ObjectTier, TierUnavailableError, reasons

WAIT_S = 20.0


def config_of(*tiers: dict[str, object], **options: object) -> OffloadConfig:
    return OffloadConfig.from_dict(
        {"blocks_per_chunk": 2, "staging_bytes": 8 * SLOT_BYTES, "tiers": list(tiers), **options}
    )


HOST = {"type": "host", "capacity": 4 * SLOT_BYTES + 100}


def geometry(config: OffloadConfig, **options: object) -> ladder.Geometry:
    layout = Cache().layout
    namespace = ladder.namespace_for(config, layout, None)
    return ladder.geometry_for(config, layout, namespace, ladder.chunk_format(config, layout, namespace), **options)


def test_sizes_are_rounded_down_to_whole_slots_never_up():
    made = geometry(config_of(HOST, staging_bytes=8 * SLOT_BYTES - 1))
    assert (made.host_slots, made.num_slots) == (4, 4 + 7)
    assert (made.payload_bytes, made.slot_bytes) == (512, SLOT_BYTES)
    assert pickle.loads(pickle.dumps(made)) == made


def test_sizes_are_per_node_and_shared_by_its_ranks():
    made = geometry(config_of(HOST), ranks_per_node=4)
    assert (made.host_slots, made.num_slots) == (1, 1 + 2)
    with pytest.raises(ConfigError, match="holds no chunk: one takes 8192 bytes on each of 8 ranks"):
        geometry(config_of(HOST), ranks_per_node=8)


def test_without_a_host_tier_no_slot_holds_a_chunk():
    made = geometry(config_of({"type": "fs", "root_dir": "x"}))
    assert (made.host_slots, made.num_slots) == (0, 8)


def test_each_tier_has_a_gate_of_its_own_and_null_turns_it_off():
    made = ladder.planned_tiers(
        config_of(HOST, {"type": "fs", "root_dir": "x"}, {"type": "fs", "root_dir": "y", "backpressure": None})
    )
    assert [tier.name for tier in made] == ["host", "fs", "fs-2"]
    assert [tier.is_host for tier in made] == [True, False, False]
    assert made[0].gate is not made[1].gate
    assert made[2].gate is None


def test_each_tier_is_asked_for_as_many_keys_as_its_own_class_says(monkeypatch):
    monkeypatch.setattr(FileSystemTier, "probe_keys", 7, raising=False)
    monkeypatch.setattr(ObjectTier, "probe_keys", 16_384, raising=False)
    made = ladder.planned_tiers(
        config_of(
            HOST, {"type": "fs", "root_dir": "x"}, {"type": "obj", "bucket": "b"}, {"type": "fs", "root_dir": "y"}
        )
    )
    assert [tier.probe_keys for tier in made[1:]] == [7, 16_384, 7]


def test_object_tiers_alone_are_listed_at_start_unless_that_is_off():
    obj = {"type": "obj", "bucket": "b"}
    tiers = (HOST, {"type": "fs", "root_dir": "x"}, obj, {**obj, "list_at_start_s": 0}, {**obj, "list_at_start_s": 9})
    assert ladder.listing_times_s(config_of(*tiers)) == {2: 2.0, 4: 9.0}


def test_worker_tiers_keep_their_place_in_the_ladder(tmp_path):
    config = config_of(
        HOST, {"type": "fs", "root_dir": str(tmp_path), "capacity": "1MiB", "n_read_threads": 3, "n_write_threads": 2}
    )
    tiers = ladder.build_tiers(config, "ab12", {})
    [made] = ladder.worker_tiers(config, tiers)
    assert (made.position, made.read_threads, made.write_threads) == (1, 3, 2)
    assert isinstance(made.tier, FileSystemTier)
    made.tier.close()


def test_tiers_opened_before_one_that_fails_are_closed_again(monkeypatch):
    opened: list[MemoryTier] = []

    def build(tier: object, namespace: str, facts: object) -> MemoryTier:
        if len(opened) == 2:
            raise ConfigError("the third cannot be opened")
        opened.append(MemoryTier())
        return opened[-1]

    monkeypatch.setattr(ladder, "open_tier", build)
    with pytest.raises(ConfigError, match="the third"):
        ladder.build_tiers(config_of(*({"type": "fs", "root_dir": str(at)} for at in range(3))), "ab12", {})
    assert [tier.closed for tier in opened] == [1, 1]


@pytest.mark.parametrize(
    ("one_config", "other_config"),
    [
        ({}, {"salt": "tenant"}),
        ({"salt": "tenant"}, {"salt": "other"}),
        ({}, {"weights_version": 2}),
        ({"model": "a"}, {"model": "b"}),
        ({}, {"blocks_per_chunk": 4}),
        ({"model": "m", "model_revision": "1"}, {"model": "m", "model_revision": "2"}),
    ],
)
def test_what_changes_the_bytes_under_a_key_changes_the_namespace(one_config, other_config):
    made = [geometry(config_of(HOST, **options)).namespace for options in (one_config, other_config)]
    assert made[0] != made[1]


def test_the_size_of_the_pool_and_of_the_tiers_leave_the_namespace_as_it_is():
    config = config_of(HOST)
    namespaces = {ladder.namespace_for(config, Cache(blocks).layout, None).digest for blocks in (8, 32)}
    namespaces.add(geometry(config_of({"type": "host", "capacity": "1MiB"}, staging_bytes="2MiB")).namespace)
    assert len(namespaces) == 1


def test_an_engines_model_tells_namespaces_apart():
    layout = Cache().layout
    made = {
        ladder.namespace_for(config_of(HOST), layout, ModelIdentity(name=name, kv_dtype="F32")).digest
        for name in ("a", "b")
    }
    assert len(made) == 2


def namespace_of(engines: ModelIdentity | None = None, **options: object) -> str:
    return ladder.namespace_for(config_of(HOST, **options), Cache().layout, engines).digest


def test_a_configured_model_and_revision_win_over_an_engines():
    engines = ModelIdentity(name="a", revision="1", kv_dtype="F32")
    assert namespace_of(engines, model="b", model_revision="2") == namespace_of(
        ModelIdentity(name="b", revision="2", kv_dtype="F32")
    )


def test_other_weights_in_a_models_local_folder_are_another_namespace(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    first = namespace_of(model=str(tmp_path))
    weights.write_bytes(b"other")
    assert namespace_of(model=str(tmp_path)) != first


def test_a_models_local_folder_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    def refuse(path: str) -> str:
        raise PermissionError(f"may not read {path}")

    monkeypatch.setattr(ladder, "weights_digest", refuse)
    with pytest.raises(ConfigError, match=f"model '{tmp_path}': its weights cannot be read: may not read"):
        namespace_of(model=str(tmp_path))


def test_a_chunk_that_the_host_gate_refuses_still_goes_to_the_slower_tier(bench, keys):
    gate = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "warmup_completions": 1,
        "high_water_s": 0.0,
        "low_water_s": 0.0,
        "decay_half_life_s": 0.0,
    }
    host = {"type": "host", "capacity": 8 * SLOT_BYTES, "backpressure": gate}
    connector = bench.connect(host, "fs")
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    result = one(connector.wait([connector.store(keys[2:3], blocks_of(2))], WAIT_S))
    assert result.done_keys == (keys[2],)
    stats = connector.stats().tiers
    assert stats["host"].dropped == {reasons.GATE: 1}
    assert stats["fs"].chunks_stored == 3


def test_a_chunk_that_one_tier_fails_is_done_when_another_took_it(bench, keys):
    fs = bench.double("fs")
    fs.fail_always("store", TierUnavailableError("full", reason=reasons.DISK_FULL))
    connector = bench.connect("fs", "obj")
    result = one(connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S))
    assert not result.failed
    assert connector.stats().tiers["fs"].failed == {reasons.DISK_FULL: 2}


def test_one_slot_is_enough_for_every_tier_to_be_served(bench, cache, keys):
    connector = bench.connect("host", "fs", "obj", slots=1)
    assert not one(connector.wait([connector.store(keys[:4], blocks_of(0, 1, 2, 3))], WAIT_S)).failed
    cache.blank()
    assert not one(connector.wait([connector.load(keys[:4], blocks_of(5, 6, 7, 8))], WAIT_S)).failed
    assert cache.holds(blocks_of(5, 6, 7, 8), blocks_of(0, 1, 2, 3))
