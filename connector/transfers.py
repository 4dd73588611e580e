"""The rank worker's transfers: one chunk on its way out, one chunk on its way in.

    store   copy ─▶ slot ─┬▶ seal, write to tier a          load   read from a source ─▶ prove ─▶ copy
                          └▶ seal, write to tier b                    │ miss: next source          │
                                                                                         write to tiers above

Several threads touch a transfer, one after another or side by side. What only one of them may do is
guarded by a `Claim`; the last one to leave the slot reports `Ended`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

import torch

from kvsluice.connector.by_layer import Cohort, LayerWatch
from kvsluice.connector.copier import Claim, Copier
from kvsluice.connector.io_queue import IoQueue
from kvsluice.connector.orders import Copied, Ended, Loaded, LoadPart, Passed, StorePart, WorkerEvent, Wrote
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels.device import Event
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import NOTHING, Spent
from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import ChunkFormat, stored_key
from kvsluice.tiers.errors import ChunkDamagedError, TierError

__all__ = ["LoadTransfer", "Shared", "StoreTransfer"]

_log = logging.getLogger(__name__)


class Shared:
    """What all transfers of one worker use: format, region, copier, queues, and the report to come."""

    def __init__(
        self,
        *,
        fmt: ChunkFormat,
        region: PinnedRegion,
        copier: Copier,
        tiers: Mapping[int, Tier],
        queues: Mapping[int, IoQueue],
        verify: bool,
        clock: Callable[[], float],
    ) -> None:
        self.fmt = fmt
        self.region = region
        self.copier = copier
        self.tiers = tiers
        self.queues = queues
        self.verify = verify
        self.clock = clock
        self.events: deque[WorkerEvent] = deque()
        self.generation = 0

    def payload(self, slot: int) -> torch.Tensor:
        """The slot's payload, uint8 of shape (payload_bytes,)."""
        return self.region.tensor(slot)[self.fmt.header_bytes : self.fmt.file_bytes]

    def name(self, key: bytes) -> bytes:
        return stored_key(key, self.fmt.group, self.fmt.rank)


class _Transfer:
    """Identity, slot and the count of those who still use the slot."""

    def __init__(self, shared: Shared, job_id: int, part: int, key: bytes, slot: int, ready: Event, users: int) -> None:
        self.shared = shared
        self.job_id = job_id
        self.part = part
        self.key = key
        self.slot = slot
        self.ready = ready
        self.claim = Claim()
        self.cancelled_as: str | None = None
        self.generation = shared.generation
        self.sealed = False
        # `list.pop` is atomic: of all who leave, exactly one takes the 0.
        self._users = list(range(users))

    def leave(self) -> None:
        """One user of the slot is through with it."""
        if self._users.pop() == 0:
            self.shared.events.append(Ended(self.job_id, self.part))

    def stale(self) -> str | None:
        """Why the transfer must not start any more; None where it may."""
        if self.generation != self.shared.generation:
            return reasons.RESET
        return self.cancelled_as

    def seal(self) -> None:
        """Write the header once the payload is in; twice does no harm."""
        if not self.sealed:
            self.shared.fmt.seal(self.shared.region.view(self.slot), self.key)
            self.sealed = True


class _WriteTask:
    """One tier's write of a slot that holds a chunk."""

    def __init__(self, transfer: _Transfer, tier: int, put_s: float) -> None:
        self.transfer = transfer
        self.job_id = transfer.job_id
        self.tier = tier
        self.put_s = put_s

    def run(self, start_s: float) -> None:
        transfer, shared = self.transfer, self.transfer.shared
        reason = transfer.stale()
        if reason is not None:
            self.shed(reason)
            return
        transfer.seal()
        num_bytes = 0
        lane = shared.queues[self.tier].lane
        operation = lane.begin(is_store=True)
        try:
            num_bytes = shared.tiers[self.tier].store(
                shared.name(transfer.key), shared.region.view(transfer.slot), shared.fmt.file_bytes
            )
        except TierError as error:
            reason = error.reason
            _log.debug("store failed: %s", error)
        finally:
            spent = lane.finish(operation, whole_chunk=num_bytes > 0)
        self._done(reason, num_bytes, start_s - self.put_s, spent)

    def shed(self, reason: str) -> None:
        self._done(reason, 0, self.transfer.shared.clock() - self.put_s, NOTHING, started=False)

    def crashed(self, error: Exception) -> None:
        self._done(reasons.INTERNAL, 0, 0.0, NOTHING)

    def _done(self, reason: str | None, num_bytes: int, queue_s: float, spent: Spent, *, started: bool = True) -> None:
        transfer = self.transfer
        transfer.shared.events.append(
            Wrote(transfer.job_id, transfer.part, self.tier, reason, num_bytes, queue_s, spent, started)
        )
        transfer.leave()


