"""A chunk in parallel parts: how it is cut, who carries the parts, and whether that is faster, found out by trial."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Literal, TypeVar

__all__ = ["MIN_PART_BYTES", "PartCrew", "Span", "Trial", "cut"]

MIN_PART_BYTES: Final = 5 << 20
"""The smallest part of an upload but the last, by the S3 reference."""

_MOST_PARTS: Final = 8
_CUT_UNIT_BYTES: Final = 4096
_WEIGHT: Final = 0.25
_TRY_OTHER_EVERY: Final = 32
_MUST_GAIN: Final = 1.2
"""How many times as fast parts have to be: they cost the store a request each."""

Span = tuple[int, int]
_T = TypeVar("_T")


def cut(num_bytes: int, part_bytes: int, most_parts: int) -> list[Span]:
    """`num_bytes` in spans (start, end) of about equal length, none but the last below `part_bytes`.

    One span where `most_parts` or the length allows no more.
    """
    count = max(1, min(num_bytes // part_bytes, most_parts, _MOST_PARTS))
    length = -(-num_bytes // count // _CUT_UNIT_BYTES) * _CUT_UNIT_BYTES
    return [(start, min(start + length, num_bytes)) for start in range(0, num_bytes, length)]


class Trial:
    """Which of two ways moves a chunk faster: in one request, or in parts. Thread-safe.

    Both are tried at the start; after that the slower one's figure is kept up to date by one chunk in 32. Only what ran
    under the same conditions is compared: the caller tells of chunks that might have gone either way.
    """

    def __init__(self, setting: Literal["auto", "on", "off"]) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        self._asked = 0
        self._bytes_per_s: dict[bool, float] = {}

    def wants_parts(self) -> bool:
        """How the next chunk is to go."""
        if self._setting != "auto":
            return self._setting == "on"
        with self._lock:
            self._asked += 1
            if len(self._bytes_per_s) < 2:
                # In turn, as the figure of one that is under way is still to come.
                return self._asked % 2 == 0
            better = self._bytes_per_s[True] > _MUST_GAIN * self._bytes_per_s[False]
            return better != (self._asked % _TRY_OTHER_EVERY == 0)

    def moved(self, num_bytes: int, elapsed_s: float, *, in_parts: bool) -> None:
        """A chunk went this way in that time."""
        if elapsed_s <= 0:
            return
        rate = num_bytes / elapsed_s
        with self._lock:
            old = self._bytes_per_s.get(in_parts, rate)
            self._bytes_per_s[in_parts] = old + _WEIGHT * (rate - old)

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """What was measured so far, by way."""
        with self._lock:
            return {"parts" if in_parts else "whole": rate for in_parts, rate in self._bytes_per_s.items()}


class PartCrew:
    """A few threads that carry parts for the threads of the tier; made when there is work. Thread-safe.

    Daemons, as all threads of the tier: an interpreter that ends does not wait for a store that hangs.

    Args:
        threads: at most.
        name: in the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most_threads = threads
        self._name = name
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def run_all(self, carry: Callable[[Span], _T], spans: Sequence[Span]) -> list[_T]:
        """`carry` of each span, side by side; the first on the caller's own thread.

        It comes back when all have ended, whatever happened: a part that went on would write to memory that is
        somebody else's by then.

        Raises:
            Exception: what the first span that failed raised.
        """
        outcomes: list[Callable[[], _T]] = []
        futures = [self._start(carry, span) for span in spans[1:]]
        outcomes.append(_outcome_of(carry, spans[0]))
        for future, span in zip(futures, spans[1:], strict=True):
            if future is None or future.cancel():
                # Nobody had time for it.
                outcomes.append(_outcome_of(carry, span))
            else:
                outcomes.append(_waited_for(future))
        return [outcome() for outcome in outcomes]

    def close(self) -> None:
        """Let the threads end after what they are at. Idempotent; never blocks."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._work.put(None)

    def _start(self, carry: Callable[[Span], _T], span: Span) -> Future[_T] | None:
        """The part's outcome to come; None where no thread can be had, so that whoever asked does it himself."""
        with self._lock:
            if self._closed:
                return None
            if self._idle <= self._work.qsize() and self._threads < self._most_threads:
                thread = threading.Thread(
                    target=self._serve, name=f"kvsluice-{self._name}-part-{self._threads}", daemon=True
                )
                try:
                    thread.start()
                    self._threads += 1
                except RuntimeError:
                    # The interpreter is ending, or has no more threads.
                    if not self._threads:
                        return None
            future: Future[_T] = Future()
            self._work.put(partial(_run, future, carry, span))
            return future

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._work.get()
            with self._lock:
                self._idle -= 1
            if work is None:
                return
            work()


def _run(future: Future[_T], carry: Callable[[Span], _T], span: Span) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(carry(span))
    except BaseException as error:  # noqa: BLE001 - raised again when all parts have ended
        future.set_exception(error)


def _outcome_of(carry: Callable[[Span], _T], span: Span) -> Callable[[], _T]:
    future: Future[_T] = Future()
    _run(future, carry, span)
    return future.result


def _waited_for(future: Future[_T]) -> Callable[[], _T]:
    future.exception()
    return future.result
