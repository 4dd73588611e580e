"""The object tier: one S3 object per chunk."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar, Final, Literal
from urllib.parse import quote, urlsplit

from kvsluice.tiers.base import Tier, TierUsage
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, ConfigError, TierUnavailableError
from kvsluice.tiers.names import NAMESPACE_FILE, check_namespace, facts_document, file_name, key_of
from kvsluice.tiers.obj.access import Access, AccessOptions, endpoint_of, fits_header
from kvsluice.tiers.obj.endpoints import Endpoint, Endpoints
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.namespace import DELETE_BATCH, Namespace, check_bucket
from kvsluice.tiers.obj.parts import MIN_PART_BYTES, PartCrew, Span, Trial, cut
from kvsluice.tiers.obj.pool import HttpPool, Timeouts
from kvsluice.tiers.obj.ranges import NoRangesError, OtherLengthError, get_in_ranges
from kvsluice.tiers.obj.requests import Request, Requests, no_body
from kvsluice.tiers.obj.uploads import Uploads
from kvsluice.tiers.obj.wire import Response
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING, OVERSIZE, SHORT

__all__ = ["ObjectTier"]

logger = logging.getLogger(__name__)

_TELL_EVERY_S: Final = 300.0
_MOST_TOLD: Final = 64
"""Kinds of failures: a server may invent codes."""
_CLOSE_S: Final = 2.0
"""What is waited for a probe that is under way; its connections are ended, so it takes no time."""


class ObjectTier(Tier):
    """Chunks as objects `<prefix>/<namespace>/<key in hex>.safetensors` of one bucket.

    A chunk is put with `If-None-Match: *`, so that of several writers one wins and no other bytes take the place of
    its; whether the server enforces that is tried out at the start, and one that does not is asked with HEAD before
    each PUT. Bytes go between the caller's buffer and the socket without a copy. Payloads are not signed except over
    plain http to another host: the chunk's header carries its own checksum, and signing costs PUT half its throughput.

    An operation ends by its deadline, with all its attempts; only what may pass is tried again. An endpoint that fails
    several times in a row is left alone until it answers a probe: its operations fail at once. Of several endpoints
    the least busy that is well is used.

    Thread-safe. Secrets are handed to boto3 and kept nowhere else.

    Args:
        bucket: must exist.
        prefix: put before the namespace; slashes at its ends do not matter.
        namespace: one plain path component, normally a hex digest.
        namespace_facts: written to `namespace.json` where that is absent; must hold no secrets.
        name: what errors and metrics call this tier.
        endpoint_url: one, or several of the same store; `None` for AWS; without a scheme it is taken as https.
        region: `None` for what the environment says, or us-east-1.
        access_key, secret_key, session_token: `None` for boto3's own search, which also renews them in time.
        ca_bundle: a PEM file of certificates to trust instead of boto3's own list.
        addressing_style: where the bucket's name stands in the URL.
        sign_payload: "on", "off", or "auto", as above.
        server_side_encryption, sse_kms_key_id, storage_class: passed on with every PUT, in S3's own words.
        parts: whether a chunk goes in parallel parts where connections are to spare: "on", "off", or "auto": where
            that is seen to be faster, loads and stores apart; stores only where the server puts a condition on the end
            of a multipart upload.
        part_bytes: the smallest part of a store, in bytes; ranges of a load may be half of it. A chunk below twice
            that goes whole.
        max_connections: kept open; give one per thread that uses the tier. Each operation under way has one.
        connect_timeout_s: for a connection to come up, per address.
        read_timeout_s: without a byte.
        operation_timeout_s: for one store, load, lookup or delete as a whole. Resolving a host's name is the
            operating system's, and not bounded by it.
        max_attempts: the first one included.
        clock: seconds, monotonic.

    Raises:
        ConfigError: boto3 is absent, or the bucket or its endpoint cannot be used; it says why.
    """

    tier_type: ClassVar[str] = "obj"
    probe_keys: ClassVar[int] = 16_384
    """A question of that many keys costs 16 requests."""
    probe_threads: ClassVar[int] = 8
    """A question is a dozen of round trips, one after the other: at 30 ms each, eight at once answer 20 a second."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        namespace: str = "default",
        namespace_facts: Mapping[str, object] | None = None,
        name: str = "obj",
        endpoint_url: str | Sequence[str] | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        ca_bundle: str | None = None,
        addressing_style: Literal["auto", "path", "virtual"] = "auto",
        sign_payload: Literal["auto", "on", "off"] = "auto",
        server_side_encryption: str | None = None,
        sse_kms_key_id: str | None = None,
        storage_class: str | None = None,
        parts: Literal["auto", "on", "off"] = "auto",
        part_bytes: int = 8 << 20,
        max_connections: int = 16,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = 5.0,
        operation_timeout_s: float = 10.0,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        check_namespace(namespace)
        self._bucket = bucket
        self._base = "/".join(part for part in (prefix.strip("/"), namespace) if part) + "/"
        self._quoted_base = quote(self._base, safe="/~")
        self._operation_timeout_s = operation_timeout_s
        self._clock = clock
        self._parts = parts
        self._part_bytes = part_bytes
        self._max_connections = max_connections
        self._is_conditional = True
        self._told_s: dict[str, float] = {}
        self._put_headers: dict[str, str] = {}
        for option, header, value in (
            ("server_side_encryption", "x-amz-server-side-encryption", server_side_encryption),
            ("sse_kms_key_id", "x-amz-server-side-encryption-aws-kms-key-id", sse_kms_key_id),
            ("storage_class", "x-amz-storage-class", storage_class),
        ):
            if value is None:
                continue
            if not fits_header(value):
                raise ConfigError(f"{option} is {value!r}: no header can carry that")
            self._put_headers[header] = value
        if part_bytes < MIN_PART_BYTES:
            raise ConfigError(f"part_bytes is {part_bytes}: S3 takes parts of at least {MIN_PART_BYTES} bytes")
        urls: Sequence[str | None] = (
            [endpoint_url] if endpoint_url is None or isinstance(endpoint_url, str) else endpoint_url
        )
        if not urls or len(set(urls)) != len(urls):
            raise ConfigError(
                f"endpoint_url names {len(urls)} endpoints, {len(set(urls))} of them different: give each once"
            )
        for url in urls:
            endpoint_of(url)
        self._access = Access(
            bucket,
            AccessOptions(
                region=region,
                access_key=access_key,
                secret_key=secret_key,
                session_token=session_token,
                ca_bundle=ca_bundle,
                addressing_style=addressing_style,
                sign_payload=sign_payload,
                connect_timeout_s=connect_timeout_s,
                read_timeout_s=read_timeout_s,
                max_attempts=max_attempts,
            ),
            clock=clock,
        )
        timeouts = Timeouts(connect_timeout_s, read_timeout_s)
        places = [self._access.place(url) for url in urls]
        # A host's name is the same in capitals, and with the port that goes without saying.
        came_to = {(place.target.host, place.target.port, urlsplit(place.base).path) for place in places}
        if len(came_to) < len(places):
            raise ConfigError("endpoint_url names one endpoint in two ways: give each once")
        self._endpoints = Endpoints(
            [Endpoint(place, HttpPool(place.target, timeouts, max_connections, clock)) for place in places],
            lambda endpoint: self._requests.probe(endpoint, Request("HEAD", self._quoted_base + NAMESPACE_FILE)),
            name,
        )
        self._requests = Requests(self._access, self._endpoints, max_attempts=max_attempts, clock=clock)
        self._namespace = Namespace(self._requests, self._access, self._base, self._end_s)
        self._crew = PartCrew(max_connections, name)
        self._put_trial, self._get_trial = Trial(parts), Trial(parts)
        self._knows_ranges = True
        self._uploads = Uploads(
            self._requests, self._access, self._crew, name=name, base=self._base, headers=self._put_headers
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            check_bucket(self._requests, bucket, self._base, self._end_s(), name)
            self._write_facts(None if namespace_facts is None else facts_document(namespace_facts))
            undo.pop_all()

    def __repr__(self) -> str:
        return f"ObjectTier(name={self.name!r}, bucket={self._bucket!r}, base={self._base!r})"

    def object_key(self, key: bytes) -> str:
        """The object's key in the bucket, held or not.

        Raises:
            ValueError: no key is that long, or empty.
        """
        return self._base + file_name(key)

    # ---- chunks ------------------------------------------------------------------------------

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        self._check_image(buffer, num_bytes)
        name = self._quoted_base + file_name(key)
        body = buffer[:num_bytes]
        end_s = self._end_s()
        spans = self._cut(num_bytes, self._part_bytes)
        if len(spans) < 2:
            return num_bytes if self._put_if_absent(name, body, end_s) else 0
        in_parts = self._put_trial.wants_parts() and self._may_upload(end_s)
        start_s = self._clock()
        put = self._put_in_parts(name, body, spans, end_s) if in_parts else self._put_if_absent(name, body, end_s)
        if not put:
            return 0
        self._put_trial.moved(num_bytes, self._clock() - start_s, in_parts=in_parts)
        return num_bytes

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        self._check_image(buffer, num_bytes)
        name = self._quoted_base + file_name(key)
        view = buffer[:num_bytes]
        end_s = self._end_s()
        # Ranges cost less than an upload's parts, so they may be finer.
        spans = self._cut(num_bytes, self._part_bytes // 2)
        in_parts = len(spans) > 1 and self._knows_ranges and self._get_trial.wants_parts()
        start_s = self._clock()
        try:
            if in_parts:
                in_parts = self._get_in_parts(name, view, spans, end_s)
            if not in_parts:
                self._get_whole(name, view, end_s)
        except RequestFailedError as error:
            if error.failure.is_missing_key:
                raise ChunkMissingError(f"{self.name}: no object {name}", reason=MISSING) from error
            raise self._unavailable("get", name, error) from error
        if len(spans) > 1:
            self._get_trial.moved(num_bytes, self._clock() - start_s, in_parts=in_parts)
        return num_bytes

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """As `Tier.held_prefix`, bisecting: 1 request where nothing is held, 2 where all is, else 2 + log2(N).

        Both ends are asked first, as most prefixes are wholly known or wholly new.
        """
        self._check_open()
        end_s = self._end_s()

        def holds(at: int) -> bool:
            return self._holds(self._quoted_base + file_name(keys[at]), end_s)

        if not keys or not holds(0):
            return 0
        if len(keys) == 1 or holds(-1):
            return len(keys)
        held, missing = 0, len(keys) - 1
        while missing - held > 1:
            middle = (held + missing) // 2
            if holds(middle):
                held = middle
            else:
                missing = middle
        return missing

    def delete(self, key: bytes) -> bool:
        """As `Tier.delete`; two requests, as DELETE does not say whether there was anything."""
        self._check_open()
        name = self._quoted_base + file_name(key)
        end_s = self._end_s()
        if not self._holds(name, end_s):
            return False
        try:
            self._requests.send(Request("DELETE", name), end_s, no_body)
        except RequestFailedError as error:
            raise self._unavailable("delete", name, error) from error
        return True

    def scan(self) -> Iterator[bytes]:
        self._check_open()
        try:
            for object_key in self._namespace.names():
                key = key_of(object_key[len(self._base) :])
                if key is not None:
                    yield key
        except RequestFailedError as error:
            raise self._unavailable("list", self._base, error) from error

    def clear(self) -> int:
        """As `Tier.clear`, a thousand objects a request; `namespace.json` stays."""
        dropped = 0
        keys = self.scan()
        while batch := [self.object_key(key) for key in islice(keys, DELETE_BATCH)]:
            try:
                self._namespace.delete(batch)
            except RequestFailedError as error:
                raise self._unavailable("clear", self._base, error) from error
            dropped += len(batch)
        return dropped

    # ---- observation and end -----------------------------------------------------------------

    def usage(self) -> TierUsage:
        return TierUsage(failures=self.failure_counts())

    def failure_counts(self) -> dict[str, int]:
        """How often operations failed for good, by kind: `"503 SlowDown"`, `"timeout"`."""
        return self._requests.failure_counts()

    def close(self) -> None:
        """As `Tier.close`; operations under way fail at once."""
        if not self._closed:
            super().close()
            self._endpoints.close(_CLOSE_S)
            self._crew.close()
            self._access.close()

    # ---- the start ---------------------------------------------------------------------------

    def _write_facts(self, document: bytes | None) -> None:
        """Put `namespace.json`, and find out with it whether conditions on PUT are enforced.

        Without facts an object of another name is put, and removed.
        """
        name = self._quoted_base + (NAMESPACE_FILE if document is not None else f"probe-{secrets.token_hex(8)}")
        body = memoryview(document or b"{}")
        end_s = self._end_s()
        try:
            if self._put_if_absent(name, body, end_s):
                # It was not there. Now that it is, a second one has to be refused.
                if self._is_conditional and self._put_if_absent(name, body, end_s):
                    self._is_conditional = False
                    logger.warning("%s: the server ignores If-None-Match on PUT: asking with HEAD first", self.name)
                if document is None:
                    self._requests.send(Request("DELETE", name), end_s, no_body)
        except (TierUnavailableError, RequestFailedError) as error:
            # A reader without the right to write can still load; only tools miss the facts.
            logger.warning("%s: %s could not be written: %s", self.name, name, error)

    # ---- requests ----------------------------------------------------------------------------

    def _end_s(self) -> float:
        return self._clock() + self._operation_timeout_s

    def _put_if_absent(self, name: str, body: memoryview, end_s: float) -> bool:
        """Whether this call put the object: no if it was there."""
        if self._is_conditional:
            try:
                self._requests.send(
                    Request("PUT", name, "", {**self._put_headers, "if-none-match": "*"}, body), end_s, no_body
                )
            except RequestFailedError as error:
                if error.failure.is_held_already:
                    return False
                if not error.failure.is_not_implemented:
                    raise self._unavailable("put", name, error) from error
                self._is_conditional = False
                logger.warning("%s: the server knows no If-None-Match on PUT: asking with HEAD first", self.name)
            else:
                return True
        if self._holds(name, end_s):
            return False
        try:
            self._requests.send(Request("PUT", name, "", self._put_headers, body), end_s, no_body)
        except RequestFailedError as error:
            raise self._unavailable("put", name, error) from error
        return True

    def _cut(self, num_bytes: int, part_bytes: int) -> list[Span]:
        """In as many parts as there are connections to spare: where many chunks move at once, each goes whole."""
        if self._parts == "off" or num_bytes < 2 * self._part_bytes:
            return [(0, num_bytes)]
        spare = self._max_connections - sum(endpoint.pool.busy for endpoint in self._endpoints.all)
        return cut(num_bytes, part_bytes, spare)

    def _may_upload(self, end_s: float) -> bool:
        try:
            conditional = self._uploads.is_conditional(end_s)
        except RequestFailedError as error:
            self._requests.count(error.failure)
            return False
        # Without the condition a second writer can replace what is there; that the operator has to want.
        return conditional is True or (conditional is False and self._parts == "on" and not self._uploads.are_refused)

    def _put_in_parts(self, name: str, body: memoryview, spans: list[Span], end_s: float) -> bool:
        """As `_put_if_absent`; asks first, as the condition is looked at when all is sent."""
        if self._holds(name, end_s):
            return False
        try:
            return self._uploads.put(name, body, spans, end_s)
        except RequestFailedError as error:
            raise self._unavailable("put", name, error) from error

    def _get_in_parts(self, name: str, view: memoryview, spans: list[Span], end_s: float) -> bool:
        """Whether the server knows ranges, so that the object lies in `view`."""
        try:
            get_in_ranges(self._requests, self._crew, name, view, spans, end_s)
        except OtherLengthError as error:
            raise self._damaged(name, error.num_bytes, view.nbytes) from error
        except NoRangesError as error:
            self._knows_ranges = False
            logger.warning("%s: the server does not answer to ranges (%s): chunks are read whole", self.name, error)
            return False
        return True

    def _get_whole(self, name: str, view: memoryview, end_s: float) -> None:
        def receive(response: Response) -> None:
            if response.length is not None:
                if response.length != view.nbytes:
                    raise self._damaged(name, response.length, view.nbytes)
                response.read_exactly(view)
                return
            if not response.is_delimited:
                response.read_exactly(view)
                found = view.nbytes
            else:
                found = response.read_up_to(view)
            # The end itself is the proof.
            found += response.read_up_to(memoryview(bytearray(1))) if found == view.nbytes else 0
            if found != view.nbytes:
                raise self._damaged(name, found, view.nbytes)

        self._requests.send(Request("GET", name), end_s, receive)

    def _holds(self, name: str, end_s: float) -> bool:
        try:
            self._requests.send(Request("HEAD", name), end_s, no_body)
        except RequestFailedError as error:
            if error.failure.is_missing_key:
                return False
            if error.failure.status in (400, 401, 403):
                return self._holds_by_get(name, end_s)
            raise self._unavailable("look up", name, error) from error
        return True

    def _holds_by_get(self, name: str, end_s: float) -> bool:
        """As `_holds`, where a HEAD is refused: its answer has no body, which would say why, and so what to do."""
        try:
            self._requests.send(Request("GET", name, "", {"range": "bytes=0-0"}), end_s, no_body)
        except RequestFailedError as error:
            if error.failure.is_missing_key:
                return False
            raise self._unavailable("look up", name, error) from error
        return True

    def _damaged(self, name: str, found_bytes: int, num_bytes: int) -> ChunkDamagedError:
        return ChunkDamagedError(
            f"{self.name}: object {name} has {found_bytes} bytes, the chunk has {num_bytes}",
            reason=SHORT if found_bytes < num_bytes else OVERSIZE,
        )

    def _unavailable(self, action: str, what: str, error: RequestFailedError) -> TierUnavailableError:
        failure = error.failure
        self._requests.count(failure)
        text = f"{self.name}: could not {action} {what} in bucket {self._bucket}: {failure}"
        if action == "put" and failure.status == 400 and self._put_headers:
            text += f"; it was sent with {self._put_headers}"
        self._tell(failure, text)
        return TierUnavailableError(text, reason=DISK_FULL if failure.is_full else IO_ERROR)

    def _tell(self, failure: ObjectFailure, text: str) -> None:
        """Log the first failure of a kind, and then one in a while: that chunks are missed is not seen otherwise."""
        if failure.kind in ("breaker_open", "closed"):
            # The breaker has told; closing is no news.
            return
        now_s = self._clock()
        last_s = self._told_s.get(failure.label, -math.inf if len(self._told_s) < _MOST_TOLD else math.inf)
        if now_s - last_s >= _TELL_EVERY_S:
            self._told_s[failure.label] = now_s
            logger.warning("%s; others of this kind are counted and not told for %.0f s", text, _TELL_EVERY_S)
