"""A configuration written for vLLM's own tiering: taken as it is, and what cannot be is refused."""

from __future__ import annotations

import logging

import pytest

from kvsluice.connector.config import HostTierConfig, ObjTierConfig, OffloadConfig
from kvsluice.tiers.errors import ConfigError

HOST: dict[str, object] = {"type": "host", "capacity": "8GiB"}
FS: dict[str, object] = {"type": "fs", "root_dir": "/mnt/kv"}
OBJ: dict[str, object] = {"type": "obj", "bucket": "kv"}
GATE = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "ThrottledDropPolicy"}


def make(*tiers: dict[str, object], **top: object) -> OffloadConfig:
    return OffloadConfig.from_dict({"tiers": list(tiers), **top})


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(mapping)
    return str(caught.value)


def test_a_configuration_of_vllms_own_tiering_works_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvsluice"):
        config = OffloadConfig.from_dict(
            {
                "cpu_bytes_to_use": 10737418240,
                "block_size": 64,
                "eviction_policy": "lru",
                "backpressure": GATE,
                "offload_prompt_only": True,
                "secondary_tiers": [
                    {
                        "type": "fs",
                        "root_dir": "/mnt/kv",
                        "n_read_threads": 16,
                        "n_write_threads": 12,
                        "locality": "REMOTE",
                        "backpressure": {"high_water_s": 0.2},
                    },
                    {
                        "type": "obj",
                        "prefix": "team-a",
                        "io_threads": 6,
                        "store_config": {
                            "bucket": "kv",
                            "endpoint_override": "s3.example:9000",
                            "scheme": "http",
                            "access_key": "a",
                            "secret_key": "s",
                            "session_token": "",
                            "region": "eu-1",
                            "ca_bundle": "",
                        },
                    },
                ],
            }
        )
    expected = make(
        {"type": "host", "capacity": 10737418240},
        {
            **FS,
            "n_read_threads": 16,
            "n_write_threads": 12,
            "locality": "REMOTE",
            "backpressure": {"high_water_s": 0.2},
        },
        {
            **OBJ,
            "prefix": "team-a",
            "endpoint_url": "http://s3.example:9000",
            "access_key": "a",
            "secret_key": "s",
            "region": "eu-1",
            "n_read_threads": 6,
            "n_write_threads": 6,
        },
        tokens_per_chunk=64,
        offload_prompt_only=True,
    )
    assert config == expected
    assert not caplog.records


def test_host_memory_alone_is_a_configuration_of_vllms() -> None:
    # vLLM turns its kv_offloading_size, in GiB, into a float.
    config = OffloadConfig.from_dict({"cpu_bytes_to_use": 0.3 * 2**30, "blocks_per_chunk": 4})
    assert [tier.type for tier in config.tiers] == ["host"]
    assert isinstance(config.tiers[0], HostTierConfig)
    assert config.tiers[0].capacity == int(0.3 * 2**30)
    assert config.blocks_per_chunk_for(16) == 4


def test_keys_without_effect_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ignored = {
        "spec_name": "TieringOffloadingSpec",
        "spec_module_path": "m",
        "module_path": "m",
        "store_threshold": 2,
        "self_describing_kv_events": True,
        "enable_kv_events": True,
        "sync_load_budget_bytes": 1,
        "tier_poll_interval_s": 0.1,
        "canonical_layout": True,
        "cache_policy_module_path": "m",
        "max_tracker_size": 9,
    }
    with caplog.at_level(logging.INFO, logger="kvsluice"):
        OffloadConfig.from_dict(
            {
                **ignored,
                "cpu_bytes_to_use": 4096,
                "eviction_policy": "arc",
                "secondary_tiers": [{**FS, "module_path": "m", "enable_kv_events": True}],
            }
        )
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for key in (*ignored, "eviction_policy 'arc'", "enable_kv_events of secondary_tiers[0] ('fs')"):
        assert key in record.getMessage()


