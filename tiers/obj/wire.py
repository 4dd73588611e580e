"""HTTP connections on which no wait is longer than an operation has left.

Bodies go from the caller's memory to the socket and back without a copy: `http.client` sends a
memoryview as it is, and reads straight into one.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Final

from typing_extensions import Buffer

from kvsluice.tiers.obj.failures import DEADLINE, SHORT_BODY, ObjectFailure, RequestFailedError

__all__ = ["Connection", "Response", "TimedSocket", "overdue"]

_SEND_WINDOW_BYTES: Final = 256 << 10
"""What is sent under one timeout at most: TLS comes back only when all that it is given has gone out."""
_WORDS_BYTES: Final = 16 << 10
"""What is read of an answer in words: a failure's code stands at the start, an upload's id too."""
_FINISH_S: Final = 0.05
_EARLY_ANSWER_S: Final = 1.0
"""How long an answer is waited for after the server has stopped reading the body."""


def overdue() -> RequestFailedError:
    """The operation's time is over."""
    return RequestFailedError(ObjectFailure(None, "", DEADLINE))


class _Reader(io.RawIOBase):
    """The reading side, for `http.client`'s buffered reader."""

    def __init__(self, timed: TimedSocket) -> None:
        super().__init__()
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._timed.recv_into(buffer)


class TimedSocket:
    """What `http.client` sees as its socket. Each wait ends at `read_s` of silence, or at the operation's deadline."""

    def __init__(self, sock: socket.socket, read_s: float, clock: Callable[[], float]) -> None:
        self.sock = sock
        self.read_s = read_s
        self.end_s = 0.0
        self._clock = clock

    def recv_into(self, buffer: Buffer) -> int:
        wait_s = self._arm()
        try:
            return self.sock.recv_into(buffer)
        except TimeoutError as error:
            if wait_s == self.read_s:
                raise
            raise overdue() from error

    def sendall(self, data: Buffer) -> None:
        # Not the socket's own, which takes one timeout for all of it: what counts is whether bytes go out.
        view = memoryview(data)
        position = 0
        while position < view.nbytes:
            wait_s = self._arm()
            try:
                position += self.sock.send(view[position : position + _SEND_WINDOW_BYTES])
            except TimeoutError as error:
                if wait_s == self.read_s:
                    raise
                raise overdue() from error

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

    def _arm(self) -> float:
        left_s = self.end_s - self._clock()
        if left_s <= 0:
            raise overdue()
        wait_s = min(left_s, self.read_s)
        self.sock.settimeout(wait_s)
        return wait_s


class Response:
    """An answer whose body has not been read. Used by one thread, within the `Connection` that gave it."""

    def __init__(self, raw: http.client.HTTPResponse, timed: TimedSocket, *, is_last: bool = False) -> None:
        self._raw = raw
        self._timed = timed
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

    @property
    def is_delimited(self) -> bool:
        """Whether a body that is cut off can be told from one that has ended."""
        return self._raw.length is not None or self._raw.chunked

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

    def read_all(self, most_bytes: int) -> bytes:
        """The whole body.

        Raises:
            http.client.HTTPException: it is longer than `most_bytes`, or breaks off.
        """
        body = self._read(most_bytes + 1)
        if len(body) > most_bytes:
            raise http.client.HTTPException(f"a body of more than {most_bytes} bytes")
        if self._raw.length:
            raise http.client.IncompleteRead(body, self._raw.length)
        return body

    def read_words(self) -> bytes:
        """A body of a few words, or the start of a longer one."""
        return self._read(_WORDS_BYTES)

    def finish(self) -> bool:
        """Whether nothing of the body is left, so that the connection can serve again. Hardly waits, raises nothing."""
        raw = self._raw
        if self._is_last:
            return False
        if not raw.isclosed() and not raw.length:
            # No body, or one in pieces, whose end is a piece too. All that was asked for is there: no wait for that.
            self._timed.read_s = _FINISH_S
            try:
                self._read(1)
            except (OSError, http.client.HTTPException, RequestFailedError):
                return False
        return raw.isclosed()

    def _read(self, most_bytes: int) -> bytes:
        try:
            return self._raw.read(most_bytes)
        except ValueError as error:
            raise http.client.HTTPException("a piece of the body has a negative length") from error


class Connection:
    """One HTTP/1.1 connection, used by one thread at a time; `abort` may come from any."""

    def __init__(self, timed: TimedSocket, host: str, port: int, read_s: float) -> None:
        self._timed = timed
        self._read_s = read_s
        self._http = http.client.HTTPConnection(host, port)
        # It would come back without TLS, and without our timeouts.
        self._http.auto_open = 0
        # Of a socket it uses `sendall`, `makefile` and `close` alone.
        self._http.sock = timed
        self._poll = select.poll()
        self._poll.register(timed.sock, select.POLLIN)
        self.idle_since_s = 0.0
        self.served = 0

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview | None,
        end_s: float,
    ) -> Response:
        """Send one request, wait for the head of its answer. After an error the connection is to be closed.

        Args:
            end_s: when to give up, on the clock of the pool; holds for reading the body too.
        """
        self._timed.end_s = end_s
        self._timed.read_s = self._read_s
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
                response = Response(self._http.getresponse(), self._timed, is_last=True)
                if response.status >= 400:
                    return response
            raise
        response = Response(self._http.getresponse(), self._timed)
        if response.status < 200:
            # 100 is passed over by `http.client`. After any other the real answer is still to come, and would be taken
            # for the next request's.
            raise http.client.HTTPException(f"status {response.status}, which is no answer")
        self.served += 1
        return response

    def is_dropped(self) -> bool:
        """Whether the server has ended it, or sent what nobody asked for, while it was idle."""
        sock = self._timed.sock
        # TLS may hold such bytes already, where a look at the socket does not see them.
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
            return True
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """End whatever wait is going on in it; its thread sees an error."""
        self._timed.abort()

    def close(self) -> None:
        self._http.close()
        self._timed.sock.close()
