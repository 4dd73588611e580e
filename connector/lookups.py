"""The planner's lookups: what is known to be held, and who is being asked about the rest."""

from __future__ import annotations

from collections.abc import Sequence

from kvsluice.connector.books import Books
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.orders import HOST
from kvsluice.connector.prober import SupportsProbing
from kvsluice.connector.results import Lookup
from kvsluice.tiers import reasons
from kvsluice.tiers.chunk_file import check_key

__all__ = ["Lookups"]


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
        self.lookups = 0
        self.pending = 0
        self.hit_chunks = 0

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading `keys` some tier holds; see `OffloadConnector.lookup`."""
        books = self._books
        now_s = books.clock()
        self.take_answers(now_s)
        self.lookups += 1
        indexes = [(at, books.tiers[at].index) for at in books.io if books.tiers[at].serving]
        served_by: list[int] = []
        pending = False
        for key in keys:
            if key in books.slots:
                served_by.append(HOST)
                continue
            for at, index in indexes:
                if index.holds(key):
                    served_by.append(at)
                    break
            else:
                pending = self._ask(keys, len(served_by), now_s)
                break
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

    def _ask(self, keys: Sequence[bytes], first: int, now_s: float) -> bool:
        """Have every tier that may hold `keys[first]` asked; whether an answer is still to come."""
        settings = self._books.settings
        pending = False
        key = keys[first]
        check_key(key)
        if self._prober is None:
            return False
        for at in self._books.io:
            account = self._books.tiers[at]
            if not account.serving or account.index.lacks(key, now_s):
                continue
            since_s = self._asked_s.get((at, key))
            if since_s is None:
                asked = tuple(keys[first : first + settings.probe_keys])
                # Once per question, not at every lookup that waits for its answer.
                for one in asked:
                    check_key(one)
                if not self._prober.ask(at, asked):
                    account.missed["lookup_shed"] += 1
                    continue
                self._asked_s[at, key] = since_s = now_s
            if now_s - since_s < settings.lookup_timeout_s:
                pending = True
            else:
                account.missed["lookup_timeout"] += 1
                account.index.remove(key, now_s)
        return pending

    def take_answers(self, now_s: float) -> None:
        """Put what the tiers answered into their indexes."""
        if self._prober is None:
            return
        for answer in self._prober.answers():
            account = self._books.tiers[answer.tier]
            self._asked_s.pop((answer.tier, answer.keys[0]), None)
            if not account.serving:
                continue
            if answer.error is not None:
                account.missed["lookup_failed"] += 1
            for key in answer.keys[: answer.held]:
                account.index.add(key)
            # A key that became held while the question was under way (a store of ours ended) stays so: the
            # answer is the older of the two, and a load finds out.
            unheld = answer.keys[answer.held : answer.held + 1]
            if unheld and not account.index.holds(unheld[0]):
                account.index.remove(unheld[0], now_s)

    def forget(self) -> None:
        """After a reset: an answer to a question from before it is worth nothing."""
        self._asked_s.clear()
        if self._prober is not None:
            self._prober.forget()
