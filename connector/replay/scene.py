"""What the rows are compared on: sizes and speeds of nodes, tiers and devices."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvsluice.connector.config import HostTierConfig
from kvsluice.connector.ladder import Geometry, load_gate_for, planned_tiers
from kvsluice.connector.lane import Lane
from kvsluice.connector.planner import Planner
from kvsluice.connector.replay.device import Device, DeviceSpec
from kvsluice.connector.replay.engine import Engine
from kvsluice.connector.replay.measure import LoadLog
from kvsluice.connector.replay.node import Node
from kvsluice.connector.replay.rows import Row
from kvsluice.connector.replay.threads import FifoLane, VirtualThreads
from kvsluice.connector.replay.tier import ModelledProber, ModelledTier, TierContent
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.trace import TOKENS_PER_BLOCK
from kvsluice.connector.replay.transfers import ModelledRung
from kvsluice.connector.replay.worker import ModelledWorker
from kvsluice.tiers.backpressure import StoreLimit
from kvsluice.tiers.errors import ConfigError

__all__ = ["Scene", "TierModel", "World"]

_MAX_BLOCKS = 1 << 20
"""Blocks of one engine's pool: none of a modelled engine's block ids lies past it."""


@dataclass(frozen=True, slots=True)
class TierModel:
    """One I/O tier.

    Attributes:
        device: what its operations run on.
        shared: all nodes have one device and one content in common; else each has its own.
        capacity_bytes: None for no limit.
    """

    device: DeviceSpec
    shared: bool = False
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything about a replay but the trace and the row.

    Attributes:
        tiers: by name, as in the rows' configurations.
        chunk_bytes: KV of one block of 512 tokens; 4 MiB is about what 8 layers of 8 heads of 128 take.
        num_nodes: engines; requests say which one they go to.
        gpu_chunks: blocks in each engine's GPU prefix cache.
        prefill_tokens_per_s: of one request.
        staging_bytes: of each node's pinned region, host tier aside.
        copy_bytes_per_s: between GPU and host, one copy at a time.
        step_s: between two steps of a scheduler.
        question_s: what a question to a tier costs beyond one operation of its device.

    Raises:
        ConfigError: a figure out of its range, by name and value.
    """

    tiers: Mapping[str, TierModel] = field(
        default_factory=lambda: {"fs": TierModel(DeviceSpec(bytes_per_s=1e9, operation_s=1e-4))}
    )
    chunk_bytes: int = 4 << 20
    num_nodes: int = 1
    gpu_chunks: int = 8192
    prefill_tokens_per_s: float = 20_000.0
    staging_bytes: int = 8 << 30
    copy_bytes_per_s: float = 50e9
    step_s: float = 0.020
    question_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "num_nodes", "prefill_tokens_per_s", "copy_bytes_per_s", "step_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)} of a scene must be above 0")
        for name in ("gpu_chunks", "question_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)} of a scene must be at least 0")
        if self.staging_bytes < self.chunk_bytes:
            raise ConfigError(f"staging_bytes {self.staging_bytes} holds no chunk of {self.chunk_bytes} bytes")


class World:
    """The objects of one run: product and models on one timeline.

    Args:
        scene: sizes and speeds.
        row: the policy.
        given: by tier, the keys that each copy of it holds from the start on: for loads replayed alone.

    Raises:
        ConfigError: the row's ladder names a tier that the scene has not.
    """

    def __init__(self, scene: Scene, row: Row, *, given: Mapping[str, AbstractSet[bytes]] | None = None) -> None:
        given = {} if given is None else given
        self.timeline = Timeline()
        self.scene = scene
        self.row = row
        self.devices: dict[str, list[Device]] = {}
        self.contents: dict[str, list[TierContent]] = {}
        for tier in row.config.tiers:
            if isinstance(tier, HostTierConfig):
                continue
            model = scene.tiers.get(tier.name)
            if model is None:
                raise ConfigError(f"tier {tier.name!r} has no modelled device; there are {sorted(scene.tiers)}")
            copies = 1 if model.shared else scene.num_nodes
            self.devices[tier.name] = [Device(model.device, self.timeline) for _ in range(copies)]
            self.contents[tier.name] = [self._content(model, given.get(tier.name, frozenset())) for _ in range(copies)]
        self.nodes = [self._node(number) for number in range(scene.num_nodes)]
        self.engines = [
            Engine(
                node,
                self.timeline,
                gpu_chunks=scene.gpu_chunks,
                prefill_tokens_per_s=scene.prefill_tokens_per_s,
            )
            for node in self.nodes
        ]

    def _content(self, model: TierModel, given: AbstractSet[bytes]) -> TierContent:
        return TierContent(
            self.scene.chunk_bytes,
            capacity_bytes=model.capacity_bytes,
            clock=self.timeline,
            given=given,
        )

    def _node(self, number: int) -> Node:
        scene, config, timeline = self.scene, self.row.config, self.timeline
        rungs: dict[int, ModelledRung] = {}
        contents, devices = {}, {}
        for at, tier in enumerate(config.tiers):
            if isinstance(tier, HostTierConfig):
                continue
            at_node = 0 if scene.tiers[tier.name].shared else number
            contents[at] = self.contents[tier.name][at_node]
            devices[at] = self.devices[tier.name][at_node]
            if self.row.one_queue:
                lane: Lane = FifoLane(timeline)
                readers, writers = 0, tier.n_read_threads + tier.n_write_threads
            else:
                adapt = tier.store_concurrency == "adaptive"
                lane = Lane(StoreLimit(tier.n_write_threads, timeline) if adapt else None, timeline)
                readers, writers = tier.n_read_threads, tier.n_write_threads
            rungs[at] = ModelledRung(
                ModelledTier(contents[at], devices[at], scene.chunk_bytes),
                VirtualThreads(lane, read_threads=readers, write_threads=writers, clock=timeline),
                tier.max_queue_s,
            )
        geometry = self._geometry()
        planner = Planner(
            planned_tiers(config, timeline),
            geometry.settings(config),
            prober=ModelledProber(contents, devices, timeline, question_s=scene.question_s),
            load_gate=load_gate_for(config, geometry),
            clock=timeline,
        )
        loads = LoadLog(timeline)
        worker = ModelledWorker(
            timeline,
            rungs,
            chunk_bytes=scene.chunk_bytes,
            copy_bytes_per_s=scene.copy_bytes_per_s,
            on_decided=loads.decided,
        )
        return Node(timeline, planner, worker, loads, step_s=scene.step_s)

    def _geometry(self) -> Geometry:
        scene, first = self.scene, self.row.config.tiers[0]
        host = first.capacity // scene.chunk_bytes if isinstance(first, HostTierConfig) else 0
        staging = scene.staging_bytes // scene.chunk_bytes
        return Geometry(
            namespace="replay",
            facts={},
            blocks_per_chunk=1,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=_MAX_BLOCKS,
            payload_bytes=scene.chunk_bytes,
            slot_bytes=scene.chunk_bytes,
            num_slots=staging + host,
            host_slots=host,
        )
