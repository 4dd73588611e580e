"""Connections to one target: how they come up, and the pool that keeps them."""

from __future__ import annotations

import http.client
import itertools
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult

from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError, failure_of_error
from kvsluice.tiers.obj.wire import Connection, TimedSocket, overdue

__all__ = ["HttpPool", "Target", "Timeouts"]

_MAX_IDLE_S: Final = 20.0
"""AWS closes idle connections after about that; firewalls that drop them in silence wait minutes."""


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
        self._opening: set[TimedSocket] = set()
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

    def _connect(self, host: str, port: int, end_s: float) -> TimedSocket:
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
            timed = TimedSocket(sock, self._timeouts.connect_s, self._clock)
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

    def _opens(self, timed: TimedSocket, sock: socket.socket) -> None:
        """`timed` waits on `sock` from now on, until `close` or `_opened`."""
        timed.sock = sock
        with self._lock:
            if self._closed:
                raise RequestFailedError(ObjectFailure(None, "", "closed"))
            self._opening.add(timed)

    def _opened(self, timed: TimedSocket) -> None:
        with self._lock:
            self._opening.discard(timed)

    def _left_s(self, end_s: float) -> float:
        left_s = end_s - self._clock()
        if left_s <= 0:
            raise overdue()
        return min(left_s, self._timeouts.connect_s)

    def _tunnel(self, timed: TimedSocket) -> None:
        target = self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [f"CONNECT {host}:{target.port} HTTP/1.1", f"Host: {host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in target.proxy_headers.items()]
        timed.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii"))
        answer = http.client.HTTPResponse(timed, method="CONNECT")  # type: ignore[arg-type] # as in Connection
        answer.begin()
        if answer.status != 200:
            raise ConnectionRefusedError(f"the proxy answered {answer.status}")
