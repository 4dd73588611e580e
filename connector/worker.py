"""One rank's half: the tensors, the pinned region, the copies and the tiers' I/O."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvsluice.connector.by_layer import Cohort, LayerWatch
from kvsluice.connector.copier import JOIN_S, Copier
from kvsluice.connector.io_queue import IoQueue
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.orders import (
    CancelOrder,
    Ended,
    Evicted,
    LoadOrder,
    Order,
    RankReport,
    ResetDone,
    ResetOrder,
    StoreOrder,
    WorkerEvent,
)
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.transfers import LoadTransfer, Shared, StoreTransfer
from kvsluice.kernels.chooser import open_movers
from kvsluice.kernels.device import Device, Event, device_for
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.movers import STAGING_BYTES
from kvsluice.kernels.plan import CopyPlan
from kvsluice.kernels.ways import CopySetting
from kvsluice.tiers import reasons
from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import ChunkFormat, engine_key
from kvsluice.tiers.errors import ConfigError, TierError

__all__ = ["RankWorker", "WorkerTier"]

_log = logging.getLogger(__name__)

MAX_EVENTS_PER_REPORT = 512
"""Keeps the scheduler's work per report, a few microseconds an event, below 2 ms."""
MAX_FAILURE_KINDS = 32
"""Of each tier in a report: many more than a tier has words for, unless it puts names or numbers into them."""
OTHER_FAILURES = "other"


def _few(failures: Mapping[str, int]) -> Mapping[str, int]:
    """The same, those that came least summed up where there are too many kinds to report."""
    if len(failures) <= MAX_FAILURE_KINDS:
        return failures
    kept = Counter(dict(Counter(failures).most_common(MAX_FAILURE_KINDS - 1)))
    kept[OTHER_FAILURES] += sum(failures.values()) - kept.total()
    return kept


@dataclass(frozen=True, slots=True)
class WorkerTier:
    """One I/O tier of the ladder: where it stands, what it is, how many threads serve it."""

    position: int
    tier: Tier
    read_threads: int
    write_threads: int
    max_queue_s: float
    adapt_stores: bool = True


