"""The objects of one namespace together: is the bucket there, what lies below the base, and off with many of them."""

from __future__ import annotations

import html
import http.client
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_plus

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj.access import Access
from kvsluice.tiers.obj.endpoints import Endpoint, Endpoints, Permit
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.requests import Request, Requests
from kvsluice.tiers.obj.s3_client import DeleteError, boto_errors, failure_of_boto
from kvsluice.tiers.obj.wire import Response

__all__ = ["DELETE_BATCH", "Namespace", "check_bucket"]

logger = logging.getLogger(__name__)

_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_NEXT = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")
_TRUNCATED = re.compile(rb"<IsTruncated>\s*(true|false)\s*</IsTruncated>")
_PAGE_BYTES: Final = 8 << 20
"""A thousand keys of the length that S3 allows, percent-encoded, and what stands beside them."""
DELETE_BATCH: Final = 1000
"""The most keys that DeleteObjects takes, by the S3 reference."""


def check_bucket(requests: Requests, bucket: str, base: str, end_s: float, name: str) -> None:
    """Ask every endpoint for the bucket; one that cannot be reached is borne where another can.

    Raises:
        ConfigError: the bucket does not exist or may not be used, or nobody answers.
    """
    # A listing, and no HEAD: the answer to that has no body, and so does not say what is wrong.
    listing = Request("GET", "", f"list-type=2&max-keys=1&prefix={quote(base, safe='~')}")

    def ask(endpoint: Endpoint) -> RequestFailedError | None:
        try:
            requests.ask_one(endpoint, listing, end_s)
        except RequestFailedError as error:
            return error
        return None

    # Side by side: one that hangs takes its whole time.
    with ThreadPoolExecutor(len(requests.endpoints.all), thread_name_prefix=f"kvsluice-{name}-start") as pool:
        errors = list(pool.map(ask, requests.endpoints.all))
    for endpoint, error in zip(requests.endpoints.all, errors, strict=True):
        if error is None:
            continue
        failure = error.failure
        where = f"bucket {bucket!r} at {endpoint.place.url or 'AWS'}"
        if failure.region is not None or failure.status in (301, 307):
            raise ConfigError(f"{where} is in another region: set region ({failure})") from error
        if failure.status == 404:
            raise ConfigError(f"{where} does not exist") from error
        if failure.status in (400, 401, 403):
            raise ConfigError(
                f"{where} may not be used with these credentials: {failure}; s3:ListBucket, s3:GetObject and"
                " s3:PutObject are needed"
            ) from error
        if None not in errors:
            raise ConfigError(f"{where} cannot be reached: {failure}") from error
        logger.warning("%s: %s cannot be reached: %s", name, where, failure)
        requests.endpoints.leave_alone(endpoint)


class Namespace:
    """All objects below one base. Thread-safe.

    Args:
        base: what the objects' names start with, not quoted.
        end_s: when a request that begins now is to end.
    """

    def __init__(self, requests: Requests, access: Access, base: str, end_s: Callable[[], float]) -> None:
        self._requests = requests
        self._endpoints: Endpoints = requests.endpoints
        self._access = access
        self._base = base
        self._end_s = end_s

    def names(self) -> Iterator[str]:
        """Of all objects below the base, not quoted, a page at a time.

        Raises:
            RequestFailedError: the next page could not be had.
        """
        query = f"encoding-type=url&list-type=2&prefix={quote(self._base, safe='~')}"
        following = ""
        while True:
            page = self._requests.send(Request("GET", "", query + following), self._end_s(), _page_of)
            yield from page.keys
            if page.token is None:
                return
            following = f"&continuation-token={quote(page.token, safe='~')}"

    def delete(self, names: list[str]) -> None:
        """Delete up to `DELETE_BATCH` objects by boto3, which has its own retries, at one endpoint after the other.

        Raises:
            RequestFailedError: some may still be there.
        """
        tried: list[Endpoint] = []
        last: RequestFailedError | None = None
        while True:
            try:
                permit = self._endpoints.enter("store", tried)
            except RequestFailedError as error:
                raise (last or error) from None
            refused, last = self._send_deletes(permit, names)
            if last is None:
                break
            tried.append(permit.endpoint)
            if not last.failure.may_pass or len(tried) >= len(self._endpoints.all):
                raise last
        if refused:
            raise RequestFailedError(ObjectFailure(200, str(refused[0].get("Code", "unknown")), "status"))

    def _send_deletes(
        self, permit: Permit, names: list[str]
    ) -> tuple[Sequence[DeleteError], RequestFailedError | None]:
        """Which could not be deleted, or how it failed; boto3's errors, which carry the request's token, end here."""
        try:
            response = self._access.client(permit.endpoint.place.url).delete_objects(
                Bucket=self._access.bucket, Delete={"Objects": [{"Key": key} for key in names], "Quiet": True}
            )
        except boto_errors() as error:
            failure = failure_of_boto(error)
        except BaseException:
            permit.ignored()
            raise
        else:
            permit.succeeded()
            return response.get("Errors", []), None
        permit.failed(failure)
        return [], RequestFailedError(failure)


@dataclass(frozen=True, slots=True)
class _Page:
    keys: list[str]
    token: str | None
    """Where the next one begins; None after the last."""


def _page_of(response: Response) -> _Page:
    """One page of a listing; boto3's parser takes seventy milliseconds of the interpreter for a thousand keys."""
    words = response.read_all(_PAGE_BYTES)
    told = _TRUNCATED.search(words)
    following = _NEXT.search(words)
    goes_on = told is not None and told.group(1) == b"true"
    if told is None or (goes_on and following is None):
        raise http.client.HTTPException("a listing that does not say whether it goes on, and where")
    keys = [unquote_plus(key.decode()) for key in _KEY.findall(words)]
    return _Page(keys, html.unescape(following.group(1).decode()) if goes_on and following is not None else None)
