"""HTTP connections on which no wait is longer than an operation has left, and a pool of them.

Bodies go from the caller's memory to the socket and back without a copy: `http.client` sends a
memoryview as it is, and reads straight into one.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult

from typing_extensions import Buffer

from kvsluice.tiers.obj.failures import DEADLINE, SHORT_BODY, ObjectFailure, RequestFailedError, failure_of_error

__all__ = ["Connection", "HttpPool", "Response", "Target", "Timeouts"]

_SEND_WINDOW_BYTES: Final = 1 << 20
"""What is sent under one timeout at most: TLS comes back only when all that it is given has gone out."""
_ERROR_BODY_BYTES: Final = 16 << 10
"""What is read of an answer that tells of a failure: its code stands at the start."""
_MAX_IDLE_S: Final = 20.0
"""AWS closes idle connections after about that; firewalls that drop them in silence wait minutes."""
_EARLY_ANSWER_S: Final = 1.0
"""How long an answer is waited for after the server has stopped reading the body."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: for a connection to come up, and without a byte on one that is."""

    connect_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Target:
    """Where connections go.

    Attributes:
        host, port: of the store.
        tls: the context to wrap connections in; None for plain http.
        proxy: an http proxy to go through; None for the straight way. Its URL may hold a password: never to be shown.
        proxy_headers: what it wants to see, such as credentials: as little.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    proxy: SplitResult | None = field(default=None, repr=False)
    proxy_headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class _Reader(io.RawIOBase):
    """The reading side, for `http.client`'s buffered reader."""

    def __init__(self, timed: _TimedSocket) -> None:
        super().__init__()
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._timed.recv_into(buffer)


class _TimedSocket:
    """What `http.client` sees as its socket. Each wait ends at `read_s` of silence, or at the operation's deadline."""

    def __init__(self, sock: socket.socket, read_s: float, clock: Callable[[], float]) -> None:
        self.sock = sock
        self.read_s = read_s
        self.end_s = 0.0
        self._clock = clock

    def recv_into(self, buffer: Buffer) -> int:
        with self._waiting():
            return self.sock.recv_into(buffer)

    def sendall(self, data: Buffer) -> None:
        # Not the socket's own, which takes one timeout for all of it: what counts is whether bytes go out.
        view = memoryview(data)
        position = 0
        while position < view.nbytes:
            with self._waiting():
                position += self.sock.send(view[position : position + _SEND_WINDOW_BYTES])

    def makefile(self, mode: str, bufsize: int | None = None) -> io.BufferedReader:
        del mode, bufsize  # `http.client` asks for a reader alone.
        return io.BufferedReader(_Reader(self))

    def abort(self) -> None:
        """End whatever wait is going on in it, from any thread."""
        with contextlib.suppress(OSError):
            # Not the socket's own `shutdown`: an SSLSocket forgets its TLS there, and the thread that is in the middle
            # of a body would go on with what lies on the wire, as if it were the body.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing: `http.client` closes after the head of a last answer, whose body is still to be read."""

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        left_s = self.end_s - self._clock()
        if left_s <= 0:
            raise RequestFailedError(ObjectFailure(None, "", DEADLINE))
        self.sock.settimeout(min(left_s, self.read_s))
        try:
            yield
        except TimeoutError as error:
            if left_s <= self.read_s:
                raise RequestFailedError(ObjectFailure(None, "", DEADLINE)) from error
            raise


