"""An HTTP/1.1 proxy on the loopback interface that forwards byte for byte, and breaks things when told to.

Requests reach the server as they came, the host header included, so signatures stay valid. A rule
says what goes wrong, for which requests and how often; `stall`, `refuse` and `close_idle` act on the
proxy as a whole.

    with FaultProxy("127.0.0.1", 9000) as proxy:
        proxy.inject(ResetResponse(1000), method="GET", times=1)
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from types import TracebackType

from fault_connection import Connection
from faults import Fault, FaultPlan, Rate, Rule, Seen
from http_link import Link
from rgw import free_port
from typing_extensions import Self

__all__ = ["FaultProxy"]

_HOST = "127.0.0.1"


class FaultProxy:
    """Forwards from a port of its own to one server, a thread per connection.

    Thread-safe, but for `refuse`, `accept`, `clear` and `stop`, which are one thread's at a time.

    Args:
        host, port: the server.
        tls: speak TLS to clients, by this context; plain to the server always.
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._server = (host, port)
        self._tls = tls
        self.port = free_port()
        self._plan = FaultPlan()
        self._lock = threading.Lock()
        self._open: dict[Connection, threading.Thread] = {}
        self._accepted = 0
        self._failed_handshakes = 0
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def endpoint_url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{_HOST}:{self.port}"

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- what came --

    @property
    def requests(self) -> list[Seen]:
        """The last ones, whatever became of them."""
        return self._plan.requests()

    @property
    def connections(self) -> int:
        """How many were accepted."""
        with self._lock:
            return self._accepted

    @property
    def failed_handshakes(self) -> int:
        """How many clients came with something other than TLS, or refused the certificate."""
        with self._lock:
            return self._failed_handshakes

    def count(self, method: str | None = None) -> int:
        """How many requests came, of this method or in all."""
        counts = self._plan.counts()
        return sum(counts.values()) if method is None else counts.get(method, 0)

    def counts(self) -> dict[str, int]:
        """How many requests came, by method."""
        return self._plan.counts()

    def reset_counts(self) -> None:
        """Count and remember from here on."""
        self._plan.reset_counts()

    # -- faults --

    def inject(
        self, fault: Fault, *, method: str | None = None, path_part: str | None = None, times: int | None = None
    ) -> Rule:
        """From now on, or for the next `times` requests; where rules overlap the oldest holds.

        Requests are told apart by method and by a part of path and query; `None` is any.
        """
        rule = Rule(fault, method, path_part, times)
        self._plan.add(rule)
        return rule

    def limit(self, rate: Rate | None) -> None:
        """Hold every request that no rule meets to a rate, each connection by itself."""
        self._plan.rate = rate

    def stall(self) -> None:
        """Read nothing and answer nothing on any connection, old or new, though new ones are accepted."""
        self._plan.flowing.clear()

    def release(self) -> None:
        """The end of a stall: what was held up goes on."""
        self._plan.flowing.set()

    def refuse(self) -> None:
        """Nobody listens from here on, and what is open is closed."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
            assert self._acceptor is not None
            self._acceptor.join()
            listener.close()
        for connection in self._going():
            connection.end()

    def accept(self) -> None:
        """The end of `refuse`, on the same port."""
        if self._listener is None:
            self._listener = socket.create_server((_HOST, self.port), backlog=128)
            self._acceptor = threading.Thread(
                target=self._accept_from, args=(self._listener,), name="fault-proxy", daemon=True
            )
            self._acceptor.start()

    def clear(self) -> None:
        """No faults: no rule, no rate, no stall, and connections are accepted."""
        self._plan.clear()
        self.accept()

    def close_idle(self) -> int:
        """Close in order every connection that waits for its next request; how many there were."""
        idle = [connection for connection in self._going() if connection.idle]
        for connection in idle:
            connection.end()
        return len(idle)

    def stop(self) -> None:
        """End all connections and threads; may be called twice."""
        self._plan.stop()
        self.refuse()
        for thread in self._going().values():
            thread.join()

    def _going(self) -> dict[Connection, threading.Thread]:
        with self._lock:
            return dict(self._open)

    def _accept_from(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self._plan, Link(accepted), self._dial)
            thread = threading.Thread(target=self._serve, args=(connection,), name="fault-proxy-client", daemon=True)
            with self._lock:
                self._accepted += 1
                self._open[connection] = thread
            thread.start()

    def _dial(self) -> Link:
        server = socket.create_connection(self._server)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(server)

    def _serve(self, connection: Connection) -> None:
        try:
            if self._greet(connection):
                connection.serve()
        finally:
            with self._lock:
                del self._open[connection]

    def _greet(self, connection: Connection) -> bool:
        """The TLS handshake, if any; whether the connection stands."""
        if self._tls is None:
            return True
        self._plan.hold()
        try:
            connection.client.wrap(self._tls)
        except OSError:
            with self._lock:
                self._failed_handshakes += 1
            connection.client.close(reset=False)
            return False
        return True
