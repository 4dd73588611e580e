"""A store in parallel parts: S3's multipart upload, its condition, and what is left of those that were cut off."""

from __future__ import annotations

import html
import logging
import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from kvsluice.tiers.obj.access import Access
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.parts import PartCrew, Span
from kvsluice.tiers.obj.requests import Request, Requests, no_body
from kvsluice.tiers.obj.s3_client import boto_errors, failure_of_boto
from kvsluice.tiers.obj.wire import Response

__all__ = ["Uploads"]

logger = logging.getLogger(__name__)

_ORPHAN_AGE_S: Final = 3600.0
"""An upload takes seconds; one that began an hour ago, by a clock that may be minutes off, is nobody's."""
_TRIAL_S: Final = 2.0
"""For a handful of small requests; a server that needs longer is in trouble, or swallows what it does not know."""
_TRY_AGAIN_S: Final = 60.0
_MOST_LEFT: Final = 256
_ABORT_S: Final = 1.0
"""What tidying up may take past an operation's deadline."""
_UPLOAD_ID = re.compile(rb"<UploadId>\s*([^<\s]{1,1024})\s*</UploadId>")
_CODE = re.compile(rb"<Error>.*?<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>", re.DOTALL)


class Uploads:
    """Multipart uploads below one prefix. Thread-safe.

    Args:
        base: what the objects' names start with, not quoted.
        headers: for the object, such as its storage class.
    """

    def __init__(
        self, requests: Requests, access: Access, crew: PartCrew, *, name: str, base: str, headers: Mapping[str, str]
    ) -> None:
        self._requests = requests
        self._access = access
        self._crew = crew
        self._name = name
        self._base = base
        self._headers = headers
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        """Ids of our own uploads, as quoted in URLs; not every server tells right when one began."""
        self._is_conditional: bool | None = None
        self._try_again_s = -math.inf
        self._left: deque[tuple[str, str]] = deque(maxlen=_MOST_LEFT)
        """Uploads that could not be aborted: name and id, as quoted in URLs."""
        self.are_refused = False
        """Whether these credentials or the server allow none, whatever the condition."""

    def is_conditional(self, end_s: float) -> bool | None:
        """Whether the server refuses to complete an upload whose key is held; None while another thread finds out.

        Ceph's gateway, for one, does not look at the condition there, though it does on a plain PUT.

        Raises:
            RequestFailedError: it could not be found out now.
        """
        now_s = self._requests.now_s()
        if self._is_conditional is not None or now_s < self._try_again_s or not self._lock.acquire(blocking=False):
            return self._is_conditional
        try:
            try:
                # On a time of its own: the chunk that comes after it has to be stored yet.
                self._is_conditional = self._try_condition(min(end_s, now_s + _TRIAL_S))
            except RequestFailedError as error:
                failure = error.failure
                self._try_again_s = self._requests.now_s() + _TRY_AGAIN_S
                if failure.status is None or failure.may_pass or failure.wants_new_credentials or failure.is_full:
                    raise
                # It is not allowed, or not known there; that will not change with the next chunk.
                self.are_refused = True
                self._is_conditional = False
                logger.warning("%s: chunks are stored whole: an upload is refused: %s", self._name, failure)
            else:
                if not self._is_conditional:
                    text = "%s: no condition on multipart uploads there: chunks go whole (parts 'on': may be replaced)"
                    logger.info(text, self._name)
                # A daemon, as it waits for boto3, which nothing can end: whoever leaves does not wait for it.
                threading.Thread(target=self._tidy_up, name=f"kvsluice-{self._name}-orphans", daemon=True).start()
        finally:
            self._lock.release()
        return self._is_conditional

    def put(self, name: str, view: memoryview, spans: list[Span], end_s: float) -> bool:
        """Whether this call put the object: no if it was there. When it ends, nothing reads `view` any more.

        Raises:
            RequestFailedError: nothing was put, or it could not be learnt that it was.
        """
        upload_id = self._begin(name, end_s)
        self._under_way.add(upload_id)
        try:

            def put(part: Span) -> str:
                start, end = part
                query = f"partNumber={spans.index(part) + 1}&uploadId={upload_id}"
                return self._requests.send(Request("PUT", name, query, {}, view[start:end]), end_s, _etag_of)

            done = self._complete(name, upload_id, self._crew.run_all(put, spans), end_s)
        except BaseException:
            self._abort(name, upload_id)
            raise
        finally:
            self._under_way.discard(upload_id)
        self._abort_left(end_s)
        return done

    def abort_orphans(self, older_than_s: float = _ORPHAN_AGE_S) -> int:
        """Abort uploads that were begun that long ago and never ended; how many. Ends at a failure, which is logged."""
        oldest_epoch_s = time.time() - older_than_s
        aborted = 0
        try:
            client = self._access.client(self._requests.endpoints.all[0].place.url)
            for page in client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._access.bucket, Prefix=self._base
            ):
                for entry in page.get("Uploads", ()):
                    if self._requests.endpoints.is_closing:
                        return aborted
                    upload_id = quote(entry["UploadId"], safe="")
                    if entry["Initiated"].timestamp() < oldest_epoch_s and upload_id not in self._under_way:
                        if not self._abort(quote(entry["Key"], safe="/~"), upload_id):
                            return aborted
                        aborted += 1
        except boto_errors() as error:
            if self._requests.endpoints.is_closing:
                return aborted
            logger.warning("%s: unfinished uploads could not be listed: %s", self._name, failure_of_boto(error))
        if aborted:
            logger.info("%s: %d unfinished uploads of the past were aborted", self._name, aborted)
        return aborted

    def _abort_left(self, end_s: float) -> None:
        """Abort those that could not be aborted, in what time the operation has left, until one cannot again."""
        while self._left and self._requests.now_s() + _ABORT_S < end_s:
            try:
                name, upload_id = self._left.popleft()
            except IndexError:
                return
            if not self._abort(name, upload_id):
                return

    def _tidy_up(self) -> None:
        try:
            self.abort_orphans()
        except Exception:
            if not self._requests.endpoints.is_closing:
                logger.exception("%s: unexpected failure while unfinished uploads were looked for", self._name)

    def _try_condition(self, end_s: float) -> bool:
        name = quote(f"{self._base}probe-{secrets.token_hex(8)}", safe="/~")
        body = memoryview(b"{}")
        self._requests.send(Request("PUT", name, "", self._headers, body), end_s, no_body)
        try:
            return not self.put(name, body, [(0, body.nbytes)], end_s)
        finally:
            try:
                self._requests.send(Request("DELETE", name), end_s, no_body)
            except RequestFailedError as error:
                # What is known by now is known; two bytes stay behind.
                logger.warning("%s: %s could not be removed: %s", self._name, name, error.failure)

    def _begin(self, name: str, end_s: float) -> str:
        answer = self._requests.send(
            Request("POST", name, "uploads=", self._headers, memoryview(b"")), end_s, Response.read_words
        )
        found = _UPLOAD_ID.search(answer)
        if found is None:
            raise RequestFailedError(ObjectFailure(None, "no upload id", "protocol"))
        return quote(html.unescape(found.group(1).decode()), safe="")

    def _complete(self, name: str, upload_id: str, etags: list[str], end_s: float) -> bool:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{html.escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, start=1)
        )
        body = memoryview(f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode())
        request = Request("POST", name, f"uploadId={upload_id}", {"if-none-match": "*"}, body)
        try:
            answer = self._requests.send(request, end_s, Response.read_words)
        except RequestFailedError as error:
            if error.failure.is_held_already:
                self._abort(name, upload_id)
                return False
            if error.failure.code == "NoSuchUpload":
                # An earlier attempt did it, and its answer was lost; or somebody aborted it.
                self._requests.send(Request("HEAD", name), end_s, no_body)
                return True
            raise
        # The one answer that can be 200 and a failure: the server began it before it knew.
        found = _CODE.search(answer)
        if found is not None:
            raise RequestFailedError(ObjectFailure(200, found.group(1).decode(), "status"))
        return True

    def _abort(self, name: str, upload_id: str) -> bool:
        """Whether the upload is gone."""
        end_s = self._requests.now_s() + _ABORT_S
        try:
            self._requests.send(Request("DELETE", name, f"uploadId={upload_id}"), end_s, no_body)
        except RequestFailedError as error:
            if error.failure.code != "NoSuchUpload":
                if error.failure.may_pass or error.failure.kind == "breaker_open":
                    self._left.append((name, upload_id))
                text = "%s: an upload of %s could not be aborted: %s"
                logger.warning(text, self._name, name, error.failure)
                return False
        return True


def _etag_of(response: Response) -> str:
    etag = response.headers.get("etag")
    if etag is None:
        raise RequestFailedError(ObjectFailure(None, "no etag of a part", "protocol"))
    return etag
