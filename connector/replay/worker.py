"""The rank worker on virtual time: orders in, reports out, as `RankWorker` does it, without bytes.

Queue rules, stall and spent times, events and their order are the product's; copies take
`bytes / rate` one after another, and a tier's reads and writes take what the modelled device says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from kvsluice.connector.orders import (
    CancelOrder,
    Ended,
    Evicted,
    LoadOrder,
    Order,
    RankReport,
    ResetOrder,
    StoreOrder,
    WorkerEvent,
)
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.transfers import LoadTransfer, ModelledRung, Shared, StoreTransfer
from kvsluice.connector.worker import MAX_EVENTS_PER_REPORT
from kvsluice.tiers import reasons

__all__ = ["ModelledWorker"]


class ModelledWorker:
    """One rank's half on virtual time.

    Args:
        timeline: its clock.
        rungs: the I/O tiers by their place in the ladder.
        chunk_bytes: payload of a chunk.
        copy_bytes_per_s: between blocks and slots, either direction, one at a time.
        on_decided: told job, part, serving tier and reason of each load at the moment it is decided, which the
            scheduler hears at its next step.
    """

    def __init__(
        self,
        timeline: Timeline,
        rungs: Mapping[int, ModelledRung],
        *,
        chunk_bytes: int,
        copy_bytes_per_s: float,
        on_decided: Callable[[int, int, int, str | None], None],
    ) -> None:
        self._rungs = rungs
        self._shared = Shared(timeline, rungs, chunk_bytes, copy_bytes_per_s, on_decided)
        self._by_job: dict[int, dict[int, StoreTransfer | LoadTransfer]] = {}
        self._deadlines: list[tuple[float, int, LoadTransfer]] = []
        self._sequence = 0

    def submit(self, orders: Iterable[Order]) -> None:
        """Start what `orders` say."""
        for order in orders:
            match order:
                case StoreOrder():
                    for store in order.parts:
                        self._start(StoreTransfer(self._shared, order.job_id, store))
                case LoadOrder():
                    deadline_s = self._shared.clock.now_s + order.deadline_s
                    for part in order.parts:
                        load = LoadTransfer(self._shared, order.job_id, part, deadline_s)
                        self._sequence += 1
                        heapq.heappush(self._deadlines, (deadline_s, self._sequence, load))
                        self._start(load)
                case CancelOrder():
                    for part_id, transfer in self._by_job.get(order.job_id, {}).items():
                        if part_id not in order.spared:
                            transfer.revoke(reasons.CANCELLED)
                case ResetOrder():
                    raise NotImplementedError("a replay resets nothing")

    def collect(self) -> RankReport:
        """What happened since the last call; loads past their deadline and stores that waited too long end here."""
        now_s = self._shared.clock.now_s
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].claimed):
            load = heapq.heappop(self._deadlines)[2]
            if not load.claimed:
                load.revoke(reasons.DEADLINE)
        states = []
        for at, rung in self._rungs.items():
            rung.threads.shed_stores(reasons.QUEUE_TIMEOUT, older_than_s=rung.max_queue_s)
            content, lane = rung.tier.content, rung.threads.lane.state()
            states.append(lane.report(at, content.used_bytes, content.capacity_bytes))
        waiting = self._shared.events
        events: list[WorkerEvent] = []
        while waiting and len(events) < MAX_EVENTS_PER_REPORT:
            event = waiting.popleft()
            events.append(event)
            if isinstance(event, Ended):
                transfers = self._by_job[event.job_id]
                del transfers[event.part]
                if not transfers:
                    del self._by_job[event.job_id]
        more = bool(waiting)
        for at, rung in self._rungs.items():
            evicted = rung.tier.take_evicted(MAX_EVENTS_PER_REPORT - len(events))
            events.extend(Evicted(at, key) for key in evicted)
        return RankReport(0, tuple(events), tuple(states), more=more)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is left to report."""
        return not self._by_job and not self._shared.events

    def _start(self, transfer: StoreTransfer | LoadTransfer) -> None:
        self._by_job.setdefault(transfer.job_id, {})[transfer.part] = transfer
        transfer.start()
