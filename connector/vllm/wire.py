"""What crosses between vLLM's scheduler and its workers: our orders and reports in vLLM's envelopes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvsluice.connector.ladder import Geometry
from kvsluice.connector.orders import Order, RankReport
from kvsluice.connector.results import OffloadStats

__all__ = ["FailedLoad", "Handshake", "SluiceStats", "StartedLoad", "StepOrders", "StepReports"]


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """A load that waits for `num_parts` parts; a rank that has loaded them all tells vLLM by itself."""

    job_id: int
    request_id: str
    num_parts: int


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that is over and not whole; a rank that has not told vLLM yet does, with the blocks that hold nothing."""

    job_id: int
    failed_blocks: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc, explicit-any] # vLLM is untyped here
    """The scheduler's word to each worker for one step; `step` counts them."""

    orders: tuple[Order, ...] = ()
    started_loads: tuple[StartedLoad, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
    step: int = 0


@dataclass
class StepReports(KVConnectorWorkerMetadata):  # type: ignore[misc, explicit-any] # as above
    """What the workers saw in one step, rank by rank; `step` is that of its orders."""

    reports: tuple[RankReport, ...] = ()
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports, self.step)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc, explicit-any] # as above
    """What a worker found out from its tensors, for the scheduler to plan with and to compare."""

    geometry: Geometry


@dataclass
class SluiceStats(KVConnectorStats):  # type: ignore[misc, explicit-any] # as above
    """`OffloadStats` as plain nested values. Each snapshot counts from the start, so the newest says all."""

    data: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: OffloadStats) -> SluiceStats:
        return cls(data=asdict(stats))

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> SluiceStats:
        return SluiceStats(data=dict(other.data or self.data))

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """One line's worth of numbers, for vLLM's periodic log."""
        line: dict[str, int | float] = {}
        tiers = self.data.get("tiers", {})
        assert isinstance(tiers, dict)
        for name, tier in tiers.items():
            line[f"{name} stored chunks"] = tier["chunks_stored"]
            line[f"{name} stored bytes"] = tier["bytes_stored"]
            line[f"{name} loaded chunks"] = tier["chunks_loaded"]
            line[f"{name} loaded bytes"] = tier["bytes_loaded"]
            line[f"{name} dropped stores"] = sum(tier["dropped"].values())
            line[f"{name} missed loads"] = sum(tier["missed"].values())
        return line
