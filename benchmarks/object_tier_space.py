"""The bucket that `object_tier` works in, and what it may hold of the server's memory at any time."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import boto3.session
from botocore.config import Config
from object_tier_http import region_in_use

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

HEAD_BYTES: Final = 4 << 20
"""RGW keeps this much of an object in its head, which a DELETE frees; the tail is left to its garbage collector."""
BALLAST_BYTES: Final = 64 << 20
"""What lies on the server from the start of a run to its end. The OSD of a throw-away RGW counts its bytes without a
lock and loses some: emptied after much traffic it gets below zero, which it takes for full, and every PUT hangs."""
_DELETE_BATCH: Final = 1000
"""The most keys that DeleteObjects takes."""


class Room:
    """How many bytes may lie on the server, counting those whose tails it has not collected yet.

    Single-threaded. `freed_after_s` is RGW's `rgw gc obj min wait` and two times its
    `rgw gc processor period`; a server in a default configuration keeps tails for two hours.
    """

    def __init__(
        self,
        limit_bytes: int,
        freed_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._freed_after_s = freed_after_s
        self._clock = clock
        self._sleep = sleep
        self._used_bytes = 0
        self._tails: deque[tuple[float, int]] = deque()
        self.waited_s = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until there is room for `num_bytes` more, and take it.

        Raises:
            ValueError: there will never be.
        """
        while True:
            now_s = self._clock()
            while self._tails and self._tails[0][0] <= now_s:
                self._used_bytes -= self._tails.popleft()[1]
            if self._used_bytes + num_bytes <= self.limit_bytes:
                self._used_bytes += num_bytes
                return
            if not self._tails:
                raise ValueError(f"no room for {num_bytes} bytes beside {self._used_bytes} of {self.limit_bytes}")
            wait_s = self._tails[0][0] - now_s
            self.waited_s += wait_s
            self._sleep(wait_s)

    def give_back(self, num_bytes: int, tail_bytes: int) -> None:
        """`num_bytes` were deleted, of which `tail_bytes` wait for the garbage collector."""
        self._used_bytes -= num_bytes - tail_bytes
        if tail_bytes:
            self._tails.append((self._clock() + self._freed_after_s, tail_bytes))


class Space:
    """One bucket, with a client of its own that is never measured."""

    def __init__(self, client: S3Client, bucket: str, prefix: str, room: Room) -> None:
        self._client = client
        self.bucket = bucket
        self.prefix = prefix
        self.room = room

    def delete(self, keys: Sequence[str], num_bytes: int, tail_bytes: int) -> None:
        """Delete objects for which room was taken: `num_bytes` and `tail_bytes` are all of them together.

        Raises:
            RuntimeError: some are still there.
        """
        for begin in range(0, len(keys), _DELETE_BATCH):
            batch = keys[begin : begin + _DELETE_BATCH]
            answer = self._client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True}
            )
            if errors := answer.get("Errors"):
                raise RuntimeError(f"{len(errors)} of {len(batch)} objects could not be deleted: {errors[0]}")
        self.room.give_back(num_bytes, tail_bytes)

    def _clear(self) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        for keys in [[entry["Key"] for entry in page.get("Contents", ())] for page in pages]:
            self.delete(keys, 0, 0)
        uploads = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
        for upload in uploads.get("Uploads", ()):
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])


@contextmanager
def open_space(endpoint_url: str, bucket: str | None, room: Room, ballast_bytes: int) -> Iterator[Space]:
    """A bucket for the time of a run: a new one, or a new prefix of the one that is named.

    What was put below the prefix is gone afterwards, whatever happened.

    Args:
        ballast_bytes: of an object that lies there all the time; 0 for none.
    """
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 3},
        s3={"addressing_style": "path"},
    )
    client = boto3.session.Session().client("s3", endpoint_url=endpoint_url, region_name=region_in_use(), config=config)
    run = uuid.uuid4().hex[:12]
    name = bucket or f"kvsluice-bench-{run}"
    if bucket is None:
        client.create_bucket(Bucket=name)
    space = Space(client, name, f"bench-{run}", room)
    try:
        if ballast_bytes:
            client.put_object(Bucket=name, Key=f"{space.prefix}/ballast", Body=bytes(ballast_bytes))
        yield space
    finally:
        space._clear()  # noqa: SLF001 - the other half of this function
        if bucket is None:
            client.delete_bucket(Bucket=name)
        client.close()
