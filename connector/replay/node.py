"""One engine with its connector on virtual time: the real planner, a modelled worker, steps.

    arrival ──▶ planner ──orders──▶ worker ──▶ devices
                   ▲                  │
                   └──── report ──────┘  at each step, while anything is open

A scheduler hears of what its workers did only at its steps, so reports wait for one. Orders go out with
the call that made them: a request that arrives makes a step of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvsluice.connector.orders import StoreOrder
from kvsluice.connector.planner import Planner
from kvsluice.connector.replay.measure import LoadLog
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.worker import ModelledWorker
from kvsluice.connector.results import Lookup, TransferResult

__all__ = ["Node"]


class Node:
    """Planner, worker and the steps between them.

    Args:
        timeline: its clock.
        planner: the product's.
        worker: what carries out its orders.
        loads: told of every load.
        step_s: seconds from one step to the next, while anything is open.

    Attributes:
        offered_chunks: given to `store`; of these, once all is over, `kept_chunks` are held by a tier and
            the others failed, each under a reason of `failed_stores`.
        sent_stores: chunks that the worker was ordered to store.
        worst_queued_stores: by tier, the most that ever waited for a thread, as reported.
    """

    def __init__(
        self, timeline: Timeline, planner: Planner, worker: ModelledWorker, loads: LoadLog, *, step_s: float
    ) -> None:
        self.planner = planner
        self.loads = loads
        self._timeline = timeline
        self._worker = worker
        self._step_s = step_s
        self._stepping = False
        self._on_loaded: dict[int, Callable[[TransferResult], None]] = {}
        self._at_step: list[Callable[[], None]] = []
        self.offered_chunks = 0
        self.sent_stores = 0
        self.kept_chunks = 0
        self.failed_stores: Counter[str] = Counter()
        self.worst_queued_stores: Counter[int] = Counter()

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        return self.planner.lookup(keys)

    def load(self, keys: Sequence[bytes], on_loaded: Callable[[TransferResult], None]) -> None:
        """Load `keys`; `on_loaded` is told at the step that hears of the last of them."""
        job = self.planner.load(keys, range(len(keys)), None)
        self._on_loaded[job] = on_loaded
        self.loads.opened(job, keys)
        self._send()
        # One that no tier is asked for is over already, and makes no step.
        self._take_results()
        self._open()

    def store(self, keys: Sequence[bytes]) -> None:
        """Offer `keys`."""
        self.offered_chunks += len(keys)
        self.planner.store(keys, range(len(keys)))
        self._send()
        self._take_results()
        self._open()

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        self.planner.observe_prefill(num_tokens, elapsed_s)

    def at_step(self, action: Callable[[], None]) -> None:
        """Run `action` at the next step."""
        self._at_step.append(action)
        self._open()

    def check_over(self) -> None:
        """Raise `AssertionError` unless all that was begun has ended and been told of, and nothing got lost."""
        planner = self.planner
        planner.check_integrity()
        if not (planner.idle and self._worker.idle) or self._on_loaded or self.loads.num_open or self._at_step:
            raise AssertionError(f"not over: jobs {planner.open_jobs()}, {self.loads.num_open} loads untold")
        over = self.kept_chunks + self.failed_stores.total()
        if over != self.offered_chunks:
            raise AssertionError(f"{self.offered_chunks} chunks were offered, {over} were kept or failed")

    def _send(self) -> None:
        orders = self.planner.take_orders()
        if orders:
            self.sent_stores += sum(len(order.parts) for order in orders if isinstance(order, StoreOrder))
            self._worker.submit(orders)

    def _open(self) -> None:
        if not self._stepping and not (self.planner.idle and self._worker.idle and not self._at_step):
            self._stepping = True
            self._timeline.after(self._step_s, self._step)

    def _step(self) -> None:
        self._stepping = False
        report = self._worker.collect()
        for state in report.tiers:
            if state.queued_stores > self.worst_queued_stores[state.tier]:
                self.worst_queued_stores[state.tier] = state.queued_stores
        self.planner.apply(report)
        self._take_results()
        waiting, self._at_step = self._at_step, []
        for action in waiting:
            action()
        self._send()
        self._open()

    def _take_results(self) -> None:
        self.planner.take_released()
        for result in self.planner.take_results():
            if result.kind == "load":
                self.loads.closed(result.job_id, len(result.failed))
                self._on_loaded.pop(result.job_id)(result)
            else:
                self.kept_chunks += len(result.done_keys)
                self.failed_stores.update(result.failed.values())
