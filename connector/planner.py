"""The scheduler's half: which chunk goes where, and what is known to be held.

The planner holds no tensors and does no I/O; every method returns after bounded work on plain
Python values, so it may run on an engine's scheduling path. It talks to the rank workers through
orders and reports alone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsluice.connector.account import PlannedTier, TierAccount
from kvsluice.connector.ledger import Job, Ledger, LoadState, StoreState
from kvsluice.connector.orders import (
    CancelOrder,
    Copied,
    Ended,
    Evicted,
    Loaded,
    LoadOrder,
    LoadPart,
    Order,
    Passed,
    RankReport,
    ResetDone,
    ResetOrder,
    StoreOrder,
    StorePart,
    TierState,
    WorkerEvent,
    Wrote,
)
from kvsluice.connector.prober import Prober
from kvsluice.connector.results import Lookup, OffloadStats, TransferResult
from kvsluice.tiers import reasons
from kvsluice.tiers.chunk_file import check_key
from kvsluice.tiers.errors import LayoutError
from kvsluice.tiers.slots import SlotTable

__all__ = ["Planner", "PlannerSettings"]


def _is_shared(state: StoreState | LoadState) -> bool:
    return isinstance(state, StoreState) and bool(state.followers)


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Bounds in time and in count.

    Attributes:
        blocks_per_chunk, num_blocks: the geometry that block ids are checked against.
        chunk_bytes: payload bytes of one rank's part of a chunk.
        slot_bytes: bytes of a slot, header and alignment included.
        num_slots: slots of each rank's pinned region.
        host_slots: how many of them the host tier may hold; 0 without a host tier.
        num_ranks: workers that each order goes to.
        load_timeout_s: deadline of a load that names none.
        lookup_timeout_s: how long a lookup may stay pending before the tier counts as not holding.
        negative_ttl_s: how long "not held" is believed.
        max_stores_waiting: chunks that may wait for a slot; their blocks are held meanwhile.
        probe_keys: keys per question to a tier.
    """

    blocks_per_chunk: int
    num_blocks: int
    chunk_bytes: int
    slot_bytes: int
    num_slots: int
    host_slots: int
    num_ranks: int = 1
    load_timeout_s: float = 10.0
    lookup_timeout_s: float = 1.0
    negative_ttl_s: float = 5.0
    max_stores_waiting: int = 1024
    probe_keys: int = 1024