class Response:
    """An answer whose body has not been read. Used by one thread, within the `Connection` that gave it."""

    def __init__(self, raw: http.client.HTTPResponse, *, is_last: bool = False) -> None:
        self._raw = raw
        self._is_last = is_last or raw.will_close
        self.status = raw.status

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name."""
        return {name.lower(): value for name, value in self._raw.getheaders()}

    @property
    def length(self) -> int | None:
        """The body's declared length; None where the end itself is the only sign."""
        return self._raw.length

    def read_exactly(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the body.

        Raises:
            RequestFailedError: the body ended before.
        """
        position = 0
        while position < view.nbytes:
            count = self._raw.readinto(view[position:])
            if not count:
                words = f"the body ended after {position} of {view.nbytes} bytes"
                raise RequestFailedError(ObjectFailure(None, words, SHORT_BODY))
            position += count

    def read_up_to(self, view: memoryview) -> int:
        """Read into `view` until it is full or the body ends; the bytes that came."""
        position = 0
        while position < view.nbytes and (count := self._raw.readinto(view[position:])):
            position += count
        return position

    def read_words(self) -> bytes:
        """The start of a body that tells of a failure."""
        return self._read(_ERROR_BODY_BYTES)

    def finish(self) -> bool:
        """Whether nothing of the body is left, so that the connection can serve again."""
        raw = self._raw
        if self._is_last:
            return False
        if not raw.isclosed() and not raw.length:
            # No body, or one in pieces, whose end is a piece too.
            self._read(1)
        return raw.isclosed()

    def _read(self, most_bytes: int) -> bytes:
        try:
            return self._raw.read(most_bytes)
        except ValueError as error:
            raise http.client.HTTPException("a piece of the body has a negative length") from error


class Connection:
    """One HTTP/1.1 connection, used by one thread at a time; `abort` may come from any."""

    def __init__(self, timed: _TimedSocket, host: str, port: int, read_s: float) -> None:
        self._timed = timed
        self._read_s = read_s
        self._http = http.client.HTTPConnection(host, port)
        # It would come back without TLS, and without our timeouts.
        self._http.auto_open = 0
        # Of a socket it uses `sendall`, `makefile` and `close` alone.
        self._http.sock = timed
        self.idle_since_s = 0.0
        self.served = 0

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview | None,
        end_s: float,
        read_s: float | None = None,
    ) -> Response:
        """Send one request, wait for the head of its answer. After an error the connection is to be closed.

        Args:
            end_s: when to give up, on the clock of the pool; holds for reading the body too.
            read_s: silence to bear, where that is not the pool's.
        """
        self._timed.end_s = end_s
        self._timed.read_s = self._read_s if read_s is None else read_s
        self._http.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self._http.putheader(name, value)
        try:
            self._http.endheaders(body)
        except OSError:
            # A server that refuses a large body answers and reads no further, or resets the connection: the answer
            # tells more than the error does. (TLS has errors of its own for a reset.)
            self._timed.read_s = min(self._timed.read_s, _EARLY_ANSWER_S)
            with contextlib.suppress(OSError, http.client.HTTPException):
                response = Response(self._http.getresponse(), is_last=True)
                if response.status >= 400:
                    return response
            raise
        response = Response(self._http.getresponse())
        self.served += 1
        return response

    def is_dropped(self) -> bool:
        """Whether the server has ended it, or sent what nobody asked for, while it was idle."""
        poll = select.poll()
        poll.register(self._timed.sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        """End whatever wait is going on in it; its thread sees an error."""
        self._timed.abort()

    def close(self) -> None:
        self._http.close()
        self._timed.sock.close()


class HttpPool:
    """Connections to one target, the one used last first. Thread-safe.

    As many are open as operations run at once; at most `max_idle` are kept.
    """

    def __init__(
        self, target: Target, timeouts: Timeouts, max_idle: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._timeouts = timeouts
        self._max_idle = max_idle
        self._clock = clock
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._opening: set[_TimedSocket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._turn = itertools.count()

    def take(self, end_s: float, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one; `fresh` insists on the latter.

        Raises:
            RequestFailedError: none came up.
        """
        while not fresh:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if self._clock() - connection.idle_since_s < _MAX_IDLE_S and not connection.is_dropped():
                return self._lend(connection)
            connection.close()
        try:
            return self._lend(self._open(end_s))
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(failure_of_error(error, connecting=True)) from error

    def give(self, connection: Connection) -> None:
        """Take back one whose last answer was read to its end."""
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < self._max_idle:
                connection.idle_since_s = self._clock()
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Take back one that cannot serve again."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    @property
    def busy(self) -> int:
        """Connections that operations are on."""
        return len(self._busy)

    def close(self) -> None:
        """End all connections; operations that wait on one fail at once. Idempotent."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
            for connection in self._busy:
                connection.abort()
            for timed in self._opening:
                timed.abort()
        for connection in idle:
            connection.close()

    def _lend(self, connection: Connection) -> Connection:
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise RequestFailedError(ObjectFailure(None, "", "closed"))

    def _open(self, end_s: float) -> Connection:
        target = self._target
        proxy = target.proxy
        host = target.host if proxy is None else proxy.hostname or ""
        port = target.port if proxy is None else proxy.port or 80
        timed = self._connect(host, port, end_s)
        try:
            if target.tls is not None:
                if proxy is not None:
                    self._tunnel(timed)
                sock = target.tls.wrap_socket(timed.sock, server_hostname=target.host, do_handshake_on_connect=False)
                self._opens(timed, sock)
                sock.settimeout(self._left_s(end_s))
                sock.do_handshake()
            return Connection(timed, target.host, target.port, self._timeouts.read_s)
        except BaseException:
            timed.sock.close()
            raise
        finally:
            self._opened(timed)

    def _connect(self, host: str, port: int, end_s: float) -> _TimedSocket:
        """A socket that is up, and that `close` knows of."""
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, "that is no host name") from error
        # A name with several addresses stands for several servers: each new connection starts at the next.
        first = next(self._turn) % len(addresses)
        last: OSError | None = None
        for family, kind, protocol, _, address in addresses[first:] + addresses[:first]:
            sock = socket.socket(family, kind, protocol)
            timed = _TimedSocket(sock, self._timeouts.connect_s, self._clock)
            timed.end_s = end_s
            try:
                self._opens(timed, sock)
                sock.settimeout(self._left_s(end_s))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            except OSError as error:
                self._opened(timed)
                sock.close()
                last = error
            except BaseException:
                self._opened(timed)
                sock.close()
                raise
            else:
                return timed
        raise last or OSError(f"{host} has no address")

    def _opens(self, timed: _TimedSocket, sock: socket.socket) -> None:
        """`timed` waits on `sock` from now on, until `close` or `_opened`."""
        timed.sock = sock
        with self._lock:
            if self._closed:
                raise RequestFailedError(ObjectFailure(None, "", "closed"))
            self._opening.add(timed)

    def _opened(self, timed: _TimedSocket) -> None:
        with self._lock:
            self._opening.discard(timed)

    def _left_s(self, end_s: float) -> float:
        left_s = end_s - self._clock()
        if left_s <= 0:
            raise RequestFailedError(ObjectFailure(None, "", DEADLINE))
        return min(left_s, self._timeouts.connect_s)

    def _tunnel(self, timed: _TimedSocket) -> None:
        target = self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [f"CONNECT {host}:{target.port} HTTP/1.1", f"Host: {host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in target.proxy_headers.items()]
        timed.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii"))
        answer = http.client.HTTPResponse(timed, method="CONNECT")  # type: ignore[arg-type] # as in Connection
        answer.begin()
        if answer.status != 200:
            raise ConnectionRefusedError(f"the proxy answered {answer.status}")
