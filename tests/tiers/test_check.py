"""The conformance suite passes good tiers and catches broken ones."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from kvsluice.tiers.base import Tier
from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError
from kvsluice.tiers.reasons import IO_ERROR, MISSING, OVERSIZE, SHORT


class DictTier(Tier):
    """As small as a good tier can be."""

    tier_type: ClassVar[str] = "dict"

    def __init__(self) -> None:
        super().__init__("dict")
        self.chunks: dict[bytes, bytes] = {}

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        image = bytes(buffer[:num_bytes])
        return num_bytes if self.chunks.setdefault(key, image) is image else 0

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        image = self.chunks.get(key)
        if image is None:
            raise ChunkMissingError("missing", reason=MISSING)
        if len(image) != num_bytes:
            raise ChunkDamagedError("size", reason=SHORT if len(image) < num_bytes else OVERSIZE)
        buffer[:num_bytes] = image
        return num_bytes

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.chunks), len(keys))

    def delete(self, key: bytes) -> bool:
        return self.chunks.pop(key, None) is not None

    def scan(self) -> Iterator[bytes]:
        return iter(list(self.chunks))


def test_a_good_tier_passes_and_every_check_is_named():
    report = check_tier(DictTier, num_bytes=4097, persistent=False)
    assert report.tier_type == "dict"
    assert report.num_bytes == 4097
    assert not report.persistent
    assert {"round_trip", "visible_only_when_whole", "close"} <= set(report.checks)
    assert "outlives" not in report.checks


def test_a_good_persistent_tier_passes():
    chunks: dict[bytes, bytes] = {}

    class Shared(DictTier):
        def __init__(self) -> None:
            super().__init__()
            self.chunks = chunks

    report = check_tier(Shared, num_bytes=2)
    assert report.checks[-1] == "outlives"
    assert chunks == {}


class KeepsTheBuffer(DictTier):
    """Takes the caller's memory for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[bytes, memoryview] = {}

    def store(self, key, buffer, num_bytes):
        if key in self.chunks:
            return 0
        self.views[key] = buffer[:num_bytes]
        return super().store(key, buffer, num_bytes)

    def load(self, key, buffer, num_bytes):
        super().load(key, buffer, num_bytes)
        buffer[:num_bytes] = self.views[key]
        return num_bytes

    def delete(self, key):
        self.views.pop(key, None)
        return super().delete(key)


class ChangesTheBuffer(DictTier):
    def store(self, key, buffer, num_bytes):
        written = super().store(key, buffer, num_bytes)
        buffer[:num_bytes] = bytes(num_bytes)
        return written


class Overwrites(DictTier):
    def store(self, key, buffer, num_bytes):
        held = key in self.chunks
        self.chunks[key] = bytes(buffer[:num_bytes])
        return 0 if held else num_bytes


class SaysWrittenTwice(DictTier):
    def store(self, key, buffer, num_bytes):
        super().store(key, buffer, num_bytes)
        return num_bytes


