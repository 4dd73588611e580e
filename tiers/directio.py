"""Whole images to and from a file descriptor, past the page cache where that works.

Direct I/O wants addresses, offsets and lengths in units of `ALIGNMENT_BYTES`. An image of any
other length is written rounded up and cut with `ftruncate`; on reading, the short tail comes back
with its true length.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import sys
from typing import Final, Literal

from kvsluice.tiers.base import ALIGNMENT_BYTES, round_up
from kvsluice.tiers.errors import ConfigError

__all__ = ["DirectMode", "ImageIO", "address_is_aligned", "probe_direct", "read_image", "set_direct", "write_image"]

logger = logging.getLogger(__name__)

DirectMode = Literal["auto", "on", "off"]

_O_DIRECT: Final = os.O_DIRECT if sys.platform == "linux" else 0

_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""How file systems say that they know no direct I/O, be it at the flag or at the first transfer."""


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def address_is_aligned(buffer: memoryview) -> bool:
    """Whether the first byte lies on a multiple of `ALIGNMENT_BYTES`; read-only memory counts as not."""
    if buffer.readonly or not buffer.nbytes:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT_BYTES == 0


def set_direct(fd: int, on: bool) -> None:
    """Turn direct I/O on or off for an open file.

    The flag is set after the open: an open that creates the file and then refuses the flag would
    leave the file behind.

    Raises:
        OSError: `EINVAL` where the file system refuses.
    """
    if not _O_DIRECT:
        if on:
            raise OSError(errno.EINVAL, "this platform has no O_DIRECT")
        return
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)


def write_image(fd: int, buffer: memoryview, num_bytes: int, *, direct: bool) -> None:
    """Write `buffer[:num_bytes]` to the start of an empty file, which is then exactly that long.

    With `direct` the buffer must be aligned and reach to `round_up(num_bytes)`.

    Raises:
        OSError: as the operating system says; the file may hold a part.
    """
    if direct:
        set_direct(fd, True)
    end = round_up(num_bytes) if direct else num_bytes
    position = 0
    while position < num_bytes:
        count = os.pwrite(fd, buffer[position:end], position)
        if count <= 0:
            raise OSError(errno.EIO, f"a write at byte {position} of {num_bytes} wrote nothing")
        position += count
        if direct and position < num_bytes and position % ALIGNMENT_BYTES:
            # A short write that ends between two units cannot be continued directly.
            set_direct(fd, False)
            direct, end = False, num_bytes
    if position > num_bytes:
        os.ftruncate(fd, num_bytes)


def read_image(fd: int, buffer: memoryview, num_bytes: int, *, direct: bool) -> int:
    """Read the file's first `num_bytes` into the start of `buffer`, never past its end.

    With `direct` the buffer must be aligned and reach to `round_up(num_bytes)`.

    Returns:
        The bytes read: fewer where the file ends early, and with `direct` more where it is longer.

    Raises:
        OSError: as the operating system says.
    """
    if direct:
        set_direct(fd, True)
    end = round_up(num_bytes) if direct else num_bytes
    position = 0
    while position < num_bytes:
        count = os.preadv(fd, [buffer[position:end]], position)
        if count <= 0:
            break
        position += count
        if direct and position < num_bytes and position % ALIGNMENT_BYTES:
            set_direct(fd, False)
            direct, end = False, num_bytes
    return position


def probe_direct(fd: int) -> OSError | None:
    """Try direct I/O on an empty file open for reading and writing; what it failed with, or `None`.

    Goes the whole way, odd length included: some file systems take the flag and fail the first
    write, some the first read.
    """
    num_bytes = ALIGNMENT_BYTES + 100
    view = memoryview(mmap.mmap(-1, round_up(num_bytes)))
    view[:num_bytes] = b"\x5a" * num_bytes
    try:
        write_image(fd, view, num_bytes, direct=True)
        view[:num_bytes] = bytes(num_bytes)
        count = read_image(fd, view, num_bytes, direct=True)
    except OSError as error:
        return error
    if count != num_bytes or bytes(view[:num_bytes]) != b"\x5a" * num_bytes:
        return OSError(errno.EIO, f"a direct read of {num_bytes} bytes gave {count}, or other bytes")
    return None


class ImageIO:
    """The choice between direct and buffered I/O for one tier. Thread-safe.

    Args:
        mode: `"on"` insists, `"off"` never tries, `"auto"` uses direct I/O while it works.
        probe_fd: an empty private file on the tier's file system, open for reading and writing.
        label: what messages call the place, such as a path.

    Raises:
        ConfigError: `mode` is `"on"` and the probe failed.
    """

    def __init__(self, mode: DirectMode, probe_fd: int, label: str) -> None:
        self._label = label
        self._may_fall_back = mode != "on"
        self.direct = mode != "off"
        """Whether aligned buffers go past the page cache."""
        if self.direct and (error := probe_direct(probe_fd)) is not None:
            if error.errno in _FULL:
                # Says nothing about direct I/O, and a full disk can still be read from.
                logger.warning("direct I/O on %s is not proven: %s", label, error)
                return
            if mode == "on":
                raise ConfigError(
                    f"direct_io 'on' does not work on {label} ({error}): use 'auto' or 'off', or another file system"
                ) from error
            self._fall_back(error)

    def _fall_back(self, error: OSError) -> None:
        if self.direct:
            self.direct = False
            logger.warning("direct I/O does not work on %s (%s): buffered I/O is used instead", self._label, error)

    def _fits(self, buffer: memoryview, num_bytes: int) -> bool:
        return self.direct and buffer.nbytes >= round_up(num_bytes) and address_is_aligned(buffer)

    def _refused(self, error: OSError) -> bool:
        """Whether a direct transfer that failed so should be tried again without."""
        if not self._may_fall_back or error.errno not in _REFUSALS:
            return False
        self._fall_back(error)
        return True

    def write(self, fd: int, buffer: memoryview, num_bytes: int) -> None:
        """As `write_image`, directly where the buffer and the file system allow it."""
        if self._fits(buffer, num_bytes):
            try:
                write_image(fd, buffer, num_bytes, direct=True)
            except OSError as error:
                if not self._refused(error):
                    raise
                set_direct(fd, False)
            else:
                return
        write_image(fd, buffer, num_bytes, direct=False)

    def read(self, fd: int, buffer: memoryview, num_bytes: int) -> int:
        """As `read_image`, directly where the buffer and the file system allow it."""
        if self._fits(buffer, num_bytes):
            try:
                return read_image(fd, buffer, num_bytes, direct=True)
            except OSError as error:
                if not self._refused(error):
                    raise
                set_direct(fd, False)
        return read_image(fd, buffer, num_bytes, direct=False)
