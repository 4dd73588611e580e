"""Several endpoints: spread over, failed over, left alone, brought back by a probe that leaves no thread behind."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from kvsluice.tiers.obj.breaker import FAILURES_TO_OPEN, BreakerState
from kvsluice.tiers.obj.endpoints import Endpoint, Endpoints
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError

BROKEN = ObjectFailure(None, "words", "connect")
FAILURES = {"lookup": 2, "load": FAILURES_TO_OPEN, "store": FAILURES_TO_OPEN}
"""By way, how many in a row it takes."""


class Pool:
    """What of a pool is seen here."""

    def __init__(self) -> None:
        self.busy = 0
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Probe:
    """Answers probes as a test says, and remembers who was asked."""

    def __init__(self) -> None:
        self.well: set[int] = set()
        self.asked: list[str] = []
        self.hold: threading.Event | None = None

    def __call__(self, endpoint) -> bool:
        self.asked.append(endpoint.place.base)
        if self.hold is not None:
            self.hold.wait(5)
        return endpoint.place.base in self.well


@pytest.fixture
def probe():
    return Probe()


@pytest.fixture
def make_endpoints(probe, monkeypatch):
    made = []

    def make(count, *, every_s=0.002):
        monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", every_s)
        monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_AT_MOST_EVERY_S", every_s)
        places = [SimpleNamespace(base=f"http://store-{number}/") for number in range(count)]
        made.append(Endpoints([Endpoint(place, Pool()) for place in places], probe, "test"))
        return made[-1]

    yield make
    for endpoints in made:
        endpoints.close(5)
    assert probe_threads() == []


def probe_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvsluice-test-probe-")]


def break_down(endpoints, endpoint, way="load"):
    """Let operations fail there until its breaker opens."""
    others = [one for one in endpoints.all if one is not endpoint]
    for _ in range(FAILURES[way]):
        permit = endpoints.enter(way, others)
        assert permit.endpoint is endpoint
        permit.failed(BROKEN)
    assert endpoint.breakers[way].state is BreakerState.OPEN


def states(endpoint):
    return [endpoint.breakers[way].state.value for way in FAILURES]


def chosen(endpoints, count, way="load", avoid=()):
    found = []
    for _ in range(count):
        permit = endpoints.enter(way, avoid)
        permit.succeeded()
        found.append(endpoints.all.index(permit.endpoint))
    return found


# Spreading


@pytest.mark.parametrize("count", [1, 2, 3])
def test_idle_endpoints_are_taken_in_turn(make_endpoints, count):
    assert Counter(chosen(make_endpoints(count), 6 * count)) == dict.fromkeys(range(count), 6)


def test_the_least_busy_one_is_taken(make_endpoints):
    endpoints = make_endpoints(3)
    for endpoint, busy in zip(endpoints.all, [2, 1, 3], strict=True):
        endpoint.pool.busy = busy
    assert chosen(endpoints, 5) == [1] * 5


def test_of_equally_busy_ones_each_gets_its_turn(make_endpoints):
    endpoints = make_endpoints(3)
    endpoints.all[0].pool.busy = 1
    assert Counter(chosen(endpoints, 60))[0] == 0
    assert min(Counter(chosen(endpoints, 60)).values()) >= 20


def test_those_to_avoid_are_taken_where_there_is_no_other(make_endpoints):
    endpoints = make_endpoints(2)
    first, second = endpoints.all
    second.pool.busy = 9
    assert chosen(endpoints, 3, avoid=[first]) == [1, 1, 1]
    assert chosen(endpoints, 3, avoid=[first, second]) == [0, 0, 0]


# Left alone


@pytest.mark.parametrize("way", FAILURES)
def test_an_endpoint_that_fails_and_answers_is_left_out_for_that_way_alone(make_endpoints, probe, wait_until, way):
    endpoints = make_endpoints(2, every_s=60)
    probe.well.add("http://store-0/")
    break_down(endpoints, endpoints.all[0], way)
    wait_until(lambda: probe.asked == ["http://store-0/"])
    for other in FAILURES:
        assert set(chosen(endpoints, 6, other)) == ({1} if other == way else {0, 1})


@pytest.mark.parametrize("way", FAILURES)
def test_an_endpoint_that_fails_and_does_not_answer_is_left_out_altogether(make_endpoints, probe, wait_until, way):
    endpoints = make_endpoints(2, every_s=60)
    break_down(endpoints, endpoints.all[0], way)
    wait_until(lambda: states(endpoints.all[0]) == ["open"] * 3)
    for other in FAILURES:
        assert chosen(endpoints, 6, other) == [1] * 6
    assert states(endpoints.all[1]) == ["closed"] * 3
    assert probe.asked == ["http://store-0/"]


@pytest.mark.parametrize("way", FAILURES)
def test_each_way_takes_its_own_number_of_failures(make_endpoints, probe, way):
    endpoints = make_endpoints(1, every_s=60)
    probe.well.add("http://store-0/")
    for left in reversed(range(FAILURES[way])):
        for other in FAILURES:
            permit = endpoints.enter(other)
            if other == way:
                permit.failed(BROKEN)
            else:
                permit.succeeded()
        assert (endpoints.all[0].breakers[way].state is BreakerState.OPEN) is (left == 0)


def test_what_the_other_ways_answer_does_not_bring_one_back(make_endpoints, probe, wait_until):
    """As on a store that answers questions, and whose loads hang."""
    endpoints = make_endpoints(1, every_s=60)
    probe.well.add("http://store-0/")
    break_down(endpoints, endpoints.all[0], "load")
    wait_until(lambda: len(probe.asked) == 1)
    for _ in range(20):
        endpoints.enter("lookup").succeeded()
        endpoints.enter("store").succeeded()
    assert states(endpoints.all[0]) == ["closed", "open", "closed"]


def test_where_all_are_left_alone_it_says_so_at_once(make_endpoints):
    endpoints = make_endpoints(2, every_s=60)
    for endpoint in endpoints.all:
        break_down(endpoints, endpoint)
    with pytest.raises(RequestFailedError) as caught:
        endpoints.enter("load")
    assert caught.value.failure.label == "breaker_open"
    assert not caught.value.failure.may_pass


@pytest.mark.parametrize(
    "failure",
    [
        ObjectFailure(404, "NoSuchKey", "status"),
        ObjectFailure(403, "AccessDenied", "status"),
        ObjectFailure(409, "ConditionalRequestConflict", "status"),
        ObjectFailure(507, "InsufficientStorage", "status"),
    ],
)
def test_an_answer_of_whatever_kind_ends_a_row_of_failures(make_endpoints, failure):
    endpoints = make_endpoints(1)
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            endpoints.enter("load").failed(BROKEN)
        endpoints.enter("load").failed(failure)
    assert endpoints.all[0].breakers["load"].state is BreakerState.CLOSED


@pytest.mark.parametrize("kind", ["closed", "credentials", "replaced"])
def test_what_is_our_own_matter_neither_makes_nor_ends_a_row(make_endpoints, kind):
    endpoints = make_endpoints(1, every_s=60)
    for _ in range(FAILURES_TO_OPEN - 1):
        endpoints.enter("load").failed(BROKEN)
        endpoints.enter("load").failed(ObjectFailure(None, "", kind))
        endpoints.enter("load").ignored()
    assert endpoints.all[0].breakers["load"].state is BreakerState.CLOSED
    endpoints.enter("load").failed(BROKEN)
    assert endpoints.all[0].breakers["load"].state is BreakerState.OPEN


def test_that_it_is_left_alone_is_logged_once_with_its_name_and_without_secrets(make_endpoints, caplog):
    endpoints = make_endpoints(1, every_s=60)
    hanging = [endpoints.enter("store") for _ in range(20)]
    break_down(endpoints, endpoints.all[0], "store")
    for permit in hanging:
        permit.failed(BROKEN)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "test: stores fail at http://store-0/ (no answer (connect: words)): none is sent there until it answers a probe"
    )


def test_trials_that_fail_are_no_news_and_the_one_that_succeeds_is(make_endpoints, probe, wait_until, caplog):
    caplog.set_level(logging.DEBUG)
    endpoints = make_endpoints(1)
    probe.well.add("http://store-0/")
    breaker = endpoints.all[0].breakers["load"]
    break_down(endpoints, endpoints.all[0])
    for _ in range(3):
        wait_until(lambda: breaker.state is BreakerState.HALF_OPEN)
        endpoints.enter("load").failed(BROKEN)
    wait_until(lambda: breaker.state is BreakerState.HALF_OPEN)
    for _ in range(3):
        endpoints.enter("load").succeeded()
    said = [(record.levelno, record.getMessage().partition(" at ")[0]) for record in caplog.records]
    assert said == [
        (logging.WARNING, "test: loads fail"),
        *[(logging.DEBUG, "test: loads fail")] * 3,
        (logging.WARNING, "test: loads are answered again"),
    ]


# The probe


def test_without_a_failure_there_is_no_thread(make_endpoints, probe):
    endpoints = make_endpoints(2)
    chosen(endpoints, 10)
    endpoints.enter("load").failed(BROKEN)
    assert probe_threads() == []
    assert probe.asked == []


def test_only_what_has_failed_is_asked_until_it_answers_and_then_the_thread_ends(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(2)
    break_down(endpoints, endpoints.all[1])
    assert len(probe_threads()) == 1
    wait_until(lambda: len(probe.asked) >= 3)
    assert endpoints.all[1].breakers["load"].state is BreakerState.OPEN
    probe.well.add("http://store-1/")
    wait_until(lambda: probe_threads() == [])
    assert set(probe.asked) == {"http://store-1/"}
    assert endpoints.all[1].breakers["load"].state is BreakerState.HALF_OPEN


def test_one_operation_at_a_time_tries_what_came_back(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(2)
    probe.well.add("http://store-0/")
    endpoint = endpoints.all[0]
    break_down(endpoints, endpoint)
    wait_until(lambda: endpoint.breakers["load"].state is BreakerState.HALF_OPEN)
    trial = endpoints.enter("load", [endpoints.all[1]])
    assert trial.endpoint is endpoint
    assert chosen(endpoints, 6) == [1] * 6
    trial.succeeded()
    assert set(chosen(endpoints, 6)) == {0, 1}


def test_what_fails_its_trial_is_probed_again(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(1)
    probe.well.add("http://store-0/")
    breaker = endpoints.all[0].breakers["load"]
    break_down(endpoints, endpoints.all[0])
    for _ in range(5):
        wait_until(lambda: breaker.state is BreakerState.HALF_OPEN)
        asked = len(probe.asked)
        endpoints.enter("load").failed(BROKEN)
        wait_until(lambda asked=asked: len(probe.asked) > asked)
    wait_until(lambda: breaker.state is BreakerState.HALF_OPEN)
    wait_until(lambda: probe_threads() == [])


def test_all_ways_of_an_endpoint_come_back_by_one_probe_and_by_a_trial_each(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(1)
    break_down(endpoints, endpoints.all[0], "load")
    wait_until(lambda: states(endpoints.all[0]) == ["open"] * 3)
    assert len(probe_threads()) == 1
    probe.well.add("http://store-0/")
    wait_until(lambda: probe_threads() == [])
    assert endpoints.all[0].is_whole
    assert states(endpoints.all[0]) == ["half_open"] * 3
    endpoints.enter("lookup").succeeded()
    assert states(endpoints.all[0]) == ["closed", "half_open", "half_open"]


def test_each_that_has_failed_is_asked_by_a_thread_of_its_own(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(3)
    for endpoint in endpoints.all:
        break_down(endpoints, endpoint)
    assert len(probe_threads()) == 3
    wait_until(lambda: set(probe.asked) == {"http://store-0/", "http://store-1/", "http://store-2/"})
    probe.well.update(["http://store-0/", "http://store-2/"])
    wait_until(lambda: endpoints.all[0].is_whole and endpoints.all[2].is_whole)
    wait_until(lambda: len(probe_threads()) == 1)
    assert not endpoints.all[1].is_whole


@pytest.fixture
def ask_until_whole(probe, monkeypatch):
    """Runs the probing on this thread, which waits on a clock of ours; what it waited, and the states at each wait."""

    def run(way, *, answers, most=10):
        waits = []
        endpoint = Endpoint(SimpleNamespace(base="http://store-0/"), Pool())
        endpoints = Endpoints([endpoint], lambda _: answers[min(len(waits), len(answers)) - 1], "test")

        def wait(wait_s):
            waits.append((wait_s, states(endpoint)))
            return len(waits) == most

        monkeypatch.setattr(endpoints, "_closing", SimpleNamespace(wait=wait, is_set=bool))
        for _ in range(FAILURES[way]):
            endpoint.breakers[way].failed(0)
        endpoints._ask_until_whole(endpoint)  # noqa: SLF001 - on this thread, with a clock of ours
        return waits, states(endpoint)

    return run


def test_probes_come_at_once_then_every_half_second_and_then_every_two(ask_until_whole):
    waits, _ = ask_until_whole("load", answers=[False])
    assert [wait_s for wait_s, _ in waits] == [0.0, 0.5, 0.75, 1.125, 1.6875, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert [found for _, found in waits] == [["closed", "open", "closed"], *[["open"] * 3] * 9]


def test_what_answers_at_once_is_tried_again_only_after_a_later_probe(ask_until_whole):
    """Else what fails although the endpoint answers would be tried at the rate at which it fails."""
    waits, found = ask_until_whole("load", answers=[True])
    assert waits == [(0.0, ["closed", "open", "closed"]), (0.5, ["closed", "open", "closed"])]
    assert found == ["closed", "half_open", "closed"]


def test_what_answers_at_once_and_no_longer_then_is_left_alone_altogether(ask_until_whole):
    waits, found = ask_until_whole("store", answers=[True, False, True])
    assert waits == [
        (0.0, ["closed", "closed", "open"]),
        (0.5, ["closed", "closed", "open"]),
        (0.75, ["open", "open", "open"]),
    ]
    assert found == ["half_open", "half_open", "half_open"]


# The end


def test_closing_ends_the_probing_at_once(make_endpoints, probe):
    endpoints = make_endpoints(2, every_s=60)
    for endpoint in endpoints.all:
        break_down(endpoints, endpoint)
    start_s = time.monotonic()
    endpoints.close(30)
    endpoints.close(30)
    assert time.monotonic() - start_s < 3
    assert probe_threads() == []
    assert [endpoint.pool.closed for endpoint in endpoints.all] == [2, 2]


def test_closing_does_not_wait_longer_than_told_for_a_probe(make_endpoints, probe, wait_until):
    endpoints = make_endpoints(1)
    probe.hold = threading.Event()
    break_down(endpoints, endpoints.all[0])
    wait_until(lambda: len(probe.asked) == 1)
    start_s = time.monotonic()
    endpoints.close(0.02)
    assert time.monotonic() - start_s < 2
    probe.hold.set()


def test_after_the_end_a_breaker_that_opens_starts_no_thread_and_says_nothing(make_endpoints, caplog):
    """Closing ends the connections under way: that all of them break off then is no news."""
    endpoints = make_endpoints(1)
    endpoints.close(1)
    break_down(endpoints, endpoints.all[0])
    assert probe_threads() == []
    assert caplog.text == ""


def test_a_pause_ends_with_the_end(make_endpoints):
    endpoints = make_endpoints(1)
    assert endpoints.pause(0.001) is False
    paused = []
    thread = threading.Thread(target=lambda: paused.append(endpoints.pause(60)))
    thread.start()
    endpoints.close(1)
    thread.join(5)
    assert paused == [True]


def test_an_endpoint_shows_no_secret():
    place = SimpleNamespace(base="http://store-0/", proxy_headers={"Proxy-Authorization": "hidden"})
    assert repr(Endpoint(place, Pool())) == "Endpoint('http://store-0/')"
