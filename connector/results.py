"""What the connector answers: lookups, finished transfers, and the frozen snapshot of `stats()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvsluice.tiers.slots import SlotUsage

__all__ = ["GateStats", "LoadGateStats", "Lookup", "OffloadStats", "TierStats", "TransferKind", "TransferResult"]

TransferKind = Literal["store", "load"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a prefix can be loaded.

    Attributes:
        held: leading chunks that some tier is known to hold, as far as they are worth loading.
        pending: whether a tier is still being asked about the chunk after them, or a faster one about some of
            them; ask again later.
        slower: chunks after them that are held as well, and that the engine has computed sooner than loaded.
    """

    held: int
    pending: bool
    slower: int = 0


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One job that is over.

    Attributes:
        job_id: what `store` or `load` returned.
        kind: "store" or "load".
        done_keys: stored in (or already held by) at least one tier; or loaded into the blocks.
        failed: the other keys, each with the reason (see `kvsluice.tiers.reasons`).
        bytes: really written to tiers, host slots included; or loaded into blocks. All ranks together.
        copy_s: device time of the copies, summed over chunks and ranks.
        queue_s: time that transfers waited for a tier's thread, summed likewise.
        tier_s: the tiers' own I/O time, summed likewise.
        total_s: from the call until the last part was over, by the scheduler's clock.
    """

    job_id: int
    kind: TransferKind
    done_keys: tuple[bytes, ...]
    failed: Mapping[bytes, str]
    bytes: int
    copy_s: float
    queue_s: float
    tier_s: float
    total_s: float

    def spoiled(self, reason: str) -> TransferResult:
        """The same, with every key that was done failed for `reason`."""
        failed = {**self.failed, **dict.fromkeys(self.done_keys, reason)}
        return replace(self, done_keys=(), failed=failed)


@dataclass(frozen=True, slots=True)
class GateStats:
    """One gate, as its detector reports it.

    Attributes:
        under_pressure: now, idle decay included.
        store_latency_ema_s: seconds per MiB (2**20 bytes) of one store, smoothed; 0 where the detector has none.
        dropped_stores: chunks that the gate refused since the start.
        detector: the detector's own `stats`, and what the gate measures for it.
    """

    under_pressure: bool
    store_latency_ema_s: float
    dropped_stores: int
    detector: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadGateStats:
    """What the load gate weighs against each other; None for what is not known yet.

    Attributes:
        prefill_tokens_per_s: how fast the engine computes prompts.
        load_interval_s: by tier, seconds from one chunk to the next where many are loaded.
        copy_s: seconds of one chunk's device copy.
    """

    prefill_tokens_per_s: float | None
    load_interval_s: Mapping[str, float | None]
    copy_s: float | None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier since the start. Chunks and bytes count each rank's part.

    Attributes:
        tier_type: "host", "fs", "obj" or a stranger's word.
        chunks_stored, bytes_stored: really written; chunks_already_held counts those that were there.
        chunks_loaded, bytes_loaded: that reached their blocks.
        dropped, failed: stores that were never started, and those that were, each by reason.
        missed: loads and lookups that this tier was asked for and did not serve, by reason.
        failures: what the tier itself met with, by its own words ("503 SlowDown", "timeout"), on all ranks that told.
        known_chunks: keys that the planner believes to be held here; a tier may hold more.
        queued_loads, queued_stores, running: parts that wait for a thread or are on one, all ranks together.
        store_limit: stores that may run at once at this moment on each rank; 0 for as many as there are writers.
        oldest_store_s: seconds that the oldest running store has taken so far; 0 with none.
        used_bytes, capacity_bytes: None where the tier does not know, or not yet.
        serving: False while a reset of this tier has not been confirmed.
        gate: None where it is off.
    """

    tier_type: str
    chunks_stored: int
    bytes_stored: int
    chunks_already_held: int
    chunks_loaded: int
    bytes_loaded: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    missed: Mapping[str, int]
    failures: Mapping[str, int]
    known_chunks: int
    queued_loads: int
    queued_stores: int
    running: int
    store_limit: int
    oldest_store_s: float
    used_bytes: int | None
    capacity_bytes: int | None
    serving: bool
    gate: GateStats | None


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """A frozen snapshot of the whole connector. Its mappings are copies: nothing changes in them later.

    Attributes:
        tiers: by name, fastest first.
        pool: the slots of one rank's pinned region, `slot_bytes` each.
        jobs_open: jobs whose result is still to come.
        stores_waiting, loads_waiting: chunks that wait for a slot.
        lookups, lookups_pending: calls, and those that had to say `pending`.
        hit_chunks: the sum of `held` over all lookups that did not.
        skipped, unused: stores that no tier was asked to take, loads that no tier was asked for, each by
            reason; what a tier refused or failed stands with the tier. `slower_than_recompute` counts at every
            lookup that is not pending, as `hit_chunks` does.
        load_gate: what loads and recompute take; None where the gate is off.
    """

    tiers: Mapping[str, TierStats]
    pool: SlotUsage
    slot_bytes: int
    jobs_open: int
    stores_waiting: int
    loads_waiting: int
    lookups: int
    lookups_pending: int
    hit_chunks: int
    skipped: Mapping[str, int]
    unused: Mapping[str, int]
    load_gate: LoadGateStats | None = None
