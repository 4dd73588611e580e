"""What the planner keeps per tier: gate, index, share of the slots, counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvsluice.connector.index import TierIndex
from kvsluice.connector.orders import TierState
from kvsluice.connector.results import GateStats, TierStats
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Gate, Spent, Stall
from kvsluice.tiers.base import Tier

__all__ = ["PlannedTier", "TierAccount"]

FAULTS = frozenset({reasons.IO_ERROR, reasons.DISK_FULL, reasons.INTERNAL})
"""Outcomes that say something about the tier; the others were our own doing and teach its gate nothing."""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """One rung of the ladder as the planner needs it.

    Attributes:
        name: unique within the ladder.
        tier_type: "host", "fs", "obj" or a stranger's word.
        gate: asked before each store; None admits all.
        max_queue_chunks: stores that may be open (planned, not ended) at once.
        max_queue_s: how long a store may wait before it starts, and how long the gate may expect it to.
        probe_keys: how many keys one question to the tier may hold; see `Tier.probe_keys`.
    """

    name: str
    tier_type: str
    gate: Gate | None
    max_queue_chunks: int = 256
    max_queue_s: float = 5.0
    probe_keys: int = Tier.probe_keys

    @property
    def is_host(self) -> bool:
        return self.tier_type == "host"


def _by_share(stall: Stall) -> float:
    return stall.share_s


class TierAccount:
    """Mutable state of one tier; the planner's alone."""

    def __init__(self, plan: PlannedTier, *, negative_ttl_s: float, slot_share: int, chunk_bytes: int) -> None:
        self.plan = plan
        self.chunk_bytes = chunk_bytes
        self.gate = plan.gate
        self.index = TierIndex(negative_ttl_s)
        self.slot_share = slot_share
        # A quarter of the share is left to loads, so that a flood of stores cannot hold it all.
        self.store_share = max(1, slot_share - slot_share // 4)
        self.slots_in_stores = 0
        self.slots_in_loads = 0
        self.stores_open = 0
        self.resetting = False
        self.lost_to_reset = False
        self.chunks_stored = 0
        self.bytes_stored = 0
        self.chunks_already_held = 0
        self.chunks_loaded = 0
        self.bytes_loaded = 0
        self.gate_drops = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.states: dict[int, TierState] = {}

    @property
    def serving(self) -> bool:
        """False while a reset has not been confirmed: what the tier holds may be from before it."""
        return not (self.resetting or self.lost_to_reset)

    def admit(self, num_blocks: int) -> str | None:
        """Ask for one store; None admits it and counts it as open, else the reason of the refusal."""
        if not self.serving:
            reason = reasons.RESET
        elif self.stores_open >= self.plan.max_queue_chunks:
            reason = reasons.QUEUE_FULL
        else:
            gate = self.gate
            refusal = None if gate is None else gate.refusal(num_blocks, self.stores_open, self.plan.max_queue_s)
            if refusal is None:
                self.stores_open += 1
                return None
            self.gate_drops += refusal == reasons.GATE
            reason = refusal
        self.dropped[reason] += 1
        return reason

    @property
    def has_store_room(self) -> bool:
        """Whether a store's slot still fits in the stores' part of the tier's share."""
        return self.slots_in_stores < self.store_share

    @property
    def has_load_room(self) -> bool:
        """Whether a load's slot still fits in the tier's share."""
        return self.slots_in_loads + self.slots_in_stores < self.slot_share

    def withdraw(self, reason: str) -> None:
        """An admitted store is shed before any worker heard of it."""
        self.stores_open -= 1
        self.dropped[reason] += 1

    def wrote(
        self,
        reason: str | None,
        num_bytes: int,
        spent: Spent,
        *,
        queue_s: float = 0.0,
        started: bool = True,
        first: bool = True,
    ) -> None:
        """Count one rank's write, or one that was shed before it started, and tell the gate what it teaches.

        `first` is False where another rank's part of the chunk has failed already: one store failed, not two.
        """
        if reason is None:
            if num_bytes > 0:
                self.chunks_stored += 1
                self.bytes_stored += num_bytes
            else:
                self.chunks_already_held += 1
            self.teach(num_bytes, spent, queue_s)
        elif started and reason in FAULTS:
            self.failed[reason] += 1
            if self.gate is not None and first:
                self.gate.on_store_failed()
        else:
            self.dropped[reason] += 1

    def teach(self, num_bytes: int, spent: Spent, queue_s: float = 0.0) -> None:
        """Tell the gate of one store that was made."""
        if self.gate is not None:
            self.gate.on_store_ended(num_bytes, spent, queue_s=queue_s, chunk_bytes=self.chunk_bytes)

    def saw(self, rank: int, state: TierState) -> None:
        """Take in one rank's look at its tier."""
        self.states[rank] = state
        if self.gate is not None:
            # The rank that has waited longest speaks for all: a chunk is held when every rank has its part.
            worst = max((state.stall for state in self.states.values()), key=_by_share)
            self.gate.on_stall(worst, self.chunk_bytes)

    def stats(self, *, known_chunks: int, used_bytes: int | None, capacity_bytes: int | None) -> TierStats:
        gate = None
        if self.gate is not None:
            measured = dict(self.gate.stats)
            gate = GateStats(
                # A query: only a stranger's detector that does not tell is asked as before a store.
                under_pressure=(
                    bool(measured["under_pressure"]) if "under_pressure" in measured else self.gate.is_under_pressure()
                ),
                store_latency_ema_s=measured.get("store_latency_ema", 0.0),
                dropped_stores=self.gate_drops,
                detector=measured,
            )
        states = self.states.values()
        failures: Counter[str] = Counter()
        for state in states:
            failures.update(state.failures)
        return TierStats(
            tier_type=self.plan.tier_type,
            chunks_stored=self.chunks_stored,
            bytes_stored=self.bytes_stored,
            chunks_already_held=self.chunks_already_held,
            chunks_loaded=self.chunks_loaded,
            bytes_loaded=self.bytes_loaded,
            dropped=dict(self.dropped),
            failed=dict(self.failed),
            missed=dict(self.missed),
            failures=dict(failures),
            known_chunks=known_chunks,
            queued_loads=sum(state.queued_loads for state in states),
            queued_stores=sum(state.queued_stores for state in states),
            running=sum(state.running for state in states),
            store_limit=min((state.store_limit for state in states if state.store_limit), default=0),
            oldest_store_s=max((state.stall.oldest_s for state in states), default=0.0),
            used_bytes=used_bytes,
            capacity_bytes=capacity_bytes,
            serving=self.serving,
            gate=gate,
        )
