"""The words under which a store not made, or a hit not used, is counted.

Each word is used in `TransferResult.failed`, in the counters of `stats()` and in the reports that
ranks send to the planner, so that one outcome has one name everywhere.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BLOCKS_WANTED",
    "CANCELLED",
    "CHECKSUM",
    "CLOSED",
    "DEADLINE",
    "DISK_FULL",
    "FENCED",
    "FOREIGN",
    "GATE",
    "HEADER",
    "INTERNAL",
    "IO_ERROR",
    "MISSING",
    "OVERSIZE",
    "POOL_FULL",
    "QUEUE_FULL",
    "QUEUE_SLOW",
    "QUEUE_TIMEOUT",
    "RESET",
    "SHORT",
    "SLOT_SHARE",
    "SLOWER",
]

GATE: Final = "gate"
"""The tier's gate refused the store."""
POOL_FULL: Final = "pool_full"
"""No slot of the pinned region was free."""
SLOT_SHARE: Final = "slot_share"
"""The tier already holds its share of the slots with transfers that have not ended."""
QUEUE_FULL: Final = "queue_full"
"""The tier's queue was at its limit."""
QUEUE_SLOW: Final = "queue_slow"
"""At the measured rate the store could not have started within `max_queue_s`: it never took a buffer."""
QUEUE_TIMEOUT: Final = "queue_timeout"
"""The store waited longer than `max_queue_s` and was shed before it started."""
BLOCKS_WANTED: Final = "blocks_wanted"
"""The store waited for a slot and a request waited for its blocks: the request goes first."""
CANCELLED: Final = "cancelled"
"""The engine cancelled the job before this chunk started."""
SLOWER: Final = "slower_than_recompute"
"""The chunk is held, and to load it would take longer than to compute it: the hit was not offered."""
FENCED: Final = "fenced"
"""The engine fenced the chunk's blocks before its copy started."""
RESET: Final = "reset"
"""The engine's cache was reset while the transfer waited."""
CLOSED: Final = "closed"
"""The connector was closed while the transfer waited."""
DEADLINE: Final = "deadline"
"""The load was not done by its deadline."""
MISSING: Final = "missing"
"""The tier does not hold the chunk (any more)."""
SHORT: Final = "short"
"""Fewer bytes than the chunk has."""
OVERSIZE: Final = "oversize"
"""More bytes than the chunk has."""
CHECKSUM: Final = "checksum"
"""Header and length are right, the bytes are not those that were stored."""
FOREIGN: Final = "foreign"
"""A whole chunk of another namespace, key, group or rank."""
HEADER: Final = "header"
"""The header is not one that this layout writes."""
IO_ERROR: Final = "io_error"
"""The operating system or the server failed the operation."""
DISK_FULL: Final = "disk_full"
"""No space, quota or inode left, or less free space than the tier leaves to others."""
INTERNAL: Final = "internal"
"""An unexpected exception; its traceback is in the log."""
