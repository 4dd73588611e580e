"""One request: what is tried again and where, how long that may take, what its end means for the endpoint."""

from __future__ import annotations

import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest

from kvsluice.tiers.obj.breaker import FAILURES_TO_OPEN, BreakerState
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.requests import Request, no_body

GET = Request("GET", "key")
LARGE_BYTES = 32 << 20


def error(status, code):
    return status, f"<Error><Code>{code}</Code><Message>server words</Message></Error>".encode()


def read_all(response):
    buffer = bytearray(response.length)
    response.read_exactly(memoryview(buffer))
    return bytes(buffer)


def states(requests, way="read"):
    return [endpoint.breakers[way].state for endpoint in requests.endpoints.all]


# What is asked


def test_a_request_is_signed_and_carries_its_query_headers_and_body(scripted, make_requests, assert_signed):
    requests = make_requests(scripted.endpoint_url)
    body = memoryview(b"a body")
    requests.send(Request("PUT", "p%20q/k", "b=2&a=1", {"if-none-match": "*"}, body), time.monotonic() + 5, no_body)
    (request,) = scripted.requests
    assert (request.method, request.path, request.body) == ("PUT", "/kv-test/p%20q/k?b=2&a=1", b"a body")
    assert request.headers["if-none-match"] == "*"
    assert request.headers["host"] == urlsplit(scripted.endpoint_url).netloc
    assert_signed(request)


@pytest.mark.parametrize(
    ("method", "way"), [("GET", "read"), ("HEAD", "read"), ("PUT", "write"), ("DELETE", "write"), ("POST", "write")]
)
def test_what_changes_the_store_is_a_write(method, way):
    assert Request(method, "k").way == way


def test_the_answer_is_what_receive_makes_of_it(serve, make_requests):
    requests = make_requests(serve(lambda peer: peer.serve((200, b"abc"))).url)
    assert requests.send(GET, requests.now_s() + 5, read_all) == b"abc"


def test_one_connection_serves_all_requests_even_those_that_are_refused(serve, make_requests, fails):
    server = serve(lambda peer: peer.serve((200, b"abc"), error(404, "NoSuchKey"), (206, b"ab"), (403, b"")))
    requests = make_requests(server.url)
    end_s = requests.now_s() + 5
    assert requests.send(GET, end_s, read_all) == b"abc"
    with fails("404 NoSuchKey"):
        requests.send(GET, end_s, read_all)
    assert requests.send(GET, end_s, read_all) == b"ab"
    with fails("403 403"):
        requests.send(GET, end_s, read_all)
    assert len(server.peers) == 1


# What is tried again


@pytest.mark.parametrize(
    ("status", "code", "attempts"),
    [
        (301, "PermanentRedirect", 1),
        (307, "TemporaryRedirect", 1),
        (400, "AuthorizationHeaderMalformed", 1),
        (400, "InvalidRequest", 1),
        (400, "RequestTimeout", 3),
        (401, "401", 1),
        (403, "AccessDenied", 1),
        (403, "RequestTimeTooSkewed", 1),
        (403, "SignatureDoesNotMatch", 1),
        (403, "QuotaExceeded", 1),
        (404, "NoSuchKey", 1),
        (404, "NoSuchBucket", 1),
        (405, "MethodNotAllowed", 1),
        (408, "RequestTimeout", 3),
        (409, "BucketNotEmpty", 1),
        (409, "ConditionalRequestConflict", 3),
        (409, "OperationAborted", 3),
        (412, "PreconditionFailed", 1),
        (416, "InvalidRange", 1),
        (429, "TooManyRequests", 3),
        (500, "InternalError", 3),
        (501, "NotImplemented", 1),
        (502, "502", 3),
        (503, "SlowDown", 3),
        (503, "ServiceUnavailable", 3),
        (504, "504", 3),
        (507, "InsufficientStorage", 1),
    ],
)
def test_only_what_may_pass_is_tried_again(serve, make_requests, clock, fails, status, code, attempts):
    server = serve(lambda peer: peer.serve(error(status, code)))
    requests = make_requests(server.url, clock=clock)
    with fails(f"{status} {code}") as caught:
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == attempts
    assert "server words" not in str(caught.value)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"])
