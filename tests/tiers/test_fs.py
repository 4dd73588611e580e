"""The filesystem tier: what lies on the disk under which name, mode and length."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from pathlib import Path

import pytest
from fs_images import BUFFERS, IMAGE, KEY, NUM_BYTES, aligned, files_below
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigError,
    TierUnavailableError,
)
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.fs_tree import fan_out
from kvsluice.tiers.reasons import IO_ERROR, MISSING, OVERSIZE, SHORT


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
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_root_that_is_there_keeps_its_mode(root):
    root.mkdir()
    root.chmod(0o755)
    FileSystemTier(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


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
    assert tier.store(KEY, aligned(IMAGE), NUM_BYTES) == NUM_BYTES
    assert tier.held_prefix([KEY]) == 1
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_root_whose_filesystem_is_gone_is_not_made_on_the_one_below(root, tier, monkeypatch):
    root.rename(root.with_name("gone"))
    monkeypatch.setattr(tier.quota, "_device", root.parent.stat().st_dev + 1)
    with pytest.raises(TierUnavailableError, match="not on the file system that held it") as caught:
        tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    assert caught.value.reason == IO_ERROR
    assert not root.exists()


def test_a_root_that_lies_on_another_filesystem_now_takes_no_stores(tier, monkeypatch):
    monkeypatch.setattr(tier.quota, "_device", -1)
    with pytest.raises(TierUnavailableError, match="was it unmounted") as caught:
        tier.store(KEY, aligned(IMAGE), NUM_BYTES)
    assert caught.value.reason == IO_ERROR
    assert tier.held_prefix([KEY]) == 0


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
