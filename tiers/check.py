"""A conformance suite for tiers, a stranger's too: `check_tier(make_tier)`.

It needs no test framework and asks only what `kvsluice.tiers.base.Tier` promises. What a tier does
when its medium fails cannot be asked from outside: that stays for the tier's own tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvsluice.tiers.base import ALIGNMENT_BYTES, MAX_STORED_KEY_BYTES, Tier, TierUsage, round_up
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, TierError
from kvsluice.tiers.reasons import MISSING, OVERSIZE, SHORT

__all__ = ["CheckReport", "check_tier"]

_THREADS: Final = 8
_ROUNDS: Final = 8
_JOIN_S: Final = 60.0
"""A thread that is still inside the tier after this is taken to hang."""
_GUARD: Final = 0xA5


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was checked, all of it passed."""

    tier_type: str
    num_bytes: int
    persistent: bool
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Bench:
    tier: Tier
    other: Tier
    """Another instance over the same place; the same instance where the place dies with it."""
    num_bytes: int

    def sizes(self) -> list[int]:
        page = ALIGNMENT_BYTES
        wanted = {1, 2, page - 1, page, page + 1, self.num_bytes - 1, self.num_bytes}
        return sorted(size for size in wanted if 0 < size <= self.num_bytes)


def check_tier(make_tier: Callable[[], Tier], *, num_bytes: int = 65_537, persistent: bool = True) -> CheckReport:
    """Put a tier through everything that the interface promises.

    The tier's namespace is cleared, again and again: hand over an empty place of its own. It needs
    room for 16 chunks of `num_bytes` and must evict nothing meanwhile.

    Args:
        make_tier: called once or more. With `persistent` every tier it gives is over the same place.
        num_bytes: the largest chunk used, at least 2; odd sizes find more.
        persistent: whether the chunks outlive the tier object and are seen by others.

    Returns:
        The checks that were run, in order.

    Raises:
        ValueError: `num_bytes` is below 2.
        AssertionError: the tier broke a promise; the message names the check and what was seen.
    """
    if num_bytes < 2:
        raise ValueError(f"num_bytes is {num_bytes}: give at least 2")
    passed: list[str] = []
    tiers = [make_tier()]
    try:
        tiers.append(make_tier() if persistent else tiers[0])
        bench = _Bench(tiers[0], tiers[1], num_bytes)
        passed.extend(_run(check, bench) for check in _CHECKS)
        if persistent:
            tiers.append(make_tier())
            passed.append(_run(_check_outlives, _Bench(tiers[-1], tiers[-1], num_bytes)))
            tiers[-1].close()
    except BaseException:
        for tier in tiers:
            # What went wrong first is what is shown.
            with contextlib.suppress(Exception):
                tier.close()
        raise
    return CheckReport(tiers[0].tier_type, num_bytes, persistent, tuple(passed))


def _run(check: Callable[[_Bench], None], bench: _Bench) -> str:
    name = check.__name__.removeprefix("_check_")
    try:
        check(bench)
    except AssertionError as error:
        raise AssertionError(f"tier {bench.tier.name!r}, check {name!r}: {error}") from error
    except Exception as error:
        raise AssertionError(f"tier {bench.tier.name!r}, check {name!r}: raised {error!r}") from error
    return name


def _expect(seen: object, wanted: object, what: str) -> None:
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r}, must be {wanted!r}")


def _raises(kind: type[TierError], reason: str, call: Callable[[], object], what: str) -> None:
    try:
        result = call()
    except TierError as error:
        if not isinstance(error, kind):
            raise AssertionError(f"{what} raised {error!r}, must raise {kind.__name__}") from error
        _expect(error.reason, reason, f"the reason of {what}")
    else:
        raise AssertionError(f"{what} gave {result!r}, must raise {kind.__name__}")


def _key(index: int, num_bytes: int = 34) -> bytes:
    return hashlib.shake_128(b"key %d" % index).digest(num_bytes)


def _image(seed: int, num_bytes: int) -> bytes:
    return hashlib.shake_128(b"image %d" % seed).digest(num_bytes)


