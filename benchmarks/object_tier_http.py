"""The raw HTTP floor of `object_tier`: requests signed beforehand, and the standard library's HTTP client.

Nothing here retries, follows redirects or hides an answer: any other status than the expected one raises.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast
from urllib.parse import SplitResult, urlsplit
from xml.sax.saxutils import escape

import boto3.session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials

_TIMEOUT_S: Final = 60.0
_IDLE_S: Final = 20.0
"""A connection that idled longer is made anew: servers close idle ones, RGW's after 65 s."""
_CONFIG: Final = Config(s3={"payload_signing_enabled": False})


class RefusedError(Exception):
    """The server answered with a status that was not asked for, or with fewer bytes than it should."""


@dataclass(frozen=True)
class Request:
    """A signed request: valid for 15 minutes, and as often as wanted within them."""

    method: str
    target: str
    headers: Mapping[str, str]


class _Signature(Protocol):
    """The one method of botocore's signer that is used; its stubs leave the request's type open."""

    def add_auth(self, request: AWSRequest) -> None: ...


def region_in_use() -> str:
    """As the environment says; servers other than AWS take the default."""
    return boto3.session.Session().region_name or "us-east-1"


def credentials_in_use() -> ReadOnlyCredentials:
    """As boto3 finds them, frozen for the run.

    Raises:
        RefusedError: it finds none.
    """
    credentials = boto3.session.Session().get_credentials()
    if credentials is None:
        raise RefusedError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return credentials.get_frozen_credentials()


class Signer:
    """Signs requests for one bucket, in path style, the payload unsigned. Thread-safe."""

    def __init__(self, endpoint_url: str, bucket: str) -> None:
        self._auth = cast(_Signature, S3SigV4Auth(credentials_in_use(), "s3", region_in_use()))
        self.endpoint = urlsplit(endpoint_url)
        self._bucket = bucket

    def sign(self, method: str, key: str, query: str = "", headers: Mapping[str, str] | None = None) -> Request:
        """A request for an object whose key needs no escaping."""
        target = f"/{self._bucket}/{key}" + (f"?{query}" if query else "")
        url = f"{self.endpoint.scheme}://{self.endpoint.netloc}{target}"
        request = AWSRequest(method=method, url=url, headers={"Host": self.endpoint.netloc, **(headers or {})})
        request.context["client_config"] = _CONFIG
        self._auth.add_auth(request)
        return Request(method, target, {name: str(value) for name, value in request.headers.items()})


class Connection:
    """One connection for one thread at a time; requests name the endpoint's host wherever it leads."""

    def __init__(self, endpoint: SplitResult, port: int | None = None) -> None:
        """`port`: of a forwarder on loopback that leads to the endpoint."""
        host = endpoint.hostname or ""
        self._http: http.client.HTTPConnection
        if endpoint.scheme == "https":
            context = ssl.create_default_context()
            self._http = http.client.HTTPSConnection(host, endpoint.port, timeout=_TIMEOUT_S, context=context)
        elif port is not None:
            self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        else:
            self._http = http.client.HTTPConnection(host, endpoint.port, timeout=_TIMEOUT_S)
        self._used_at_s = 0.0

    def prepare(self) -> None:
        """Be connected, so that the next request need not."""
        if self._http.sock is None or time.monotonic() > self._used_at_s + _IDLE_S:
            self._http.close()
            self._http.connect()
        self._used_at_s = time.monotonic()

    def put(self, request: Request, body: memoryview) -> str:
        """Send the body from where it lies; the object's or part's ETag as the server writes it.

        Raises:
            RefusedError: anything but 200.
        """
        self._http.request("PUT", request.target, body=body, headers=dict(request.headers))
        with self._http.getresponse() as response:
            answer = response.read()
            if response.status != 200:
                raise refused(request, response.status, answer)
            return response.headers.get("ETag", "")

    def get(self, request: Request, buffer: memoryview) -> None:
        """Fill the buffer, no more and no less.

        Raises:
            RefusedError: neither 200 nor 206, or a body of another length.
        """
        self._http.request("GET", request.target, headers=dict(request.headers))
        with self._http.getresponse() as response:
            if response.status not in (200, 206):
                raise refused(request, response.status, response.read())
            if response.length != buffer.nbytes:
                raise RefusedError(f"GET {request.target}: {response.length} bytes, asked for {buffer.nbytes}")
            position = 0
            while position < buffer.nbytes:
                count = response.readinto(buffer[position:])
                if not count:
                    raise RefusedError(f"GET {request.target}: ended after {position} of {buffer.nbytes} bytes")
                position += count

    def call(self, request: Request, body: bytes = b"") -> str:
        """Any other request; the answer's text.

        Raises:
            RefusedError: neither 200 nor 204, or a 200 that turns out to be an error in its body.
        """
        self._http.request(request.method, request.target, body=body, headers=dict(request.headers))
        with self._http.getresponse() as response:
            answer = response.read()
            if response.status not in (200, 204) or b"<Error>" in answer:
                raise refused(request, response.status, answer)
            return answer.decode()

    def close(self) -> None:
        self._http.close()


def refused(request: Request, status: int, answer: bytes) -> RefusedError:
    code = re.search(r"<Code>([^<]*)</Code>", answer.decode(errors="replace"))
    return RefusedError(f"{request.method} {request.target}: status {status}, code {code[1] if code else 'none'}")


def upload_id_of(answer: str) -> str:
    """From what CreateMultipartUpload answers."""
    found = re.search(r"<UploadId>([^<]+)</UploadId>", answer)
    if found is None:
        raise RefusedError(f"no upload id in {answer[:200]!r}")
    return found[1]


def completion(etags: list[str]) -> bytes:
    """The body of CompleteMultipartUpload, for parts 1, 2, ..."""
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
        for number, etag in enumerate(etags, 1)
    )
    return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
