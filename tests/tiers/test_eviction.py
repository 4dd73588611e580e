"""What to evict: the coldest, from above the capacity down to the low mark."""

from __future__ import annotations

import random

import pytest

from kvsluice.tiers.eviction import LOW_MARK, SLACK, Coldest, is_overfull, surplus_bytes


@pytest.mark.parametrize(("used", "surplus"), [(0, 0), (999, 0), (1000, 0), (1001, 101), (1500, 600)])
def test_nothing_goes_up_to_the_capacity_and_above_it_all_down_to_the_low_mark(used, surplus):
    assert surplus_bytes(used, 1000) == surplus
    assert surplus == 0 or used - surplus == LOW_MARK * 1000


def test_stores_are_refused_only_past_the_slack():
    assert not is_overfull(int(1000 * (1 + SLACK)), 1000)
    assert is_overfull(int(1000 * (1 + SLACK)) + 1, 1000)


def test_the_coldest_that_make_up_the_bytes_are_kept_coldest_first():
    chunks = [(f"chunk {at}", float(at), 10 + at % 7) for at in range(200)]
    random.Random(1).shuffle(chunks)
    coldest: Coldest[str] = Coldest(500)
    for name, used_s, num_bytes in chunks:
        coldest.add(name, name=name, used_s=used_s, num_bytes=num_bytes)
    found = coldest.coldest_first()
    assert found == [f"chunk {at}" for at in range(len(found))]
    sizes = {name: num_bytes for name, _, num_bytes in chunks}
    assert sum(sizes[name] for name in found) >= 500 > sum(sizes[name] for name in found[:-1])


def test_where_nothing_is_wanted_nothing_is_kept():
    coldest: Coldest[str] = Coldest(0)
    for at in range(10):
        coldest.add("x", name=str(at), used_s=float(at), num_bytes=10)
    assert coldest.coldest_first() == []


def test_where_all_together_are_too_few_all_are_kept():
    coldest: Coldest[int] = Coldest(1000)
    for at in (2, 0, 1):
        coldest.add(at, name=str(at), used_s=float(at), num_bytes=10)
    assert coldest.coldest_first() == [0, 1, 2]
