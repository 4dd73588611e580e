"""Calls of an object tier as its tests make them, and how long they may take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from kvsluice.tiers.errors import ChunkMissingError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier

__all__ = ["BUSY_S", "IMAGE", "KEY", "LENGTH", "OPERATION_S", "READ_S", "in_time", "load", "served_again", "view"]

KEY = bytes(range(34))
IMAGE = bytes(range(256)) * 1024
LENGTH = len(IMAGE)

READ_S = 0.7
OPERATION_S = 2.0
"""Times of a tier that a test can wait for."""
BUSY_S = 1.5
"""What a machine with more to do than these tests may add."""


def view(image: bytes) -> memoryview:
    """As a slot of pinned memory would hold it."""
    return memoryview(bytearray(image))


def load(tier: ObjectTier, key: bytes, num_bytes: int) -> bytes:
    """What the tier gives for this key."""
    buffer = memoryview(bytearray(num_bytes))
    assert tier.load(key, buffer, num_bytes) == num_bytes
    return bytes(buffer)


def served_again(tier: ObjectTier, within_s: float) -> float:
    """Seconds until the tier answers loads, stores and lookups again, asked all the while; fails past `within_s`."""
    started_s = time.monotonic()
    while True:
        with contextlib.suppress(TierUnavailableError):
            tier.store(b"again", view(IMAGE), 10)
            tier.held_prefix([b"again"])
            with contextlib.suppress(ChunkMissingError):
                load(tier, b"again", 10)
            return time.monotonic() - started_s
        assert time.monotonic() - started_s < within_s
        time.sleep(0.01)


@contextlib.contextmanager
def in_time(limit_s: float = OPERATION_S) -> Iterator[None]:
    """What is done in here takes no longer, but for what a busy machine adds."""
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < limit_s + BUSY_S
