"""The scheduler's half: which chunk goes where, and what is known to be held.

The planner holds no tensors and does no I/O; every method returns after bounded work on plain
Python values, so it may run on an engine's scheduling path. It talks to the rank workers through
orders and reports alone. Lookups, stores and loads are parts of their own, over shared `Books`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvsluice.connector.account import PlannedTier, TierAccount
from kvsluice.connector.books import Books, PlannerSettings
from kvsluice.connector.ledger import LoadState, StoreState
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.load_plan import LoadPlan
from kvsluice.connector.lookups import Lookups
from kvsluice.connector.orders import (
    CancelOrder,
    Copied,
    Ended,
    Evicted,
    Loaded,
    Order,
    Passed,
    RankReport,
    ResetDone,
    ResetOrder,
    WorkerEvent,
    Wrote,
)
from kvsluice.connector.prober import SupportsProbing
from kvsluice.connector.results import Lookup, OffloadStats, TransferResult
from kvsluice.connector.store_plan import StorePlan
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Spent
from kvsluice.tiers.chunk_file import check_key
from kvsluice.tiers.errors import LayoutError

__all__ = ["Planner", "PlannerSettings"]


def _by_drain(spent: Spent) -> float:
    return spent.drain_s


class Planner:
    """Index, gates, slots and deadlines of one KV-cache group. Not thread-safe: the scheduler's alone.

    Args:
        tiers: the ladder, fastest first; a host tier may only be the first.
        settings: see `PlannerSettings`.
        prober: answers which keys a tier holds; None where no tier outlives this process.
        load_gate: keeps hits from being used that are slower than recompute; None uses all.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[PlannedTier],
        settings: PlannerSettings,
        *,
        prober: SupportsProbing | None = None,
        load_gate: LoadGate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._books = Books(tiers, settings, clock)
        self._load_gate = load_gate
        self._lookups = Lookups(self._books, prober, load_gate)
        self._stores = StorePlan(self._books)
        self._loads = LoadPlan(self._books, load_gate)
        self._reset_left: dict[int, int] = {}

    # ---- the engine's calls ------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading `keys` some tier holds; see `OffloadConnector.lookup`."""
        return self._lookups.lookup(keys)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Plan one store job; see `OffloadConnector.store`."""
        self._check(keys, block_ids)
        return self._stores.plan(keys, block_ids)

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], deadline_s: float | None, *, skip_blocks: int = 0
    ) -> int:
        """Plan one load job; see `OffloadConnector.load`.

        `skip_blocks` leading blocks of the first chunk are left as they are: the engine has them, and
        its other requests may be reading them.
        """
        self._check(keys, block_ids)
        if not 0 <= skip_blocks < self.settings.blocks_per_chunk:
            raise ValueError(f"skip_blocks {skip_blocks} does not lie in 0 .. {self.settings.blocks_per_chunk - 1}")
        if len(set(block_ids)) != len(block_ids):
            twice = next(block for block, count in Counter(block_ids).items() if count > 1)
            raise LayoutError(f"block id {twice} is the target of two chunks of one load")
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"deadline_s {deadline_s} must be positive")
        self._lookups.take_answers(self._books.clock())
        return self._loads.plan(keys, block_ids, deadline_s, skip_blocks)

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn the engine's speed; see `OffloadConnector.observe_prefill`."""
        if num_tokens < 0 or not 0 <= elapsed_s < math.inf:
            raise ValueError(f"{num_tokens} tokens in {elapsed_s} s: neither may be negative, nor endless")
        if self._load_gate is not None:
            self._load_gate.observe_prefill(num_tokens, elapsed_s)

    def cancel(self, job_id: int) -> None:
        """Shed what of the job has not started; see `OffloadConnector.cancel`."""
        if not self.is_open(job_id):
            return
        job = self._books.ledger.jobs[job_id]
        now_s = self._books.clock()
        # A store that other jobs share goes on for their sake.
        spared = self._stores.cancel(job, now_s)
        self._loads.cancel(job, now_s)
        if job_id in self._books.ledger.jobs:
            self._books.send(CancelOrder(job_id, spared))

    def fence(self, block_ids: frozenset[int], reason: str = reasons.FENCED) -> None:
        """What waits for a slot and would touch these blocks once it had one, never will."""
        self._shed_where(lambda state: not block_ids.isdisjoint(state.block_ids), reason)

    def reset(self) -> int:
        """Stop serving everything that is held; see `OffloadConnector.reset`. Returns the reset's id."""
        books = self._books
        books.generation += 1
        books.slots.forget_all()
        books.ledger.spoil_loads(reasons.RESET)
        self._shed_where(lambda state: True, reasons.RESET)
        self._stores.forget_under_way()
        self._lookups.forget()
        for at in books.io:
            account = books.tiers[at]
            account.index.clear()
            account.resetting = True
            account.lost_to_reset = False
            self._reset_left[at] = self.settings.num_ranks
        books.send(ResetOrder(books.generation))
        return books.generation

    def reset_outcome(self) -> dict[str, str] | None:
        """None while a reset runs; then the tiers that it could not empty, each with the reason."""
        return None if any(account.resetting for account in self._books.tiers) else self.unreset()

    def unreset(self) -> dict[str, str]:
        """The tiers that are not (yet) known to be empty, each with the reason."""
        return {
            account.plan.name: reasons.DEADLINE if account.resetting else reasons.IO_ERROR
            for account in self._books.tiers
            if not account.serving
        }

    def shed_waiting_as_closed(self) -> None:
        """Nothing that waits for a slot will get one any more."""
        self._shed_where(lambda state: True, reasons.CLOSED)

    def _shed_where(self, matches: Callable[[StoreState | LoadState], bool], reason: str) -> None:
        now_s = self._books.clock()
        self._stores.shed_where(matches, reason, now_s)
        self._loads.shed_where(matches, reason, now_s)

    # ---- orders out, reports in --------------------------------------------------------------

    def take_orders(self) -> tuple[Order, ...]:
        """What the workers are to be told now; each rank gets the same."""
        return self._books.take_orders()

    def apply(self, report: RankReport) -> None:
        """Take in what one rank saw, then hand the slots it freed to what waits for one."""
        now_s = self._books.clock()
        for event in report.events:
            self._apply(event, now_s)
        for state in report.tiers:
            account = self._books.tiers[state.tier]
            account.saw(report.rank, state)
            if self._load_gate is not None and self._books.loads_open[state.tier]:
                # The rank that has waited longest speaks for all, as for stores.
                stalls = (seen.load_stall for seen in account.states.values())
                self._load_gate.on_stall(state.tier, max(stalls, key=_by_drain), now_s)
        self._lookups.take_answers(now_s)
        self._loads.dispatch(now_s)
        self._stores.dispatch(now_s)

    def _apply(self, event: WorkerEvent, now_s: float) -> None:
        match event:
            case Evicted():
                self._books.tiers[event.tier].index.remove(event.key, now_s)
                return
            case ResetDone():
                self._on_reset_done(event)
                return
        state = self._books.ledger.parts[event.job_id, event.part]
        match event:
            case Copied():
                assert isinstance(state, StoreState)
                self._stores.on_copied(state, event, now_s)
            case Wrote():
                self._on_wrote(state, event, now_s)
            case Loaded():
                assert isinstance(state, LoadState)
                self._loads.on_loaded(state, event, now_s)
            case Passed():
                assert isinstance(state, LoadState)
                self._loads.on_passed(state, event, now_s)
            case Ended():
                self._on_ended(state)

    def _on_wrote(self, state: StoreState | LoadState, event: Wrote, now_s: float) -> None:
        """A tier's write, be it a store's or of what a load brought up."""
        account = self._books.tiers[event.tier]
        job = state.job
        account.wrote(
            event.reason,
            event.num_bytes,
            event.spent,
            queue_s=event.queue_s,
            started=event.started,
            first=event.tier not in state.tier_reasons,
        )
        job.moved_bytes += event.num_bytes if job.kind == "store" else 0
        job.queue_s += event.queue_s
        job.tier_s += event.spent.elapsed_s
        if event.reason is not None:
            state.tier_reasons[event.tier] = event.reason
        state.ranks_to_write[event.tier] -= 1
        if state.ranks_to_write[event.tier]:
            return
        del state.ranks_to_write[event.tier]
        account.stores_open -= 1
        account.slots_in_stores -= 1
        current = state.generation == self._books.generation
        if event.tier not in state.tier_reasons and current and account.serving:
            account.index.add(state.key)
        if isinstance(state, StoreState):
            self._stores.on_wrote(state, event, now_s)

    def _on_ended(self, state: StoreState | LoadState) -> None:
        state.ranks_to_end -= 1
        if state.ranks_to_end:
            return
        del self._books.ledger.parts[state.job.job_id, state.part]
        if isinstance(state, LoadState):
            self._loads.uncharge(state)
        self._books.slots.unpin(state.slot)

    def _on_reset_done(self, event: ResetDone) -> None:
        # A later reset makes the answers to an earlier one worthless.
        if event.reset_id != self._books.generation:
            return
        account = self._books.tiers[event.tier]
        account.lost_to_reset = account.lost_to_reset or event.reason is not None
        self._reset_left[event.tier] -= 1
        if self._reset_left[event.tier] == 0:
            account.resetting = False

    def take_results(self) -> list[TransferResult]:
        """Jobs that are over, each once."""
        return self._books.ledger.take_results()

    def take_released(self) -> list[int]:
        """Store jobs whose source blocks are free, each once."""
        return self._books.ledger.take_released()

    # ---- observation -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no job is open and no worker still touches a slot."""
        return not self._books.ledger.jobs and not self._books.ledger.parts

    def open_jobs(self) -> list[int]:
        """Jobs whose result is still to come."""
        return list(self._books.ledger.jobs)

    def is_open(self, job_id: int) -> bool:
        """Whether the job's result is still to come.

        Raises:
            ValueError: the job was never issued.
        """
        if not self._books.ledger.was_issued(job_id):
            raise ValueError(f"job {job_id} was never issued")
        return job_id in self._books.ledger.jobs

    def stats(self) -> OffloadStats:
        """A frozen snapshot; cheap enough for every step."""
        books = self._books
        pool = books.slots.usage()
        tiers = {}
        for account in books.tiers:
            if account is books.host:
                known = pool.held
                used: int | None = pool.held * self.settings.slot_bytes
                capacity: int | None = self.settings.host_slots * self.settings.slot_bytes
            else:
                states = list(account.states.values())
                known = len(account.index)
                used = next((state.used_bytes for state in states), None)
                capacity = next((state.capacity_bytes for state in states), None)
            tiers[account.plan.name] = account.stats(known_chunks=known, used_bytes=used, capacity_bytes=capacity)
        return OffloadStats(
            tiers=tiers,
            pool=pool,
            slot_bytes=self.settings.slot_bytes,
            jobs_open=len(books.ledger.jobs),
            stores_waiting=self._stores.num_waiting,
            loads_waiting=self._loads.num_waiting,
            lookups=self._lookups.lookups,
            lookups_pending=self._lookups.pending,
            hit_chunks=self._lookups.hit_chunks,
            skipped=dict(books.skipped),
            unused=dict(books.unused),
            load_gate=None if self._load_gate is None else self._load_gate.stats,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless slots, shares and open stores are conserved."""
        books = self._books
        books.slots.check_integrity()
        live = list(books.ledger.parts.values())
        waiting = list(self._stores.waiting)
        pins = Counter(state.slot for state in live)
        actual = books.slots.pins()
        if dict(pins) != actual:
            raise AssertionError(f"live parts pin {dict(pins)}, the slot table says {actual}")
        loads = [state for state in live if isinstance(state, LoadState)]
        stand_at = Counter(state.stands_at for state in [*loads, *self._loads.waiting] if state.stands_at is not None)
        if stand_at != +books.loads_open:
            raise AssertionError(f"open loads by tier {dict(books.loads_open)}, live parts {dict(stand_at)}")
        for at, account in enumerate(books.tiers):
            if account is books.host:
                copying = [state for state in live if isinstance(state, StoreState) and state.ranks_to_copy]
                expected = sum(state.to_host for state in [*copying, *waiting])
            else:
                expected = sum(at in state.ranks_to_write for state in live)
                expected += sum(at in state.tiers for state in waiting)
                self._check_share(at, account, live)
            if account.stores_open != expected:
                raise AssertionError(f"tier {account.plan.name}: {account.stores_open} stores open, not {expected}")

    @staticmethod
    def _check_share(at: int, account: TierAccount, live: Sequence[StoreState | LoadState]) -> None:
        writing = sum(at in state.ranks_to_write for state in live)
        reading = sum(isinstance(state, LoadState) and at in state.charged for state in live)
        if (account.slots_in_stores, account.slots_in_loads) != (writing, reading):
            raise AssertionError(
                f"tier {account.plan.name}: share {account.slots_in_stores}+{account.slots_in_loads}, "
                f"live parts {writing}+{reading}"
            )

    def _check(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        for key in keys:
            check_key(key)
        if len(set(keys)) != len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise ValueError(f"key {twice.hex()} stands twice in one job")
        width, num_blocks = self.settings.blocks_per_chunk, self.settings.num_blocks
        if len(block_ids) != len(keys) * width:
            raise LayoutError(
                f"{len(keys)} keys of {width} blocks each need {len(keys) * width} block ids, got {len(block_ids)}"
            )
        for block in block_ids:
            if not isinstance(block, int):
                raise LayoutError(f"block id {block!r} is of type {type(block).__name__}, not int")
            if not 0 <= block < num_blocks:
                raise LayoutError(f"block id {block!r} does not lie in 0 .. {num_blocks - 1}")
