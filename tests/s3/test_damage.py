"""Objects and answers that are not the chunk that was stored: never a wrong byte, and nothing damaged is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bench import make_key
from engine_traffic import Engine, Paged
from fault_proxy import FaultProxy
from faults import DeclareLess, FlipByte, ShortBody
from obj_calls import IMAGE, KEY, LENGTH, load
from rgw import Rgw

from kvsluice.connector import Lookup, OffloadConnector
from kvsluice.tiers.chunk_file import stored_key
from kvsluice.tiers.errors import ChunkDamagedError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.reasons import CHECKSUM, FOREIGN, HEADER, IO_ERROR, OVERSIZE, SHORT

pytestmark = pytest.mark.s3

Connect = Callable[..., OffloadConnector]


def test_the_tier_hands_over_wrong_bytes_as_they_came(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(FlipByte(LENGTH // 2), times=1)
    wrong = bytearray(IMAGE)
    wrong[LENGTH // 2] ^= 0xFF
    assert load(tier, KEY, LENGTH) == wrong
    assert load(tier, KEY, LENGTH) == IMAGE


def test_a_shorter_answer_is_damage_and_not_asked_for_again(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(DeclareLess(1), method="GET")
    with pytest.raises(ChunkDamagedError) as caught:
        load(tier, KEY, LENGTH)
    assert caught.value.reason == SHORT
    assert proxy.counts() == {"GET": 1}


class OneChunk:
    """A connector behind the proxy that has stored two chunks, and what can be done to the first one's object."""

    def __init__(self, rgw: Rgw, bucket: str, proxy: FaultProxy, connect: Connect) -> None:
        self.paged = Paged(num_chunks=8)
        self.proxy = proxy
        through = {"endpoint_url": proxy.endpoint_url, "list_at_start_s": 0}
        self.connector = connect(rgw, bucket, self.paged.layout, through)
        self.engine = Engine(self.connector, self.paged)
        for _ in range(2):
            self.engine.step()
        self.engine.drain(20.0)
        assert sorted(self.engine.stored) == [0, 1]
        self._client, self._bucket = rgw.client, bucket

    def object_key(self, number: int) -> str:
        name = stored_key(make_key(number), 0, 0).hex()
        return f"{self.connector.namespace}/{name}.safetensors"

    def image(self, number: int) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=self.object_key(number))["Body"].read()

    def replace(self, image: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self.object_key(0), Body=image)

    def is_there(self) -> bool:
        listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self.object_key(0))
        return listed["KeyCount"] == 1

    def assert_a_miss_and_gone(self, reason: str) -> None:
        assert self.is_there()
        assert self.engine.load_all([0], 20.0) == {reason: 1, "done": 0}
        assert self.connector.stats().tiers["obj"].missed == {reason: 1}
        assert not self.is_there()
        assert self.connector.lookup([make_key(0)]) == Lookup(0, pending=False)
        # The other chunk is nobody's trouble.
        assert self.engine.load_all([1], 20.0) == {"done": 1}
        assert self.engine.wrong == []


@pytest.fixture
def one_chunk(rgw: Rgw, bucket: str, proxy: FaultProxy, connect: Connect) -> OneChunk:
    return OneChunk(rgw, bucket, proxy, connect)


@pytest.mark.parametrize(
    ("at", "reason"), [(4096, CHECKSUM), (100_000, CHECKSUM), (-1, CHECKSUM), (0, HEADER), (9, HEADER), (4095, HEADER)]
)
def test_a_wrong_byte_on_its_way_is_a_miss_and_the_object_is_removed(one_chunk: OneChunk, at: int, reason: str) -> None:
    one_chunk.proxy.inject(FlipByte(at), method="GET", times=1)
    one_chunk.assert_a_miss_and_gone(reason)


def test_a_wrong_byte_in_the_key_of_the_header_is_foreign(one_chunk: OneChunk) -> None:
    image = bytearray(one_chunk.image(0))
    at = image.index(make_key(0).hex().encode())
    image[at] = ord("0") if image[at] != ord("0") else ord("1")
    one_chunk.replace(image)
    one_chunk.assert_a_miss_and_gone(FOREIGN)


def test_another_chunk_in_its_place_is_foreign(one_chunk: OneChunk) -> None:
    one_chunk.replace(one_chunk.image(1))
    one_chunk.assert_a_miss_and_gone(FOREIGN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda image: image[:-1], SHORT),
        (lambda image: image[:4096], SHORT),
        (lambda image: b"", SHORT),
        (lambda image: image + b"\0", OVERSIZE),
    ],
)
def test_an_object_of_another_length_is_a_miss_and_removed(
    one_chunk: OneChunk, change: Callable[[bytes], bytes], reason: str
) -> None:
    one_chunk.replace(change(one_chunk.image(0)))
    one_chunk.assert_a_miss_and_gone(reason)


def test_a_body_that_ends_early_is_no_damage_and_the_object_stays(one_chunk: OneChunk) -> None:
    one_chunk.proxy.inject(ShortBody(5000), method="GET")
    assert one_chunk.engine.load_all([0], 20.0) == {IO_ERROR: 1, "done": 0}
    assert one_chunk.is_there()
    assert one_chunk.connector.stats().tiers["obj"].failures == {"short_body": 1}
