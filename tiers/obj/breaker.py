"""When an endpoint is left alone: a breaker that opens on failures in a row and is closed by a success.

    closed ── failures in a row ──▶ open ── a probe was answered ──▶ half open ── one success ──▶ closed
                                     ▲                                    │
                                     └──── a failure, no answer ──────────┘

Half open it lets one operation through at a time. It decides and does no I/O: who probes, tells it.
"""

from __future__ import annotations

import enum
import threading
from typing import Final

__all__ = ["FAILURES_TO_OPEN", "Breaker", "BreakerState"]

FAILURES_TO_OPEN: Final = 5
"""A guess: fewer would let the two or three requests that a restarting server drops open it; a server that is gone
reaches it within one step of an engine. Connections that were found dead when they were reused do not count."""


class BreakerState(enum.Enum):
    """What a breaker lets through: all, one at a time, nothing."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Breaker:
    """Thread-safe; no method blocks.

    `try_enter` gives a permit, which is ended by exactly one of `succeeded`, `failed` and `ignored`. A permit from
    before the last change of state has nothing more to say but a success: what hung on a dead connection through a
    whole outage and fails after it, is no news.
    """

    def __init__(self, failures_to_open: int = FAILURES_TO_OPEN) -> None:
        self._failures_to_open = failures_to_open
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._epoch = 0
        self._in_a_row = 0
        self._on_trial = False

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def has_room(self) -> bool:
        """Whether `try_enter` would let one through now; another thread may be faster."""
        return self._state is BreakerState.CLOSED or (self._state is BreakerState.HALF_OPEN and not self._on_trial)

    def try_enter(self) -> int | None:
        """Ask for one operation: its permit, or None where it is not let through."""
        with self._lock:
            if not self.has_room:
                return None
            self._on_trial = self._state is BreakerState.HALF_OPEN
            return self._epoch

    def succeeded(self, permit: int) -> bool:
        """The operation was answered, however: the endpoint lives; whether this closed the breaker."""
        del permit  # What lives, lives, whenever it was asked.
        with self._lock:
            self._in_a_row = 0
            if self._state is BreakerState.CLOSED:
                return False
            self._change(BreakerState.CLOSED)
            return True

    def failed(self, permit: int) -> bool:
        """The operation failed in a way that is the endpoint's; whether this opened the breaker."""
        with self._lock:
            if permit != self._epoch:
                return False
            self._in_a_row += 1
            if self._state is BreakerState.CLOSED and self._in_a_row < self._failures_to_open:
                return False
            self._change(BreakerState.OPEN)
            return True

    def ignored(self, permit: int) -> None:
        """The operation ended in a way that says nothing about the endpoint."""
        with self._lock:
            if permit == self._epoch:
                self._on_trial = False

    def trip(self) -> None:
        """The endpoint does not answer a probe: nothing is let through, whatever it was that failed."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._change(BreakerState.OPEN)

    def probed(self) -> None:
        """The endpoint answered a probe: operations may try, one at a time."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                self._change(BreakerState.HALF_OPEN)

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1
        self._on_trial = False
