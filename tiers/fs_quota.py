"""Keeps the filesystem tier within its share of the disk.

    store ──admit──▶ estimate of use ──over the high mark──▶ wake ──▶ one thread: flush hits,
    load ──note_hit─▶ hits in memory ──many, or old──────────────▶    walk, evict the coldest

The hot path only counts. Everything that touches many files happens on one thread, which exists
only while there is work. All namespaces under the root count and are evicted alike, coldest first,
so that what an older model left behind is reclaimed too.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvsluice.tiers.base import TierUsage, round_up, take_left
from kvsluice.tiers.errors import TierUnavailableError
from kvsluice.tiers.eviction import Coldest, is_overfull, surplus_bytes
from kvsluice.tiers.fs_tree import FanOutFile, fan_out, owner_is_dead, restore_root, subdirectories, walk_namespace
from kvsluice.tiers.names import file_name
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR

__all__ = ["DEFAULT_SHARE", "DiskQuota", "reserve_of"]

logger = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.8
"""Without a configured capacity: this much of what was free at the start, plus what the tier already used."""
RESERVE_SHARE: Final = 0.01
RESERVE_MAX_BYTES: Final = 1 << 30
"""Free space left to others: 1 % of the file system or 1 GiB, whichever is smaller."""
TEMP_AGE_S: Final = 3600.0
"""A dead owner's temporary file is swept after this: long enough for any clock skew of a shared mount."""
FOREIGN_TEMP_AGE_S: Final = 24 * 3600.0
"""The same where the owner ran under another boot or on another host, and nobody here can tell if it lives."""
FLUSH_HITS: Final = 4096
FLUSH_INTERVAL_S: Final = 60.0
"""Hits are stamped on their files when there are this many, or when the last stamping is this long ago."""
RETRY_INTERVAL_S: Final = 10.0
"""After a walk that could not make the room that was wanted, the next one waits this long."""
MAX_EVICTED_KEYS: Final = 100_000
"""Reported keys kept for `take_evicted`; older ones are forgotten, and their load is a plain miss."""


def reserve_of(status: os.statvfs_result) -> int:
    """The free bytes that the tier leaves to others on a file system."""
    return min(int(status.f_blocks * status.f_frsize * RESERVE_SHARE), RESERVE_MAX_BYTES)


def _free_of(status: os.statvfs_result) -> int:
    return status.f_bavail * status.f_frsize


class _Survey:
    """What one walk found: the totals, and the coldest files that together make `wanted_bytes`."""

    def __init__(self, wanted_bytes: int) -> None:
        self.chunks = 0
        self.used_bytes = 0
        self.victims: Coldest[FanOutFile] = Coldest(wanted_bytes)

    def add(self, found: FanOutFile) -> None:
        self.used_bytes += found.allocated_bytes
        if found.key is None:
            return
        self.chunks += 1
        self.victims.add(found, name=found.path, used_s=found.modified_s, num_bytes=found.allocated_bytes)