class RoundsUp(DictTier):
    """Keeps whole pages, as a careless direct write does."""

    def load(self, key, buffer, num_bytes):
        image = self.chunks.get(key)
        if image is not None and len(image) < num_bytes <= -(-len(image) // 4096) * 4096:
            buffer[: len(image)] = image
            return num_bytes
        return super().load(key, buffer, num_bytes)


class CutsLongChunks(DictTier):
    def load(self, key, buffer, num_bytes):
        image = self.chunks.get(key, b"")
        if len(image) > num_bytes:
            buffer[:num_bytes] = image[:num_bytes]
            return num_bytes
        return super().load(key, buffer, num_bytes)


class MissIsAnotherError(DictTier):
    def load(self, key, buffer, num_bytes):
        try:
            return super().load(key, buffer, num_bytes)
        except ChunkMissingError as error:
            raise ChunkDamagedError("gone", reason=IO_ERROR) from error


class MissHasAnotherReason(DictTier):
    def load(self, key, buffer, num_bytes):
        try:
            return super().load(key, buffer, num_bytes)
        except ChunkMissingError as error:
            raise ChunkMissingError("gone", reason=IO_ERROR) from error


class CountsAllHeld(DictTier):
    def held_prefix(self, keys):
        return sum(key in self.chunks for key in keys)


class AsksTheLastKeyOnly(DictTier):
    def held_prefix(self, keys):
        return len(keys) if keys and keys[-1] in self.chunks else 0


class DeleteIsAlwaysTrue(DictTier):
    def delete(self, key):
        super().delete(key)
        return True


class DeleteHidesOnly(DictTier):
    """Forgets that it holds a chunk, and finds it again when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: dict[bytes, bytes] = {}

    def delete(self, key):
        if key in self.chunks:
            self.hidden[key] = self.chunks[key]
        return super().delete(key)

    def load(self, key, buffer, num_bytes):
        if key in self.hidden and key not in self.chunks:
            buffer[:num_bytes] = self.hidden[key]
            return num_bytes
        return super().load(key, buffer, num_bytes)


class ScanForgetsOne(DictTier):
    def scan(self):
        return iter(list(self.chunks)[:-1])

    def clear(self):
        count = len(self.chunks)
        self.chunks.clear()
        return count


class ClearForgetsOne(DictTier):
    def clear(self):
        keys = list(self.chunks)
        for key in keys[1:]:
            self.delete(key)
        return len(keys)


class CutsKeys(DictTier):
    def store(self, key, buffer, num_bytes):
        return super().store(key[:64], buffer, num_bytes)

    def load(self, key, buffer, num_bytes):
        return super().load(key[:64], buffer, num_bytes)

    def held_prefix(self, keys):
        return super().held_prefix([key[:64] for key in keys])

    def delete(self, key):
        return super().delete(key[:64])


class WritesPastTheBuffer(DictTier):
    def load(self, key, buffer, num_bytes):
        super().load(key, buffer, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        ctypes.memset(address + len(buffer), 0, 1)
        return num_bytes


class VisibleTooEarly(DictTier):
    """Gives the name first and the second half later: when somebody has looked, or soon."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()

    def store(self, key, buffer, num_bytes):
        if key in self.chunks:
            return 0
        whole = bytes(buffer[:num_bytes])
        self.looked.clear()
        self.chunks[key] = whole[: num_bytes // 2] + bytes(num_bytes - num_bytes // 2)
        if threading.current_thread() is not threading.main_thread():
            self.looked.wait(1.0)
        self.chunks[key] = whole
        return num_bytes

    def load(self, key, buffer, num_bytes):
        try:
            return super().load(key, buffer, num_bytes)
        finally:
            if key in self.chunks:
                self.looked.set()


class HeldTooEarly(DictTier):
    """Says that it holds what it is still storing, once it knows that somebody asks meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.storing: set[bytes] = set()
        self.is_asked = False
        self.looked = threading.Event()

    def store(self, key, buffer, num_bytes):
        self.looked.clear()
        self.storing.add(key)
        if self.is_asked:
            self.looked.wait(1.0)
        written = super().store(key, buffer, num_bytes)
        self.storing.discard(key)
        return written

    def held_prefix(self, keys):
        self.is_asked = threading.current_thread() is not threading.main_thread()
        return 1 if keys and keys[0] in self.storing else super().held_prefix(keys)

    def load(self, key, buffer, num_bytes):
        try:
            return super().load(key, buffer, num_bytes)
        finally:
            if key in self.storing:
                self.looked.set()


class SharesOneScratchBuffer(DictTier):
    """Two loads at once get one image."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = b""
        self.meeting = threading.Barrier(2)

    def load(self, key, buffer, num_bytes):
        super().load(key, buffer, num_bytes)
        self.scratch = bytes(buffer[:num_bytes])
        if threading.current_thread() is not threading.main_thread():
            try:
                self.meeting.wait(0.1)
            except threading.BrokenBarrierError:
                self.meeting.reset()
        if len(self.scratch) == num_bytes:
            buffer[:num_bytes] = self.scratch
        return num_bytes


class ClosesOnce(DictTier):
    closed = False

    def close(self):
        if self.closed:
            raise OSError("already closed")
        self.closed = True


class ReportsForEver(DictTier):
    def take_evicted(self, max_keys=None):
        return [b"k"]


BROKEN = {
    KeepsTheBuffer: "round_trip",
    ChangesTheBuffer: "round_trip",
    WritesPastTheBuffer: "round_trip",
    Overwrites: "written_once",
    SaysWrittenTwice: "written_once",
    RoundsUp: "wrong_size",
    CutsLongChunks: "wrong_size",
    MissIsAnotherError: "missing",
    MissHasAnotherReason: "missing",
    CountsAllHeld: "held_prefix",
    AsksTheLastKeyOnly: "held_prefix",
    DeleteIsAlwaysTrue: "missing",
    DeleteHidesOnly: "delete",
    ScanForgetsOne: "scan",
    ClearForgetsOne: "(written_once|held_prefix|delete|scan|clear)",
    CutsKeys: "keys",
    VisibleTooEarly: "one_key_many_writers",
    HeldTooEarly: "visible_only_when_whole",
    SharesOneScratchBuffer: "many_threads",
    ClosesOnce: "close",
    ReportsForEver: "reports",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_tier_is_caught_by_the_check_for_its_fault(broken):
    with pytest.raises(AssertionError, match=f"tier 'dict', check '{BROKEN[broken]}") as caught:
        check_tier(broken, num_bytes=4097, persistent=False)
    assert caught.value.__cause__ is not None


def test_a_tier_whose_chunks_die_with_it_is_not_persistent():
    tiers = [DictTier(), DictTier()]
    tiers[1].chunks = tiers[0].chunks
    waiting = iter([*tiers, DictTier()])
    with pytest.raises(AssertionError, match="check 'outlives'"):
        check_tier(lambda: next(waiting), num_bytes=4097)


def test_instances_that_do_not_see_each_other_are_not_persistent():
    with pytest.raises(AssertionError, match="check 'round_trip'"):
        check_tier(DictTier, num_bytes=4097)


def test_an_error_of_the_tier_names_the_check_and_is_chained():
    class Refuses(DictTier):
        def store(self, key, buffer, num_bytes):
            raise OSError("no such disk")

    with pytest.raises(AssertionError, match=r"check 'round_trip': raised OSError\('no such disk'\)") as caught:
        check_tier(Refuses, num_bytes=4097, persistent=False)
    assert isinstance(caught.value.__cause__, OSError)


def test_every_tier_that_was_made_is_closed_even_after_a_failure():
    made = []

    class Refuses(DictTier):
        closed = False

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def scan(self):
            raise OSError("no listing")

        def close(self):
            self.closed = True

    with pytest.raises(AssertionError):
        check_tier(Refuses, num_bytes=4097)
    assert [tier.closed for tier in made] == [True, True]


def test_a_chunk_of_one_byte_is_too_small_to_check_with():
    with pytest.raises(ValueError, match="num_bytes is 1"):
        check_tier(DictTier, num_bytes=1, persistent=False)
