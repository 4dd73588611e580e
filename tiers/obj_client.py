"""The S3 client of the object tier: how it is made, what of it is used, what its failures mean.

boto3 is imported here, when the first client is made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypedDict, cast
from urllib.parse import SplitResult, urlsplit

from kvsluice.tiers.errors import ConfigError

__all__ = [
    "GetResponse",
    "ObjectFailure",
    "S3Client",
    "check_bucket",
    "endpoint_of",
    "failure_of",
    "make_client",
    "signs_payload",
    "transport_errors",
]

_DEFAULT_REGION: Final = "us-east-1"
"""What S3-compatible servers take when nothing is configured; signatures need some region."""

_HINTS: Final[Mapping[str, str]] = {
    "AccessDenied": "these credentials may not do that",
    "AuthorizationHeaderMalformed": "the region is another one",
    "ExpiredToken": "the session token has expired",
    "IllegalLocationConstraintException": "the region is another one",
    "InvalidAccessKeyId": "the access key is unknown",
    "NoSuchBucket": "the bucket does not exist",
    "PermanentRedirect": "the bucket is in another region",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "SignatureDoesNotMatch": "the secret key is another one",
    "SlowDown": "the server asks for fewer requests",
    "ConditionalRequestConflict": "another writer was at it",
}
_FULL_CODES: Final = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"})


class RawBody(Protocol):
    """An open response body."""

    def readinto(self, b: memoryview, /) -> int: ...


class GetResponse(TypedDict, total=False):
    """What of GetObject's answer is used."""

    Body: AbstractContextManager[RawBody]
    ContentLength: int


class ListedObject(TypedDict):
    """One entry of a listing."""

    Key: str


class ListPage(TypedDict, total=False):
    """One page of a listing."""

    Contents: Sequence[ListedObject]


class DeleteError(TypedDict, total=False):
    """One object that DeleteObjects could not delete."""

    Key: str
    Code: str


class DeleteResponse(TypedDict, total=False):
    """What of DeleteObjects' answer is used."""

    Errors: list[DeleteError]


class Paginator(Protocol):
    """A listing in pages."""

    def paginate(self, *, Bucket: str, Prefix: str) -> Iterable[ListPage]: ...  # noqa: N803


class S3Client(Protocol):
    """The part of boto3's S3 client that is used; parameters are named as S3 names them."""

    def head_bucket(self, *, Bucket: str) -> object: ...  # noqa: N803
    def head_object(self, *, Bucket: str, Key: str) -> object: ...  # noqa: N803
    def get_object(self, *, Bucket: str, Key: str) -> GetResponse: ...  # noqa: N803
    def put_object(self, *, Bucket: str, Key: str, Body: bytearray, IfNoneMatch: str = ...) -> object: ...  # noqa: N803
    def delete_object(self, *, Bucket: str, Key: str) -> object: ...  # noqa: N803
    def delete_objects(self, *, Bucket: str, Delete: Mapping[str, object]) -> DeleteResponse: ...  # noqa: N803
    def get_paginator(self, operation_name: Literal["list_objects_v2"], /) -> Paginator: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ObjectFailure:
    """One failed request, without the server's own words, which may repeat what it was sent."""

    status: int | None
    """HTTP status; `None` where no answer came."""
    code: str
    """The server's error code; where no answer came, what happened."""
    kind: str
    """Name of the exception's class."""

    @property
    def label(self) -> str:
        """The words it is counted under."""
        return self.kind if self.status is None else f"{self.status} {self.code}"

    @property
    def is_missing_key(self) -> bool:
        """The object does not exist. A HEAD has no body, so its 404 is taken for the object's."""
        return self.code == "NoSuchKey" or (self.status == 404 and self.code in ("404", "NotFound"))

    @property
    def is_not_implemented(self) -> bool:
        """The server does not know what it was asked for."""
        return self.status == 501 or self.code == "NotImplemented"

    @property
    def is_full(self) -> bool:
        """The server has no space, or no quota left for us."""
        return self.status == 507 or self.code in _FULL_CODES

    def __str__(self) -> str:
        if self.status is None:
            return f"no answer ({self.kind}: {self.code})" if self.code else f"no answer ({self.kind})"
        hint = _HINTS.get(self.code)
        return f"status {self.status}, code {self.code}" + (f" ({hint})" if hint else "")


