"""One chunk on its way out or in, on virtual time: what `connector.transfers` does, without bytes.

store   copy ─▶ write to each tier          load   read from a source ─▶ copy ─▶ write to tiers above
                                                         │ miss: next source
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvsluice.connector.orders import Copied, Ended, Loaded, LoadPart, Passed, StorePart, WorkerEvent, Wrote
from kvsluice.connector.replay.threads import VirtualThreads
from kvsluice.connector.replay.tier import ModelledTier
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import NOTHING, Operation, Spent

__all__ = ["LoadTransfer", "ModelledRung", "Shared", "StoreTransfer"]


@dataclass(frozen=True, slots=True)
class ModelledRung:
    """One I/O tier of the ladder, as `WorkerTier` is for the rank worker."""

    tier: ModelledTier
    threads: VirtualThreads
    max_queue_s: float


class Shared:
    """What all transfers of one worker use."""

    def __init__(
        self,
        timeline: Timeline,
        rungs: Mapping[int, ModelledRung],
        chunk_bytes: int,
        copy_bytes_per_s: float,
        on_decided: Callable[[int, int, int, str | None], None],
    ) -> None:
        self.clock = timeline
        self.rungs = rungs
        self.chunk_bytes = chunk_bytes
        self.copier = _Copier(timeline, chunk_bytes / copy_bytes_per_s)
        self.events: deque[WorkerEvent] = deque()
        self.on_decided = on_decided


class _Copier:
    """One copy at a time, loads first."""

    def __init__(self, timeline: Timeline, copy_s: float) -> None:
        self._timeline = timeline
        self.copy_s = copy_s
        self._loads: deque[LoadTransfer] = deque()
        self._stores: deque[StoreTransfer] = deque()
        self._current: LoadTransfer | StoreTransfer | None = None

    def put_load(self, transfer: LoadTransfer) -> None:
        self._loads.append(transfer)
        if self._current is None:
            self._next()

    def put_store(self, transfer: StoreTransfer) -> None:
        self._stores.append(transfer)
        if self._current is None:
            self._next()

    def _next(self) -> None:
        while self._loads or self._stores:
            transfer = self._loads.popleft() if self._loads else self._stores.popleft()
            if transfer.claim():
                self._current = transfer
                self._timeline.after(self.copy_s, self._end)
                return
            transfer.on_revoked()
        self._current = None

    def _end(self) -> None:
        transfer = self._current
        assert transfer is not None
        self._next()
        transfer.on_copied(self.copy_s)


class _Transfer:
    """Identity and the count of those who still use the slot."""

    __slots__ = ("_users", "cancelled_as", "claimed", "job_id", "key", "part", "shared")

    def __init__(self, shared: Shared, job_id: int, part: int, key: bytes, users: int) -> None:
        self.shared = shared
        self.job_id = job_id
        self.part = part
        self.key = key
        self.claimed = False
        self.cancelled_as: str | None = None
        self._users = users

    def claim(self) -> bool:
        """True for the first to ask: it decides the transfer."""
        taken, self.claimed = self.claimed, True
        return not taken

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.shared.events.append(Ended(self.job_id, self.part))


class _Write:
    """One tier's write of a slot that holds a chunk."""

    __slots__ = ("_operation", "_queue_s", "_rung", "job_id", "over", "put_s", "tier", "transfer")

    def __init__(self, transfer: _Transfer, tier: int) -> None:
        self.transfer = transfer
        self.job_id = transfer.job_id
        self.tier = tier
        self.put_s = transfer.shared.clock.now_s
        self.over: Callable[[], None]
        self._rung = transfer.shared.rungs[tier]
        self._operation: Operation
        self._queue_s = 0.0

    def put(self) -> None:
        self._rung.threads.put_store(self)

    def run(self, start_s: float) -> None:
        reason = self.transfer.cancelled_as
        if reason is not None:
            self.shed(reason)
            self.over()
            return
        self._queue_s = start_s - self.put_s
        self._operation = self._rung.threads.lane.begin(is_store=True)
        self._rung.tier.store(self.transfer.key, self._written)

    def _written(self, num_bytes: int, reason: str | None) -> None:
        spent = self._rung.threads.lane.finish(self._operation, whole_chunk=num_bytes > 0)
        self._done(reason, num_bytes, self._queue_s, spent, started=True)
        self.over()

    def shed(self, reason: str) -> None:
        self._done(reason, 0, self.transfer.shared.clock.now_s - self.put_s, NOTHING, started=False)

    def crashed(self, error: Exception) -> None:
        raise error

    def _done(self, reason: str | None, num_bytes: int, queue_s: float, spent: Spent, *, started: bool) -> None:
        transfer = self.transfer
        transfer.shared.events.append(
            Wrote(transfer.job_id, transfer.part, self.tier, reason, num_bytes, queue_s, spent, started)
        )
        transfer.leave()


