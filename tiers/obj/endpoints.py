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
from kvsluice.tiers.obj.pool import HttpPool

__all__ = ["Endpoint", "Endpoints", "Permit"]

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 0.5
_PROBE_AT_MOST_EVERY_S: Final = 2.0
"""Where probes go on failing: with a probe's own second a store serves again within 3 s of its end of trouble."""

_LOOKUPS_TO_OPEN: Final = 2
"""Fewer than for the others: few threads ask, one question after the other, and an unanswered HEAD says much."""

Way = Literal["lookup", "load", "store"]


class Endpoint:
    """One address of the store: its connections and its health, for lookups, loads and stores apart.

    A full store takes no more writes while it serves reads; one whose disks hang may answer questions and no load.
    """

    def __init__(self, place: Place, pool: HttpPool) -> None:
        self.place = place
        self.pool = pool
        self.breakers: dict[Way, Breaker] = {
            "lookup": Breaker(_LOOKUPS_TO_OPEN),
            "load": Breaker(),
            "store": Breaker(),
        }

    def __repr__(self) -> str:
        return f"Endpoint({self.place.base!r})"

    @property
    def is_whole(self) -> bool:
        """Whether nothing is held back but for trials."""
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
        if self._breaker.succeeded(self._ticket):
            self._owner.closed(self.endpoint, self._way)

    def failed(self, failure: ObjectFailure) -> None:
        """It failed: does that say something about the endpoint?"""
        if failure.blames_endpoint:
            was = self._breaker.state
            if self._breaker.failed(self._ticket):
                self._owner.opened(self.endpoint, self._way, failure, again=was is BreakerState.HALF_OPEN)
        elif failure.status is None:
            self.ignored()
        else:
            # An answer is an answer: what it refuses is the request.
            self.succeeded()

    def ignored(self) -> None:
        """It ended for reasons of our own."""
        self._breaker.ignored(self._ticket)


class Endpoints:
    """Spreads operations over endpoints, the least busy first, and leaves out those that fail. Thread-safe.

    While a breaker is open a thread asks its endpoint, at once and then every half second to two seconds, whether it
    lives; it ends when it does. So no request of a user is what finds out. Where the first answer does not come, the
    endpoint is left alone altogether, and not only for what had failed.

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
        self._probers: dict[Endpoint, threading.Thread] = {}

    def enter(self, way: Way, avoid: Sequence[Endpoint] = ()) -> Permit:
        """Leave for one operation; whoever gets it ends the permit.

        Args:
            avoid: endpoints that have just failed it; taken where there is no other.

        Raises:
            RequestFailedError: every endpoint is left alone for now.
        """
        candidates: Sequence[Endpoint] = self.all
        count = len(candidates)
        if count > 1:
            turn = next(self._turn)
            in_turn = [candidates[(turn + at) % count] for at in range(count)]
            # Stable: of equally busy ones the next in turn.
            candidates = sorted(in_turn, key=lambda one: (one in avoid, one.pool.busy))
        for endpoint in candidates:
            ticket = endpoint.breakers[way].try_enter()
            if ticket is not None:
                return Permit(self, endpoint, way, ticket)
        raise RequestFailedError(ObjectFailure(None, "it failed several times in a row", "breaker_open"))

    def opened(self, endpoint: Endpoint, way: Way, failure: ObjectFailure, *, again: bool) -> None:
        """A breaker opened: see to it that somebody asks until it can close again.

        Args:
            again: a trial failed; that is not worth another line.
        """
        if self._closing.is_set():
            # Closing breaks off what is under way, and that is no news.
            return
        logger.log(
            logging.DEBUG if again else logging.WARNING,
            "%s: %ss fail at %s (%s): none is sent there until it answers a probe",
            self._name,
            way,
            endpoint.place.base,
            failure,
        )
        self._start_probing(endpoint)

    def leave_alone(self, endpoint: Endpoint) -> None:
        """It was found not to answer: nothing is sent there until it answers a probe."""
        for breaker in endpoint.breakers.values():
            breaker.trip()
        self._start_probing(endpoint)

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def _start_probing(self, endpoint: Endpoint) -> None:
        with self._lock:
            if self._closing.is_set() or endpoint in self._probers:
                return
            name = f"kvsluice-{self._name}-probe-{self.all.index(endpoint)}"
            prober = threading.Thread(target=self._ask_until_whole, args=(endpoint,), name=name, daemon=True)
            self._probers[endpoint] = prober
            prober.start()

    def closed(self, endpoint: Endpoint, way: Way) -> None:
        """A breaker closed: a trial was answered."""
        logger.warning("%s: %ss are answered again at %s", self._name, way, endpoint.place.base)

    def pause(self, wait_s: float) -> bool:
        """Wait, at most until `close`; whether that came."""
        return self._closing.wait(wait_s)

    def close(self, timeout_s: float) -> None:
        """End the probing and all connections. Idempotent."""
        self._closing.set()
        for endpoint in self.all:
            endpoint.pool.close()
        with self._lock:
            probers = list(self._probers.values())
        for prober in probers:
            prober.join(timeout_s)

    def _ask_until_whole(self, endpoint: Endpoint) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            answered = self._probe(endpoint)
            for breaker in endpoint.breakers.values():
                if not answered:
                    breaker.trip()
                elif wait_s > 0:
                    breaker.probed()
            with self._lock:
                if endpoint.is_whole:
                    # Under the lock: a breaker that opens now finds no prober and starts one.
                    self._probers.pop(endpoint, None)
                    return
            wait_s = min(1.5 * wait_s, _PROBE_AT_MOST_EVERY_S) if wait_s else _PROBE_EVERY_S
