"""The object tier: one S3 object per chunk."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from kvsluice.tiers.base import Tier
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ConfigError,
    TierUnavailableError,
)
from kvsluice.tiers.names import NAMESPACE_FILE, check_namespace, facts_document, file_name, key_of
from kvsluice.tiers.obj_client import (
    ObjectFailure,
    S3Client,
    check_bucket,
    failure_of,
    make_client,
    transport_errors,
)
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING, OVERSIZE, SHORT

if TYPE_CHECKING:
    from kvsluice.tiers.obj_client import GetResponse

__all__ = ["ObjectTier"]

logger = logging.getLogger(__name__)

_WINDOW_BYTES: Final = 256 << 10
"""What is read from a response at once: urllib3 copies each read, and a small copy stays in the CPU's cache."""
_DELETE_BATCH: Final = 1000
"""The most keys that DeleteObjects takes, by the S3 reference."""


class ObjectTier(Tier):
    """Chunks as objects `<prefix>/<namespace>/<key in hex>.safetensors` of one bucket.

    A chunk is put with `If-None-Match: *`, so that of several writers one wins and no other bytes
    take the place of its; a server that does not know the header is asked with HEAD first, once it
    has said so. Payloads are not signed except over plain http to another host: the chunk's header
    carries its own checksum, and signing halves the throughput of PUT.

    Failures are retried by botocore's standard mode where that can help, at most `max_attempts`
    times in all; a body that breaks off is not, as its reader has a deadline.

    Thread-safe. Secrets are handed to botocore and kept nowhere else.

    Args:
        bucket: must exist.
        prefix: put before the namespace; slashes at its ends do not matter.
        namespace: one plain path component, normally a hex digest.
        namespace_facts: written to `namespace.json` where that is absent; must hold no secrets.
        name: what errors and metrics call this tier.
        endpoint_url: `None` for AWS; without a scheme it is taken as https.
        region: `None` for what the environment says, or us-east-1.
        access_key, secret_key, session_token: `None` for botocore's own search.
        ca_bundle: a file of certificates to trust instead of botocore's own.
        addressing_style: where the bucket's name stands in the URL.
        max_connections: kept open; give one per thread that uses the tier.
        connect_timeout_s, read_timeout_s: per attempt.
        max_attempts: the first one included.

    Raises:
        ConfigError: boto3 is absent, or the bucket or its endpoint cannot be used; it says why.
    """

    tier_type: ClassVar[str] = "obj"

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        namespace: str = "default",
        namespace_facts: Mapping[str, object] | None = None,
        name: str = "obj",
        endpoint_url: str | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        ca_bundle: str | None = None,
        addressing_style: Literal["auto", "path", "virtual"] = "auto",
        max_connections: int = 8,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
        max_attempts: int = 3,
    ) -> None:
        super().__init__(name)
        check_namespace(namespace)
        self._bucket = bucket
        self._base = "/".join(part for part in (prefix.strip("/"), namespace) if part) + "/"
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._conditional_put = True
        self._client: S3Client = make_client(
            endpoint_url=endpoint_url,
            region=region,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            ca_bundle=ca_bundle,
            addressing_style=addressing_style,
            max_connections=max_connections,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            max_attempts=max_attempts,
        )
        self._transport_errors = transport_errors()
        try:
            check_bucket(self._client, bucket, endpoint_url)
            if namespace_facts is not None:
                self._write_facts(bytearray(facts_document(namespace_facts)))
        except ConfigError:
            self._client.close()
            raise

    def __repr__(self) -> str:
        return f"ObjectTier(name={self.name!r}, bucket={self._bucket!r}, base={self._base!r})"

    def _write_facts(self, document: bytearray) -> None:
        object_key = self._base + NAMESPACE_FILE
        try:
            if not self._holds(object_key):
                self._put_if_absent(object_key, document)
        except TierUnavailableError as error:
            # A reader without the right to write can still load; only tools miss the facts.
            logger.warning("%s: %s could not be written: %s", self.name, object_key, error)

    def object_key(self, key: bytes) -> str:
        """The object's key in the bucket, held or not.

        Raises:
            ValueError: no key is that long, or empty.
        """
        return self._base + file_name(key)

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        object_key = self._enter(key, buffer, num_bytes)
        # A bytearray, though it is a copy: botocore takes no memoryview, and sends a `bytes` or a
        # file in small pieces after asking with `Expect: 100-continue`.
        return num_bytes if self._put_if_absent(object_key, bytearray(buffer[:num_bytes])) else 0

    def _put_if_absent(self, object_key: str, body: bytearray) -> bool:
        """Whether this call put the object: no if it was there."""
        if self._conditional_put:
            try:
                self._client.put_object(Bucket=self._bucket, Key=object_key, Body=body, IfNoneMatch="*")
            except self._transport_errors as error:
                failure = failure_of(error)
                if failure.status == 412:
                    return False
                if not failure.is_not_implemented:
                    raise self._unavailable("put", object_key, failure) from error
                self._conditional_put = False
                logger.warning("%s: the server knows no If-None-Match on PUT: asking with HEAD first", self.name)
            else:
                return True
        if self._holds(object_key):
            return False
        try:
            self._client.put_object(Bucket=self._bucket, Key=object_key, Body=body)
        except self._transport_errors as error:
            raise self._unavailable("put", object_key, failure_of(error)) from error
        return True

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        object_key = self._enter(key, buffer, num_bytes)
        try:
            found = self._read(self._client.get_object(Bucket=self._bucket, Key=object_key), buffer, num_bytes)
        except self._transport_errors as error:
            failure = failure_of(error)
            if failure.is_missing_key:
                raise ChunkMissingError(f"{self.name}: no object {object_key}", reason=MISSING) from error
            raise self._unavailable("get", object_key, failure) from error
        if found != num_bytes:
            raise ChunkDamagedError(
                f"{self.name}: object {object_key} has {found} bytes, the chunk has {num_bytes}",
                reason=SHORT if found < num_bytes else OVERSIZE,
            )
        return num_bytes

    def _read(self, response: GetResponse, buffer: memoryview, num_bytes: int) -> int:
        """The object's length; its bytes lie in the buffer if that is `num_bytes`.

        A body read to its end gives its connection back; one that was not is closed with it.
        """
        with response["Body"] as raw:
            declared = response.get("ContentLength")
            if declared is not None and declared != num_bytes:
                return declared
            position = 0
            while position < num_bytes:
                count = raw.readinto(buffer[position : min(position + _WINDOW_BYTES, num_bytes)])
                if not count:
                    break
                position += count
            if declared is None:
                # Without a length the end itself is the proof.
                return position + raw.readinto(memoryview(bytearray(1)))
            if position != num_bytes:
                raise EOFError(f"the body ended after {position} of {num_bytes} bytes")
            return position

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """As `Tier.held_prefix`, bisecting: 1 request where nothing is held, 2 where all is, else 2 + log2(N).

        Both ends are asked first, as most prefixes are wholly known or wholly new.
        """
        self._check_open()
        object_keys = [self.object_key(key) for key in keys]
        if not object_keys or not self._holds(object_keys[0]):
            return 0
        if len(object_keys) == 1 or self._holds(object_keys[-1]):
            return len(object_keys)
        held, missing = 0, len(object_keys) - 1
        while missing - held > 1:
            middle = (held + missing) // 2
            if self._holds(object_keys[middle]):
                held = middle
            else:
                missing = middle
        return missing

    def _holds(self, object_key: str) -> bool:
        try:
            self._client.head_object(Bucket=self._bucket, Key=object_key)
        except self._transport_errors as error:
            failure = failure_of(error)
            if failure.is_missing_key:
                return False
            raise self._unavailable("look up", object_key, failure) from error
        return True

    def delete(self, key: bytes) -> bool:
        """As `Tier.delete`; two requests, as DELETE does not say whether there was anything."""
        self._check_open()
        object_key = self.object_key(key)
        if not self._holds(object_key):
            return False
        try:
            self._client.delete_object(Bucket=self._bucket, Key=object_key)
        except self._transport_errors as error:
            raise self._unavailable("delete", object_key, failure_of(error)) from error
        return True

    def scan(self) -> Iterator[bytes]:
        self._check_open()
        for object_key in self._list():
            key = key_of(object_key[len(self._base) :])
            if key is not None:
                yield key

    def _list(self) -> Iterator[str]:
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._base):
                yield from [entry["Key"] for entry in page.get("Contents", ())]
        except self._transport_errors as error:
            raise self._unavailable("list", self._base, failure_of(error)) from error

    def clear(self) -> int:
        """As `Tier.clear`, a thousand objects a request; `namespace.json` stays."""
        dropped = 0
        batch: list[str] = []
        for key in self.scan():
            batch.append(self.object_key(key))
            if len(batch) == _DELETE_BATCH:
                dropped += self._delete_batch(batch)
                batch = []
        return dropped + (self._delete_batch(batch) if batch else 0)

    def _delete_batch(self, object_keys: list[str]) -> int:
        try:
            response = self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in object_keys], "Quiet": True}
            )
        except self._transport_errors as error:
            raise self._unavailable("clear", self._base, failure_of(error)) from error
        errors = response.get("Errors", [])
        if errors:
            failure = ObjectFailure(status=200, code=errors[0].get("Code", "unknown"), kind="ClientError")
            raise self._unavailable(f"delete {len(errors)} objects below", self._base, failure)
        return len(object_keys)

    def failure_counts(self) -> dict[str, int]:
        """How often each kind of failure came, retries not counted: `"503 SlowDown"`, `"ReadTimeoutError"`."""
        with self._lock:
            return dict(self._failures)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._client.close()

    def _enter(self, key: bytes, buffer: memoryview, num_bytes: int) -> str:
        self._check_image(buffer, num_bytes)
        return self.object_key(key)

    def _unavailable(self, action: str, object_key: str, failure: ObjectFailure) -> TierUnavailableError:
        with self._lock:
            self._failures[failure.label] += 1
        return TierUnavailableError(
            f"{self.name}: could not {action} {object_key} in bucket {self._bucket}: {failure}",
            reason=DISK_FULL if failure.is_full else IO_ERROR,
        )
