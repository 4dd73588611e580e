"""The endpoints of one store: which one a request goes to, and the probe that brings a failed one back."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal

from kvsluice.tiers.obj.access import Place
from kvsluice.tiers.obj.breaker import Breaker, BreakerState
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.wire import HttpPool

__all__ = ["Endpoint", "Endpoints", "Permit"]

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 0.5
_PROBE_AT_MOST_EVERY_S: Final = 2.0
"""Where probes go on failing: with a probe's own second a store serves again within 3 s of its end of trouble."""

Way = Literal["read", "write"]


class Endpoint:
    """One address of the store: its connections and, for reads and for writes, its health.

    A store that takes no more writes while it serves reads is a full one; the other way round is rare, and as real.
    """

    def __init__(self, place: Place, pool: HttpPool) -> None:
        self.place = place
        self.pool = pool
        self.breakers: dict[Way, Breaker] = {"read": Breaker(), "write": Breaker()}

    def __repr__(self) -> str:
        return f"Endpoint({self.place.base!r})"

    @property
    def is_whole(self) -> bool:
        """Whether neither reads nor writes are held back."""
        return all(breaker.state is not BreakerState.OPEN for breaker in self.breakers.values())


class Permit:
    """One operation's leave to use an endpoint; ends one of three ways."""

    def __init__(self, owner: Endpoints, endpoint: Endpoint, way: Way, ticket: int) -> None:
        self._owner = owner
        self._breaker = endpoint.breakers[way]
        self._ticket = ticket
        self.endpoint = endpoint
        self._way = way

    def succeeded(self) -> None:
        """It was answered, well or not."""
        self._breaker.succeeded(self._ticket)

    def failed(self, failure: ObjectFailure) -> None:
        """It failed: does that say something about the endpoint?"""
        if not failure.blames_endpoint:
            # An answer is an answer: what it refuses is the request.
            self._breaker.ignored(self._ticket) if failure.status is None else self._breaker.succeeded(self._ticket)
        elif self._breaker.failed(self._ticket):
            self._owner.opened(self.endpoint, self._way, failure)

    def ignored(self) -> None:
        """It ended for reasons of our own."""
        self._breaker.ignored(self._ticket)


class Endpoints:
    """Spreads operations over endpoints, the least busy first, and leaves out those that fail. Thread-safe.

    While a breaker is open a thread asks its endpoint, every half second to two seconds, whether it lives; it ends when
    all do. So no request of a user is what finds out.

    Args:
        endpoints: at least one.
        probe: one short question to an endpoint; True where it was answered. Called on the thread.
        name: the tier, in the thread's name and in the log.
    """

    def __init__(self, endpoints: Sequence[Endpoint], probe: Callable[[Endpoint], bool], name: str) -> None:
        self.all = tuple(endpoints)
        self._probe = probe
        self._name = name
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._prober: threading.Thread | None = None

    def enter(self, way: Way, avoid: Sequence[Endpoint] = ()) -> Permit:
        """Leave for one operation; whoever gets it ends the permit.

        Args:
            avoid: endpoints that have just failed it; taken where there is no other.

        Raises:
            RequestFailedError: every endpoint is left alone for now.
        """
        turn = next(self._turn)
        count = len(self.all)
        in_turn = [self.all[(turn + at) % count] for at in range(count)] if count > 1 else self.all
        # Stable: of equally busy ones the next in turn.
        for endpoint in sorted(in_turn, key=lambda one: (one in avoid, one.pool.busy)):
            ticket = endpoint.breakers[way].try_enter()
            if ticket is not None:
                return Permit(self, endpoint, way, ticket)
        raise RequestFailedError(ObjectFailure(None, "it failed several times in a row", "breaker_open"))

    def opened(self, endpoint: Endpoint, way: Way, failure: ObjectFailure) -> None:
        """A breaker opened: see to it that somebody asks until it can close again."""
        if self._closing.is_set():
            # Closing breaks off what is under way, and that is no news.
            return
        logger.warning(
            "%s: %s of %s fail in a row (%s): none are sent until it answers a probe",
            self._name,
            "loads and lookups" if way == "read" else "stores",
            endpoint.place.base,
            failure,
        )
        with self._lock:
            if self._closing.is_set() or (self._prober is not None and self._prober.is_alive()):
                return
            self._prober = threading.Thread(
                target=self._ask_until_whole, name=f"kvsluice-{self._name}-probe", daemon=True
            )
            self._prober.start()

    def pause(self, wait_s: float) -> bool:
        """Wait, at most until `close`; whether that came."""
        return self._closing.wait(wait_s)

    def close(self, timeout_s: float) -> None:
        """End the probing and all connections. Idempotent."""
        self._closing.set()
        for endpoint in self.all:
            endpoint.pool.close()
        with self._lock:
            prober = self._prober
        if prober is not None:
            prober.join(timeout_s)

    def _ask_until_whole(self) -> None:
        wait_s = _PROBE_EVERY_S
        while not self._closing.wait(wait_s):
            for endpoint in self.all:
                if not endpoint.is_whole and not self._closing.is_set() and self._probe(endpoint):
                    logger.warning("%s: %s answers again", self._name, endpoint.place.base)
                    for breaker in endpoint.breakers.values():
                        breaker.probed()
            with self._lock:
                if all(endpoint.is_whole for endpoint in self.all):
                    # Under the lock: a breaker that opens now finds no prober and starts one.
                    self._prober = None
                    return
            wait_s = min(wait_s * 1.5, _PROBE_AT_MOST_EVERY_S)
