"""Configuration: what is understood, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import traceback
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvsluice.connector.config import (
    FsTierConfig,
    HostTierConfig,
    LoadGateConfig,
    ObjTierConfig,
    OffloadConfig,
    TierConfig,
    parse_size,
)
from kvsluice.connector.config_errors import is_secret_key
from kvsluice.connector.ladder import open_tier
from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj import ObjectTier

HOST: dict[str, object] = {"type": "host", "capacity": "8GiB"}
FS: dict[str, object] = {"type": "fs", "root_dir": "/mnt/kv"}
OBJ: dict[str, object] = {"type": "obj", "bucket": "kv"}
SECRETS = ("AccessKeyOfTests", "SecretKeyOfTests", "TokenOfTests", "SaltOfTests", "UrlPasswordOfTests")
GATE = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "ThrottledDropPolicy"}


def make(*tiers: dict[str, object], **top: object) -> OffloadConfig:
    return OffloadConfig.from_dict({"tiers": list(tiers) or [FS], **top})


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(mapping)
    return str(caught.value)


# What is understood


def test_the_documented_example_is_understood() -> None:
    config = OffloadConfig.from_dict(
        {
            "tokens_per_chunk": 256,
            "staging_bytes": "1GiB",
            "tiers": [
                {"type": "host", "capacity": "8GiB"},
                {"type": "fs", "root_dir": "/mnt/nvme/kv", "capacity": "500GiB", "locality": "LOCAL"},
                {"type": "obj", "bucket": "kv", "endpoint_url": "https://s3.example", "prefix": "team-a"},
            ],
            "backpressure": GATE,
        }
    )
    host, fs, obj = config.tiers
    assert isinstance(host, HostTierConfig)
    assert host.capacity == 8 * 2**30
    assert isinstance(fs, FsTierConfig)
    assert (fs.root_dir, fs.capacity, fs.locality) == ("/mnt/nvme/kv", 500 * 2**30, "LOCAL")
    assert isinstance(obj, ObjTierConfig)
    assert (obj.bucket, obj.endpoint_url, obj.prefix) == ("kv", "https://s3.example", "team-a")
    assert (config.tokens_per_chunk, config.staging_bytes, config.backpressure) == (256, 2**30, GATE)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (4096, 4096),
        (1e9, 10**9),
        ("4096", 4096),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.1KiB", 102),
        ("512B", 512),
    ],
)
def test_a_size_is_read_in_bytes(written: object, num_bytes: int) -> None:
    assert parse_size(written) == num_bytes


@pytest.mark.parametrize("written", [0, -1, "0", "0.5B", "-1GiB", "8 gigs", "", "GiB", "1e9", "٣", 1.5, True, None, []])
def test_a_size_that_is_none_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="a size"):
        parse_size(written)


def test_the_mapping_that_is_read_is_left_as_it_is() -> None:
    mapping = {"tiers": [dict(FS), {**OBJ, "endpoint_url": "http://u:p@h"}], "cpu_bytes_to_use": 4096, "block_size": 64}
    before = copy.deepcopy(mapping)
    OffloadConfig.from_dict(mapping)
    assert mapping == before


def test_a_configuration_survives_pickling_and_cannot_be_changed() -> None:
    config = make(HOST, {**FS, "backpressure": None}, salt="SaltOfTests")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.tiers[1].backpressure_for(config.backpressure) is None
    with pytest.raises(ValidationError):
        config.verify = False  # type: ignore[misc]


def test_tiers_without_a_name_get_a_unique_one() -> None:
    config = make(FS, {**FS, "name": "fs-2"}, FS, OBJ, OBJ, {**OBJ, "name": "cold"})
    assert [tier.name for tier in config.tiers] == ["fs", "fs-2", "fs-3", "obj", "obj-2", "cold"]


@pytest.mark.parametrize(("tokens_per_block", "blocks"), [(16, 16), (256, 1), (100, 3), (96, 3), (1000, 1), (513, 1)])
def test_tokens_per_chunk_is_rounded_to_whole_blocks(tokens_per_block: int, blocks: int) -> None:
    assert make().blocks_per_chunk_for(tokens_per_block) == blocks


def test_blocks_per_chunk_counts_whatever_a_block_holds() -> None:
    assert make(blocks_per_chunk=5).blocks_per_chunk_for(16) == 5


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens_per_block is 0"):
        make().blocks_per_chunk_for(0)


def test_locality_is_read_in_any_case() -> None:
    fs = make({**FS, "locality": "remote"}).tiers[0]
    assert isinstance(fs, FsTierConfig)
    assert fs.locality == "REMOTE"


@pytest.mark.parametrize(("written", "kept"), [("v2", "v2"), (2, 2), ("2", "2")])
def test_a_weights_version_keeps_its_type(written: object, kept: object) -> None:
    version = make(weights_version=written).weights_version
    assert version == kept
    assert type(version) is type(kept)


def test_an_endpoint_is_https_unless_it_says_http() -> None:
    endpoints = [
        tier.endpoint_url
        for url in ("s3.example:9000", "http://s3.example", "https://[::1]:9000/base")
        for tier in make({**OBJ, "endpoint_url": url}).tiers
        if isinstance(tier, ObjTierConfig)
    ]
    assert endpoints == ["https://s3.example:9000", "http://s3.example", "https://[::1]:9000/base"]


def test_credentials_in_an_endpoint_become_the_keys() -> None:
    tier = make({**OBJ, "endpoint_url": "https://me:p%40ss@s3.example"}).tiers[0]
    assert isinstance(tier, ObjTierConfig)
    assert tier.endpoint_url == "https://s3.example"
    assert tier.access_key is not None
    assert tier.secret_key is not None
    assert (tier.access_key.get_secret_value(), tier.secret_key.get_secret_value()) == ("me", "p@ss")


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["s3-1.example", "http://s3-2.example:9000"], ("https://s3-1.example", "http://s3-2.example:9000")),
        (("https://s3.example",), ("https://s3.example",)),
        ("https://s3.example", "https://s3.example"),
        (None, None),
    ],
)
def test_endpoints_are_one_or_a_list(written: object, kept: object) -> None:
    tier = make({**OBJ, "endpoint_url": written}).tiers[0]
    assert isinstance(tier, ObjTierConfig)
    assert tier.endpoint_url == kept


@pytest.mark.parametrize(
    "urls", [["https://me:pw@one.example", "two.example"], ["https://me:pw@one.example", "http://me:pw@two.example"]]
)
def test_credentials_in_a_list_of_endpoints_become_the_keys_of_all(urls: list[str]) -> None:
    tier = make({**OBJ, "endpoint_url": urls}).tiers[0]
    assert isinstance(tier, ObjTierConfig)
    assert tier.endpoint_url is not None
    assert not [url for url in tier.endpoint_url if "@" in url]
    assert tier.access_key is not None
    assert tier.secret_key is not None
    assert (tier.access_key.get_secret_value(), tier.secret_key.get_secret_value()) == ("me", "pw")


def test_what_an_object_tier_can_be_told_has_these_defaults() -> None:
    tier = make(OBJ).tiers[0]
    assert isinstance(tier, ObjTierConfig)
    assert (tier.endpoint_url, tier.sign_payload, tier.parts, tier.part_bytes) == (None, "auto", "auto", 8 << 20)
    assert (tier.connect_timeout_s, tier.read_timeout_s, tier.operation_timeout_s, tier.max_attempts) == (2, 5, 10, 3)
    assert (tier.server_side_encryption, tier.sse_kms_key_id, tier.storage_class) == (None, None, None)


OBJ_OPTIONS: dict[str, object] = {
    "bucket": "kv",
    "endpoint_url": ("https://one.example", "http://two.example"),
    "prefix": "team-a",
    "region": "eu-west-3",
    "access_key": "a",
    "secret_key": "b",
    "session_token": "c",
    "ca_bundle": "/etc/ca.pem",
    "addressing_style": "virtual",
    "sign_payload": "on",
    "server_side_encryption": "aws:kms",
    "sse_kms_key_id": "key-1",
    "storage_class": "STANDARD_IA",
    "parts": "off",
    "part_bytes": 16 << 20,
    "connect_timeout_s": 1.5,
    "read_timeout_s": 2.5,
    "operation_timeout_s": 3.5,
    "max_attempts": 4,
}


def test_what_an_object_tier_is_told_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def build(bucket: str, **options: object) -> object:
        given.update(bucket=bucket, **options)
        return object()

    monkeypatch.setattr("kvsluice.connector.ladder.ObjectTier", build)
    written = {**OBJ_OPTIONS, "part_bytes": "16MiB", "endpoint_url": list(map(str, OBJ_OPTIONS["endpoint_url"]))}  # type: ignore[call-overload]
    tier = make({**OBJ, **written, "n_read_threads": 5, "n_write_threads": 3}).tiers[0]
    open_tier(tier, "ab12", {"model": "m"})
    assert {name: given[name] for name in OBJ_OPTIONS} == OBJ_OPTIONS
    assert (given["namespace"], given["namespace_facts"], given["max_connections"]) == (
        "ab12",
        {"model": "m"},
        5 + 3 + ObjectTier.probe_threads,
    )


# Files


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text(json.dumps({"tiers": [HOST, FS]}))
    assert OffloadConfig.from_file(path) == OffloadConfig.from_file(str(path)) == make(HOST, FS)


def test_a_toml_file_is_read_where_python_can(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text('staging_bytes = "2GiB"\n[[tiers]]\ntype = "fs"\nroot_dir = "/mnt/kv"\n')
    if sys.version_info >= (3, 11):
        assert OffloadConfig.from_file(path) == make(staging_bytes="2GiB")
    else:
        with pytest.raises(ConfigError, match="JSON"):
            OffloadConfig.from_file(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"{", "line 1"),
        ("a.json", b"[]", "list"),
        ("a.json", b"\xff", "utf-8"),
        ("a.json", b'{"tiers": [], "tiers": []}', "'tiers' is given twice"),
        ("a.json", b'{"tiers": []}', "at least one tier"),
        ("a.toml", b"tiers = [", "a.toml"),
    ],
)
def test_a_bad_file_is_refused_by_its_path(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=name) as caught:
        OffloadConfig.from_file(path)
    assert told in str(caught.value)


def test_a_missing_file_is_refused_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json") as caught:
        OffloadConfig.from_file(tmp_path / "none.json")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


# What is refused


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({}, ["'tiers'", "missing"]),
        ({"tiers": []}, ["at least one tier"]),
        ({"tiers": "fs"}, ["tiers", "'fs'"]),
        ({"tiers": ["fs"]}, ["tiers[0]"]),
        ({"tiers": [{"root_dir": "/x"}]}, ["tiers[0]", "'type'", "'host', 'fs', 'obj'"]),
        ({"tiers": [FS, {"type": "p2p", "port": 1}]}, ["tiers[1]", "'p2p'", "'host', 'fs', 'obj'"]),
        ({"tiers": [FS, HOST]}, ["tiers[1]", "host", "first"]),
        ({"tiers": [HOST, HOST]}, ["tiers[1]", "host", "at most one"]),
        ({"tiers": [{**FS, "name": "x"}, {**OBJ, "name": "x"}]}, ["two tiers", "'x'"]),
        ({"tiers": [{**FS, "name": "a b"}]}, ["tiers[0] ('fs')", "name", "'a b'"]),
        ({"tiers": [{"type": "fs"}]}, ["tiers[0] ('fs')", "'root_dir'", "missing"]),
        ({"tiers": [{**HOST, "capacity": 0}]}, ["tiers[0] ('host')", "capacity", "is 0", "at least 1"]),
        ({"tiers": [{**FS, "capacity": "-3GiB"}]}, ["tiers[0] ('fs')", "capacity", "'-3GiB'"]),
        ({"tiers": [FS], "staging_bytes": -5}, ["staging_bytes", "-5"]),
        ({"tiers": [FS, {**FS, "root_dirr": "/y"}]}, ["tiers[1] ('fs')", "'root_dirr'", "'/y'", "'root_dir'"]),
        ({"tiers": [FS], "tokens_per_chnk": 64}, ["'tokens_per_chnk'", "64", "'tokens_per_chunk'"]),
        ({"tiers": [FS], "secondary_tier": [1]}, ["'secondary_tier'", "[1]", "'secondary_tiers'"]),
        ({"tiers": [FS], "root_dir": "/y"}, ["'root_dir'", "a tier of type 'fs'"]),
        ({"tiers": [{**FS, "verify": False}]}, ["tiers[0] ('fs')", "'verify'", "outside of its tiers"]),
        ({"tiers": [{**FS, "direct_io": "yes"}]}, ["direct_io", "'yes'", "'auto'"]),
        ({"tiers": [{**FS, "locality": "far"}]}, ["locality", "'far'", "'REMOTE'"]),
        ({"tiers": [{**FS, "n_read_threads": 0}]}, ["n_read_threads", "is 0"]),
        ({"tiers": [{**FS, "n_read_threads": True}]}, ["n_read_threads", "is True"]),
        ({"tiers": [{**FS, "max_queue_s": float("inf")}]}, ["max_queue_s", "inf"]),
        ({"tiers": [FS], "load_timeout_s": 0}, ["load_timeout_s", "is 0"]),
        ({"tiers": [FS], "verify": "yes"}, ["verify", "'yes'"]),
        ({"tiers": [FS], "weights_version": True}, ["weights_version", "True"]),
        ({"tiers": [FS], "salt": ""}, ["salt", "empty"]),
        ({"tiers": [FS], "tokens_per_chunk": 64, "blocks_per_chunk": 4}, ["tokens_per_chunk 64", "blocks_per_chunk 4"]),
        ({"tiers": [{**OBJ, "list_at_start_s": -1}]}, ["tiers[0] ('obj')", "list_at_start_s", "is -1"]),
        ({"tiers": [{**OBJ, "list_at_start_s": False}]}, ["list_at_start_s", "is False"]),
        ({"tiers": [{**FS, "list_at_start_s": 1}]}, ["tiers[0] ('fs')", "'list_at_start_s'"]),
        ({"tiers": [{**OBJ, "endpoint_url": "ftp://h"}]}, ["tiers[0] ('obj')", "endpoint_url", "http"]),
        ({"tiers": [{**OBJ, "endpoint_url": []}]}, ["tiers[0] ('obj')", "endpoint_url"]),
        ({"tiers": [{**OBJ, "endpoint_url": [""]}]}, ["tiers[0] ('obj')", "endpoint_url"]),
        ({"tiers": [{**OBJ, "endpoint_url": [7]}]}, ["tiers[0] ('obj')", "endpoint_url"]),
        ({"tiers": [{**OBJ, "endpoint_url": ["h", "ftp://h"]}]}, ["tiers[0] ('obj')", "endpoint_url", "http"]),
        ({"tiers": [{**OBJ, "endpoint_url": ["h", "https://h"]}]}, ["tiers[0] ('obj')", "endpoint_url", "twice"]),
        ({"tiers": [{**OBJ, "sign_payload": "yes"}]}, ["sign_payload", "'yes'", "'auto'"]),
        ({"tiers": [{**OBJ, "sign_payload": True}]}, ["sign_payload", "True"]),
        ({"tiers": [{**OBJ, "parts": "always"}]}, ["parts", "'always'", "'auto'"]),
        ({"tiers": [{**OBJ, "part_bytes": "4MiB"}]}, ["part_bytes", "4MiB", str(5 << 20)]),
        ({"tiers": [{**OBJ, "operation_timeout_s": 0}]}, ["operation_timeout_s", "is 0"]),
        ({"tiers": [{**OBJ, "operation_timeout_s": float("inf")}]}, ["operation_timeout_s", "inf"]),
        ({"tiers": [{**OBJ, "server_side_encryption": ""}]}, ["server_side_encryption", "''"]),
        ({"tiers": [{**OBJ, "storage_class": 7}]}, ["storage_class", "7"]),
        ({"tiers": [{**OBJ, "access_key": "a"}]}, ["access_key", "without secret_key"]),
        ({"tiers": [{**OBJ, "session_token": "a"}]}, ["session_token", "without access_key"]),
        ({"tiers": [FS], 7: 8}, ["7", "strings"]),
    ],
)
def test_a_wrong_key_is_refused_by_name_value_and_tier(mapping: dict[str, object], told: list[str]) -> None:
    message = refusal(mapping)
    assert all(part in message for part in told), message


def test_a_configuration_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a list"):
        OffloadConfig.from_dict([])  # type: ignore[arg-type]


def test_every_wrong_key_is_told_at_once_with_the_cause_chained() -> None:
    with pytest.raises(ConfigError) as caught:
        make({**FS, "capacity": 0, "n_read_threads": 0}, load_timeout_s=-1)
    assert len(str(caught.value).splitlines()) == 3
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_long_value_is_cut() -> None:
    assert len(refusal({"tiers": [FS], "model": ["x" * 10_000]})) < 300


# Gates


def test_gates_are_on_by_default_and_a_null_turns_one_off() -> None:
    config = make(HOST, {**FS, "backpressure": None}, OBJ)
    assert [tier.backpressure_for(config.backpressure) for tier in config.tiers] == [GATE, None, GATE]


def test_a_tiers_own_gate_is_merged_field_by_field() -> None:
    config = make({**FS, "backpressure": {"high_water_s": 0.5}}, OBJ, backpressure={**GATE, "low_water_s": 0.001})
    fs, obj = (tier.backpressure_for(config.backpressure) for tier in config.tiers)
    assert fs == {**GATE, "low_water_s": 0.001, "high_water_s": 0.5}
    assert obj == {**GATE, "low_water_s": 0.001}


def test_no_common_gate_leaves_only_a_tiers_own() -> None:
    config = make({**FS, "backpressure": {"high_water_s": 0.5}}, OBJ, backpressure=None)
    assert [tier.backpressure_for(config.backpressure) for tier in config.tiers] == [{"high_water_s": 0.5}, None]


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"tiers": [HOST, {**FS, "backpressure": {"high_watr_s": 3}}]}, ["tiers[1] ('fs')", "'high_watr_s'", "3"]),
        ({"tiers": [FS], "backpressure": {"alpha": 7}}, ["tiers[0] ('fs')", "alpha", "7"]),
        ({"tiers": [FS], "backpressure": {"policy_cls": "Nope"}}, ["tiers[0] ('fs')", "'Nope'"]),
        ({"tiers": [FS], "backpressure": "off"}, ["backpressure", "'off'"]),
        ({"tiers": [{**FS, "backpressure": "off"}]}, ["tiers[0] ('fs')", "backpressure", "'off'"]),
    ],
)
def test_a_wrong_gate_is_refused_when_it_is_configured(mapping: dict[str, object], told: list[str]) -> None:
    message = refusal(mapping)
    assert all(part in message for part in told), message


# The load gate


def test_the_load_gate_is_on_and_measures_unless_told_otherwise() -> None:
    assert make().load_gate == LoadGateConfig(prefill_tokens_per_s=None, margin=1.0)
    assert make(load_gate=None).load_gate is None
    config = make({**FS, "load_bytes_per_s": "2GB"}, OBJ, load_gate={"prefill_tokens_per_s": 8000, "margin": 1.5})
    assert config.load_gate == LoadGateConfig(prefill_tokens_per_s=8000.0, margin=1.5)
    assert [tier.load_bytes_per_s for tier in config.tiers if not isinstance(tier, HostTierConfig)] == [2 * 10**9, None]
    assert config.redacted()["load_gate"] == {"prefill_tokens_per_s": 8000.0, "margin": 1.5}


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"tiers": [FS], "load_gate": {"margn": 2}}, ["load_gate", "'margn'", "2", "'margin'"]),
        ({"tiers": [FS], "load_gate": {"margin": 0}}, ["load_gate: margin is 0", "greater than 0"]),
        ({"tiers": [FS], "load_gate": {"margin": True}}, ["load_gate: margin is True"]),
        ({"tiers": [FS], "load_gate": {"prefill_tokens_per_s": "fast"}}, ["prefill_tokens_per_s is 'fast'"]),
        ({"tiers": [FS], "load_gate": "off"}, ["load_gate is 'off'"]),
        ({"tiers": [FS], "load_gat": None}, ["'load_gat'", "'load_gate'"]),
        ({"tiers": [{**FS, "load_bytes_per_s": 0}]}, ["tiers[0] ('fs')", "load_bytes_per_s", "is 0"]),
        ({"tiers": [{**HOST, "load_bytes_per_s": 9}]}, ["tiers[0] ('host')", "unknown key 'load_bytes_per_s'"]),
    ],
)
def test_a_wrong_load_gate_is_refused_by_name_and_value(mapping: dict[str, object], told: list[str]) -> None:
    message = refusal(mapping)
    assert all(part in message for part in told), message


# Secrets


def secretive() -> OffloadConfig:
    return make(
        {**OBJ, "access_key": SECRETS[0], "secret_key": SECRETS[1], "session_token": SECRETS[2]},
        {**OBJ, "endpoint_url": f"https://someone:{SECRETS[4]}@s3.example"},
        salt=SECRETS[3],
    )


def test_no_secret_is_in_any_text_of_a_configuration() -> None:
    config = secretive()
    texts = [
        repr(config),
        str(config),
        repr(config.model_dump()),
        config.model_dump_json(),
        json.dumps(config.redacted()),
        *(f"{tier!r} {tier} {tier.model_dump()!r}" for tier in config.tiers),
    ]
    for text in texts:
        assert not [secret for secret in SECRETS if secret in text]


def test_redacted_shows_what_is_in_force() -> None:
    config = make(HOST, {**FS, "backpressure": None}, salt=SECRETS[3])
    shown = json.loads(json.dumps(config.redacted()))
    assert [tier["backpressure"] for tier in shown["tiers"]] == [GATE, None]
    assert (shown["tokens_per_chunk"], shown["salt"]) == (256, "**********")


SECRET = "Sup3rSecretOfTests"


@pytest.mark.parametrize(
    "mapping",
    [
        {"tiers": [FS], "secret_key": SECRET},
        {"tiers": [FS], "sekret_key": SECRET},
        {"tiers": [FS], "slat": SECRET},
        {"tiers": [FS], "salt": [SECRET]},
        {"tiers": [FS], "salt": {"a": SECRET}},
        {"tiers": [FS], "password": 0, "unknown": {"deep": [{"api_key": SECRET}]}},
        {"tiers": [FS], "whatever": f"https://me:{SECRET}@host/x"},
        {"tiers": [FS], "whatever": "AKIAIOSFODNN7EXAMPLEX"},
        {"tiers": [FS], "load_gate": {"api_key": SECRET}},
        {"tiers": [{**OBJ, "acess_key": SECRET}]},
        {"tiers": [{**OBJ, "access_key": SECRET}]},
        {"tiers": [{**OBJ, "secret_key": SECRET, "access_key": 5}]},
        {"tiers": [{**OBJ, "secret_key": SECRET, "access_key": "a", "region": [SECRET]}]},
        {"tiers": [{**OBJ, "secret_key": SECRET, "access_key": "a", SECRET: 1}], "verify": 3},
        {"tiers": [{**OBJ, "bucket": {"secret_key": SECRET}}]},
        {"tiers": [{**OBJ, "endpoint_url": f"https://me:{SECRET}@h/?x=1"}]},
        {"tiers": [{**OBJ, "endpoint_url": f"https://me:{SECRET}@h:port"}]},
        {"tiers": [{**OBJ, "endpoint_url": f"https://me:{SECRET}@h", "access_key": "a", "secret_key": "b"}]},
        {"tiers": [{**OBJ, "endpoint_url": f"ftp://me:{SECRET}@h"}]},
        {"tiers": [{**OBJ, "endpoint_url": ["h", f"https://me:{SECRET}@h/?x=1"]}]},
        {"tiers": [{**OBJ, "endpoint_url": [f"https://me:{SECRET}@a", "https://you:pw@b"]}]},
        {"tiers": [{**OBJ, "endpoint_url": [f"https://me:{SECRET}@h", f"https://me:{SECRET}@h"]}]},
        {"tiers": [{**OBJ, "endpoint_url": [f"https://me:{SECRET}@h", 7]}]},
        {"tiers": [{**OBJ, "endpoint_url": [f"https://me:{SECRET}@h", ""]}]},
        {"tiers": [{**OBJ, "endpoint_url": {"a": f"https://me:{SECRET}@h"}}]},
        {"tiers": [{**OBJ, "endpoint_url": f"https://me:{SECRET}/x@h"}]},
        {"tiers": [{**OBJ, "endpoint_url": f"https://me:#{SECRET}@h"}]},
        {"tiers": [{**OBJ, "backpressure": {"secret_key": SECRET, "alpha": SECRET}}]},
        {"tiers": [{"type": SECRET, "secret_key": SECRET}]},
        {"secondary_tiers": [{"type": "obj", "store_config": {"bucket": "b", "secrt_key": SECRET}}]},
        {"secondary_tiers": [{"type": "obj", "store_config": {"bucket": [{"token": SECRET}], "secret_key": SECRET}}]},
        {"secondary_tiers": [{"type": "obj", "store_config": [{"token": SECRET}]}]},
        {"secondary_tiers": {"salt": SECRET}},
    ],
)
def test_no_refusal_shows_a_secret(mapping: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(mapping)
    shown = "".join(traceback.format_exception(caught.value))
    assert "ConfigError" in shown
    assert SECRET not in shown
    assert "AKIAIOSFODNN7EXAMPLEX" not in shown


def test_only_the_secrets_among_the_known_keys_are_masked() -> None:
    known = {
        key
        for model in (OffloadConfig, LoadGateConfig, HostTierConfig, FsTierConfig, ObjTierConfig)
        for key in model.model_fields
    }
    assert {key for key in known if is_secret_key(key)} == {"access_key", "secret_key", "session_token", "salt"}


def test_a_misplaced_value_that_is_no_secret_is_shown() -> None:
    assert "'hello'" in refusal({"tiers": [FS], "wrong": "hello"})


# The prose

FIELDS = [
    pytest.param(name, field, id=f"{model.__name__}.{name}")
    for model in (OffloadConfig, LoadGateConfig, TierConfig, HostTierConfig, FsTierConfig, ObjTierConfig)
    for name, field in model.model_fields.items()
]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_each_field_says_its_real_default_and_its_unit(name: str, field: object) -> None:
    from pydantic.fields import FieldInfo

    assert isinstance(field, FieldInfo)
    text = field.description or ""
    if field.is_required():
        assert "No default" in text
    elif field.default_factory is not None:
        assert all(f"{word}" in text for word in GATE.values())
    elif name == "type":
        assert f'Always "{field.default}"' in text
    else:
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert f"Default {default}" in text
    if name.endswith("_per_s"):
        assert "per second" in text
    elif name.endswith("_s"):
        assert "Seconds" in text
    if name.endswith("_bytes") or name == "capacity":
        assert "Bytes" in text


def test_vllms_whole_transfer_configuration_is_refused_with_the_key_to_take():
    with pytest.raises(ConfigError, match="what stands in it under 'kv_connector_extra_config'"):
        OffloadConfig.from_dict({"kv_connector": "SluiceConnector", "kv_connector_extra_config": {"tiers": []}})