class RankWorker:
    """Carries out orders for one rank and reports what came of them.

    `submit`, `collect` and `fence` are called on the engine's worker thread; the first two never
    block. Threads: one for copies, `read_threads + write_threads` for each tier; all daemons.

    Args:
        layout: the rank's KV tensors.
        fmt: the chunk file of this layout, namespace, group and rank.
        region: the slots; both halves agree on their number.
        tiers: the I/O tiers.
        rank: this worker's number in reports.
        verify: prove each chunk that was read by its checksum before it is used.
        device_copy, device_staging_bytes: see `OffloadConfig`.
        device: streams and events; chosen by the layout's device if None.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the way of copying that was asked for cannot be had, or the device cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        fmt: ChunkFormat,
        region: PinnedRegion,
        tiers: Sequence[WorkerTier],
        *,
        blocks_per_chunk: int,
        rank: int = 0,
        verify: bool = True,
        device_copy: CopySetting = "auto",
        device_staging_bytes: int = STAGING_BYTES,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._device = device_for(layout.device, clock) if device is None else device
        self._region = region
        self._tiers = {tier.position: tier for tier in tiers}
        # Before any thread starts: a layout that cannot be copied leaves none behind.
        plan = CopyPlan(layout.paged, blocks_per_chunk)
        try:
            movers = open_movers(
                plan,
                self._device,
                setting=device_copy,
                staging_bytes=device_staging_bytes,
                scratch=region.tensor(0)[fmt.header_bytes : fmt.file_bytes],
                clock=clock,
            )
        except DeviceCopyError as error:
            raise ConfigError(f"device_copy {device_copy!r}: {error}") from error
        self.copy_choices = movers.choices
        """How stores and loads are copied, and what was measured."""
        try:
            copier = Copier(self._device, movers.out, movers.into, clock=clock)
        except RuntimeError as error:
            raise ConfigError(f"a thread of our own cannot use {layout.device}: {error}") from error
        self._queues: Mapping[int, IoQueue] = {
            tier.position: IoQueue(
                tier.tier.name,
                read_threads=tier.read_threads,
                write_threads=tier.write_threads,
                adapt_stores=tier.adapt_stores,
                clock=clock,
            )
            for tier in tiers
        }
        self._shared = Shared(
            fmt=fmt,
            region=region,
            copier=copier,
            tiers={tier.position: tier.tier for tier in tiers},
            queues=self._queues,
            verify=verify,
            clock=clock,
        )
        self._copier = copier
        self._watches: dict[int, LayerWatch] = {}
        self._by_job: dict[int, dict[int, StoreTransfer | LoadTransfer]] = {}
        self._deadlines: list[tuple[float, int, LoadTransfer]] = []
        self._sequence = 0
        self._closed: tuple[str, ...] | None = None

    def submit(self, orders: Iterable[Order]) -> None:
        """Start what `orders` say. The copies come after all that the engine's stream holds now."""
        ready = None
        for order in orders:
            match order:
                case CancelOrder():
                    self._cancel(order)
                case ResetOrder():
                    self._reset(order.reset_id)
                case StoreOrder():
                    ready = ready or self._device.compute_event()
                    for store in order.parts:
                        self._start(order.job_id, StoreTransfer(self._shared, order.job_id, store, ready))
                case LoadOrder():
                    ready = ready or self._device.compute_event()
                    self._load(order, ready)

    def collect(self) -> RankReport:
        """What happened since the last call; loads past their deadline and stores that waited too long end here."""
        now_s = self._clock()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].decided):
            transfer = heapq.heappop(self._deadlines)[2]
            if not transfer.decided:
                transfer.revoke(reasons.DEADLINE)
        states = []
        for at, tier in self._tiers.items():
            queue = self._queues[at]
            queue.shed_stores(reasons.QUEUE_TIMEOUT, older_than_s=tier.max_queue_s)
            usage, lane = tier.tier.usage(), queue.state()
            states.append(lane.report(at, usage.used_bytes, usage.capacity_bytes, _few(usage.failures)))
        events: list[WorkerEvent] = []
        while self._shared.events and len(events) < MAX_EVENTS_PER_REPORT:
            event = self._shared.events.popleft()
            events.append(event)
        self._forget_ended(events)
        more = bool(self._shared.events)
        # Evictions come in bursts of thousands and only correct a belief: they take the room that is left.
        for at, tier in self._tiers.items():
            evicted = tier.tier.take_evicted(MAX_EVENTS_PER_REPORT - len(events))
            events.extend(Evicted(at, engine_key(name)) for name in evicted)
        return RankReport(self.rank, tuple(events), tuple(states), more=more)

    def fence(self, block_ids: Iterable[int], timeout_s: float = 10.0) -> None:
        """Return once no transfer submitted before reads or writes these blocks, now or later.

        Loads into them that have not started to copy become misses (`fenced`). Copies out of them and
        copies under way are waited for: that is the device's and the copy thread's work, never a tier's.

        Raises:
            TimeoutError: the device was not done within `timeout_s`.
        """
        blocks = frozenset(block_ids)
        for transfers in self._by_job.values():
            for transfer in transfers.values():
                # One that is over may still be writing its slot to tiers: the blocks are no part of that.
                touches = isinstance(transfer, LoadTransfer) and not blocks.isdisjoint(transfer.block_ids)
                if touches and not transfer.claim.taken:
                    transfer.revoke(reasons.FENCED)
        self._copier.fence(blocks, timeout_s)

    def close(self, timeout_s: float) -> list[str]:
        """Finish what runs and waits within `timeout_s`, shed the rest; the threads that were left hanging.

        Idempotent: a second call returns what the first did.
        """
        if self._closed is not None:
            return list(self._closed)
        end_s = self._clock() + timeout_s
        # Loads come from the queues to the copier and stores go the other way, so both are waited for together.
        while (self._copier.busy or any(queue.busy for queue in self._queues.values())) and self._clock() < end_s:
            time.sleep(0.002)
        for transfers in self._by_job.values():
            for transfer in transfers.values():
                transfer.revoke(reasons.CLOSED)
        for queue in self._queues.values():
            queue.stop()
        left = []
        joined_s = max(end_s, self._clock() + JOIN_S)
        for at, queue in self._queues.items():
            hung = queue.join(joined_s)
            left += hung
            if not hung:
                self._tiers[at].tier.close()
        left += self._copier.close(joined_s)
        self._copier.shed()
        for queue in self._queues.values():
            queue.shed_stores(reasons.CLOSED)
            queue.shed_loads(reasons.CLOSED)
        self._closed = tuple(left)
        if left:
            _log.warning("closed with %d threads still in a tier's or the device's hands: %s", len(left), left)
        else:
            # A hung thread may still write into its slot, so only then the region goes.
            self._region.close()
        return left

    def watch_layers(self, job_id: int, watch: LayerWatch) -> None:
        """Copy the loads of a job layer by layer and tell `watch`; called before the job's first order."""
        self._watches[job_id] = watch

    def unwatch_layers(self, job_id: int) -> None:
        """The job is over."""
        self._watches.pop(job_id, None)

    def compute_wait(self, events: Iterable[Event]) -> None:
        """What the engine queues on its stream from now on starts after `events`."""
        for event in events:
            self._device.compute_wait(event)

    @property
    def region(self) -> PinnedRegion:
        return self._region

    def _load(self, order: LoadOrder, ready: Event) -> None:
        deadline_s = self._clock() + order.deadline_s
        watch = self._watches.get(order.job_id)
        cohort = None if watch is None else Cohort(self._copier, len(order.parts))
        for load in order.parts:
            transfer = LoadTransfer(self._shared, order.job_id, load, ready, deadline_s, watch=watch, cohort=cohort)
            self._sequence += 1
            heapq.heappush(self._deadlines, (deadline_s, self._sequence, transfer))
            self._start(order.job_id, transfer)

    def _start(self, job_id: int, transfer: StoreTransfer | LoadTransfer) -> None:
        self._by_job.setdefault(job_id, {})[transfer.part] = transfer
        transfer.start()

    def _forget_ended(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, Ended):
                transfers = self._by_job[event.job_id]
                del transfers[event.part]
                if not transfers:
                    del self._by_job[event.job_id]

    def _cancel(self, order: CancelOrder) -> None:
        for part, transfer in self._by_job.get(order.job_id, {}).items():
            if part not in order.spared:
                transfer.revoke(reasons.CANCELLED)

    def _reset(self, reset_id: int) -> None:
        # The order matters: from here on nothing older starts, then what waits goes, then the tiers are
        # emptied behind whatever still runs.
        self._shared.generation = reset_id
        for at, queue in self._queues.items():
            queue.shed_stores(reasons.RESET)
            queue.shed_loads(reasons.RESET)
            queue.run_alone(self._clearing(at, reset_id))

    def _clearing(self, at: int, reset_id: int) -> Callable[[], None]:
        def clear() -> None:
            reason = None
            try:
                self._tiers[at].tier.clear()
            except TierError as error:
                _log.warning("a reset could not empty tier %s: %s", self._tiers[at].tier.name, error)
                reason = error.reason
            except Exception:  # noqa: BLE001 - a stranger's tier: its failure is reported, not passed on
                _log.exception("a reset could not empty tier %s", self._tiers[at].tier.name)
                reason = reasons.INTERNAL
            self._shared.events.append(ResetDone(reset_id, at, reason))

        return clear
