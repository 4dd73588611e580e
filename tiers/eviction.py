"""What a tier with a capacity drops: the coldest chunks, from above the capacity down to the low mark."""

from __future__ import annotations

import heapq
from typing import Final, Generic, TypeVar

__all__ = ["LOW_MARK", "SLACK", "Coldest", "is_overfull", "surplus_bytes"]

LOW_MARK: Final = 0.9
"""Eviction starts above the capacity and stops here, so that one walk makes room for many stores."""
SLACK: Final = 0.1
"""Stores are refused while use is this share above the capacity: eviction cannot keep up. A guess."""

_T = TypeVar("_T")


def surplus_bytes(used_bytes: int, capacity_bytes: int) -> int:
    """What is to be evicted: nothing up to the capacity, above it down to the low mark."""
    return used_bytes - int(capacity_bytes * LOW_MARK) if used_bytes > capacity_bytes else 0


def is_overfull(used_bytes: int, capacity_bytes: int) -> bool:
    """Whether stores are to be refused until eviction has caught up."""
    return used_bytes > capacity_bytes * (1 + SLACK)


class Coldest(Generic[_T]):
    """Of all that is added, the coldest that together make `wanted_bytes`; nothing else is kept.

    Not thread-safe: one walk's.
    """

    __slots__ = ("_found", "_found_bytes", "wanted_bytes")

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes = wanted_bytes
        # Hottest on top, as heapq keeps the smallest first; the name breaks ties.
        self._found: list[tuple[float, str, int, _T]] = []
        self._found_bytes = 0

    def add(self, chunk: _T, *, name: str, used_s: float, num_bytes: int) -> None:
        """Consider one chunk: last used at `used_s`, with a name that no other has."""
        found = self._found
        if self._found_bytes >= self.wanted_bytes and (not found or used_s >= -found[0][0]):
            return
        heapq.heappush(found, (-used_s, name, num_bytes, chunk))
        self._found_bytes += num_bytes
        while found and self._found_bytes - found[0][2] >= self.wanted_bytes:
            self._found_bytes -= heapq.heappop(found)[2]

    def coldest_first(self) -> list[_T]:
        return [chunk for *_, chunk in sorted(self._found, key=lambda entry: entry[:2], reverse=True)]
