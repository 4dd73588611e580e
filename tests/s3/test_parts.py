"""Large chunks in parallel parts on a real gateway, whole and broken, and what is left of those that broke off."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engine_traffic import resident_bytes
from fault_proxy import FaultProxy
from faults import (
    Fault,
    FlipByte,
    HangUp,
    LoseAnswer,
    Nothing,
    Rate,
    ResetRequest,
    ResetResponse,
    ShortBody,
    StallBody,
    error,
    slow_down,
)
from obj_calls import BUSY_S, KEY, load
from rgw import Rgw

from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.reasons import OVERSIZE, SHORT

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]

PART = 5 << 20
LENGTH = 3 * PART + 12_345
READ_S = 0.6
OPERATION_S = 4.0
RANGES = LENGTH // (PART // 2)
"""That a load of it is cut into: they may be half as long as the parts of a store."""
IMAGE = os.urandom(LENGTH)
OTHER = KEY[::-1]


def image_view(num_bytes: int = LENGTH) -> memoryview:
    return memoryview(bytearray(IMAGE[:num_bytes]))


def unfinished(rgw: Rgw, bucket: str) -> list[str]:
    """Uploads that were begun and neither completed nor aborted."""
    return [upload["Key"] for upload in rgw.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


@pytest.fixture
def tier(make_tier: MakeTier, proxy: FaultProxy) -> ObjectTier:
    """Takes parts always, and knows already that the gateway puts no condition on their end; nothing counted so far."""
    tier = make_tier(
        proxy.endpoint_url, parts="on", part_bytes=PART, read_timeout_s=READ_S, operation_timeout_s=OPERATION_S
    )
    assert tier.store(KEY, image_view(), LENGTH) == LENGTH
    # With its first upload a tier looks, aside, for those that others have left.
    end_s = time.monotonic() + 10.0
    while not any(seen.method == "GET" and "uploads" in seen.path for seen in proxy.requests):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    proxy.reset_counts()
    return tier


@pytest.fixture(autouse=True)
def _no_upload_is_left(rgw: Rgw, bucket: str) -> Iterator[None]:
    yield
    assert unfinished(rgw, bucket) == []


@pytest.mark.parametrize("num_bytes", [2 * PART - 1, 2 * PART, 2 * PART + 1, LENGTH, (32 << 20) - 1])
def test_in_parts_an_image_comes_back_as_it_was(
    rgw: Rgw, bucket: str, tier: ObjectTier, make_tier: MakeTier, proxy: FaultProxy, num_bytes: int
) -> None:
    image = os.urandom(num_bytes)
    assert tier.store(OTHER, memoryview(bytearray(image + b"more")), num_bytes) == num_bytes
    assert load(tier, OTHER, num_bytes) == image
    # The same to those who know of no parts.
    assert load(make_tier(parts="off"), OTHER, num_bytes) == image
    assert rgw.client.get_object(Bucket=bucket, Key=tier.object_key(OTHER))["Body"].read() == image
    parts = 1 if num_bytes < 2 * PART else min(num_bytes // PART, 8)
    assert proxy.count("PUT") == parts
    assert proxy.count("POST") == (2 if parts > 1 else 0)
    assert proxy.count("GET") == (min(num_bytes // (PART // 2), 8) if parts > 1 else 1)


def test_what_is_held_is_not_sent_again(tier: ObjectTier, proxy: FaultProxy) -> None:
    assert tier.store(KEY, memoryview(bytearray(LENGTH)), LENGTH) == 0
    assert proxy.counts() == {"HEAD": 1}
    assert load(tier, KEY, LENGTH) == IMAGE


def test_what_is_missing_is_a_miss(tier: ObjectTier) -> None:
    with pytest.raises(ChunkMissingError):
        load(tier, OTHER, LENGTH)
    assert tier.failure_counts() == {}


@pytest.mark.parametrize(
    ("num_bytes", "reason"), [(0, SHORT), (PART, SHORT), (LENGTH - 1, SHORT), (LENGTH + 1, OVERSIZE)]
)
def test_an_object_of_another_length_is_damaged(
    rgw: Rgw, bucket: str, tier: ObjectTier, num_bytes: int, reason: str
) -> None:
    rgw.client.put_object(Bucket=bucket, Key=tier.object_key(OTHER), Body=bytes(num_bytes))
    with pytest.raises(ChunkDamagedError) as caught:
        load(tier, OTHER, LENGTH)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "fault",
    [ResetResponse(0), ResetResponse(1_000_000), ShortBody(1_000_000), StallBody(1_000_000), HangUp(), slow_down()],
)
def test_one_range_that_breaks_is_read_again_alone(tier: ObjectTier, proxy: FaultProxy, fault: Fault) -> None:
    proxy.inject(Nothing(), method="GET", times=1)
    proxy.inject(fault, method="GET", times=1)
    assert load(tier, KEY, LENGTH) == IMAGE
    assert proxy.counts() == {"GET": RANGES + 1}
    assert tier.failure_counts() == {}


@pytest.mark.parametrize("fault", [ResetResponse(1_000_000), StallBody(1_000_000), error(500, "InternalError")])
def test_ranges_that_go_on_breaking_end_the_load_in_time_and_nothing_is_written_after_it(
    tier: ObjectTier, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.inject(Nothing(), method="GET", times=1)
    proxy.inject(fault, method="GET")
    buffer = memoryview(bytearray(LENGTH))
    started_s = time.monotonic()
    with pytest.raises(TierUnavailableError):
        tier.load(KEY, buffer, LENGTH)
    assert time.monotonic() - started_s < OPERATION_S + BUSY_S
    assert sum(tier.failure_counts().values()) == 1
    # The slot is somebody else's now.
    buffer[:] = bytes(LENGTH)
    proxy.clear()
    time.sleep(0.3)
    assert not any(buffer)


def test_a_wrong_byte_of_one_range_is_handed_over_for_the_sum_to_find(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(Nothing(), method="GET", times=1)
    proxy.inject(FlipByte(77), method="GET", times=1)
    got = load(tier, KEY, LENGTH)
    assert sum(ours != theirs for ours, theirs in zip(got, IMAGE, strict=True)) == 1


def test_an_object_that_is_replaced_while_it_is_read_is_no_mix(
    rgw: Rgw, bucket: str, tier: ObjectTier, proxy: FaultProxy
) -> None:
    """By somebody who does not know that chunks are written once."""
    rule = proxy.inject(StallBody(0), method="GET", times=1)
    outcome: list[object] = []

    def read() -> None:
        try:
            outcome.append(load(tier, KEY, LENGTH))
        except TierUnavailableError as failure:
            outcome.append(failure)

    thread = threading.Thread(target=read)
    thread.start()
    while proxy.count("GET") < RANGES:
        time.sleep(0.001)
    time.sleep(0.3)
    rgw.client.put_object(Bucket=bucket, Key=tier.object_key(KEY), Body=IMAGE[::-1])
    # The stalled range is given up and asked for again.
    thread.join(20.0)
    rule.release()
    assert isinstance(outcome[0], TierUnavailableError) or outcome[0] in (IMAGE, IMAGE[::-1])


@pytest.mark.parametrize(
    "fault", [ResetRequest(0), ResetRequest(1_000_000), HangUp(), Rate(1e9, delay_s=1.2), slow_down()], ids=str
)
def test_one_part_that_breaks_is_sent_again_alone(tier: ObjectTier, proxy: FaultProxy, fault: Fault) -> None:
    proxy.inject(fault, method="PUT", path_part="partNumber=2", times=1)
    assert tier.store(OTHER, image_view(), LENGTH) == LENGTH
    assert proxy.counts() == {"HEAD": 1, "POST": 2, "PUT": 4}
    assert load(tier, OTHER, LENGTH) == IMAGE
    assert tier.failure_counts() == {}


@pytest.mark.parametrize(
    ("fault", "method", "path_part"),
    [
        (ResetRequest(1_000_000), "PUT", "partNumber=2"),
        (error(500, "InternalError"), "PUT", "partNumber=3"),
        (error(403, "AccessDenied"), "PUT", "partNumber=1"),
        (error(507, "InsufficientCapacity"), "PUT", "partNumber=2"),
        (error(500, "InternalError"), "POST", "uploadId="),
        (HangUp(), "POST", "uploadId="),
    ],
)
def test_an_upload_that_fails_is_aborted_and_nothing_is_held(
    rgw: Rgw, bucket: str, tier: ObjectTier, proxy: FaultProxy, fault: Fault, method: str, path_part: str
) -> None:
    proxy.inject(fault, method=method, path_part=path_part)
    with pytest.raises(TierUnavailableError):
        tier.store(OTHER, image_view(), LENGTH)
    assert proxy.count("DELETE") == 1
    assert unfinished(rgw, bucket) == []
    assert sum(tier.failure_counts().values()) == 1
    proxy.clear()
    assert tier.held_prefix([OTHER]) == 0
    # And it can be stored after all.
    assert tier.store(OTHER, image_view(), LENGTH) == LENGTH
    assert load(tier, OTHER, LENGTH) == IMAGE


def test_an_upload_whose_end_was_answered_and_the_answer_lost_is_there(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(LoseAnswer(), method="POST", path_part="uploadId=", times=1)
    assert tier.store(OTHER, image_view(), LENGTH) in (0, LENGTH)
    assert load(tier, OTHER, LENGTH) == IMAGE
    assert tier.failure_counts() == {}


def test_an_upload_that_was_cut_off_from_the_server_is_aborted_later(
    rgw: Rgw, bucket: str, tier: ObjectTier, make_tier: MakeTier, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    rule = proxy.inject(ResetRequest(1_000_000), method="PUT", path_part="partNumber=2")
    proxy.inject(HangUp(), method="DELETE")
    with pytest.raises(TierUnavailableError):
        tier.store(OTHER, image_view(), LENGTH)
    assert rule.hits
    assert "could not be aborted" in caplog.text
    assert unfinished(rgw, bucket) == [tier.object_key(OTHER)]
    proxy.clear()
    # Another one of its size may be under way at any time: only old ones are nobody's.
    later = make_tier(parts="on", part_bytes=PART)
    assert later.store(b"first", image_view(), LENGTH) == LENGTH
    assert unfinished(rgw, bucket) == [tier.object_key(OTHER)]
    assert later._uploads.abort_orphans(older_than_s=-60.0) == 1  # noqa: SLF001 - an hour is too long for a test


def test_left_to_itself_the_tier_uses_ranges_and_leaves_this_gateway_s_uploads_alone(
    make_tier: MakeTier, proxy: FaultProxy
) -> None:
    """The gateway ignores a condition on the end of an upload, so a second writer could replace what is there."""
    tier = make_tier(proxy.endpoint_url, part_bytes=PART)
    proxy.reset_counts()
    for number in range(6):
        assert tier.store(bytes([number]), image_view(), LENGTH) == LENGTH
        assert load(tier, bytes([number]), LENGTH) == IMAGE
    # To find that out took one upload of two bytes.
    sent = [seen for seen in proxy.requests if "uploadId=" in seen.path and seen.method == "PUT"]
    assert len(sent) == 1
    assert "/probe-" in sent[0].path
    assert proxy.count("GET") > 6
    assert tier.failure_counts() == {}


def test_parts_take_no_memory_of_their_own(tier: ObjectTier) -> None:
    body, buffer = image_view(), memoryview(bytearray(LENGTH))
    tier.load(KEY, buffer, LENGTH)
    before = resident_bytes()
    for number in range(4):
        tier.store(bytes([number]), body, LENGTH)
        tier.load(bytes([number]), buffer, LENGTH)
    # The proxy's own buffers for some more connections.
    assert resident_bytes() - before < LENGTH
