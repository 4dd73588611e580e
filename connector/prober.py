"""Asks tiers which keys they hold, off the scheduling path.

One thread per tier, so that a tier that hangs leaves the others' answers alone. Requests and answers
cross in queues that neither side ever waits on: the scheduler looks at what has arrived.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import stored_key
from kvsluice.tiers.errors import SluiceError

__all__ = ["Answer", "Prober", "SupportsProbing"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """`keys[:held]` are held and `keys[held]`, if there is one, is not; `error` says that nobody knows."""

    round: int
    tier: int
    keys: tuple[bytes, ...]
    held: int
    error: str | None


class SupportsProbing(Protocol):
    """Whoever finds out for the planner which keys a tier holds; no method ever blocks."""

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        """Put one question; False where too many wait already."""

    def answers(self) -> list[Answer]:
        """What has arrived since the last call."""

    def forget(self) -> None:
        """Whatever was asked before, its answer is not wanted any more."""


class Prober:
    """One daemon thread per tier. `ask` and `answers` never block.

    Args:
        tiers: position in the ladder and the tier to ask.
        group: the KV-cache group whose chunks are asked for.
        num_ranks: a key is held only where every rank's part is.
        max_waiting: questions that may wait per tier.
    """

    def __init__(self, tiers: Mapping[int, Tier], *, group: int = 0, num_ranks: int = 1, max_waiting: int = 64) -> None:
        self._group = group
        self._num_ranks = num_ranks
        self._max_waiting = max_waiting
        self._answers: deque[Answer] = deque()
        self._questions: dict[int, queue.SimpleQueue[tuple[int, tuple[bytes, ...]] | None]] = {}
        self._round = 0
        self._waiting: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        for at, tier in tiers.items():
            self._questions[at] = queue.SimpleQueue()
            self._waiting[at] = 0
            self._answered[at] = 0
            thread = threading.Thread(
                target=self._serve, args=(at, tier), name=f"kvsluice-lookup-{tier.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        """Put one question; False where too many wait already."""
        # `_waiting` is written by this side alone and `_answered` by the tier's thread alone.
        if self._waiting[tier] - self._answered[tier] >= self._max_waiting:
            return False
        self._waiting[tier] += 1
        self._questions[tier].put((self._round, keys))
        return True

    def forget(self) -> None:
        """Whatever was asked before, its answer is not wanted any more."""
        self._round += 1

    def answers(self) -> list[Answer]:
        """What has arrived since the last call."""
        arrived = []
        while self._answers:
            arrived.append(self._answers.popleft())
        return [answer for answer in arrived if answer.round == self._round]

    def close(self, timeout_s: float, clock: Callable[[], float]) -> list[str]:
        """End the threads; the names of those that hang past `timeout_s`."""
        for questions in self._questions.values():
            questions.put(None)
        end_s = clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - clock()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _serve(self, at: int, tier: Tier) -> None:
        questions = self._questions[at]
        while (question := questions.get()) is not None:
            asked, keys = question
            error = None
            held = 0
            try:
                held = self._held_by_all_ranks(tier, keys)
            except SluiceError as failure:
                error = str(failure)
            except Exception as failure:  # noqa: BLE001 - a stranger's tier must not end the thread
                _log.exception("tier %s: lookup failed unexpectedly", tier.name)
                error = repr(failure)
            self._answered[at] += 1
            self._answers.append(Answer(asked, at, keys, held, error))

    def _held_by_all_ranks(self, tier: Tier, keys: Sequence[bytes]) -> int:
        held = len(keys)
        for rank in range(self._num_ranks):
            if held == 0:
                break
            held = tier.held_prefix([stored_key(key, self._group, rank) for key in keys[:held]])
        return held
