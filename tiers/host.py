"""The host tier: chunk images in this process's memory.

Inside a ladder the host tier's slots are part of the rank's pinned region, and a store to it is the
device copy alone; the planner then keeps its `SlotTable` and no call comes here. This class is the
same tier on its own: memory and table in one object behind the tier interface.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from kvsluice.tiers import reasons
from kvsluice.tiers.base import Tier, TierUsage, round_up, take_left
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, ConfigError, TierUnavailableError
from kvsluice.tiers.slots import SlotTable

__all__ = ["HostTier"]

_MAX_EVICTED_TOLD: Final = 100_000
"""A few megabytes of keys; where nobody takes them, the oldest are forgotten."""


class HostTier(Tier):
    """Chunk images in one anonymous mapping, least recently used out first. Thread-safe.

    Args:
        capacity_bytes: size of the mapping; rounded down to whole slots, never up.
        slot_bytes: largest image that will be stored; rounded up to 4096.
        name: what errors and reports call this tier.

    Raises:
        ConfigError: the capacity holds no slot.
    """

    tier_type: ClassVar[str] = "host"

    def __init__(self, capacity_bytes: int, *, slot_bytes: int, name: str = "host") -> None:
        super().__init__(name)
        self._slot_bytes = round_up(slot_bytes)
        num_slots = capacity_bytes // self._slot_bytes if slot_bytes > 0 else 0
        if num_slots < 1:
            raise ConfigError(f"tier {name}: capacity {capacity_bytes} holds no slot of {slot_bytes} bytes")
        self._memory = memoryview(mmap.mmap(-1, num_slots * self._slot_bytes))
        self._lock = threading.Lock()
        self._evicted: deque[bytes] = deque(maxlen=_MAX_EVICTED_TOLD)
        self._table = SlotTable(num_slots, num_slots, on_evict=self._evicted.append)
        self._num_bytes = [0] * num_slots

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        if num_bytes > self._slot_bytes:
            raise ValueError(f"tier {self.name}: an image of {num_bytes} bytes, slots have {self._slot_bytes}")
        self._check_image(buffer, num_bytes)
        with self._lock:
            if key in self._table:
                return 0
            slot = self._table.acquire()
        if slot is None:
            raise TierUnavailableError(f"tier {self.name}: every slot is in use", reason=reasons.POOL_FULL)
        kept = held = False
        try:
            self._slot(slot)[:num_bytes] = buffer[:num_bytes]
            with self._lock:
                self._num_bytes[slot] = num_bytes
                kept = self._table.keep(slot, key)
                held = kept or key in self._table
        finally:
            with self._lock:
                self._table.unpin(slot)
        if not held:
            raise TierUnavailableError(f"tier {self.name}: every slot is in use", reason=reasons.POOL_FULL)
        return num_bytes if kept else 0

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        self._check_image(buffer, num_bytes)
        with self._lock:
            slot = self._table.find(key)
            if slot is None:
                raise ChunkMissingError(f"tier {self.name}: no chunk {key.hex()}", reason=reasons.MISSING)
            held = self._num_bytes[slot]
            if held != num_bytes:
                reason = reasons.SHORT if held < num_bytes else reasons.OVERSIZE
                raise ChunkDamagedError(
                    f"tier {self.name}: chunk {key.hex()} has {held} bytes, not {num_bytes}", reason=reason
                )
            self._table.pin(slot)
        try:
            buffer[:num_bytes] = self._slot(slot)[:num_bytes]
        finally:
            with self._lock:
                self._table.unpin(slot)
        return num_bytes

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._table), len(keys))

    def delete(self, key: bytes) -> bool:
        self._check_open()
        with self._lock:
            return self._table.forget(key)

    def scan(self) -> Iterator[bytes]:
        self._check_open()
        with self._lock:
            return iter(self._table.keys())

    def take_evicted(self, max_keys: int | None = None) -> list[bytes]:
        with self._lock:
            return take_left(self._evicted, max_keys)

    def usage(self) -> TierUsage:
        with self._lock:
            use = self._table.usage()
        return TierUsage(
            chunks=use.held,
            used_bytes=use.held * self._slot_bytes,
            capacity_bytes=use.total * self._slot_bytes,
            evicted_chunks=use.evicted,
        )

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
