"""Connections: every wait ends in time, nothing is lost or mixed up, what can serve again does."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
import tracemalloc
from urllib.parse import urlsplit

import pytest

from kvsluice.tiers.obj.failures import DEADLINE, RequestFailedError
from kvsluice.tiers.obj.wire import HttpPool, Target, Timeouts

LARGE_BYTES = 32 << 20
SOON_S = 3.0
"""What no test may take that gives up after a fraction of a second."""


def get(pool, end_s, size=None, **options):
    """One GET; its body, or as much of it as `size`."""
    connection = pool.take(end_s)
    try:
        response = connection.ask("GET", "/", {"host": "h"}, None, end_s, **options)
        buffer = bytearray(response.length if size is None else size)
        response.read_exactly(memoryview(buffer))
        whole = response.finish()
    except BaseException:
        pool.drop(connection)
        raise
    (pool.give if whole else pool.drop)(connection)
    return bytes(buffer)


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


@pytest.fixture(params=["http", "https"])
def context(request, server_tls):
    return server_tls if request.param == "https" else None


# What goes over the wire


def test_a_request_is_sent_with_its_own_headers_alone(serve, make_pool):
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


def test_a_body_of_many_windows_is_read_into_the_buffer_given(serve, make_pool, context):
    body = bytes(range(256)) * 20_000
    server = serve(lambda peer: peer.serve((200, body)), context)
    pool = make_pool(server)
    assert get(pool, in_s(5)) == body
    assert get(pool, in_s(5)) == body
    assert len(server.peers) == 1


@pytest.mark.parametrize("sizes", [[10], [1, 9], [3, 3, 4]])
def test_a_body_in_pieces_is_put_together_and_its_connection_serves_again(serve, make_pool, sizes):
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


def test_a_longer_body_in_pieces_is_not_taken_for_read(serve, make_pool):
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


def test_a_server_that_says_close_is_taken_at_its_word(serve, make_pool):
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
def test_silence_ends_after_the_read_timeout(serve, make_pool, context, fails, sent):
    def handle(peer):
        peer.read_head()
        peer.send(sent)
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=0.1)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        get(pool, in_s(30), 3)
    assert time.monotonic() - start_s < SOON_S


def test_a_request_may_bear_less_silence_than_its_pool(serve, make_pool):
    def handle(peer):
        peer.read_head()
        peer.over.wait(30)

    pool = make_pool(serve(handle), read_s=30)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        get(pool, in_s(30), 3, read_s=0.1)
    assert time.monotonic() - start_s < SOON_S


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
    with pytest.raises((RequestFailedError, TimeoutError)):
        put(pool, in_s(0.4), bytes(LARGE_BYTES))
    assert time.monotonic() - start_s < 1.5


def test_a_server_that_reads_slowly_and_steadily_is_waited_for(serve, make_pool, context):
    """What counts is whether bytes go out: all of them take several times the silence that is borne."""

    def handle(peer):
        peer.read_head()
        for _ in range(128):
            time.sleep(0.006)
            peer.read_body(1 << 17)
        peer.answer(200)

    pool = make_pool(serve(handle, context), read_s=0.4)
    start_s = time.monotonic()
    assert put(pool, in_s(30), bytes(1 << 24))[0] == 200
    assert time.monotonic() - start_s > 0.6


def test_a_server_that_stops_reading_ends_the_wait(serve, make_pool, context):
    def handle(peer):
        peer.read_head()
        peer.over.wait(30)

    pool = make_pool(serve(handle, context), read_s=0.1)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        put(pool, in_s(30), bytes(LARGE_BYTES))
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.parametrize(("connect_s", "left_s"), [(0.1, 30.0), (30.0, 0.1)])
def test_a_connect_that_nobody_answers_ends_in_time(unanswered, make_pool, fails, connect_s, left_s):
    pool = make_pool(unanswered, connect_s=connect_s)
    start_s = time.monotonic()
    with fails("connect_timeout"):
        pool.take(in_s(left_s))
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.parametrize(("connect_s", "left_s"), [(0.1, 30.0), (30.0, 0.1)])
def test_a_tls_handshake_that_stalls_ends_in_time(serve, client_tls, fails, connect_s, left_s):
    server = serve(lambda peer: peer.over.wait(30))
    pool = HttpPool(Target("127.0.0.1", server.port, client_tls), Timeouts(connect_s, 30), 1)
    start_s = time.monotonic()
    with fails("connect_timeout"):
        pool.take(in_s(left_s))
    assert time.monotonic() - start_s < SOON_S


def test_a_handshake_that_trickles_ends_in_time(serve, client_tls, fails):
    def handle(peer):
        # The head of a record of 16 KiB, of which each byte comes in time.
        peer.send(b"\x16\x03\x03\x40\x00")
        while not peer.over.wait(0.02):
            peer.send(b"\x02")

    pool = HttpPool(Target("127.0.0.1", serve(handle).port, client_tls), Timeouts(0.2, 30), 1)
    start_s = time.monotonic()
    with fails("connect_timeout"):
        pool.take(in_s(30))
    assert time.monotonic() - start_s < SOON_S


def test_no_connection_is_opened_once_the_deadline_is_over(serve, make_pool, clock, fails):
    server = serve(lambda peer: peer.serve((200, b"")))
    pool = make_pool(server, clock=clock)
    with fails(DEADLINE):
        pool.take(clock.now_s)
    assert server.peers == []


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
def test_a_body_that_breaks_off_is_an_error(serve, make_pool, end, sent):
    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", bytes(sent))
        end(peer)

    pool = make_pool(serve(handle))
    with pytest.raises((RequestFailedError, ConnectionError)) as caught:
        get(pool, in_s(5))
    if isinstance(caught.value, RequestFailedError):
        assert caught.value.failure.label == "short_body"


def test_a_cut_tls_stream_is_no_whole_body(serve, make_pool, server_tls, fails):
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


# The pool


def test_the_connection_used_last_is_used_next(serve, make_pool):
    server = serve(lambda peer: peer.serve((200, b"")))
    pool = make_pool(server)
    first, second = pool.take(in_s(5)), pool.take(in_s(5))
    pool.give(first)
    pool.give(second)
    assert pool.take(in_s(5)) is second
    assert pool.take(in_s(5)) is first
    pool.give(first)
    pool.give(second)


def test_fresh_insists_on_a_new_connection(serve, make_pool):
    pool = make_pool(serve(lambda peer: peer.serve((200, b""))))
    first = pool.take(in_s(5))
    pool.give(first)
    second = pool.take(in_s(5), fresh=True)
    assert second is not first
    pool.drop(second)


def test_a_connection_that_the_server_has_ended_is_not_taken(serve, make_pool, wait_until, context):
    def handle(peer):
        peer.read_head()
        peer.answer(200, b"abc")

    server = serve(handle, context)
    pool = make_pool(server)
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "/", {"host": "h"}, None, in_s(5))
    response.read_exactly(memoryview(bytearray(3)))
    assert response.finish()
    pool.give(connection)
    wait_until(connection.is_dropped)
    other = pool.take(in_s(5))
    assert other is not connection
    pool.drop(other)


def test_bytes_that_nobody_asked_for_end_a_connection(serve, make_pool, wait_until):
    """Else they would be taken for the next answer."""

    def handle(peer):
        peer.read_head()
        peer.answer(200, b"abc")
        peer.over.wait(0.02)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz")
        peer.over.wait(30)

    server = serve(handle)
    pool = make_pool(server)
    assert get(pool, in_s(5)) == b"abc"
    connection = pool.take(in_s(5))
    pool.give(connection)
    wait_until(connection.is_dropped)
    assert get(pool, in_s(5)) == b"abc"
    assert len(server.peers) == 2


def test_a_connection_that_was_idle_for_long_is_not_taken(serve, make_pool, clock):
    server = serve(lambda peer: peer.serve((200, b"")))
    pool = make_pool(server, clock=clock)
    first = pool.take(clock.now_s + 5)
    pool.give(first)
    clock.now_s += 19.9
    assert pool.take(clock.now_s + 5) is first
    pool.give(first)
    clock.now_s += 20.1
    second = pool.take(clock.now_s + 5)
    assert second is not first
    pool.drop(second)


def test_no_more_idle_connections_are_kept_than_told(serve, make_pool, wait_until):
    ended = []

    def handle(peer):
        peer.read_head()
        ended.append(peer.number)

    server = serve(handle)
    pool = make_pool(server, max_idle=2)
    connections = [pool.take(in_s(5)) for _ in range(5)]
    for connection in connections:
        pool.give(connection)
    wait_until(lambda: len(ended) == 3)
    assert [pool.take(in_s(5)) for _ in range(2)] == connections[1::-1]
    for connection in connections[:2]:
        pool.drop(connection)


def test_a_name_with_several_addresses_is_spread_over_all_of_them(serve, make_pool, monkeypatch):
    one, two = serve(lambda peer: peer.serve((200, b""))), serve(lambda peer: peer.serve((200, b"")))
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (server.host, server.port)) for server in (one, two)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    pool = make_pool(one, max_idle=0)
    for _ in range(4):
        get(pool, in_s(5))
    assert (len(one.peers), len(two.peers)) == (2, 2)
    two.stop_listening()
    for _ in range(4):
        get(pool, in_s(5))
    assert (len(one.peers), len(two.peers)) == (6, 2)


def test_a_refused_connection_says_so(serve, make_pool, fails):
    server = serve(lambda peer: None)
    server.stop_listening()
    with fails("connect"):
        make_pool(server).take(in_s(5))


def test_a_name_that_is_not_known_says_so(fails):
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    pool = HttpPool(Target("store.example", 80, None), Timeouts(1, 1), 1)
    with pytest.MonkeyPatch.context() as patch, fails("dns"):
        patch.setattr(socket, "getaddrinfo", refuse)
        pool.take(in_s(5))


def test_a_name_that_cannot_be_one_says_so(fails):
    """Python's resolver raises a ValueError there."""
    pool = HttpPool(Target("a" * 64 + ".example", 80, None), Timeouts(1, 1), 1)
    with fails("dns"):
        pool.take(in_s(5))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_certificate_has_to_be_of_the_host_and_of_a_known_authority(serve, client_tls, server_tls, fails, host):
    server = serve(lambda peer: peer.serve((200, b"abc")), server_tls)
    assert get(HttpPool(Target(host, server.port, client_tls), Timeouts(5, 5), 0), in_s(5)) == b"abc"
    with fails("tls"):
        HttpPool(Target(host, server.port, ssl.create_default_context()), Timeouts(5, 5), 0).take(in_s(5))


