"""Stand-ins that do what a test tells them: a tier, a clock; and the pickled connector."""

from __future__ import annotations

import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvsluice.connector import OffloadConnector
from kvsluice.connector.orders import Order, RankReport
from kvsluice.tiers import ChunkDamagedError, ChunkMissingError, Tier, reasons
from kvsluice.tiers.base import TierUsage

PATIENCE_S = 20.0
"""How long a test waits for another thread before it fails; a passing test never does."""


class PickledConnector(OffloadConnector):
    """The two halves with a pickle between them, as between two processes."""

    def _carry_orders(self, orders: tuple[Order, ...]) -> tuple[Order, ...]:
        return pickle.loads(pickle.dumps(orders))

    def _carry_report(self, report: RankReport) -> RankReport:
        return pickle.loads(pickle.dumps(report))


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Hold:
    """Keeps every caller until it is opened; says how many have come."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> None:
        self._arrived.release()
        assert self._open.wait(PATIENCE_S), "nobody opened the hold"

    def wait_for(self, callers: int = 1) -> None:
        for _ in range(callers):
            assert self._arrived.acquire(timeout=PATIENCE_S), "nobody came to the hold"

    def open(self) -> None:
        self._open.set()


class MemoryTier(Tier):
    """Images in a dict; each operation can be held, failed, or have its bytes spoiled."""

    tier_type: ClassVar[str] = "memory"

    def __init__(self, name: str = "obj", images: dict[bytes, bytes] | None = None) -> None:
        super().__init__(name)
        self.images = {} if images is None else images
        self.calls: list[str] = []
        self.names: list[bytes] = []
        self.evicted: list[bytes] = []
        self.failures: dict[str, int] = {}
        self.closed = 0
        self._errors: defaultdict[str, deque[Exception]] = defaultdict(deque)
        self._always: dict[str, Exception] = {}
        self._holds: dict[str, Hold] = {}
        self._all_holds: list[Hold] = []
        self._lock = threading.Lock()

    def hold(self, operation: str) -> Hold:
        """Keep the calls of `operation` from now on, until the hold is opened."""
        self._holds[operation] = hold = Hold()
        self._all_holds.append(hold)
        return hold

    def unhold(self, operation: str) -> None:
        """Later calls pass; those that are held stay so."""
        self._holds.pop(operation, None)

    def open_all(self) -> None:
        self._holds.clear()
        for hold in self._all_holds:
            hold.open()

    def fail(self, operation: str, *errors: Exception) -> None:
        """Have the next calls of `operation` raise these."""
        self._errors[operation].extend(errors)

    def fail_always(self, operation: str, error: Exception) -> None:
        self._always[operation] = error

    def recover(self, operation: str) -> None:
        self._always.pop(operation, None)

    def spoil(self, change: Callable[[bytes], bytes]) -> None:
        """Change every image that is held."""
        with self._lock:
            for key, image in self.images.items():
                self.images[key] = change(image)

    def count(self, operation: str) -> int:
        return self.calls.count(operation)

    def _enter(self, operation: str, key: bytes = b"") -> None:
        with self._lock:
            self.calls.append(operation)
            self.names.append(key)
            error = self._errors[operation].popleft() if self._errors[operation] else self._always.get(operation)
            hold = self._holds.get(operation)
        if hold is not None:
            hold()
        if error is not None:
            raise error

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        self._enter("store", key)
        with self._lock:
            if key in self.images:
                return 0
            self.images[key] = bytes(buffer[:num_bytes])
        return num_bytes

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        self._enter("load", key)
        with self._lock:
            image = self.images.get(key)
        if image is None:
            raise ChunkMissingError(f"tier {self.name}: no chunk {key.hex()}", reason=reasons.MISSING)
        if len(image) != num_bytes:
            reason = reasons.SHORT if len(image) < num_bytes else reasons.OVERSIZE
            raise ChunkDamagedError(f"tier {self.name}: {len(image)} bytes, not {num_bytes}", reason=reason)
        buffer[:num_bytes] = image
        return num_bytes

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        self._enter("held_prefix")
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self.images), len(keys))

    def delete(self, key: bytes) -> bool:
        self._enter("delete", key)
        with self._lock:
            return self.images.pop(key, None) is not None

    def scan(self) -> Iterator[bytes]:
        self._enter("scan")
        with self._lock:
            return iter(list(self.images))

    def clear(self) -> int:
        self._enter("clear")
        with self._lock:
            count = len(self.images)
            self.images.clear()
        return count

    def evict(self, key: bytes) -> None:
        """Drop a chunk as a full tier does."""
        with self._lock:
            del self.images[key]
            self.evicted.append(key)

    def take_evicted(self, max_keys: int | None = None) -> list[bytes]:
        with self._lock:
            end = len(self.evicted) if max_keys is None else max_keys
            taken, self.evicted = self.evicted[:end], self.evicted[end:]
        return taken

    def usage(self) -> TierUsage:
        return TierUsage(failures=self.failures)

    def close(self) -> None:
        self.closed += 1


def until(step: Callable[[], object], done: Callable[[], bool]) -> None:
    """Repeat `step` until `done`; other threads are at work meanwhile."""
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s, "nothing came of it"
        step()
        time.sleep(0.0005)
