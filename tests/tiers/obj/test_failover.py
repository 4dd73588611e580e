"""Requests to several endpoints, and to one that has failed: who is asked, who is blamed, how one comes back."""

from __future__ import annotations

import threading
import time

import pytest

from kvsluice.tiers.obj.breaker import FAILURES_TO_OPEN, BreakerState
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.requests import Request, no_body

GET = Request("GET", "key")
HEAD = Request("HEAD", "key")
PUT = Request("PUT", "key", "", {}, memoryview(b"abc"))


def error(status, code):
    return status, f"<Error><Code>{code}</Code><Message>server words</Message></Error>".encode()


def read_all(response):
    buffer = bytearray(response.length)
    response.read_exactly(memoryview(buffer))
    return bytes(buffer)


def states(requests, way="load"):
    return [endpoint.breakers[way].state for endpoint in requests.endpoints.all]


def count(server, method=b"GET"):
    """How often that was asked; probes are HEADs."""
    return sum(head.startswith(method) for head in server.heads)


def by_method(**answers):
    """Answers each method with its own, or not at all; else with a bare 200."""

    def handle(peer):
        while head := peer.read_request():
            answer = answers.get(head.split(b" ")[0].decode(), (200, b""))
            if answer is None:
                peer.over.wait(30)
                return
            peer.answer(*answer)

    return handle


class NoKeys:
    """Credentials that cannot be had."""

    keys_number = 0

    def sign(self, place, method, tail, headers, body):
        raise RequestFailedError(ObjectFailure(None, "CredentialRetrievalError", "credentials"))


# Another one


def test_another_endpoint_is_asked_at_once_then_the_same_ones_after_a_pause(serve, make_requests, clock, fails):
    servers = [serve(lambda peer: peer.serve(error(503, "SlowDown"))) for _ in range(2)]
    requests = make_requests(*(server.url for server in servers), clock=clock)
    with fails("503 SlowDown"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert sorted(len(server.heads) for server in servers) == [1, 2]
    assert clock.pauses == [0.1]


def test_a_failed_endpoint_is_made_up_for_by_another(serve, make_requests, clock):
    broken = serve(lambda peer: peer.read_head())
    well = serve(lambda peer: peer.serve((200, b"abc")))
    requests = make_requests(broken.url, well.url, clock=clock, max_attempts=2)
    for _ in range(6):
        assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert clock.pauses == []
    assert count(broken) == FAILURES_TO_OPEN


def test_what_may_not_pass_is_not_asked_elsewhere(serve, make_requests, fails):
    servers = [serve(lambda peer: peer.serve(error(404, "NoSuchKey"))) for _ in range(2)]
    requests = make_requests(*(server.url for server in servers))
    with fails("404 NoSuchKey"):
        requests.send(GET, requests.now_s() + 5, no_body)
    assert sum(len(server.heads) for server in servers) == 1


def test_an_open_endpoint_is_not_waited_for_where_there_is_another(serve, make_requests, clock, monkeypatch):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    broken = serve(lambda peer: peer.serve((503, b"")))
    well = serve(lambda peer: peer.serve((200, b"abc")))
    requests = make_requests(broken.url, well.url, clock=clock)
    for _ in range(30):
        assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert count(broken) == FAILURES_TO_OPEN


# Who is blamed


def test_failures_in_a_row_open_the_breaker_and_the_last_one_is_told(serve, make_requests, clock, fails, monkeypatch):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    server = serve(by_method(GET=error(503, "SlowDown")))
    requests = make_requests(server.url, clock=clock)
    # The fifth failure is an attempt in the middle of the second request.
    for _ in range(2):
        with fails("503 SlowDown"):
            requests.send(GET, clock.now_s + 60, no_body)
    assert count(server) == FAILURES_TO_OPEN
    with fails("breaker_open"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert count(server) == FAILURES_TO_OPEN
    assert states(requests) == [BreakerState.OPEN]


def test_loads_that_hang_are_left_out_however_well_the_rest_works(serve, make_requests, fails, monkeypatch, wait_until):
    """As on a store whose disks hang: what needs none of them is answered, and says nothing of the loads."""
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    server = serve(by_method(GET=None))
    requests = make_requests(server.url, max_attempts=1, read_s=0.03)
    for _ in range(FAILURES_TO_OPEN):
        requests.send(HEAD, requests.now_s() + 5, no_body)
        with fails("timeout"):
            requests.send(GET, requests.now_s() + 5, no_body)
    wait_until(lambda: count(server, b"HEAD") == FAILURES_TO_OPEN + 1)  # The probe's is one of them.
    for _ in range(10):
        requests.send(HEAD, requests.now_s() + 5, no_body)
        requests.send(PUT, requests.now_s() + 5, no_body)
        with fails("breaker_open"):
            requests.send(GET, requests.now_s() + 5, no_body)
    assert count(server) == FAILURES_TO_OPEN
    assert [states(requests, way) for way in ("lookup", "load", "store")] == [
        [BreakerState.CLOSED],
        [BreakerState.OPEN],
        [BreakerState.CLOSED],
    ]


def test_an_endpoint_that_is_gone_is_left_alone_altogether_after_two_questions(
    serve, make_requests, clock, fails, monkeypatch, wait_until
):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    server = serve(lambda peer: peer.read_head())
    requests = make_requests(server.url, clock=clock, max_attempts=1)
    for _ in range(2):
        with fails("reset"):
            requests.send(HEAD, clock.now_s + 60, no_body)
    wait_until(lambda: all(states(requests, way) == [BreakerState.OPEN] for way in ("lookup", "load", "store")))
    for request in (HEAD, GET, PUT):
        with fails("breaker_open"):
            requests.send(request, clock.now_s + 60, no_body)
    # The third one is the probe's.
    assert [head.split(b" ")[0] for head in server.heads] == [b"HEAD"] * 3


def test_no_endpoint_is_blamed_for_the_time_that_another_took(serve, make_requests, clock, monkeypatch):
    """The first endpoint says "not now" when the deadline is over: nothing is left to ask the second one with."""
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)

    def handle(peer):
        while peer.read_head():
            # By now the client waits, so that its next look at the clock is after the answer.
            time.sleep(0.02)
            clock.now_s += 100
            peer.answer(503)

    slow, well = serve(handle), serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(slow.url, well.url, clock=clock)
    second = requests.endpoints.all[1]
    # So that the other one is chosen.
    busy = second.pool.take(clock.now_s + 5)
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(RequestFailedError):
            requests.send(GET, clock.now_s + 60, no_body)
    second.pool.drop(busy)
    assert states(requests) == [BreakerState.OPEN, BreakerState.CLOSED]


@pytest.mark.parametrize("status", [400, 403, 404, 409, 412, 416, 501, 507])
def test_an_answer_that_refuses_the_request_proves_that_the_endpoint_lives(serve, make_requests, clock, status):
    server = serve(lambda peer: peer.serve((status, b"")))
    requests = make_requests(server.url, clock=clock, max_attempts=1)
    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(RequestFailedError):
            requests.send(GET, clock.now_s + 60, no_body)
    assert states(requests) == [BreakerState.CLOSED]


def test_what_receive_finds_wrong_is_passed_on_and_is_not_the_endpoints_fault(serve, make_requests):
    class WrongError(Exception):
        pass

    def receive(response):
        raise WrongError

    server = serve(lambda peer: peer.serve((200, b"abc")))
    requests = make_requests(server.url)
    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(WrongError):
            requests.send(GET, requests.now_s() + 5, receive)
    assert states(requests) == [BreakerState.CLOSED]
    assert len(server.heads) == 2 * FAILURES_TO_OPEN
    assert requests.endpoints.all[0].pool.busy == 0


def test_an_open_endpoint_comes_back_by_its_probe(serve, make_requests, clock, fails, monkeypatch, wait_until):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 0.005)
    broken = threading.Event()
    broken.set()
    server = serve(lambda peer: peer.serve((503, b"")) if broken.is_set() else peer.serve((200, b"")))
    requests = make_requests(server.url, max_attempts=1)
    for _ in range(FAILURES_TO_OPEN):
        with fails("503 503"):
            requests.send(GET, requests.now_s() + 5, no_body)
    with fails("breaker_open"):
        requests.send(GET, requests.now_s() + 5, no_body)
    broken.clear()
    wait_until(lambda: states(requests) == [BreakerState.HALF_OPEN])
    requests.send(GET, requests.now_s() + 5, no_body)
    assert states(requests) == [BreakerState.CLOSED]