def test_a_certificate_of_another_host_is_refused(serve, client_tls, server_tls, fails, monkeypatch):
    server = serve(lambda peer: peer.serve((200, b"abc")), server_tls)
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **more: real("127.0.0.1", *args, **more))
    with fails("tls"):
        HttpPool(Target("other.example", server.port, client_tls), Timeouts(5, 5), 0).take(in_s(5))


def test_tls_to_a_server_that_speaks_plain_http_says_so(serve, client_tls, fails):
    server = serve(lambda peer: peer.answer(400))
    with fails("tls"):
        HttpPool(Target("127.0.0.1", server.port, client_tls), Timeouts(5, 5), 0).take(in_s(5))


def test_a_literal_ipv6_address_is_reached(serve, make_pool):
    try:
        server = serve(lambda peer: peer.serve((200, b"abc")), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert get(make_pool(server), in_s(5)) == b"abc"


# The end


def hanging(peer):
    """Half an answer, and then nothing."""
    peer.read_head()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", bytes(10))
    peer.over.wait(30)


def run_aside(call):
    """Run `call` on a thread; its errors, and when it ends."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_close_ends_what_hangs_in_a_read_at_once(serve, make_pool, context, wait_until):
    server = serve(hanging, context)
    pool = make_pool(server, read_s=60)
    thread, errors = run_aside(lambda: get(pool, in_s(60)))
    wait_until(lambda: bool(server.heads))
    time.sleep(0.02)
    pool.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_close_ends_what_hangs_in_a_send_at_once(serve, make_pool, context, wait_until):
    def handle(peer):
        peer.read_head()
        peer.over.wait(30)

    server = serve(handle, context)
    pool = make_pool(server, read_s=60)
    thread, errors = run_aside(lambda: put(pool, in_s(60), bytes(LARGE_BYTES)))
    wait_until(lambda: bool(server.heads))
    time.sleep(0.02)
    pool.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_close_ends_what_hangs_in_a_connect_at_once(unanswered, make_pool):
    pool = make_pool(unanswered, connect_s=60)
    thread, errors = run_aside(lambda: pool.take(in_s(60)))
    time.sleep(0.05)
    pool.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_close_ends_what_hangs_in_a_handshake_at_once(serve, client_tls, wait_until):
    server = serve(lambda peer: peer.over.wait(30))
    pool = HttpPool(Target("127.0.0.1", server.port, client_tls), Timeouts(60, 60), 1)
    thread, errors = run_aside(lambda: pool.take(in_s(60)))
    wait_until(lambda: bool(server.peers))
    time.sleep(0.02)
    pool.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert len(errors) == 1


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


def test_a_closed_pool_gives_no_connection_and_keeps_none(serve, make_pool, fails):
    server = serve(lambda peer: peer.serve((200, b"")))
    pool = make_pool(server)
    connection = pool.take(in_s(5))
    pool.close()
    pool.close()
    pool.give(connection)
    with fails("closed"):
        pool.take(in_s(5))


# Proxies


def test_plain_http_goes_to_the_proxy_instead_of_the_store(serve):
    proxy = serve(lambda peer: peer.serve((200, b"abc")))
    target = Target("store.example", 80, None, proxy=urlsplit(f"http://127.0.0.1:{proxy.port}"))
    pool = HttpPool(target, Timeouts(5, 5), 1)
    connection = pool.take(in_s(5))
    response = connection.ask("GET", "http://store.example/key", {"host": "store.example"}, None, in_s(5))
    assert response.status == 200
    pool.drop(connection)
    assert proxy.heads == [b"GET http://store.example/key HTTP/1.1\r\nhost: store.example"]


def relay(server):
    """What a proxy does with a tunnel."""

    def handle(peer):
        peer.read_head()
        peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection((server.host, server.port)) as onward:

            def back() -> None:
                while data := onward.recv(65536):
                    peer.send(data)

            thread, _ = run_aside(back)
            while data := peer.sock.recv(65536):
                onward.sendall(data)
            onward.shutdown(socket.SHUT_RDWR)
            thread.join(5)

    return handle


def test_tls_goes_through_a_tunnel_that_the_proxy_is_asked_for(serve, client_tls, server_tls):
    server = serve(lambda peer: peer.serve((200, b"abc")), server_tls)
    proxy = serve(relay(server))
    target = Target(
        "localhost",
        server.port,
        client_tls,
        proxy=urlsplit(f"http://127.0.0.1:{proxy.port}"),
        proxy_headers={"Proxy-Authorization": "Basic dTpw"},
    )
    pool = HttpPool(target, Timeouts(5, 5), 1)
    assert get(pool, in_s(5)) == b"abc"
    pool.close()
    where = b"localhost:%d" % server.port
    assert proxy.heads == [
        b"CONNECT %s HTTP/1.1\r\nHost: %s\r\nProxy-Authorization: Basic dTpw" % (where, where),
    ]
    assert b"Proxy" not in b"".join(server.heads)


def test_a_proxy_that_refuses_says_so(serve, client_tls, fails):
    proxy = serve(lambda peer: peer.serve((407, b"no")))
    target = Target("localhost", 443, client_tls, proxy=urlsplit(f"http://127.0.0.1:{proxy.port}"))
    with fails("connect") as caught:
        HttpPool(target, Timeouts(5, 5), 1).take(in_s(5))
    assert "the proxy answered 407" in str(caught.value)


def test_a_proxy_that_says_nothing_ends_the_wait(serve, client_tls, fails):
    proxy = serve(lambda peer: peer.over.wait(30))
    target = Target("localhost", 443, client_tls, proxy=urlsplit(f"http://127.0.0.1:{proxy.port}"))
    start_s = time.monotonic()
    with fails("connect_timeout"):
        HttpPool(target, Timeouts(0.1, 30), 1).take(in_s(30))
    assert time.monotonic() - start_s < SOON_S


def test_a_target_shows_no_secret_of_its_proxy():
    target = Target("h", 1, None, urlsplit("http://user:hidden@proxy:1"), {"Proxy-Authorization": "hidden"})
    assert "hidden" not in repr(target)