class StoreTransfer(_Transfer):
    """One chunk from blocks (or from a slot that holds it already) to tiers."""

    is_store = True

    def __init__(self, shared: Shared, job_id: int, order: StorePart, ready: Event) -> None:
        copies = 1 if order.block_ids else 0
        super().__init__(shared, job_id, order.part, order.key, order.slot, ready, copies + len(order.tiers))
        self.block_ids = order.block_ids
        self.tiers = order.tiers

    def start(self) -> None:
        """Hand it to whoever is first; never blocks."""
        if self.block_ids:
            self.shared.copier.put([self])
        else:
            self._write()

    def revoke(self, reason: str) -> None:
        """Keep what has not started from starting; never blocks."""
        self.cancelled_as = reason
        self.claim.take()

    def prepare(self) -> ChunkCopy:
        self.shared.region.touch(self.slot)
        return ChunkCopy(self.block_ids, self.shared.payload(self.slot))

    def on_tensor(self, number: int, event: Event) -> None:
        """Stores go whole."""

    def on_copied(self, copy_s: float) -> None:
        self._copied(None, copy_s)

    def on_revoked(self) -> None:
        self._copied(self.cancelled_as or reasons.FENCED, 0.0)

    def on_copy_failed(self, error: Exception) -> None:
        self._copied(reasons.INTERNAL, 0.0)

    def _copied(self, reason: str | None, copy_s: float) -> None:
        self.shared.events.append(Copied(self.job_id, self.part, reason, copy_s))
        if reason is None:
            self._write()
        else:
            for tier in self.tiers:
                _WriteTask(self, tier, self.shared.clock()).shed(reason)
        self.leave()

    def _write(self) -> None:
        for tier in self.tiers:
            self.shared.queues[tier].put_store(_WriteTask(self, tier, self.shared.clock()))


