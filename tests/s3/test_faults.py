"""One fault at a time between the object tier and a real gateway: the right outcome, in time, at the right price."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator

import botocore.auth
import pytest
from bench import make_key
from engine_traffic import Engine, Paged
from fault_proxy import FaultProxy
from faults import (
    DeclareLess,
    Fault,
    FlipByte,
    HangUp,
    LoseAnswer,
    Rate,
    ResetRequest,
    ResetResponse,
    ShortBody,
    StallBody,
    clock_skewed,
    error,
    slow_down,
)
from images import IMAGE, KEY, load, served_again, view
from rgw import KMS_KEY_ID, Rgw
from tls_terminator import PrivateCa, TlsTerminator

from kvsluice.connector import Lookup, OffloadConnector
from kvsluice.tiers.chunk_file import stored_key
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, ConfigError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.wire import Connection, Response
from kvsluice.tiers.reasons import CHECKSUM, DISK_FULL, FOREIGN, HEADER, IO_ERROR, MISSING, OVERSIZE, SHORT

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]
Connect = Callable[..., OffloadConnector]

LENGTH = len(IMAGE)
READ_S = 0.7
OPERATION_S = 2.0
BUSY_S = 1.5
"""What a machine with more to do than these tests may add."""
OTHER = KEY[::-1]


@pytest.fixture
def tier(make_tier: MakeTier, proxy: FaultProxy) -> ObjectTier:
    """Behind the proxy, with `KEY` held and times that a test can wait for; nothing counted so far."""
    tier = make_tier(proxy.endpoint_url, read_timeout_s=READ_S, operation_timeout_s=OPERATION_S)
    tier.store(KEY, view(IMAGE), LENGTH)
    proxy.reset_counts()
    return tier


def operate(tier: ObjectTier, method: str) -> object:
    """What one request of this method is for."""
    if method == "GET":
        return load(tier, KEY, LENGTH)
    if method == "PUT":
        return tier.store(OTHER, view(IMAGE), LENGTH)
    return tier.held_prefix([KEY])


WANTED = {"GET": IMAGE, "PUT": LENGTH, "HEAD": 1}


@contextlib.contextmanager
def in_time(limit_s: float = OPERATION_S) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < limit_s + BUSY_S


# ---- answers that may pass, and answers that will not ------------------------------------------------

PASSING = [
    (408, "RequestTimeout"),
    (409, "ConditionalRequestConflict"),
    (409, "OperationAborted"),
    (429, "TooManyRequests"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (504, "GatewayTimeout"),
]
LASTING = [
    (400, "ExpiredToken"),
    (400, "InvalidRequest"),
    (400, "AuthorizationHeaderMalformed"),
    (403, "AccessDenied"),
    (403, "RequestTimeTooSkewed"),
    (403, "SignatureDoesNotMatch"),
    (404, "NoSuchBucket"),
    (405, "MethodNotAllowed"),
    (412, "PreconditionFailed"),
    (501, "NotImplemented"),
    (507, "InsufficientCapacity"),
]


@pytest.mark.parametrize(("status", "code"), PASSING)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_an_answer_that_may_pass_is_asked_for_again(
    tier: ObjectTier, proxy: FaultProxy, method: str, status: int, code: str
) -> None:
    proxy.inject(error(status, code), method=method, times=1)
    with in_time():
        assert operate(tier, method) == WANTED[method]
    assert proxy.counts() == {method: 2}
    assert tier.failure_counts() == {}


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_an_answer_that_does_not_pass_is_given_up_after_three(
    tier: ObjectTier, proxy: FaultProxy, method: str, status: int, code: str
) -> None:
    proxy.inject(error(status, code), method=method)
    # The answer to a HEAD has no body, so no code.
    known = code if method != "HEAD" else str(status)
    with in_time(), pytest.raises(TierUnavailableError, match=f"status {status}, code {known}") as caught:
        operate(tier, method)
    assert caught.value.reason == IO_ERROR
    assert proxy.counts() == {method: 3}
    assert tier.failure_counts() == {f"{status} {known}": 1}


@pytest.mark.parametrize(("status", "code"), LASTING)
def test_an_answer_to_a_load_that_will_not_pass_is_asked_for_once(
    tier: ObjectTier, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.inject(error(status, code), method="GET")
    with in_time(0.0), pytest.raises(TierUnavailableError, match=f"status {status}, code {code}") as caught:
        load(tier, KEY, LENGTH)
    assert caught.value.reason == (DISK_FULL if status == 507 else IO_ERROR)
    assert proxy.counts() == {"GET": 1}
    assert tier.failure_counts() == {f"{status} {code}": 1}


@pytest.mark.parametrize(("status", "code"), [case for case in LASTING if case[0] not in (412, 501)])
def test_an_answer_to_a_store_that_will_not_pass_is_asked_for_once(
    tier: ObjectTier, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.inject(error(status, code), method="PUT")
    with in_time(0.0), pytest.raises(TierUnavailableError, match=f"status {status}, code {code}") as caught:
        tier.store(OTHER, view(IMAGE), LENGTH)
    assert caught.value.reason == (DISK_FULL if status == 507 else IO_ERROR)
    assert proxy.counts() == {"PUT": 1}
    assert tier.failure_counts() == {f"{status} {code}": 1}


def test_a_missing_object_is_a_miss_and_no_failure(tier: ObjectTier, proxy: FaultProxy) -> None:
    with pytest.raises(ChunkMissingError) as caught:
        load(tier, OTHER, LENGTH)
    assert caught.value.reason == MISSING
    assert proxy.counts() == {"GET": 1}
    assert tier.failure_counts() == {}


def test_a_condition_that_does_not_hold_says_that_it_is_held(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(error(412, "PreconditionFailed"), method="PUT")
    assert tier.store(OTHER, view(IMAGE), LENGTH) == 0
    assert proxy.counts() == {"PUT": 1}
    assert tier.failure_counts() == {}


def test_a_server_that_stops_knowing_conditions_is_asked_first_from_then_on(
    tier: ObjectTier, proxy: FaultProxy
) -> None:
    proxy.inject(error(501, "NotImplemented"), method="PUT", times=1)
    assert tier.store(OTHER, view(IMAGE), LENGTH) == LENGTH
    assert proxy.counts() == {"PUT": 2, "HEAD": 1}
    assert tier.store(OTHER, view(IMAGE), LENGTH) == 0
    assert proxy.counts() == {"PUT": 2, "HEAD": 2}
    assert tier.failure_counts() == {}


def test_a_wait_that_the_server_asks_for_is_kept(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(slow_down(1), times=1)
    started_s = time.monotonic()
    assert load(tier, KEY, LENGTH) == IMAGE
    assert time.monotonic() - started_s >= 1.0
    assert proxy.counts() == {"GET": 2}


def test_a_wait_past_the_deadline_is_not_begun(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(slow_down(60))
    with in_time(0.0), pytest.raises(TierUnavailableError, match="SlowDown"):
        load(tier, KEY, LENGTH)
    assert proxy.counts() == {"GET": 1}


# ---- connections that break --------------------------------------------------------------------------

BREAKS = [
    ("GET", ResetResponse(0), "reset"),
    ("GET", ResetResponse(1000), "reset"),
    ("GET", ResetResponse(LENGTH - 1), "reset"),
    ("GET", ShortBody(0), "short_body"),
    ("GET", ShortBody(LENGTH // 2), "short_body"),
    ("GET", LoseAnswer(), "reset"),
    ("GET", HangUp(), "reset"),
    ("HEAD", HangUp(), "reset"),
    ("PUT", ResetRequest(0), "reset"),
    ("PUT", ResetRequest(LENGTH // 2), "reset"),
    ("PUT", HangUp(), "reset"),
]


@pytest.mark.parametrize(("method", "fault", "kind"), BREAKS, ids=str)
def test_a_connection_that_breaks_is_tried_again_on_another(
    tier: ObjectTier, proxy: FaultProxy, method: str, fault: Fault, kind: str
) -> None:
    proxy.inject(fault, method=method, times=1)
    with in_time():
        assert operate(tier, method) == WANTED[method]
    assert proxy.counts() == {method: 2}
    assert tier.failure_counts() == {}


@pytest.mark.parametrize(("method", "fault", "kind"), BREAKS, ids=str)
def test_connections_that_go_on_breaking_are_given_up(
    tier: ObjectTier, proxy: FaultProxy, method: str, fault: Fault, kind: str
) -> None:
    # The first one of them may go unnoticed: it was kept open, and found closed.
    proxy.inject(fault, method=method)
    with in_time(), pytest.raises(TierUnavailableError, match=rf"no answer \({kind}") as caught:
        operate(tier, method)
    assert caught.value.reason == IO_ERROR
    assert 3 <= proxy.count(method) <= 4
    assert tier.failure_counts() == {kind: 1}


def test_a_put_whose_answer_was_lost_counts_as_held_and_is_whole(
    rgw: Rgw, bucket: str, tier: ObjectTier, proxy: FaultProxy
) -> None:
    proxy.inject(LoseAnswer(), method="PUT", times=1)
    assert tier.store(OTHER, view(IMAGE), LENGTH) == 0
    assert proxy.counts() == {"PUT": 2}
    assert load(tier, OTHER, LENGTH) == IMAGE
    assert rgw.client.head_object(Bucket=bucket, Key=tier.object_key(OTHER))["ContentLength"] == LENGTH
    assert tier.failure_counts() == {}


def test_a_put_that_broke_off_leaves_nothing_that_a_load_would_take(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(ResetRequest(LENGTH // 2), method="PUT")
    with pytest.raises(TierUnavailableError):
        tier.store(OTHER, view(IMAGE), LENGTH)
    proxy.clear()
    with pytest.raises(ChunkMissingError):
        load(tier, OTHER, LENGTH)


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_a_connection_that_was_closed_while_idle_is_no_failure_and_no_attempt(
    make_tier: MakeTier, proxy: FaultProxy, method: str
) -> None:
    tier = make_tier(proxy.endpoint_url, max_attempts=1)
    tier.store(KEY, view(IMAGE), LENGTH)
    while not proxy.close_idle():
        time.sleep(0.001)
    proxy.reset_counts()
    assert operate(tier, method) == WANTED[method]
    assert proxy.counts() == {method: 1}
    assert tier.failure_counts() == {}


# ---- what takes too long -----------------------------------------------------------------------------


def test_a_body_that_stalls_is_asked_for_again(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(StallBody(1000), method="GET", times=1)
    with in_time():
        assert load(tier, KEY, LENGTH) == IMAGE
    assert proxy.counts() == {"GET": 2}
    assert tier.failure_counts() == {}


def test_bodies_that_stall_end_with_the_operation(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(StallBody(1000), method="GET")
    with in_time(), pytest.raises(TierUnavailableError, match=r"no answer \((timeout|deadline)"):
        load(tier, KEY, LENGTH)
    assert proxy.count("GET") <= 3
    assert sum(tier.failure_counts().values()) == 1


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_body_that_trickles_ends_with_the_operation(make_tier: MakeTier, proxy: FaultProxy, method: str) -> None:
    tier = make_tier(proxy.endpoint_url, operation_timeout_s=OPERATION_S)
    proxy.reset_counts()
    # It is never silent, and would take half a minute.
    length = 8 << 20
    image = bytes(length)
    if method == "GET":
        tier.store(OTHER, view(image), length)
    proxy.inject(Rate(length / 30), method=method)
    with in_time(), pytest.raises(TierUnavailableError, match=r"no answer \(deadline"):
        _ = load(tier, OTHER, length) if method == "GET" else tier.store(OTHER, view(image), length)
    assert proxy.count(method) == 1
    assert tier.failure_counts() == {"deadline": 1}


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_a_server_that_says_nothing_ends_with_the_operation_and_serves_again(
    tier: ObjectTier, proxy: FaultProxy, method: str
) -> None:
    proxy.stall()
    with in_time(), pytest.raises(TierUnavailableError, match=r"no answer \((timeout|deadline)"):
        operate(tier, method)
    proxy.release()
    served_again(tier, within_s=4.5)
    assert load(tier, KEY, LENGTH) == IMAGE


def test_a_server_that_refuses_connections_is_told_apart(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.refuse()
    with in_time(), pytest.raises(TierUnavailableError, match=r"no answer \(connect"):
        load(tier, KEY, LENGTH)
    assert tier.failure_counts() == {"connect": 1}
    proxy.accept()
    served_again(tier, within_s=4.5)
    assert load(tier, KEY, LENGTH) == IMAGE


# ---- bytes that are not those that were stored -------------------------------------------------------


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


# ---- clocks, keys, regions ---------------------------------------------------------------------------


def shift_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Of what signs, as a machine's clock that is wrong would."""
    real = botocore.auth.get_current_datetime

    def shifted(*args: object, **kwargs: object) -> dt.datetime:
        return real(*args, **kwargs) + dt.timedelta(seconds=by_s)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", shifted)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + by_s)


