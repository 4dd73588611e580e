"""Happens-before by vector clocks: which accesses to one memory are ordered, whatever the timing was.

A thread of the model is a stream, or the host. Each counts its accesses; a clock says how much of every
thread's work is known to be over. An access is ordered behind another when its thread's clock covers the
other. Two accesses to the same bytes, at least one of them a write, that are not ordered are a race, even
where this run happened to do them one after the other.

The host is one thread here, whatever threads it has: what one of them did counts as seen by all. So the
model finds every missing order between the host and the device, and none between two of the host's own
threads (a lock that is not taken, a result that is read too soon on another thread).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["AccessLog", "Memory", "ModelThread"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes `start` to `stop` of a space; a space without bytes of its own is 0 to 1.

    `owner` keeps the memory alive, so that its address means nothing else while it is spoken of.
    """

    space: Hashable
    start: int = 0
    stop: int = 1
    owner: object = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        whole = (self.start, self.stop) == (0, 1)
        return f"{self.space}" if whole else f"{self.space}[{self.start}:{self.stop}]"


class ModelThread:
    """A thread of the model and what it knows of the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._clock: dict[str, int] = {}

    def tick(self) -> int:
        """The number of one more access."""
        self._clock[self.name] = self._clock.get(self.name, 0) + 1
        return self._clock[self.name]

    def join(self, clock: Mapping[str, int]) -> None:
        """Whatever `clock` covers is over for this thread, too."""
        for name, count in clock.items():
            if count > self._clock.get(name, 0):
                self._clock[name] = count

    def stamp(self) -> Mapping[str, int]:
        """What this thread knows now."""
        return dict(self._clock)

    def knows(self, name: str, count: int) -> bool:
        return count <= self._clock.get(name, 0)


@dataclass(frozen=True, slots=True)
class _Access:
    what: str
    thread: str
    count: int
    memory: Memory
    is_write: bool

    def __str__(self) -> str:
        return f"{self.what} ({'write' if self.is_write else 'read'} on {self.thread})"


class AccessLog:
    """Every access that a later one could race with. Accesses come in an order that fits the model's."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._known: defaultdict[Hashable, list[_Access]] = defaultdict(list)

    def add(self, thread: ModelThread, what: str, reads: Iterable[Memory], writes: Iterable[Memory]) -> None:
        """One piece of `thread`'s work."""
        count = thread.tick()
        for memory, is_write in (*((memory, False) for memory in reads), *((memory, True) for memory in writes)):
            self._add(thread, _Access(what, thread.name, count, memory, is_write))

    def _add(self, thread: ModelThread, new: _Access) -> None:
        known = self._known[new.memory.space]
        for old in _overlapping(known, new.memory):
            if (old.is_write or new.is_write) and not thread.knows(old.thread, old.count):
                self.races.append(f"{old} and {new} are not ordered at {new.memory}")
        known[:] = [old for old in known if not _replaces(new, old)]
        known.append(new)


def _overlapping(known: Iterable[_Access], memory: Memory) -> Iterator[_Access]:
    return (old for old in known if old.memory.start < memory.stop and memory.start < old.memory.stop)


def _replaces(new: _Access, old: _Access) -> bool:
    """Whether nothing can race with `old` that does not race with `new` too, or has been found already."""
    covers = new.memory.start <= old.memory.start and old.memory.stop <= new.memory.stop
    return covers and (new.is_write or (not old.is_write and old.thread == new.thread))
