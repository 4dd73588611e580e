"""What the object tier's tests share: one session of boto3, tiers on the scripted server, bare sockets, a clock."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3.session
import pytest
import trustme

from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.access import Access, AccessOptions, Place
from kvsluice.tiers.obj.endpoints import Endpoint, Endpoints
from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.pool import HttpPool, Target, Timeouts
from kvsluice.tiers.obj.requests import Request, Requests

_session = boto3.session.Session()
_real_session = boto3.session.Session

ACCESS_KEY = "AKIA-TEST"
SECRET_KEY = "very-secret"


@pytest.fixture(autouse=True)
def one_session(monkeypatch):
    """A new session parses megabytes of service descriptions: ten times the cost of its client."""
    monkeypatch.setattr(boto3.session, "Session", lambda **_: _session)
    # Whoever tries things on a gateway has its address and keys in the environment.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def own_sessions(one_session, monkeypatch, tmp_path):
    """Sessions as they really are, that find credentials in the environment alone."""
    monkeypatch.setattr(boto3.session, "Session", _real_session)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def make_scripted_tier(scripted, answer):
    """Makes tiers on the scripted server, which at their start takes conditions on PUT as S3 does."""
    tiers = []

    def make(**options):
        scripted.script = lambda request: answer(412 if request.method == "PUT" else 200)
        given = {"endpoint_url": scripted.endpoint_url, "access_key": "a", "secret_key": "b", "max_attempts": 1}
        tiers.append(ObjectTier("kv-test", **{**given, **options}))
        scripted.script = lambda request: answer()
        scripted.requests.clear()
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
    _join_crews()


@pytest.fixture
def make_tier():
    """Makes tiers on endpoints of a test's own."""
    tiers = []

    def make(*urls, **options):
        given = {"access_key": "a", "secret_key": "b", "max_attempts": 2, **options}
        tiers.append(ObjectTier("kv-test", endpoint_url=list(urls), **given))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
    _join_crews()


def _join_crews() -> None:
    """What still tidies up aside would ask servers that are gone."""
    for thread in threading.enumerate():
        if thread.name.startswith("kvsluice-obj-part"):
            thread.join(5.0)


class VirtualClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.step_s = 0.0
        """What passes each time somebody looks."""
        self.pauses: list[float] = []

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def pause(self, wait_s: float) -> bool:
        self.pauses.append(wait_s)
        self.now_s += wait_s
        return False


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


class Peer:
    """The server's side of one connection."""

    def __init__(self, sock: socket.socket, number: int, over: threading.Event) -> None:
        self.sock = sock
        self.number = number
        """Of the connection, from 0."""
        self.over = over
        """Set when the test ends: what a handler that is to hang waits for."""
        self.heads: list[bytes] = []
        self._left = b""

    def read_head(self) -> bytes:
        """The next request line and headers; b"" where the client ended the connection."""
        while b"\r\n\r\n" not in self._left:
            data = self.sock.recv(65536)
            if not data:
                return b""
            self._left += data
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        self.heads.append(head)
        return head

    def read_body(self, num_bytes: int) -> bytes:
        while len(self._left) < num_bytes and (data := self.sock.recv(1 << 20)):
            self._left += data
        body, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return body

    def discard(self, num_bytes: int) -> None:
        """Take in a body without keeping it, and without memory for it."""
        num_bytes -= len(self.read_body(min(num_bytes, len(self._left))))
        sink = memoryview(bytearray(1 << 16))
        while num_bytes and (count := self.sock.recv_into(sink[: min(num_bytes, len(sink))])):
            num_bytes -= count

    def read_request(self) -> bytes:
        """The next head, its body taken in."""
        head = self.read_head()
        length = re.search(rb"content-length: (\d+)", head)
        self.discard(int(length[1]) if length else 0)
        return head

    def send(self, *pieces: bytes) -> None:
        self.sock.sendall(b"".join(pieces))

    def answer(self, status: int = 200, body: bytes = b"", *headers: bytes) -> None:
        lines = [b"HTTP/1.1 %d words" % status, b"Content-Length: %d" % len(body), *headers, b"", b""]
        self.send(b"\r\n".join(lines), body)

    def serve(self, *answers: tuple[int, bytes]) -> None:
        """Answer request after request with these, the last one for ever."""
        number = 0
        while self.read_head():
            self.answer(*answers[min(number, len(answers) - 1)])
            number += 1


class SocketServer:
    """Runs `handle` on a thread for each connection."""

    def __init__(
        self, handle: Callable[[Peer], None], context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.peers: list[Peer] = []
        self._handle = handle
        self._context = context
        self._over = threading.Event()
        self._broken: list[BaseException] = []
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = self._listener.getsockname()[1]
        self.host = host
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._context else ''}://{host}:{self.port}"

    @property
    def heads(self) -> list[bytes]:
        return [head for peer in self.peers for head in peer.heads]

    def stop_listening(self) -> None:
        """From now on connections are refused."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self._over.set()
        self.stop_listening()
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(peer.sock, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
            assert not thread.is_alive()
        assert not self._broken

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(sock, len(self.peers), self._over)
            self.peers.append(peer)
            self._threads.append(threading.Thread(target=self._run, args=(peer,), daemon=True))
            self._threads[-1].start()

    def _run(self, peer: Peer) -> None:
        try:
            if self._context is not None:
                peer.sock = self._context.wrap_socket(peer.sock, server_side=True)
            self._handle(peer)
        except OSError:
            pass  # The client left, as in many tests it should.
        except BaseException as error:  # noqa: BLE001 - shown when the test ends
            self._broken.append(error)
        finally:
            peer.sock.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., SocketServer]]:
    """Makes servers from what they do with one connection."""
    servers: list[SocketServer] = []

    def make(handle: Callable[[Peer], None], context: ssl.SSLContext | None = None, **where: str) -> SocketServer:
        servers.append(SocketServer(handle, context, **where))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def unanswered() -> Iterator[int]:
    """A loopback port that takes no connection and refuses none: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


