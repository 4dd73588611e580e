"""Capacity keeping: what is counted, what is refused, what is evicted, and when."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvsluice.tiers import fs_quota
from kvsluice.tiers.errors import TierUnavailableError
from kvsluice.tiers.eviction import LOW_MARK
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.fs_quota import DEFAULT_SHARE, DiskQuota, reserve_of
from kvsluice.tiers.fs_tree import fan_out, owner_is_dead, temp_name
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR

CHUNK = 65_536
GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Disk:
    """A file system of a made-up size, for what asks `statvfs`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, total_bytes: int = 1000 * GIB) -> None:
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        monkeypatch.setattr(os, "statvfs", self.statvfs)

    def statvfs(self, path: str) -> os.statvfs_result:
        blocks, free = self.total_bytes // 4096, self.free_bytes // 4096
        # The superuser's share of free blocks is no use to anybody else.
        return os.statvfs_result((4096, 4096, blocks, free + 999, free, 10**6, 10**6, 10**6, 0, 255))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch, free_bytes=100 * GIB)


@pytest.fixture
def make(tmp_path, disk, clock):
    tiers = []

    def make(capacity_chunks: int | None = 10, namespace: str = "ab12") -> FileSystemTier:
        capacity = None if capacity_chunks is None else capacity_chunks * CHUNK
        tier = FileSystemTier(tmp_path / "kv", namespace=namespace, capacity_bytes=capacity, clock=clock)
        tiers.append(tier)
        settle(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def by_hand(monkeypatch):
    """No thread: the keeper works when the test says so."""
    monkeypatch.setattr(DiskQuota, "_wake", lambda self: None)


def settle(tier: FileSystemTier) -> None:
    assert tier.quota.wait_idle(30)


def key(index: int) -> bytes:
    return index.to_bytes(4, "big")


def store(tier: FileSystemTier, *indexes: int) -> None:
    for index in indexes:
        assert tier.store(key(index), memoryview(bytearray(CHUNK)), CHUNK) == CHUNK


def age(tier: FileSystemTier, index: int, seconds: float) -> None:
    """Make a chunk that much older than it is."""
    path = tier.path_of(key(index))
    modified = Path(path).stat().st_mtime - seconds
    os.utime(path, (modified, modified))


def held(tier: FileSystemTier, count: int) -> list[int]:
    return [index for index in range(count) if tier.held_prefix([key(index)])]


def test_the_coldest_go_first_and_the_low_mark_is_reached(make):
    tier = make()
    store(tier, *range(10))
    for index, seconds in enumerate([50, 10, 90, 30, 70, 20, 80, 40, 60, 100]):
        age(tier, index, seconds)
    assert tier.take_evicted() == []
    store(tier, 10)
    settle(tier)
    assert held(tier, 11) == [0, 1, 3, 4, 5, 6, 7, 8, 10]
    assert tier.take_evicted() == [key(9), key(2)]
    assert tier.take_evicted() == []
    use = tier.usage()
    assert (use.chunks, use.evicted_chunks) == (9, 2)
    assert use.used_bytes == 9 * CHUNK <= LOW_MARK * 10 * CHUNK
    assert use.capacity_bytes == 10 * CHUNK


def test_a_hit_keeps_a_chunk_and_is_not_written_at_once(make):
    tier = make()
    store(tier, *range(10))
    for index in range(10):
        age(tier, index, 100 - index)
    before = Path(tier.path_of(key(0))).stat().st_mtime
    tier.load(key(0), memoryview(bytearray(CHUNK)), CHUNK)
    assert Path(tier.path_of(key(0))).stat().st_mtime == before
    store(tier, 10)
    settle(tier)
    assert held(tier, 11) == [0, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_lookup_keeps_nothing(make):
    tier = make()
    store(tier, *range(10))
    for index in range(10):
        age(tier, index, 100 - index)
    assert tier.held_prefix([key(0), key(1)]) == 2
    store(tier, 10)
    settle(tier)
    assert held(tier, 11) == list(range(2, 11))


def test_a_hit_is_stamped_with_the_time_of_the_hit(make, clock, monkeypatch):
    tier = make()
    store(tier, 0)
    age(tier, 0, 1000)
    stored = Path(tier.path_of(key(0))).stat().st_mtime
    tier.load(key(0), memoryview(bytearray(CHUNK)), CHUNK)
    clock.now_s += 500
    monkeypatch.setattr(tier.quota, "_wall_clock", lambda: stored + 800)
    tier.quota.run_pending()
    assert Path(tier.path_of(key(0))).stat().st_mtime == pytest.approx(stored + 300, abs=0.01)


def test_hits_are_stamped_in_batches(make, clock, monkeypatch):
    tier = make()
    store(tier, 0, 1)
    stamped = []
    monkeypatch.setattr(os, "utime", lambda path, times, **kwargs: stamped.append(Path(path).name))
    buffer = memoryview(bytearray(CHUNK))
    for _ in range(100):
        tier.load(key(0), buffer, CHUNK)
    settle(tier)
    assert stamped == []
    clock.now_s += fs_quota.FLUSH_INTERVAL_S
    tier.load(key(1), buffer, CHUNK)
    settle(tier)
    assert sorted(stamped) == [f"{key(0).hex()}.safetensors", f"{key(1).hex()}.safetensors"]


def test_many_hits_are_stamped_before_the_time_is_up(make, monkeypatch):
    tier = make()
    monkeypatch.setattr(fs_quota, "FLUSH_HITS", 3)
    stamped = []
    monkeypatch.setattr(os, "utime", lambda path, times, **kwargs: stamped.append(path))
    for index in range(3):
        tier.quota.note_hit(key(index))
    settle(tier)
    assert len(stamped) == 3


def test_closing_stamps_the_last_hits(make):
    tier = make()
    store(tier, 0)
    age(tier, 0, 1000)
    before = Path(tier.path_of(key(0))).stat().st_mtime
    tier.load(key(0), memoryview(bytearray(CHUNK)), CHUNK)
    tier.close()
    assert Path(tier.path_of(key(0))).stat().st_mtime > before


def test_nothing_runs_while_there_is_nothing_to_do(make):
    def keepers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("-quota")]

    tier = make()
    assert keepers() == []
    store(tier, *range(10))
    tier.load(key(0), memoryview(bytearray(CHUNK)), CHUNK)
    tier.held_prefix([key(0)])
    assert keepers() == []


def test_stores_are_refused_while_eviction_cannot_keep_up_and_work_again_after_it(make, by_hand):
    tier = make()
    tier.quota.run_pending()
    store(tier, *range(12))
    for index in range(12):
        age(tier, index, 100 - index)
    with pytest.raises(TierUnavailableError, match=r"no room: .* bytes are used, the capacity is 655360") as caught:
        store(tier, 12)
    assert caught.value.reason == DISK_FULL
    assert tier.usage().used_bytes == 12 * CHUNK
    tier.quota.run_pending()
    assert held(tier, 12) == list(range(3, 12))
    store(tier, 12)


def test_a_chunk_larger_than_the_capacity_is_refused(make):
    tier = make(capacity_chunks=1)
    with pytest.raises(TierUnavailableError, match="larger than the capacity") as caught:
        tier.store(key(0), memoryview(bytearray(2 * CHUNK)), 2 * CHUNK)
    assert caught.value.reason == DISK_FULL


def test_a_failed_store_takes_no_room(make, monkeypatch):
    tier = make()

    def fail(*args):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for _ in range(50):
            with pytest.raises(TierUnavailableError, match="broken disk"):
                store(tier, 0)
    assert tier.usage().used_bytes == 0
    store(tier, *range(10))


def test_deletes_and_replacements_are_counted(make):
    tier = make()
    store(tier, 0, 1)
    assert tier.delete(key(0))
    assert (tier.usage().chunks, tier.usage().used_bytes) == (1, CHUNK)
    os.truncate(tier.path_of(key(1)), CHUNK // 2)
    store(tier, 1)
    assert tier.usage().chunks == 1
    assert tier.clear() == 1
    assert tier.usage().chunks == 0


def test_what_is_there_at_the_start_is_counted_in_the_background(make):
    first = make()
    store(first, *range(5))
    first.close()
    again = make()
    assert (again.usage().chunks, again.usage().used_bytes) == (5, 5 * CHUNK)


def test_use_is_unknown_until_the_first_walk(make, by_hand):
    tier = make()
    assert (tier.usage().chunks, tier.usage().used_bytes) == (None, None)
    store(tier, 0)
    tier.quota.run_pending()
    assert (tier.usage().chunks, tier.usage().used_bytes) == (1, CHUNK)


def test_a_store_beside_the_walk_is_never_missed_and_the_next_walk_is_exact(make, by_hand, monkeypatch):
    tier = make()
    store(tier, 0)
    real_walk = fs_quota.walk_namespace

    def store_and_walk(path):
        store(tier, 1)
        yield from real_walk(path)
        store(tier, 2)

    with monkeypatch.context() as patch:
        patch.setattr(fs_quota, "walk_namespace", store_and_walk)
        tier.quota.run_pending()
    # The walk saw chunk 1 after it had been counted: too much is safe, too little is not.
    assert 3 * CHUNK <= tier.usage().used_bytes <= 4 * CHUNK
    tier.quota.start()
    tier.quota.run_pending()
    assert (tier.usage().chunks, tier.usage().used_bytes) == (3, 3 * CHUNK)


def test_a_start_above_the_capacity_is_brought_down(make):
    big = make(capacity_chunks=20)
    store(big, *range(20))
    for index in range(20):
        age(big, index, 100 - index)
    big.close()
    small = make(capacity_chunks=10)
    assert held(small, 20) == list(range(11, 20))


def test_without_a_capacity_it_is_a_share_of_what_is_free_and_used(make, disk):
    first = make()
    store(first, *range(5))
    first.close()
    disk.free_bytes = 50 * GIB
    tier = make(capacity_chunks=None)
    assert tier.usage().capacity_bytes == int((50 * GIB + 5 * CHUNK) * DEFAULT_SHARE)


def test_other_namespaces_count_and_are_evicted_but_not_reported(make):
    old = make(namespace="old")
    store(old, *range(8))
    for index in range(8):
        age(old, index, 1000 - index)
    new = make(namespace="new")
    store(new, 100, 101, 102)
    settle(new)
    assert held(old, 8) == list(range(2, 8))
    assert [new.held_prefix([key(index)]) for index in (100, 101, 102)] == [1, 1, 1]
    assert new.take_evicted() == []
    assert new.usage().evicted_chunks == 2


def test_strangers_files_are_neither_counted_nor_touched(make, tmp_path):
    folder = tmp_path / "kv" / "ab12" / fan_out(key(0))
    folder.mkdir(parents=True)
    misplaced = next(folder.parent / fan_out(key(i)) / f"{key(0).hex()}.safetensors" for i in range(1, 9))
    misplaced.parent.mkdir(exist_ok=True)
    strangers = [tmp_path / "kv" / "notes.txt", folder.parent / "namespace.json", folder / "x.safetensors", misplaced]
    for path in strangers:
        path.write_bytes(bytes(CHUNK))
        os.utime(path, (0, 0))
    tier = make(capacity_chunks=2)
    assert tier.usage().chunks == 0
    store(tier, *range(3))
    settle(tier)
    assert all(path.exists() for path in strangers)


def test_less_free_space_than_the_reserve_refuses_and_evicts(make, disk, clock, by_hand):
    tier = make()
    tier.quota.run_pending()
    store(tier, *range(5))
    reserve = reserve_of(disk.statvfs(""))
    assert reserve == GIB
    disk.free_bytes = reserve + CHUNK
    store(tier, 5)
    disk.free_bytes = reserve + CHUNK - 4096
    with pytest.raises(TierUnavailableError, match="are left to others") as caught:
        store(tier, 6)
    assert caught.value.reason == DISK_FULL
    tier.quota.run_pending()
    # All of it is not enough, as somebody else filled the disk; nothing of theirs is touched.
    assert held(tier, 6) == []
    disk.free_bytes = 100 * GIB
    store(tier, 6)


def test_a_full_disk_that_eviction_cannot_help_is_not_walked_at_every_store(make, disk, clock, by_hand, monkeypatch):
    tier = make()
    tier.quota.run_pending()
    walks = []
    real = fs_quota.subdirectories
    monkeypatch.setattr(fs_quota, "subdirectories", lambda path: walks.append(path) or real(path))
    disk.free_bytes = 0
    for _ in range(5):
        with pytest.raises(TierUnavailableError):
            store(tier, 0)
        tier.quota.run_pending()
    assert len(walks) == 1
    clock.now_s += fs_quota.RETRY_INTERVAL_S
    with pytest.raises(TierUnavailableError):
        store(tier, 0)
    tier.quota.run_pending()
    assert len(walks) == 2


def test_the_reserve_is_a_share_of_a_small_disk(disk):
    disk.total_bytes = 10 * GIB
    assert reserve_of(disk.statvfs("")) == pytest.approx(GIB / 10, abs=8192)


def test_an_unknown_free_space_is_an_io_error(make, monkeypatch):
    tier = make()

    def fail(path):
        raise OSError(errno.ESTALE, "stale handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", fail)
        with pytest.raises(TierUnavailableError, match="stale handle") as caught:
            store(tier, 0)
    assert caught.value.reason == IO_ERROR


def test_a_chunk_that_cannot_be_removed_does_not_stop_the_rest(make, monkeypatch, caplog):
    tier = make()
    store(tier, *range(10))
    for index in range(10):
        age(tier, index, 100 - index)
    real_unlink = os.unlink
    stubborn = tier.path_of(key(0))

    def unlink(path, *args, **kwargs):
        if str(path) == stubborn:
            raise OSError(errno.EPERM, "immutable")
        real_unlink(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        store(tier, 10)
        settle(tier)
    assert 0 in held(tier, 11)
    assert tier.take_evicted() == [key(1)]
    assert "immutable" in caplog.text


def test_a_root_that_cannot_be_walked_is_said_and_survived(make, monkeypatch, caplog):
    tier = make()
    store(tier, *range(10))

    def fail(path):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        store(tier, 10)
        settle(tier)
    assert "could not walk" in caplog.text
    assert len(held(tier, 11)) == 11
    tier.quota.start()
    settle(tier)
    assert len(held(tier, 11)) == 9


def test_a_thread_that_cannot_start_is_said_and_tried_again(make, monkeypatch, caplog):
    tier = make()
    store(tier, *range(10))

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        store(tier, 10)
    assert "no thread for capacity keeping" in caplog.text
    store(tier, 11)
    settle(tier)
    assert len(held(tier, 12)) == 9


def foreign(name: str) -> str:
    """The same writer under another boot."""
    return name.replace(name.split("-")[1], "0123abcd", 1)


def another_start(name: str) -> str:
    """An ended process whose id is in use again."""
    parts = name.split("-")
    return "-".join([*parts[:3], "1", parts[4]])


@pytest.mark.parametrize(
    ("rename", "age_s", "stays"),
    [
        (str, 7200, True),
        (another_start, 7200, False),
        (another_start, 1800, True),
        (foreign, 7200, True),
        (foreign, 25 * 3600, False),
    ],
)
@pytest.mark.parametrize("place", ["fan-out", "namespace"])
def test_temporary_files_are_swept_by_owner_and_age(make, tmp_path, rename, age_s, stays, place):
    folder = tmp_path / "kv" / "ab12" / (fan_out(key(0)) if place == "fan-out" else "")
    folder.mkdir(parents=True)
    path = folder / rename(temp_name())
    path.write_bytes(bytes(CHUNK))
    modified = path.stat().st_mtime - age_s
    os.utime(path, (modified, modified))
    tier = make()
    assert path.exists() is stays
    use = tier.usage()
    assert use.chunks == 0
    assert use.used_bytes == (CHUNK if stays else 0)
    assert list(tier.scan()) == []


def test_a_running_owner_is_alive_and_an_unknown_name_says_nothing():
    assert owner_is_dead(temp_name()) is False
    assert owner_is_dead(another_start(temp_name())) is True
    assert owner_is_dead(foreign(temp_name())) is None
    assert owner_is_dead("notes.txt") is None


def test_temporary_names_never_repeat():
    assert len({temp_name() for _ in range(100)}) == 100
