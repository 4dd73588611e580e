"""A disk that is one file, served through the kernel's FUSE device at the pace of a slow device.

    python slowed_device_server.py FILE SIZE_BYTES

Run by `slowed_device_mount`, as root. FILE, an empty file, becomes
the mount point of a file system whose root is a single file of SIZE_BYTES: a loop device over it is
a disk as slow as this program makes it. The bytes live in this process's memory, so no other disk
has a part in the times. One thread, one loop: a request is answered when its time has come.

Commands come as lines on the standard input and each is answered by one line of JSON on the
standard output:

    speed BYTES_PER_S PER_REQUEST_S     of the requests to come
    hang                                answer nothing and read nothing, as a dead device does
    resume                              go on where it was
    counters                            what was done since the start, as `Counters`

Ends with its standard input, or with the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import select
import signal
import stat
import struct
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final

from slowed_device_pace import SharedPace, Speed

# From linux/fuse.h; the protocol's versions only ever add to these.
_GETATTR: Final = 3
_OPEN: Final = 14
_READ: Final = 15
_WRITE: Final = 16
_RELEASE: Final = 18
_FSYNC: Final = 20
_FLUSH: Final = 25
_INIT: Final = 26
_NEVER_ANSWERED: Final = frozenset({2, 36, 42})
"""FORGET, INTERRUPT (what it would interrupt is answered in its time all the same), BATCH_FORGET."""

_IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
_OUT_HEADER: Final = struct.Struct("<IiQ")
_INIT_IN: Final = struct.Struct("<IIII")
_INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH22x")
_ATTR_OUT: Final = struct.Struct("<QII QQQQQQIIIIIIIIII")
_OPEN_OUT: Final = struct.Struct("<QIi")
_IO_IN: Final = struct.Struct("<QQIIQII")
_WRITE_OUT: Final = struct.Struct("<II")

_MINOR: Final = 31
"""The youngest version of the protocol that says all that is needed here."""
_ASYNC_READ, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 15, 1 << 22
_DIRECT_IO, _PARALLEL_DIRECT_WRITES = 1 << 0, 1 << 6
_PAGES: Final = 256
"""Per request: the most that the kernel gives without a change of its settings."""
_MAX_WRITE_BYTES: Final = _PAGES * 4096
_MAX_IN_FLIGHT: Final = 1024
"""Direct requests that the kernel may have outstanding. Its own 12 would be a second, hidden queue."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29


@dataclass
class Counters:
    """Since the start; a request counts when it ends.

    Attributes:
        reads, writes, others: requests; a sync counts as another.
        read_bytes, written_bytes: what they moved.
        read_device_s, write_device_s, other_device_s: device time that they took.
        busy_s: seconds with anything in flight and no hang.
        late_s: by which requests were answered later than they should, added up: this machine's fault.
        in_flight: now.
    """

    reads: int = 0
    writes: int = 0
    others: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_device_s: float = 0.0
    write_device_s: float = 0.0
    other_device_s: float = 0.0
    busy_s: float = 0.0
    late_s: float = 0.0
    in_flight: int = 0

    def since(self, earlier: Counters) -> Counters:
        """What has come on top of an earlier reading; `in_flight` as it is now."""
        before = asdict(earlier)
        added = {name: value - before[name] for name, value in asdict(self).items()}
        return Counters(**{**added, "in_flight": self.in_flight})


@dataclass(frozen=True)
class Request:
    opcode: int
    unique: int
    offset: int
    num_bytes: int
    device_s: float


