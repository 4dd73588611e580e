"""vLLM's own tiering configuration, said in our keys.

A `kv_connector_extra_config` that was written for vLLM's `TieringOffloadingSpec` is taken as it
is. What it says about tiers is translated; what tunes vLLM's own machinery is accepted, and named
in one note where it has no effect here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvsluice.connector.config_errors import Origin, Path, show, unknown_key
from kvsluice.tiers.errors import ConfigError

__all__ = ["STORE_CONFIG_KEYS", "TIER_KEYS", "TOP_KEYS", "Translation", "translate"]

_NO_EFFECT_TOP: Final = (
    "spec_name",
    "spec_module_path",
    "module_path",
    "store_threshold",
    "self_describing_kv_events",
    "enable_kv_events",
    "sync_load_budget_bytes",
    "tier_poll_interval_s",
    "canonical_layout",
    "cache_policy_module_path",
    "max_tracker_size",
)
_NO_EFFECT_TIER: Final = ("module_path", "enable_kv_events")

TOP_KEYS: Final = ("cpu_bytes_to_use", "block_size", "eviction_policy", "secondary_tiers", *_NO_EFFECT_TOP)
"""vLLM's keys beside its tiers that this module understands."""
TIER_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "fs": _NO_EFFECT_TIER,
    "obj": ("store_config", "io_threads", *_NO_EFFECT_TIER),
}
"""vLLM's keys within a tier, by tier type."""
STORE_CONFIG_KEYS: Final = (
    "bucket",
    "endpoint_override",
    "scheme",
    "access_key",
    "secret_key",
    "session_token",
    "region",
    "ca_bundle",
)
"""The keys of an object tier's `store_config`."""


@dataclass(frozen=True)
class Translation:
    """A configuration in our keys, and what to tell about how it got there."""

    values: dict[str, object]
    origin: Origin
    notes: tuple[str, ...]


@dataclass
class _Work:
    """What is gathered on the way; one per `translate`."""

    secrets: frozenset[str]
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    names: dict[Path, str] = field(default_factory=dict)


def translate(mapping: Mapping[str, object]) -> Translation:
    """Say `mapping` in our keys alone; a mapping that already is comes back equal.

    Raises:
        ConfigError: the same thing said twice, or a value of vLLM's that has no counterpart.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a configuration is a mapping of keys to values, not a {type(mapping).__name__}")
    values = dict(mapping)
    work = _Work(secrets=Origin.secrets_in(mapping))
    _translate_eviction(values, work)
    work.ignored += [key for key in _NO_EFFECT_TOP if key in values]
    for key in _NO_EFFECT_TOP:
        values.pop(key, None)
    block_size = values.pop("block_size", None)
    if block_size is not None:
        for key in ("tokens_per_chunk", "blocks_per_chunk"):
            if values.get(key) is not None:
                raise ConfigError(f"configuration: block_size and {key} are both given: they say the same, keep one")
        values["tokens_per_chunk"] = block_size
        work.names["tokens_per_chunk",] = "block_size"
    _translate_tiers(values, work)
    if work.ignored:
        work.notes.insert(0, f"these keys have no effect here: {', '.join(work.ignored)}")
    return Translation(
        values=values,
        origin=Origin(tier_labels=tuple(work.labels), names=work.names, secrets=work.secrets),
        notes=tuple(work.notes),
    )


def _translate_eviction(values: dict[str, object], work: _Work) -> None:
    policy = values.pop("eviction_policy", None)
    if policy is None or policy == "lru":
        return
    if policy == "arc" or "cache_policy_module_path" in values:
        work.notes.append(f"eviction_policy {show('eviction_policy', policy, work.secrets)} is not here, lru is used")
        return
    shown = show("eviction_policy", policy, work.secrets)
    raise ConfigError(f"configuration: eviction_policy is {shown}: known are 'lru' and, served as lru, 'arc'")


def _translate_tiers(values: dict[str, object], work: _Work) -> None:
    """Put `tiers` together from what is there: ours, or vLLM's host memory and secondary tiers."""
    secondary = values.pop("secondary_tiers", None)
    cpu_bytes = values.pop("cpu_bytes_to_use", None)
    if secondary is not None and "tiers" in values:
        raise ConfigError("configuration: tiers and secondary_tiers are both given: put all of them into tiers")
    listed, word = (values.get("tiers"), "tiers") if secondary is None else (secondary, "secondary_tiers")
    if listed is None and cpu_bytes is not None:
        listed = []
    if not isinstance(listed, (list, tuple)):
        if secondary is not None or cpu_bytes is not None:
            raise ConfigError(
                f"configuration: {word} is {show(word, listed, work.secrets)}: it must be a list of tiers"
            )
        return
    tiers: list[object] = []
    if cpu_bytes is not None:
        if any(isinstance(tier, Mapping) and tier.get("type") == "host" for tier in listed):
            raise ConfigError("configuration: cpu_bytes_to_use and a host tier are both given: keep the tier")
        if isinstance(cpu_bytes, float) and math.isfinite(cpu_bytes):
            cpu_bytes = int(cpu_bytes)  # vLLM multiplies GiB by a float, and cuts off what is not whole
        tiers.append({"type": "host", "capacity": cpu_bytes})
        work.labels.append("configuration")
        work.names["tiers", 0, "capacity"] = "cpu_bytes_to_use"
    for index, tier in enumerate(listed):
        label = f"{word}[{index}]"
        if isinstance(tier, Mapping):
            if isinstance(tier_type := tier.get("type"), str):
                label += f" ({show('type', tier_type, work.secrets)})"
            tier = _translate_tier(tier, len(tiers), label, work)  # noqa: PLW2901 - the same tier, in our words
        work.labels.append(label)
        tiers.append(tier)
    values["tiers"] = tiers


