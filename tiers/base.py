"""What a tier is: a place that keeps chunk images under opaque keys.

A *chunk image* is the chunk file as `kvsluice.tiers.chunk_file` lays it out: header and payload in
one run of memory. A tier moves images and knows nothing of engines, layers or checksums; whoever
loads an image proves it before using it.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from kvsluice.tiers.errors import ClosedError

__all__ = ["ALIGNMENT_BYTES", "MAX_STORED_KEY_BYTES", "Tier", "TierUsage", "round_up", "take_left"]

ALIGNMENT_BYTES: Final = 4096
"""Direct I/O's unit here: the largest logical block size of NVMe drives, and the page size."""

MAX_STORED_KEY_BYTES: Final = 80
"""A 64-byte digest, the group index and the rank; its hex form stays well below a file name's 255 bytes."""


def round_up(num_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of `unit_bytes` that holds `num_bytes`."""
    return -(-num_bytes // unit_bytes) * unit_bytes


def take_left(keys: deque[bytes], max_keys: int | None) -> list[bytes]:
    """Take up to `max_keys` (all if None) from the left; the caller holds whatever guards `keys`."""
    count = len(keys) if max_keys is None else min(max_keys, len(keys))
    return [keys.popleft() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds and what it met with, as far as it knows without asking anybody.

    Attributes:
        chunks, used_bytes, capacity_bytes: `None` where it does not know.
        evicted_chunks: dropped by itself since its start.
        failures: since its start, how often each kind of failure came, in a few fixed words of the
            tier's own: "503 SlowDown", "timeout". No names, times or addresses in them: each new
            word is one more line in every report.
    """

    chunks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted_chunks: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


class Tier(abc.ABC):
    """A place where chunk images live.

    Every method may be called from several threads at once, and may block on I/O: none is ever
    called on an engine's scheduling path.

    Buffers are writable, contiguous `memoryview`s of bytes. A caller that wants direct I/O passes
    one whose address and length are multiples of `ALIGNMENT_BYTES`; any other is served too.
    """

    tier_type: ClassVar[str]
    """The word that configuration uses for this kind of tier."""
    probe_keys: ClassVar[int] = 1024
    """How many keys a question to `held_prefix` may hold.

    A tier that looks at each key answers 1024 within some 10 ms, and a longer prompt is asked for in parts.
    One that bisects pays for the logarithm alone, so it says more and has a prompt asked for at once:
    16,384 at most, which take an engine's thread over a millisecond to put into one question.
    """

    probe_threads: ClassVar[int] = 1
    """How many questions to `held_prefix` are worth asking side by side: several where each is a wait for a network."""

    def __init__(self, name: str) -> None:
        self.name = name
        """What errors, metrics and reports call this tier; unique within a ladder."""
        self._closed = False

    @abc.abstractmethod
    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        """Keep `buffer[:num_bytes]` under `key`; visible to others only when it is whole.

        A chunk is written once: a key that is already held is left as it is.

        Returns:
            The bytes really written; 0 where the tier already held the key.

        Raises:
            TierUnavailableError: nothing was kept, and nothing partial is left behind.
        """

    @abc.abstractmethod
    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        """Read the image under `key` into the start of `buffer`, which has room for `num_bytes`.

        Bytes of `buffer` past the image may be overwritten too.

        Returns:
            `num_bytes`: anything else is an error.

        Raises:
            ChunkMissingError: the key is not held.
            ChunkDamagedError: what is held is shorter or longer than `num_bytes`.
            TierUnavailableError: the tier could not be read.
        """

    @abc.abstractmethod
    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` are held.

        A tier on which each question is dear may bisect, taking it that a held key's predecessors
        are held: the load finds out. Asking neither pins a chunk nor makes it look used.

        Raises:
            TierUnavailableError: the tier could not be asked.
        """

    @abc.abstractmethod
    def delete(self, key: bytes) -> bool:
        """Drop one chunk; whether it was held.

        Raises:
            TierUnavailableError: the chunk may still be there.
        """

    @abc.abstractmethod
    def scan(self) -> Iterator[bytes]:
        """The keys held, in no order. Chunks stored or deleted meanwhile may or may not show.

        Raises:
            TierUnavailableError: the tier could not be listed.
        """

    def clear(self) -> int:
        """Drop every chunk of this tier's namespace; how many there were.

        Raises:
            TierUnavailableError: some chunks may still be there.
        """
        return sum(self.delete(key) for key in list(self.scan()))

    def take_evicted(self, max_keys: int | None = None) -> list[bytes]:
        """Keys that the tier dropped by itself, each told once, so that an index can forget them.

        At most `max_keys` of them, the oldest first; the others are for a later call. Unlike the
        methods that do I/O this one is called on an engine's thread, so it must return at once.
        """
        return []

    def usage(self) -> TierUsage:
        """A frozen snapshot of what the tier knows about its own use; never does I/O."""
        return TierUsage()

    def close(self) -> None:
        """Give back threads, descriptors and connections. Idempotent; the chunks stay."""
        self._closed = True

    def _check_open(self) -> None:
        """Raise `ClosedError` after `close`; for a tier's own methods."""
        if self._closed:
            raise ClosedError(f"tier {self.name!r} is closed")

    def _check_image(self, buffer: memoryview, num_bytes: int) -> None:
        """The same, and `ValueError` for an image that does not lie in its buffer."""
        self._check_open()
        if not 0 < num_bytes <= buffer.nbytes:
            raise ValueError(f"tier {self.name!r}: num_bytes is {num_bytes}, the buffer has {buffer.nbytes}")