class Disk:
    """The file system of one file, until its connection is closed."""

    def __init__(self, fuse_fd: int, size_bytes: int) -> None:
        self._fd = fuse_fd
        self._size_bytes = size_bytes
        # Pages that were never written take no memory.
        self._bytes = memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._message = bytearray(_MAX_WRITE_BYTES + 4096)
        self._pace: SharedPace[Request] = SharedPace(Speed(1e12, 0.0), time.monotonic())
        self._hangs = False
        self._counters = Counters()
        self._commands = b""

    def serve(self) -> None:
        """Until the standard input ends or the file system is unmounted."""
        while True:
            for end_s, request in self._pace.take_ended(time.monotonic()):
                self._finish(request)
                self._counters.late_s += time.monotonic() - end_s
            next_s = self._pace.next_end_s()
            watched = [0] if self._hangs else [0, self._fd]
            patience_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            readable, _, _ = select.select(watched, [], [], patience_s)
            if 0 in readable and not self._obey():
                return
            if self._fd in readable and not self._hangs and not self._take():
                return

    # ---- requests ----------------------------------------------------------------------------

    def _take(self) -> bool:
        """Read one request; False once there is no file system any more."""
        try:
            count = os.readv(self._fd, [self._message])
        except OSError as error:
            if error.errno == errno.ENODEV:
                return False
            if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                return True
            raise
        _, opcode, unique, *_ = _IN_HEADER.unpack_from(self._message)
        body = memoryview(self._message)[_IN_HEADER.size : count]
        if opcode == _INIT:
            self._init(unique, body)
        elif opcode == _GETATTR:
            self._answer(unique, self._attributes())
        elif opcode == _OPEN:
            # Direct, or the page cache would answer; parallel, or one write would hold up the others.
            self._answer(unique, _OPEN_OUT.pack(0, _DIRECT_IO | _PARALLEL_DIRECT_WRITES, 0))
        elif opcode in (_READ, _WRITE):
            self._take_transfer(opcode, unique, body)
        elif opcode == _FSYNC:
            self._start(opcode, unique, 0, 0)
        elif opcode in (_FLUSH, _RELEASE):
            self._answer(unique)
        elif opcode not in _NEVER_ANSWERED:
            self._refuse(unique, errno.ENOSYS)
        return True

    def _init(self, unique: int, body: memoryview) -> None:
        major, minor, max_readahead, offered = _INIT_IN.unpack_from(body)
        flags = offered & (_ASYNC_READ | _ASYNC_DIO | _MAX_PAGES)
        self._answer(
            unique,
            _INIT_OUT.pack(
                major,
                min(minor, _MINOR),
                max_readahead,
                flags,
                _MAX_IN_FLIGHT,
                _MAX_IN_FLIGHT,
                _MAX_WRITE_BYTES,
                1,
                _PAGES,
                0,
                0,
                0,
                0,
            ),
        )

    def _attributes(self) -> bytes:
        mode = stat.S_IFREG | 0o600
        blocks = self._size_bytes // 512
        # Valid for a day: nothing changes them.
        return _ATTR_OUT.pack(86400, 0, 0, 1, self._size_bytes, blocks, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _take_transfer(self, opcode: int, unique: int, body: memoryview) -> None:
        _, offset, num_bytes, *_ = _IO_IN.unpack_from(body)
        if offset + num_bytes > self._size_bytes:
            self._refuse(unique, errno.EINVAL)
            return
        if opcode == _WRITE:
            self._bytes[offset : offset + num_bytes] = body[_IO_IN.size : _IO_IN.size + num_bytes]
        self._start(opcode, unique, offset, num_bytes)

    def _start(self, opcode: int, unique: int, offset: int, num_bytes: int) -> None:
        device_s = self._pace.speed.device_s(num_bytes)
        self._pace.arrive(time.monotonic(), Request(opcode, unique, offset, num_bytes, device_s), num_bytes)

    def _finish(self, request: Request) -> None:
        counters = self._counters
        if request.opcode == _READ:
            counters.reads += 1
            counters.read_bytes += request.num_bytes
            counters.read_device_s += request.device_s
            self._answer(request.unique, self._bytes[request.offset : request.offset + request.num_bytes])
        elif request.opcode == _WRITE:
            counters.writes += 1
            counters.written_bytes += request.num_bytes
            counters.write_device_s += request.device_s
            self._answer(request.unique, _WRITE_OUT.pack(request.num_bytes, 0))
        else:
            counters.others += 1
            counters.other_device_s += request.device_s
            self._answer(request.unique)

    def _answer(self, unique: int, body: bytes | memoryview = b"") -> None:
        self._send(_OUT_HEADER.pack(_OUT_HEADER.size + len(body), 0, unique), body)

    def _refuse(self, unique: int, error: int) -> None:
        self._send(_OUT_HEADER.pack(_OUT_HEADER.size, -error, unique), b"")

    def _send(self, header: bytes, body: bytes | memoryview) -> None:
        # Whoever asked may have been killed and gone.
        with contextlib.suppress(FileNotFoundError):
            os.writev(self._fd, [header, body])

    # ---- commands ----------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Do what the standard input says; False at its end."""
        received = os.read(0, 4096)
        *lines, self._commands = (self._commands + received).split(b"\n")
        for line in lines:
            word, *arguments = line.decode().split()
            now_s = time.monotonic()
            if word == "speed":
                self._pace.speed = Speed(*map(float, arguments))
            elif word == "hang":
                self._hangs = True
                self._pace.freeze(now_s)
            elif word == "resume":
                self._hangs = False
                self._pace.thaw(now_s)
            elif word != "counters":
                raise ValueError(f"unknown command {word!r}")
            self._counters.busy_s = self._pace.busy_s
            self._counters.in_flight = self._pace.in_flight
            print(json.dumps(asdict(self._counters)), flush=True)
        return bool(received)


def mount(file: str) -> int:
    """Mount over `file`; the descriptor through which the kernel asks.

    Raises:
        OSError: there is no FUSE here, or no right to mount.
    """
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode={stat.S_IFREG | 0o600:o},user_id=0,group_id=0"
    if libc.mount(b"slowed-device", os.fsencode(file), b"fuse", 0, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounting over {file}: {os.strerror(number)}")
    return fd


def main() -> int:
    file, size_bytes = sys.argv[1], int(sys.argv[2])
    libc = ctypes.CDLL(None)
    # Whoever waits for this disk when its starter is killed must get an error: it could not end otherwise.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_TIMERSLACK, 1000)
    # A device does not wait for a core. Where this is refused, `late_s` shows what it costs.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    # An interrupt from the terminal is the starter's to handle: it unmounts first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        disk = Disk(mount(file), size_bytes)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({}), flush=True)
    disk.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
