"""The proxy of these tests: transparent without a fault, and each fault is the one it is named after."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected

import pytest
from fault_proxy import FaultProxy
from faults import (
    Answer,
    DeclareLess,
    Fault,
    FlipByte,
    HangUp,
    LoseAnswer,
    Nothing,
    Rate,
    ResetRequest,
    ResetResponse,
    ShortBody,
    StallBody,
    clock_skewed,
    error,
    slow_down,
)
from rgw import HOST, Rgw

pytestmark = pytest.mark.s3

BODY = os.urandom(1 << 20)


class Plain:
    """One connection through the proxy, on URLs that carry their own signature."""

    def __init__(self, rgw: Rgw, bucket: str, port: int) -> None:
        self._rgw, self._bucket = rgw, bucket
        self.connection = HTTPConnection(HOST, port, timeout=20.0)

    def url(self, method: str, key: str) -> str:
        # Signed for the gateway's own address: the host header is sent as that, and must get there.
        operation = {"GET": "get_object", "PUT": "put_object", "HEAD": "head_object"}[method]
        url = self._rgw.client.generate_presigned_url(operation, Params={"Bucket": self._bucket, "Key": key})
        return url.removeprefix(self._rgw.endpoint_url)

    def ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Host": f"{HOST}:{self._rgw.port}"}
        self.connection.request(method, self.url(method, key), body=body, headers=headers)
        response = self.connection.getresponse()
        return response.status, response.read()


@pytest.fixture
def plain(rgw: Rgw, bucket: str, proxy: FaultProxy) -> Iterator[Plain]:
    rgw.client.put_object(Bucket=bucket, Key="there", Body=BODY)
    made = Plain(rgw, bucket, proxy.port)
    yield made
    made.connection.close()


def test_without_a_fault_all_passes_on_one_connection(plain: Plain, proxy: FaultProxy) -> None:
    assert plain.ask("PUT", "new", BODY)[0] == 200
    assert plain.ask("GET", "new") == (200, BODY)
    assert plain.ask("HEAD", "new") == (200, b"")
    assert plain.ask("GET", "absent")[0] == 404
    assert plain.ask("HEAD", "absent") == (404, b"")
    assert proxy.counts() == {"PUT": 1, "GET": 2, "HEAD": 2}
    assert proxy.count() == 5
    assert proxy.connections == 1
    assert [seen.method for seen in proxy.requests] == ["PUT", "GET", "HEAD", "GET", "HEAD"]
    assert "X-Amz-Signature" in proxy.requests[0].path
    proxy.reset_counts()
    assert proxy.count() == 0


def test_a_chunked_answer_passes(rgw: Rgw, plain: Plain, bucket: str, proxy: FaultProxy) -> None:
    url = rgw.client.generate_presigned_url("list_objects_v2", Params={"Bucket": bucket})
    plain.connection.request(
        "GET", url.removeprefix(rgw.endpoint_url), headers={"Host": f"{HOST}:{rgw.port}", "Accept-Encoding": "identity"}
    )
    response = plain.connection.getresponse()
    assert response.getheader("Transfer-Encoding") == "chunked"
    assert b"<Key>there</Key>" in response.read()
    assert plain.ask("GET", "there") == (200, BODY)
    assert proxy.connections == 1


def test_expect_100_continue_passes(plain: Plain, rgw: Rgw, proxy: FaultProxy) -> None:
    with socket.create_connection((HOST, proxy.port), timeout=20.0) as raw:
        host = f"{HOST}:{rgw.port}"
        raw.sendall(
            f"PUT {plain.url('PUT', 'new')} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\n"
            "Expect: 100-continue\r\nConnection: close\r\n\r\n".encode()
        )
        assert raw.recv(1000).startswith(b"HTTP/1.1 100")
        raw.sendall(b"bytes")
        assert b"HTTP/1.1 200" in raw.makefile("rb").read()
    assert plain.ask("GET", "new") == (200, b"bytes")


def test_many_connections_pass(plain: Plain, rgw: Rgw, bucket: str, proxy: FaultProxy) -> None:
    def work(number: int) -> None:
        mine = Plain(rgw, bucket, proxy.port)
        image = os.urandom(300_000 + number)
        for turn in range(4):
            assert mine.ask("PUT", f"{number}-{turn}", image)[0] == 200
            assert mine.ask("GET", f"{number}-{turn}") == (200, image)
        mine.connection.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert proxy.counts() == {"PUT": 64, "GET": 64}
    assert proxy.connections == 16


@pytest.mark.parametrize("count", [0, 1, 1000, len(BODY) - 1])
def test_a_response_is_reset_in_its_body(plain: Plain, proxy: FaultProxy, count: int) -> None:
    proxy.inject(ResetResponse(count), times=1)
    with pytest.raises(ConnectionResetError):
        plain.ask("GET", "there")
    plain.connection.close()
    assert plain.ask("GET", "there") == (200, BODY)


@pytest.mark.parametrize("count", [0, 1000, len(BODY)])
def test_a_request_is_reset_in_its_body(plain: Plain, proxy: FaultProxy, count: int) -> None:
    proxy.inject(ResetRequest(count), times=1)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        plain.ask("PUT", "new", BODY)
    plain.connection.close()
    if count < len(BODY):
        assert plain.ask("GET", "new")[0] == 404


def test_an_answer_is_lost_and_the_work_done(plain: Plain, proxy: FaultProxy) -> None:
    proxy.inject(LoseAnswer(), method="PUT", times=1)
    with pytest.raises(ConnectionResetError):
        plain.ask("PUT", "new", BODY)
    plain.connection.close()
    assert plain.ask("GET", "new") == (200, BODY)


def test_a_connection_is_closed_in_order(plain: Plain, proxy: FaultProxy) -> None:
    proxy.inject(HangUp(), times=1)
    with pytest.raises(RemoteDisconnected):
        plain.ask("PUT", "new", BODY)
    plain.connection.close()
    assert plain.ask("GET", "new")[0] == 404


@pytest.mark.parametrize("count", [0, 1000, len(BODY) - 1])
def test_a_body_is_short(plain: Plain, proxy: FaultProxy, count: int) -> None:
    proxy.inject(ShortBody(count), times=1)
    with pytest.raises(IncompleteRead) as caught:
        plain.ask("GET", "there")
    assert caught.value.partial == BODY[:count]


@pytest.mark.parametrize("count", [1, 1000, len(BODY)])
def test_a_shorter_length_is_declared(plain: Plain, proxy: FaultProxy, count: int) -> None:
    proxy.inject(DeclareLess(count), times=1)
    assert plain.ask("GET", "there") == (200, BODY[: len(BODY) - count])
    assert plain.ask("GET", "there") == (200, BODY)
    assert proxy.connections == 1


@pytest.mark.parametrize("at", [0, 500_000, len(BODY) - 1, -1])
def test_one_byte_is_wrong(plain: Plain, proxy: FaultProxy, at: int) -> None:
    proxy.inject(FlipByte(at), times=1)
    wanted = bytearray(BODY)
    wanted[at] ^= 0xFF
    assert plain.ask("GET", "there") == (200, bytes(wanted))
    assert plain.ask("GET", "there") == (200, BODY)


@pytest.mark.parametrize(
    ("fault", "status", "header"),
    [
        (slow_down(), 503, None),
        (slow_down(7), 503, ("Retry-After", "7")),
        (error(500, "InternalError"), 500, None),
        (error(403, "AccessDenied"), 403, None),
        (error(400, "ExpiredToken"), 400, None),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_the_proxy_answers(
    plain: Plain, proxy: FaultProxy, method: str, fault: Answer, status: int, header: tuple[str, str] | None
) -> None:
    proxy.inject(fault, times=1)
    body = BODY if method == "PUT" else None
    plain.connection.request(method, plain.url(method, "new"), body=body)
    response = plain.connection.getresponse()
    assert response.status == status
    assert response.read() == (b"" if method == "HEAD" else fault.body)
    if header is not None:
        assert response.getheader(header[0]) == header[1]
    # The server heard of nothing, and the connection goes on.
    assert plain.ask("GET", "new")[0] == 404
    assert proxy.connections == 1


def test_an_answer_to_a_request_that_asks_first_comes_before_its_body(plain: Plain, proxy: FaultProxy) -> None:
    proxy.inject(slow_down())
    with socket.create_connection((HOST, proxy.port), timeout=20.0) as raw:
        raw.sendall(b"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert raw.makefile("rb").read().startswith(b"HTTP/1.1 503")


def test_a_skewed_clock_comes_with_the_server_s_date() -> None:
    fault = clock_skewed(3600.0)
    assert b"RequestTimeTooSkewed" in fault.body
    assert "GMT" in fault.headers["Date"]


def test_a_stall_holds_old_and_new_connections_until_it_ends(
    plain: Plain, rgw: Rgw, bucket: str, proxy: FaultProxy
) -> None:
    assert plain.ask("GET", "there") == (200, BODY)
    fresh = Plain(rgw, bucket, proxy.port)
    proxy.stall()
    fresh.connection.connect()  # is accepted
    with ThreadPoolExecutor(2) as pool:
        old, new = pool.submit(plain.ask, "GET", "there"), pool.submit(fresh.ask, "GET", "there")
        with pytest.raises(TimeoutError):
            old.result(0.3)
        assert not new.done()
        assert proxy.count() == 1
        proxy.release()
        assert old.result(20.0) == new.result(20.0) == (200, BODY)
    fresh.connection.close()


def test_a_stall_holds_a_body_that_is_under_way(plain: Plain, proxy: FaultProxy) -> None:
    proxy.limit(Rate(2e6))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(plain.ask, "GET", "there")
        while not proxy.count():
            time.sleep(0.001)
        proxy.stall()
        with pytest.raises(TimeoutError):
            asked.result(0.8)
        proxy.release()
        assert asked.result(20.0) == (200, BODY)


def test_one_body_stalls_and_others_pass(plain: Plain, rgw: Rgw, bucket: str, proxy: FaultProxy) -> None:
    rule = proxy.inject(StallBody(1000), times=1)
    other = Plain(rgw, bucket, proxy.port)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(plain.ask, "GET", "there")
        while not rule.hits:
            time.sleep(0.001)
        assert other.ask("GET", "there") == (200, BODY)
        assert not asked.done()
        rule.release()
        assert asked.result(20.0) == (200, BODY)
    other.connection.close()


def test_a_trickle_and_a_rate_take_their_time(plain: Plain, rgw: Rgw, bucket: str, proxy: FaultProxy) -> None:
    rgw.client.put_object(Bucket=bucket, Key="small", Body=b"x" * 20)
    proxy.inject(Rate(50.0), path_part="small")
    proxy.limit(Rate(4e6, delay_s=0.1))
    started_s = time.monotonic()
    assert plain.ask("GET", "small")[1] == b"x" * 20
    assert time.monotonic() - started_s >= 0.39
    for method, body in (("GET", None), ("PUT", BODY)):
        started_s = time.monotonic()
        plain.ask(method, "there", body)
        assert time.monotonic() - started_s >= 0.1 + len(BODY) / 4e6 - 0.01


def test_refused_and_accepted_again(plain: Plain, proxy: FaultProxy) -> None:
    assert plain.ask("GET", "there") == (200, BODY)
    proxy.refuse()
    with pytest.raises((RemoteDisconnected, ConnectionError)):
        plain.ask("GET", "there")
    plain.connection.close()
    with pytest.raises(ConnectionRefusedError):
        plain.ask("GET", "there")
    plain.connection.close()
    proxy.accept()
    assert plain.ask("GET", "there") == (200, BODY)


def test_idle_connections_are_closed_and_only_those(plain: Plain, rgw: Rgw, bucket: str, proxy: FaultProxy) -> None:
    rule = proxy.inject(StallBody(1000), times=1)
    busy = Plain(rgw, bucket, proxy.port)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(busy.ask, "GET", "there")
        while not rule.hits:
            time.sleep(0.001)
        assert plain.ask("GET", "there") == (200, BODY)
        while proxy.close_idle() != 1:  # it turns idle a moment after its answer
            time.sleep(0.001)
        with pytest.raises((RemoteDisconnected, ConnectionError)):
            plain.ask("GET", "there")
        rule.release()
        assert asked.result(20.0) == (200, BODY)
    busy.connection.close()


def test_rules_are_for_a_method_a_path_and_a_number_of_requests(plain: Plain, proxy: FaultProxy) -> None:
    spared = proxy.inject(Nothing(), path_part="there", method="HEAD")
    rule = proxy.inject(slow_down(), method="GET", path_part="there", times=2)
    assert plain.ask("HEAD", "there")[0] == 200
    assert plain.ask("GET", "absent")[0] == 404
    assert [plain.ask("GET", "there")[0] for _ in range(4)] == [503, 503, 200, 200]
    assert (spared.hits, rule.hits) == (1, 2)
    proxy.inject(slow_down())
    proxy.clear()
    assert plain.ask("GET", "there")[0] == 200


@pytest.mark.parametrize("fault", [StallBody(0), Rate(1.0), "stall"])
def test_stopped_in_the_middle_of_a_fault_no_thread_is_left(
    plain: Plain, rgw: Rgw, fault: Fault | str, bucket: str
) -> None:
    before = threading.active_count()
    with FaultProxy(HOST, rgw.port) as mine:
        if isinstance(fault, str):
            mine.stall()
        else:
            mine.inject(fault)
        held = Plain(rgw, bucket, mine.port)
        held.connection.request("GET", held.url("GET", "there"), headers={"Host": f"{HOST}:{rgw.port}"})
        while mine.connections < 1 or (not isinstance(fault, str) and not mine.count()):
            time.sleep(0.001)
    held.connection.close()
    assert threading.active_count() == before


def test_it_is_fast_enough(plain: Plain, proxy: FaultProxy) -> None:
    """Far below what it does alone on an idle machine, for the gateway and the client are on the same cores."""
    image = os.urandom(32 << 20)
    assert plain.ask("PUT", "large", image)[0] == 200
    best = 0.0
    for _ in range(3):
        started_s = time.monotonic()
        assert len(plain.ask("GET", "large")[1]) == len(image)
        best = max(best, len(image) / (time.monotonic() - started_s))
    assert best > 150e6
