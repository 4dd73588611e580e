"""Who owns which KV block of the example engine.

    free ──take──▶ owned by a request ──release──▶ free
                        │ pin(job)                  ▲
                        └──release while pinned──▶ leaving ──last unpin──┘

A block that a transfer still reads or writes is pinned. A request may give it up at any time
(it finished, it was preempted); it goes back to the free list when the last transfer lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Block ids `0 .. num_blocks - 1`. Not thread-safe: the engine's loop is its only user."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: set[int] = set()
        self._leaving: set[int] = set()
        self._pins: Counter[int] = Counter()
        self._jobs: dict[int, tuple[int, ...]] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken now."""
        return len(self._free)

    @property
    def pinned_jobs(self) -> frozenset[int]:
        """The transfers that still hold blocks."""
        return frozenset(self._jobs)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None where fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def pin(self, job: int, blocks: Sequence[int]) -> None:
        """Transfer `job` reads or writes `blocks` until `unpin(job)`."""
        self._jobs[job] = tuple(blocks)
        self._pins.update(blocks)

    def unpin(self, job: int) -> None:
        """Transfer `job` is done with its blocks; a job that holds none is fine."""
        for block in self._jobs.pop(job, ()):
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                if block in self._leaving:
                    self._leaving.remove(block)
                    self._free.append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """The request gives its blocks up; those that are pinned become free later."""
        for block in blocks:
            self._owned.remove(block)
            if self._pins[block]:
                self._leaving.add(block)
            else:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in exactly one place: free + owned + leaving = pool.

        Raises:
            AssertionError: a block is lost, or in two places.
        """
        places = sorted([*self._free, *self._owned, *self._leaving])
        if places != list(range(self.num_blocks)):
            raise AssertionError(
                f"free {len(self._free)} + owned {len(self._owned)} + leaving {len(self._leaving)} blocks "
                f"are not the {self.num_blocks} of the pool"
            )
