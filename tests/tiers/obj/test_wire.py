"""HTTP on one connection: every wait ends in time, nothing is lost or mixed up, what can serve again does."""

from __future__ import annotations

import http.client
import socket
import struct
import time
import tracemalloc

import pytest

from kvsluice.tiers.obj.failures import DEADLINE, RequestFailedError, failure_of_error
from kvsluice.tiers.obj.wire import TimedSocket, overdue

LARGE_BYTES = 32 << 20
SOON_S = 3.0
"""What no test may take that gives up after a fraction of a second."""


def put(pool, end_s, body):
    connection = pool.take(end_s)
    try:
        headers = {"host": "h", "content-length": str(len(body))}
        response = connection.ask("PUT", "/", headers, memoryview(body), end_s)
        found = (response.status, response.read_words())
        # After an early answer the server still waits for the rest of the body, or has gone.
        assert response.finish() is (response.status < 400)
        return found
    finally:
        pool.drop(connection)


def in_s(seconds):
    return time.monotonic() + seconds


def reset(peer):
    """End the connection the hard way."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.sock.close()


# What goes over the wire


def test_a_request_is_sent_with_its_own_headers_alone(serve, make_pool, get):
    server = serve(lambda peer: peer.serve((200, b"abc")))
    assert get(make_pool(server), in_s(5)) == b"abc"
    assert server.heads == [b"GET / HTTP/1.1\r\nhost: h"]


def test_a_body_arrives_as_it_lies_in_memory(serve, make_pool, context):
    body = bytes(range(256)) * 20_000
    received = []

    def handle(peer):
        peer.read_head()
        received.append(peer.read_body(len(body)))
        peer.answer(200, b"thanks")

    assert put(make_pool(serve(handle, context)), in_s(5), body) == (200, b"thanks")
    assert received == [body]


def test_a_body_of_many_windows_is_read_into_the_buffer_given(serve, make_pool, context, get):
    body = bytes(range(256)) * 20_000
    server = serve(lambda peer: peer.serve((200, body)), context)
    pool = make_pool(server)
    assert get(pool, in_s(5)) == body
    assert get(pool, in_s(5)) == body
    assert len(server.peers) == 1


@pytest.mark.parametrize("sizes", [[10], [1, 9], [3, 3, 4]])
def test_a_body_in_pieces_is_put_together_and_its_connection_serves_again(serve, make_pool, sizes, get):
    def handle(peer):
        while peer.read_head():
            peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            left = b"0123456789"
            for size in sizes:
                peer.send(b"%x\r\n" % size, left[:size], b"\r\n")
                left = left[size:]
            peer.send(b"0\r\n\r\n")

    server = serve(handle)
    pool = make_pool(server)
    for _ in range(3):
        assert get(pool, in_s(5), 10) == b"0123456789"
    assert len(server.peers) == 1


def test_a_longer_body_in_pieces_is_not_taken_for_read(serve, make_pool, get):
    def handle(peer):
        while peer.read_head():
            peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n")

    server = serve(handle)
    pool = make_pool(server)
    for _ in range(2):
        assert get(pool, in_s(5), 4) == b"0123"
    assert len(server.peers) == 2


def test_read_up_to_stops_at_the_end_of_the_body(serve, make_pool):
    pool = make_pool(serve(lambda peer: peer.serve((200, b"abc"))))
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "/", {"host": "h"}, None, in_s(5))
    buffer = bytearray(b"......")
    assert response.read_up_to(memoryview(buffer)) == 3
    assert buffer == b"abc..."
    assert response.finish()
    pool.give(connection)


def test_headers_are_known_by_lower_case_name(serve, make_pool):
    def handle(peer):
        peer.read_head()
        peer.answer(200, b"", b'ETag: "e"', b"X-AMZ-Thing: 1")

    pool = make_pool(serve(handle))
    connection = pool.take(in_s(5))
    headers = connection.ask("GET", "/", {"host": "h"}, None, in_s(5)).headers
    assert (headers["etag"], headers["x-amz-thing"]) == ('"e"', "1")
    pool.drop(connection)


@pytest.mark.parametrize("status", [200, 404])
def test_after_a_head_without_a_body_the_connection_serves_again(serve, make_pool, status):
    def handle(peer):
        while peer.read_head():
            peer.send(b"HTTP/1.1 %d words\r\nContent-Length: 1000\r\n\r\n" % status)

    server = serve(handle)
    pool = make_pool(server)
    for _ in range(3):
        connection = pool.take(in_s(5))
        response = connection.ask("HEAD", "/", {"host": "h"}, None, in_s(5))
        assert response.status == status
        assert response.read_words() == b""
        assert response.finish()
        pool.give(connection)
    assert len(server.peers) == 1


def test_of_a_large_answer_to_a_failure_only_the_start_is_read(serve, make_pool):
    body = b"<Error><Code>InternalError</Code>" + bytes(1 << 20)
    server = serve(lambda peer: peer.serve((500, body)))
    pool = make_pool(server)
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "/", {"host": "h"}, None, in_s(5))
    assert response.read_words() == body[: 16 << 10]
    assert not response.finish()
    pool.drop(connection)


def test_a_server_that_says_close_is_taken_at_its_word(serve, make_pool, get):
    def handle(peer):
        peer.read_head()
        peer.answer(200, b"abc", b"Connection: close")

    server = serve(handle)
    pool = make_pool(server)
    assert get(pool, in_s(5)) == b"abc"
    assert get(pool, in_s(5)) == b"abc"
    assert len(server.peers) == 2


def test_an_answer_whose_end_is_the_connections_is_read(serve, make_pool):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.0 200 OK\r\n\r\nabc")

    pool = make_pool(serve(handle))
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "/", {"host": "h"}, None, in_s(5))
    assert response.length is None
    buffer = bytearray(10)
    assert response.read_up_to(memoryview(buffer)) == 3
    assert not response.finish()
    pool.drop(connection)


@pytest.mark.parametrize(
    ("framing", "delimited"),
    [
        (b"Content-Length: 3\r\n\r\nabc", True),
        (b"Content-Length: 0\r\n\r\n", True),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", True),
        (b"\r\nabc", False),
        (b"Content-Length: three\r\n\r\nabc", False),
    ],
)
def test_a_body_whose_end_nothing_tells_is_told_from_others(serve, make_pool, framing, delimited):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\n", framing)

    pool = make_pool(serve(handle))
    connection = pool.take(in_s(5))
    assert connection.ask("GET", "/", {"host": "h"}, None, in_s(5)).is_delimited is delimited
    pool.drop(connection)


# Memory


def test_a_large_body_is_neither_sent_nor_received_through_a_copy(serve, make_pool):
    stored = bytes(LARGE_BYTES)

    def handle(peer):
        peer.read_head()
        peer.discard(LARGE_BYTES)
        peer.answer(200)
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)
        peer.sock.sendall(stored)

    pool = make_pool(serve(handle))
    buffer = memoryview(bytearray(LARGE_BYTES))
    end_s = in_s(30)
    connection = pool.take(end_s)
    tracemalloc.start()
    try:
        headers = {"host": "h", "content-length": str(LARGE_BYTES)}
        assert connection.ask("PUT", "/", headers, buffer, end_s).finish()
        response = connection.ask("GET", "/", {"host": "h"}, None, end_s)
        response.read_exactly(buffer)
        assert response.finish()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    pool.give(connection)
    assert peak_bytes < 1 << 20


# Deadlines


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-A: "])
def test_silence_ends_after_the_read_timeout(serve, make_pool, context, fails, sent, get):
    def handle(peer):
        peer.read_head()
        peer.send(sent)
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=0.1)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        get(pool, in_s(30), 3)
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(("read_s", "left_s", "kind"), [(0.1, 30.0, "timeout"), (30.0, 0.1, DEADLINE)])
def test_a_wait_tells_what_ended_it(serve, make_pool, context, get, sends, read_s, left_s, kind):
    def handle(peer):
        peer.read_head()
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=read_s)
    pool.give(pool.take(in_s(5)))
    start_s = time.monotonic()
    with pytest.raises((RequestFailedError, TimeoutError)) as caught:
        put(pool, in_s(left_s), bytes(LARGE_BYTES)) if sends else get(pool, in_s(left_s))
    assert failure_of_error(caught.value).kind == kind
    assert time.monotonic() - start_s < SOON_S


class Sock:
    """Takes what fits into its window; each wait takes a second of the clock."""

    def __init__(self, clock, window_bytes):
        self.clock = clock
        self.window_bytes = window_bytes
        self.given: list[int] = []
        self.waits_s: list[float] = []
        self.taken = b""

    def settimeout(self, wait_s):
        self.waits_s.append(wait_s)

    def send(self, data):
        self.clock.now_s += 1.0
        self.given.append(len(data))
        self.taken += data[: self.window_bytes]
        return min(len(data), self.window_bytes)


def test_a_body_is_sent_by_quarters_of_a_mib_with_a_new_wait_for_each(clock):
    sock = Sock(clock, 1 << 30)
    timed = TimedSocket(sock, 3.0, clock)
    timed.end_s = clock.now_s + 4.5
    body = bytes(range(256)) * 4096 + b"end"
    timed.sendall(memoryview(body))
    assert sock.taken == body
    assert sock.given == [256 << 10] * 4 + [3]
    assert sock.waits_s == [3.0, 3.0, 2.5, 1.5, 0.5]


def test_what_the_windows_do_not_take_is_sent_again_and_no_more_once_the_deadline_is_over(clock, fails):
    sock = Sock(clock, 100_000)
    timed = TimedSocket(sock, 3.0, clock)
    timed.end_s = clock.now_s + 2.5
    body = bytes(range(256)) * 4096
    with fails(DEADLINE):
        timed.sendall(memoryview(body))
    assert sock.given == [256 << 10] * 3
    assert sock.taken == body[:300_000]


def test_what_is_overdue_is_told_so():
    assert overdue().failure.kind == DEADLINE


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"])
def test_a_trickle_of_bytes_does_not_move_the_deadline(serve, make_pool, clock, fails, head):
    """Each byte comes well before the silence would end the wait; the clock says when it is too late."""

    def handle(peer):
        peer.read_head()
        peer.send(head)
        if not head:
            peer.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not peer.over.wait(0.0005):
            peer.send(b"x")

    pool = make_pool(serve(handle), clock=clock)
    connection = pool.take(clock.now_s + 10)
    clock.step_s = 0.1
    end_s = clock.now_s + 2
    with fails(DEADLINE):
        connection.ask("GET", "/", {"host": "h"}, None, end_s).read_exactly(memoryview(bytearray(1000)))
    assert clock.now_s < end_s + 0.5
    pool.drop(connection)


def test_a_server_that_reads_slowly_does_not_move_the_deadline(serve, make_pool, context, fails):
    def handle(peer):
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        peer.read_head()
        while not peer.over.wait(0.05):
            peer.sock.recv(1 << 14)

    pool = make_pool(serve(handle, context), read_s=30)
    start_s = time.monotonic()
    with fails(DEADLINE):
        put(pool, in_s(0.4), bytes(LARGE_BYTES))
    assert time.monotonic() - start_s < 1.5


def test_a_server_that_reads_slowly_and_steadily_is_waited_for(serve, make_pool, context):
    """What counts is whether bytes go out: all of them take longer than the silence that is borne."""

    def handle(peer):
        peer.read_head()
        for _ in range(64):
            time.sleep(0.02)
            peer.read_body(1 << 18)
        peer.answer(200)

    pool = make_pool(serve(handle, context), read_s=1.0)
    start_s = time.monotonic()
    assert put(pool, in_s(30), bytes(1 << 24))[0] == 200
    assert time.monotonic() - start_s > 1.0


def test_a_server_that_stops_reading_ends_the_wait(serve, make_pool, context):
    def handle(peer):
        peer.read_head()
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=0.1)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        put(pool, in_s(30), bytes(LARGE_BYTES))
    assert time.monotonic() - start_s < SOON_S


def test_nothing_is_sent_once_the_deadline_is_over(serve, make_pool, clock, fails):
    server = serve(lambda peer: peer.serve((200, b"")))
    pool = make_pool(server, clock=clock)
    connection = pool.take(clock.now_s + 10)
    with fails(DEADLINE):
        connection.ask("GET", "/", {"host": "h"}, None, clock.now_s)
    pool.drop(connection)
    assert server.heads == []


# Ends that come too early


@pytest.mark.parametrize("end", [lambda peer: peer.sock.close(), reset])
@pytest.mark.parametrize("sent", [0, 1, 70_000])
def test_a_body_that_breaks_off_is_an_error(serve, make_pool, end, sent, get):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", bytes(sent))
        end(peer)

    pool = make_pool(serve(handle))
    with pytest.raises((RequestFailedError, ConnectionError)) as caught:
        get(pool, in_s(5))
    if isinstance(caught.value, RequestFailedError):
        assert caught.value.failure.label == "short_body"


def test_a_cut_tls_stream_is_no_whole_body(serve, make_pool, server_tls, fails, get):
    """Without TLS's own end, which an attacker cannot forge but can keep away."""

    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        socket.socket.shutdown(peer.sock, socket.SHUT_RDWR)

    with fails("short_body"):
        get(make_pool(serve(handle, server_tls)), in_s(5))


