"""What is believed of one tier: for how long, in which order it is forgotten, what may overrule what."""

from __future__ import annotations

import sys
from itertools import islice

import pytest
from bench import make_key
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.connector.index import UNKNOWN_TTL_S, TierIndex

KEYS = [make_key(number) for number in range(64)]
MANY = 200_000


def test_an_index_forgets_what_it_has_known_longest_and_stays_bounded():
    index = TierIndex(5.0, max_held=3, max_absent=2)
    for key in KEYS[:5]:
        index.add(key)
    assert [index.holds(key) for key in KEYS[:5]] == [False, False, True, True, True]
    for key in KEYS[:5]:
        index.remove(key, 0.0)
    assert len(index) == 0
    assert [index.lacks(key, 4.9) for key in KEYS[:5]] == [False, False, False, True, True]
    assert not index.lacks(KEYS[4], 5.0)


def test_doubts_are_bounded_as_well():
    index = TierIndex(5.0, max_absent=2)
    for key in KEYS[:3]:
        index.doubt(key, 0.0)
    assert [index.lacks(key, 0.5) for key in KEYS[:3]] == [False, True, True]


@pytest.mark.parametrize(("negative_ttl_s", "doubt_s"), [(5.0, UNKNOWN_TTL_S), (0.25, 0.25)])
def test_what_nobody_could_tell_is_believed_for_a_shorter_time_than_what_the_tier_denied(negative_ttl_s, doubt_s):
    index = TierIndex(negative_ttl_s)
    for key in KEYS[:2]:
        index.add(key)
    index.remove(KEYS[0], 10.0)
    index.doubt(KEYS[1], 10.0)
    assert not index.holds(KEYS[0])
    assert not index.holds(KEYS[1])
    assert index.lacks(KEYS[0], 10.0 + negative_ttl_s - 0.01)
    assert not index.lacks(KEYS[0], 10.0 + negative_ttl_s)
    assert index.lacks(KEYS[1], 10.0 + doubt_s - 0.01)
    assert not index.lacks(KEYS[1], 10.0 + doubt_s)


@pytest.mark.parametrize("proof_first", [True, False])
def test_a_proof_counts_for_its_whole_time_whether_a_doubt_comes_before_or_after_it(proof_first):
    index = TierIndex(5.0)
    for is_proof in (proof_first, not proof_first):
        (index.remove if is_proof else index.doubt)(KEYS[0], 0.0)
    assert index.lacks(KEYS[0], 4.9)


def test_what_we_stored_or_loaded_ourselves_overrules_everything():
    index = TierIndex(5.0)
    index.remove(KEYS[0], 0.0)
    index.doubt(KEYS[1], 0.0)
    for key in KEYS[:2]:
        index.add(key)
        assert index.holds(key)
        assert not index.lacks(key, 0.1)


def test_an_answer_overrules_a_doubt_and_an_old_denial_but_not_a_fresh_one():
    index = TierIndex(5.0)
    index.remove(KEYS[0], 0.0)
    index.remove(KEYS[1], 2.0)
    index.doubt(KEYS[2], 5.0)
    index.add_answered(tuple(KEYS[:4]), 5.5)
    assert [index.holds(key) for key in KEYS[:4]] == [True, False, True, True]
    assert [index.lacks(key, 5.5) for key in KEYS[:4]] == [False, True, False, False]


def test_a_listing_overrules_nothing_however_old():
    index = TierIndex(5.0)
    index.remove(KEYS[0], 0.0)
    index.doubt(KEYS[1], 0.0)
    index.add_listed(tuple(KEYS[:3]))
    assert [index.holds(key) for key in KEYS[:3]] == [False, False, True]


def test_a_listing_pushes_nothing_out_and_ends_at_the_limit():
    index = TierIndex(5.0, max_held=4)
    for key in KEYS[:3]:
        index.add(key)
    index.add_listed(tuple(KEYS[2:8]))
    assert [index.holds(key) for key in KEYS[:8]] == [True] * 4 + [False] * 4
    index.add_listed(tuple(KEYS[8:10]))
    assert len(index) == 4
    index.add(KEYS[10])
    assert [index.holds(key) for key in (KEYS[0], KEYS[1], KEYS[10])] == [False, True, True]


