"""What a connector is configured with: frozen, typed, refused as a whole when one key is wrong.

The same dict serves every front: `OffloadConfig.from_dict`, a JSON or TOML file, and vLLM's
`kv_connector_extra_config`, whether it was written for this package or for vLLM's own tiering
(`kvsluice.connector.config_compat` translates the latter). Every error is a `ConfigError` that
names the key, its value and the tier it stands in; no secret is in any of them, nor in a `repr`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from kvsluice.connector.config_compat import TIER_KEYS, TOP_KEYS, translate
from kvsluice.connector.config_errors import KnownKeys, Origin, config_error, scrub
from kvsluice.connector.config_tiers import (
    TIER_TYPES,
    AnyTierConfig,
    Count,
    FsTierConfig,
    Gate,
    HostTierConfig,
    Model,
    ObjTierConfig,
    Positive,
    Seconds,
    Secret,
    Size,
    Text,
    TierConfig,
    TriState,
    check_ladder,
    parse_size,
)
from kvsluice.kernels.movers import MIN_STAGING_BYTES, STAGING_BYTES
from kvsluice.kernels.ways import CopySetting
from kvsluice.tiers.backpressure.config import build_gate
from kvsluice.tiers.errors import ConfigError

__all__ = [
    "AnyTierConfig",
    "FsTierConfig",
    "HostTierConfig",
    "LoadGateConfig",
    "ObjTierConfig",
    "OffloadConfig",
    "TierConfig",
    "parse_size",
]

_log = logging.getLogger(__name__)


def _default_gate() -> dict[str, JsonValue]:
    return {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "ThrottledDropPolicy"}


class LoadGateConfig(Model):
    """When a hit is not used because the engine computes it sooner."""

    prefill_tokens_per_s: Positive | None = Field(
        None,
        description="Tokens of prompts that the engine computes per second. Default None: what the engine tells, live; "
        "one that never does uses every hit.",
    )
    margin: Positive = Field(
        1.0,
        description="How many times as long as computing a load may take, a factor. Default 1.0: what gives the first "
        "token sooner. Above it the engine's computing is spared at the price of some waiting.",
    )


class OffloadConfig(Model):
    """Everything a connector is configured with. Immutable, picklable, free to share between threads."""

    tiers: Annotated[
        tuple[Annotated[AnyTierConfig, Field(discriminator="type")], ...], AfterValidator(check_ladder)
    ] = Field(description="The tiers, fastest first; a host tier only as the first. No default.")
    tokens_per_chunk: Count = Field(
        256,
        description="Tokens in one unit of storage, rounded to whole blocks. Default 256: for most "
        "models megabytes, where a disk's and a request's fixed costs no longer show.",
    )
    blocks_per_chunk: Count | None = Field(
        None, description="The same said in blocks; not beside tokens_per_chunk. Default None: tokens_per_chunk counts."
    )
    staging_bytes: Size = Field(
        2**30,
        description='Bytes, or "1GiB", of pinned memory for chunks in transit, per node and engine. Default 1073741824 '
        "(1 GiB): enough in flight to keep a fast disk busy, and little beside a node's memory.",
    )
    backpressure: Gate = Field(
        default_factory=_default_gate,
        description="The gate of every tier that does not say otherwise: a detector, a policy and their arguments. "
        "Default EMABackpressureDetector with ThrottledDropPolicy and the marks of the tier's kind; null: no gates.",
    )
    load_gate: LoadGateConfig | None = Field(
        LoadGateConfig(),
        description="Weighs loading a hit against computing it, and leaves a slower hit unused. Default "
        "prefill_tokens_per_s=None margin=1.0: on, both sides measured; null uses every hit.",
    )
    load_timeout_s: Seconds = Field(
        10.0,
        description="Seconds after which a load is a miss, where its caller names no deadline. Default 10.0: recompute "
        "of a long prompt takes less.",
    )
    lookup_timeout_s: Seconds = Field(
        1.0,
        description="Seconds a lookup may stay pending before it counts as not held. Default 1.0: a request should "
        "not wait longer to learn that it must prefill.",
    )
    negative_ttl_s: Seconds = Field(
        5.0,
        description='Seconds for which a tier\'s "not held" is believed; where it failed or was late, 1 at most. '
        "Default 5.0: another engine's new chunk is seen soon, and a cold prompt does not ask again at every step.",
    )
    verify: StrictBool = Field(
        True,
        description="Check every loaded chunk's checksum. Default True: a load returns what was stored, or misses.",
    )
    offload_prompt_only: StrictBool = Field(
        False,
        description="Store the prompt's chunks alone, not those of generated tokens. Default False: the next turn of a "
        "conversation starts with them.",
    )
    salt: Secret | None = Field(
        None, description="Keeps tenants apart: no hit across two salts. Default None: all share one namespace."
    )
    model: Text | None = Field(
        None, description="Model name that the namespace counts. Default None: what the engine says."
    )
    model_revision: Text | None = Field(
        None, description="Model revision that the namespace counts. Default None: what the engine says."
    )
    weights_version: StrictInt | Text | None = Field(
        None,
        union_mode="left_to_right",
        description="Version of weights that change in place; bump it and no older chunk is served. Default None: the "
        "weights do not change.",
    )
    pin_memory: TriState = Field(
        "auto",
        description='Page-lock the host region: "on" fails where it is refused, "off" never does. Default "auto": '
        "where there is a device to copy from, else pageable with a warning.",
    )
    device_copy: CopySetting = Field(
        "auto",
        description='How chunks pass between a GPU and host memory: "batched" (the driver\'s batched copy), "triton" '
        '(a kernel, and staging on the device) or "torch"; one that cannot be had is an error. Default "auto": each is '
        "measured at start, and the fastest that leaves the GPU to the engine is taken.",
    )
    device_staging_bytes: Annotated[Size, Field(ge=MIN_STAGING_BYTES)] = Field(
        STAGING_BYTES,
        description="Bytes of GPU memory through which small pages go, per rank; 1 MiB at least. Default 67108864 "
        "(64 MiB): four pieces of 8 MiB for each direction, so that the link never waits.",
    )

    @model_validator(mode="after")
    def _one_chunk_size(self) -> OffloadConfig:
        if self.blocks_per_chunk is not None and "tokens_per_chunk" in self.model_fields_set:
            raise ValueError(
                f"tokens_per_chunk {self.tokens_per_chunk} and blocks_per_chunk {self.blocks_per_chunk} "
                "are both given: they say the same thing, keep one"
            )
        return self

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> OffloadConfig:
        """The configuration that `mapping` describes; `mapping` itself is left as it is.

        Keys of vLLM's own tiering configuration are understood; those that have no effect here are
        named in one logged warning.

        Raises:
            ConfigError: any key that is unknown or wrong, a gate's too.
        """
        if "kv_connector_extra_config" in mapping:
            raise ConfigError(
                "this is vLLM's kv-transfer-config: the configuration is what stands in it under "
                "'kv_connector_extra_config'"
            )
        translation = translate(mapping)
        try:
            config = cls.model_validate(translation.values)
        except ValidationError as error:
            told = config_error(error, translation.origin, _KNOWN_KEYS)
            raise told from _presentable(error, translation.origin)
        for index, tier in enumerate(config.tiers):
            locality = None if isinstance(tier, HostTierConfig) else tier.locality
            try:
                build_gate(tier.backpressure_for(config.backpressure), tier_type=tier.type, locality=locality)
            except ConfigError as error:
                text = scrub(str(error), translation.origin.secrets)
                message = f"{translation.origin.tier_label(index)}: {text}"
                raise ConfigError(message) from _presentable(error, translation.origin)
        if translation.notes:
            _log.warning("configuration: %s", "; ".join(translation.notes))
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> OffloadConfig:
        """The configuration in a JSON file, or in a TOML file where its name ends in `.toml`.

        Raises:
            ConfigError: the file cannot be read or parsed, or what is in it is wrong; names the path.
        """
        try:
            values = _parse_file(Path(path))
        except (OSError, ValueError) as error:  # both parsers' errors, and bad UTF-8, are ValueErrors
            raise ConfigError(f"configuration file {str(path)!r}: {error}") from error
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"configuration file {str(path)!r}: {error}") from error

    def blocks_per_chunk_for(self, tokens_per_block: int) -> int:
        """Blocks in a chunk for an engine with `tokens_per_block`: the nearest whole number, at least 1.

        Raises:
            ConfigError: `tokens_per_block` below 1.
        """
        if tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block is {tokens_per_block}: it must be at least 1")
        if self.blocks_per_chunk is not None:
            return self.blocks_per_chunk
        return max(1, (2 * self.tokens_per_chunk + tokens_per_block) // (2 * tokens_per_block))

    def redacted(self) -> dict[str, object]:
        """What is in force, as JSON values for a log: secrets masked, each tier's gate as merged."""
        shown: dict[str, object] = self.model_dump(mode="json", exclude={"tiers"})
        shown["tiers"] = [
            {**tier.model_dump(mode="json"), "backpressure": tier.backpressure_for(self.backpressure)}
            for tier in self.tiers
        ]
        return shown


_KNOWN_KEYS: Final = KnownKeys(
    top=(*OffloadConfig.model_fields, *TOP_KEYS),
    tiers={tier_type: (*model.model_fields, *TIER_KEYS.get(tier_type, ())) for tier_type, model in TIER_TYPES.items()},
    nested={"load_gate": tuple(LoadGateConfig.model_fields)},
)


def _presentable(error: Exception, origin: Origin) -> Exception | None:
    """`error` as a cause to chain; `None` where its own message would print a secret below ours."""
    return error if scrub(str(error), origin.secrets) == str(error) else None


def _parse_file(path: Path) -> dict[str, object]:
    if path.suffix == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib

            with path.open("rb") as stream:
                return dict(tomllib.load(stream))
        raise ConfigError("TOML needs Python 3.11 or newer: write it as JSON")
    values: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    if not isinstance(values, dict):
        raise ValueError(f"holds a {type(values).__name__}, not an object")
    return values


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice in one object")
    return values