# Probes, and one endpoint alone


@pytest.mark.parametrize(
    ("status", "lives"), [(200, True), (403, True), (404, True), (301, True), (500, False), (503, False), (429, False)]
)
def test_a_probe_is_answered_by_whatever_is_no_not_now(serve, make_requests, status, lives):
    server = serve(lambda peer: peer.serve((status, b"")))
    requests = make_requests(server.url)
    assert requests.probe(requests.endpoints.all[0], Request("HEAD", "")) is lives
    assert len(server.heads) == 1


def test_a_probe_takes_a_new_connection_and_its_own_short_time(serve, make_requests, clock):
    server = serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(server.url)
    for _ in range(3):
        assert requests.probe(requests.endpoints.all[0], Request("HEAD", ""))
    assert len(server.peers) == 3


def test_a_probe_that_nobody_answers_is_over_after_its_second(serve, make_requests, clock):
    def handle(peer):
        peer.read_head()
        while not peer.over.wait(0.0005):
            peer.send(b"x")

    requests = make_requests(serve(handle).url, clock=clock)
    clock.step_s = 0.1
    start_s = clock.now_s
    assert not requests.probe(requests.endpoints.all[0], Request("HEAD", ""))
    assert clock.now_s - start_s < 1.5


def test_a_probe_that_was_not_sent_proves_nothing(serve, make_requests):
    server = serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(server.url, access=NoKeys())
    assert not requests.probe(requests.endpoints.all[0], Request("HEAD", ""))
    requests = make_requests(server.url)
    requests.endpoints.close(1)
    assert not requests.probe(requests.endpoints.all[0], Request("HEAD", ""))
    assert server.peers == []


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (403, 1)])
def test_one_endpoint_alone_can_be_asked_whatever_its_breaker_says(
    serve, make_requests, clock, fails, status, attempts
):
    server, other = serve(lambda peer: peer.serve((status, b""))), serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(server.url, other.url, clock=clock)
    endpoint = requests.endpoints.all[0]
    for _ in range(FAILURES_TO_OPEN):
        endpoint.breakers["load"].failed(0)
    with fails(f"{status} {status}"):
        requests.ask_one(endpoint, GET, clock.now_s + 60)
    assert (len(server.heads), len(other.heads)) == (attempts, 0)
    requests.ask_one(requests.endpoints.all[1], GET, clock.now_s + 60)
