"""One request: which way it goes, what is tried again, how long that may take, with whose keys."""

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


def states(requests, way="load"):
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
    ("method", "way"), [("GET", "load"), ("HEAD", "lookup"), ("PUT", "store"), ("DELETE", "store"), ("POST", "store")]
)
def test_a_question_a_load_and_what_changes_the_store_go_three_ways(method, way):
    assert Request(method, "k").way == way


def test_the_answer_is_what_receive_makes_of_it(serve, make_requests):
    requests = make_requests(serve(lambda peer: peer.serve((200, b"abc"))).url)
    assert requests.send(GET, requests.now_s() + 5, read_all) == b"abc"


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
    server = serve(lambda peer: peer.serve(error(503, "SlowDown"), error(500, "InternalError"), (200, b"abc")))
    requests = make_requests(server.url, clock=clock)
    assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert len(server.heads) == 3
    assert requests.failure_counts() == {}
    assert states(requests) == [BreakerState.CLOSED]


def test_pauses_grow_are_drawn_and_bounded(serve, make_requests, clock, fails):
    most = []

    def draw(most_s):
        most.append(most_s)
        return most_s / 2

    requests = make_requests(
        serve(lambda peer: peer.serve((500, b""))).url, clock=clock, max_attempts=8, random_s=draw, pause=clock.pause
    )
    for endpoint in requests.endpoints.all:
        endpoint.breakers["load"]._failures_to_open = 100  # noqa: SLF001 - it would open after five
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


# Credentials


class Keys:
    """Credentials of which a test says when there are new ones."""

    def __init__(self, *renewed: bool) -> None:
        self.renewed = list(renewed)
        self.keys_number = 0
        self.refused: list[int] = []
        """What `renew` was told was signed with."""

    def sign(self, place, method, tail, headers, body):
        return {"host": place.host, **headers}

    def renew(self, refused: int) -> bool:
        self.refused.append(refused)
        return self.renewed.pop(0) if self.renewed else False


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"])
def test_new_credentials_are_tried_at_once_beside_the_attempts(serve, make_requests, clock, code):
    server = serve(lambda peer: peer.serve(error(400, code), (200, b"abc")))
    keys = Keys(True)
    requests = make_requests(server.url, access=keys, clock=clock, max_attempts=1)
    assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert (keys.refused, clock.pauses) == ([0], [])


def test_the_keys_that_were_refused_are_those_of_that_attempt(serve, make_requests, clock):
    """Others were found while the first attempt was under way, and again while the second one was."""

    class Rotated(Keys):
        def sign(self, place, method, tail, headers, body):
            self.keys_number += 1
            return super().sign(place, method, tail, headers, body)

    server = serve(lambda peer: peer.serve(error(503, "SlowDown"), error(400, "ExpiredToken"), (200, b"abc")))
    keys = Rotated(True)
    requests = make_requests(server.url, access=keys, clock=clock)
    assert requests.send(GET, clock.now_s + 60, read_all) == b"abc"
    assert keys.refused == [1]


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