@pytest.mark.parametrize("hard", [False, True])
def test_a_connection_that_breaks_off_is_tried_again_within_bounds(serve, make_requests, clock, sent, hard):
    def handle(peer):
        peer.read_head()
        peer.send(sent)
        if hard:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server = serve(handle)
    requests = make_requests(server.url, clock=clock)
    with pytest.raises(RequestFailedError) as caught:
        requests.send(GET, clock.now_s + 60, read_all)
    assert caught.value.failure.label in ("reset", "short_body")
    assert len(server.heads) == 3


def test_an_answer_that_is_no_http_is_tried_again_within_bounds(serve, make_requests, clock, fails):
    def handle(peer):
        peer.read_head()
        peer.send(b"SSH-2.0-OpenSSH_9.2\r\n")

    server = serve(handle)
    requests = make_requests(server.url, clock=clock)
    with fails("protocol"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == 3


def test_a_refused_connection_is_tried_again_within_bounds(serve, make_requests, clock, fails):
    server = serve(lambda peer: None)
    server.stop_listening()
    requests = make_requests(server.url, clock=clock)
    with fails("connect"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(clock.pauses) == 2


def test_a_body_that_broke_off_is_read_anew_from_its_start(serve, make_requests, clock):
    def handle(peer):
        peer.read_head()
        if peer.number == 0:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nXYZ")
        else:
            peer.answer(200, b"abcdef")

    requests = make_requests(serve(handle).url, clock=clock)
    buffer = bytearray(6)
    requests.send(GET, clock.now_s + 60, lambda response: response.read_exactly(memoryview(buffer)))
    assert buffer == b"abcdef"


def test_a_refused_certificate_is_not_tried_again(serve, make_requests, server_tls, clock, fails):
    server = serve(lambda peer: peer.serve((200, b"")), server_tls)
    # The certificate is of 127.0.0.1 and localhost.
    requests = make_requests(server.url.replace("127.0.0.1", "127.0.0.2"), clock=clock)
    with pytest.MonkeyPatch.context() as patch, fails("tls"):
        real = socket.getaddrinfo
        patch.setattr(socket, "getaddrinfo", lambda host, *args, **more: real("127.0.0.1", *args, **more))
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.peers) == 1


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_attempts_are_bounded(serve, make_requests, clock, fails, max_attempts):
    server = serve(lambda peer: peer.serve(error(503, "SlowDown")))
    requests = make_requests(server.url, clock=clock, max_attempts=max_attempts)
    with fails("503 SlowDown"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == max_attempts


def test_what_passes_is_served(serve, make_requests, clock):
    def handle(peer):
        peer.serve(error(503, "SlowDown") if peer.number < 2 else (200, b"abc"))

    server = serve(handle)
    requests = make_requests(server.url, clock=clock)
    assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert requests.failure_counts() == {}


def test_pauses_grow_are_drawn_and_bounded(serve, make_requests, clock, fails):
    most = []

    def draw(most_s):
        most.append(most_s)
        return most_s / 2

    requests = make_requests(
        serve(lambda peer: peer.serve((500, b""))).url, clock=clock, max_attempts=8, random_s=draw, pause=clock.pause
    )
    for endpoint in requests.endpoints.all:
        endpoint.breakers["read"]._failures_to_open = 100  # noqa: SLF001 - it would open after five
    with fails("500 500"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert most == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert clock.pauses == [one / 2 for one in most]


# Time


@pytest.mark.parametrize(
    ("asked", "paused"), [("2", 2.0), ("0.001", 0.05), ("-5", 0.05), ("soon", 0.05), ("nan", 0.05)]
)
def test_what_the_server_asks_to_wait_is_waited(serve, make_requests, clock, asked, paused):
    def handle(peer):
        peer.read_head()
        peer.answer(503 if peer.number == 0 else 200, b"", b"Connection: close", b"Retry-After: " + asked.encode())

    requests = make_requests(serve(handle).url, clock=clock)
    requests.send(GET, clock.now_s + 60, no_body)
    assert clock.pauses == [paused]


@pytest.mark.parametrize("asked", [b"61", b"1e300", b"inf"])
def test_no_pause_crosses_the_deadline(serve, make_requests, clock, fails, asked):
    def handle(peer):
        peer.read_head()
        peer.answer(503, b"", b"Retry-After: " + asked)

    server = serve(handle)
    requests = make_requests(server.url, clock=clock)
    with fails("503 503"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert clock.pauses == []
    assert len(server.heads) == 1


def test_all_attempts_together_end_by_the_deadline(serve, make_requests):
    server = serve(lambda peer: peer.read_head() and peer.over.wait(30))
    requests = make_requests(server.url, read_s=0.1, max_attempts=100, random_s=lambda most_s: 0.0)
    start_s = time.monotonic()
    with pytest.raises(RequestFailedError) as caught:
        requests.send(GET, requests.now_s() + 0.25, no_body)
    assert caught.value.failure.label in ("timeout", "deadline")
    assert time.monotonic() - start_s < 2
    assert 2 <= len(server.heads) <= 4


def test_a_deadline_that_is_over_lets_nothing_out(serve, make_requests, clock, fails):
    server = serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(server.url, clock=clock)
    with fails("deadline"):
        requests.send(GET, clock.now_s, no_body)
    assert server.peers == []


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


def test_the_clock_is_looked_at_in_the_middle_of_a_body(serve, make_requests, clock, fails):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not peer.over.wait(0.0005):
            peer.send(b"x")

    requests = make_requests(serve(handle).url, clock=clock)
    clock.step_s = 0.1
    with fails("deadline"):
        requests.send(GET, clock.now_s + 2, read_all)


# Connections


@pytest.mark.parametrize("body", [None, b"abc", bytes(LARGE_BYTES)])
def test_a_connection_that_was_ended_while_idle_costs_no_attempt(serve, make_requests, body):
    received = []

    def handle(peer):
        peer.read_head()
        received.append(peer.read_body(len(body or b"")))
        peer.answer(200)
        if peer.number == 0:
            # The server ends it in the moment in which the next request is on its way.
            peer.sock.recv(1)

    server = serve(handle)
    requests = make_requests(server.url, max_attempts=1)
    request = Request("PUT", "key", "", {}, None if body is None else memoryview(body))
    for _ in range(2):
        requests.send(request, requests.now_s() + 5, no_body)
    assert len(server.peers) == 2
    assert received == [body or b""] * 2
    assert states(requests, "write") == [BreakerState.CLOSED]


def test_of_many_connections_ended_while_idle_only_one_is_tried(serve, make_requests, wait_until):
    ready = threading.Barrier(3)

    def handle(peer):
        peer.read_head()
        if peer.number < 3:
            ready.wait(5)
            peer.answer(200)
            peer.sock.recv(1)
        else:
            peer.answer(200)

    server = serve(handle)
    requests = make_requests(server.url, max_attempts=1)
    threads = [threading.Thread(target=requests.send, args=(GET, requests.now_s() + 5, no_body)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    requests.send(GET, requests.now_s() + 5, no_body)
    assert len(server.peers) == 4


def test_a_connection_that_never_answered_costs_an_attempt(serve, make_requests, fails):
    server = serve(lambda peer: peer.read_head())
    requests = make_requests(server.url, max_attempts=1)
    with fails("reset"):
        requests.send(GET, requests.now_s() + 5, no_body)
    assert len(server.peers) == 1


def test_a_connection_that_breaks_off_in_an_answer_costs_an_attempt_though_it_was_used(serve, make_requests, fails):
    def handle(peer):
        peer.read_head()
        peer.answer(200, b"abc")
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")

    server = serve(handle)
    requests = make_requests(server.url, max_attempts=1)
    assert requests.send(GET, requests.now_s() + 5, read_all) == b"abc"
    with fails("short_body"):
        requests.send(GET, requests.now_s() + 5, read_all)
    assert len(server.peers) == 1


def test_a_large_answer_to_a_failure_is_understood_and_its_connection_given_up(serve, make_requests, fails):
    status, body = error(403, "AccessDenied")
    server = serve(lambda peer: peer.serve((status, body + bytes(1 << 20))))
    requests = make_requests(server.url)
    for _ in range(2):
        with fails("403 AccessDenied"):
            requests.send(GET, requests.now_s() + 5, no_body)
    assert len(server.peers) == 2


def test_a_body_that_nobody_read_gives_its_connection_up(serve, make_requests):
    server = serve(lambda peer: peer.serve((200, b"abc")))
    requests = make_requests(server.url)
    for _ in range(2):
        requests.send(GET, requests.now_s() + 5, no_body)
    assert len(server.peers) == 2


def test_an_early_refusal_of_a_large_body_is_an_answer(serve, make_requests, fails):
    def handle(peer):
        peer.read_head()
        peer.answer(*error(412, "PreconditionFailed"))
        time.sleep(0.05)

    server = serve(handle)
    requests = make_requests(server.url)
    put = Request("PUT", "key", "", {"if-none-match": "*"}, memoryview(bytes(LARGE_BYTES)))
    with fails("412 PreconditionFailed") as caught:
        requests.send(put, requests.now_s() + 5, no_body)
    assert caught.value.failure.is_held_already
    assert len(server.peers) == 1


@pytest.mark.parametrize("line", [b"-5", b"zz", b"", b"f" * 70_000, b"1" * 5_000])
@pytest.mark.parametrize("status", [200, 503])
def test_a_body_in_pieces_of_no_size_is_a_failure_like_others(serve, make_requests, clock, line, status):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 %d OK\r\nTransfer-Encoding: chunked\r\n\r\n" % status, line, b"\r\nabcdef\r\n0\r\n\r\n")

    requests = make_requests(serve(handle).url, clock=clock, max_attempts=1)
    buffer = memoryview(bytearray(100))
    with pytest.raises(RequestFailedError):
        requests.send(GET, clock.now_s + 60, lambda response: response.read_exactly(buffer))


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 99999 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"\x00\xff\r\n\r\n",
    ],
)
def test_a_head_that_is_none_is_a_failure_like_others(serve, make_requests, clock, fails, head):
    def handle(peer):
        peer.read_head()
        peer.send(head)
        peer.over.wait(5)

    requests = make_requests(serve(handle).url, clock=clock, max_attempts=1)
    with fails("protocol"):
        requests.send(GET, clock.now_s + 60, no_body)


@pytest.mark.parametrize("length", [b"-1", b"abc", b"9" * 5_000])
def test_a_length_that_is_none_is_read_to_the_end_of_the_connection(serve, make_requests, clock, length):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: ", length, b"\r\n\r\nabc")

    requests = make_requests(serve(handle).url, clock=clock, max_attempts=1)
    buffer = bytearray(10)
    assert requests.send(GET, clock.now_s + 60, lambda response: response.read_up_to(memoryview(buffer))) == 3


# Endpoints


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
    assert len(broken.heads) in (3, 5)


def test_what_may_not_pass_is_not_asked_elsewhere(serve, make_requests, fails):
    servers = [serve(lambda peer: peer.serve(error(404, "NoSuchKey"))) for _ in range(2)]
    requests = make_requests(*(server.url for server in servers))
    with fails("404 NoSuchKey"):
        requests.send(GET, requests.now_s() + 5, no_body)
    assert sum(len(server.heads) for server in servers) == 1


def test_failures_in_a_row_open_the_breaker_and_the_last_one_is_told(serve, make_requests, clock, fails, monkeypatch):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    server = serve(lambda peer: peer.serve(error(503, "SlowDown")))
    requests = make_requests(server.url, clock=clock)
    # The fifth failure is an attempt in the middle of the second request.
    for _ in range(2):
        with fails("503 SlowDown"):
            requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == FAILURES_TO_OPEN
    with fails("breaker_open"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == FAILURES_TO_OPEN
    assert states(requests) == [BreakerState.OPEN]
    assert states(requests, "write") == [BreakerState.CLOSED]


def test_an_open_endpoint_is_not_waited_for_where_there_is_another(serve, make_requests, clock, monkeypatch):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 60.0)
    broken = serve(lambda peer: peer.serve((503, b"")))
    well = serve(lambda peer: peer.serve((200, b"abc")))
    requests = make_requests(broken.url, well.url, clock=clock)
    for _ in range(30):
        assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert len(broken.heads) == FAILURES_TO_OPEN


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


# Credentials


class Keys:
    """Credentials of which a test says when there are new ones."""

    def __init__(self, *renewed: bool) -> None:
        self.renewed = list(renewed)
        self.asked = 0

    def sign(self, place, method, tail, headers, body):
        return {"host": place.host, **headers}

    def renew(self) -> bool:
        self.asked += 1
        return self.renewed.pop(0) if self.renewed else False


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"])
def test_new_credentials_are_tried_at_once_beside_the_attempts(serve, make_requests, clock, code):
    server = serve(lambda peer: peer.serve(error(400, code) if peer.number == 0 else (200, b"abc")))
    keys = Keys(True)
    requests = make_requests(server.url, access=keys, clock=clock, max_attempts=1)
    assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert (keys.asked, clock.pauses) == (1, [])


@pytest.mark.parametrize(("renewed", "attempts"), [([], 1), ([True, True, True], 2)])
def test_refused_credentials_are_renewed_once_at_most(serve, make_requests, clock, fails, renewed, attempts):
    server = serve(lambda peer: peer.serve(error(403, "ExpiredToken")))
    requests = make_requests(server.url, access=Keys(*renewed), clock=clock)
    with fails("403 ExpiredToken"):
        requests.send(GET, clock.now_s + 60, no_body)
    assert len(server.heads) == attempts


class NoKeys(Keys):
    def sign(self, place, method, tail, headers, body):
        raise RequestFailedError(ObjectFailure(None, "CredentialRetrievalError", "credentials"))


def test_credentials_that_cannot_be_had_are_no_endpoints_fault_and_not_tried_again(serve, make_requests, clock, fails):
    server = serve(lambda peer: peer.serve((200, b"")))
    requests = make_requests(server.url, access=NoKeys(), clock=clock)
    for _ in range(2 * FAILURES_TO_OPEN):
        with fails("credentials"):
            requests.send(GET, clock.now_s + 60, no_body)
    assert states(requests) == [BreakerState.CLOSED]
    assert clock.pauses == []


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
        endpoint.breakers["read"].failed(0)
    with fails(f"{status} {status}"):
        requests.ask_one(endpoint, GET, clock.now_s + 60)
    assert (len(server.heads), len(other.heads)) == (attempts, 0)
    requests.ask_one(requests.endpoints.all[1], GET, clock.now_s + 60)


# Counts and the end


def test_failures_are_counted_by_their_label(make_requests):
    requests = make_requests("http://127.0.0.1:1")
    for failure in [ObjectFailure(503, "SlowDown", "status")] * 2 + [ObjectFailure(None, "words", "timeout")]:
        requests.count(failure)
    assert requests.failure_counts() == {"503 SlowDown": 2, "timeout": 1}


def test_closing_ends_a_pause_and_lets_nothing_more_out(serve, make_requests, wait_until):
    def handle(peer):
        peer.read_head()
        peer.answer(503, b"", b"Retry-After: 30")

    server = serve(handle)
    requests = make_requests(server.url)
    ended = []

    def send():
        try:
            requests.send(GET, requests.now_s() + 60, no_body)
        except RequestFailedError as failed:
            ended.append(failed.failure.label)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: len(server.heads) == 1)
    requests.endpoints.close(5)
    thread.join(5)
    assert not thread.is_alive()
    assert ended[0] in ("closed", "reset")
    assert len(server.heads) == 1


def test_a_refusal_that_no_credential_stands_in(serve, make_requests, fails, caplog):
    server = serve(lambda peer: peer.serve(error(403, "SignatureDoesNotMatch")))
    requests = make_requests(server.url)
    with fails("403 SignatureDoesNotMatch") as caught:
        requests.send(GET, requests.now_s() + 5, no_body)
    for text in (str(caught.value), repr(caught.value), repr(caught.value.failure), caplog.text):
        assert "very-secret" not in text
        assert "AKIA-TEST" not in text
