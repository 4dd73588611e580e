"""The object tier on servers that leave, stall or answer late, and on several of them."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc

import pytest

from kvsluice.tiers.errors import ConfigError, TierUnavailableError
from kvsluice.tiers.reasons import IO_ERROR

KEY = bytes(range(34))
IMAGE = bytes(range(256)) * 64
MIB = 1 << 20
PARTS = {"parts": "on", "part_bytes": 5 * MIB, "max_connections": 4}
LARGE = bytes(range(256)) * (10 * MIB // 256)


def view(image: bytes) -> memoryview:
    return memoryview(bytearray(image))


def well(peer, *, body=IMAGE):
    """A store that takes conditions on PUT and holds `body` under every key."""
    while head := peer.read_request():
        method, path, _ = head.split(b" ", 2)
        if method == b"PUT":
            peer.answer(412 if b"probe-" in path or b"namespace.json" in path else 200)
        elif method == b"GET":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            peer.sock.sendall(body)
        else:
            peer.answer(200)


def loads_seen(server):
    """At its start the tier asks for a listing too."""
    return sum(head.startswith(b"GET") and b"list-type" not in head for head in server.heads)


# Several endpoints


def test_of_several_endpoints_all_are_used_and_one_that_fails_is_made_up_for(serve, make_tier):
    one, two = serve(well), serve(well)
    tier = make_tier(one.url, two.url)
    for _ in range(4):
        tier.load(KEY, view(IMAGE), len(IMAGE))
    assert min(loads_seen(server) for server in (one, two)) == 2
    one.close()
    for _ in range(10):
        assert tier.store(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)
        assert tier.load(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)
        assert tier.held_prefix([KEY, KEY]) == 2
    assert tier.failure_counts() == {}


def test_an_endpoint_that_cannot_be_reached_at_the_start_is_borne_where_another_can(serve, make_tier, caplog):
    gone, server = serve(well), serve(well)
    gone.close()
    tier = make_tier(gone.url, server.url, max_attempts=2)
    assert tier.load(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)
    assert f"bucket 'kv-test' at {gone.url} cannot be reached" in caplog.text


def test_where_no_endpoint_can_be_reached_the_configuration_is_wrong(serve, make_tier):
    gone = [serve(well) for _ in range(2)]
    for server in gone:
        server.close()
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_tier(*(server.url for server in gone), max_attempts=1)


# Buffers


@pytest.mark.parametrize("in_parts", [False, True])
def test_nothing_writes_to_the_buffer_once_a_load_has_failed(serve, make_tier, in_parts):
    """One range is refused while the others still come in."""
    refused = threading.Event()

    def handle(peer):
        while head := peer.read_request():
            span = re.search(rb"range: bytes=(\d+)-(\d+)", head)
            if not head.startswith(b"GET"):
                peer.answer(412 if head.startswith(b"PUT") else 200)
                continue
            start, end = (int(span[1]), int(span[2]) + 1) if span else (0, len(LARGE))
            if start:
                peer.answer(403, b"<Code>AccessDenied</Code>")
                refused.set()
                continue
            peer.send(b"HTTP/1.1 %d OK\r\n" % (206 if span else 200))
            if span:
                peer.send(b"Content-Range: bytes %d-%d/%d\r\n" % (start, end - 1, len(LARGE)))
            peer.send(b"Content-Length: %d\r\n\r\n" % (end - start), b"x" * MIB)
            refused.wait(0.05)
            # Until the client gives it up.
            for _ in range(3):
                peer.over.wait(0.02)
                peer.send(b"x" * MIB)
            peer.over.wait(0.5)

    server = serve(handle)
    tier = make_tier(
        server.url, operation_timeout_s=0.3, max_attempts=1, **{**PARTS, "parts": "on" if in_parts else "off"}
    )
    buffer = view(bytes(len(LARGE)))
    with pytest.raises(TierUnavailableError):
        tier.load(KEY, buffer, len(LARGE))
    found = bytes(buffer)
    time.sleep(0.1)
    assert bytes(buffer) == found


def test_a_large_chunk_is_stored_and_loaded_without_a_copy(serve, make_tier):
    image = bytes(32 * MIB)
    tier = make_tier(serve(lambda peer: well(peer, body=image)).url, parts="off")
    buffer = memoryview(bytearray(len(image)))
    tier.store(KEY, buffer[:100], 100)
    tracemalloc.start()
    try:
        assert tier.store(KEY, buffer, len(image)) == len(image)
        assert tier.load(KEY, buffer, len(image)) == len(image)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MIB


# Time, and the end


def silent(peer):
    """Well at the start, and then without an answer."""
    while head := peer.read_request():
        if b"/default/" in head.split(b" ")[1] and b"probe-" not in head:
            peer.over.wait(30)
            return
        peer.answer(412 if head.startswith(b"PUT") else 200)


OPERATIONS = {
    "store": lambda tier: tier.store(KEY, view(IMAGE), len(IMAGE)),
    "load": lambda tier: tier.load(KEY, view(IMAGE), len(IMAGE)),
    "held_prefix": lambda tier: tier.held_prefix([KEY] * 100),
    "delete": lambda tier: tier.delete(KEY),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_ends_by_its_deadline(serve, make_tier, operation):
    tier = make_tier(serve(silent).url, operation_timeout_s=0.2, read_timeout_s=30, max_attempts=10)
    start_s = time.monotonic()
    with pytest.raises(TierUnavailableError) as caught:
        OPERATIONS[operation](tier)
    assert time.monotonic() - start_s < 2
    assert caught.value.reason == IO_ERROR


def test_a_lookup_of_many_questions_has_one_deadline(serve, make_tier):
    """Each answer comes in time, all of them together do not."""

    def handle(peer):
        while head := peer.read_request():
            if head.startswith(b"HEAD /kv-test/default/"):
                peer.over.wait(0.05)
                peer.answer(404 if b"/01" not in head else 200)
            else:
                peer.answer(412 if head.startswith(b"PUT") else 200)

    tier = make_tier(serve(handle).url, operation_timeout_s=0.2, max_attempts=10)
    with pytest.raises(TierUnavailableError):
        tier.held_prefix([b"\x01", *(bytes([2, number]) for number in range(200))])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_closing_ends_what_hangs_at_once_and_leaves_no_thread(serve, make_tier, wait_until, operation, caplog):
    before = set(threading.enumerate())
    server = serve(silent)
    tier = make_tier(server.url, operation_timeout_s=60, read_timeout_s=60)
    errors = []

    def work():
        try:
            OPERATIONS[operation](tier)
        except TierUnavailableError as error:
            errors.append(error)

    count = len(server.heads)
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.heads) == count + 6)
    start_s = time.monotonic()
    tier.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start_s < 2
    assert len(errors) == 6
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvsluice-")]
    assert " fail at " not in caplog.text


def test_an_outage_fails_at_once_after_a_few_failures_and_its_end_is_found_without_a_users_request(
    serve, make_tier, wait_until, monkeypatch
):
    monkeypatch.setattr("kvsluice.tiers.obj.endpoints._PROBE_EVERY_S", 0.01)
    broken = threading.Event()

    def handle(peer):
        while head := peer.read_request():
            if broken.is_set():
                peer.answer(503, b"<Code>SlowDown</Code>")
            else:
                peer.answer(412 if head.startswith(b"PUT") else 200, IMAGE if head.startswith(b"GET") else b"")

    server = serve(handle)
    tier = make_tier(server.url, max_attempts=1)
    broken.set()
    for _ in range(8):
        with pytest.raises(TierUnavailableError):
            tier.load(KEY, view(IMAGE), len(IMAGE))
    assert tier.failure_counts() == {"503 SlowDown": 5, "breaker_open": 3}
    assert loads_seen(server) == 5
    broken.clear()
    wait_until(lambda: "kvsluice-obj-probe-0" not in [thread.name for thread in threading.enumerate()])
    assert tier.load(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)


def test_a_store_that_is_gone_is_found_out_by_two_lookups_and_nothing_else_waits_for_it(serve, make_tier, wait_until):
    server = serve(silent)
    tier = make_tier(server.url, read_timeout_s=0.1, max_attempts=1)
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match="no answer"):
            tier.held_prefix([KEY])
    endpoint = tier._endpoints.all[0]  # noqa: SLF001 - when the probe has found out is seen nowhere else
    wait_until(lambda: not endpoint.breakers["load"].has_room and not endpoint.breakers["store"].has_room)
    count = len(server.heads)
    for operation in OPERATIONS.values():
        with pytest.raises(TierUnavailableError, match="breaker_open"):
            operation(tier)
    assert tier.failure_counts() == {"timeout": 2, "breaker_open": len(OPERATIONS)}
    assert not [head for head in server.heads[count:] if not head.startswith(b"HEAD /kv-test/default/namespace.json ")]
