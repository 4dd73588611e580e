"""From configuration to the objects that do the work: tiers, gates, and the geometry both halves share."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from kvsluice.connector.account import PlannedTier
from kvsluice.connector.books import PlannerSettings, slot_share
from kvsluice.connector.config import AnyTierConfig, FsTierConfig, HostTierConfig, ObjTierConfig, OffloadConfig
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.load_gate import LoadGate, LoadTier
from kvsluice.connector.namespace import Fact, ModelIdentity, Namespace, weights_digest
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.worker import RankWorker, WorkerTier
from kvsluice.kernels.device import Device
from kvsluice.tiers.backpressure import build_gate
from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import FORMAT_VERSION, ChunkFormat
from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.host import HostTier
from kvsluice.tiers.obj import ObjectTier

__all__ = [
    "Geometry",
    "Rank",
    "build_tiers",
    "chunk_format",
    "geometry_for",
    "listing_times_s",
    "load_gate_for",
    "namespace_for",
    "open_rank",
    "open_tier",
    "planned_tiers",
    "worker_tiers",
]

_log = logging.getLogger(__name__)

_TIER_CLASSES: Final[Mapping[str, type[Tier]]] = {
    tier.tier_type: tier for tier in (HostTier, FileSystemTier, ObjectTier)
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What planner and workers must agree on; small, picklable, compared across ranks.

    Attributes:
        namespace: hex digest of the namespace.
        facts: its preimage, free of secrets, as written to `namespace.json`.
        num_slots: slots of the pinned region; host_slots of them may hold chunks.
    """

    namespace: str
    facts: Mapping[str, object]
    blocks_per_chunk: int
    tokens_per_block: int
    num_blocks: int
    payload_bytes: int
    slot_bytes: int
    num_slots: int
    host_slots: int

    def settings(self, config: OffloadConfig, *, num_ranks: int = 1) -> PlannerSettings:
        """The planner's bounds for this geometry."""
        return PlannerSettings(
            blocks_per_chunk=self.blocks_per_chunk,
            num_blocks=self.num_blocks,
            chunk_bytes=self.payload_bytes,
            slot_bytes=self.slot_bytes,
            num_slots=self.num_slots,
            host_slots=self.host_slots,
            num_ranks=num_ranks,
            load_timeout_s=config.load_timeout_s,
            lookup_timeout_s=config.lookup_timeout_s,
            negative_ttl_s=config.negative_ttl_s,
        )


def namespace_for(config: OffloadConfig, layout: KVLayout, model: ModelIdentity | None) -> Namespace:
    """The namespace of `layout` under `config`; the configuration's model and revision win over the engine's.

    Raises:
        ConfigError: the weights of a model that is a local folder could not be read.
    """
    if model is None:
        model = _model_of(config, layout)
    model = replace(model, name=config.model or model.name, revision=config.model_revision or model.revision)
    blocks_per_chunk = config.blocks_per_chunk_for(layout.tokens_per_block)
    return Namespace.build(
        layout_facts=cast("dict[str, Fact]", layout.facts()),
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_block=layout.tokens_per_block,
        model=model,
        salt=config.salt.get_secret_value() if config.salt is not None else None,
        weights_version=config.weights_version,
        format_version=FORMAT_VERSION,
    )


def _model_of(config: OffloadConfig, layout: KVLayout) -> ModelIdentity:
    """What the configuration alone says about the model."""
    if config.model is None:
        _log.warning("no model is named: two models of equal KV shape would share chunks under equal keys; set 'model'")
    try:
        weights = weights_digest(config.model) if config.model is not None else None
    except OSError as error:
        raise ConfigError(f"model {config.model!r}: its weights cannot be read: {error}") from error
    return ModelIdentity(
        name=config.model or "unnamed",
        weights_digest=weights,
        kv_dtype=",".join(sorted(set(layout.dtypes.values()))),
    )


