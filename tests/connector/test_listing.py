"""A tier listed at start: what counts as held, and how the listing ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest
from bench import blocks_of, make_key, sluice_threads
from doubles import PATIENCE_S, Clock, Hold, MemoryTier, until

from kvsluice.connector import Lookup
from kvsluice.connector.listing import LISTED_AT_ONCE, Listed, TierListing
from kvsluice.connector.prober import PartNames, Prober
from kvsluice.tiers import TierUnavailableError, reasons
from kvsluice.tiers.chunk_file import stored_key

KEYS = [make_key(number) for number in range(3000)]
WAIT_S = 20.0
OBJ = {"type": "obj", "bucket": "unused"}
"""A double stands in for it."""


class ScannedTier(MemoryTier):
    """Lists what the test says, and lets the test look on."""

    tier_type: ClassVar[str] = "scanned"

    def __init__(self, names: Iterable[bytes], between: Callable[[], None] = lambda: None) -> None:
        super().__init__("obj")
        self._scanned = names
        self._between = between

    def scan(self) -> Iterator[bytes]:
        for name in self._scanned:
            yield name
            self._between()


def listed(prober: Prober) -> list[bytes]:
    found: list[bytes] = []
    while (batch := prober.listed()) is not None:
        assert len(batch.keys) <= LISTED_AT_ONCE
        found += batch.keys
    return found


def is_over() -> bool:
    """Whether the tier called obj is not being listed any more."""
    return "kvsluice-list-obj" not in sluice_threads()


def list_all(tier: MemoryTier, *, num_ranks: int = 1, limit_s: float = 1e9, clock: Clock | None = None) -> list[bytes]:
    """What a prober learns from a listing that ends by itself."""
    prober = Prober({3: tier}, num_ranks=num_ranks, listing_times_s={3: limit_s}, clock=clock or Clock())
    until(lambda: None, is_over)
    found = listed(prober)
    assert prober.close(PATIENCE_S, Clock()) == []
    return found


def test_every_chunk_of_the_tier_is_told_of_once_in_bounded_batches():
    found = list_all(ScannedTier(stored_key(key, 0, 0) for key in KEYS))
    assert found == KEYS


def test_a_chunk_counts_only_when_the_parts_of_all_ranks_of_its_group_are_there():
    names = [
        *(stored_key(KEYS[0], 0, rank) for rank in range(3)),
        *(stored_key(KEYS[1], 0, rank) for rank in (0, 2)),
        *(stored_key(KEYS[2], 0, rank) for rank in (2, 2, 0, 0, 2, 1)),
        *(stored_key(KEYS[3], 1, rank) for rank in range(3)),
        *(stored_key(KEYS[4], 0, rank) for rank in (0, 1, 3)),
    ]
    assert list_all(ScannedTier(names), num_ranks=3) == [KEYS[0], KEYS[2]]


def test_names_that_no_connector_gives_are_left_alone():
    names = [b"", b"\0", bytes(4), bytes(3), stored_key(bytes(65), 0, 0), b"namespace", stored_key(KEYS[0], 0, 0)]
    assert list_all(ScannedTier(names)) == [KEYS[0]]


def test_a_listing_ends_when_its_time_is_up_and_what_it_found_until_then_is_good(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    tier = ScannedTier((stored_key(key, 0, 0) for key in KEYS), lambda: clock.advance(0.5))
    assert list_all(tier, limit_s=2.0, clock=clock) == KEYS[:4]
    assert "tier obj: listed 4 chunks in 2.00 s: the time was up" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (TierUnavailableError("503 SlowDown", reason=reasons.IO_ERROR), logging.WARNING),
        (RuntimeError("a bug"), logging.ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_listing_that_fails_is_logged_once_and_what_it_found_until_then_is_good(caplog, error, level):
    def fail() -> Iterator[bytes]:
        yield from (stored_key(key, 0, 0) for key in KEYS[:2])
        raise error

    assert list_all(ScannedTier(fail())) == KEYS[:2]
    [record] = caplog.records
    assert record.levelno == level
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) == (level == logging.ERROR)


def test_a_listing_remembers_no_more_than_it_may():
    told: list[Listed] = []

    def run(names: Iterable[bytes], num_ranks: int) -> list[bytes]:
        told.clear()
        listing = TierListing(
            0,
            ScannedTier(names),
            told.append,
            group=0,
            num_ranks=num_ranks,
            limit_s=1e9,
            max_keys=5,
            clock=Clock(),
        )
        listing.thread.join(PATIENCE_S)
        assert not listing.thread.is_alive()
        return [key for batch in told for key in batch.keys]

    assert run((stored_key(key, 0, 0) for key in KEYS), 1) == KEYS[:5]
    first_parts = [stored_key(key, 0, 0) for key in KEYS[:5]]
    assert run([*first_parts, *(stored_key(key, 0, 1) for key in KEYS[:5])], 2) == []


def test_a_reset_stops_a_listing_and_makes_what_it_found_worthless():
    hold = Hold()
    names = (stored_key(key, 0, 0) for key in KEYS)
    seen = 0

    def between() -> None:
        nonlocal seen
        seen += 1
        if seen == LISTED_AT_ONCE + 10:
            hold()

    prober = Prober({0: ScannedTier(names, between)}, listing_times_s={0: 1e9}, clock=Clock())
    hold.wait_for()
    prober.forget()
    assert prober.listed() is None
    hold.open()
    until(lambda: None, is_over)
    assert prober.listed() is None
    assert seen == LISTED_AT_ONCE + 10, "not one key more"
    assert prober.close(PATIENCE_S, Clock()) == []


def test_a_tier_that_hangs_while_it_is_listed_still_answers_and_others_are_listed():
    hanging, fine = MemoryTier("obj"), ScannedTier([stored_key(KEYS[0], 0, 0)])
    fine.name = "obj-2"
    hanging.images[stored_key(KEYS[1], 0, 0)] = b"x"
    hold = hanging.hold("scan")
    prober = Prober({0: hanging, 1: fine}, listing_times_s={0: 1.0, 1: 1.0})
    hold.wait_for()
    found: list[bytes] = []
    until(lambda: found.extend(listed(prober)), lambda: found == KEYS[:1])
    assert prober.ask(0, (KEYS[1],))
    answers = []
    until(lambda: answers.extend(prober.answers()), lambda: bool(answers))
    assert answers[0].held == 1
    assert "kvsluice-list-obj" in prober.close(0.0, Clock())
    hold.open()
    assert prober.close(PATIENCE_S, Clock()) == []
    assert prober.listed() is None, "it was told to stop"


def test_without_a_time_no_tier_is_listed():
    tier = MemoryTier()
    prober = Prober({0: tier})
    assert prober.close(PATIENCE_S, Clock()) == []
    assert tier.calls == []


@pytest.mark.parametrize("rank", [0, 7])
def test_the_names_of_a_ranks_parts_are_those_of_the_chunk_file(rank):
    names = PartNames(KEYS[:5], 2, rank)
    wanted = [stored_key(key, 2, rank) for key in KEYS[:5]]
    assert list(names) == wanted
    assert len(names) == 5
    assert [names[at] for at in (0, 4, -1)] == [wanted[0], wanted[4], wanted[-1]]
    assert names[1:3] == wanted[1:3]
    with pytest.raises(IndexError):
        names[5]


# ---- in a connector ----------------------------------------------------------------------------


def test_what_another_engine_stored_is_known_at_start_and_no_lookup_asks(bench, cache, keys):
    obj = bench.double("obj")
    with bench.connect(OBJ) as first:
        first.wait([first.store(keys[:3], blocks_of(0, 1, 2))], WAIT_S)
    second = bench.connect(OBJ)
    asked = obj.count("held_prefix")
    until(second.poll, lambda: second.stats().tiers["obj"].known_chunks == 3)
    assert second.lookup(keys[:3]) == Lookup(3, False)
    assert obj.count("held_prefix") == asked
    cache.blank()
    second.wait([second.load(keys[:3], blocks_of(4, 5, 6))], WAIT_S)
    assert cache.holds(blocks_of(4, 5, 6), blocks_of(0, 1, 2))
    until(lambda: None, is_over)


def test_a_listing_that_hangs_holds_up_nothing_and_is_named_at_close(bench, keys):
    obj = bench.double("obj")
    hold = obj.hold("scan")
    connector = bench.connect(OBJ)
    hold.wait_for()
    connector.wait([connector.store(keys[:2], blocks_of(0, 1))], WAIT_S)
    assert connector.lookup(keys[:2]) == Lookup(2, False)
    bench.hung.add("kvsluice-list-obj")
    assert connector.close(timeout_s=0.2) == ["kvsluice-list-obj"]


def test_a_listing_of_before_a_reset_is_not_used(bench, keys):
    hold = Hold()
    bench.tiers["obj"] = ScannedTier([stored_key(key, 0, 0) for key in keys[:3]], hold)
    connector = bench.connect(OBJ)
    hold.wait_for()
    assert connector.reset() == {}
    hold.open()
    until(connector.poll, is_over)
    connector.poll()
    assert connector.stats().tiers["obj"].known_chunks == 0
    until(lambda: None, lambda: not connector.lookup(keys[:3]).pending)
    assert connector.lookup(keys[:3]) == Lookup(0, False)


def test_a_listing_can_be_switched_off(bench, keys):
    obj = bench.double("obj")
    connector = bench.connect({**OBJ, "list_at_start_s": 0})
    connector.wait([connector.store(keys[:1], blocks_of(0))], WAIT_S)
    assert obj.count("scan") == 0
