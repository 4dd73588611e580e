"""The clients that `object_tier` compares, each in its own best plain use.

A PUT starts from a slot's buffer and a GET ends in it for all of them, as a tier's must: a copy that
a client's interface makes necessary is part of its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

import boto3.session
import urllib3
from botocore.config import Config
from object_tier_http import (
    Connection,
    RefusedError,
    Request,
    Signer,
    credentials_in_use,
    refused,
    region_in_use,
)

from kvsluice.tiers import ObjectTier

if TYPE_CHECKING:
    from obstore.store import S3Config

OURS: Final = "ours"
BOTO3: Final = "boto3"
OBSTORE: Final = "obstore"
HTTP_CLIENT: Final = "http.client"
URLLIB3: Final = "urllib3"
FLOORS: Final = (HTTP_CLIENT, URLLIB3)
"""The raw HTTP floor is the faster of these."""
_PIECE_BYTES: Final = 256 << 10


@dataclass(frozen=True)
class Item:
    """One object: the tier's key for it, and its name in the bucket, which all clients use."""

    key: bytes
    name: str


class Client(Protocol):
    """One contender. `put` and `get` may run in several threads, each with a slot of its own."""

    name: str

    def prepare(self, operation: str, in_flight: int, items: Sequence[Item]) -> None:
        """What need not be timed, before a turn."""
        return

    def put(self, slot: int, item: Item, buffer: memoryview) -> None: ...

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        """Fill the buffer; raise unless the object is exactly as long."""

    def close(self) -> None:
        """Give its connections back."""
        return


class OurTier(Client):
    """The tier as the connector calls it."""

    name = OURS

    def __init__(self, tier: ObjectTier) -> None:
        self._tier = tier

    def put(self, slot: int, item: Item, buffer: memoryview) -> None:
        if self._tier.store(item.key, buffer, buffer.nbytes) != buffer.nbytes:
            raise RefusedError(f"ours: {item.name} was there already")

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        self._tier.load(item.key, buffer, buffer.nbytes)

    def close(self) -> None:
        self._tier.close()


class Boto3(Client):
    """boto3 as it comes, but for a pool as large as there are threads, and path style.

    It takes no memoryview, so a body is copied into `bytes`.
    """

    name = BOTO3

    def __init__(self, endpoint_url: str, bucket: str, max_in_flight: int) -> None:
        config = Config(max_pool_connections=max_in_flight, s3={"addressing_style": "path"})
        self._client = boto3.session.Session().client(
            "s3", endpoint_url=endpoint_url, region_name=region_in_use(), config=config
        )
        self._bucket = bucket

    def put(self, slot: int, item: Item, buffer: memoryview) -> None:
        self._client.put_object(Bucket=self._bucket, Key=item.name, Body=bytes(buffer))

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        # A body of another length does not fit into the slice and raises.
        buffer[:] = self._client.get_object(Bucket=self._bucket, Key=item.name)["Body"].read()

    def close(self) -> None:
        self._client.close()


class Obstore(Client):
    """obstore, payload unsigned, one request for each object; it sends from the buffer itself.

    A GET is copied out of pieces as they come: at 32 MiB that is half as fast again as `bytes()`, at 64 KiB no slower.
    """

    name = OBSTORE

    def __init__(self, endpoint_url: str, bucket: str) -> None:
        from obstore.store import S3Store

        access = credentials_in_use()
        settings: S3Config = {
            "endpoint": endpoint_url,
            "region": region_in_use(),
            "access_key_id": access.access_key or "",
            "secret_access_key": access.secret_key or "",
            "unsigned_payload": True,
            "virtual_hosted_style_request": False,
        }
        if access.token:
            settings["session_token"] = access.token
        self._store = S3Store(bucket, config=settings, client_options={"allow_http": True})

    def put(self, slot: int, item: Item, buffer: memoryview) -> None:
        self._store.put(item.name, buffer, use_multipart=False)

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        position = 0
        for piece in self._store.get(item.name).stream(min_chunk_size=_PIECE_BYTES):
            buffer[position : position + len(piece)] = memoryview(piece)
            position += len(piece)
        if position != buffer.nbytes:
            raise RefusedError(f"obstore: {item.name} has {position} bytes, asked for {buffer.nbytes}")


class _Signed(Client):
    """A floor: what it sends was signed before the clock started."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._requests: dict[str, Request] = {}

    def prepare(self, operation: str, in_flight: int, items: Sequence[Item]) -> None:
        self._requests = {item.name: self._signer.sign(operation, item.name) for item in items}


class HttpClient(_Signed):
    """The standard library's client, one connection for each slot; both ways without a copy."""

    name = HTTP_CLIENT

    def __init__(self, signer: Signer, max_in_flight: int) -> None:
        super().__init__(signer)
        self._connections = [Connection(signer.endpoint) for _ in range(max_in_flight)]

    def prepare(self, operation: str, in_flight: int, items: Sequence[Item]) -> None:
        super().prepare(operation, in_flight, items)
        for connection in self._connections[:in_flight]:
            connection.prepare()

    def put(self, slot: int, item: Item, buffer: memoryview) -> None:
        self._connections[slot].put(self._requests[item.name], buffer)

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        self._connections[slot].get(self._requests[item.name], buffer)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Urllib3(_Signed):
    """urllib3's pool, for PUT alone: its reads end in bytes of its own, which cannot be the floor of GET."""

    name = URLLIB3

    def __init__(self, signer: Signer, max_in_flight: int) -> None:
        super().__init__(signer)
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=max_in_flight, block=True)
        self._base = f"{signer.endpoint.scheme}://{signer.endpoint.netloc}"

    def put(self, slot: int, item: Item, buffer: memoryview) -> None:
        request = self._requests[item.name]
        # It sends any buffer as it is; its types do not say so.
        body = cast("bytes", buffer)
        response = self._pool.request(
            "PUT", self._base + request.target, body=body, headers=request.headers, retries=False
        )
        if response.status != 200:
            raise refused(request, response.status, response.data)

    def get(self, slot: int, item: Item, buffer: memoryview) -> None:
        raise NotImplementedError("not a floor of GET")

    def close(self) -> None:
        self._pool.clear()


def has_obstore() -> bool:
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


class Contenders:
    """All of them on one bucket, and the names of its objects."""

    def __init__(self, endpoint_url: str, bucket: str, prefix: str, max_in_flight: int) -> None:
        signer = Signer(endpoint_url, bucket)
        self._tier = ObjectTier(
            bucket,
            prefix=prefix,
            endpoint_url=endpoint_url,
            addressing_style="path",
            max_connections=max_in_flight,
        )
        self._clients: list[Client] = [OurTier(self._tier), Boto3(endpoint_url, bucket, max_in_flight)]
        if has_obstore():
            self._clients.append(Obstore(endpoint_url, bucket))
        self._clients += [HttpClient(signer, max_in_flight), Urllib3(signer, max_in_flight)]

    def clients(self, operation: str) -> list[Client]:
        return [client for client in self._clients if operation == "PUT" or client.name != URLLIB3]

    def new_items(self, count: int) -> list[Item]:
        """Objects of which nobody has heard yet."""
        keys = [os.urandom(32) for _ in range(count)]
        return [Item(key, self._tier.object_key(key)) for key in keys]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextmanager
def contenders(endpoint_url: str, bucket: str, prefix: str, max_in_flight: int) -> Iterator[Contenders]:
    made = Contenders(endpoint_url, bucket, prefix, max_in_flight)
    try:
        yield made
    finally:
        made.close()