def test_an_endpoint_without_a_scheme_is_https_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvsluice"):
        config = OffloadConfig.from_dict(
            {"secondary_tiers": [{"type": "obj", "store_config": {"bucket": "kv", "endpoint_override": "h:9000"}}]}
        )
    assert isinstance(config.tiers[0], ObjTierConfig)
    assert config.tiers[0].endpoint_url == "https://h:9000"
    (record,) = caplog.records
    assert "secondary_tiers[0] ('obj'): endpoint_override names no scheme" in record.getMessage()


def test_an_endpoint_that_says_its_scheme_keeps_it() -> None:
    store = {"bucket": "kv", "endpoint_override": "http://h:9000", "scheme": "https"}
    (tier,) = OffloadConfig.from_dict({"secondary_tiers": [{"type": "obj", "store_config": store}]}).tiers
    assert isinstance(tier, ObjTierConfig)
    assert tier.endpoint_url == "http://h:9000"


def test_vllms_keys_work_beside_our_tiers() -> None:
    config = OffloadConfig.from_dict({"cpu_bytes_to_use": 4096, "tiers": [FS], "block_size": 32})
    assert config == make({"type": "host", "capacity": 4096}, FS, tokens_per_chunk=32)


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"tiers": [FS], "secondary_tiers": []}, ["tiers and secondary_tiers"]),
        ({"tiers": [HOST], "cpu_bytes_to_use": 1}, ["cpu_bytes_to_use and a host tier"]),
        ({"secondary_tiers": [HOST], "cpu_bytes_to_use": 1}, ["cpu_bytes_to_use and a host tier"]),
        ({"cpu_bytes_to_use": 0}, ["cpu_bytes_to_use is 0"]),
        ({"cpu_bytes_to_use": "lots"}, ["cpu_bytes_to_use is 'lots'"]),
        ({"tiers": [FS], "block_size": -1}, ["block_size is -1"]),
        ({"tiers": [FS], "block_size": 1, "blocks_per_chunk": 1}, ["block_size and blocks_per_chunk"]),
        ({"tiers": [FS], "block_size": 1, "tokens_per_chunk": 1}, ["block_size and tokens_per_chunk"]),
        ({"secondary_tiers": {"type": "fs"}}, ["secondary_tiers", "list"]),
        ({"cpu_bytes_to_use": 9, "tiers": 3}, ["tiers is 3"]),
        ({"secondary_tiers": [FS, {"type": "p2p"}]}, ["secondary_tiers[1] ('p2p')", "'host', 'fs', 'obj'"]),
        ({"secondary_tiers": [{"type": "Mine", "module_path": "a.b"}]}, ["unknown tier type 'Mine'"]),
        ({"secondary_tiers": [{**FS, "io_threads": 3}]}, ["secondary_tiers[0] ('fs')", "'io_threads'"]),
        ({"secondary_tiers": [{**OBJ, "io_threads": 0}]}, ["io_threads is 0"]),
        ({"secondary_tiers": [{**OBJ, "io_threads": 1, "n_read_threads": 1}]}, ["io_threads and n_read_threads"]),
        ({"secondary_tiers": [{**OBJ, "store_config": 3}]}, ["store_config is 3"]),
        ({"secondary_tiers": [{**OBJ, "store_config": {"bucket": "x"}}]}, ["store_config.bucket and bucket"]),
        ({"secondary_tiers": [{**OBJ, "store_config": {"regionn": "x"}}]}, ["store_config", "'regionn'", "'region'"]),
        ({"secondary_tiers": [{"type": "obj", "store_config": {"bucket": 3}}]}, ["store_config.bucket is 3"]),
        ({"secondary_tiers": [{**OBJ, "store_config": {"scheme": "s3"}}]}, ["store_config.scheme is 's3'"]),
        ({"tiers": [FS], "eviction_policy": "fifo"}, ["eviction_policy is 'fifo'", "'lru'"]),
    ],
)
def test_what_of_vllms_cannot_be_is_refused(mapping: dict[str, object], told: list[str]) -> None:
    message = refusal(mapping)
    assert all(part in message for part in told), message
