"""What a request to an object store can end with, told apart, and what can be done about it."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = [
    "DEADLINE",
    "SHORT_BODY",
    "ObjectFailure",
    "RequestFailedError",
    "failure_of_answer",
    "failure_of_error",
    "is_code",
]

DEADLINE: Final = "deadline"
"""The operation's own time was over."""
SHORT_BODY: Final = "short_body"
"""The body ended before its declared length."""
_TLS: Final = "tls"
_SPEAKS_HTTP: Final = "WRONG_VERSION_NUMBER"
"""How OpenSSL says that what came is no TLS."""

_HINTS: Final[Mapping[str, str]] = {
    "AccessDenied": "these credentials may not do that",
    "AuthorizationHeaderMalformed": "the region is another one",
    "ConditionalRequestConflict": "another writer was at it",
    "ExpiredToken": "the session token has expired",
    "IllegalLocationConstraintException": "the region is another one",
    "InvalidAccessKeyId": "the access key is unknown",
    "InvalidToken": "the session token is not one of these keys",
    "NoSuchBucket": "the bucket does not exist",
    "PermanentRedirect": "the bucket is in another region",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "SignatureDoesNotMatch": "the secret key is another one",
    "SlowDown": "the server asks for fewer requests",
    "TokenRefreshRequired": "the session token has expired",
}
_FULL_CODES: Final = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"})
_EXPIRED_CODES: Final = frozenset({"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"})
_PASSING_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_CODES: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"})
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>")
_PLAIN_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class ObjectFailure:
    """One failed request, without the server's own words, which may repeat what it was sent."""

    status: int | None
    """HTTP status; `None` where no answer came."""
    code: str
    """The server's error code; where no answer came, the error's own words."""
    kind: str
    """Where no answer came: `dns`, `connect`, `connect_timeout`, `tls`, `reset`, `timeout`, `deadline`, `short_body`,
    `protocol`, `replaced`, `credentials`, `breaker_open`, `closed`; else `status`."""
    region: str | None = None
    """Where the bucket is, where the server said so."""
    skew_s: float | None = None
    """How far the server's clock is ahead of ours, where it said that the two are too far apart."""
    retry_after_s: float = 0.0
    """What the server asks for before the next try."""

    @property
    def label(self) -> str:
        """The words it is counted under."""
        return self.kind if self.status is None else f"{self.status} {self.code}"

    @property
    def is_missing_key(self) -> bool:
        """The object does not exist. A HEAD has no body, so its 404 is taken for the object's."""
        return self.status == 404 and self.code in ("NoSuchKey", "404", "NotFound")

    @property
    def is_held_already(self) -> bool:
        """The condition of a conditional PUT does not hold."""
        return self.status == 412

    @property
    def is_not_implemented(self) -> bool:
        """The server does not know what it was asked for."""
        return self.status == 501 or self.code == "NotImplemented"

    @property
    def is_full(self) -> bool:
        """The server has no space, or no quota left for us."""
        return self.status == 507 or self.code in _FULL_CODES

    @property
    def wants_new_credentials(self) -> bool:
        """The keys are not valid any more: newer ones may be there."""
        return self.code in _EXPIRED_CODES

    @property
    def may_pass(self) -> bool:
        """Whether the same request may well succeed a moment later, or at another endpoint."""
        if self.status is None:
            return self.kind not in (_TLS, DEADLINE, "credentials", "breaker_open", "closed")
        return self.status in _PASSING_STATUSES or self.code in _PASSING_CODES

    @property
    def blames_endpoint(self) -> bool:
        """Whether it says something about the endpoint's health; an answer of any other kind proves that it lives."""
        if self.status is None:
            return self.kind not in ("credentials", "breaker_open", "closed", "replaced")
        return self.status in _PASSING_STATUSES

    def __str__(self) -> str:
        if self.status is None:
            words = f"no answer ({self.kind}: {self.code})" if self.code else f"no answer ({self.kind})"
            return words + ("; for plain http say http:// in endpoint_url" if _SPEAKS_HTTP in self.code else "")
        hint = _HINTS.get(self.code)
        if self.skew_s is not None:
            hint = f"this machine's clock is {abs(self.skew_s):.0f} s {'behind' if self.skew_s > 0 else 'ahead'}"
        if self.region is not None:
            hint = f"the bucket is in region {self.region}"
        return f"status {self.status}, code {self.code}" + (f" ({hint})" if hint else "")


class RequestFailedError(Exception):
    """A request that did not do what was asked; never leaves the tier but as the cause of a `TierError`."""

    def __init__(self, failure: ObjectFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def is_code(word: str) -> bool:
    """Whether it looks like an error code, and not like other words of the server's."""
    return _PLAIN_CODE.fullmatch(word) is not None


def failure_of_answer(status: int, headers: Mapping[str, str], body: bytes, now_epoch_s: float) -> ObjectFailure:
    """What an answer other than the wanted one says; `headers` by lower-case name.

    Args:
        body: the start of the answer's body; only its code is taken from it.
        now_epoch_s: this machine's clock, for the difference to the server's.
    """
    found = _CODE.search(body)
    code = found.group(1).decode() if found else str(status)
    skew_s = None
    if code == "RequestTimeTooSkewed" and "date" in headers:
        try:
            skew_s = parsedate_to_datetime(headers["date"]).timestamp() - now_epoch_s
        except ValueError:
            skew_s = None
    try:
        # The other form, a date, is not used by object stores; a wait of that kind is ours to choose.
        retry_after_s = max(0.0, float(headers.get("retry-after", "0")))
    except ValueError:
        retry_after_s = 0.0
    region = headers.get("x-amz-bucket-region", "") if status in (301, 307, 400) else ""
    known_region = region if _REGION.fullmatch(region) else None
    return ObjectFailure(status, code, "status", known_region, skew_s, retry_after_s)


def failure_of_error(error: Exception, *, connecting: bool = False) -> ObjectFailure:
    """What an error of a socket, of TLS or of HTTP's own rules says.

    Args:
        connecting: the connection was not up yet.
    """
    words = str(error)
    kind: str
    match error:
        case RequestFailedError():
            return error.failure
        case socket.gaierror():
            kind = "dns"
        case TimeoutError():
            kind = "connect_timeout" if connecting else "timeout"
        case ssl.SSLError() if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            kind = _TLS
        case ConnectionRefusedError():
            kind = "connect"
        case ConnectionError() | ssl.SSLError() | http.client.IncompleteRead():
            kind = "reset"
        case http.client.BadStatusLine() | http.client.UnknownProtocol():
            # Their words are what the other side sent.
            kind, words = "protocol", "that is no HTTP/1"
        case http.client.HTTPException():
            kind = "protocol"
        case _:
            kind = "connect" if connecting else "reset"
    return ObjectFailure(None, words, kind)
