"""One request to the store, with its deadline: where it goes, what is tried again, what its end means."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvsluice.tiers.obj.access import Access
from kvsluice.tiers.obj.endpoints import Endpoint, Endpoints, Permit, Way
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError, failure_of_answer, failure_of_error
from kvsluice.tiers.obj.wire import Response

__all__ = ["Request", "Requests", "no_body"]

_BACKOFF_S: Final = 0.05
_BACKOFF_AT_MOST_S: Final = 1.0
_MOST_KINDS: Final = 64
"""Of failures that are counted apart: a server may invent codes."""
_PROBE_S: Final = 1.0
"""What a probe may take: a store that needs longer for a HEAD is not one to send chunks to."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """One S3 request, the same whichever endpoint it goes to.

    Attributes:
        method: of HTTP.
        key: the object's, quoted as it stands in a URL; "" for the bucket.
        query: what follows the question mark, quoted.
        headers: further ones, by lower-case name.
        body: as it lies in the caller's memory.
    """

    method: str
    key: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: memoryview | None = None

    @property
    def way(self) -> Way:
        if self.method == "HEAD" or (self.method == "GET" and not self.key):
            return "lookup"
        return "load" if self.method == "GET" else "store"


def no_body(response: Response) -> None:
    """For answers of which the status is all."""
    del response


class Requests:
    """Sends requests. Thread-safe.

    Every request of the tier may be sent twice without harm (a chunk is written once, on a condition), so each is
    tried again where that can help: at another endpoint at once, at the same one after a pause with full jitter; at
    most `max_attempts` times, and never past the deadline.

    Args:
        max_attempts: the first one included.
        random_s: draws a pause between 0 and its argument.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        access: Access,
        endpoints: Endpoints,
        *,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
        random_s: Callable[[float], float] = lambda most_s: random.uniform(0.0, most_s),
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._access = access
        self.endpoints = endpoints
        self._max_attempts = max_attempts
        self._clock = clock
        self._random_s = random_s
        # The default ends when the tier is closed.
        self._pause = endpoints.pause if pause is None else pause
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()

    def send(self, request: Request, end_s: float, receive: Callable[[Response], _T]) -> _T:
        """What `receive` makes of the answer to `request`.

        Args:
            end_s: the deadline, on the clock given.
            receive: reads the body of an answer of 2xx; may be called again where reading failed.

        Raises:
            RequestFailedError: what the last attempt ended with.
        """
        tried: list[Endpoint] = []
        last: RequestFailedError | None = None
        renewed = silent = False
        while True:
            keys = self._access.keys_number
            try:
                permit = self.endpoints.enter(request.way, tried)
                tried.append(permit.endpoint)
                return self._attempt(request, permit, end_s, receive, fresh=silent)
            except RequestFailedError as error:
                failure = error.failure
                if failure.kind == "breaker_open" and last is not None:
                    # What opened it says more.
                    raise last from None
                last = error
                silent = failure.status is None
                if failure.wants_new_credentials and not renewed and self._access.renew(keys):
                    renewed = True
                    continue
                if not failure.may_pass or len(tried) >= self._max_attempts:
                    raise
                wait_s = 0.0
                if not self._has_untried(request.way, tried):
                    wait_s = self._random_s(min(_BACKOFF_AT_MOST_S, _BACKOFF_S * 2 ** (len(tried) - 1)))
                    wait_s = max(wait_s, failure.retry_after_s)
                if self._clock() + wait_s >= end_s:
                    # The next endpoint would be blamed for the time that this one took.
                    raise
                if wait_s > 0:
                    self._pause(wait_s)

    def now_s(self) -> float:
        """On the clock that deadlines are given on."""
        return self._clock()

    def ask_one(self, endpoint: Endpoint, request: Request, end_s: float) -> None:
        """Send `request` to `endpoint` alone, whatever its breaker says; for the start.

        Raises:
            RequestFailedError: what the last attempt ended with.
        """
        for attempt in range(self._max_attempts):
            try:
                self._exchange(request, endpoint, end_s, Response.read_words)
            except RequestFailedError as error:  # noqa: PERF203 - a retry is a loop around a try
                wait_s = self._random_s(_BACKOFF_S * 2**attempt)
                last = attempt + 1 == self._max_attempts or self._clock() + wait_s >= end_s
                if last or not error.failure.may_pass or self._pause(wait_s):
                    raise
            else:
                return

    def probe(self, endpoint: Endpoint, request: Request) -> bool:
        """Whether `endpoint` answers `request`, whatever it answers but "not now"."""
        try:
            end_s = self._clock() + _PROBE_S
            self._exchange(request, endpoint, end_s, no_body, fresh=True)
        except RequestFailedError as error:
            return error.failure.status is not None and not error.failure.blames_endpoint
        return True

    def count(self, failure: ObjectFailure) -> None:
        """Count one operation that failed for good."""
        with self._lock:
            known = failure.label in self._failures or len(self._failures) < _MOST_KINDS
            self._failures[failure.label if known else "other"] += 1

    def failure_counts(self) -> dict[str, int]:
        """How often operations failed for good, by kind: `"503 SlowDown"`, `"timeout"`."""
        with self._lock:
            return dict(self._failures)

    def _has_untried(self, way: Way, tried: list[Endpoint]) -> bool:
        return any(one not in tried and one.breakers[way].has_room for one in self.endpoints.all)

    def _attempt(
        self, request: Request, permit: Permit, end_s: float, receive: Callable[[Response], _T], *, fresh: bool
    ) -> _T:
        try:
            # Not on another connection that may have gone the same way while it was idle.
            result = self._exchange(request, permit.endpoint, end_s, receive, fresh=fresh)
        except RequestFailedError as error:
            permit.failed(error.failure)
            raise
        except BaseException:
            # What `receive` found wrong with the object is not the endpoint's fault.
            permit.succeeded()
            raise
        permit.succeeded()
        return result

    def _exchange(
        self,
        request: Request,
        endpoint: Endpoint,
        end_s: float,
        receive: Callable[[Response], _T],
        *,
        fresh: bool = False,
    ) -> _T:
        pool = endpoint.pool
        # The quoted path is signed as it is sent.
        tail = f"{request.key}?{request.query}" if request.query else request.key
        headers = self._access.sign(endpoint.place, request.method, tail, request.headers, request.body)
        while True:
            connection = pool.take(end_s, fresh=fresh)
            was_used = connection.served > 0
            answered = False
            keep = False
            try:
                response = connection.ask(request.method, endpoint.place.path + tail, headers, request.body, end_s)
                answered = True
                if response.status // 100 != 2:
                    words, keep = _words_of(response)
                    raise RequestFailedError(failure_of_answer(response.status, response.headers, words, time.time()))
                result = receive(response)
                keep = response.finish()
            except (OSError, http.client.HTTPException) as error:
                failure = failure_of_error(error)
                if was_used and not answered and failure.kind == "reset":
                    # It was ended while it was idle: that the server does all the time, and is no failure.
                    fresh = True
                    continue
                raise RequestFailedError(failure) from error
            finally:
                if keep:
                    pool.give(connection)
                else:
                    pool.drop(connection)
            return result


def _words_of(response: Response) -> tuple[bytes, bool]:
    """What an answer that tells of a failure says, and whether its connection can serve again.

    Its status is known and says most: a body that breaks off takes nothing from that.
    """
    try:
        return response.read_words(), response.finish()
    except (OSError, http.client.HTTPException, RequestFailedError):
        return b"", False
