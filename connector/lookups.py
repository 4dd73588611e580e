"""The planner's lookups: what is known to be held, and who is being asked about the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.books import Books
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.orders import HOST
from kvsluice.connector.prober import Answer, SupportsProbing
from kvsluice.connector.results import Lookup
from kvsluice.tiers import reasons
from kvsluice.tiers.chunk_file import check_key

__all__ = ["Lookups"]

TAKEN_AT_ONCE: Final = 2048
"""Keys of answers that one call puts into an index, a fraction of a millisecond of an engine's thread."""

FASTER_WAIT_S: Final = 0.05
"""How long a lookup waits for a tier to say whether it holds, too, what a slower one told of: some times what
1024 keys take a local one. One that hangs must not hold up for longer what another could serve."""


@dataclass(slots=True)
class _Arrival:
    """An answer that is being taken; the first `left` of the keys it calls held are not in the index yet."""

    answer: Answer
    left: int


class Lookups:
    """Not thread-safe: the planner's alone.

    Args:
        books: slots and indexes that answer at once.
        prober: asks the tiers; None where no tier outlives this process.
        load_gate: says how much of what is held is worth loading; None where all of it is.
    """

    def __init__(self, books: Books, prober: SupportsProbing | None, load_gate: LoadGate | None = None) -> None:
        self._books = books
        self._prober = prober
        self._load_gate = load_gate
        self._asked_s: dict[tuple[int, bytes], float] = {}
        """Since when a tier is being asked about the prefix that starts with a key."""
        self._arrived: deque[_Arrival] = deque()
        self.lookups = 0
        self.pending = 0
        self.hit_chunks = 0

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading `keys` some tier holds; see `OffloadConnector.lookup`."""
        books = self._books
        now_s = books.clock()
        self.take_answers(now_s)
        self.lookups += 1
        served_by, hearsay = self._known(keys)
        pending = len(served_by) < len(keys) and self._ask(keys, len(served_by), now_s)
        for at, first in hearsay.items():
            pending = self._ask_faster(at, keys, first, now_s) or pending
        held = slower = len(served_by)
        if held and self._load_gate is not None:
            probe_keys = None if pending else keys
            held = self._load_gate.offer(served_by, books.loads_open, now_s, probe_keys=probe_keys)
            # Still pending where it is less than what is held: the more a tier far away has, or a faster one has
            # behind it, the sooner the first chunks are worth it too.
        slower -= held
        if pending:
            self.pending += 1
        else:
            self.hit_chunks += held
            if slower:
                books.unused[reasons.SLOWER] += slower
        return Lookup(held, pending, slower)

    def _known(self, keys: Sequence[bytes]) -> tuple[list[int], dict[int, int]]:
        """What is known of the leading keys: who serves them, and what is hearsay of a slower tier alone.

        Returns:
            The tier of each of the keys that some tier is known to hold, the fastest one that does; and by
            tier where the first key stands that it is not known to hold, if only a slower one's word says
            that this is held.
        """
        books = self._books
        faster: list[Callable[[bytes], bool]] = [books.slots.__contains__] if books.settings.host_slots else []
        rungs = []
        for at in books.io:
            if books.tiers[at].serving:
                index = books.tiers[at].index
                rungs.append((at, index, tuple(faster)))
                faster.append(index.holds)
        served_by: list[int] = []
        seen: set[int] = set()
        hearsay: dict[int, int] = {}
        while len(served_by) < len(keys):
            first = len(served_by)
            if books.settings.host_slots and keys[first] in books.slots:
                served_by.append(HOST)
                continue
            for above, (at, index, holders) in enumerate(rungs):
                count = index.count_held(keys, first, holders)
                if count:
                    for other, _, _ in rungs[:above]:
                        if other not in seen:
                            seen.add(other)
                            if index.knows_by_hearsay(keys[first]):
                                hearsay[other] = first
                    served_by += [at] * count
                    break
            else:
                break
        return served_by, hearsay

    def _ask(self, keys: Sequence[bytes], first: int, now_s: float) -> bool:
        """Have every tier that may hold `keys[first]` asked; whether an answer is still to come."""
        pending = False
        key = keys[first]
        check_key(key)
        if self._prober is None:
            return False
        for at in self._books.io:
            account = self._books.tiers[at]
            if not account.serving or account.index.lacks(key, now_s):
                continue
            since_s = self._asked_since(at, keys, first, now_s)
            if since_s is None:
                continue
            if now_s - since_s < self._books.settings.lookup_timeout_s:
                pending = True
            else:
                account.missed["lookup_timeout"] += 1
                account.index.doubt(key, now_s)
        return pending

    def _ask_faster(self, at: int, keys: Sequence[bytes], first: int, now_s: float) -> bool:
        """Have a tier asked about what a slower one told of; whether its answer is still worth waiting for."""
        if self._prober is None or self._books.tiers[at].index.lacks(keys[first], now_s):
            return False
        since_s = self._asked_since(at, keys, first, now_s)
        return since_s is not None and now_s - since_s < FASTER_WAIT_S

    def _asked_since(self, at: int, keys: Sequence[bytes], first: int, now_s: float) -> float | None:
        """Ask a tier about the keys from `keys[first]` on, unless that was done: when; None where it is too busy."""
        assert self._prober is not None
        key = keys[first]
        since_s = self._asked_s.get((at, key))
        if since_s is None:
            account = self._books.tiers[at]
            asked = tuple(keys[first : first + account.plan.probe_keys])
            # Once per question, not at every lookup that waits for its answer.
            for one in asked:
                check_key(one)
            if not self._prober.ask(at, asked):
                account.missed["lookup_shed"] += 1
                return None
            self._asked_s[at, key] = since_s = now_s
        return since_s

    def take_answers(self, now_s: float) -> None:
        """Put what the tiers answered into their indexes, and what was listed: so much of it that no step waits."""
        if self._prober is None:
            return
        self._arrived.extend(_Arrival(answer, answer.held) for answer in self._prober.answers())
        room = TAKEN_AT_ONCE
        while self._arrived and room > 0:
            room -= self._take(self._arrived[0], room, now_s)
            if not self._arrived[0].left:
                self._finish(self._arrived.popleft().answer, now_s)
        if room == TAKEN_AT_ONCE and (listed := self._prober.listed()) is not None:
            account = self._books.tiers[listed.tier]
            if account.serving:
                account.index.add_listed(listed.keys)

    def _take(self, arrival: _Arrival, room: int, now_s: float) -> int:
        """Put up to `room` more keys of an answer into the index; how many."""
        # The last ones first: lookups stand at the first one until all are in.
        count = min(arrival.left, room)
        arrival.left -= count
        account = self._books.tiers[arrival.answer.tier]
        if account.serving:
            account.index.add_answered(arrival.answer.keys[arrival.left : arrival.left + count], now_s)
        return count

    def _finish(self, answer: Answer, now_s: float) -> None:
        account = self._books.tiers[answer.tier]
        self._asked_s.pop((answer.tier, answer.keys[0]), None)
        if not account.serving:
            return
        if answer.error is not None and not answer.is_stale:
            account.missed["lookup_failed"] += 1
        if self._load_gate is not None and not answer.is_stale:
            self._load_gate.on_asked(answer.tier, answered=answer.error is None)
        # A key that became held while the question was under way (a store of ours ended) stays so: the
        # answer is the older of the two, and a load finds out.
        for key in answer.keys[answer.held : answer.held + 1]:
            if not account.index.holds(key):
                if answer.error is None:
                    account.index.remove(key, now_s)
                else:
                    account.index.doubt(key, now_s)

    def forget(self) -> None:
        """After a reset: an answer to a question from before it is worth nothing."""
        self._asked_s.clear()
        self._arrived.clear()
        if self._prober is not None:
            self._prober.forget()