def test_held_keys_are_counted_up_to_the_first_gap_or_the_next_that_is_held_above():
    index = TierIndex(5.0)
    index.add_answered(tuple(KEYS[:8]), 0.0)
    index.remove(KEYS[6], 0.0)
    assert index.count_held(KEYS, 0, ()) == 6
    assert index.count_held(KEYS, 4, ()) == 2
    assert index.count_held(KEYS, 6, ()) == 0
    assert index.count_held(KEYS[:3], 1, ()) == 2
    assert index.count_held(KEYS[:3], 3, ()) == 0
    # The first key was asked for above already.
    assert index.count_held(KEYS, 1, [lambda key: key in (KEYS[1], KEYS[4])]) == 3


def test_what_was_told_or_listed_is_hearsay_until_we_have_it_from_ourselves():
    index = TierIndex(5.0)
    index.add(KEYS[0])
    index.add_answered(tuple(KEYS[:2]), 0.0)
    index.add_listed(tuple(KEYS[:3]))
    assert [index.knows_by_hearsay(key) for key in KEYS[:4]] == [False, True, True, False]
    index.add(KEYS[1])
    index.remove(KEYS[2], 0.0)
    assert not any(index.knows_by_hearsay(key) for key in KEYS[:4])


@pytest.mark.parametrize("add", [TierIndex.add_listed, lambda index, keys: index.add_answered(keys, 0.0)])
def test_a_large_index_never_has_much_to_copy_in_one_call(add):
    index = TierIndex(5.0)
    shards = index._shards  # noqa: SLF001 - how much is copied shows nowhere else but in time
    sizes = list(map(sys.getsizeof, shards))
    numbers = iter(range(MANY))
    while batch := tuple(make_key(number) for number in islice(numbers, 1024)):
        add(index, batch)
        before, sizes = sizes, list(map(sys.getsizeof, shards))
        if len(index) > MANY // 4:
            grown = sum(now for was, now in zip(before, sizes, strict=True) if now != was)
            assert grown <= sum(sizes) / 8, f"at {len(index)} keys"
    assert len(index) == MANY
    assert index.count_held([make_key(number) for number in range(MANY)], 0, ()) == MANY


def test_a_large_index_stays_within_its_limit_and_always_knows_the_newest():
    index = TierIndex(5.0, max_held=70_000)
    newest: tuple[bytes, ...] = ()
    numbers = iter(range(100_000))
    while newest := tuple(make_key(number) for number in islice(numbers, 1000)):
        index.add_answered(newest, 0.0)
        assert len(index) <= 70_000
        assert index.count_held(newest, 0, ()) == 1000
    assert len(index) > 69_900, "it makes room for a few at once, and no more"
    oldest = [make_key(number) for number in range(10_000)]
    assert sum(map(index.holds, oldest)) < 100, "those known longest have gone"
    index.clear()
    assert len(index) == 0
    assert not index.holds(make_key(99_999))


OPERATIONS = st.tuples(st.sampled_from(["add", "answered", "listed", "remove", "doubt", "pass"]), st.integers(0, 7))


@given(st.lists(OPERATIONS, max_size=60))
def test_an_index_agrees_with_one_that_keeps_a_word_on_each_key(operations):
    index = TierIndex(3.0)
    held: set[int] = set()
    absent_s: dict[int, float] = {}
    doubt_s: dict[int, float] = {}
    now_s = 0.0
    for operation, at in operations:
        key = KEYS[at]
        if operation == "pass":
            now_s += at / 4
        elif operation == "add":
            index.add(key)
        elif operation == "answered":
            index.add_answered((key,), now_s)
        elif operation == "listed":
            index.add_listed((key,))
        elif operation == "remove":
            index.remove(key, now_s)
            held.discard(at)
            absent_s[at] = now_s + 3.0
        else:
            index.doubt(key, now_s)
            held.discard(at)
            doubt_s[at] = now_s + 1.0
        believed = {
            "add": True,
            "answered": absent_s.get(at, -1.0) <= now_s,
            "listed": at not in absent_s and at not in doubt_s,
        }
        if believed.get(operation):
            held.add(at)
            absent_s.pop(at, None)
            doubt_s.pop(at, None)
        for number in range(8):
            assert index.holds(KEYS[number]) == (number in held)
            if number not in held:
                until_s = max(absent_s.get(number, -1.0), doubt_s.get(number, -1.0))
                assert index.lacks(KEYS[number], now_s) == (now_s < until_s)
        assert len(index) == len(held)