def _buffer(num_bytes: int, offset: int = 0) -> memoryview:
    """Zeros whose first byte lies `offset` bytes past a page boundary."""
    return memoryview(mmap.mmap(-1, round_up(offset + num_bytes)))[offset : offset + num_bytes]


def _filled(image: bytes, offset: int = 0, room_bytes: int | None = None) -> memoryview:
    buffer = _buffer(room_bytes or len(image), offset)
    buffer[: len(image)] = image
    return buffer


def _store(tier: Tier, key: bytes, image: bytes) -> int:
    return tier.store(key, _filled(image), len(image))


def _load(tier: Tier, key: bytes, num_bytes: int, offset: int = 0, room_bytes: int | None = None) -> bytes:
    """What the tier has under `key`, proving that nothing is written past the buffer."""
    room = room_bytes or num_bytes
    memory = _buffer(room + ALIGNMENT_BYTES, offset)
    memory[:] = bytes([_GUARD]) * len(memory)
    _expect(tier.load(key, memory[:room], num_bytes), num_bytes, "load returned")
    if memory[room:] != bytes([_GUARD]) * ALIGNMENT_BYTES:
        raise AssertionError(f"load wrote past the end of a buffer of {room} bytes")
    return bytes(memory[:num_bytes])


def _expect_image(seen: bytes, wanted: bytes, what: str) -> None:
    if seen != wanted:
        at = next(
            (i for i, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), min(len(seen), len(wanted))
        )
        raise AssertionError(f"{what}: other bytes than were stored, the first at {at} of {len(wanted)}")


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Run all calls at once, each on a thread; the first failure is raised."""
    gate = threading.Barrier(len(calls))
    failures: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        gate.wait()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, on the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_JOIN_S)
        if thread.is_alive():
            raise AssertionError(f"a thread is still inside the tier after {_JOIN_S} s")
    if failures:
        raise failures[0]


def _check_missing(bench: _Bench) -> None:
    tier, key = bench.tier, _key(0)
    tier.clear()
    _raises(ChunkMissingError, MISSING, lambda: tier.load(key, _buffer(8), 8), "load of a missing key")
    _expect(tier.held_prefix([key]), 0, "held_prefix of a missing key")
    _expect(tier.delete(key), False, "delete of a missing key")


def _check_round_trip(bench: _Bench) -> None:
    bench.tier.clear()
    for index, size in enumerate(bench.sizes()):
        for offset in (0, 1):
            for room in (size, round_up(size)):
                what = f"{size} bytes in a buffer of {room} at offset {offset}"
                image = _image(index, size)
                source = _filled(image, offset, room)
                _expect(bench.tier.store(_key(index), source, size), size, f"store of {what} returned")
                _expect_image(bytes(source[:size]), image, f"the caller's buffer after a store of {what}")
                # The caller uses its buffer again at once.
                source[:] = bytes(len(source))
                for tier in (bench.tier, bench.other):
                    _expect_image(_load(tier, _key(index), size, offset, room), image, f"load of {what}")
                _expect(bench.tier.delete(_key(index)), True, f"delete of {what}")


def _check_written_once(bench: _Bench) -> None:
    size = bench.num_bytes
    bench.tier.clear()
    first, second = _image(1, size), _image(2, size)
    _expect(_store(bench.tier, _key(0), first), size, "the first store returned")
    _expect(_store(bench.tier, _key(0), second), 0, "the second store of a key returned")
    _expect(_store(bench.other, _key(0), second), 0, "a store of a key that another instance stored returned")
    _expect_image(_load(bench.tier, _key(0), size), first, "a key stored twice")


def _check_held_prefix(bench: _Bench) -> None:
    bench.tier.clear()
    keys = [_key(index) for index in range(6)]
    for held in range(len(keys) + 1):
        for count in range(len(keys) + 1):
            seen = bench.other.held_prefix(keys[:count])
            _expect(seen, min(held, count), f"held_prefix of {count} keys, the first {held} held,")
        if held < len(keys):
            _store(bench.tier, keys[held], _image(held, 64 if bench.num_bytes >= 64 else 1))
    bench.tier.delete(keys[0])
    _expect(bench.tier.held_prefix(keys), 0, "held_prefix whose first key was deleted")


def _check_delete(bench: _Bench) -> None:
    size = bench.num_bytes
    bench.tier.clear()
    for index in range(2):
        _store(bench.tier, _key(index), _image(index, size))
    _expect(bench.tier.delete(_key(0)), True, "delete of a held key")
    _expect(bench.tier.delete(_key(0)), False, "delete of a deleted key")
    _raises(ChunkMissingError, MISSING, lambda: bench.other.load(_key(0), _buffer(size), size), "load of a deleted key")
    _expect_image(_load(bench.tier, _key(1), size), _image(1, size), "the chunk beside a deleted one")
    _expect(_store(bench.tier, _key(0), _image(7, size)), size, "store of a deleted key returned")
    _expect_image(_load(bench.tier, _key(0), size), _image(7, size), "a key stored anew")


def _check_scan(bench: _Bench) -> None:
    bench.tier.clear()
    _expect(list(bench.tier.scan()), [], "scan of an empty tier")
    keys = [_key(index) for index in range(6)]
    for index, key in enumerate(keys):
        _store(bench.tier, key, _image(index, 1))
    _expect(sorted(bench.tier.scan()), sorted(keys), "scan")
    bench.tier.delete(keys[0])
    _expect(sorted(bench.other.scan()), sorted(keys[1:]), "scan after a delete")


def _check_clear(bench: _Bench) -> None:
    bench.tier.clear()
    keys = [_key(index) for index in range(6)]
    for index, key in enumerate(keys):
        _store(bench.tier, key, _image(index, 1))
    _expect(bench.tier.clear(), len(keys), "clear returned")
    _expect([bench.other.held_prefix([key]) for key in keys], [0] * len(keys), "held_prefix after clear")
    _expect(list(bench.tier.scan()), [], "scan after clear")
    _expect(bench.tier.clear(), 0, "clear of an empty tier returned")
    _expect(_store(bench.tier, keys[0], _image(9, 1)), 1, "store after clear returned")
    _expect_image(_load(bench.tier, keys[0], 1), _image(9, 1), "a chunk stored after clear")


def _check_wrong_size(bench: _Bench) -> None:
    size = bench.num_bytes
    bench.tier.clear()
    _store(bench.tier, _key(0), _image(0, size))
    for wanted, reason in ((size + 1, SHORT), (2 * size, SHORT), (size - 1, OVERSIZE), (1, OVERSIZE)):
        for room in (wanted, round_up(wanted)):
            call = partial(bench.tier.load, _key(0), _buffer(room), wanted)
            _raises(ChunkDamagedError, reason, call, f"load of {wanted} bytes where {size} are held")
    _expect_image(_load(bench.tier, _key(0), size), _image(0, size), "a chunk once asked for with another size")


def _check_keys(bench: _Bench) -> None:
    bench.tier.clear()
    longest = MAX_STORED_KEY_BYTES
    keys = [_key(0, size) for size in (1, 2, 20, 32, 64, longest - 1, longest)]
    keys += [b"\0", b"\0\0", b"/", b"../..", b"\xff" * longest, b"\xff" * (longest - 1) + b"\xfe"]
    for index, key in enumerate(keys):
        _expect(_store(bench.tier, key, _image(index, 1 + index % 2)), 1 + index % 2, f"store under {key!r} returned")
    for index, key in enumerate(keys):
        _expect_image(_load(bench.other, key, 1 + index % 2), _image(index, 1 + index % 2), f"load under {key!r}")
    _expect(sorted(bench.tier.scan()), sorted(keys), "scan of keys of all lengths")


def _check_many_threads(bench: _Bench) -> None:
    size = bench.num_bytes
    bench.tier.clear()
    shared = _image(99, size)
    _store(bench.tier, _key(99), shared)

    def work(index: int) -> None:
        tier = bench.tier if index % 2 else bench.other
        for turn in range(_ROUNDS):
            image = _image(index * _ROUNDS + turn, size)
            _expect(_store(tier, _key(index), image), size, "store beside other threads returned")
            _expect_image(_load(tier, _key(index), size), image, "a chunk stored beside other threads")
            _expect_image(_load(tier, _key(99), size), shared, "a chunk loaded by many threads")
            _expect(tier.delete(_key(index)), True, "delete beside other threads")

    _together([partial(work, index) for index in range(_THREADS)])


def _check_one_key_many_writers(bench: _Bench) -> None:
    size = bench.num_bytes

    def work(index: int, written: list[int], seen: list[bytes]) -> None:
        tier = bench.tier if index % 2 else bench.other
        written.append(_store(tier, _key(0), _image(index, size)))
        # Whoever was first, what is there now is whole and stays.
        seen.append(_load(tier, _key(0), size))

    for _ in range(_ROUNDS):
        bench.tier.clear()
        written: list[int] = []
        seen: list[bytes] = []
        _together([partial(work, index, written, seen) for index in range(_THREADS)])
        if not set(written) <= {0, size} or size not in written:
            raise AssertionError(f"stores of one key gave {written}, must be {size} for who wrote and 0 for the rest")
        if seen[-1] not in [_image(index, size) for index in range(_THREADS)]:
            raise AssertionError("a key with many writers holds a mix of their bytes")
        _expect(len(set(seen)), 1, "the number of different images that one key was seen with")


def _check_visible_only_when_whole(bench: _Bench) -> None:
    size = bench.num_bytes

    def write(key: bytes, image: bytes, stored: threading.Event) -> None:
        try:
            _store(bench.tier, key, image)
        finally:
            stored.set()

    def read(key: bytes, image: bytes, stored: threading.Event) -> None:
        while True:
            # Asked in this order: what was stored, or held, before the load must be there.
            last = stored.is_set()
            held = bench.other.held_prefix([key]) == 1
            try:
                _expect_image(_load(bench.other, key, size), image, "a chunk seen while it was stored")
            except ChunkMissingError as error:
                if held or last:
                    raise AssertionError("a chunk that was held, or stored, is missing") from error
            except ChunkDamagedError as error:
                raise AssertionError(f"a chunk was seen before it was whole: {error}") from error
            else:
                return

    bench.tier.clear()
    for turn in range(_ROUNDS):
        key, image, stored = _key(turn), _image(turn, size), threading.Event()
        _together([partial(write, key, image, stored), partial(read, key, image, stored)])
        bench.tier.delete(key)


def _check_reports(bench: _Bench) -> None:
    bench.tier.clear()
    _store(bench.tier, _key(0), _image(0, 1))
    use = bench.tier.usage()
    if not isinstance(use, TierUsage):
        raise AssertionError(f"usage returned {use!r}, must be a TierUsage")
    for word, value in (("chunks", use.chunks), ("used_bytes", use.used_bytes), ("capacity_bytes", use.capacity_bytes)):
        if value is not None and value < 1:
            raise AssertionError(f"usage says {word}={value} while a chunk is held")
    bench.tier.take_evicted()
    _expect(bench.tier.take_evicted(), [], "take_evicted, called a second time,")


def _check_close(bench: _Bench) -> None:
    bench.tier.clear()
    _store(bench.tier, _key(0), _image(0, bench.num_bytes))
    for tier in (bench.tier, bench.other):
        tier.close()
        tier.close()


def _check_outlives(bench: _Bench) -> None:
    _expect_image(_load(bench.tier, _key(0), bench.num_bytes), _image(0, bench.num_bytes), "a chunk after close")
    bench.tier.clear()


_CHECKS: Final[tuple[Callable[[_Bench], None], ...]] = (
    _check_missing,
    _check_round_trip,
    _check_written_once,
    _check_held_prefix,
    _check_delete,
    _check_scan,
    _check_clear,
    _check_wrong_size,
    _check_keys,
    _check_many_threads,
    _check_one_key_many_writers,
    _check_visible_only_when_whole,
    _check_reports,
    _check_close,
)
