"""What a `FaultProxy` can do to a request, and the rules that say to which."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate

__all__ = [
    "Answer",
    "DeclareLess",
    "Fault",
    "FaultPlan",
    "FlipByte",
    "HangUp",
    "LoseAnswer",
    "Nothing",
    "Rate",
    "ResetRequest",
    "ResetResponse",
    "Rule",
    "Seen",
    "ShortBody",
    "StallBody",
    "clock_skewed",
    "error",
    "slow_down",
]

_REMEMBERED = 1000


@dataclass(frozen=True)
class Nothing:
    """The request passes as it is: keeps younger rules from it."""


@dataclass(frozen=True)
class ResetResponse:
    """The connection is reset after so many bytes of the response's body; its head is sent."""

    after_bytes: int = 0


@dataclass(frozen=True)
class ResetRequest:
    """The connection is reset after so many bytes of the request's body; the server sees it break off there."""

    after_bytes: int = 0


@dataclass(frozen=True)
class LoseAnswer:
    """The server gets the whole request and answers it; the client gets a reset in place of the answer."""


@dataclass(frozen=True)
class HangUp:
    """The request is read and the connection is closed in order; the server hears of nothing."""


@dataclass(frozen=True)
class StallBody:
    """Nothing comes after so many bytes of the response's body, until the rule is released."""

    after_bytes: int = 0


@dataclass(frozen=True)
class ShortBody:
    """The full length is declared and the connection closed in order after so many bytes of the body."""

    after_bytes: int = 0


@dataclass(frozen=True)
class DeclareLess:
    """A well-formed response whose declared length and body are so many bytes shorter than the server's."""

    by_bytes: int = 1


@dataclass(frozen=True)
class FlipByte:
    """All bits of one byte of the response's body are wrong. Negative: from the end of a body of known length."""

    at: int = 0


@dataclass(frozen=True)
class Rate:
    """Bodies pass at this many bytes a second, in both directions, after a delay: a long thin path, or a trickle."""

    bytes_per_s: float
    delay_s: float = 0.0
    """Before the request is forwarded: the time of a round trip."""


@dataclass(frozen=True)
class Answer:
    """The proxy answers by itself, and the server hears of nothing. The request is read first, all of it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Fault = (
    Nothing
    | ResetResponse
    | ResetRequest
    | LoseAnswer
    | HangUp
    | StallBody
    | ShortBody
    | DeclareLess
    | FlipByte
    | Rate
    | Answer
)


def error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer as S3 words its errors: `error(500, "InternalError")`, `error(400, "ExpiredToken")`."""
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    return Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def slow_down(retry_after_s: int | None = None) -> Answer:
    """The server wants fewer requests, and may say when to come again."""
    return error(503, "SlowDown", {} if retry_after_s is None else {"Retry-After": str(retry_after_s)})


def clock_skewed(by_s: float) -> Answer:
    """What a server says whose clock is so far ahead of ours."""
    return error(403, "RequestTimeTooSkewed", {"Date": formatdate(time.time() + by_s, usegmt=True)})


@dataclass(frozen=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    """Names in lower case."""


@dataclass
class Rule:
    """One fault and the requests that it meets."""

    fault: Fault
    method: str | None = None
    path_part: str | None = None
    times: int | None = None
    hits: int = 0
    """How many requests it has met."""
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let what it stalls go on; it stalls nothing from here on."""
        self._released.set()

    def wait(self) -> None:
        """Until it is released."""
        self._released.wait()

    def meets(self, seen: Seen) -> bool:
        """Whether this request is one of its own."""
        return (
            (self.times is None or self.hits < self.times)
            and (self.method is None or self.method == seen.method)
            and (self.path_part is None or self.path_part in seen.path)
        )


class FaultPlan:
    """What a proxy's connections share: the rules, the stall, and what came. Thread-safe."""

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.flowing = threading.Event()
        """Not set: a stall."""
        self.flowing.set()
        self._rules: list[Rule] = []
        self._counts: Counter[str] = Counter()
        self._requests: deque[Seen] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """No faults from here on, and nothing is held up any more."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.release()
        self.rate = None
        self.flowing.set()

    def stop(self) -> None:
        """No faults, and no waiting either."""
        self._stopped.set()
        self.clear()

    def meet(self, seen: Seen) -> Rule:
        """Count the request; the rule that meets it, or one that holds it to the rate."""
        with self._lock:
            self._requests.append(seen)
            self._counts[seen.method] += 1
            for rule in self._rules:
                if rule.meets(seen):
                    rule.hits += 1
                    return rule
        return Rule(self.rate or Nothing())

    def hold(self) -> None:
        """Wait out a stall."""
        self.flowing.wait()

    def sleep(self, seconds: float) -> None:
        """Until then, or until the proxy stops."""
        if seconds > 0:
            self._stopped.wait(seconds)

    def requests(self) -> list[Seen]:
        with self._lock:
            return list(self._requests)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def reset_counts(self) -> None:
        with self._lock:
            self._counts.clear()
            self._requests.clear()