def chunk_format(
    config: OffloadConfig, layout: KVLayout, namespace: Namespace, *, rank: int = 0, num_ranks: int = 1
) -> ChunkFormat:
    """The chunk file of one rank."""
    blocks_per_chunk = config.blocks_per_chunk_for(layout.tokens_per_block)
    return ChunkFormat(
        layout.chunk_tensors(blocks_per_chunk),
        namespace=namespace.digest,
        num_tokens=blocks_per_chunk * layout.tokens_per_block,
        rank=rank,
        num_ranks=num_ranks,
        extra=layout.metadata(),
    )


def geometry_for(
    config: OffloadConfig, layout: KVLayout, namespace: Namespace, fmt: ChunkFormat, *, ranks_per_node: int = 1
) -> Geometry:
    """Slots and sizes of one rank; `capacity` and `staging_bytes` are per node and engine.

    Raises:
        ConfigError: a size that holds no chunk.
    """

    def slots(what: str, num_bytes: int) -> int:
        count = num_bytes // ranks_per_node // fmt.slot_bytes
        if count < 1:
            raise ConfigError(
                f"{what} {num_bytes} holds no chunk: one takes {fmt.slot_bytes} bytes on each of "
                f"{ranks_per_node} ranks; raise it or lower tokens_per_chunk"
            )
        return count

    staging = slots("staging_bytes", config.staging_bytes)
    first = config.tiers[0]
    host = slots("capacity of tier " + first.name, first.capacity) if isinstance(first, HostTierConfig) else 0
    return Geometry(
        namespace=namespace.digest,
        facts=namespace.facts,
        blocks_per_chunk=config.blocks_per_chunk_for(layout.tokens_per_block),
        tokens_per_block=layout.tokens_per_block,
        num_blocks=layout.num_blocks,
        payload_bytes=fmt.payload_bytes,
        slot_bytes=fmt.slot_bytes,
        num_slots=staging + host,
        host_slots=host,
    )


def build_tiers(config: OffloadConfig, namespace: str, facts: Mapping[str, object]) -> dict[int, Tier]:
    """The I/O tiers by their place in the ladder; those opened before one that fails are closed again.

    Raises:
        ConfigError: a tier that cannot be used: the message names it and what is wrong.
    """
    tiers: dict[int, Tier] = {}
    try:
        for at, tier in enumerate(config.tiers):
            if not isinstance(tier, HostTierConfig):
                tiers[at] = open_tier(tier, namespace, facts)
    except BaseException:
        for opened in tiers.values():
            opened.close()
        raise
    return tiers


def open_tier(tier: AnyTierConfig, namespace: str, facts: Mapping[str, object] | None = None) -> Tier:
    """One I/O tier as configured, for one namespace, which is described beside its chunks where `facts` are given.

    Raises:
        ConfigError: it cannot be used, or it is the host tier, which does no I/O.
    """
    match tier:
        case FsTierConfig():
            return FileSystemTier(
                tier.root_dir,
                namespace=namespace,
                namespace_facts=facts,
                name=tier.name,
                capacity_bytes=tier.capacity,
                direct_io=tier.direct_io,
            )
        case ObjTierConfig():
            return ObjectTier(
                tier.bucket,
                prefix=tier.prefix,
                namespace=namespace,
                namespace_facts=facts,
                name=tier.name,
                endpoint_url=tier.endpoint_url,
                region=tier.region,
                access_key=tier.access_key.get_secret_value() if tier.access_key else None,
                secret_key=tier.secret_key.get_secret_value() if tier.secret_key else None,
                session_token=tier.session_token.get_secret_value() if tier.session_token else None,
                ca_bundle=tier.ca_bundle,
                addressing_style=tier.addressing_style,
                sign_payload=tier.sign_payload,
                server_side_encryption=tier.server_side_encryption,
                sse_kms_key_id=tier.sse_kms_key_id,
                storage_class=tier.storage_class,
                parts=tier.parts,
                part_bytes=tier.part_bytes,
                max_connections=tier.n_read_threads + tier.n_write_threads + _TIER_CLASSES[tier.type].probe_threads,
                connect_timeout_s=tier.connect_timeout_s,
                read_timeout_s=tier.read_timeout_s,
                operation_timeout_s=tier.operation_timeout_s,
                max_attempts=tier.max_attempts,
            )
        case _:
            raise ConfigError(f"tier {tier.name}: {tier.type} is no I/O tier")


