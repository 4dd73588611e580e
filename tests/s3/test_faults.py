"""One fault at a time between the object tier and a real gateway: the right outcome, in time, at the right price."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault_proxy import FaultProxy
from faults import (
    Fault,
    HangUp,
    LoseAnswer,
    Rate,
    ResetRequest,
    ResetResponse,
    ShortBody,
    StallBody,
    error,
    slow_down,
)
from obj_calls import IMAGE, KEY, LENGTH, OPERATION_S, in_time, load, served_again, view
from rgw import Rgw
from tls_terminator import PrivateCa, TlsTerminator

from kvsluice.tiers.errors import ChunkMissingError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]

OTHER = KEY[::-1]


def operate(tier: ObjectTier, method: str) -> object:
    """What one request of this method is for."""
    if method == "GET":
        return load(tier, KEY, LENGTH)
    if method == "PUT":
        return tier.store(OTHER, view(IMAGE), LENGTH)
    return tier.held_prefix([KEY])


WANTED = {"GET": IMAGE, "PUT": LENGTH, "HEAD": 1}


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


# ---- the same over TLS, whose sockets have errors of their own ---------------------------------------


@pytest.fixture
def tls_tier(make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa) -> ObjectTier:
    """As `tier`, behind the terminator."""
    tier = make_tier(tls.endpoint_url, ca_bundle=str(ca.bundle), operation_timeout_s=OPERATION_S, max_attempts=2)
    tier.store(KEY, view(IMAGE), LENGTH)
    tls.reset_counts()
    return tier


@pytest.mark.parametrize(
    ("method", "fault", "kind"),
    [
        # Either end of a connection reads as its end there.
        ("GET", ResetResponse(1000), "short_body|reset"),
        ("GET", ShortBody(1000), "short_body"),
        ("GET", HangUp(), "reset"),
        ("PUT", ResetRequest(LENGTH // 2), "reset"),
        ("PUT", HangUp(), "reset"),
    ],
    ids=str,
)
def test_over_tls_a_connection_that_breaks_is_told_apart_alike(
    tls_tier: ObjectTier, tls: TlsTerminator, method: str, fault: Fault, kind: str
) -> None:
    tls.inject(fault, method=method, times=1)
    assert operate(tls_tier, method) == WANTED[method]
    assert tls.counts() == {method: 2}
    tls.inject(fault, method=method)
    with in_time(), pytest.raises(TierUnavailableError, match=rf"no answer \(({kind})"):
        _ = load(tls_tier, KEY, LENGTH) if method == "GET" else tls_tier.store(b"new", view(IMAGE), LENGTH)
    [(label, count)] = tls_tier.failure_counts().items()
    assert label in kind.split("|")
    assert count == 1


def test_over_tls_connections_are_used_again_and_those_closed_while_idle_are_no_failure(
    tls_tier: ObjectTier, tls: TlsTerminator
) -> None:
    for _ in range(10):
        load(tls_tier, KEY, LENGTH)
        tls_tier.held_prefix([KEY])
    assert tls.connections <= 2
    while not tls.close_idle():
        time.sleep(0.001)
    tls.reset_counts()
    assert load(tls_tier, KEY, LENGTH) == IMAGE
    assert tls.counts() == {"GET": 1}
    assert tls_tier.failure_counts() == {}
