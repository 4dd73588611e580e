"""What the scheduler knows of one tier without asking it: keys held, and keys lately found absent.

Both are beliefs. Another process may delete a chunk or add one; a load proves or disproves a held
key, and an absent one is asked for again once its answer has expired.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_ABSENT_KEYS", "MAX_HELD_KEYS", "TierIndex"]

MAX_HELD_KEYS: Final = 2_000_000
"""About 250 MB at 32-byte keys; past it the key known longest is forgotten and asked for when needed."""
MAX_ABSENT_KEYS: Final = 100_000


class TierIndex:
    """Not thread-safe: the planner's alone."""

    def __init__(self, negative_ttl_s: float, *, max_held: int = MAX_HELD_KEYS, max_absent: int = MAX_ABSENT_KEYS):
        self._negative_ttl_s = negative_ttl_s
        self._max_held = max_held
        self._max_absent = max_absent
        # A dict keeps insertion order, so its first key is the one known longest.
        self._held: dict[bytes, None] = {}
        self._absent_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, key: bytes) -> bool:
        return key in self._held

    def lacks(self, key: bytes, now_s: float) -> bool:
        """Whether the key was found absent lately enough to believe it."""
        until = self._absent_until.get(key)
        return until is not None and now_s < until

    def add(self, key: bytes) -> None:
        self._absent_until.pop(key, None)
        if key not in self._held:
            if len(self._held) >= self._max_held:
                del self._held[next(iter(self._held))]
            self._held[key] = None

    def remove(self, key: bytes, now_s: float) -> None:
        """The key is not held, or cannot be served now: do not say so again before the answer expires."""
        self._held.pop(key, None)
        self._absent_until.pop(key, None)
        if len(self._absent_until) >= self._max_absent:
            del self._absent_until[next(iter(self._absent_until))]
        self._absent_until[key] = now_s + self._negative_ttl_s

    def clear(self) -> None:
        self._held.clear()
        self._absent_until.clear()
