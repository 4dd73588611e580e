"""HTTP/1.1 over sockets, as far as a proxy has to know it: where a message ends."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PIECE_BYTES", "ClosedError", "Head", "Link", "pass_body"]

PIECE_BYTES = 256 << 10
_HEAD_BYTES = 64 << 10


class ClosedError(Exception):
    """The other side ended the connection."""


class Link:
    """One connection, and what was read from it too far. One thread's, but for `wake`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._start = self._end = 0

    def wrap(self, context: ssl.SSLContext) -> None:
        """Go on in TLS, as its server.

        Raises:
            OSError: the handshake failed.
        """
        wrapped = context.wrap_socket(self._connection, server_side=True, do_handshake_on_connect=False)
        # First, so that `wake` reaches a client that says nothing.
        self._connection = wrapped
        wrapped.do_handshake()

    def wait(self) -> None:
        """Until something can be read, the connection's end included."""
        if not self._has_some():
            self._poll(None)

    def ready(self) -> bool:
        """Whether something can be read, the connection's end included."""
        return self._has_some() or self._poll(0)

    def _has_some(self) -> bool:
        tls = self._connection if isinstance(self._connection, ssl.SSLSocket) else None
        return self._end > self._start or (tls is not None and tls.pending() > 0)

    def _poll(self, timeout_ms: int | None) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def take(self, limit: int) -> memoryview:
        """The next bytes, one at least; they are valid until the next call.

        Raises:
            ClosedError: there are no more.
        """
        if self._start == self._end:
            self._start, self._end = 0, self._connection.recv_into(self._buffer)
            if not self._end:
                raise ClosedError
        piece = self._buffer[self._start : min(self._end, self._start + limit)]
        self._start += len(piece)
        return piece

    def until(self, mark: bytes) -> bytes:
        """All up to and with `mark`.

        Raises:
            ClosedError: the connection ended first.
            ValueError: it is too far away.
        """
        found = b""
        while mark not in found:
            if len(found) > _HEAD_BYTES:
                raise ValueError(f"no {mark!r} in {len(found)} bytes")
            found += self.take(PIECE_BYTES)
        surplus = len(found) - found.index(mark) - len(mark)
        self._start -= surplus
        return found[: len(found) - surplus]

    def send(self, piece: bytes | memoryview) -> None:
        self._connection.sendall(piece)

    def close(self, *, reset: bool) -> None:
        """In order, or so that the other side gets a reset instead of an end."""
        if reset:
            with contextlib.suppress(OSError):
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()

    def wake(self) -> None:
        """End whatever another thread does on it."""
        with contextlib.suppress(OSError):
            # Not the TLS socket's own, which would take its state from under the other thread.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


@dataclass(frozen=True)
class Head:
    """A message's first line and headers."""

    raw: bytes
    first: str
    headers: dict[str, str]
    """Names in lower case."""

    @classmethod
    def read(cls, link: Link) -> Head:
        """The next message's.

        Raises:
            ClosedError: there is none, or not all of it.
        """
        raw = link.until(b"\r\n\r\n")
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return cls(raw, first, headers)

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int:
        """Of the body, by the header; right only where it is not chunked."""
        return int(self.headers.get("content-length", "0"))

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.first.split()[1])

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this message."""
        return "close" in self.headers.get("connection", "").lower()

    def with_length(self, length: int) -> bytes:
        """As it came, but for the length that it declares."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(
            b"Content-Length: %d" % length if line.lower().startswith(b"content-length:") else line for line in lines
        )


def pass_body(source: Link, head: Head, sink: Callable[[memoryview], None], step_bytes: int) -> None:
    """Hand a message's body, framing included, to `sink`, in pieces of at most `step_bytes`.

    Raises:
        ClosedError: it ended before its end.
    """
    if not head.chunked:
        _pass_bytes(source, head.length, sink, step_bytes)
        return
    size = -1
    while size:
        line = source.until(b"\r\n")
        sink(memoryview(line))
        size = int(line.split(b";")[0], 16)
        if size:
            _pass_bytes(source, size + 2, sink, step_bytes)
    trailer = b""
    while trailer != b"\r\n":
        trailer = source.until(b"\r\n")
        sink(memoryview(trailer))


def _pass_bytes(source: Link, count: int, sink: Callable[[memoryview], None], step_bytes: int) -> None:
    while count:
        piece = source.take(min(count, step_bytes))
        sink(piece)
        count -= len(piece)
