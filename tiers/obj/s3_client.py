"""boto3's S3 client as far as it is used, and what its failures mean. boto3 itself is not imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypedDict

from kvsluice.tiers.obj.failures import ObjectFailure, is_code

__all__ = ["DeleteError", "S3Client", "boto_errors", "failure_of_boto"]

_KINDS_OF_BOTO: Final[Mapping[str, str]] = {
    "ConnectTimeoutError": "connect_timeout",
    "ConnectionClosedError": "reset",
    "CredentialRetrievalError": "credentials",
    "EndpointConnectionError": "connect",
    "IncompleteReadError": "short_body",
    "ReadTimeoutError": "timeout",
    "SSLError": "tls",
}
"""In the words that failures of our own connections have."""


class Timestamp(Protocol):
    """A point in time."""

    def timestamp(self) -> float: ...


class ListedUpload(TypedDict):
    """One entry of a listing of multipart uploads."""

    Key: str
    UploadId: str
    Initiated: Timestamp


class ListPage(TypedDict, total=False):
    """One page of a listing of uploads."""

    Uploads: Sequence[ListedUpload]


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

    def delete_objects(self, *, Bucket: str, Delete: Mapping[str, object]) -> DeleteResponse: ...  # noqa: N803
    def get_paginator(self, name: Literal["list_multipart_uploads"], /) -> Paginator: ...
    def generate_presigned_url(
        self,
        ClientMethod: str,  # noqa: N803
        Params: Mapping[str, str],  # noqa: N803
        ExpiresIn: int,  # noqa: N803
    ) -> str: ...
    def close(self) -> None: ...


def boto_errors() -> tuple[type[Exception], ...]:
    """What a call of boto3 can fail with: botocore's two roots, and sockets."""
    from botocore.exceptions import BotoCoreError, ClientError

    return (ClientError, BotoCoreError, OSError)


def failure_of_boto(error: Exception) -> ObjectFailure:
    """What one of `boto_errors` says."""
    from botocore.exceptions import ClientError

    if not isinstance(error, ClientError):
        name = type(error).__name__
        return ObjectFailure(None, "", _KINDS_OF_BOTO.get(name, name))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = str(error.response.get("Error", {}).get("Code", ""))
    return ObjectFailure(status, code if is_code(code) else str(status), "status")
