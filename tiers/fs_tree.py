"""The folder tree of the filesystem tier: `<root>/<namespace>/<fan-out>/<key>.safetensors`.

Names, modes and the walk stand here, so that the tier, its quota and the tools agree on them.
Nothing here follows a symlink below the root.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvsluice.tiers.names import key_of

__all__ = [
    "DIRECTORY_MODE",
    "FILE_MODE",
    "FanOutFile",
    "allocated_bytes",
    "create_private_file",
    "fan_out",
    "make_private_directory",
    "make_root",
    "owner_is_dead",
    "restore_root",
    "subdirectories",
    "temp_name",
    "walk_namespace",
]

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""KV can be turned back into prompts, so nobody but the owner may read it."""

_FAN_OUT = re.compile(r"[0-9a-f]{3}")
_TEMP_NAME = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9]+)-([0-9]+)-[0-9]+")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_sequence = itertools.count()


def fan_out(key: bytes) -> str:
    """One of 4096 folder names, so that a million chunks are some 250 files a folder."""
    return hashlib.blake2b(key, digest_size=2).hexdigest()[:3]


def allocated_bytes(status: os.stat_result) -> int:
    """What a file takes from the disk; `st_blocks` counts 512-byte units on every Linux file system."""
    return status.st_blocks * 512


def restore_root(path: Path, device: int) -> None:
    """Make a root that was removed under the running tier, on the file system it was on and on no other.

    A root that went because its file system was unmounted must not come back on the disk below.

    Args:
        path: the root.
        device: `st_dev` of the root as it was.

    Raises:
        OSError: it is not made.
    """
    parent = next(folder for folder in path.parents if folder.exists())
    if parent.stat().st_dev != device:
        raise OSError(errno.ENODEV, f"{parent} is not on the file system that held it", str(path))
    make_root(path)


def make_root(path: Path) -> None:
    """Make the root, of mode 0700 whatever the umask; one that is there, or a symlink to one, stays as it is.

    Raises:
        FileExistsError: it is a file.
        NotADirectoryError: it lies below a file.
        OSError: it could not be made.
    """
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        # Another process may have been faster.
        if not path.is_dir():
            raise
    else:
        path.chmod(DIRECTORY_MODE)


def make_private_directory(path: str) -> None:
    """Make a directory of mode 0700 whatever the umask; one that is there keeps its mode.

    Raises:
        NotADirectoryError: a file or a symlink has the name.
        OSError: it could not be made.
    """
    try:
        Path(path).mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(f"{path} is not a directory (symlinks are not followed here)") from None
    else:
        Path(path).chmod(DIRECTORY_MODE)


def create_private_file(path: str) -> int:
    """Create a file of mode 0600 whatever the umask, open for reading and writing; its descriptor.

    Raises:
        OSError: it could not be made; nothing is left.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
    except OSError:
        os.close(fd)
        Path(path).unlink(missing_ok=True)
        raise
    return fd


def _start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot: tells it from a later one with its id. `None`: no such process."""
    try:
        # The command, in parentheses, may hold spaces; the start time is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 else None


@functools.lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text()[:8]
    except OSError:
        return "0" * 8


@functools.lru_cache(maxsize=1)
def _own_stamp(pid: int) -> str:
    # Keyed by the id, because a forked child must not pass for its parent.
    return f"{_boot_id()}-{pid}-{_start_ticks(pid) or 0}"


def temp_name() -> str:
    """A name that no chunk has and no other writer uses, and that says who is writing."""
    return f".tmp-{_own_stamp(os.getpid())}-{next(_sequence)}"


def owner_is_dead(name: str) -> bool | None:
    """Whether the writer of a temporary file has ended; `None` where this host cannot tell."""
    match = _TEMP_NAME.fullmatch(name)
    if match is None or match.group(1) != _boot_id() or _start_ticks(os.getpid()) is None:
        return None
    return _start_ticks(int(match.group(2))) != int(match.group(3))


@dataclass(frozen=True, slots=True)
class FanOutFile:
    """A regular file that the walk found."""

    path: str
    name: str
    key: bytes | None
    """`None` for a temporary file."""
    num_bytes: int
    allocated_bytes: int
    modified_s: float
    """Wall-clock seconds: when it was written, or last stamped as used."""


def subdirectories(path: str) -> Iterator[str]:
    """Names of the real directories in `path`; none where it does not exist.

    Raises:
        OSError: it could not be listed.
    """
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    yield from names


def walk_namespace(namespace_dir: str) -> Iterator[FanOutFile]:
    """Every chunk and temporary file below one namespace, one folder at a time, in no order.

    What vanishes meanwhile is left out; strangers' names are passed over.

    Raises:
        OSError: a folder could not be listed.
    """
    yield from _walk_folder(namespace_dir, "")
    for folder in subdirectories(namespace_dir):
        if _FAN_OUT.fullmatch(folder):
            yield from _walk_folder(f"{namespace_dir}/{folder}", folder)


def _walk_folder(path: str, folder: str) -> Iterator[FanOutFile]:
    try:
        with os.scandir(path) as entries:
            listed = list(entries)
    except FileNotFoundError:
        return
    for entry in listed:
        key = key_of(entry.name)
        if key is None and not _TEMP_NAME.fullmatch(entry.name):
            continue
        if key is not None and fan_out(key) != folder:
            # No lookup goes there, so it is nothing that this tier wrote.
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield FanOutFile(
                path=f"{path}/{entry.name}",
                name=entry.name,
                key=key,
                num_bytes=status.st_size,
                allocated_bytes=allocated_bytes(status),
                modified_s=status.st_mtime,
            )