@pytest.mark.parametrize("says_close", [True, False])
def test_an_early_answer_to_a_large_body_is_understood(serve, make_pool, context, says_close):
    """The server answers after the head, reads nothing of the body and resets the connection."""

    def handle(peer):
        peer.read_head()
        peer.answer(412, b"<Code>PreconditionFailed</Code>", *([b"Connection: close"] if says_close else []))
        # The client gets on with its body until the window is full, and this data makes of the close a reset.
        time.sleep(0.05)

    pool = make_pool(serve(handle, context))
    assert put(pool, in_s(5), bytes(LARGE_BYTES)) == (412, b"<Code>PreconditionFailed</Code>")


def test_an_early_answer_of_a_server_that_reads_no_further_is_understood(serve, make_pool, context):
    """It answers and leaves the connection open, so that no reset tells of it."""

    def handle(peer):
        peer.read_head()
        peer.answer(412, b"<Code>PreconditionFailed</Code>")
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=0.3)
    assert put(pool, in_s(5), bytes(LARGE_BYTES)) == (412, b"<Code>PreconditionFailed</Code>")


def test_an_early_success_is_not_believed(serve, make_pool):
    def handle(peer):
        peer.read_head()
        peer.answer(200, b"")
        time.sleep(0.05)

    pool = make_pool(serve(handle))
    with pytest.raises(ConnectionError):
        put(pool, in_s(5), bytes(LARGE_BYTES))


