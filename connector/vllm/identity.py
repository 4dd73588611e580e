"""Who computes the KV, read off vLLM's configuration; and what of that configuration we refuse."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsluice.connector.config import HostTierConfig, OffloadConfig
from kvsluice.connector.namespace import Fact, ModelIdentity, weights_digest
from kvsluice.tiers.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["check_supported", "model_identity"]

_STABLE_HASHES = ("sha256", "sha256_cbor")


def check_supported(config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse at start what would give wrong bytes, errors or no hits later.

    Raises:
        ConfigError: names the setting, its value, and what would do.
    """
    transfer = vllm_config.kv_transfer_config
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a missed load would end its request with an error; "
            'add "kv_load_failure_policy":"recompute" to --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}: this connector stores and loads, so it must be "kv_both"')
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups ({kinds}): models with one group of full attention "
            "are supported"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode is on: it would take the KV cache away under a running copy, and is not supported"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        raise ConfigError(
            f"world_size is {parallel.world_size} (tensor parallel {parallel.tensor_parallel_size}, pipeline "
            f"parallel {parallel.pipeline_parallel_size}): one rank is supported"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    shared = any(not isinstance(tier, HostTierConfig) for tier in config.tiers)
    if shared and algorithm not in _STABLE_HASHES and not os.environ.get("PYTHONHASHSEED"):
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose keys differ from process to process, so no chunk "
            "would be found again: use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED"
        )


def model_identity(vllm_config: VllmConfig) -> ModelIdentity:
    """Everything in vLLM's configuration that changes the bytes under a key, but for the layout."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    kv_dtype = cache.cache_dtype if cache.cache_dtype != "auto" else str(model.dtype)
    return ModelIdentity(
        name=model.model,
        # A hub model without a pinned revision: the commit that its configuration was loaded from.
        revision=model.revision or getattr(model.hf_config, "_commit_hash", None),
        weights_digest=weights_digest(model.model),
        attention_facts=_attention_facts(model.hf_text_config.to_dict()),
        kv_dtype=kv_dtype,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        prefill_context_parallel=getattr(parallel, "prefill_context_parallel_size", 1),
        decode_context_parallel=getattr(parallel, "decode_context_parallel_size", 1),
        hash_facts={
            "algorithm": cache.prefix_caching_hash_algo,
            "seed": os.environ.get("PYTHONHASHSEED") if cache.prefix_caching_hash_algo not in _STABLE_HASHES else None,
            "model_dtype": str(model.dtype),
            "quantization": model.quantization,
        },
    )


def _attention_facts(text_config: Mapping[str, object]) -> dict[str, Fact]:
    """The text model's whole config, less what only names things: more than attention, and never less."""
    left_out = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache")
    return {name: _fact(value) for name, value in text_config.items() if name not in left_out}


def _fact(value: object) -> Fact:
    if isinstance(value, float) and not math.isfinite(value):
        # Some configurations hold an infinity; the namespace's encoding takes finite numbers alone.
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): _fact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_fact(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    return repr(value)
