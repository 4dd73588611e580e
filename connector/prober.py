"""Asks tiers which keys they hold, off the scheduling path.

Each tier has threads of its own, so that one that hangs leaves the others' answers alone: one, or for a
tier beyond a network as many as it says. Requests and answers cross in queues that neither side ever
waits on: the scheduler looks at what has arrived. A tier that is listed at start has one thread more
until that is over.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, overload

from kvsluice.connector.listing import Listed, TierListing
from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import stored_key
from kvsluice.tiers.errors import SluiceError

__all__ = ["Answer", "PartNames", "Prober", "SupportsProbing"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """`keys[:held]` are held and `keys[held]`, if there is one, is not; `error` says that nobody knows."""

    round: int
    tier: int
    keys: tuple[bytes, ...]
    held: int
    error: str | None
    is_stale: bool = False
    """Whether the tier was not asked at all, as nobody waited any more."""


@dataclass(frozen=True, slots=True)
class _Question:
    round: int
    keys: tuple[bytes, ...]
    asked_s: float


class SupportsProbing(Protocol):
    """Whoever finds out for the planner which keys a tier holds; no method ever blocks."""

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        """Put one question; False where too many wait already."""

    def answers(self) -> list[Answer]:
        """What has arrived since the last call."""

    def listed(self) -> Listed | None:
        """The next few keys that were found by listing a tier at start; None where there are none now."""

    def forget(self) -> None:
        """Whatever was asked before, its answer is not wanted any more; nor is what was listed."""


class PartNames(Sequence[bytes]):
    """The names under which a tier keeps one rank's parts of `keys`, each made when it is looked at.

    A tier that bisects looks at a few of thousands, and one that goes through them ends at the first that
    it lacks: the others would be made for nothing, on a thread that takes the interpreter from the engine's.
    """

    def __init__(self, keys: Sequence[bytes], group: int, rank: int) -> None:
        self._keys = keys
        self._suffix = stored_key(b"", group, rank)

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...  # type: ignore[explicit-any] # what a slice holds, by typeshed

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:  # type: ignore[explicit-any] # as above
        if isinstance(at, slice):
            return [key + self._suffix for key in self._keys[at]]
        return self._keys[at] + self._suffix

    def __iter__(self) -> Iterator[bytes]:
        return (key + self._suffix for key in self._keys)


class Prober:
    """Daemon threads: `Tier.probe_threads` per tier, and one while it is listed. No method but `close` ever blocks.

    Args:
        tiers: position in the ladder and the tier to ask.
        group: the KV-cache group whose chunks are asked for.
        num_ranks: a key is held only where every rank's part is.
        max_waiting: questions that may wait per tier.
        max_age_s: what waited longer is not asked any more: nobody waits for the answer.
        listing_times_s: by position, how long a tier is listed at start; those that are absent are not.
        clock: seconds, monotonic; ends the listings.
    """

    def __init__(
        self,
        tiers: Mapping[int, Tier],
        *,
        group: int = 0,
        num_ranks: int = 1,
        max_waiting: int = 64,
        max_age_s: float = math.inf,
        listing_times_s: Mapping[int, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._num_ranks = num_ranks
        self._max_waiting = max_waiting
        self._answers: deque[Answer] = deque()
        self._max_age_s = max_age_s
        self._clock = clock
        self._questions: dict[int, queue.SimpleQueue[_Question | None]] = {}
        self._round = 0
        self._waiting: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._asking: dict[int, threading.Lock] = {}
        self._threads: list[threading.Thread] = []
        for at, tier in tiers.items():
            self._questions[at] = queue.SimpleQueue()
            self._waiting[at] = 0
            self._answered[at] = 0
            self._asking[at] = threading.Lock()
            for number in range(tier.probe_threads):
                name = f"kvsluice-lookup-{tier.name}" + (f"-{number}" if number else "")
                thread = threading.Thread(target=self._serve, args=(at, tier), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._listed: deque[Listed] = deque()
        self._listings = [
            TierListing(
                at, tiers[at], self._listed.append, group=group, num_ranks=num_ranks, limit_s=limit_s, clock=clock
            )
            for at, limit_s in listing_times_s.items()
        ]
        self._threads += [listing.thread for listing in self._listings]

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        """Put one question; False where too many wait already."""
        # `_waiting` is written by this side alone and `_answered` by the tier's threads alone.
        if self._waiting[tier] - self._answered[tier] >= self._max_waiting:
            return False
        self._waiting[tier] += 1
        self._questions[tier].put(_Question(self._round, keys, self._clock()))
        return True

    def forget(self) -> None:
        """Whatever was asked before, its answer is not wanted any more; nor is what was listed."""
        self._round += 1
        for listing in self._listings:
            listing.stop()
        self._listed.clear()

    def answers(self) -> list[Answer]:
        """What has arrived since the last call."""
        arrived = []
        while self._answers:
            arrived.append(self._answers.popleft())
        return [answer for answer in arrived if answer.round == self._round]

    def listed(self) -> Listed | None:
        """The next few keys that were found by listing a tier at start; None where there are none now."""
        # Nothing is listed after a reset, so what a listing still told in the middle of one is older than it.
        return self._listed.popleft() if self._listed and self._round == 0 else None

    def close(self, timeout_s: float, clock: Callable[[], float]) -> list[str]:
        """End the threads; the names of those that hang past `timeout_s`."""
        for questions in self._questions.values():
            for _ in self._threads:
                questions.put(None)
        for listing in self._listings:
            listing.stop()
        end_s = clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - clock()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _serve(self, at: int, tier: Tier) -> None:
        questions = self._questions[at]
        while (question := questions.get()) is not None:
            error = None
            held = 0
            is_stale = self._clock() - question.asked_s > self._max_age_s
            try:
                if is_stale:
                    error = "it waited for longer than the lookup did"
                else:
                    held = self._held_by_all_ranks(tier, question.keys)
            except SluiceError as failure:
                error = str(failure)
            except Exception as failure:  # noqa: BLE001 - a stranger's tier must not end the thread
                _log.exception("tier %s: lookup failed unexpectedly", tier.name)
                error = repr(failure)
            with self._asking[at]:
                self._answered[at] += 1
            self._answers.append(Answer(question.round, at, question.keys, held, error, is_stale))

    def _held_by_all_ranks(self, tier: Tier, keys: Sequence[bytes]) -> int:
        held = len(keys)
        for rank in range(self._num_ranks):
            if held == 0:
                break
            held = tier.held_prefix(PartNames(keys[:held], self._group, rank))
        return held