@pytest.fixture(params=["http", "https"])
def context(request: pytest.FixtureRequest, server_tls: ssl.SSLContext) -> ssl.SSLContext | None:
    """Has a test run over both."""
    return server_tls if request.param == "https" else None


@pytest.fixture(scope="session")
def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def make_pool(client_tls) -> Iterator[Callable[..., HttpPool]]:
    """Makes pools of connections to a server or a port."""
    pools: list[HttpPool] = []

    def make(server: SocketServer | int, *, connect_s=5.0, read_s=5.0, max_idle=4, clock=time.monotonic) -> HttpPool:
        port = server if isinstance(server, int) else server.port
        tls = client_tls if not isinstance(server, int) and server.url.startswith("https") else None
        host = "127.0.0.1" if isinstance(server, int) else server.host
        pools.append(HttpPool(Target(host, port, tls), Timeouts(connect_s, read_s), max_idle, clock))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def get() -> Callable[..., bytes]:
    """One GET on a connection of a pool; its body, or as much of it as `size`."""

    def get(pool: HttpPool, end_s: float, size: int | None = None) -> bytes:
        connection = pool.take(end_s)
        try:
            response = connection.ask("GET", "/", {"host": "h"}, None, end_s)
            buffer = bytearray(response.length if size is None else size)
            response.read_exactly(memoryview(buffer))
            whole = response.finish()
        except BaseException:
            pool.drop(connection)
            raise
        (pool.give if whole else pool.drop)(connection)
        return bytes(buffer)

    return get


@pytest.fixture
def make_access() -> Iterator[Callable[..., Access]]:
    """Makes what signs; with keys unless told otherwise."""
    made: list[Access] = []

    def make(bucket: str = "kv-test", clock: Callable[[], float] = time.monotonic, **options: object) -> Access:
        given = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY, **options}
        made.append(Access(bucket, AccessOptions(**given), clock=clock))
        return made[-1]

    yield make
    for access in made:
        access.close()


@pytest.fixture
def make_requests(make_access, client_tls) -> Iterator[Callable[..., Requests]]:
    """Makes what sends requests, on the clock given, to the endpoints of these URLs; a draw of a pause is its most."""
    made: list[Endpoints] = []

    def make(
        *urls: str,
        access: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_attempts: int = 3,
        connect_s: float = 5.0,
        read_s: float = 5.0,
        pause: Callable[[float], object] | None = None,
        random_s: Callable[[float], float] = lambda most_s: most_s,
    ) -> Requests:
        access = make_access(clock=clock) if access is None else access
        endpoints = []
        for url in urls:
            parts = urlsplit(url)
            target = Target(parts.hostname, parts.port, client_tls if parts.scheme == "https" else None)
            place = Place(url, f"{url}/kv-test/", "/kv-test/", parts.netloc, "us-east-1", False, target)
            endpoints.append(Endpoint(place, HttpPool(target, Timeouts(connect_s, read_s), 4, clock)))
        requests = Requests(
            access,
            Endpoints(endpoints, lambda endpoint: requests.probe(endpoint, Request("HEAD", "")), "test"),
            max_attempts=max_attempts,
            clock=clock,
            random_s=random_s,
            pause=pause if pause is not None else getattr(clock, "pause", None),
        )
        made.append(requests.endpoints)
        return requests

    yield make
    for endpoints in made:
        endpoints.close(5.0)


@pytest.fixture
def fails() -> Callable[..., contextlib.AbstractContextManager[pytest.ExceptionInfo[RequestFailedError]]]:
    """`with fails("timeout") as caught`: the block raises a `RequestFailedError` of that label."""

    @contextlib.contextmanager
    def fails(label: str) -> Iterator[pytest.ExceptionInfo[RequestFailedError]]:
        with pytest.raises(RequestFailedError) as caught:
            yield caught
        assert caught.value.failure.label == label

    return fails


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for another thread, which takes no time but that of being run."""

    def wait_until(happened: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 5.0
        while not happened():
            assert time.monotonic() < give_up_s
            time.sleep(0.001)

    return wait_until


def _signature(request, secret_key: str) -> str:
    """The signature that AWS's documentation prescribes for what was received, from its text alone."""
    words = dict(part.strip().split("=", 1) for part in request.headers["authorization"].split(" ", 1)[1].split(","))
    _, date, region, service, last = words["Credential"].rsplit("/", 4)
    path, _, query = request.path.partition("?")
    signed = words["SignedHeaders"].split(";")
    canonical = [request.method, path, "&".join(sorted(query.split("&"))) if query else ""]
    canonical += [f"{name}:{' '.join(request.headers[name].split())}" for name in signed]
    canonical += ["", ";".join(signed), request.headers["x-amz-content-sha256"]]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    scope = f"{date}/{region}/{service}/{last}"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, digest])
    key = f"AWS4{secret_key}".encode()
    for word in (date, region, service, last):
        key = hmac.digest(key, word.encode(), "sha256")
    assert {"host", "x-amz-date", "x-amz-content-sha256"} <= set(signed)
    assert {name for name in request.headers if name.startswith("x-amz-")} <= set(signed)
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


@pytest.fixture
def assert_signed() -> Callable[..., None]:
    """Holds a request, as a server received it, against its signature."""

    def assert_signed(request, secret_key: str = SECRET_KEY) -> None:
        _, _, given = request.headers["authorization"].rpartition("Signature=")
        assert given == _signature(request, secret_key)

    return assert_signed
