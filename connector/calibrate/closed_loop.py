"""Keeps a number of operations under way, each started as soon as one has ended, and times them.

              warm-up       window
    thread 1  |~~~~~~~|=======|======== |====...          ~~  ended in the warm-up
    thread 2  |~~~~~~~~~|=========|=======|==...          ==  recorded
                        ^                 ^               ..  under way at the end of the window

The warm-up is over when as many operations have ended as there are threads. What is under way at
either end of the window counts for the throughput with the part of it that lies in the window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.tiers.errors import TierUnavailableError
from kvsluice.tiers.reasons import IO_ERROR

__all__ = ["HANG_S", "ClosedLoop", "Limits", "Timed", "in_window"]

HANG_S: Final = 30.0
"""How long after the end of its time an operation may still come home: longer than a request with its retries."""
LEAVE_S: Final = 10.0
"""The same after an interrupt, when somebody waits for the prompt."""
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """When a loop ends.

    Attributes:
        num_ops: recorded operations that are enough.
        min_ops: enough from `soft_s` on.
        max_started: operations that are ever started.
        soft_s, hard_s: points of the clock; from `hard_s` on nothing is started.
    """

    num_ops: int
    min_ops: int
    max_started: int
    soft_s: float
    hard_s: float


@dataclass(frozen=True, slots=True, order=True)
class Timed:
    """When one operation ended and when it had started."""

    end_s: float
    start_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def part_before(self, moment_s: float) -> float:
        """What part of it lies before this moment."""
        return min(1.0, max(0.0, moment_s - self.start_s) / self.seconds) if self.seconds > 0 else 0.0


def in_window(timed: Sequence[Timed], num_before: int, num_ops: int) -> tuple[tuple[float, ...], float]:
    """Of the operations that end in the window: what each took, and what all take together.

    Args:
        timed: all operations, in any order.
        num_before: the window begins with the end of this many of them; at least 1.
        num_ops: and ends with the end of this many more.

    Returns:
        Seconds in the order in which they ended, and the seconds for so many operations at the rate of
        the window: to its throughput an operation counts with its part in the window.
    """
    by_end = sorted(timed)
    inside = by_end[num_before : num_before + num_ops]
    from_s, to_s = by_end[num_before - 1].end_s, inside[-1].end_s
    done = sum(one.part_before(to_s) - one.part_before(from_s) for one in by_end)
    return tuple(one.seconds for one in inside), (to_s - from_s) * num_ops / done


class ClosedLoop:
    """One use: `run`, then the results.

    Args:
        operate: `operate(stream, number)` does one operation on the thread of this stream and times
            it by the clock. Called on `concurrency` threads at once.
        concurrency: threads.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        operate: Callable[[int, int], Timed],
        concurrency: int,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._operate = operate
        self._concurrency = concurrency
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ready = threading.Barrier(concurrency)
        self._started = 0
        self._running = concurrency
        self._timed: list[Timed] = []
        self._recorded = 0
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(at,), name=f"kvsluice-calibrate-{at}", daemon=True)
            for at in range(concurrency)
        ]
        self.ended: list[int] = []
        """The numbers of all operations that ended well, recorded or not."""

    def run(self) -> None:
        """Until the limits are met and every thread has come home.

        Raises:
            TierUnavailableError: an operation hangs; its thread is left behind.
            Exception: what an operation raised first.
        """
        give_up_s = self._limits.hard_s + HANG_S
        try:
            for thread in self._threads:
                thread.start()
            while not self._over.wait(POLL_S) and self._clock() < give_up_s:
                pass
        except BaseException:
            give_up_s = self._clock() + LEAVE_S
            raise
        finally:
            self._over.set()
            self._ready.abort()
            hung = self._join(give_up_s)
        if self._error is not None:
            raise self._error
        if hung:
            raise TierUnavailableError(f"{hung} operations have not come back within {HANG_S:g} s", reason=IO_ERROR)

    @property
    def is_enough(self) -> bool:
        """Whether at least `min_ops` were recorded; only then are there results."""
        return self._recorded >= self._limits.min_ops

    def results(self) -> tuple[tuple[float, ...], float]:
        """As `in_window`, of what was recorded; once `run` is over."""
        return in_window(self._timed, self._concurrency, self._recorded)

    def _join(self, end_s: float) -> int:
        for thread in self._threads:
            while thread.is_alive() and self._clock() < end_s:
                thread.join(POLL_S)
        return sum(thread.is_alive() for thread in self._threads)

    def _serve(self, at: int) -> None:
        try:
            self._ready.wait()
            while (number := self._next()) is not None:
                self._record(number, self._operate(at, number))
        except threading.BrokenBarrierError:
            pass
        except Exception as error:  # noqa: BLE001 - carried over to the thread that waits in `run`
            with self._lock:
                self._error = self._error or error
            self._over.set()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._over.set()

    def _next(self) -> int | None:
        with self._lock:
            limits = self._limits
            if self._over.is_set() or self._started >= limits.max_started or self._clock() >= limits.hard_s:
                return None
            self._started += 1
            return self._started - 1

    def _record(self, number: int, timed: Timed) -> None:
        with self._lock:
            self.ended.append(number)
            self._timed.append(timed)
            if self._over.is_set():
                return
            self._recorded = max(0, len(self._timed) - self._concurrency)
            limits = self._limits
            if self._recorded >= (limits.min_ops if timed.end_s >= limits.soft_s else limits.num_ops):
                self._over.set()