class Planner:
    """Index, gates, slots and deadlines of one KV-cache group. Not thread-safe: the scheduler's alone.

    Args:
        tiers: the ladder, fastest first; a host tier may only be the first.
        settings: see `PlannerSettings`.
        prober: answers which keys a tier holds; None where no tier outlives this process.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[PlannedTier],
        settings: PlannerSettings,
        *,
        prober: Prober | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._prober = prober
        self._slots = SlotTable(settings.num_slots, settings.host_slots)
        io_tiers = [at for at, tier in enumerate(tiers) if not tier.is_host]
        # A dead tier keeps at most its share; with n of them one more share is left to everybody else.
        share = max(1, settings.num_slots // (len(io_tiers) + 1))
        self._tiers = [TierAccount(tier, negative_ttl_s=settings.negative_ttl_s, slot_share=share) for tier in tiers]
        self._io = tuple(io_tiers)
        self._host = self._tiers[0] if tiers and tiers[0].is_host else None
        # Stores never take the last quarter, so that a load finds a slot in the middle of a flood.
        self._store_slots = settings.num_slots - settings.num_slots // 4
        self._ledger = Ledger()
        self._storing: dict[bytes, StoreState] = {}
        self._stores_waiting: deque[StoreState] = deque()
        self._loads_waiting: dict[int, deque[LoadState]] = {at: deque() for at in self._io}
        self._orders: list[Order] = []
        self._stores_out: dict[int, list[StorePart]] = {}
        self._loads_out: dict[int, list[LoadPart]] = {}
        self._generation = 0
        self._reset_left: dict[int, int] = {}
        self._probing: dict[tuple[int, bytes], float] = {}
        self._lookups = 0
        self._lookups_pending = 0
        self._hit_chunks = 0
        self._skipped: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()

    # ---- lookup ------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading `keys` some tier holds; see `OffloadConnector.lookup`."""
        now_s = self._clock()
        self._take_answers(now_s)
        self._lookups += 1
        held = 0
        pending = False
        for key in keys:
            if key not in self._slots and not any(
                self._tiers[at].serving and self._tiers[at].index.holds(key) for at in self._io
            ):
                pending = self._ask(keys, held, now_s)
                break
            held += 1
        self._lookups_pending += pending
        self._hit_chunks += 0 if pending else held
        return Lookup(held, pending)

    def _ask(self, keys: Sequence[bytes], first: int, now_s: float) -> bool:
        """Have every tier that may hold `keys[first]` asked; whether an answer is still to come."""
        if self._prober is None:
            return False
        pending = False
        key = keys[first]
        for at in self._io:
            account = self._tiers[at]
            if not account.serving or account.index.lacks(key, now_s):
                continue
            since_s = self._probing.get((at, key))
            if since_s is None:
                if not self._prober.ask(at, tuple(keys[first : first + self.settings.probe_keys])):
                    account.missed["lookup_shed"] += 1
                    continue
                self._probing[at, key] = since_s = now_s
            if now_s - since_s < self.settings.lookup_timeout_s:
                pending = True
            else:
                account.missed["lookup_timeout"] += 1
                account.index.remove(key, now_s)
        return pending

    def _take_answers(self, now_s: float) -> None:
        if self._prober is None:
            return
        for answer in self._prober.answers():
            account = self._tiers[answer.tier]
            self._probing.pop((answer.tier, answer.keys[0]), None)
            if not account.serving:
                continue
            if answer.error is not None:
                account.missed["lookup_failed"] += 1
                account.index.remove(answer.keys[0], now_s)
                continue
            for key in answer.keys[: answer.held]:
                account.index.add(key)
            if answer.held < len(answer.keys):
                account.index.remove(answer.keys[answer.held], now_s)

    # ---- store -------------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Plan one store job; see `OffloadConnector.store`."""
        self._check(keys, block_ids)
        now_s = self._clock()
        job = self._ledger.open("store", tuple(keys), now_s)
        width = self.settings.blocks_per_chunk
        for part, key in enumerate(job.keys):
            self._plan_store(job, part, key, tuple(block_ids[part * width : (part + 1) * width]), now_s)
        if not job.keys:
            self._ledger.finish(job, now_s)
        self._dispatch_stores(now_s)
        return job.job_id

    def _plan_store(self, job: Job, part: int, key: bytes, block_ids: tuple[int, ...], now_s: float) -> None:
        under_way = self._storing.get(key)
        if under_way is not None:
            under_way.followers.append((job, part))
            self._ledger.copied(job)
            return
        slot = self._slots.find(key)
        wanted = [at for at in self._io if not self._tiers[at].index.holds(key)]
        to_host = self._host is not None and slot is None
        if not wanted and not to_host:
            self._settle_store(job, part, None, now_s)
            return
        refusal = None
        admitted = []
        for at in wanted:
            reason = self._tiers[at].admit(self.settings.blocks_per_chunk)
            if reason is None:
                admitted.append(at)
            else:
                refusal = reason
        if to_host and self._host is not None:
            reason = self._host.admit(self.settings.blocks_per_chunk)
            to_host = reason is None
            refusal = reason or refusal
        if not admitted and not to_host:
            self._settle_store(job, part, None if slot is not None else refusal, now_s)
            return
        max_queue_s = min(
            [self._tiers[at].plan.max_queue_s for at in admitted]
            + ([self._host.plan.max_queue_s] if to_host and self._host is not None else [])
        )
        state = StoreState(job, part, key, block_ids, to_host, admitted, now_s + max_queue_s, self._generation)
        self._storing[key] = state
        if slot is not None:
            state.tiers = self._with_share(state)
            if not state.tiers:
                del self._storing[key]
                self._settle_store(job, part, None, now_s)
                return
            self._slots.pin(slot)
            state.slot = slot
            state.block_ids = ()
            state.held = True
            self._ledger.copied(job)
            self._send_store(state)
        elif len(self._stores_waiting) >= self.settings.max_stores_waiting:
            self._shed_waiting(state, reasons.POOL_FULL, now_s)
        else:
            self._stores_waiting.append(state)

    def _settle_store(self, job: Job, part: int, reason: str | None, now_s: float) -> None:
        """A store that no worker will hear of: its blocks are free at once."""
        if reason is not None:
            self._skipped[reason] += 1
        self._ledger.copied(job)
        self._ledger.decide(job, part, reason, now_s)

    def _dispatch_stores(self, now_s: float) -> None:
        waiting = self._stores_waiting
        # Those whose tiers hold their share stay, in order; they are in nobody's way.
        staying: list[StoreState] = []
        while waiting:
            state = waiting.popleft()
            if state.expires_s <= now_s:
                self._shed_waiting(state, reasons.POOL_FULL, now_s)
                continue
            if not state.to_host and not any(self._tiers[at].has_store_room for at in state.tiers):
                staying.append(state)
                continue
            # Looking for an idle slot only once the bound holds keeps stores from evicting for nothing.
            full = self._slots.num_pinned >= max(1, self._store_slots)
            slot = None if full else self._slots.acquire()
            if slot is None:
                waiting.appendleft(state)
                break
            state.tiers = self._with_share(state)
            state.slot = slot
            state.ranks_to_copy = self.settings.num_ranks
            self._send_store(state)
        waiting.extendleft(reversed(staying))

    def _with_share(self, state: StoreState) -> list[int]:
        """The tiers of `state` that may have one more slot; the store is withdrawn from the others."""
        having = [at for at in state.tiers if self._tiers[at].has_store_room]
        for at in state.tiers:
            if at not in having:
                self._tiers[at].withdraw(reasons.SLOT_SHARE)
                state.last_reason = reasons.SLOT_SHARE
        return having

    def _send_store(self, state: StoreState) -> None:
        ranks = self.settings.num_ranks
        state.ranks_to_end = ranks
        state.ranks_to_write = dict.fromkeys(state.tiers, ranks)
        for at in state.tiers:
            self._tiers[at].slots_in_stores += 1
        self._ledger.parts[state.job.job_id, state.part] = state
        self._stores_out.setdefault(state.job.job_id, []).append(
            StorePart(state.part, state.key, state.block_ids, state.slot, tuple(state.tiers))
        )

    def _shed_waiting(self, state: StoreState, reason: str, now_s: float) -> None:
        for at in state.tiers:
            self._tiers[at].withdraw(reason)
        if state.to_host and self._host is not None:
            self._host.withdraw(reason)
        self._skipped[reason] += 1
        self._ledger.copied(state.job)
        state.last_reason = reason
        self._decide_store(state, now_s)

    def _decide_store(self, state: StoreState, now_s: float) -> None:
        state.decided = True
        if self._storing.get(state.key) is state:
            del self._storing[state.key]
        reason = None if state.held else state.last_reason or reasons.INTERNAL
        self._ledger.decide(state.job, state.part, reason, now_s)
        for job, part in state.followers:
            self._ledger.decide(job, part, reason, now_s)

    # ---- load --------------------------------------------------------------------------------

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
        now_s = self._clock()
        self._take_answers(now_s)
        job = self._ledger.open("load", tuple(keys), now_s)
        job.expires_s = now_s + (self.settings.load_timeout_s if deadline_s is None else deadline_s)
        width = self.settings.blocks_per_chunk
        for part, key in enumerate(job.keys):
            blocks = tuple(block_ids[part * width : (part + 1) * width])
            self._plan_load(job, part, key, blocks, skip_blocks if part == 0 else 0, now_s)
        if not job.keys:
            self._ledger.finish(job, now_s)
        self._dispatch_loads(now_s)
        return job.job_id

    def _plan_load(
        self, job: Job, part: int, key: bytes, block_ids: tuple[int, ...], skip_blocks: int, now_s: float
    ) -> None:
        state = LoadState(job, part, key, block_ids, (), self._generation, skip_blocks=skip_blocks)
        slot = self._slots.find(key)
        if slot is not None:
            self._slots.pin(slot)
            state.slot = slot
            self._send_load(state, now_s)
            return
        held, unknown = [], []
        for at in self._io:
            account = self._tiers[at]
            if not account.serving:
                continue
            if account.index.holds(key):
                held.append(at)
            elif not account.index.lacks(key, now_s):
                unknown.append(at)
        state.sources = tuple(held + unknown)
        if not state.sources:
            self._unused[reasons.MISSING] += 1
            state.decided = True
            self._ledger.decide(job, part, reasons.MISSING, now_s)
            return
        self._loads_waiting[state.sources[0]].append(state)

    def _dispatch_loads(self, now_s: float) -> None:
        for at, waiting in self._loads_waiting.items():
            account = self._tiers[at]
            while waiting:
                state = waiting[0]
                if state.job.expires_s <= now_s:
                    waiting.popleft()
                    self._miss_waiting(state, reasons.DEADLINE, now_s)
                    continue
                if not account.has_load_room:
                    break
                slot = self._slots.acquire()
                if slot is None:
                    break
                waiting.popleft()
                state.slot = slot
                self._send_load(state, now_s)

    def _send_load(self, state: LoadState, now_s: float) -> None:
        ranks = self.settings.num_ranks
        if state.sources:
            first = state.sources[0]
            state.sources = tuple(at for at in state.sources if at == first or self._has_share(at))
            for at in state.sources:
                self._tiers[at].slots_in_loads += 1
                state.charged[at] = ranks
            state.copy_up = tuple(
                at
                for at in self._io
                if at < first
                and not self._tiers[at].index.holds(state.key)
                and self._tiers[at].has_store_room
                and self._tiers[at].admit(self.settings.blocks_per_chunk) is None
            )
            for at in state.copy_up:
                self._tiers[at].slots_in_stores += 1
        state.ranks_to_load = state.ranks_to_end = ranks
        state.ranks_to_write = dict.fromkeys(state.copy_up, ranks)
        self._ledger.parts[state.job.job_id, state.part] = state
        self._loads_out.setdefault(state.job.job_id, []).append(
            LoadPart(
                state.part, state.key, state.block_ids, state.slot, state.sources, state.copy_up, state.skip_blocks
            )
        )

    def _has_share(self, at: int) -> bool:
        """Whether a load may fall through to the tier; one that hangs would take the slot along."""
        account = self._tiers[at]
        account.missed[reasons.SLOT_SHARE] += not account.has_load_room
        return account.has_load_room

    def _miss_waiting(self, state: LoadState, reason: str, now_s: float) -> None:
        if reason == reasons.DEADLINE:
            first = state.sources[0]
            self._tiers[first].missed[reason] += 1
            self._tiers[first].index.remove(state.key, now_s)
        else:
            self._unused[reason] += 1
        state.decided = True
        self._ledger.decide(state.job, state.part, reason, now_s)

    # ---- cancel and reset --------------------------------------------------------------------

    def cancel(self, job_id: int) -> None:
        """Shed what of the job has not started; see `OffloadConnector.cancel`."""
        if not self._ledger.was_issued(job_id):
            raise ValueError(f"job {job_id} was never issued")
        job = self._ledger.jobs.get(job_id)
        if job is None:
            return
        # A store that other jobs share goes on for their sake.
        self._shed_where(lambda state: state.job is job and not _is_shared(state), reasons.CANCELLED)
        for leader in list(self._storing.values()):
            mine = [part for follower, part in leader.followers if follower is job]
            if mine:
                leader.followers = [entry for entry in leader.followers if entry[0] is not job]
                for part in mine:
                    self._ledger.decide(job, part, reasons.CANCELLED, self._clock())
        if job_id in self._ledger.jobs:
            self._flush()
            spared = tuple(state.part for state in self._storing.values() if state.job is job and state.followers)
            self._orders.append(CancelOrder(job_id, spared))

    def fence(self, block_ids: frozenset[int]) -> None:
        """What waits for a slot and would touch these blocks once it had one, never will."""
        self._shed_where(lambda state: not block_ids.isdisjoint(state.block_ids), reasons.FENCED)

    def reset(self) -> int:
        """Stop serving everything that is held; see `OffloadConnector.reset`. Returns the reset's id."""
        self._generation += 1
        self._slots.forget_all()
        self._shed_where(lambda state: True, reasons.RESET)
        # What is under way holds bytes from before the reset: a new store of its key must not share its fate.
        self._storing.clear()
        self._probing.clear()
        if self._prober is not None:
            self._prober.forget()
        for at in self._io:
            account = self._tiers[at]
            account.index.clear()
            account.resetting = True
            account.lost_to_reset = False
            self._reset_left[at] = self.settings.num_ranks
        self._flush()
        self._orders.append(ResetOrder(self._generation))
        return self._generation

    def reset_outcome(self) -> dict[str, str] | None:
        """None while a reset runs; then the tiers that it could not empty, each with the reason."""
        return None if any(self._tiers[at].resetting for at in self._io) else self.unreset()

    def unreset(self) -> dict[str, str]:
        """The tiers that are not (yet) known to be empty, each with the reason."""
        return {
            account.plan.name: reasons.DEADLINE if account.resetting else reasons.IO_ERROR
            for account in self._tiers
            if not account.serving
        }

    def shed_waiting_as_closed(self) -> None:
        """Nothing that waits for a slot will get one any more."""
        self._shed_where(lambda state: True, reasons.CLOSED)

    def _shed_where(self, matches: Callable[[StoreState | LoadState], bool], reason: str) -> None:
        now_s = self._clock()
        for state in [state for state in self._stores_waiting if matches(state)]:
            self._stores_waiting.remove(state)
            self._shed_waiting(state, reason, now_s)
        for waiting in self._loads_waiting.values():
            for load in [load for load in waiting if matches(load)]:
                waiting.remove(load)
                self._miss_waiting(load, reason, now_s)

    # ---- orders out, reports in --------------------------------------------------------------

    def take_orders(self) -> tuple[Order, ...]:
        """What the workers are to be told now; each rank gets the same."""
        self._flush()
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def _flush(self) -> None:
        for job_id, loads in self._loads_out.items():
            job = self._ledger.jobs.get(job_id)
            left_s = job.expires_s - self._clock() if job is not None else 0.0
            self._orders.append(LoadOrder(job_id, tuple(loads), left_s))
        for job_id, stores in self._stores_out.items():
            self._orders.append(StoreOrder(job_id, tuple(stores)))
        self._loads_out.clear()
        self._stores_out.clear()

    def apply(self, report: RankReport) -> None:
        """Take in what one rank saw, then hand the slots it freed to what waits for one."""
        now_s = self._clock()
        for event in report.events:
            self._apply(event, now_s)
        for state in report.tiers:
            self._tiers[state.tier].states[report.rank] = state
        self._take_answers(now_s)
        self._dispatch_loads(now_s)
        self._dispatch_stores(now_s)

    def _apply(self, event: WorkerEvent, now_s: float) -> None:
        match event:
            case Copied():
                self._on_copied(event, now_s)
            case Wrote():
                self._on_wrote(event, now_s)
            case Loaded():
                self._on_loaded(event, now_s)
            case Passed():
                self._on_passed(event)
            case Ended():
                self._on_ended(event)
            case Evicted():
                self._tiers[event.tier].index.remove(event.key, now_s)
            case ResetDone():
                self._on_reset_done(event)

    def _on_copied(self, event: Copied, now_s: float) -> None:
        state = self._ledger.parts[event.job_id, event.part]
        assert isinstance(state, StoreState)
        state.ranks_to_copy -= 1
        state.job.copy_s += event.copy_s
        if event.reason is not None:
            state.copy_reason = state.last_reason = event.reason
        elif state.to_host and self._host is not None:
            self._host.teach(self.settings.chunk_bytes, event.copy_s)
        if state.ranks_to_copy:
            return
        self._ledger.copied(state.job)
        if state.to_host and self._host is not None:
            self._host.stores_open -= 1
            self._keep_in_host(state, self._host)
        self._maybe_decide(state, now_s)

    def _keep_in_host(self, state: StoreState, host: TierAccount) -> None:
        reason = state.copy_reason
        if reason is None and state.generation != self._generation:
            reason = reasons.RESET
        if reason is None and state.key in self._slots:
            # A load brought it up meanwhile.
            state.held = True
            host.chunks_already_held += self.settings.num_ranks
            return
        if reason is None and not self._slots.keep(state.slot, state.key):
            reason = reasons.POOL_FULL
        if reason is not None:
            state.last_reason = reason
            host.wrote(reason, 0, 0.0)
            return
        state.held = True
        num_bytes = self.settings.num_ranks * self.settings.chunk_bytes
        state.job.moved_bytes += num_bytes
        host.chunks_stored += self.settings.num_ranks
        host.bytes_stored += num_bytes

    def _on_wrote(self, event: Wrote, now_s: float) -> None:
        state = self._ledger.parts[event.job_id, event.part]
        account = self._tiers[event.tier]
        job = state.job
        account.wrote(event.reason, event.num_bytes, event.tier_s)
        job.moved_bytes += event.num_bytes if job.kind == "store" else 0
        job.queue_s += event.queue_s
        job.tier_s += event.tier_s
        if event.reason is not None:
            state.tier_reasons[event.tier] = event.reason
        state.ranks_to_write[event.tier] -= 1
        if state.ranks_to_write[event.tier]:
            return
        del state.ranks_to_write[event.tier]
        account.stores_open -= 1
        account.slots_in_stores -= 1
        current = state.generation == self._generation
        if event.tier not in state.tier_reasons and current and account.serving:
            account.index.add(state.key)
            if isinstance(state, StoreState):
                state.held = True
        elif isinstance(state, StoreState):
            state.last_reason = state.tier_reasons.get(event.tier, reasons.RESET)
        if isinstance(state, StoreState):
            self._maybe_decide(state, now_s)

    def _maybe_decide(self, state: StoreState, now_s: float) -> None:
        if not state.decided and state.ranks_to_copy == 0 and not state.ranks_to_write:
            self._decide_store(state, now_s)

    def _on_loaded(self, event: Loaded, now_s: float) -> None:
        state = self._ledger.parts[event.job_id, event.part]
        assert isinstance(state, LoadState)
        job = state.job
        job.copy_s += event.copy_s
        job.queue_s += event.queue_s
        job.tier_s += event.tier_s
        for at, reason in event.misses:
            self._tiers[at].missed[reason] += 1
            self._tiers[at].index.remove(state.key, now_s)
        if event.reason is None:
            job.moved_bytes += event.num_bytes
            state.served.add(event.tier)
            served = self._tiers[event.tier] if event.tier >= 0 else self._host
            if served is not None:
                served.chunks_loaded += 1
                served.bytes_loaded += event.num_bytes
        else:
            state.reason = event.reason
        state.ranks_to_load -= 1
        if state.ranks_to_load:
            return
        state.decided = True
        if state.reason is None:
            # Nobody reads any more; what a late reader still has, it keeps until it has ended.
            self._uncharge(state)
        if state.generation != self._generation:
            state.reason = reasons.RESET
        if state.reason is None:
            # Where ranks were served by different tiers, none of these is known to hold every part.
            if len(state.served) == 1 and event.tier >= 0 and self._tiers[event.tier].serving:
                self._tiers[event.tier].index.add(state.key)
            if self._host is not None and state.sources:
                self._slots.keep(state.slot, state.key)
        elif not event.misses:
            self._unused[state.reason] += 1
        self._ledger.decide(job, state.part, state.reason, now_s)

    def _on_passed(self, event: Passed) -> None:
        state = self._ledger.parts[event.job_id, event.part]
        assert isinstance(state, LoadState)
        if event.tier in state.charged:
            state.charged[event.tier] -= 1
            if state.charged[event.tier] == 0:
                del state.charged[event.tier]
                self._tiers[event.tier].slots_in_loads -= 1

    def _uncharge(self, state: LoadState) -> None:
        for at in state.charged:
            self._tiers[at].slots_in_loads -= 1
        state.charged.clear()

    def _on_ended(self, event: Ended) -> None:
        state = self._ledger.parts[event.job_id, event.part]
        state.ranks_to_end -= 1
        if state.ranks_to_end:
            return
        del self._ledger.parts[event.job_id, event.part]
        if isinstance(state, LoadState):
            self._uncharge(state)
        self._slots.unpin(state.slot)

    def _on_reset_done(self, event: ResetDone) -> None:
        # A later reset makes the answers to an earlier one worthless.
        if event.reset_id != self._generation:
            return
        account = self._tiers[event.tier]
        account.lost_to_reset = account.lost_to_reset or event.reason is not None
        self._reset_left[event.tier] -= 1
        if self._reset_left[event.tier] == 0:
            account.resetting = False

    def take_results(self) -> list[TransferResult]:
        """Jobs that are over, each once."""
        return self._ledger.take_results()

    def take_released(self) -> list[int]:
        """Store jobs whose source blocks are free, each once."""
        return self._ledger.take_released()

    # ---- observation -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no job is open and no worker still touches a slot."""
        return not self._ledger.jobs and not self._ledger.parts

    def open_jobs(self) -> list[int]:
        """Jobs whose result is still to come."""
        return list(self._ledger.jobs)

    def is_open(self, job_id: int) -> bool:
        """Whether the job's result is still to come.

        Raises:
            ValueError: the job was never issued.
        """
        if not self._ledger.was_issued(job_id):
            raise ValueError(f"job {job_id} was never issued")
        return job_id in self._ledger.jobs

    def stats(self) -> OffloadStats:
        """A frozen snapshot; cheap enough for every step."""
        pool = self._slots.usage()
        tiers = {}
        for account in self._tiers:
            if account is self._host:
                known = pool.held
                used: int | None = pool.held * self.settings.slot_bytes
                capacity: int | None = self.settings.host_slots * self.settings.slot_bytes
            else:
                states: list[TierState] = list(account.states.values())
                known = len(account.index)
                used = next((state.used_bytes for state in states), None)
                capacity = next((state.capacity_bytes for state in states), None)
            tiers[account.plan.name] = account.stats(known_chunks=known, used_bytes=used, capacity_bytes=capacity)
        return OffloadStats(
            tiers=tiers,
            pool=pool,
            slot_bytes=self.settings.slot_bytes,
            jobs_open=len(self._ledger.jobs),
            stores_waiting=len(self._stores_waiting),
            loads_waiting=sum(len(waiting) for waiting in self._loads_waiting.values()),
            lookups=self._lookups,
            lookups_pending=self._lookups_pending,
            hit_chunks=self._hit_chunks,
            skipped=dict(self._skipped),
            unused=dict(self._unused),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless slots and open stores are conserved."""
        self._slots.check_integrity()
        live = list(self._ledger.parts.values())
        pins = Counter(state.slot for state in live)
        actual = self._slots.pins()
        if dict(pins) != actual:
            raise AssertionError(f"live parts pin {dict(pins)}, the slot table says {actual}")
        for at, account in enumerate(self._tiers):
            if account is self._host:
                copying = [state for state in live if isinstance(state, StoreState) and state.ranks_to_copy]
                expected = sum(state.to_host for state in [*copying, *self._stores_waiting])
            else:
                expected = sum(at in state.ranks_to_write for state in live)
                expected += sum(at in state.tiers for state in self._stores_waiting)
            if account.stores_open != expected:
                raise AssertionError(f"tier {account.plan.name}: {account.stores_open} stores open, not {expected}")
            if account is not self._host:
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
            if not isinstance(block, int) or not 0 <= block < num_blocks:
                raise LayoutError(f"block id {block!r} does not lie in 0 .. {num_blocks - 1}")
