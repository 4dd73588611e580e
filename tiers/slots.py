"""Which slot of a memory region holds what: bookkeeping without bytes.

A slot is in exactly one state:

    free ──acquire──▶ pinned (1..n transfers use it) ──unpin──▶ free, or held where it was kept
                        ▲                                          │
                        └────────────── pin ───────────────────────┘

A held slot that nobody pins may be taken for another chunk, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SlotTable", "SlotUsage"]


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """Frozen counts; `free + held_idle + pinned == total` always."""

    total: int
    free: int
    pinned: int
    held_idle: int
    held: int
    evicted: int


class SlotTable:
    """Slots of one region, those that hold a chunk in order of use. Not thread-safe: one owner.

    Args:
        num_slots: slots in the region.
        max_held: how many of them may hold a chunk at once; the others are for transfers only.
        on_evict: told each key that had to give way.
    """

    def __init__(self, num_slots: int, max_held: int, *, on_evict: Callable[[bytes], None] | None = None) -> None:
        if num_slots < 1 or not 0 <= max_held <= num_slots:
            raise ValueError(f"num_slots {num_slots} must be at least 1 and max_held {max_held} within it")
        self.num_slots = num_slots
        self.max_held = max_held
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins = [0] * num_slots
        self._key_of: list[bytes | None] = [None] * num_slots
        self._slot_of: dict[bytes, int] = {}
        # Held and unpinned, coldest first: what `acquire` may take.
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        self._evicted = 0
        self._on_evict = on_evict

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def acquire(self) -> int | None:
        """A slot pinned once, the coldest idle chunk giving way; `None` where every slot is pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot = self._evict()
            self._free.pop()
        else:
            return None
        self._pins[slot] = 1
        return slot

    def find(self, key: bytes) -> int | None:
        """The slot that holds `key`, without making it look used."""
        return self._slot_of.get(key)

    def pin(self, slot: int) -> None:
        """Keep a pinned or held slot from being taken; undone by `unpin`."""
        key = self._key_of[slot]
        if self._pins[slot] == 0:
            if key is None:
                raise ValueError(f"slot {slot} is free: only `acquire` may take it")
            del self._idle[key]
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Undo one `acquire` or `pin`. A slot that holds a chunk becomes the most recently used."""
        if self._pins[slot] < 1:
            raise ValueError(f"slot {slot} is not pinned")
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            key = self._key_of[slot]
            if key is None:
                self._free.append(slot)
            else:
                self._idle[key] = slot

    def keep(self, slot: int, key: bytes) -> bool:
        """Let a pinned slot hold `key` from now on.

        Returns:
            False where nothing may be held, where all that is held is pinned, or where another slot
            holds the key already; the slot is then free after its last `unpin`.
        """
        if self._pins[slot] < 1 or self._key_of[slot] is not None:
            raise ValueError(f"slot {slot} is not in transit: pins {self._pins[slot]}, key {self._key_of[slot]!r}")
        if key in self._slot_of:
            return False
        if len(self._slot_of) >= self.max_held:
            if not self._idle:
                return False
            self._evict()
        self._key_of[slot] = key
        self._slot_of[key] = slot
        return True

    def forget(self, key: bytes) -> bool:
        """Stop holding `key`; a pinned slot is free after its last `unpin`. Whether it was held."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return False
        self._key_of[slot] = None
        if self._pins[slot] == 0:
            del self._idle[key]
            self._free.append(slot)
        return True

    def forget_all(self) -> int:
        """Stop holding anything; how many chunks that were."""
        keys = list(self._slot_of)
        for key in keys:
            self.forget(key)
        return len(keys)

    def keys(self) -> list[bytes]:
        """The keys held, in no order."""
        return list(self._slot_of)

    def usage(self) -> SlotUsage:
        """A frozen snapshot."""
        free, idle = len(self._free), len(self._idle)
        return SlotUsage(
            total=self.num_slots,
            free=free,
            pinned=self.num_pinned,
            held_idle=idle,
            held=len(self._slot_of),
            evicted=self._evicted,
        )

    @property
    def num_pinned(self) -> int:
        """Slots that a transfer uses."""
        return self.num_slots - len(self._free) - len(self._idle)

    def pins(self) -> dict[int, int]:
        """How often each pinned slot is pinned."""
        return {slot: pins for slot, pins in enumerate(self._pins) if pins}

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every slot is in exactly one state and both maps agree."""
        pinned = {slot for slot, pins in enumerate(self._pins) if pins}
        free, idle = set(self._free), set(self._idle.values())
        if len(free) != len(self._free) or free & idle or free & pinned or idle & pinned:
            raise AssertionError(f"a slot is in two states: free {free}, idle {idle}, pinned {pinned}")
        if len(free) + len(idle) + len(pinned) != self.num_slots:
            raise AssertionError(f"{len(free)} free + {len(idle)} idle + {len(pinned)} pinned != {self.num_slots}")
        held = {key: slot for slot, key in enumerate(self._key_of) if key is not None}
        if held != self._slot_of or len(held) > self.max_held:
            raise AssertionError(f"{len(held)} slots name a key, {len(self._slot_of)} keys a slot, {self.max_held} may")
        if any(self._key_of[slot] is not None for slot in free):
            raise AssertionError("a free slot still names a key")

    def _evict(self) -> int:
        key, slot = self._idle.popitem(last=False)
        del self._slot_of[key]
        self._key_of[slot] = None
        self._free.append(slot)
        self._evicted += 1
        if self._on_evict is not None:
            self._on_evict(key)
        return slot
