"""Stand-ins for what tiers talk to: moto's S3, a server with scripted answers, the direct-I/O flag."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest

from kvsluice.tiers import directio
from kvsluice.tiers.fs import FileSystemTier

_bucket_numbers = count()


@lru_cache(maxsize=1)
def _session():
    # Here and below, so that the other tiers' tests run without the obj extra.
    import boto3.session

    return boto3.session.Session()


@dataclass(frozen=True)
class Bucket:
    """A fresh bucket of the moto server, and a plain client to look into it."""

    name: str
    endpoint_url: str
    access_key: str = "test-access"
    secret_key: str = "test-secret"

    @property
    def credentials(self) -> dict[str, str]:
        return {"endpoint_url": self.endpoint_url, "access_key": self.access_key, "secret_key": self.secret_key}

    def client(self):
        return _session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def read(self, object_key: str) -> bytes:
        client = self.client()
        try:
            return client.get_object(Bucket=self.name, Key=object_key)["Body"].read()
        finally:
            client.close()

    def write(self, object_key: str, body: bytes) -> None:
        client = self.client()
        client.put_object(Bucket=self.name, Key=object_key, Body=body)
        client.close()

    def keys(self) -> list[str]:
        client = self.client()
        try:
            return sorted(entry["Key"] for entry in client.list_objects_v2(Bucket=self.name).get("Contents", ()))
        finally:
            client.close()


@pytest.fixture
def bucket(s3_endpoint: str) -> Bucket:
    fresh = Bucket(f"test-{next(_bucket_numbers)}", s3_endpoint)
    client = fresh.client()
    client.create_bucket(Bucket=fresh.name)
    client.close()
    return fresh


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: tuple[str, int]


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    declared_bytes: int | None = None
    """What Content-Length says, where that is not the truth."""
    chunked: bool = False
    until_closed: bool = False
    """Declare no length: the body ends with the connection."""
    hang_up: bool = False
    """End the connection without an answer."""

    @classmethod
    def error(cls, status: int, code: str) -> Answer:
        return cls(status, f"<Error><Code>{code}</Code><Message>server words</Message></Error>".encode())


class ScriptedServer:
    """Answers each request as `script` says and remembers it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: Callable[[Request], Answer] = lambda request: Answer()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body, self.client_address)
                outer.requests.append(request)
                answer = outer.script(request)
                if answer.hang_up:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                elif answer.until_closed:
                    self.close_connection = True
                else:
                    told = len(answer.body) if answer.declared_bytes is None else answer.declared_bytes
                    self.send_header("Content-Length", str(told))
                self.end_headers()
                if self.command == "HEAD":
                    return
                body = answer.body
                try:
                    self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if answer.chunked else body)
                except ConnectionError:
                    # A client may have seen enough.
                    self.close_connection = True
                if answer.declared_bytes is not None:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # A short poll only: the shutdown waits for it.
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def answer() -> type[Answer]:
    """The class of scripted answers, as test modules cannot import from here."""
    return Answer


@pytest.fixture
def flags(monkeypatch):
    """Takes the place of the direct-I/O flag, which not every file system has; says what each file has."""
    on: dict[int, bool] = {}
    monkeypatch.setattr(directio, "set_direct", on.__setitem__)
    return on


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[FileSystemTier]:
    """A tier whose background work is done, so that faults hit the calls under test alone."""
    tier = FileSystemTier(root, namespace="ab12")
    assert tier.quota.wait_idle(30)
    yield tier
    tier.close()
