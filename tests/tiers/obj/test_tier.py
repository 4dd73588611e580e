"""The object tier on moto's server, and on one that answers what a test tells it to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    TierUnavailableError,
)
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING, OVERSIZE, SHORT

KEY = bytes(range(34))
MIB = 1 << 20
IMAGE = bytes(range(256)) * 64


def view(image: bytes) -> memoryview:
    return memoryview(bytearray(image))


@pytest.fixture
def tier(bucket):
    tier = ObjectTier(bucket.name, prefix="/team-a/", namespace="ab12", **bucket.credentials)
    yield tier
    tier.close()


@pytest.fixture
def scripted_tier(make_scripted_tier):
    return make_scripted_tier(access_key="AKIA-TEST", secret_key="very-secret", session_token="session-secret")


def test_passes_the_conformance_suite(bucket):
    report = check_tier(lambda: ObjectTier(bucket.name, prefix="p", namespace="ab12", **bucket.credentials))
    assert report.tier_type == "obj"
    assert report.persistent


def test_an_object_lies_under_prefix_namespace_and_key(bucket, tier):
    assert tier.store(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)
    assert bucket.keys() == [f"team-a/ab12/{KEY.hex()}.safetensors"]
    assert bucket.read(tier.object_key(KEY)) == IMAGE


def test_without_a_prefix_the_namespace_comes_first(bucket):
    tier = ObjectTier(bucket.name, namespace="ab12", **bucket.credentials)
    assert tier.object_key(b"\x01") == "ab12/01.safetensors"
    tier.close()


def test_only_the_image_is_stored_not_the_whole_buffer(bucket, tier):
    tier.store(KEY, view(IMAGE), 100)
    assert bucket.read(tier.object_key(KEY)) == IMAGE[:100]


def test_facts_are_written_once_and_stay(bucket):
    for facts in ({"model": "first"}, {"model": "second"}):
        ObjectTier(bucket.name, namespace="ab12", namespace_facts=facts, **bucket.credentials).close()
    assert json.loads(bucket.read("ab12/namespace.json")) == {"model": "first"}


def test_scan_and_clear_leave_other_namespaces_and_the_facts(bucket):
    one = ObjectTier(bucket.name, namespace="ab", namespace_facts={"a": 1}, **bucket.credentials)
    longer = ObjectTier(bucket.name, namespace="abc", **bucket.credentials)
    for tier in (one, longer):
        tier.store(KEY, view(IMAGE), 10)
    bucket.write("ab/readme.txt", b"a stranger's")
    assert list(one.scan()) == [KEY]
    assert one.clear() == 1
    assert bucket.keys() == ["ab/namespace.json", "ab/readme.txt", f"abc/{KEY.hex()}.safetensors"]
    one.close()
    longer.close()


def test_clear_goes_in_batches(bucket, tier, monkeypatch):
    monkeypatch.setattr("kvsluice.tiers.obj.tier.DELETE_BATCH", 3)
    for index in range(7):
        tier.store(bytes([index]), view(IMAGE), 10)
    assert tier.clear() == 7
    assert bucket.keys() == []


@pytest.mark.parametrize("num_held", range(18))
def test_a_prefix_is_found_in_few_requests(scripted, scripted_tier, answer, num_held):
    keys = [bytes([index]) for index in range(17)]
    held = {f"/kv-test/{scripted_tier.object_key(key)}" for key in keys[:num_held]}
    scripted.script = lambda request: answer() if request.path in held else answer(404)
    assert scripted_tier.held_prefix(keys) == num_held
    assert scripted.count("HEAD") == len(scripted.requests)
    # 1 for a new prompt, 2 for a known one, else both ends and log2(16).
    assert len(scripted.requests) == {0: 1, 17: 2}.get(num_held, 6)


def test_no_keys_and_one_key_need_no_and_one_request(scripted, scripted_tier, answer):
    assert scripted_tier.held_prefix([]) == 0
    assert scripted.requests == []
    scripted.script = lambda request: answer(404)
    assert scripted_tier.held_prefix([KEY]) == 0
    assert len(scripted.requests) == 1


def test_one_held_key_is_not_asked_twice(scripted, scripted_tier):
    assert scripted_tier.held_prefix([KEY]) == 1
    assert len(scripted.requests) == 1


def test_put_is_conditional_and_its_payload_unsigned_on_loopback(scripted, scripted_tier):
    scripted_tier.store(KEY, view(IMAGE), len(IMAGE))
    (put,) = scripted.requests
    assert put.body == IMAGE
    assert put.headers["if-none-match"] == "*"
    assert put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "AWS4-HMAC-SHA256" in put.headers["authorization"]
    assert "expect" not in put.headers
    assert not [name for name in put.headers if "checksum" in name or "crc" in name]


def test_412_is_a_chunk_already_held(scripted, scripted_tier, answer):
    scripted.script = lambda request: answer.error(412, "PreconditionFailed")
    assert scripted_tier.store(KEY, view(IMAGE), len(IMAGE)) == 0


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "NotImplemented")])
def test_a_server_without_conditional_put_is_asked_with_head_from_then_on(
    scripted, scripted_tier, answer, status, code, caplog
):
    objects: dict[str, bytes] = {}

    def serve(request):
        if request.method == "HEAD":
            return answer(200 if request.path in objects else 404)
        if "if-none-match" in request.headers:
            return answer.error(status, code)
        objects[request.path] = request.body
        return answer()

    scripted.script = serve
    assert scripted_tier.store(KEY, view(IMAGE), len(IMAGE)) == len(IMAGE)
    assert [request.method for request in scripted.requests] == ["PUT", "HEAD", "PUT"]
    assert scripted_tier.store(KEY, view(IMAGE[::-1]), len(IMAGE)) == 0
    assert [request.method for request in scripted.requests[3:]] == ["HEAD"]
    assert list(objects.values()) == [IMAGE]
    assert [record for record in caplog.records if record.name.startswith("kvsluice")] == [
        record for record in caplog.records if "If-None-Match" in record.getMessage()
    ]
    assert len([record for record in caplog.records if "If-None-Match" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "AccessDenied", IO_ERROR),
        (404, "NoSuchBucket", IO_ERROR),
        (409, "ConditionalRequestConflict", IO_ERROR),
        (400, "ExpiredToken", IO_ERROR),
        (500, "InternalError", IO_ERROR),
        (503, "SlowDown", IO_ERROR),
        (507, "InsufficientStorage", DISK_FULL),
        (403, "QuotaExceeded", DISK_FULL),
    ],
)
@pytest.mark.parametrize("action", ["store", "load"])
def test_each_refusal_is_told_apart_and_counted(scripted, scripted_tier, answer, status, code, reason, action):
    scripted.script = lambda request: answer.error(status, code)
    with pytest.raises(TierUnavailableError, match=f"status {status}, code {code}") as caught:
        getattr(scripted_tier, action)(KEY, view(IMAGE), len(IMAGE))
    assert caught.value.reason == reason
    assert isinstance(caught.value.__cause__, RequestFailedError)
    assert "server words" not in str(caught.value)
    assert scripted_tier.failure_counts() == {f"{status} {code}": 1}


def test_a_missing_object_is_a_miss(scripted, scripted_tier, answer):
    scripted.script = lambda request: answer.error(404, "NoSuchKey")
    with pytest.raises(ChunkMissingError) as caught:
        scripted_tier.load(KEY, view(IMAGE), len(IMAGE))
    assert caught.value.reason == MISSING
    assert scripted_tier.failure_counts() == {}


@pytest.mark.parametrize("action", ["held_prefix", "delete"])
def test_a_refused_head_is_no_miss(scripted, scripted_tier, answer, action):
    scripted.script = lambda request: answer(403)
    argument = [KEY] if action == "held_prefix" else KEY
    with pytest.raises(TierUnavailableError, match="status 403"):
        getattr(scripted_tier, action)(argument)


@pytest.mark.parametrize("action", ["scan", "clear"])
def test_a_refused_listing_is_unavailable(scripted, scripted_tier, answer, action):
    scripted.script = lambda request: answer.error(403, "AccessDenied")
    with pytest.raises(TierUnavailableError, match="could not list"):
        list(getattr(scripted_tier, action)())


def test_objects_that_could_not_be_deleted_are_an_error(scripted, scripted_tier, answer):
    listing = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>default/01.safetensors</Key></Contents>"
        b"</ListBucketResult>"
    )
    refusal = b"<DeleteResult><Error><Key>default/01.safetensors</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    scripted.script = lambda request: answer(200, listing if request.method == "GET" else refusal)
    with pytest.raises(TierUnavailableError, match=r"could not clear default/.*AccessDenied"):
        scripted_tier.clear()


@pytest.mark.parametrize(("held_bytes", "reason"), [(0, SHORT), (99, SHORT), (101, OVERSIZE)])
@pytest.mark.parametrize("chunked", [False, True])
def test_another_length_is_damage_and_the_next_load_works(scripted, scripted_tier, answer, held_bytes, reason, chunked):
    scripted.script = lambda request: answer(200, IMAGE[:held_bytes], chunked=chunked)
    with pytest.raises(ChunkDamagedError, match="the chunk has 100") as caught:
        scripted_tier.load(KEY, view(IMAGE), 100)
    assert caught.value.reason == reason
    scripted.script = lambda request: answer(200, IMAGE[:100], chunked=chunked)
    buffer = view(bytes(100))
    assert scripted_tier.load(KEY, buffer, 100) == 100
    assert buffer == IMAGE[:100]


@pytest.mark.parametrize("held_bytes", [0, 1, 99])
def test_a_body_of_no_told_length_that_ends_early_is_unavailable_and_proves_no_damage(
    scripted, scripted_tier, answer, held_bytes
):
    """Nothing tells a connection that was cut off from one that was ended."""
    scripted.script = lambda request: answer(200, IMAGE[:held_bytes], until_closed=True)
    with pytest.raises(TierUnavailableError, match="short_body") as caught:
        scripted_tier.load(KEY, view(IMAGE), 100)
    assert caught.value.reason == IO_ERROR
    assert scripted_tier.failure_counts() == {"short_body": 1}


@pytest.mark.parametrize("held_bytes", [101, 5000])
def test_a_body_of_no_told_length_that_goes_on_is_damage(scripted, scripted_tier, answer, held_bytes):
    scripted.script = lambda request: answer(200, IMAGE[:held_bytes], until_closed=True)
    with pytest.raises(ChunkDamagedError, match="the chunk has 100") as caught:
        scripted_tier.load(KEY, view(IMAGE), 100)
    assert caught.value.reason == OVERSIZE


def test_a_body_of_no_told_length_that_ends_in_time_is_the_chunk(scripted, scripted_tier, answer):
    scripted.script = lambda request: answer(200, IMAGE[:100], until_closed=True)
    for _ in range(2):
        buffer = view(bytes(100))
        assert scripted_tier.load(KEY, buffer, 100) == 100
        assert buffer == IMAGE[:100]


@pytest.mark.parametrize("sent_bytes", [0, 1, 4096, len(IMAGE) - 1])
def test_a_body_that_breaks_off_is_unavailable_and_proves_no_damage(scripted, scripted_tier, answer, sent_bytes):
    scripted.script = lambda request: answer(200, IMAGE[:sent_bytes], declared_bytes=len(IMAGE))
    with pytest.raises(TierUnavailableError, match="no answer") as caught:
        scripted_tier.load(KEY, view(IMAGE), len(IMAGE))
    assert caught.value.reason == IO_ERROR
    assert caught.value.__cause__ is not None


def test_a_body_larger_than_the_window_arrives_whole(bucket, tier):
    image = IMAGE * 40
    tier.store(KEY, view(image), len(image))
    buffer = view(bytes(len(image) + 10))
    assert tier.load(KEY, buffer, len(image)) == len(image)
    assert buffer == image + bytes(10)


def test_connections_are_kept_between_loads(scripted, scripted_tier, answer):
    scripted.script = lambda request: answer(200, IMAGE)
    for _ in range(5):
        scripted_tier.load(KEY, view(IMAGE), len(IMAGE))
    assert len({request.connection for request in scripted.requests}) == 1


def test_a_connection_that_is_hung_up_is_unavailable(scripted, scripted_tier, answer):
    scripted.script = lambda request: answer(hang_up=True)
    with pytest.raises(TierUnavailableError, match="no answer"):
        scripted_tier.load(KEY, view(IMAGE), len(IMAGE))


def test_attempts_are_bounded(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier(max_attempts=2)
    scripted.script = lambda request: answer.error(503, "SlowDown")
    with pytest.raises(TierUnavailableError, match="the server asks for fewer requests"):
        tier.load(KEY, view(IMAGE), 10)
    assert len(scripted.requests) == 2


def test_secrets_reach_no_repr_no_error_and_no_log(scripted, scripted_tier, answer, caplog):
    said = [repr(scripted_tier)]
    for broken in (answer.error(403, "SignatureDoesNotMatch"), answer(hang_up=True)):
        scripted.script = lambda request, broken=broken: broken
        with pytest.raises(TierUnavailableError) as caught:
            scripted_tier.store(KEY, view(IMAGE), 10)
        said += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
    said.append(caplog.text)
    assert not [text for text in said if "very-secret" in text or "session-secret" in text or "AKIA-TEST" in text]


def test_a_closed_tier_says_so(tier):
    tier.close()
    with pytest.raises(ClosedError, match="'obj' is closed"):
        tier.held_prefix([KEY])


@pytest.mark.parametrize("num_bytes", [0, 11])
def test_an_image_that_the_buffer_has_no_room_for_is_refused(tier, num_bytes):
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}, the buffer has 10"):
        tier.store(KEY, view(bytes(10)), num_bytes)


@given(st.integers(0, 12), st.integers(0, 12))
def test_bisecting_finds_every_prefix(num_keys, num_held):
    class Bisecting(ObjectTier):
        def __init__(self) -> None:
            self._closed = False
            self._base = self._quoted_base = ""

        def _end_s(self) -> float:
            return 0.0

        def _holds(self, object_key: str, end_s: float) -> bool:
            return object_key in held

    tier = Bisecting()
    keys = [bytes([index]) for index in range(num_keys)]
    held = {tier.object_key(key) for key in keys[:num_held]}
    assert tier.held_prefix(keys) == min(num_keys, num_held)