class StoreTransfer(_Transfer):
    """One chunk from blocks, or from a slot that holds it already, to tiers."""

    __slots__ = ("_has_blocks", "_tiers")

    def __init__(self, shared: Shared, job_id: int, order: StorePart) -> None:
        self._has_blocks = bool(order.block_ids)
        super().__init__(shared, job_id, order.part, order.key, self._has_blocks + len(order.tiers))
        self._tiers = order.tiers

    def start(self) -> None:
        if self._has_blocks:
            self.shared.copier.put_store(self)
        else:
            self._write()

    def revoke(self, reason: str) -> None:
        self.cancelled_as = reason
        self.claimed = True

    def on_copied(self, copy_s: float) -> None:
        self.shared.events.append(Copied(self.job_id, self.part, None, copy_s))
        self._write()
        self.leave()

    def on_revoked(self) -> None:
        reason = self.cancelled_as or reasons.FENCED
        self.shared.events.append(Copied(self.job_id, self.part, reason, 0.0))
        for tier in self._tiers:
            _Write(self, tier).shed(reason)
        self.leave()

    def _write(self) -> None:
        for tier in self._tiers:
            _Write(self, tier).put()


class LoadTransfer(_Transfer):
    """One chunk from a tier, or from a slot that holds it already, to blocks."""

    __slots__ = (
        "_copy_up",
        "_drain_s",
        "_misses",
        "_operation",
        "_queue_s",
        "_served_by",
        "_sources",
        "_tier_s",
        "deadline_s",
        "over",
        "put_s",
    )

    def __init__(self, shared: Shared, job_id: int, order: LoadPart, deadline_s: float) -> None:
        super().__init__(shared, job_id, order.part, order.key, 2 + len(order.copy_up))
        self.deadline_s = deadline_s
        self.put_s = 0.0
        self.over: Callable[[], None]
        self._operation: Operation
        self._sources = list(order.sources)
        self._copy_up = order.copy_up
        self._misses: list[tuple[int, str]] = []
        self._served_by = -1
        self._queue_s = 0.0
        self._tier_s = 0.0
        self._drain_s = 0.0

    def start(self) -> None:
        if self._sources:
            self._ask_next()
        else:
            self.shared.copier.put_load(self)

    def revoke(self, reason: str) -> None:
        self.cancelled_as = reason
        if self.claim():
            misses = list(self._misses)
            if reason == reasons.DEADLINE:
                misses += [(source, reason) for source in self._sources[:1]]
            self._report(reason, 0.0, misses)

    def run(self, start_s: float) -> None:
        self._queue_s += start_s - self.put_s
        if self.cancelled_as is not None or self.claimed:
            self._give_up(self.cancelled_as or reasons.CANCELLED)
            self.over()
            return
        rung = self.shared.rungs[self._sources[0]]
        self._operation = rung.threads.lane.begin(is_store=False)
        rung.tier.load(self.key, self._read)

    def _read(self, num_bytes: int, reason: str | None) -> None:
        # The next source may take the task in this very call.
        over = self.over
        tier = self._sources[0]
        whole = num_bytes == self.shared.chunk_bytes
        spent = self.shared.rungs[tier].threads.lane.finish(self._operation, whole_chunk=whole)
        self._tier_s += spent.elapsed_s
        if reason is not None:
            self._miss(tier, reason)
        elif self.shared.clock.now_s >= self.deadline_s:
            self._misses.append((tier, reasons.DEADLINE))
            self._give_up(reasons.DEADLINE)
        else:
            self._served_by = tier
            self._drain_s = spent.drain_s
            self.shared.copier.put_load(self)
        over()

    def shed(self, reason: str) -> None:
        self._give_up(reason)

    def crashed(self, error: Exception) -> None:
        raise error

    def on_copied(self, copy_s: float) -> None:
        self._report(None, copy_s, self._misses)
        for tier in self._copy_up:
            _Write(self, tier).put()
        self.leave()

    def on_revoked(self) -> None:
        self._abandon_copy_up(self.cancelled_as or reasons.FENCED)
        self.leave()

    def _ask_next(self) -> None:
        self.put_s = self.shared.clock.now_s
        self.shared.rungs[self._sources[0]].threads.put_load(self)

    def _miss(self, tier: int, reason: str) -> None:
        self._misses.append((tier, reason))
        self.shared.events.append(Passed(self.job_id, self.part, tier))
        del self._sources[0]
        if self._sources and not self.claimed:
            self._ask_next()
        else:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self.claim():
            self._report(reason, 0.0, self._misses)
        self._abandon_copy_up(reason)
        self.leave()

    def _abandon_copy_up(self, reason: str) -> None:
        for tier in self._copy_up:
            _Write(self, tier).shed(reason)

    def _report(self, reason: str | None, copy_s: float, misses: list[tuple[int, str]]) -> None:
        shared = self.shared
        num_bytes = shared.chunk_bytes if reason is None else 0
        shared.events.append(
            Loaded(
                self.job_id,
                self.part,
                self._served_by,
                reason,
                num_bytes,
                copy_s,
                self._queue_s,
                self._tier_s,
                tuple(misses),
                self._drain_s,
            )
        )
        shared.on_decided(self.job_id, self.part, self._served_by, reason)
        self.leave()