def planned_tiers(config: OffloadConfig, clock: Callable[[], float] = time.monotonic) -> list[PlannedTier]:
    """The ladder as the planner needs it, each tier with a gate of its own."""
    return [
        PlannedTier(
            name=tier.name,
            tier_type=tier.type,
            gate=build_gate(
                tier.backpressure_for(config.backpressure),
                tier_type=tier.type,
                locality=None if isinstance(tier, HostTierConfig) else tier.locality,
                clock=clock,
            ),
            max_queue_chunks=tier.max_queue_chunks,
            max_queue_s=tier.max_queue_s,
            probe_keys=_TIER_CLASSES[tier.type].probe_keys,
        )
        for tier in config.tiers
    ]


def listing_times_s(config: OffloadConfig) -> dict[int, float]:
    """By place in the ladder, how long those tiers are listed at start that are."""
    return {
        at: tier.list_at_start_s
        for at, tier in enumerate(config.tiers)
        if isinstance(tier, ObjTierConfig) and tier.list_at_start_s
    }


def load_gate_for(config: OffloadConfig, geometry: Geometry) -> LoadGate | None:
    """The load gate over the I/O tiers; None where it is off."""
    wanted = config.load_gate
    if wanted is None:
        return None
    io = {at: tier for at, tier in enumerate(config.tiers) if not isinstance(tier, HostTierConfig)}
    share = slot_share(geometry.num_slots, len(io))
    return LoadGate(
        {
            at: LoadTier(
                name=tier.name,
                # A writer serves loads before stores, so all threads may read at once.
                width=min(tier.n_read_threads + tier.n_write_threads, share),
                interval_s=geometry.payload_bytes / tier.load_bytes_per_s if tier.load_bytes_per_s else None,
            )
            for at, tier in io.items()
        },
        tokens_per_chunk=geometry.blocks_per_chunk * geometry.tokens_per_block,
        prefill_tokens_per_s=wanted.prefill_tokens_per_s,
        margin=wanted.margin,
    )


def worker_tiers(config: OffloadConfig, tiers: Mapping[int, Tier]) -> list[WorkerTier]:
    """The I/O tiers as a rank worker needs them."""
    wanted = []
    for at, tier in enumerate(config.tiers):
        if not isinstance(tier, HostTierConfig):
            wanted.append(
                WorkerTier(
                    at,
                    tiers[at],
                    tier.n_read_threads,
                    tier.n_write_threads,
                    tier.max_queue_s,
                    adapt_stores=tier.store_concurrency == "adaptive",
                )
            )
    return wanted


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank brought up: its worker, what the planner must know of it, and the tiers it opened."""

    worker: RankWorker
    geometry: Geometry
    tiers: Mapping[int, Tier]


def open_rank(
    config: OffloadConfig,
    layout: KVLayout,
    model: ModelIdentity | None,
    *,
    device: Device | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Rank:
    """Open the tiers, map the region and start the threads of one rank; nothing is left where one of them fails.

    Raises:
        ConfigError: something in `config` cannot be used.
    """
    namespace = namespace_for(config, layout, model)
    fmt = chunk_format(config, layout, namespace)
    geometry = geometry_for(config, layout, namespace, fmt)
    tiers = build_tiers(config, namespace.digest, namespace.facts)
    with contextlib.ExitStack() as undo:
        for tier in tiers.values():
            undo.callback(tier.close)
        region = PinnedRegion(geometry.num_slots, geometry.slot_bytes, device=layout.device, pin=config.pin_memory)
        undo.callback(region.close)
        worker = RankWorker(
            layout,
            fmt,
            region,
            worker_tiers(config, tiers),
            blocks_per_chunk=geometry.blocks_per_chunk,
            verify=config.verify,
            device_copy=config.device_copy,
            device_staging_bytes=config.device_staging_bytes,
            device=device,
            clock=clock,
        )
        undo.pop_all()
    return Rank(worker, geometry, tiers)