def endpoint_of(endpoint_url: str | None) -> SplitResult | None:
    """The endpoint in parts, https unless it says otherwise; `None` for AWS.

    Raises:
        ConfigError: no host, another scheme, or credentials in the URL, which would reach logs.
    """
    if endpoint_url is None:
        return None
    try:
        parts = urlsplit(endpoint_url if "://" in endpoint_url else f"https://{endpoint_url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"endpoint_url is no URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("endpoint_url holds credentials: give them as access_key and secret_key")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"endpoint_url is {endpoint_url!r}: give https://HOST[:PORT] or http://HOST[:PORT]")
    return parts


def signs_payload(endpoint: SplitResult | None) -> bool:
    """Whether payloads are signed: only where plain http would let others change them on their way."""
    if endpoint is None or endpoint.scheme != "http":
        return False
    host = endpoint.hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def make_client(
    *,
    endpoint_url: str | None,
    region: str | None,
    access_key: str | None,
    secret_key: str | None,
    session_token: str | None,
    ca_bundle: str | None,
    addressing_style: Literal["auto", "path", "virtual"],
    max_connections: int,
    connect_timeout_s: float,
    read_timeout_s: float,
    max_attempts: int,
) -> S3Client:
    """A client of its own session, so that nothing of it is shared with the application's.

    Raises:
        ConfigError: boto3 is absent, or it refuses the configuration.
    """
    endpoint = endpoint_of(endpoint_url)
    if (access_key is None) != (secret_key is None):
        raise ConfigError("access_key and secret_key go together: give both, or neither")
    try:
        import boto3.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"the obj tier needs boto3: pip install 'kvsluice[obj]' ({error})") from error
    try:
        session = boto3.session.Session()
        client = session.client(
            "s3",
            endpoint_url=endpoint.geturl() if endpoint is not None else None,
            region_name=region or session.region_name or _DEFAULT_REGION,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            aws_session_token=session_token,
            verify=ca_bundle,
            config=Config(
                signature_version="s3v4",
                s3={"payload_signing_enabled": signs_payload(endpoint), "addressing_style": addressing_style},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=max_connections,
                connect_timeout=connect_timeout_s,
                read_timeout=read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": max_attempts},
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"boto3 refuses the configuration of the obj tier: {error}") from error
    return cast("S3Client", client)


def transport_errors() -> tuple[type[Exception], ...]:
    """What a request or a body can fail with: botocore's two roots, urllib3's under a body, sockets, a short body."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return (ClientError, BotoCoreError, HTTPError, OSError, EOFError)


def failure_of(error: Exception) -> ObjectFailure:
    """What one of `transport_errors` says, told apart by status and code."""
    from botocore.exceptions import ClientError

    kind = type(error).__name__
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return ObjectFailure(status=status, code=str(error.response.get("Error", {}).get("Code", "unknown")), kind=kind)
    return ObjectFailure(status=None, code=str(error), kind=kind)


def check_bucket(client: S3Client, bucket: str, endpoint_url: str | None) -> None:
    """Ask for the bucket once.

    Raises:
        ConfigError: it does not exist, may not be used, or nobody answers; it names bucket and endpoint.
    """
    where = f"bucket {bucket!r} at {endpoint_url or 'AWS'}"
    try:
        client.head_bucket(Bucket=bucket)
    except transport_errors() as error:
        failure = failure_of(error)
        if failure.status == 404:
            raise ConfigError(f"{where} does not exist") from error
        if failure.status == 403:
            raise ConfigError(f"{where} may not be used with these credentials: {failure}") from error
        if failure.status in (301, 307):
            raise ConfigError(f"{where} is in another region: set region ({failure})") from error
        raise ConfigError(f"{where} cannot be reached: {failure}") from error
