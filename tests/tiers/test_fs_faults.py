"""The filesystem tier when the disk does not play along: errors, short transfers, no direct I/O."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fs_images import BUFFERS, IMAGE, KEY, NUM_BYTES, aligned, files_below, unaligned

from kvsluice.tiers import directio
from kvsluice.tiers.directio import address_is_aligned, read_image, write_image
from kvsluice.tiers.errors import (
    ConfigError,
    TierUnavailableError,
)
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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
    # The probe's descriptor may be used again, and has no flag then.
    flags.clear()
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
