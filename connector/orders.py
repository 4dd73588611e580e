"""What the planner tells the rank workers, and what they tell it back.

Small picklable values: the two halves may be different processes on different machines. Times are
durations, never points in time, because the clocks of two machines do not agree.

A *part* is one chunk of one job on one rank; `part` is its index in the job. Each part that a worker
was given ends with exactly one `Ended`: from then on the worker does not touch its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvsluice.tiers.backpressure import NOTHING, Spent, Stall

__all__ = [
    "HOST",
    "CancelOrder",
    "Copied",
    "Ended",
    "Evicted",
    "LoadOrder",
    "LoadPart",
    "Loaded",
    "Order",
    "Passed",
    "RankReport",
    "ResetDone",
    "ResetOrder",
    "StoreOrder",
    "StorePart",
    "TierState",
    "WorkerEvent",
    "Wrote",
]

HOST: Final = -1
"""Stands for the host tier among positions in the ladder: a slot, behind no queue and no thread."""


@dataclass(frozen=True, slots=True)
class StorePart:
    """One chunk to store: copy `block_ids` into `slot`, then write the slot to each of `tiers`.

    An empty `block_ids` says that the slot holds the chunk's bytes already. `tiers` are positions in
    the ladder; the host tier, whose store is the copy itself, is not among them.
    """

    part: int
    key: bytes
    block_ids: tuple[int, ...]
    slot: int
    tiers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreOrder:
    job_id: int
    parts: tuple[StorePart, ...]


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One chunk to load: fill `slot` from the first of `sources` that has it, then copy to `block_ids`.

    Empty `sources` say that the slot holds the chunk's bytes already. What was read is written to
    the tiers of `copy_up` afterwards.
    """

    part: int
    key: bytes
    block_ids: tuple[int, ...]
    slot: int
    sources: tuple[int, ...]
    copy_up: tuple[int, ...]
    skip_blocks: int = 0
    """Leading blocks of the chunk that are left as they are: the engine has them and others may read them."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    job_id: int
    parts: tuple[LoadPart, ...]
    deadline_s: float
    """Seconds from receipt after which a part that has not been copied in is a miss."""


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Shed whatever of the job has not started, the `spared` parts aside: other jobs share those."""

    job_id: int
    spared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ResetOrder:
    """Shed all that waits, then drop every chunk of each I/O tier; answered by one `ResetDone` per tier."""

    reset_id: int


Order: TypeAlias = StoreOrder | LoadOrder | CancelOrder | ResetOrder


@dataclass(frozen=True, slots=True)
class Copied:
    """A store's device copy is over: the source blocks are free. `reason` is set where it was shed."""

    job_id: int
    part: int
    reason: str | None
    copy_s: float


@dataclass(frozen=True, slots=True)
class Wrote:
    """One tier's write of one chunk is over. `num_bytes` are those really written: 0 if it was held already."""

    job_id: int
    part: int
    tier: int
    reason: str | None
    num_bytes: int
    queue_s: float
    spent: Spent
    """The tier's own time; `Spent.alone(0.0)` where it was shed."""
    started: bool = True
    """False where it was shed: the reason may then be another tier's fault, and says nothing about this one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load's part is decided: copied in (`reason` is None) or a miss. `misses` are sources that failed first.

    `tier` is the source that served it, `HOST` for a slot that held the bytes already.
    """

    job_id: int
    part: int
    tier: int
    reason: str | None
    num_bytes: int
    copy_s: float
    queue_s: float
    tier_s: float
    misses: tuple[tuple[int, str], ...] = ()
    drain_s: float = 0.0
    """Of the read that served it, its part of the time among all loads of that tier; 0 where none did."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A load goes on from a source that did not serve it: that tier no longer holds its slot."""

    job_id: int
    part: int
    tier: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker no longer touches the part's slot."""

    job_id: int
    part: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A tier dropped a chunk by itself."""

    tier: int
    key: bytes


@dataclass(frozen=True, slots=True)
class ResetDone:
    """One tier's answer to a `ResetOrder`; `reason` is set where chunks may still be there."""

    reset_id: int
    tier: int
    reason: str | None


WorkerEvent: TypeAlias = Copied | Wrote | Loaded | Passed | Ended | Evicted | ResetDone


@dataclass(frozen=True, slots=True)
class TierState:
    """One I/O tier as the rank sees it now."""

    tier: int
    queued_loads: int
    queued_stores: int
    running: int
    stall: Stall
    """How long stores have been in flight without one ending, measured by the rank's own clock."""
    used_bytes: int | None
    capacity_bytes: int | None
    store_limit: int = 0
    """Stores that may run at once at this moment; 0 for as many as there are writers."""
    load_stall: Spent = NOTHING
    """What the load that is next to end has taken so far, since the last one ended or the oldest began."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """How often each kind of failure came to this rank's tier since its start; see `TierUsage`."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw since its last report."""

    rank: int
    events: tuple[WorkerEvent, ...]
    tiers: tuple[TierState, ...]
    more: bool = False
    """True where events were left for the next report to bound this one's size."""
