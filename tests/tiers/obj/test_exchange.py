"""One exchange on one connection: which one serves again, what costs an attempt, answers that are none."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from kvsluice.tiers.obj.breaker import BreakerState
from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.requests import Request, no_body

GET = Request("GET", "key")
LARGE_BYTES = 32 << 20


def error(status, code):
    return status, f"<Error><Code>{code}</Code><Message>server words</Message></Error>".encode()


def read_all(response):
    buffer = bytearray(response.length)
    response.read_exactly(memoryview(buffer))
    return bytes(buffer)


# Which connection


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
    assert requests.endpoints.all[0].breakers["store"].state is BreakerState.CLOSED


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


@pytest.mark.parametrize(
    ("sent", "used"),
    [
        (b"HTTP/1.1 503 words\r\nContent-Length: 0\r\n\r\n", [1, 1]),
        (b"HTTP/1.1 503 words\r\nContent-Length: 10\r\n\r\nabc", [1, 0]),
        (b"HTTP/1.1 200 words\r\nContent-Length: 10\r\n\r\nabc", [1, 2]),
        (b"SSH-2.0-OpenSSH_9.2\r\n", [1, 2]),
    ],
)
def test_only_after_no_answer_the_next_attempt_insists_on_a_new_connection(serve, make_requests, clock, sent, used):
    """Of two that are idle the one used last is taken; where it is gone, the other one may be as well."""
    asked = []

    def handle(peer):
        peer.read_head()
        if peer.number < 2:
            peer.answer(200)
            peer.read_head()
        asked.append(peer.number)
        if len(asked) == 1:
            peer.send(sent)
            if not sent.endswith(b"Content-Length: 0\r\n\r\n"):
                return
            peer.read_head()
            asked.append(peer.number)
        peer.answer(200)

    requests = make_requests(serve(handle).url, clock=clock)
    pool = requests.endpoints.all[0].pool
    end_s = clock.now_s + 60
    idle = [pool.take(end_s) for _ in range(2)]
    for connection in idle:
        assert connection.ask("GET", "/", {"host": "h"}, None, end_s).finish()
        pool.give(connection)
    requests.send(GET, end_s, read_all)
    assert asked == used


# Answers that are none, or come too early


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


def hang_up(peer):
    peer.sock.close()


def reset(peer):
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.sock.close()


def stay_silent(peer):
    peer.over.wait(30)


@pytest.mark.parametrize("end", [hang_up, reset, stay_silent])
@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("status", "attempts"), [(403, 1), (404, 1), (503, 2)])
def test_an_answer_that_tells_of_a_failure_is_one_though_its_body_breaks_off(
    serve, make_requests, clock, fails, end, framing, status, attempts
):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 %d words\r\n%s\r\n\r\n3e8\r\n<Error>" % (status, framing))
        end(peer)

    server = serve(handle)
    requests = make_requests(server.url, clock=clock, max_attempts=2, read_s=0.1)
    with fails(f"{status} {status}"):
        requests.send(GET, clock.now_s + 60, no_body)
    # Nothing of the rest can be taken for the next answer.
    assert len(server.peers) == attempts
    assert requests.endpoints.all[0].pool.busy == 0
