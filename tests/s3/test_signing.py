"""Clocks, keys, regions, and what goes out with a store: taken by a real gateway, or refused with a reason."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

import botocore.auth
import pytest
from fault_proxy import FaultProxy
from faults import clock_skewed, error
from obj_calls import IMAGE, KEY, LENGTH, in_time, load, view
from rgw import KMS_KEY_ID, Rgw
from tls_terminator import PrivateCa, TlsTerminator

from kvsluice.tiers.errors import ConfigError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.wire import Connection, Response

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]

OTHER = KEY[::-1]


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