def _translate_tier(tier: Mapping[str, object], position: int, label: str, work: _Work) -> dict[str, object]:
    values = dict(tier)
    if values.get("type") not in TIER_KEYS:
        return values
    for key in _NO_EFFECT_TIER:
        if key in values:
            del values[key]
            work.ignored.append(f"{key} of {label}")
    if values["type"] == "obj":
        io_threads = values.pop("io_threads", None)
        if io_threads is not None:
            # vLLM's threads serve both directions: either may have them all, so neither gets fewer here.
            for key in ("n_read_threads", "n_write_threads"):
                _set(values, key, io_threads, "io_threads", position, label, work)
        if "store_config" in values:
            _translate_store(values, values.pop("store_config"), position, label, work)
    return values


def _set(
    values: dict[str, object], key: str, value: object, source: str, position: int, label: str, work: _Work
) -> None:
    if values.get(key) is not None:
        raise ConfigError(f"{label}: {source} and {key} are both given: they say the same, keep one")
    values[key] = value
    work.names["tiers", position, key] = source


def _translate_store(values: dict[str, object], store: object, position: int, label: str, work: _Work) -> None:
    if not isinstance(store, Mapping):
        raise ConfigError(f"{label}: store_config is {show('store_config', store, work.secrets)}: it must be a mapping")
    for key, value in store.items():
        if key not in STORE_CONFIG_KEYS:
            where = f"{label}: store_config"
            raise ConfigError(unknown_key(where, str(key), value, STORE_CONFIG_KEYS, work.secrets))
    # vLLM reads an empty string as "not given".
    given = {key: value for key, value in store.items() if value not in ("", None)}
    scheme = given.pop("scheme", None)
    if scheme not in (None, "http", "https"):
        raise ConfigError(f"{label}: store_config.scheme is {show('scheme', scheme, work.secrets)}: http or https")
    endpoint = given.pop("endpoint_override", None)
    if isinstance(endpoint, str) and "://" not in endpoint:
        if scheme is None:
            work.notes.append(
                f"{label}: endpoint_override names no scheme, https is used; say scheme http for a store without TLS"
            )
        endpoint = f"{scheme or 'https'}://{endpoint}"
    if endpoint is not None:
        _set(values, "endpoint_url", endpoint, "store_config.endpoint_override", position, label, work)
    for key, value in given.items():
        _set(values, key, value, f"store_config.{key}", position, label, work)