def test_a_tls_connection_that_is_aborted_gives_no_ciphertext_away_as_a_body(serve, make_pool, server_tls, wait_until):
    """What has been received and not yet been read when the pool closes must not be read without its TLS."""
    body = b"A" * (8 << 20)  # More than the windows hold, so that it cannot have arrived as a whole.

    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)
        peer.over.wait(30)

    pool = make_pool(serve(handle, server_tls))
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "/", {"host": "h"}, None, in_s(5))
    buffer = memoryview(bytearray(len(body)))
    response.read_exactly(buffer[:100])
    time.sleep(0.05)
    pool.close()
    with pytest.raises((RequestFailedError, OSError)):
        response.read_exactly(buffer[100:])
    pool.drop(connection)
    assert set(bytes(buffer)) <= {0, ord("A")}


@pytest.mark.parametrize("status", [102, 103, 199])
def test_an_interim_answer_is_not_taken_for_the_answer_and_its_connection_serves_no_other_request(
    serve, make_pool, get, status
):
    def handle(peer):
        while peer.read_head():
            peer.send(b"HTTP/1.1 %d Interim\r\n\r\n" % status)
            peer.answer(200, b"abc")

    pool = make_pool(serve(handle))
    with pytest.raises(http.client.HTTPException, match=f"status {status}"):
        get(pool, in_s(30), 3)
    assert pool.busy == 0
