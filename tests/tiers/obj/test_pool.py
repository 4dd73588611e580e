"""The pool: connections come up in time and to the right host, serve again where they can, and end when it closes."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

import pytest

from kvsluice.tiers.obj.failures import DEADLINE
from kvsluice.tiers.obj.pool import HttpPool, Target, Timeouts

LARGE_BYTES = 32 << 20
SOON_S = 3.0
"""What no test may take that gives up after a fraction of a second."""


def in_s(seconds):
    return time.monotonic() + seconds


# What is kept


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


def test_bytes_that_nobody_asked_for_end_a_connection(serve, make_pool, wait_until, get):
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


# How one comes up


def test_a_name_with_several_addresses_is_spread_over_all_of_them(serve, make_pool, monkeypatch, get):
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


def test_a_literal_ipv6_address_is_reached(serve, make_pool, get):
    try:
        server = serve(lambda peer: peer.serve((200, b"abc")), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert get(make_pool(server), in_s(5)) == b"abc"


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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_certificate_has_to_be_of_the_host_and_of_a_known_authority(serve, client_tls, server_tls, fails, host, get):
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


def test_close_ends_what_hangs_in_a_read_at_once(serve, make_pool, context, wait_until, get):
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
    connection = pool.take(in_s(60))
    headers = {"host": "h", "content-length": str(LARGE_BYTES)}
    body = memoryview(bytes(LARGE_BYTES))
    thread, errors = run_aside(lambda: connection.ask("PUT", "/", headers, body, in_s(60)))
    wait_until(lambda: bool(server.heads))
    time.sleep(0.02)
    pool.close()
    thread.join(SOON_S)
    pool.drop(connection)
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


def test_tls_goes_through_a_tunnel_that_the_proxy_is_asked_for(serve, client_tls, server_tls, get):
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


def test_bytes_that_tls_holds_already_are_seen_before_a_connection_serves_again(serve, make_pool, server_tls, get):
    """A second answer that came in the first one's record: on the socket itself nothing is left to see."""

    def handle(peer):
        peer.read_head()
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 28000\r\n\r\n"
        peer.send(head + bytes(28_000) + b"HTTP/1.1 200 GHOST\r\nContent-Length: 0\r\n\r\n" * 50)
        peer.over.wait(30)

    pool = make_pool(serve(handle, server_tls))
    assert get(pool, in_s(5)) == bytes(28_000)
    second = pool.take(in_s(5))
    assert second.served == 0, "a new one"
    pool.drop(second)