@pytest.mark.parametrize(("by_s", "words"), [(3600.0, "ahead"), (-3600.0, "behind")])
def test_a_clock_that_is_an_hour_wrong_is_said_with_its_error(
    tier: ObjectTier, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, by_s: float, words: str
) -> None:
    with monkeypatch.context() as wrong:
        shift_clock(wrong, by_s)
        for call in (lambda: load(tier, KEY, LENGTH), lambda: tier.store(OTHER, view(IMAGE), LENGTH)):
            with in_time(0.0), pytest.raises(TierUnavailableError, match=rf"clock is 3[56]\d\d s {words}") as caught:
                call()
            assert "RequestTimeTooSkewed" in str(caught.value)
    assert proxy.counts() == {"GET": 1, "PUT": 1}
    assert tier.failure_counts() == {"403 RequestTimeTooSkewed": 2}
    assert load(tier, KEY, LENGTH) == IMAGE


def test_with_such_a_clock_it_does_not_start_and_says_why(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_clock(monkeypatch, 3600.0)
    with pytest.raises(ConfigError, match=r"clock is 3[56]\d\d s ahead"):
        make_tier()


def test_a_server_s_clock_that_is_wrong_is_said_alike(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(clock_skewed(-600.0), times=1)
    with pytest.raises(TierUnavailableError, match=r"this machine's clock is (60[01]|599) s ahead"):
        load(tier, KEY, LENGTH)


def test_a_token_that_expired_is_said_and_not_tried_again(tier: ObjectTier, proxy: FaultProxy) -> None:
    proxy.inject(error(400, "ExpiredToken"))
    with pytest.raises(TierUnavailableError, match="the session token has expired"):
        load(tier, KEY, LENGTH)
    assert proxy.counts() == {"GET": 1}
    assert tier.failure_counts() == {"400 ExpiredToken": 1}


def test_any_region_will_do_for_a_server_that_has_none(make_tier: MakeTier) -> None:
    tier = make_tier(region="eu-central-1")
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert load(tier, KEY, LENGTH) == IMAGE


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed"), (307, "TemporaryRedirect")]
)
def test_another_region_is_named(make_tier: MakeTier, proxy: FaultProxy, status: int, code: str) -> None:
    proxy.inject(error(status, code, {"x-amz-bucket-region": "eu-west-3"}))
    with pytest.raises(ConfigError, match=r"another region: set region .*eu-west-3"):
        make_tier(proxy.endpoint_url)
    assert proxy.count() == 1


# ---- what goes out with a store ----------------------------------------------------------------------


def flip_on_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of each body is another one than was signed."""
    real = Connection.ask

    def ask(
        self: Connection, method: str, target: str, headers: dict[str, str], body: memoryview | None, *rest: float
    ) -> Response:
        if body is not None and body.nbytes:
            body = memoryview(bytearray(body))
            body[body.nbytes // 2] ^= 0xFF
        return real(self, method, target, headers, body, *rest)

    monkeypatch.setattr(Connection, "ask", ask)


def test_a_signed_payload_is_taken_and_one_with_a_wrong_byte_is_refused(
    make_tier: MakeTier, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(proxy.endpoint_url, sign_payload="on")
    proxy.reset_counts()
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert len(proxy.requests[-1].headers["x-amz-content-sha256"]) == 64
    assert load(tier, KEY, LENGTH) == IMAGE
    proxy.reset_counts()
    with monkeypatch.context() as patch:
        flip_on_the_way_out(patch)
        with pytest.raises(TierUnavailableError, match="status 400"):
            tier.store(OTHER, view(IMAGE), LENGTH)
    assert proxy.counts() == {"PUT": 1}
    assert tier.held_prefix([OTHER]) == 0


def test_without_a_signed_payload_a_wrong_byte_gets_in(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above rests on; here the chunk's own sum is what finds it."""
    tier = make_tier(sign_payload="off")
    with monkeypatch.context() as patch:
        flip_on_the_way_out(patch)
        assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert load(tier, KEY, LENGTH) != IMAGE


def test_encryption_by_the_server_with_a_key_of_its_own_comes_back_plain(
    rgw: Rgw, bucket: str, make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa
) -> None:
    tier = make_tier(
        tls.endpoint_url, ca_bundle=str(ca.bundle), server_side_encryption="aws:kms", sse_kms_key_id=KMS_KEY_ID
    )
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert load(tier, KEY, LENGTH) == IMAGE
    head = rgw.client.head_object(Bucket=bucket, Key=tier.object_key(KEY))
    assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", KMS_KEY_ID)


def test_encryption_by_the_server_goes_out_with_the_store(
    make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa
) -> None:
    """This gateway takes the word and does nothing about it: it has no key of its own."""
    tier = make_tier(tls.endpoint_url, ca_bundle=str(ca.bundle), server_side_encryption="AES256")
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert tls.requests[-1].headers["x-amz-server-side-encryption"] == "AES256"
    assert load(tier, KEY, LENGTH) == IMAGE


def test_a_key_that_the_server_does_not_have_is_said(make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa) -> None:
    tier = make_tier(
        tls.endpoint_url, ca_bundle=str(ca.bundle), server_side_encryption="aws:kms", sse_kms_key_id="no-such-key"
    )
    with pytest.raises(TierUnavailableError, match=r"status 4\d\d"):
        tier.store(KEY, view(IMAGE), LENGTH)


def test_a_storage_class_goes_out_with_the_store(rgw: Rgw, bucket: str, make_tier: MakeTier, proxy: FaultProxy) -> None:
    tier = make_tier(proxy.endpoint_url, storage_class="STANDARD")
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    assert proxy.requests[-1].headers["x-amz-storage-class"] == "STANDARD"
    assert rgw.client.head_object(Bucket=bucket, Key=tier.object_key(KEY)).get("StorageClass", "STANDARD") == "STANDARD"


def test_a_storage_class_that_the_server_does_not_have_is_said(
    make_tier: MakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(storage_class="NO_SUCH_CLASS")
    # AWS words it as InvalidStorageClass.
    assert "status 400, code InvalidArgument" in caplog.text
    with pytest.raises(TierUnavailableError, match="status 400, code InvalidArgument"):
        tier.store(KEY, view(IMAGE), LENGTH)
    assert tier.failure_counts()["400 InvalidArgument"] >= 1
