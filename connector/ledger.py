"""The planner's open jobs: what each chunk of them still waits for, and what came of it.

    job ──parts──▶ waiting for a slot ──▶ with the workers ──▶ decided ──▶ ended
                                              (slot pinned from here ......... to here)

A job's result is ready when every part is decided; a part is forgotten when it has ended, which may
be later (a read that hangs past its deadline keeps its slot) and never earlier.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvsluice.connector.orders import Loaded
from kvsluice.connector.results import TransferKind, TransferResult

__all__ = ["Job", "Ledger", "LoadState", "StoreState"]


@dataclass(slots=True, eq=False)
class Job:
    """One call of `store` or `load`."""

    job_id: int
    kind: TransferKind
    keys: tuple[bytes, ...]
    start_s: float
    undecided: int
    uncopied: int
    """Parts whose source blocks a copy may still read."""
    expires_s: float = 0.0
    outcome: list[str | None] = field(default_factory=list)
    """Per key: None for done, else the reason."""
    moved_bytes: int = 0
    copy_s: float = 0.0
    queue_s: float = 0.0
    tier_s: float = 0.0


@dataclass(slots=True, eq=False)
class StoreState:
    """One chunk on its way into tiers."""

    job: Job
    part: int
    key: bytes
    block_ids: tuple[int, ...]
    to_host: bool
    tiers: list[int]
    expires_s: float
    generation: int
    arrival: int = 0
    """Order among all that wait."""
    slot: int = -1
    ranks_to_copy: int = 0
    ranks_to_write: dict[int, int] = field(default_factory=dict)
    ranks_to_end: int = 0
    copy_reason: str | None = None
    tier_reasons: dict[int, str] = field(default_factory=dict)
    held: bool = False
    last_reason: str = ""
    decided: bool = False
    followers: list[tuple[Job, int]] = field(default_factory=list)
    """Parts of later jobs that store the same key: they share this one's outcome and copy nothing."""


@dataclass(slots=True, eq=False)
class LoadState:
    """One chunk on its way into blocks."""

    job: Job
    part: int
    key: bytes
    block_ids: tuple[int, ...]
    sources: tuple[int, ...]
    generation: int
    slot: int = -1
    copy_up: tuple[int, ...] = ()
    ranks_to_load: int = 0
    ranks_to_write: dict[int, int] = field(default_factory=dict)
    tier_reasons: dict[int, str] = field(default_factory=dict)
    ranks_to_end: int = 0
    reason: str | None = None
    charged: dict[int, int] = field(default_factory=dict)
    """Sources in whose share the slot counts, each with the ranks that may still read from it."""
    served: set[int] = field(default_factory=set)
    """The sources that ranks were served by."""
    skip_blocks: int = 0
    num_held: int = 0
    """How many of `sources`, the first ones, are known to hold the chunk; the others may."""
    stands_at: int | None = None
    """The tier among whose open loads it counts, -1 for a slot; None where it is decided."""
    place: int = 0
    """Which of that tier's open loads it was when it was asked for: 1 for the only one."""
    slowest: Loaded | None = None
    """Of the ranks that were served, the one that took longest."""


class Ledger:
    """Open jobs by id, live parts by job and index, finished results. Not thread-safe: the planner's alone."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.parts: dict[tuple[int, int], StoreState | LoadState] = {}
        self._next_id = 1
        self._results: deque[TransferResult] = deque()
        self._released: deque[int] = deque()

    def open(self, kind: TransferKind, keys: tuple[bytes, ...], start_s: float) -> Job:
        copies = len(keys) if kind == "store" else 0
        job = Job(self._next_id, kind, keys, start_s, undecided=len(keys), uncopied=copies)
        job.outcome = [None] * len(keys)
        self._next_id += 1
        self.jobs[job.job_id] = job
        if kind == "store" and not keys:
            self._released.append(job.job_id)
        return job

    def was_issued(self, job_id: int) -> bool:
        return 0 < job_id < self._next_id

    def copied(self, job: Job) -> None:
        """One part's source blocks are free."""
        job.uncopied -= 1
        if job.uncopied == 0:
            self._released.append(job.job_id)

    def decide(self, job: Job, part: int, reason: str | None, now_s: float) -> None:
        """One part's outcome is known."""
        job.outcome[part] = reason
        job.undecided -= 1
        if job.undecided == 0:
            self.finish(job, now_s)

    def finish(self, job: Job, now_s: float) -> None:
        del self.jobs[job.job_id]
        failed = {key: reason for key, reason in zip(job.keys, job.outcome, strict=True) if reason is not None}
        self._results.append(
            TransferResult(
                job_id=job.job_id,
                kind=job.kind,
                done_keys=tuple(key for key, reason in zip(job.keys, job.outcome, strict=True) if reason is None),
                failed=failed,
                bytes=job.moved_bytes,
                copy_s=job.copy_s,
                queue_s=job.queue_s,
                tier_s=job.tier_s,
                total_s=now_s - job.start_s,
            )
        )

    def spoil_loads(self, reason: str) -> None:
        """Whatever was loaded and not yet told of must not be used: open jobs and results that nobody took."""
        for job in self.jobs.values():
            if job.kind == "load":
                # A part that is still undecided overwrites its entry.
                job.outcome = [known or reason for known in job.outcome]
        self._results = deque(result.spoiled(reason) if result.kind == "load" else result for result in self._results)

    def take_results(self) -> list[TransferResult]:
        taken = list(self._results)
        self._results.clear()
        return taken

    def take_released(self) -> list[int]:
        taken = list(self._released)
        self._released.clear()
        return taken