class DiskQuota:
    """Counts, admits and evicts for one root directory. Thread-safe.

    Args:
        root_dir: the tier's root; everything below it that the tier wrote counts.
        namespace: the tier's own one, whose evicted keys are reported and whose hits are stamped.
        label: the tier, in messages and in the thread's name.
        capacity_bytes: the most to keep, in allocated bytes; `None` for `DEFAULT_SHARE`.
        clock: seconds, monotonic.
        wall_clock: seconds as in a file's modification time.

    Raises:
        OSError: the file system could not be asked for its size.
    """

    def __init__(
        self,
        root_dir: str,
        namespace: str,
        *,
        label: str,
        capacity_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._root_dir = root_dir
        self._namespace = namespace
        self._label = label
        self._clock = clock
        self._wall_clock = wall_clock
        self._device = Path(root_dir).stat().st_dev
        self._free_at_start_bytes = _free_of(os.statvfs(root_dir))
        self._capacity_is_default = capacity_bytes is None
        self._capacity_bytes = (
            int(self._free_at_start_bytes * DEFAULT_SHARE) if capacity_bytes is None else capacity_bytes
        )

        self._lock = threading.Lock()
        self._surveyed = False
        self._chunks = 0
        # Until the first walk, and from each walk's start on, the sum of what came and went.
        self._used_bytes = 0
        self._came_bytes = 0
        self._came_chunks = 0
        self._hits: dict[bytes, float] = {}
        self._flushed_at_s = clock()
        self._evicted: deque[bytes] = deque(maxlen=MAX_EVICTED_KEYS)
        self._evicted_chunks = 0
        self._shortage_bytes = 0
        self._evict_after_s = clock()

        self._survey_wanted = False
        self._flush_wanted = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._work_lock = threading.Lock()

    # The hot path: counting only.

    def admit(self, num_bytes: int) -> int:
        """Reserve room for one file; give the reservation back to `settle`.

        Raises:
            TierUnavailableError: there is no room, or the file system could not be asked.
        """
        wanted = round_up(num_bytes)
        try:
            try:
                device = Path(self._root_dir).stat().st_dev
            except FileNotFoundError:
                restore_root(Path(self._root_dir), self._device)
                device = self._device
            if device != self._device:
                raise OSError(errno.ENODEV, "another file system lies there now; was it unmounted?", self._root_dir)
            status = os.statvfs(self._root_dir)
        except OSError as error:
            raise TierUnavailableError(f"{self._label}: no free space known: {error}", reason=IO_ERROR) from error
        free, reserve = _free_of(status), reserve_of(status)
        with self._lock:
            if wanted > self._capacity_bytes:
                raise self._full(f"a chunk of {wanted} bytes is larger than the capacity of {self._capacity_bytes}")
            if free - wanted < reserve:
                self._want_eviction(2 * reserve + wanted - free)
                raise self._full(f"{free} bytes are free, {wanted} are wanted and {reserve} are left to others")
            if is_overfull(self._used_bytes, self._capacity_bytes):
                self._want_eviction()
                raise self._full(f"{self._used_bytes} bytes are used, the capacity is {self._capacity_bytes}")
            self._count(wanted, 0)
            return wanted

    def _full(self, why: str) -> TierUnavailableError:
        return TierUnavailableError(f"{self._label}: no room: {why}", reason=DISK_FULL)

    def settle(self, reserved_bytes: int, allocated_bytes: int, *, new_chunks: int = 0) -> None:
        """Replace a reservation by what the file really takes: 0 where nothing was kept."""
        with self._lock:
            self._count(allocated_bytes - reserved_bytes, new_chunks)
            if self._used_bytes > self._capacity_bytes:
                self._want_eviction()

    def _want_eviction(self, shortage_bytes: int = 0) -> None:
        if self._clock() >= self._evict_after_s:
            self._survey_wanted = True
            self._shortage_bytes = max(self._shortage_bytes, shortage_bytes)
            self._wake()

    def note_removed(self, allocated_bytes: int, chunks: int = 1) -> None:
        """Somebody deleted or replaced chunks on purpose."""
        with self._lock:
            self._count(-allocated_bytes, -chunks)

    def _count(self, num_bytes: int, chunks: int) -> None:
        self._came_bytes += num_bytes
        self._came_chunks += chunks
        self._used_bytes = max(0, self._used_bytes + num_bytes)
        self._chunks = max(0, self._chunks + chunks)

    def note_hit(self, key: bytes) -> None:
        """A chunk was read. Its file is stamped later, with many others: no write per read."""
        now_s = self._clock()
        with self._lock:
            self._hits[key] = now_s
            if len(self._hits) >= FLUSH_HITS or now_s - self._flushed_at_s >= FLUSH_INTERVAL_S:
                self._flush_wanted = True
                self._wake()

    def take_evicted(self, max_keys: int | None = None) -> list[bytes]:
        """Keys of the own namespace that were evicted, each told once; at most `max_keys` a call."""
        with self._lock:
            return take_left(self._evicted, max_keys)

    def usage(self) -> TierUsage:
        """What is counted; chunks and bytes are `None` until the first walk has ended."""
        with self._lock:
            return TierUsage(
                chunks=self._chunks if self._surveyed else None,
                used_bytes=self._used_bytes if self._surveyed else None,
                capacity_bytes=self._capacity_bytes,
                evicted_chunks=self._evicted_chunks,
            )

    # The thread: everything that touches many files.

    def start(self) -> None:
        """Begin the first walk in the background: it finds the use and sweeps orphaned temporary files."""
        with self._lock:
            self._survey_wanted = True
            self._wake()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has no work left; whether it has none."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stamp the last hits and end the thread, waiting no longer than `timeout_s`. Idempotent."""
        with self._lock:
            if self._hits and not self._closed:
                self._flush_wanted = True
                self._wake()
            self._closed = True
        self.wait_idle(timeout_s)

    def _wake(self) -> None:
        """Under the lock: see that a thread is working, or will."""
        if self._thread is not None or self._closed:
            return
        thread = threading.Thread(target=self._work, name=f"kvsluice-{self._label}-quota", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:
            # The thread limit: what is wanted stays wanted, and the next call tries again.
            self._thread = None
            logger.warning("%s: no thread for capacity keeping: %s", self._label, error)

    def _work(self) -> None:
        try:
            while True:
                self.run_pending()
                with self._lock:
                    if not self._has_work():
                        self._thread = None
                        return
        except BaseException:
            with self._lock:
                self._thread = None
            raise

    def _has_work(self) -> bool:
        return self._survey_wanted or self._flush_wanted

    def run_pending(self) -> None:
        """Do what is wanted now, on the calling thread; what the background thread runs."""
        with self._work_lock:
            with self._lock:
                survey, shortage_bytes = self._survey_wanted, self._shortage_bytes
                self._survey_wanted = self._flush_wanted = False
                self._shortage_bytes = 0
            self._flush_hits()
            if not survey:
                return
            try:
                # Twice at most: the first walk may show that the estimate was too low.
                if self._survey_and_evict(shortage_bytes):
                    self._survey_and_evict(0)
            except OSError as error:
                logger.warning("%s: capacity keeping could not walk %s: %s", self._label, self._root_dir, error)

    def _flush_hits(self) -> None:
        with self._lock:
            hits, self._hits = self._hits, {}
            self._flushed_at_s = self._clock()
        offset_s = self._wall_clock() - self._clock()
        refused: OSError | None = None
        for key, at_s in hits.items():
            stamp_s = at_s + offset_s
            try:
                os.utime(self._path_of(key), (stamp_s, stamp_s), follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                refused = error
        if refused is not None:
            logger.warning("%s: hits could not be stamped on their files: %s", self._label, refused)

    def _path_of(self, key: bytes) -> str:
        return f"{self._root_dir}/{self._namespace}/{fan_out(key)}/{file_name(key)}"

    def _survey_and_evict(self, shortage_bytes: int) -> bool:
        """One walk and the deletions it calls for; whether the use is still too high by what the walk found."""
        with self._lock:
            self._came_bytes = self._came_chunks = 0
            wanted = max(shortage_bytes, surplus_bytes(self._used_bytes, self._capacity_bytes))
        survey = _Survey(wanted)
        now_s = self._wall_clock()
        for namespace in subdirectories(self._root_dir):
            for found in walk_namespace(f"{self._root_dir}/{namespace}"):
                if self._closed:
                    return False
                if found.key is None and self._is_orphan(found, now_s):
                    self._remove(found)
                else:
                    survey.add(found)
        with self._lock:
            if not self._surveyed and self._capacity_is_default:
                self._capacity_bytes = int((self._free_at_start_bytes + survey.used_bytes) * DEFAULT_SHARE)
            self._surveyed = True
            self._used_bytes = max(0, survey.used_bytes + self._came_bytes)
            self._chunks = max(0, survey.chunks + self._came_chunks)
            if not shortage_bytes:
                wanted = surplus_bytes(self._used_bytes, self._capacity_bytes)
        freed = self._evict(survey.victims.coldest_first(), wanted)
        with self._lock:
            if freed < min(wanted, survey.victims.wanted_bytes):
                self._evict_after_s = self._clock() + RETRY_INTERVAL_S
            return self._used_bytes > self._capacity_bytes and freed >= survey.victims.wanted_bytes

    @staticmethod
    def _is_orphan(found: FanOutFile, now_s: float) -> bool:
        dead = owner_is_dead(found.name)
        age_s = now_s - found.modified_s
        return age_s > FOREIGN_TEMP_AGE_S if dead is None else dead and age_s > TEMP_AGE_S

    def _evict(self, victims: list[FanOutFile], wanted_bytes: int) -> int:
        freed = 0
        own_prefix = f"{self._root_dir}/{self._namespace}/"
        for found in victims:
            if freed >= wanted_bytes or self._closed:
                break
            own_key = found.key if found.path.startswith(own_prefix) else None
            with self._lock:
                if own_key in self._hits:
                    # Read since the walk began: not cold any more.
                    continue
            if not self._remove(found):
                continue
            freed += found.allocated_bytes
            with self._lock:
                self._count(-found.allocated_bytes, -1)
                self._evicted_chunks += 1
                if own_key is not None:
                    self._evicted.append(own_key)
        return freed

    def _remove(self, found: FanOutFile) -> bool:
        try:
            # Gone is gone: another process may keep the same root.
            Path(found.path).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: could not remove %s: %s", self._label, found.path, error)
            return False
        return True
