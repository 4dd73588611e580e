"""How long loads have been under way without one ending."""

from __future__ import annotations

import pytest
from gates import Clock

from kvsluice.tiers.backpressure import Spent, Traffic


def test_without_a_load_under_way_there_is_nothing_to_wait_for():
    clock = Clock()
    traffic = Traffic(clock)
    traffic.start(is_store=True)
    clock.now_s = 5.0
    assert traffic.load_stall() == Spent.alone(0.0)


def test_one_load_alone_has_taken_all_of_the_time():
    clock = Clock()
    traffic = Traffic(clock)
    clock.now_s = 100.0
    load = traffic.start(is_store=False)
    clock.now_s = 103.0
    assert traffic.load_stall() == Spent.alone(3.0)
    traffic.finish(load)
    assert traffic.load_stall() == Spent.alone(0.0)


def test_each_of_several_has_taken_its_part_and_stores_count_in_the_share_alone():
    clock = Clock()
    traffic = Traffic(clock)
    for is_store in (False, False, True, True):
        traffic.start(is_store=is_store)
    clock.now_s = 8.0
    assert traffic.load_stall() == Spent(8.0, 2.0, 4.0)


def test_it_counts_from_the_end_of_the_last_load_or_the_start_of_the_oldest_where_that_is_later():
    clock = Clock()
    traffic = Traffic(clock)
    first = traffic.start(is_store=False)
    traffic.start(is_store=False)
    clock.now_s = 4.0
    traffic.finish(first)
    clock.now_s = 5.0
    assert traffic.load_stall() == Spent.alone(1.0)
    traffic = Traffic(clock)
    traffic.finish(traffic.start(is_store=False))
    clock.now_s = 9.0
    traffic.start(is_store=False)
    clock.now_s = 9.5
    assert traffic.load_stall() == Spent.alone(0.5)


def test_what_the_next_load_will_have_taken_is_never_less():
    clock = Clock()
    traffic = Traffic(clock)
    loads = [traffic.start(is_store=False) for _ in range(4)]
    clock.now_s = 2.0
    told = traffic.load_stall()
    clock.now_s = 3.0
    ended = traffic.finish(loads[0])
    assert ended.drain_s >= told.drain_s == pytest.approx(0.5)
    assert ended.elapsed_s >= told.elapsed_s
