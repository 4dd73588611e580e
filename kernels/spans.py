"""Block ids that count up are one run of memory where blocks lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["spans_of"]


def spans_of(block_ids: Sequence[int], skip_blocks: int = 0, *, merge: bool = True) -> list[tuple[int, int, int]]:
    """(first id, its place in the chunk, count) of each longest run of ids that count up by one.

    Args:
        block_ids: of a whole chunk.
        skip_blocks: leading ids that are left out.
        merge: False makes every id a run of its own.
    """
    if not merge:
        return [(block, place, 1) for place, block in enumerate(block_ids[skip_blocks:], skip_blocks)]
    spans: list[tuple[int, int, int]] = []
    first = previous = block_ids[skip_blocks]
    first_place = skip_blocks
    for place, block in enumerate(block_ids[skip_blocks + 1 :], skip_blocks + 1):
        if block != previous + 1:
            spans.append((first, first_place, place - first_place))
            first, first_place = block, place
        previous = block
    spans.append((first, first_place, len(block_ids) - first_place))
    return spans
