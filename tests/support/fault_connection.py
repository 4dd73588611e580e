"""One client's connection through a `FaultProxy`: requests one after the other, and what goes wrong with them."""

from __future__ import annotations

import time
from collections.abc import Callable

from faults import (
    Answer,
    DeclareLess,
    Fault,
    FaultPlan,
    FlipByte,
    HangUp,
    LoseAnswer,
    Rate,
    ResetRequest,
    ResetResponse,
    Rule,
    Seen,
    ShortBody,
    StallBody,
)
from http_link import PIECE_BYTES, ClosedError, Head, Link, pass_body

__all__ = ["Connection"]


class _BreakOffError(Exception):
    """A fault ends this connection."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class Connection:
    """One client's connection, and the one to the server that goes with it."""

    def __init__(self, plan: FaultPlan, client: Link, dial: Callable[[], Link]) -> None:
        self._plan = plan
        self.client = client
        self._dial = dial
        self._server: Link | None = None
        self.idle = True
        """Whether it waits for a request."""

    def end(self) -> None:
        """From another thread."""
        self.client.wake()
        if (server := self._server) is not None:
            server.wake()

    def serve(self) -> None:
        reset = False
        try:
            while self._exchange():
                pass
        except _BreakOffError as fault:
            reset = fault.reset
        except (OSError, ClosedError, ValueError):
            # Whichever side went, the other sees its connection break.
            reset = True
        finally:
            for link in (self.client, self._server):
                if link is not None:
                    link.close(reset=reset)

    def _exchange(self) -> bool:
        """One request and its answer; whether there can be another."""
        self.idle = True
        self.client.wait()
        self._plan.hold()
        try:
            head = Head.read(self.client)
        except ClosedError:
            return False
        self.idle = False
        method, path, _ = head.first.split(" ", 2)
        rule = self._plan.meet(Seen(method, path, head.headers))
        fault = rule.fault
        if isinstance(fault, Answer | HangUp):
            return self._answer(fault, method, head)
        server = self._to_server()
        pace = _Pace(self._plan, fault if isinstance(fault, Rate) else None)
        server.send(head.raw)
        answer = self._send_body(server, head, fault, pace) or Head.read(server)
        if isinstance(fault, LoseAnswer):
            raise _BreakOffError(reset=True)
        self._return(server, method, answer, rule, pace)
        return not (head.closes or answer.closes)

    def _to_server(self) -> Link:
        # One that the server has closed meanwhile is readable.
        if self._server is not None and self._server.ready():
            self._server.close(reset=False)
            self._server = None
        if self._server is None:
            self._server = self._dial()
        return self._server

    def _answer(self, fault: Answer | HangUp, method: str, head: Head) -> bool:
        """In the server's place."""
        asks_first = "expect" in head.headers
        if not asks_first:
            pass_body(self.client, head, lambda piece: None, PIECE_BYTES)
        if isinstance(fault, HangUp):
            return False
        lines = [f"HTTP/1.1 {fault.status} Injected", f"Content-Length: {len(fault.body)}"]
        lines += [f"{name}: {value}" for name, value in fault.headers.items()]
        if asks_first:
            # Whether the body comes all the same is up to the client.
            lines.append("Connection: close")
        raw = "\r\n".join([*lines, "", ""]).encode()
        self.client.send(raw + (b"" if method == "HEAD" else fault.body))
        return not asks_first

    def _send_body(self, server: Link, head: Head, fault: Fault, pace: _Pace) -> Head | None:
        """The request's body; the answer's head, where the answer came before its end."""
        limit = fault.after_bytes if isinstance(fault, ResetRequest) else None
        if limit == 0:
            raise _BreakOffError(reset=True)
        if "expect" in head.headers:
            answer = Head.read(server)
            if answer.status != 100:
                return answer
            self.client.send(answer.raw)
        sent = 0

        def sink(piece: memoryview) -> None:
            nonlocal sent
            pace.wait(len(piece))
            if limit is not None and sent + len(piece) >= limit:
                server.send(piece[: limit - sent])
                raise _BreakOffError(reset=True)
            server.send(piece)
            sent += len(piece)

        try:
            pass_body(self.client, head, sink, pace.step_bytes)
        except (BrokenPipeError, ConnectionResetError):
            # A server may answer and hang up before it has all of the body; then its answer counts.
            return Head.read(server)
        return None

    def _return(self, server: Link, method: str, answer: Head, rule: Rule, pace: _Pace) -> None:
        has_body = method != "HEAD" and answer.status not in (204, 304)
        total = answer.length if has_body and not answer.chunked else 0
        body = _FaultyBody(rule, self.client, total)
        self.client.send(answer.raw if body.declared == total else answer.with_length(body.declared))
        body.begin()

        def sink(piece: memoryview) -> None:
            pace.wait(len(piece))
            body.send(piece)

        if has_body:
            pass_body(server, answer, sink, pace.step_bytes)


class _Pace:
    """Holds one exchange to a rate and to the stalls of the proxy."""

    def __init__(self, plan: FaultPlan, rate: Rate | None) -> None:
        self._plan = plan
        self._rate = rate
        # A fiftieth of a second's worth.
        self.step_bytes = PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, int(rate.bytes_per_s / 50)))
        if rate is not None:
            plan.sleep(rate.delay_s)
        self._due_s = time.monotonic()

    def wait(self, count: int) -> None:
        """Until so many bytes more may pass."""
        self._plan.hold()
        if self._rate is not None:
            now_s = time.monotonic()
            # What was not used is lost, or a pause would be followed by a burst.
            self._due_s = max(self._due_s, now_s) + count / self._rate.bytes_per_s
            self._plan.sleep(self._due_s - now_s)


class _FaultyBody:
    """What a rule does to the body of a response on its way to the client."""

    def __init__(self, rule: Rule, client: Link, total: int) -> None:
        self._rule = rule
        self._client = client
        self._sent = 0
        fault = rule.fault
        self.declared = max(0, total - fault.by_bytes) if isinstance(fault, DeclareLess) else total
        self._breaks_after = (
            fault.after_bytes if isinstance(fault, ResetResponse | ShortBody | StallBody) else float("inf")
        )
        self._flips_at = -1
        if isinstance(fault, FlipByte):
            self._flips_at = fault.at if fault.at >= 0 else total + fault.at

    def begin(self) -> None:
        """The head was sent."""
        if self._breaks_after <= 0:
            self._break()

    def send(self, piece: memoryview) -> None:
        if self._sent < self._breaks_after <= self._sent + len(piece):
            room = int(self._breaks_after) - self._sent
            self._client.send(piece[:room])
            self._break()
            self._client.send(piece[room:])
        else:
            if self._sent <= self._flips_at < self._sent + len(piece):
                piece[self._flips_at - self._sent] ^= 0xFF
            if isinstance(self._rule.fault, DeclareLess):
                self._client.send(piece[: max(0, self.declared - self._sent)])
            else:
                self._client.send(piece)
        self._sent += len(piece)

    def _break(self) -> None:
        if isinstance(self._rule.fault, StallBody):
            self._rule.wait()
        else:
            raise _BreakOffError(reset=isinstance(self._rule.fault, ResetResponse))
