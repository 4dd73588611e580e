"""The breaker: what it lets through, and which news it believes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.tiers.obj.breaker import FAILURES_TO_OPEN, Breaker, BreakerState


@pytest.fixture
def breaker():
    return Breaker(3)


def fail(breaker, times=1):
    return [breaker.failed(breaker.try_enter()) for _ in range(times)]


def open_it(breaker):
    fail(breaker, 3)
    assert breaker.state is BreakerState.OPEN


def half_open_it(breaker):
    open_it(breaker)
    breaker.probed()
    assert breaker.state is BreakerState.HALF_OPEN


def test_it_lets_all_through_while_all_is_well(breaker):
    permits = [breaker.try_enter() for _ in range(100)]
    assert None not in permits
    assert breaker.has_room
    for permit in permits:
        breaker.succeeded(permit)
    assert breaker.state is BreakerState.CLOSED


def test_it_opens_at_the_failure_that_makes_a_row(breaker):
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.state is BreakerState.OPEN


def test_by_default_five_make_a_row():
    breaker = Breaker()
    assert fail(breaker, FAILURES_TO_OPEN) == [False] * 4 + [True]


def test_a_success_ends_a_row(breaker):
    for _ in range(5):
        fail(breaker, 2)
        breaker.succeeded(breaker.try_enter())
    assert breaker.state is BreakerState.CLOSED


def test_what_is_ignored_neither_makes_nor_ends_a_row(breaker):
    for _ in range(2):
        fail(breaker)
        breaker.ignored(breaker.try_enter())
    assert fail(breaker) == [True]


def test_open_it_lets_nothing_through(breaker):
    open_it(breaker)
    assert breaker.try_enter() is None
    assert not breaker.has_room


def test_half_open_it_lets_one_through_at_a_time(breaker):
    half_open_it(breaker)
    assert breaker.has_room
    permit = breaker.try_enter()
    assert permit is not None
    assert not breaker.has_room
    assert breaker.try_enter() is None
    breaker.ignored(permit)
    assert breaker.try_enter() is not None


def test_half_open_a_success_closes_it_and_only_that_one_says_so(breaker):
    assert breaker.succeeded(breaker.try_enter()) is False
    half_open_it(breaker)
    assert breaker.succeeded(breaker.try_enter()) is True
    assert breaker.succeeded(breaker.try_enter()) is False
    assert breaker.state is BreakerState.CLOSED
    assert fail(breaker, 3) == [False, False, True]


def test_half_open_one_failure_opens_it_again(breaker):
    half_open_it(breaker)
    assert fail(breaker) == [True]
    assert breaker.state is BreakerState.OPEN
    breaker.probed()
    assert breaker.try_enter() is not None


@pytest.mark.parametrize("state", ["closed", "half_open", "open"])
def test_tripped_it_lets_nothing_through_until_a_probe_is_answered(breaker, state):
    if state == "half_open":
        half_open_it(breaker)
    elif state == "open":
        open_it(breaker)
    breaker.trip()
    assert breaker.state is BreakerState.OPEN
    assert breaker.try_enter() is None
    breaker.probed()
    assert breaker.try_enter() is not None
    assert breaker.try_enter() is None


def test_what_was_under_way_when_it_was_tripped_is_news_only_where_it_succeeds(breaker):
    failing, succeeding = breaker.try_enter(), breaker.try_enter()
    breaker.trip()
    breaker.probed()
    assert breaker.failed(failing) is False
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.trip()
    assert breaker.succeeded(succeeding) is True
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("state", ["closed", "half_open"])
def test_a_probe_is_news_only_where_it_is_open(breaker, state):
    if state == "half_open":
        half_open_it(breaker)
    breaker.probed()
    assert breaker.state.value == state


def test_what_failed_from_before_a_change_is_no_news(breaker):
    hanging = [breaker.try_enter() for _ in range(10)]
    open_it(breaker)
    assert [breaker.failed(permit) for permit in hanging[:3]] == [False] * 3
    breaker.probed()
    assert [breaker.failed(permit) for permit in hanging[3:6]] == [False] * 3
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(breaker.try_enter())
    assert [breaker.failed(permit) for permit in hanging[6:]] == [False] * 4
    assert breaker.state is BreakerState.CLOSED
    assert fail(breaker, 2) == [False, False]


def test_what_succeeds_from_before_a_change_closes_it(breaker):
    hanging = breaker.try_enter()
    open_it(breaker)
    breaker.succeeded(hanging)
    assert breaker.state is BreakerState.CLOSED


def test_what_is_ignored_from_before_a_change_does_not_end_a_trial(breaker):
    hanging = breaker.try_enter()
    half_open_it(breaker)
    assert breaker.try_enter() is not None
    breaker.ignored(hanging)
    assert breaker.try_enter() is None


def test_a_trial_that_never_came_to_an_end_does_not_survive_the_next_change(breaker):
    half_open_it(breaker)
    first = breaker.try_enter()
    assert breaker.failed(first)
    breaker.probed()
    assert breaker.try_enter() is not None
    assert not breaker.failed(first)
    assert breaker.state is BreakerState.HALF_OPEN


STEPS = st.lists(st.sampled_from(["enter", "succeeded", "failed", "ignored", "probed", "trip"]), max_size=60)


@given(STEPS, st.randoms(use_true_random=False))
def test_whatever_happens_one_at_a_time_is_tried_and_it_can_close_again(steps, random):
    breaker = Breaker(3)
    permits: list[int] = []
    trials = 0
    for step in steps:
        before = breaker.state
        if step == "enter":
            permit = breaker.try_enter()
            assert (permit is None) == (
                before is BreakerState.OPEN or (before is BreakerState.HALF_OPEN and trials > 0)
            )
            if permit is not None:
                permits.append(permit)
                trials += before is BreakerState.HALF_OPEN
        elif step in ("probed", "trip"):
            getattr(breaker, step)()
            assert step != "trip" or breaker.state is BreakerState.OPEN
        elif permits:
            permit = permits.pop(random.randrange(len(permits)))
            told = getattr(breaker, step)(permit)
            assert step != "succeeded" or told == (before is not BreakerState.CLOSED)
            assert step != "failed" or told == (breaker.state is BreakerState.OPEN and before is not BreakerState.OPEN)
            if step == "ignored" and permit == breaker.try_enter.__self__._epoch:  # noqa: SLF001 - whose trial it was
                trials = 0 if before is BreakerState.HALF_OPEN else trials
        if breaker.state is not before:
            trials = 0
    for permit in permits:
        breaker.ignored(permit)
    breaker.probed()
    permit = breaker.try_enter()
    assert permit is not None
    breaker.succeeded(permit)
    assert breaker.state is BreakerState.CLOSED


def test_of_many_threads_one_opens_it_and_one_tries():
    for _ in range(20):
        breaker = Breaker(8)
        start = threading.Barrier(8)
        opened, tried = [], []

        def work(breaker=breaker, start=start, opened=opened, tried=tried):
            permit = breaker.try_enter()
            start.wait(5)
            opened.append(breaker.failed(permit))
            start.wait(5)
            breaker.probed()
            start.wait(5)
            tried.append(breaker.try_enter() is not None)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert (opened.count(True), tried.count(True)) == (1, 1)
