"""How many stores run at once: few where few fill the device, many where latency rules, one where loads feel it.

The device is a formula: `n` operations side by side take a fixed cost each, which overlaps, and share
its rate.
"""

from __future__ import annotations

import pytest
from gates import MIB, Clock

from kvsluice.tiers.backpressure import Spent, StoreLimit

CHUNK = 4 * MIB


def seconds(n: float, *, bytes_per_s: float, fixed_s: float = 0.0) -> float:
    return fixed_s + n * CHUNK / bytes_per_s


def flood(limit: StoreLimit, clock: Clock, stores: int, *, bytes_per_s: float, fixed_s: float = 0.0) -> list[int]:
    """As many stores side by side as are let, again and again; how many ran each time."""
    ran = []
    for _ in range(stores):
        n = limit.allowed(loads=False)
        elapsed_s = seconds(n, bytes_per_s=bytes_per_s, fixed_s=fixed_s)
        clock.now_s += elapsed_s / n
        limit.on_store_ended(Spent(elapsed_s, elapsed_s / n, elapsed_s / n))
        ran.append(n)
    return ran


def loads_beside(
    limit: StoreLimit, clock: Clock, loads: int, *, at_once: int, felt: bool, bytes_per_s: float = 1e9
) -> list[int]:
    """Loads beside as many stores as are let; on a device where they feel them, or do not."""
    ran = []
    for _ in range(loads):
        stores = limit.allowed(loads=True)
        alone_s = seconds(at_once, bytes_per_s=bytes_per_s)
        elapsed_s = alone_s * (at_once + stores) / at_once if felt else alone_s
        clock.now_s += elapsed_s / at_once
        limit.on_load_ended(Spent(elapsed_s, elapsed_s / (at_once + stores), elapsed_s / at_once))
        ran.append(stores)
    return ran


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("bytes_per_s", [50e6, 1e9, 50e9])
def test_a_device_that_one_store_fills_is_given_few(clock, bytes_per_s):
    ran = flood(StoreLimit(16, clock), clock, 3000, bytes_per_s=bytes_per_s)
    assert max(ran[1000:]) <= 2


def test_a_device_whose_latency_rules_is_given_all_that_it_takes(clock):
    # 25 ms for each and 1 ms for its bytes: 26 at once would fill it.
    ran = flood(StoreLimit(16, clock), clock, 3000, bytes_per_s=4e9, fixed_s=0.025)
    assert min(ran) >= 12
    assert sum(n == 16 for n in ran) >= 0.8 * len(ran)


def test_a_device_of_four_channels_is_given_about_four(clock):
    limit = StoreLimit(16, clock)
    ran = []
    for _ in range(3000):
        n = limit.allowed(loads=False)
        elapsed_s = 0.004 * max(1.0, n / 4)
        clock.now_s += elapsed_s / n
        limit.on_store_ended(Spent(elapsed_s, elapsed_s / n, elapsed_s / n))
        ran.append(n)
    assert {*ran[1500:]} <= {3, 4, 5}
    assert sum(n == 4 for n in ran[1500:]) >= 0.8 * 1500


def test_a_device_that_becomes_slower_is_not_given_more_for_it(clock):
    limit = StoreLimit(16, clock)
    flood(limit, clock, 3000, bytes_per_s=1e9)
    ran = flood(limit, clock, 1000, bytes_per_s=20e6)
    assert max(ran) <= 3


def test_a_device_that_gets_wider_is_given_more_again(clock):
    limit = StoreLimit(16, clock)
    flood(limit, clock, 3000, bytes_per_s=1e9)
    ran = flood(limit, clock, 6000, bytes_per_s=4e9, fixed_s=0.025)
    assert ran[-1] >= 12


def test_where_too_few_stores_come_to_fill_a_level_it_stays(clock):
    limit = StoreLimit(16, clock)
    for _ in range(2000):
        clock.now_s += 0.01
        limit.on_store_ended(Spent.alone(0.004))
    assert limit.allowed(loads=False) == 16


def test_stores_beside_loads_say_nothing_of_the_level(clock):
    limit = StoreLimit(16, clock)
    for _ in range(2000):
        clock.now_s += 0.01
        limit.on_store_ended(Spent(0.16, 0.005, 0.01))
    assert limit.allowed(loads=False) == 16


def test_beside_loads_one_store_runs_at_first(clock):
    assert StoreLimit(16, clock).allowed(loads=True) == 1


def test_loads_that_feel_stores_are_given_one_beside_them(clock):
    ran = loads_beside(StoreLimit(16, clock), clock, 500, at_once=2, felt=True)
    assert set(ran[50:]) <= {1, 2}
    assert sum(n == 1 for n in ran[50:]) >= 0.7 * len(ran[50:])


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_loads_that_do_not_feel_stores_let_all_run_beside_them_though_none_is_ever_alone(clock, at_once):
    limit = StoreLimit(32, clock)
    ran = loads_beside(limit, clock, 200, at_once=at_once, felt=False)
    assert max(ran) == 32
    # Now and then some run beside one, so that it stays known what they take then.
    ran = loads_beside(limit, clock, 20_000, at_once=at_once, felt=False)
    assert 0 < sum(n == 1 for n in ran) < 0.05 * len(ran)


def test_loads_that_begin_to_feel_stores_are_given_fewer_beside_them(clock):
    limit = StoreLimit(16, clock)
    loads_beside(limit, clock, 500, at_once=4, felt=False)
    assert limit.allowed(loads=True) == 16
    ran = loads_beside(limit, clock, 500, at_once=4, felt=True)
    assert max(ran[50:]) <= 3


def test_loads_without_stores_say_nothing_of_how_many_may_run_beside_them(clock):
    limit = StoreLimit(16, clock)
    for _ in range(500):
        clock.now_s += 0.01
        limit.on_load_ended(Spent.alone(0.01))
    assert limit.allowed(loads=True) == 1


def test_never_more_than_there_are_writers_and_never_none(clock):
    limit = StoreLimit(3, clock)
    assert {*flood(limit, clock, 500, bytes_per_s=4e9, fixed_s=0.025)} <= {1, 2, 3}
    assert StoreLimit(1, clock).allowed(loads=False) == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        StoreLimit(0, clock)
