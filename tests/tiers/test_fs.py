"""The filesystem tier: what lies on the disk, and what happens when the disk does not play along."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsluice.tiers import directio
from kvsluice.tiers.base import round_up
from kvsluice.tiers.check import check_tier
from kvsluice.tiers.directio import address_is_aligned, read_image, write_image
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigError,
    TierUnavailableError,
)
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.fs_tree import fan_out
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING, OVERSIZE, SHORT

KEY = bytes(range(34))
NUM_BYTES = 3 * 4096 + 100
IMAGE = (bytes(range(256)) * 64)[:NUM_BYTES]


def aligned(image: bytes, room_bytes: int | None = None) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, round_up(room_bytes or len(image))))
    buffer[: len(image)] = image
    return buffer


def unaligned(image: bytes) -> memoryview:
    return aligned(b"\0" + image, len(image) + 1)[1 : 1 + len(image)]


BUFFERS = {"aligned": aligned, "unaligned": unaligned}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def tier(root):
    """A tier whose background work is done, so that faults hit the calls under test alone."""
    tier = FileSystemTier(root, namespace="ab12")
    assert tier.quota.wait_idle(30)
    yield tier
    tier.close()


@pytest.fixture
def flags(monkeypatch):
    """Takes the place of the direct-I/O flag, which not every file system has; says what each file has."""
    on: dict[int, bool] = {}
    monkeypatch.setattr(directio, "set_direct", on.__setitem__)
    return on


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir() or path.is_symlink())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_passes_the_conformance_suite(root, direct_io):
    report = check_tier(lambda: FileSystemTier(root, namespace="ab12", direct_io=direct_io))
    assert report.tier_type == "fs"
    assert files_below(root) == []


def test_passes_the_conformance_suite_without_hard_links(root, monkeypatch):
    def no_link(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    # Renaming cannot tell which of two writers was first, so one instance and no others.
    tier = FileSystemTier(root)
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert tier.store(KEY, aligned(IMAGE[::-1]), NUM_BYTES) == 0
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE
    assert len(files_below(root)) == 1
    tier.close()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_bytes=st.integers(1, 20_000), offset=st.integers(0, 4097), room=st.integers(0, 8192))
def test_any_size_at_any_address_comes_back_exactly(tier, num_bytes, offset, room):
    image = os.urandom(num_bytes)
    memory = memoryview(mmap.mmap(-1, offset + num_bytes + room))
    buffer = memory[offset:]
    buffer[:num_bytes] = image
    assert tier.store(KEY, buffer, num_bytes) == num_bytes
    assert Path(tier.path_of(KEY)).stat().st_size == num_bytes
    buffer[:] = bytes(len(buffer))
    assert tier.load(KEY, buffer, num_bytes) == num_bytes
    assert bytes(buffer[:num_bytes]) == image
    assert tier.delete(KEY)


def test_a_chunk_lies_in_a_fan_out_folder_under_its_key(root, tier):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    path = root / "ab12" / fan_out(KEY) / f"{KEY.hex()}.safetensors"
    assert files_below(root) == [path]
    assert path.read_bytes() == IMAGE
    assert tier.path_of(KEY) == str(path)


def test_keys_spread_over_thousands_of_folders():
    folders = {fan_out(index.to_bytes(8, "little")) for index in range(20_000)}
    assert len(folders) > 4000
    assert all(len(folder) == 3 for folder in folders)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000, 0o377])
def test_nobody_but_the_owner_may_read_whatever_the_umask(root, umask):
    before = os.umask(umask)
    try:
        tier = FileSystemTier(root, namespace="ab12", namespace_facts={"a": 1})
        tier.store(KEY, aligned(IMAGE), NUM_BYTES)
        tier.close()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root / "ab12").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert stat.S_IMODE((root / "ab12").stat().st_mode) == 0o700


def test_facts_are_written_once_and_stay(root):
    for facts in ({"model": "first"}, {"model": "second"}):
        FileSystemTier(root, namespace="ab12", namespace_facts=facts).close()
    assert json.loads((root / "ab12" / "namespace.json").read_text()) == {"model": "first"}
    assert files_below(root) == [root / "ab12" / "namespace.json"]


def test_facts_that_are_no_json_are_a_configuration_error(root):
    with pytest.raises(ConfigError, match="namespace_facts"):
        FileSystemTier(root, namespace_facts={"a": object()})


def test_clear_leaves_the_facts_other_namespaces_and_strangers(root):
    one = FileSystemTier(root, namespace="one", namespace_facts={"a": 1})
    two = FileSystemTier(root, namespace="two")
    for tier in (one, two):
        tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    stranger = root / "one" / fan_out(KEY) / "notes.txt"
    stranger.write_text("mine")
    assert one.clear() == 1
    assert files_below(root) == sorted([root / "one" / "namespace.json", stranger, Path(two.path_of(KEY))])
    one.close()
    two.close()


def test_two_instances_on_one_root_see_each_other(root, tier):
    other = FileSystemTier(root, namespace="ab12")
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert other.store(KEY, aligned(IMAGE[::-1]), NUM_BYTES) == 0
    buffer = aligned(bytes(NUM_BYTES))
    other.load(KEY, buffer, NUM_BYTES)
    assert bytes(buffer[:NUM_BYTES]) == IMAGE
    assert other.delete(KEY)
    assert tier.held_prefix([KEY]) == 0
    other.close()


def test_the_first_of_two_writers_wins_when_both_saw_nothing(tier, monkeypatch):
    real_link = os.link
    rival = aligned(IMAGE[::-1])

    def link_after_rival(source, target, **kwargs):
        monkeypatch.setattr(os, "link", real_link)
        assert tier.store(KEY, rival, NUM_BYTES) == NUM_BYTES
        real_link(source, target, **kwargs)

    monkeypatch.setattr(os, "link", link_after_rival)
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == 0
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE[::-1]


def test_a_root_that_is_removed_under_the_tier_is_made_again(root, tier):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    root.rename(root.with_name("gone"))
    assert tier.held_prefix([KEY]) == 0
    with pytest.raises(ChunkMissingError):
        tier.load(KEY, aligned(IMAGE), NUM_BYTES)
    assert list(tier.scan()) == []
    root.mkdir()
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert tier.held_prefix([KEY]) == 1


@pytest.mark.parametrize(
    ("held_bytes", "reason"),
    [(0, SHORT), (1, SHORT), (NUM_BYTES - 1, SHORT), (NUM_BYTES + 1, OVERSIZE), (16384, OVERSIZE)],
)
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_a_file_of_another_length_is_damage_until_it_is_stored_anew(tier, held_bytes, reason, make):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    os.truncate(tier.path_of(KEY), held_bytes)
    with pytest.raises(ChunkDamagedError, match=f"has {held_bytes} bytes, the chunk has {NUM_BYTES}") as caught:
        tier.load(KEY, make(bytes(NUM_BYTES)), NUM_BYTES)
    assert caught.value.reason == reason
    assert tier.store(KEY, make(IMAGE), NUM_BYTES) == NUM_BYTES
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE
    assert tier.usage().chunks == 1


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_a_file_that_is_cut_while_it_is_read_is_short(tier, monkeypatch, make):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    real_preadv = os.preadv

    def cut_first(fd, buffers, position):
        os.truncate(tier.path_of(KEY), 4096)
        return real_preadv(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(ChunkDamagedError) as caught:
        tier.load(KEY, make(bytes(NUM_BYTES)), NUM_BYTES)
    assert caught.value.reason == SHORT


@pytest.mark.parametrize("what", ["empty", "directory", "symlink", "dangling", "pipe"])
def test_what_is_no_chunk_file_is_not_held(root, tmp_path, tier, what):
    path = Path(tier.path_of(KEY))
    path.parent.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(IMAGE)
    if what == "empty":
        path.touch()
    elif what == "directory":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(outside)
    elif what == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(path)
    assert tier.held_prefix([KEY]) == 0
    assert list(tier.scan()) == []
    buffer = aligned(bytes(NUM_BYTES))
    with pytest.raises((ChunkMissingError, ChunkDamagedError)) as caught:
        tier.load(KEY, buffer, NUM_BYTES)
    assert caught.value.reason == (SHORT if what == "empty" else MISSING)
    if what == "directory":
        with pytest.raises(TierUnavailableError):
            tier.store(KEY, aligned(IMAGE), NUM_BYTES)
        path.rmdir()
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert not path.is_symlink()
    assert path.read_bytes() == IMAGE
    assert outside.read_bytes() == IMAGE
    assert [file.name for file in files_below(root)] == [path.name]


@pytest.mark.parametrize("action", ["store", "load", "held_prefix", "delete"])
def test_a_symlink_in_a_folders_place_is_not_followed(root, tmp_path, tier, action):
    outside = tmp_path / "outside"
    outside.mkdir()
    chunk = outside / f"{KEY.hex()}.safetensors"
    chunk.write_bytes(IMAGE)
    (root / "ab12" / fan_out(KEY)).symlink_to(outside)
    arguments = {"held_prefix": ([KEY],), "delete": (KEY,)}.get(action, (KEY, aligned(IMAGE), NUM_BYTES))
    with pytest.raises(TierUnavailableError, match="symlinks are not followed"):
        getattr(tier, action)(*arguments)
    assert list(tier.scan()) == []
    assert tier.clear() == 0
    assert list(outside.iterdir()) == [chunk]


def test_the_root_itself_may_be_a_symlink(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tier = FileSystemTier(tmp_path / "link")
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert len(files_below(tmp_path / "real")) == 1
    tier.close()


def test_a_namespace_that_is_a_symlink_is_refused(root, tmp_path):
    root.mkdir()
    (root / "ab12").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symlinks are not followed"):
        FileSystemTier(root, namespace="ab12")


def test_a_root_that_is_a_file_is_a_configuration_error(root):
    root.write_text("not a folder")
    with pytest.raises(ConfigError, match=f"root_dir '{root}' is not a directory"):
        FileSystemTier(root)
    with pytest.raises(ConfigError, match="lies below a file"):
        FileSystemTier(root / "deeper")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_root_that_cannot_be_written_is_a_configuration_error(root, monkeypatch, call, number):
    def refuse(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ConfigError, match=f"root_dir '{root}' cannot be .*{os.strerror(number)}") as caught:
        FileSystemTier(root)
    monkeypatch.undo()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"namespace": "../up"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"direct_io": "maybe"}, "direct_io is 'maybe'"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(root, arguments, word):
    with pytest.raises(ConfigError, match=word):
        FileSystemTier(root, **arguments)


def test_a_full_disk_does_not_keep_a_tier_from_starting(root, monkeypatch):
    FileSystemTier(root).close()

    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    tier = FileSystemTier(root, namespace_facts={"a": 1})
    monkeypatch.undo()
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert [path.name for path in files_below(root)] == [f"{KEY.hex()}.safetensors"]
    tier.close()


FAULTS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]


def expect_nothing_kept(tier, root, make, number):
    descriptors = open_descriptors()
    use = tier.usage()
    with pytest.raises(TierUnavailableError, match="could not store") as caught:
        tier.store(KEY, make(IMAGE), NUM_BYTES)
    assert caught.value.reason == (DISK_FULL if number in (errno.ENOSPC, errno.EDQUOT) else IO_ERROR)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number
    assert files_below(root) == []
    assert open_descriptors() == descriptors
    assert tier.usage() == use


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("call", ["open", "fchmod", "close", "link", "statvfs", "lstat"])
def test_a_failed_call_leaves_nothing_and_the_next_store_works(root, tier, monkeypatch, call, number):
    if call == "statvfs" and number in (errno.ENOSPC, errno.EDQUOT):
        number = errno.ESTALE

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    real_close = os.close

    def close_and_fail(fd):
        real_close(fd)
        fail()

    with monkeypatch.context() as patch:
        if call == "statvfs":
            patch.setattr(os, call, fail)
            with pytest.raises(TierUnavailableError) as caught:
                tier.store(KEY, aligned(IMAGE), NUM_BYTES)
            assert caught.value.reason == IO_ERROR
        else:
            # The tree's own helpers stay whole: what is under test is the store.
            patch.setattr(os, call, only_below(root, getattr(os, call), close_and_fail if call == "close" else fail))
            expect_nothing_kept(tier, root, aligned, number)
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE


@pytest.mark.parametrize("number", FAULTS)
def test_a_written_file_that_cannot_be_looked_at_is_not_kept(root, tier, monkeypatch, number):
    real_lstat = os.lstat

    def lstat(path, *args, **kwargs):
        if ".tmp-" in str(path):
            raise OSError(number, os.strerror(number))
        return real_lstat(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lstat)
        expect_nothing_kept(tier, root, aligned, number)


def only_below(root: Path, real, fail):
    """Fails for paths below the root and for descriptors; passes all else on."""

    def call(target, *args, **kwargs):
        if isinstance(target, int) or str(target).startswith(str(root)):
            return fail(target)
        return real(target, *args, **kwargs)

    return call


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("at_byte", [0, 4096, 8192, NUM_BYTES - 100])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_an_error_at_byte_n_of_a_write_leaves_nothing(root, tier, monkeypatch, flags, number, at_byte, make):
    real_pwrite = os.pwrite

    def write_up_to(fd, buffer, position):
        if position >= at_byte:
            raise OSError(number, os.strerror(number))
        return real_pwrite(fd, buffer[: at_byte - position], position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_up_to)
        expect_nothing_kept(tier, root, make, number)
    assert tier.store(KEY, make(IMAGE), NUM_BYTES) == NUM_BYTES


def test_a_write_that_writes_nothing_is_an_error_and_no_endless_loop(root, tier, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, buffer, position: 0)
    expect_nothing_kept(tier, root, unaligned, errno.EIO)


@pytest.mark.parametrize("step_bytes", [1, 100, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_short_writes_are_continued(tier, monkeypatch, flags, step_bytes, make):
    real_pwrite = os.pwrite
    buffer = make(IMAGE)

    def write_some(fd, part, position):
        if flags.get(fd):
            assert position % 4096 == 0
        return real_pwrite(fd, part[:step_bytes], position)

    monkeypatch.setattr(os, "pwrite", write_some)
    assert tier.store(KEY, buffer, NUM_BYTES) == NUM_BYTES
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE


@pytest.mark.parametrize("step_bytes", [1, 100, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_short_reads_are_continued(tier, monkeypatch, flags, step_bytes, make):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    flags.clear()
    real_preadv = os.preadv

    def read_some(fd, parts, position):
        if flags.get(fd):
            assert position % 4096 == 0
        return real_preadv(fd, [parts[0][:step_bytes]], position)

    monkeypatch.setattr(os, "preadv", read_some)
    buffer = make(bytes(NUM_BYTES))
    assert tier.load(KEY, buffer, NUM_BYTES) == NUM_BYTES
    assert bytes(buffer[:NUM_BYTES]) == IMAGE


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a_failed_read_is_unavailable_and_closes_its_file(root, tier, monkeypatch, call, number):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    descriptors = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail if call == "preadv" else only_below(root, getattr(os, call), fail))
        with pytest.raises(TierUnavailableError, match="could not load") as caught:
            tier.load(KEY, aligned(IMAGE), NUM_BYTES)
    assert caught.value.reason == IO_ERROR
    assert open_descriptors() == descriptors
    assert tier.load(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES


@pytest.mark.parametrize("action", ["held_prefix", "delete"])
def test_a_failed_look_is_unavailable_and_no_miss(root, tier, monkeypatch, action):
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", only_below(root, os.lstat, fail))
        with pytest.raises(TierUnavailableError, match="broken disk"):
            getattr(tier, action)([KEY] if action == "held_prefix" else KEY)


@pytest.mark.parametrize("action", ["scan", "clear"])
def test_a_failed_listing_is_unavailable(root, tier, monkeypatch, action):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", only_below(root, os.scandir, fail))
        with pytest.raises(TierUnavailableError, match="broken disk"):
            list(getattr(tier, action)())


def test_clear_goes_on_past_a_chunk_that_stays(tier, monkeypatch):
    keys = [bytes([index]) for index in range(5)]
    for key in keys:
        tier.store(key, aligned(IMAGE), 10)
    real_unlink = os.unlink
    stubborn = tier.path_of(keys[2])

    def unlink(path, *args, **kwargs):
        if str(path) == stubborn:
            raise OSError(errno.EPERM, "immutable")
        real_unlink(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(TierUnavailableError, match="immutable"):
            tier.clear()
    assert list(tier.scan()) == [keys[2]]


def test_a_lookup_neither_lists_nor_opens(tier, monkeypatch):
    keys = [bytes([index]) for index in range(20)]
    for key in keys[:15]:
        tier.store(key, aligned(IMAGE), 10)

    def refuse(*args, **kwargs):
        raise AssertionError("a lookup did I/O beyond looking at names")

    with monkeypatch.context() as patch:
        for call in ("open", "scandir", "listdir", "utime"):
            patch.setattr(os, call, refuse)
        held = tier.held_prefix(keys)
    assert held == 15


# Direct I/O


def test_direct_io_is_used_for_aligned_buffers_alone(root, flags):
    tier = FileSystemTier(root, direct_io="on")
    flags.clear()
    tier.store(KEY, unaligned(IMAGE), NUM_BYTES)
    tier.load(KEY, unaligned(IMAGE), NUM_BYTES)
    # Aligned, but without room for the last unit.
    tier.load(KEY, aligned(IMAGE)[:NUM_BYTES], NUM_BYTES)
    assert flags == {}
    tier.load(KEY, aligned(IMAGE), NUM_BYTES)
    assert list(flags.values()) == [True]
    tier.close()


def test_direct_io_that_is_off_is_never_tried(root, flags):
    tier = FileSystemTier(root, direct_io="off")
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    tier.load(KEY, aligned(IMAGE), NUM_BYTES)
    assert flags == {}
    tier.close()


def refuse_direct(monkeypatch, flags, refusing):
    """A file system that refuses direct I/O: at the flag, at the first write or at the first read."""
    real_pwrite, real_preadv = os.pwrite, os.preadv

    def set_direct(fd, on):
        if on and refusing == "flag":
            raise OSError(errno.EINVAL, "no direct I/O here")
        flags[fd] = on

    def pwrite(fd, buffer, position):
        if flags.get(fd) and refusing == "write":
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_pwrite(fd, buffer, position)

    def preadv(fd, buffers, position):
        if flags.pop(fd, False) and refusing == "read":
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_preadv(fd, buffers, position)

    monkeypatch.setattr(directio, "set_direct", set_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("refusing", ["flag", "write", "read"])
def test_a_file_system_without_direct_io_is_found_out_once_and_said_once(root, monkeypatch, flags, caplog, refusing):
    refuse_direct(monkeypatch, flags, refusing)
    tier = FileSystemTier(root)
    assert len(caplog.records) == 1
    assert "direct I/O does not work on" in caplog.text
    assert str(root) in caplog.text
    flags.clear()
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    buffer = aligned(bytes(NUM_BYTES))
    tier.load(KEY, buffer, NUM_BYTES)
    assert bytes(buffer[:NUM_BYTES]) == IMAGE
    assert flags == {}
    assert len(caplog.records) == 1
    tier.close()


@pytest.mark.parametrize("refusing", ["flag", "write", "read"])
def test_direct_io_that_is_insisted_on_fails_loudly(root, monkeypatch, flags, refusing):
    refuse_direct(monkeypatch, flags, refusing)
    with pytest.raises(ConfigError, match=r"direct_io 'on' does not work on .*use 'auto' or 'off'"):
        FileSystemTier(root, direct_io="on")
    assert files_below(root) == []


@pytest.mark.parametrize("refusing", ["flag", "write"])
def test_direct_io_that_stops_working_falls_back_within_the_store(root, monkeypatch, flags, caplog, refusing):
    tier = FileSystemTier(root)
    refuse_direct(monkeypatch, flags, refusing)
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert Path(tier.path_of(KEY)).read_bytes() == IMAGE
    assert tier.store(b"another", aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert len(caplog.records) == 1
    tier.close()


def test_direct_io_that_stops_working_falls_back_within_the_load(root, monkeypatch, flags, caplog):
    tier = FileSystemTier(root)
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    refuse_direct(monkeypatch, flags, "read")
    buffer = aligned(bytes(NUM_BYTES))
    assert tier.load(KEY, buffer, NUM_BYTES) == NUM_BYTES
    assert bytes(buffer[:NUM_BYTES]) == IMAGE
    assert len(caplog.records) == 1
    tier.close()


def test_a_real_error_of_a_direct_write_is_no_reason_to_fall_back(root, monkeypatch, flags):
    tier = FileSystemTier(root, direct_io="on")

    def fail(*args):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(TierUnavailableError, match="broken disk"):
            tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    flags.clear()
    tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    assert list(flags.values()) == [True]
    tier.close()


def test_alignment_is_the_address_not_the_offset_in_a_view():
    buffer = aligned(bytes(8192))
    assert address_is_aligned(buffer)
    assert address_is_aligned(buffer[4096:])
    assert not address_is_aligned(buffer[1:])
    assert not address_is_aligned(buffer.toreadonly())
    assert not address_is_aligned(buffer[:0])


def test_a_read_stops_at_the_end_of_the_buffers_part(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(IMAGE)
    buffer = unaligned(bytes(NUM_BYTES))
    with path.open("rb") as file:
        assert read_image(file.fileno(), buffer, 1000, direct=False) == 1000
    assert bytes(buffer) == IMAGE[:1000] + bytes(NUM_BYTES - 1000)


def test_a_direct_write_is_cut_to_the_images_length(tmp_path, flags):
    path = tmp_path / "image"
    buffer = aligned(IMAGE)
    buffer[NUM_BYTES:] = b"\xff" * (len(buffer) - NUM_BYTES)
    with path.open("wb") as file:
        write_image(file.fileno(), buffer, NUM_BYTES, direct=True)
    assert path.read_bytes() == IMAGE


# Odds and ends


def test_a_closed_tier_says_so(tier):
    tier.close()
    with pytest.raises(ClosedError, match="'fs' is closed"):
        tier.store(KEY, aligned(IMAGE), NUM_BYTES)


@pytest.mark.parametrize("action", ["store", "load"])
@pytest.mark.parametrize("num_bytes", [0, 4097])
def test_an_image_that_the_buffer_has_no_room_for_is_refused(tier, action, num_bytes):
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}, the buffer has 4096"):
        getattr(tier, action)(KEY, aligned(bytes(4096)), num_bytes)


@pytest.mark.parametrize("key", [b"", bytes(81)])
def test_a_key_of_no_usable_length_is_refused(tier, key):
    with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
        tier.held_prefix([key])
