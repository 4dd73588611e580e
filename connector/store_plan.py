"""The planner's stores: who takes a chunk, which slot it goes through, what came of it.

    store ──gates──▶ waits for a slot ──▶ with the workers ──▶ decided
                          │ too long
                          └──▶ shed

A key that is being stored already is not stored twice: the later job follows the earlier one's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvsluice.connector.account import TierAccount
from kvsluice.connector.books import Books
from kvsluice.connector.ledger import Job, StoreState
from kvsluice.connector.orders import HOST, Copied, StorePart, Wrote
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Spent

__all__ = ["StorePlan"]


@dataclass(slots=True)
class _Offer:
    """One chunk of a job that is being planned."""

    part: int
    key: bytes
    block_ids: tuple[int, ...]
    slot: int | None
    """Where the host tier holds it already."""
    wanted: list[int]
    """Tiers that lack it, less those whose gates refused it."""
    refusal: str | None = None


class StorePlan:
    """Not thread-safe: the planner's alone."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._under_way: dict[bytes, StoreState] = {}
        # One line per set of tiers: whoever wants the same tiers waits for the same room, so only heads matter.
        self._waiting: dict[tuple[int, ...], deque[StoreState]] = {}
        self._arrivals = 0
        # Stores never take the last quarter, so that a load finds a slot in the middle of a flood.
        self._max_pinned = max(1, books.settings.num_slots - books.settings.num_slots // 4)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting(self) -> Iterable[StoreState]:
        for line in self._waiting.values():
            yield from line

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Open a job, ask the gates, and send what finds a slot."""
        books = self._books
        now_s = books.clock()
        job = books.ledger.open("store", tuple(keys), now_s)
        width = books.settings.blocks_per_chunk
        offers = []
        for part, key in enumerate(job.keys):
            leader = self._under_way.get(key)
            if leader is not None:
                leader.followers.append((job, part))
                books.ledger.copied(job)
                continue
            slot = books.slots.find(key)
            wanted = [at for at in books.io if not books.tiers[at].index.holds(key)]
            if slot is None and books.host is not None:
                wanted.append(HOST)
            block_ids_of = tuple(block_ids[part * width : (part + 1) * width])
            offers.append(_Offer(part, key, block_ids_of, slot, wanted))
        for at in (*books.io, HOST):
            self._ask_gate(at, [offer for offer in offers if at in offer.wanted])
        for offer in offers:
            self._plan_offer(job, offer, now_s)
        if not job.keys:
            books.ledger.finish(job, now_s)
        self.dispatch(now_s)
        return job.job_id

    def _account(self, at: int) -> TierAccount:
        books = self._books
        if at != HOST:
            return books.tiers[at]
        assert books.host is not None
        return books.host

    def _ask_gate(self, at: int, offers: Sequence[_Offer]) -> None:
        """Ask a tier's gate once for each chunk; as many as it lets through are the first ones.

        A chunk is found through those before it. Where a gate lets half of a prompt through, its first
        half is of use, every second chunk is not.
        """
        width = self._books.settings.blocks_per_chunk
        refusals = [reason for _ in offers if (reason := self._account(at).admit(width)) is not None]
        num_admitted = len(offers) - len(refusals)
        for offer, reason in zip(offers[num_admitted:], refusals, strict=True):
            offer.wanted.remove(at)
            offer.refusal = reason

    def _plan_offer(self, job: Job, offer: _Offer, now_s: float) -> None:
        books = self._books
        to_host = HOST in offer.wanted
        admitted = [at for at in offer.wanted if at != HOST]
        if not admitted and not to_host:
            self._settle(job, offer.part, offer.refusal if offer.slot is None else None, now_s)
            return
        patience_s = min(self._account(at).plan.max_queue_s for at in offer.wanted)
        state = StoreState(
            job, offer.part, offer.key, offer.block_ids, to_host, admitted, now_s + patience_s, books.generation
        )
        self._under_way[offer.key] = state
        if offer.slot is not None:
            self._write_from(offer.slot, state, now_s)
        elif self.num_waiting >= books.settings.max_stores_waiting:
            self._shed(state, reasons.POOL_FULL, now_s)
        else:
            self._arrivals += 1
            state.arrival = self._arrivals
            self._waiting.setdefault(self._line_of(state), deque()).append(state)

    def _write_from(self, slot: int, state: StoreState, now_s: float) -> None:
        """The host tier holds the bytes already: nothing is copied, and the blocks are free at once."""
        books = self._books
        state.tiers = self._with_share(state)
        if not state.tiers:
            del self._under_way[state.key]
            self._settle(state.job, state.part, None, now_s)
            return
        books.slots.pin(slot)
        state.slot = slot
        state.block_ids = ()
        state.held = True
        books.ledger.copied(state.job)
        self._send(state)

    def _settle(self, job: Job, part: int, reason: str | None, now_s: float) -> None:
        """A store that no worker will hear of: its blocks are free at once."""
        if reason is not None:
            self._books.skipped[reason] += 1
        self._books.ledger.copied(job)
        self._books.ledger.decide(job, part, reason, now_s)

    @staticmethod
    def _line_of(state: StoreState) -> tuple[int, ...]:
        return (*state.tiers, HOST) if state.to_host else tuple(state.tiers)

    def dispatch(self, now_s: float) -> None:
        """Send what waits, oldest first, as far as slots and shares go; shed what waited too long."""
        books = self._books
        for line in self._waiting.values():
            while line and line[0].expires_s <= now_s:
                self._shed(line.popleft(), reasons.POOL_FULL, now_s)
        while True:
            heads = [line[0] for line in self._waiting.values() if line]
            ready = [
                state for state in heads if state.to_host or any(books.tiers[at].has_store_room for at in state.tiers)
            ]
            # Asked for an idle slot only once the bound holds, stores evict nothing in vain.
            if not ready or books.slots.num_pinned >= self._max_pinned:
                return
            slot = books.slots.acquire()
            if slot is None:
                return
            state = min(ready, key=lambda head: head.arrival)
            self._waiting[self._line_of(state)].popleft()
            state.tiers = self._with_share(state)
            state.slot = slot
            state.ranks_to_copy = books.settings.num_ranks
            self._send(state)

    def _with_share(self, state: StoreState) -> list[int]:
        """The tiers of `state` that may have one more slot; the store is withdrawn from the others."""
        having = [at for at in state.tiers if self._books.tiers[at].has_store_room]
        for at in state.tiers:
            if at not in having:
                self._books.tiers[at].withdraw(reasons.SLOT_SHARE)
                state.last_reason = reasons.SLOT_SHARE
        return having

    def _send(self, state: StoreState) -> None:
        books = self._books
        ranks = books.settings.num_ranks
        state.ranks_to_end = ranks
        state.ranks_to_write = dict.fromkeys(state.tiers, ranks)
        for at in state.tiers:
            books.tiers[at].slots_in_stores += 1
        books.ledger.parts[state.job.job_id, state.part] = state
        books.send_store(
            state.job.job_id, StorePart(state.part, state.key, state.block_ids, state.slot, tuple(state.tiers))
        )

    # ---- shedding ----------------------------------------------------------------------------

    def shed_where(self, matches: Callable[[StoreState], bool], reason: str, now_s: float) -> None:
        """Shed those that wait and match."""
        for name, line in self._waiting.items():
            shed = [state for state in line if matches(state)]
            if shed:
                gone = set(map(id, shed))
                self._waiting[name] = deque(state for state in line if id(state) not in gone)
                for state in shed:
                    self._shed(state, reason, now_s)

    def _shed(self, state: StoreState, reason: str, now_s: float) -> None:
        for at in state.tiers:
            self._books.tiers[at].withdraw(reason)
        if state.to_host and self._books.host is not None:
            self._books.host.withdraw(reason)
        self._books.skipped[reason] += 1
        self._books.ledger.copied(state.job)
        state.last_reason = reason
        self._decide(state, now_s)

    def cancel(self, job: Job, now_s: float) -> tuple[int, ...]:
        """Shed what of the job waits or follows; the parts that go on because other jobs follow them."""
        self.shed_where(lambda state: state.job is job and not state.followers, reasons.CANCELLED, now_s)
        spared = []
        for leader in list(self._under_way.values()):
            mine = [part for follower, part in leader.followers if follower is job]
            leader.followers = [entry for entry in leader.followers if entry[0] is not job]
            for part in mine:
                self._books.ledger.decide(job, part, reasons.CANCELLED, now_s)
            if leader.job is job and leader.followers:
                spared.append(leader.part)
            elif leader.job is job:
                # It may be shed any moment: a later store of the key must not share its fate.
                del self._under_way[leader.key]
        return tuple(spared)

    def forget_under_way(self) -> None:
        """After a reset what is under way holds bytes from before: a new store of its key must not share its fate."""
        self._under_way.clear()

    # ---- what the workers report -------------------------------------------------------------

    def on_copied(self, state: StoreState, event: Copied, now_s: float) -> None:
        books = self._books
        state.ranks_to_copy -= 1
        state.job.copy_s += event.copy_s
        if event.reason is not None:
            state.copy_reason = state.last_reason = event.reason
        elif state.to_host and books.host is not None:
            books.host.teach(books.settings.chunk_bytes, Spent.alone(event.copy_s))
        if state.ranks_to_copy:
            return
        books.ledger.copied(state.job)
        if state.to_host and books.host is not None:
            books.host.stores_open -= 1
            self._keep_in_host(state, books.host)
        self._maybe_decide(state, now_s)

    def _keep_in_host(self, state: StoreState, host: TierAccount) -> None:
        books = self._books
        reason = state.copy_reason
        if reason is None and state.generation != books.generation:
            reason = reasons.RESET
        if reason is None and state.key in books.slots:
            # A load brought it up meanwhile.
            state.held = True
            host.chunks_already_held += books.settings.num_ranks
            return
        if reason is None and not books.slots.keep(state.slot, state.key):
            reason = reasons.POOL_FULL
        if reason is not None:
            state.last_reason = reason
            host.wrote(reason, 0, Spent.alone(0.0))
            return
        state.held = True
        num_bytes = books.settings.num_ranks * books.settings.chunk_bytes
        state.job.moved_bytes += num_bytes
        host.chunks_stored += books.settings.num_ranks
        host.bytes_stored += num_bytes

    def on_wrote(self, state: StoreState, event: Wrote, now_s: float) -> None:
        """One tier's write of a store's chunk is over on all ranks; its account knows already."""
        if event.tier in state.tier_reasons:
            state.last_reason = state.tier_reasons[event.tier]
        elif state.generation == self._books.generation and self._books.tiers[event.tier].serving:
            state.held = True
        else:
            state.last_reason = reasons.RESET
        self._maybe_decide(state, now_s)

    def _maybe_decide(self, state: StoreState, now_s: float) -> None:
        if not state.decided and state.ranks_to_copy == 0 and not state.ranks_to_write:
            self._decide(state, now_s)

    def _decide(self, state: StoreState, now_s: float) -> None:
        state.decided = True
        if self._under_way.get(state.key) is state:
            del self._under_way[state.key]
        reason = None if state.held else state.last_reason or reasons.INTERNAL
        self._books.ledger.decide(state.job, state.part, reason, now_s)
        for job, part in state.followers:
            self._books.ledger.decide(job, part, reason, now_s)
