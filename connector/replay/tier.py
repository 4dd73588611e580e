"""A modelled tier: which chunks it holds, who may ask, what it drops. The bytes are the device's matter.

Content and device may belong to one node or be shared by many. A chunk can be read from the moment its
write has ended, as in the real tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from kvsluice.connector.prober import Answer
from kvsluice.connector.replay.device import Device
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.tiers import reasons
from kvsluice.tiers.eviction import Coldest, is_overfull, surplus_bytes

__all__ = ["ModelledProber", "ModelledTier", "TierContent"]


class TierContent:
    """The chunks of one tier, all of one size, and when each was last used.

    Eviction is the filesystem tier's rule, and takes no time here.

    Args:
        chunk_bytes: what each chunk takes.
        capacity_bytes: None for no limit.
        clock: seconds; reads and writes are stamped with it.
        given: keys that it holds from the start on, for ever and at no cost.
    """

    def __init__(
        self,
        chunk_bytes: int,
        *,
        capacity_bytes: int | None = None,
        clock: Callable[[], float],
        given: AbstractSet[bytes] = frozenset(),
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._given = given
        self._used_s: dict[bytes, float] = {}
        self._reserved = 0
        self.evicted_chunks = 0
        self.chunks_read = 0
        self.chunks_written = 0

    def holds(self, key: bytes) -> bool:
        return key in self._used_s or key in self._given

    def note_hit(self, key: bytes) -> None:
        """It was read: it is hot."""
        if key in self._used_s:
            self._used_s[key] = self._clock()

    def reserve(self) -> bool:
        """Room for one chunk that is about to be written; False where the tier refuses it."""
        if self.capacity_bytes is not None and is_overfull(self.used_bytes, self.capacity_bytes):
            return False
        self._reserved += 1
        return True

    def keep(self, key: bytes) -> tuple[bool, list[bytes]]:
        """The chunk that was reserved for is whole: whether it is new, and what had to give way."""
        self._reserved -= 1
        if key in self._used_s:
            return False, []
        self._used_s[key] = self._clock()
        self.chunks_written += 1
        return True, self._evict()

    def _evict(self) -> list[bytes]:
        if self.capacity_bytes is None:
            return []
        wanted_bytes = surplus_bytes(self.used_bytes, self.capacity_bytes)
        if not wanted_bytes:
            return []
        coldest: Coldest[bytes] = Coldest(wanted_bytes)
        for key, used_s in self._used_s.items():
            coldest.add(key, name=key.hex(), used_s=used_s, num_bytes=self._chunk_bytes)
        gone = coldest.coldest_first()
        for key in gone:
            del self._used_s[key]
        self.evicted_chunks += len(gone)
        return gone

    @property
    def used_bytes(self) -> int:
        return (len(self._used_s) + self._reserved) * self._chunk_bytes


class ModelledTier:
    """One node's view of a tier: the content and the device, and the evictions that this node caused.

    As with several processes on one root, only who evicts a chunk learns of it.
    """

    def __init__(self, content: TierContent, device: Device, chunk_bytes: int) -> None:
        self.content = content
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._evicted: deque[bytes] = deque()

    def store(self, key: bytes, done: Callable[[int, str | None], None]) -> None:
        """Write one chunk; `done` is told the bytes really written and why not, as `Tier.store` says."""
        if self.content.holds(key):
            self._device.submit(0, partial(done, 0, None))
        elif self.content.reserve():
            self._device.submit(self._chunk_bytes, partial(self._stored, key, done))
        else:
            self._device.submit(0, partial(done, 0, reasons.DISK_FULL))

    def _stored(self, key: bytes, done: Callable[[int, str | None], None]) -> None:
        is_new, evicted = self.content.keep(key)
        self._evicted.extend(evicted)
        done(self._chunk_bytes if is_new else 0, None)

    def load(self, key: bytes, done: Callable[[int, str | None], None]) -> None:
        """Read one chunk; `done` is told the bytes that came and why not, as `Tier.load` says."""
        # A file that is open is read to its end even where it is evicted meanwhile.
        if self.content.holds(key):
            self.content.note_hit(key)
            self._device.submit(self._chunk_bytes, partial(self._loaded, done))
        else:
            self._device.submit(0, partial(done, 0, reasons.MISSING))

    def _loaded(self, done: Callable[[int, str | None], None]) -> None:
        self.content.chunks_read += 1
        done(self._chunk_bytes, None)

    def take_evicted(self, max_keys: int) -> list[bytes]:
        return [self._evicted.popleft() for _ in range(min(max_keys, len(self._evicted)))]


class ModelledProber:
    """Answers the planner's questions as `Prober` does: per tier one after another, each taking a while.

    A question is one operation without bytes on the tier's device, so that a tier that hangs answers
    nothing; `question_s` comes on top, for what many keys cost.
    """

    def __init__(
        self,
        contents: Mapping[int, TierContent],
        devices: Mapping[int, Device],
        timeline: Timeline,
        *,
        question_s: float = 0.0,
        max_waiting: int = 64,
    ) -> None:
        self._contents = contents
        self._devices = devices
        self._timeline = timeline
        self._question_s = question_s
        self._max_waiting = max_waiting
        self._round = 0
        self._answers: list[Answer] = []
        self._questions: dict[int, deque[tuple[int, tuple[bytes, ...]]]] = {at: deque() for at in contents}

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        questions = self._questions[tier]
        if len(questions) >= self._max_waiting:
            return False
        questions.append((self._round, keys))
        if len(questions) == 1:
            self._put(tier)
        return True

    def answers(self) -> list[Answer]:
        if not self._answers:
            return []
        arrived, self._answers = self._answers, []
        return [answer for answer in arrived if answer.round == self._round]

    def listed(self) -> None:
        """A modelled tier is not listed."""

    def forget(self) -> None:
        self._round += 1

    def _put(self, tier: int) -> None:
        self._timeline.after(self._question_s, partial(self._devices[tier].submit, 0, partial(self._answer, tier)))

    def _answer(self, tier: int) -> None:
        asked, keys = self._questions[tier].popleft()
        held = self._held_prefix(self._contents[tier], keys)
        self._answers.append(Answer(asked, tier, keys, held, None))
        if self._questions[tier]:
            self._put(tier)

    @staticmethod
    def _held_prefix(content: TierContent, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if not content.holds(key)), len(keys))
