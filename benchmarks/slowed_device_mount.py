"""A directory on an ext4 file system whose block device is as slow as one says, or hangs.

    the program ── ext4 ── loop device, direct I/O ── slowed_device_server (FUSE, one file in memory)

Everything above the last stage is the kernel's own: direct and buffered I/O, the journal, and
threads that wait uninterruptibly while the device hangs. Needs Linux, root, /dev/fuse, loop devices,
mkfs.ext4 and util-linux; no compiler and no library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

from slowed_device_pace import Speed
from slowed_device_server import Counters
from typing_extensions import Self

_SERVER: Final = Path(__file__).with_name("slowed_device_server.py")
_CLONE_NEWNS: Final = 0x20000
_TOOLS: Final = ("losetup", "mkfs.ext4", "mount", "umount")
_MAKING: Final = Speed(1e12, 0.0)
"""What the device does while nothing is measured: as fast as its server can answer."""


class UnavailableError(Exception):
    """This machine cannot slow a device so; the message says what is missing."""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{' '.join(command)}: {error.stderr.strip()}") from error


def enter_private_mounts() -> None:
    """From now on this thread's mounts are seen by nobody else and end with this program, however it ends.

    The threads and programs that it starts later see them too.

    Raises:
        UnavailableError: no such place can be had here.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UnavailableError("only root can mount a slowed device, and only on Linux")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or not Path("/dev/fuse").exists():
        raise UnavailableError(f"not on this machine: {', '.join(missing or ['/dev/fuse'])}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise UnavailableError(f"no mounts of one's own: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


class SlowedDevice:
    """A block device with an ext4 file system on it, mounted at `root`. Not thread-safe.

    Fast until `set_speed`. On the way out everything is undone, from a hang too.

    Args:
        scratch: an empty directory on another file system; holds the mount points alone.
        size_bytes: of the device; only what is written takes memory.

    Raises:
        UnavailableError: this machine cannot do it; the message says what failed.
    """

    def __init__(self, scratch: Path, size_bytes: int) -> None:
        self.root = scratch / "mounted"
        self.root.mkdir()
        self._disk = scratch / "disk"
        self._disk.touch()
        with contextlib.ExitStack() as undo:
            self._server = subprocess.Popen(
                [sys.executable, str(_SERVER), str(self._disk), str(size_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.callback(self._end_server)
            answer = json.loads(self._read_line())
            if "error" in answer:
                raise UnavailableError(f"FUSE: {answer['error']}")
            undo.callback(_run, "umount", "--lazy", str(self._disk))
            self._mount_loop_device()
            undo.callback(_run, "umount", "--lazy", str(self.root))
            self._undo = undo.pop_all()

    def _mount_loop_device(self) -> None:
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(self._disk))
        try:
            # A scheduler would prefer reads, or merge: then the order of requests would not be the tier's.
            Path(f"/sys/block/{Path(device).name}/queue/scheduler").write_text("none")
            # Nothing is left to be written in the background later, when it would be measured.
            options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
            _run("mkfs.ext4", "-q", "-E", options, "-i", "65536", device)
            _run("mount", device, str(self.root))
        finally:
            # It stays as long as it is mounted, and no longer.
            _run("losetup", "--detach", device)

    def set_speed(self, speed: Speed | None) -> None:
        """Of the requests to come; `None` is as fast as can be."""
        speed = speed or _MAKING
        self._ask(f"speed {speed.bytes_per_s!r} {speed.per_request_s!r}")

    def hang(self) -> None:
        """From now on nothing is answered; whoever waits, waits uninterruptibly."""
        self._ask("hang")

    def resume(self) -> None:
        """What was asked before or during the hang is answered, at the device's pace."""
        self._ask("resume")

    def counters(self) -> Counters:
        """What the device did since it was made."""
        return self._ask("counters")

    def _ask(self, command: str) -> Counters:
        assert self._server.stdin is not None
        self._server.stdin.write(command + "\n")
        self._server.stdin.flush()
        return Counters(**json.loads(self._read_line()))

    def _read_line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise UnavailableError(f"the device's server ended with {self._server.wait()}")
        return line

    def _end_server(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=10)
        finally:
            self._server.kill()
            self._server.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.set_speed(None)
            self.resume()
        finally:
            self._undo.close()
