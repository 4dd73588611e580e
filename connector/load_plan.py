"""The planner's loads: which tier a chunk comes from, which slot it goes through, what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvsluice.connector.account import FAULTS
from kvsluice.connector.books import Books
from kvsluice.connector.ledger import Job, LoadState
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.orders import HOST, Loaded, LoadPart, Passed
from kvsluice.tiers import reasons

__all__ = ["LoadPlan"]

PROOFS: Final = frozenset(
    {reasons.MISSING, reasons.SHORT, reasons.OVERSIZE, reasons.CHECKSUM, reasons.FOREIGN, reasons.HEADER}
)
"""Outcomes that prove that a tier does not hold the chunk; after the others it may well hold it."""


class LoadPlan:
    """Not thread-safe: the planner's alone.

    Args:
        books: slots, tiers and open jobs.
        load_gate: learns how long loads take; None where nobody asks.
    """

    def __init__(self, books: Books, load_gate: LoadGate | None = None) -> None:
        self._books = books
        self._load_gate = load_gate
        # By the tier that is to serve them: one that is dead or slow holds up its own line.
        self._waiting: dict[int, deque[LoadState]] = {at: deque() for at in books.io}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting(self) -> Iterable[LoadState]:
        for line in self._waiting.values():
            yield from line

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, keys: Sequence[bytes], block_ids: Sequence[int], deadline_s: float | None, skip_blocks: int) -> int:
        """Open a job and send what finds a slot."""
        books = self._books
        timeout_s = books.settings.load_timeout_s if deadline_s is None else deadline_s
        now_s = books.clock()
        job = books.ledger.open("load", tuple(keys), now_s)
        job.expires_s = now_s + timeout_s
        width = books.settings.blocks_per_chunk
        states = []
        for part, key in enumerate(job.keys):
            blocks = tuple(block_ids[part * width : (part + 1) * width])
            state = LoadState(job, part, key, blocks, (), books.generation)
            state.skip_blocks = skip_blocks if part == 0 else 0
            self._plan_part(state, now_s)
            states.append(state)
        if not job.keys:
            books.ledger.finish(job, now_s)
        elif self._load_gate is not None:
            sources = {state.stands_at for state in states if state.stands_at is not None}
            patience_s = self._load_gate.patience_s(sources, job.keys, timeout_s, now_s)
            # A deadline that the caller named is the caller's own.
            if deadline_s is None:
                job.expires_s = now_s + patience_s
        self.dispatch(now_s)
        return job.job_id

    def _plan_part(self, state: LoadState, now_s: float) -> None:
        books = self._books
        slot = books.slots.find(state.key)
        if slot is not None:
            books.slots.pin(slot)
            state.slot = slot
            self._stand_at(HOST, state, now_s)
            self._send(state, now_s)
            return
        held, unknown = [], []
        for at in books.io:
            account = books.tiers[at]
            if account.serving and account.index.holds(state.key):
                held.append(at)
            elif account.serving and not account.index.lacks(state.key, now_s):
                unknown.append(at)
        state.sources = tuple(held + unknown)
        state.num_held = len(held)
        if state.sources:
            self._stand_at(state.sources[0], state, now_s)
            state.place = books.loads_open[state.sources[0]]
            self._waiting[state.sources[0]].append(state)
        else:
            books.unused[reasons.MISSING] += 1
            books.ledger.decide(state.job, state.part, reasons.MISSING, now_s)

    def _stand_at(self, at: int | None, state: LoadState, now_s: float) -> None:
        """Count the load among those open at this tier, and no longer where it stood."""
        loads_open, gate, before = self._books.loads_open, self._load_gate, state.stands_at
        if at == before:
            return
        state.stands_at = at
        if before is not None:
            loads_open[before] -= 1
            if gate is not None and (state.slowest is None or state.slowest.tier != before):
                gate.on_lost(before)
            if gate is not None and not loads_open[before]:
                gate.on_quiet(before, now_s)
        if at is not None:
            loads_open[at] += 1
            if gate is not None and loads_open[at] == 1:
                gate.on_opened(at, now_s)

    def dispatch(self, now_s: float) -> None:
        """Send what waits as far as slots and shares go; miss what waited past its deadline."""
        slots = self._books.slots
        for line in self._waiting.values():
            while line:
                state = line[0]
                if state.job.expires_s <= now_s:
                    self._miss(line.popleft(), reasons.DEADLINE, now_s)
                    continue
                if not self._find_room(state):
                    break
                slot = slots.acquire()
                if slot is None:
                    break
                line.popleft()
                state.slot = slot
                self._send(state, now_s)

    def _find_room(self, state: LoadState) -> bool:
        """Whether a tier that holds the chunk may have one more slot; if so it stands first."""
        for at in state.sources[: max(1, state.num_held)]:
            if self._books.tiers[at].has_load_room:
                state.sources = (at, *(other for other in state.sources if other != at))
                return True
        return False

    def _send(self, state: LoadState, now_s: float) -> None:
        books = self._books
        ranks = books.settings.num_ranks
        if state.sources:
            first = state.sources[0]
            self._stand_at(first, state, now_s)
            state.sources = tuple(at for at in state.sources if at == first or self._may_fall_through_to(at))
            for at in state.sources:
                books.tiers[at].slots_in_loads += 1
                state.charged[at] = ranks
            state.copy_up = tuple(
                at
                for at in books.io
                if at < first
                and not books.tiers[at].index.holds(state.key)
                and books.tiers[at].has_store_room
                and books.tiers[at].admit(books.settings.blocks_per_chunk) is None
            )
            for at in state.copy_up:
                books.tiers[at].slots_in_stores += 1
        state.ranks_to_load = state.ranks_to_end = ranks
        state.ranks_to_write = dict.fromkeys(state.copy_up, ranks)
        books.ledger.parts[state.job.job_id, state.part] = state
        books.send_load(
            state.job.job_id,
            LoadPart(
                state.part, state.key, state.block_ids, state.slot, state.sources, state.copy_up, state.skip_blocks
            ),
        )

    def _may_fall_through_to(self, at: int) -> bool:
        """Whether the tier's share has room: one that hangs would take the slot along."""
        account = self._books.tiers[at]
        account.missed[reasons.SLOT_SHARE] += not account.has_load_room
        return account.has_load_room

    # ---- shedding ----------------------------------------------------------------------------

    def shed_where(self, matches: Callable[[LoadState], bool], reason: str, now_s: float) -> None:
        """Miss those that wait and match."""
        for at, line in self._waiting.items():
            shed = [state for state in line if matches(state)]
            if shed:
                gone = set(map(id, shed))
                self._waiting[at] = deque(state for state in line if id(state) not in gone)
                for state in shed:
                    self._miss(state, reason, now_s)

    def cancel(self, job: Job, now_s: float) -> None:
        """Miss what of the job waits."""
        self.shed_where(lambda state: state.job is job, reasons.CANCELLED, now_s)

    def _miss(self, state: LoadState, reason: str, now_s: float) -> None:
        self._stand_at(None, state, now_s)
        if reason == reasons.DEADLINE:
            account = self._books.tiers[state.sources[0]]
            account.missed[reason] += 1
            account.index.doubt(state.key, now_s)
        else:
            self._books.unused[reason] += 1
        self._books.ledger.decide(state.job, state.part, reason, now_s)

    # ---- what the workers report -------------------------------------------------------------

    def on_loaded(self, state: LoadState, event: Loaded, now_s: float) -> None:
        books = self._books
        job = state.job
        job.copy_s += event.copy_s
        job.queue_s += event.queue_s
        job.tier_s += event.tier_s
        for at, reason in event.misses:
            account = books.tiers[at]
            account.missed[reason] += 1
            if reason in PROOFS:
                account.index.remove(state.key, now_s)
            else:
                account.index.doubt(state.key, now_s)
        self._teach(state, event, now_s)
        if event.reason is None:
            job.moved_bytes += event.num_bytes
            state.served.add(event.tier)
            served = books.tiers[event.tier] if event.tier >= 0 else books.host
            if served is not None:
                served.chunks_loaded += 1
                served.bytes_loaded += event.num_bytes
        else:
            state.reason = event.reason
        state.ranks_to_load -= 1
        if state.ranks_to_load:
            return
        self._stand_at(None, state, now_s)
        if state.reason is None:
            # Nobody reads any more; what a late reader still has, it keeps until it has ended.
            self.uncharge(state)
        else:
            # A source that hangs keeps the slot in its share; those that would have come after it are not asked.
            for at in list(state.charged)[1:]:
                del state.charged[at]
                books.tiers[at].slots_in_loads -= 1
        if state.generation != books.generation:
            state.reason = reasons.RESET
        if state.reason is None:
            # Where ranks were served by different tiers, none of these is known to hold every part.
            if len(state.served) == 1 and event.tier >= 0 and books.tiers[event.tier].serving:
                books.tiers[event.tier].index.add(state.key)
            if books.host is not None and state.sources:
                books.slots.keep(state.slot, state.key)
        elif not event.misses:
            books.unused[state.reason] += 1
        books.ledger.decide(job, state.part, state.reason, now_s)

    def _teach(self, state: LoadState, event: Loaded, now_s: float) -> None:
        """Tell the load gate how long it took, or that it took too long."""
        gate = self._load_gate
        if gate is None:
            return
        if event.reason is None:
            slowest = state.slowest
            if slowest is None or event.drain_s + event.copy_s > slowest.drain_s + slowest.copy_s:
                state.slowest = slowest = event
            # The chunk is there when the last rank has its part.
            if state.ranks_to_load == 1 and state.reason is None:
                gate.on_copied(slowest.copy_s, now_s)
                # After a miss the time is that of several tiers, and nobody knows whose.
                if slowest.tier >= 0 and not slowest.misses:
                    gate.on_loaded(slowest.tier, slowest.drain_s, slowest.tier_s, now_s)
        elif len(event.misses) == 1:
            at, reason = event.misses[0]
            if reason == reasons.DEADLINE:
                gate.on_late(at, state.job.expires_s - state.job.start_s, max(1, state.place), now_s)
            elif reason in FAULTS:
                gate.on_failed(at, event.queue_s + event.tier_s, max(1, state.place), now_s)

    def on_passed(self, state: LoadState, event: Passed, now_s: float) -> None:
        """A rank will not read from this source any more."""
        if event.tier in state.charged:
            state.charged[event.tier] -= 1
            if state.charged[event.tier] == 0:
                del state.charged[event.tier]
                self._books.tiers[event.tier].slots_in_loads -= 1
                if state.stands_at == event.tier:
                    self._stand_at(next(iter(state.charged), None), state, now_s)

    def uncharge(self, state: LoadState) -> None:
        """The slot counts in no source's share any more."""
        for at in state.charged:
            self._books.tiers[at].slots_in_loads -= 1
        state.charged.clear()
