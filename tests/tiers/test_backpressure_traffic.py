"""Shares of a tier's time: they add up, equal the closed forms, and say how long nothing came home."""

from __future__ import annotations

import pytest
from gates import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.tiers.backpressure import LOST_S, NOTHING, Spent, Stall, Traffic


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traffic(clock: Clock) -> Traffic:
    return Traffic(clock)


def test_an_operation_alone_is_charged_all_of_its_time(traffic, clock):
    store = traffic.start(is_store=True)
    clock.now_s = 3.0
    assert traffic.finish(store) == Spent.alone(3.0)


def test_of_n_that_run_side_by_side_each_is_charged_an_nth(traffic, clock):
    stores = [traffic.start(is_store=True) for _ in range(8)]
    clock.now_s = 4.0
    assert [traffic.finish(store) for store in stores] == [Spent(4.0, 0.5, 0.5)] * 8


def test_loads_count_in_the_share_and_not_among_stores(traffic, clock):
    store = traffic.start(is_store=True)
    loads = [traffic.start(is_store=False) for _ in range(3)]
    clock.now_s = 4.0
    assert traffic.finish(store) == Spent(4.0, 1.0, 4.0)
    assert traffic.finish(loads[0]) == Spent(4.0, 1.0, pytest.approx(4.0 / 3))


def test_one_that_is_joined_on_the_way_is_charged_less_from_then_on(traffic, clock):
    first = traffic.start(is_store=True)
    clock.now_s = 4.0
    second = traffic.start(is_store=True)
    clock.now_s = 9.0
    assert traffic.finish(first) == Spent(9.0, 6.5, 6.5)
    clock.now_s = 13.0
    assert traffic.finish(second) == Spent(9.0, 6.5, 6.5)


steps = st.lists(
    st.tuples(st.sampled_from(["store", "load", "end"]), st.integers(0, 5), st.integers(0, 7)), max_size=60
)


@settings(deadline=None)
@given(steps)
def test_shares_add_up_to_the_time_in_which_anything_ran(history):
    clock = Clock()
    traffic = Traffic(clock)
    live: list[tuple[object, bool]] = []
    busy = {"all": 0.0, True: 0.0, False: 0.0}
    share = {"all": 0.0, True: 0.0, False: 0.0}

    def end(at: int) -> None:
        operation, is_store = live.pop(at)
        spent = traffic.finish(operation)
        share["all"] += spent.share_s
        share[is_store] += spent.drain_s

    for what, hundredths, which in history:
        passed_s = hundredths / 100
        clock.now_s += passed_s
        busy["all"] += passed_s if live else 0
        for kind in (True, False):
            busy[kind] += passed_s if any(is_store == kind for _, is_store in live) else 0
        if what != "end":
            live.append((traffic.start(is_store=what == "store"), what == "store"))
        elif live:
            end(which % len(live))
    while live:
        end(0)
    assert share == {name: pytest.approx(busy_s) for name, busy_s in busy.items()}


def test_with_no_store_under_way_nothing_stalls(traffic, clock):
    assert traffic.stall() == Stall()
    traffic.start(is_store=False)
    clock.now_s = 9.0
    assert traffic.stall() == Stall()


def test_a_stall_is_as_old_as_the_oldest_store_and_its_share_is_of_all_that_runs(traffic, clock):
    traffic.start(is_store=True)
    clock.now_s = 2.0
    traffic.start(is_store=True)
    traffic.start(is_store=False)
    clock.now_s = 4.0
    assert traffic.stall() == Stall(4.0, 4.0, 2.0 + 2.0 / 3, 2.0 + 2.0 / 2)


def test_a_store_that_comes_home_says_that_older_ones_are_no_sign_of_a_stall(traffic, clock):
    traffic.start(is_store=True)
    other = traffic.start(is_store=True)
    clock.now_s = 4.0
    traffic.finish(other)
    clock.now_s = 60.0
    assert traffic.stall() == Stall(60.0)


def test_a_store_that_comes_home_before_younger_ones_says_that_they_have_just_been_served(traffic, clock):
    first = traffic.start(is_store=True)
    traffic.start(is_store=True)
    clock.now_s = 4.0
    traffic.finish(first)
    assert traffic.stall() == Stall(4.0, 0.0, 0.0, 0.0)
    clock.now_s = 6.0
    assert traffic.stall() == Stall(6.0, 2.0, 2.0, 2.0)


def test_a_load_that_comes_home_says_nothing_of_the_stores(traffic, clock):
    traffic.start(is_store=True)
    load = traffic.start(is_store=False)
    clock.now_s = 4.0
    traffic.finish(load)
    assert traffic.stall() == Stall(4.0, 4.0, 2.0, 4.0)


def test_what_is_under_way_for_long_is_counted_as_stuck(traffic, clock):
    traffic.start(is_store=True)
    traffic.start(is_store=False)
    clock.now_s = LOST_S - 1
    traffic.start(is_store=True)
    assert (traffic.stuck(stores=True), traffic.stuck(stores=False)) == (0, 0)
    clock.now_s = LOST_S + 1
    assert (traffic.stuck(stores=True), traffic.stuck(stores=False)) == (1, 1)
    traffic.start(is_store=True)
    assert (traffic.stuck(stores=True), traffic.stuck(stores=False)) == (1, 1)


def test_a_store_that_is_lost_shares_the_time_of_the_others_no_more(traffic, clock):
    lost = traffic.start(is_store=True)
    traffic.finish(traffic.start(is_store=True))
    clock.now_s = LOST_S + 1
    other = traffic.start(is_store=True)
    clock.now_s += 2.0
    assert traffic.finish(other) == Spent.alone(2.0)
    spent = traffic.finish(lost)
    assert spent.elapsed_s == LOST_S + 3
    assert spent.share_s <= LOST_S + 1


def test_loads_that_are_lost_do_not_make_a_slow_store_look_shared(traffic, clock):
    for _ in range(8):
        traffic.start(is_store=False)
    clock.now_s = LOST_S + 1
    store = traffic.start(is_store=True)
    clock.now_s += 2.0
    assert traffic.finish(store) == Spent.alone(2.0)


def test_loads_that_are_lost_still_stall_until_a_later_one_ends(traffic, clock):
    traffic.start(is_store=False)
    traffic.start(is_store=False)
    clock.now_s = 60.0
    traffic.finish(traffic.start(is_store=True))
    assert traffic.load_stall() == Spent(60.0, 30.0, 30.0)
    traffic.finish(traffic.start(is_store=False))
    clock.now_s = 70.0
    assert traffic.load_stall() == NOTHING
