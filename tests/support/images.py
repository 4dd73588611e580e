"""Chunks' images as the object tier's tests move them, where it is not the connector that does."""

from __future__ import annotations

import contextlib
import time

from kvsluice.tiers.errors import ChunkMissingError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier

__all__ = ["IMAGE", "KEY", "load", "served_again", "view"]

KEY = bytes(range(34))
IMAGE = bytes(range(256)) * 1024


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