class LoadTransfer(_Transfer):
    """One chunk from a tier (or from a slot that holds it already) to blocks.

    The claim decides the outcome: the copier takes it when it starts the copy, a deadline, a
    cancel or a fence when they come first. Whoever takes it reports `Loaded`, once, and counts as a
    user of the slot until then, so that `Ended` never overtakes it.
    """

    is_store = False

    def __init__(
        self,
        shared: Shared,
        job_id: int,
        order: LoadPart,
        ready: Event,
        deadline_s: float,
        *,
        watch: LayerWatch | None = None,
        cohort: Cohort | None = None,
    ) -> None:
        super().__init__(shared, job_id, order.part, order.key, order.slot, ready, 2 + len(order.copy_up))
        self.block_ids = order.block_ids
        self.skip_blocks = order.skip_blocks
        self.deadline_s = deadline_s
        self._sources = list(order.sources)
        self._copy_up = order.copy_up
        self._watch = watch
        self._cohort = cohort
        self._misses: list[tuple[int, str]] = []
        self._served_by = -1
        self._queue_s = 0.0
        self._tier_s = 0.0
        self._drain_s = 0.0
        self.put_s = 0.0
        self.sealed = bool(order.sources)

    def start(self) -> None:
        """Hand it to whoever is first; never blocks."""
        if self._sources:
            self._ask_next()
        else:
            self._to_copier()

    def revoke(self, reason: str) -> None:
        """Decide it as a miss unless its copy has started; never blocks."""
        self.cancelled_as = reason
        if self.claim.take():
            misses = list(self._misses)
            if reason == reasons.DEADLINE:
                # A slice: the tier's thread may drop the last source between a look and an index.
                misses += [(source, reason) for source in self._sources[:1]]
            self._report(reason, 0.0, misses)
            # It may hang in a tier for longer: the others do not wait for it.
            self._leave_cohort()

    @property
    def decided(self) -> bool:
        return self.claim.taken

    def run(self, start_s: float) -> None:
        """Read from the first source left, on a thread of its tier."""
        tier = self._sources[0]
        self._queue_s += start_s - self.put_s
        reason = self.stale()
        if reason is not None or self.decided:
            self._give_up(reason or reasons.CANCELLED)
            return
        shared = self.shared
        key = shared.name(self.key)
        view = shared.region.view(self.slot)
        shared.region.touch(self.slot)
        try:
            # Only the tier's own time counts against the tier; proving the bytes is ours.
            num_bytes, drain_s = self._read(tier, key, view)
            shared.fmt.verify(view, num_bytes, self.key, checksum=shared.verify)
        except TierError as error:
            _log.debug("load failed: %s", error)
            if isinstance(error, ChunkDamagedError):
                self._remove_damaged(tier, key)
            self._miss(tier, error.reason)
            return
        if shared.clock() >= self.deadline_s:
            # Nobody may have polled since: late is late all the same.
            self._misses.append((tier, reasons.DEADLINE))
            self._give_up(reasons.DEADLINE)
            return
        self._served_by = tier
        self._drain_s = drain_s
        self._to_copier()

    def _read(self, tier: int, key: bytes, view: memoryview) -> tuple[int, float]:
        """Bytes that came, and this read's part of the time among the tier's loads."""
        shared = self.shared
        lane = shared.queues[tier].lane
        operation = lane.begin(is_store=False)
        num_bytes = 0
        try:
            num_bytes = shared.tiers[tier].load(key, view, shared.fmt.file_bytes)
        finally:
            spent = lane.finish(operation, whole_chunk=num_bytes == shared.fmt.file_bytes)
            self._tier_s += spent.elapsed_s
        return num_bytes, spent.drain_s

    def shed(self, reason: str) -> None:
        self._give_up(reason)

    def crashed(self, error: Exception) -> None:
        self._miss(self._sources[0], reasons.INTERNAL)

    def prepare(self) -> ChunkCopy:
        # The slot holds what was read: nothing may write to it any more.
        return ChunkCopy(self.block_ids, self.shared.payload(self.slot), self.skip_blocks)

    def on_tensor(self, number: int, event: Event) -> None:
        if self._watch is not None:
            self._watch.on_tensor(number, event)

    def on_copied(self, copy_s: float) -> None:
        self._report(None, copy_s, self._misses)
        for tier in self._copy_up:
            self.shared.queues[tier].put_store(_WriteTask(self, tier, self.shared.clock()))
        self.leave()

    def on_revoked(self) -> None:
        self._abandon_copy_up(self.cancelled_as or reasons.FENCED)
        self.leave()

    def on_copy_failed(self, error: Exception) -> None:
        self._report(reasons.INTERNAL, 0.0, self._misses)
        self._abandon_copy_up(reasons.INTERNAL)
        self.leave()

    def _to_copier(self) -> None:
        if self._cohort is None:
            self.shared.copier.put([self])
        else:
            self._cohort.arrive(self)

    def _leave_cohort(self) -> None:
        if self._cohort is not None:
            self._cohort.leave(self)

    def _ask_next(self) -> None:
        self.put_s = self.shared.clock()
        self.shared.queues[self._sources[0]].put_load(self)

    def _miss(self, tier: int, reason: str) -> None:
        self._misses.append((tier, reason))
        self.shared.events.append(Passed(self.job_id, self.part, tier))
        del self._sources[0]
        if self._sources and not self.decided:
            self._ask_next()
        else:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self.claim.take():
            self._report(reason, 0.0, self._misses)
        self._leave_cohort()
        self._abandon_copy_up(reason)
        self.leave()

    def _abandon_copy_up(self, reason: str) -> None:
        for tier in self._copy_up:
            _WriteTask(self, tier, self.shared.clock()).shed(reason)

    def _report(self, reason: str | None, copy_s: float, misses: list[tuple[int, str]]) -> None:
        num_bytes = self.shared.fmt.payload_bytes if reason is None else 0
        if reason is not None and self._watch is not None:
            self._watch.on_missed()
        self.shared.events.append(
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
        self.leave()

    def _remove_damaged(self, tier: int, key: bytes) -> None:
        try:
            self.shared.tiers[tier].delete(key)
        except TierError as error:
            _log.warning("a damaged chunk could not be removed: %s", error)
