"""The object tier on moto's server, and on one that answers what a test tells it to."""

from __future__ import annotations

import hashlib
import json
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigError,
    TierUnavailableError,
)
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.access import endpoint_of, signs_payload
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
    monkeypatch.setattr("kvsluice.tiers.obj.tier._DELETE_BATCH", 3)
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
    with pytest.raises(TierUnavailableError, match=r"delete 1 objects below default/.*AccessDenied"):
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


def test_a_missing_bucket_is_a_configuration_error_that_names_it(bucket):
    with pytest.raises(ConfigError, match=f"'no-such-bucket' at {bucket.endpoint_url} does not exist"):
        ObjectTier("no-such-bucket", **bucket.credentials)


def test_a_refused_bucket_is_a_configuration_error(scripted, answer):
    scripted.script = lambda request: answer(403)
    with pytest.raises(ConfigError, match=r"'kv-test' at .* may not be used with these credentials: status 403"):
        ObjectTier("kv-test", endpoint_url=scripted.endpoint_url, access_key="a", secret_key="b")


def test_an_endpoint_that_nobody_serves_is_a_configuration_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"'kv-test' at {endpoint} cannot be reached") as caught:
            ObjectTier("kv-test", endpoint_url=endpoint, access_key="a", secret_key="b", max_attempts=1)
    assert caught.value.__cause__ is not None


def test_facts_that_may_not_be_written_are_a_warning(scripted, answer, caplog):
    scripted.script = lambda request: (
        answer.error(403, "AccessDenied")
        if request.method == "PUT"
        else answer(200 if request.path.startswith("/kv-test/?list-type=2") else 404)
    )
    ObjectTier(
        "kv-test", endpoint_url=scripted.endpoint_url, access_key="a", secret_key="b", namespace_facts={"a": 1}
    ).close()
    assert "namespace.json could not be written" in caplog.text


def test_without_boto3_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvsluice\[obj\]'"):
        ObjectTier("kv-test")


def test_secrets_reach_no_repr_no_error_and_no_log(scripted, scripted_tier, answer, caplog):
    said = [repr(scripted_tier)]
    for broken in (answer.error(403, "SignatureDoesNotMatch"), answer(hang_up=True)):
        scripted.script = lambda request, broken=broken: broken
        with pytest.raises(TierUnavailableError) as caught:
            scripted_tier.store(KEY, view(IMAGE), 10)
        said += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
    said.append(caplog.text)
    assert not [text for text in said if "very-secret" in text or "session-secret" in text or "AKIA-TEST" in text]


def test_credentials_in_the_endpoint_are_refused_without_repeating_them():
    with pytest.raises(ConfigError, match="endpoint_url holds credentials") as caught:
        ObjectTier("kv-test", endpoint_url="https://me:very-secret@s3.example")
    assert "very-secret" not in str(caught.value)


def test_one_of_two_keys_is_refused():
    with pytest.raises(ConfigError, match="go together"):
        ObjectTier("kv-test", access_key="a")


@pytest.mark.parametrize("namespace", ["", "../up", "a/b", ".", "x" * 129])
def test_a_namespace_that_is_no_plain_name_is_refused(namespace):
    with pytest.raises(ConfigError, match="namespace"):
        ObjectTier("kv-test", namespace=namespace)


@pytest.mark.parametrize(
    ("endpoint", "signed"),
    [
        (None, False),
        ("s3.example", False),
        ("https://s3.example", False),
        ("http://127.0.0.1:9000", False),
        ("http://[::1]:9000", False),
        ("http://localhost:9000", False),
        ("http://10.0.0.1:9000", True),
        ("http://s3.example", True),
    ],
)
def test_payloads_are_signed_only_over_plain_http_to_another_host(endpoint, signed):
    assert signs_payload(endpoint_of(endpoint)) is signed


def test_an_endpoint_without_a_scheme_is_https():
    parts = endpoint_of("s3.example:8443")
    assert parts is not None
    assert parts.geturl() == "https://s3.example:8443"


@pytest.mark.parametrize("endpoint", ["ftp://s3.example", "https://", "http://host:0", "http://host:port"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="endpoint_url"):
        endpoint_of(endpoint)


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


@pytest.mark.parametrize("urls", [[], ["https://s3.example", "https://s3.example"]])
def test_each_endpoint_is_given_once_and_at_least_one(urls):
    with pytest.raises(ConfigError, match="endpoint_url"):
        ObjectTier("kv-test", endpoint_url=urls, access_key="a", secret_key="b")


def test_a_bucket_in_another_region_is_a_configuration_error_that_names_it(scripted, answer):
    scripted.script = lambda request: answer(301, b"", {"x-amz-bucket-region": "eu-west-3"})
    with pytest.raises(ConfigError, match=r"another region: set region .*eu-west-3"):
        ObjectTier("kv-test", endpoint_url=scripted.endpoint_url, access_key="a", secret_key="b")


# What goes with a PUT

SSE = {"server_side_encryption": "aws:kms", "sse_kms_key_id": "key-1", "storage_class": "STANDARD_IA"}
SSE_HEADERS = {
    "x-amz-server-side-encryption": "aws:kms",
    "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
    "x-amz-storage-class": "STANDARD_IA",
}


def test_encryption_and_storage_class_stand_on_every_put_and_on_nothing_else(
    scripted, make_scripted_tier, answer, assert_signed
):
    tier = make_scripted_tier(**SSE)
    scripted.script = lambda request: answer(200, IMAGE[:10] if request.method == "GET" else b"")
    tier.store(KEY, view(IMAGE), 10)
    tier.load(KEY, view(IMAGE), 10)
    tier.held_prefix([KEY])
    tier.delete(KEY)
    for request in scripted.requests:
        found = {name: request.headers[name] for name in SSE_HEADERS if name in request.headers}
        assert found == (SSE_HEADERS if request.method == "PUT" else {})
        assert_signed(request, "b")


@pytest.mark.parametrize("option", list(SSE))
@pytest.mark.parametrize("value", ["STANDARD\n", "a\r\nb: c", "\u20ac"])
def test_what_no_header_can_carry_is_a_configuration_error(option, value):
    with pytest.raises(ConfigError, match=option):
        ObjectTier("kv-test", endpoint_url="http://127.0.0.1:1", access_key="a", secret_key="b", **{option: value})


def test_a_signed_payload_is_signed_by_its_digest(scripted, make_scripted_tier, assert_signed):
    tier = make_scripted_tier(sign_payload="on")
    tier.store(KEY, view(IMAGE), len(IMAGE))
    (put,) = scripted.requests
    assert put.headers["x-amz-content-sha256"] == hashlib.sha256(IMAGE).hexdigest()
    assert_signed(put, "b")


@pytest.mark.parametrize("prefix", ["team a/+plus", "\u00fcn\u00ef/\u6587", "a&b=c?d#e;f,g:h@i!j$k'l(m)n*o%20"])
def test_a_prefix_of_any_characters_is_one_name_for_our_requests_and_for_boto3(bucket, prefix):
    tier = ObjectTier(bucket.name, prefix=prefix, namespace="ab12", **bucket.credentials)
    assert tier.store(KEY, view(IMAGE), 100) == 100
    assert bucket.keys() == [f"{prefix}/ab12/{KEY.hex()}.safetensors"]
    assert tier.load(KEY, view(IMAGE), 100) == 100
    assert list(tier.scan()) == [KEY]
    assert tier.clear() == 1
    tier.close()


# Parts

PARTS = {"parts": "on", "part_bytes": 5 * MIB, "max_connections": 4}
LARGE = bytes(range(256)) * (10 * MIB // 256)


def test_a_part_below_what_s3_takes_is_a_configuration_error():
    with pytest.raises(ConfigError, match=f"part_bytes is {5 * MIB - 1}"):
        ObjectTier("kv-test", part_bytes=5 * MIB - 1)


def test_a_large_chunk_goes_and_comes_in_parts(bucket):
    tier = ObjectTier(bucket.name, namespace="ab12", storage_class="STANDARD_IA", **PARTS, **bucket.credentials)
    assert tier.store(KEY, view(LARGE), len(LARGE)) == len(LARGE)
    client = bucket.client()
    head = client.head_object(Bucket=bucket.name, Key=tier.object_key(KEY))
    assert head["ETag"].endswith('-2"')
    assert head["StorageClass"] == "STANDARD_IA"
    assert not client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
    client.close()
    buffer = view(bytes(len(LARGE) + 10))
    assert tier.load(KEY, buffer, len(LARGE)) == len(LARGE)
    assert buffer == LARGE + bytes(10)
    assert tier.store(KEY, view(LARGE[::-1]), len(LARGE)) == 0
    assert bucket.read(tier.object_key(KEY)) == LARGE
    with pytest.raises(ChunkDamagedError) as caught:
        tier.load(KEY, view(bytes(len(LARGE) + MIB)), len(LARGE) + MIB)
    assert caught.value.reason == SHORT
    tier.close()


def in_ranges(answer, held, etag=lambda start: '"e"'):
    """Answers GETs of ranges of `held`."""

    def serve(request):
        start, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        headers = {"Content-Range": f"bytes {start}-{last}/{len(held)}", "ETag": etag(start)}
        return answer(206, held[start : last + 1], headers)

    return serve


def test_an_object_that_was_replaced_between_two_ranges_is_unavailable_and_not_damaged(
    scripted, make_scripted_tier, answer
):
    tier = make_scripted_tier(**PARTS)
    scripted.script = in_ranges(answer, LARGE, etag=lambda start: f'"{start}"')
    with pytest.raises(TierUnavailableError, match="replaced") as caught:
        tier.load(KEY, view(LARGE), len(LARGE))
    assert caught.value.reason == IO_ERROR
    assert tier.failure_counts() == {"replaced": 1}


def test_an_object_of_another_length_is_damaged_in_ranges_too(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier(**PARTS)
    scripted.script = in_ranges(answer, LARGE + b"x")
    with pytest.raises(ChunkDamagedError) as caught:
        tier.load(KEY, view(LARGE), len(LARGE))
    assert caught.value.reason == OVERSIZE
    scripted.script = lambda request: answer.error(416, "InvalidRange")
    with pytest.raises(ChunkDamagedError) as caught:
        tier.load(KEY, view(LARGE), len(LARGE))
    assert caught.value.reason == SHORT


def test_a_server_without_ranges_is_found_out_once(scripted, make_scripted_tier, answer, caplog):
    tier = make_scripted_tier(**PARTS)
    scripted.script = lambda request: answer(200, LARGE)
    for _ in range(2):
        buffer = view(bytes(len(LARGE)))
        assert tier.load(KEY, buffer, len(LARGE)) == len(LARGE)
        assert buffer == LARGE
    assert ["range" in request.headers for request in scripted.requests] == [True, True, False, False]
    assert len([record for record in caplog.records if "does not answer to ranges" in record.getMessage()]) == 1


def test_without_a_condition_on_uploads_a_large_chunk_goes_whole(scripted, make_scripted_tier, answer):
    """As on Ceph's gateway, where an upload would replace what another writer put."""
    tier = make_scripted_tier(**{**PARTS, "parts": "auto"})

    def serve(request):
        if request.method == "POST" and "uploads=" in request.path:
            return answer(200, b"<R><UploadId>u</UploadId></R>")
        if request.method == "GET":
            return answer(200, b"<R><IsTruncated>false</IsTruncated></R>")
        return answer(404 if request.method == "HEAD" else 200, b"", {"ETag": '"e"'})

    scripted.script = serve
    for _ in range(3):
        assert tier.store(KEY, view(LARGE), len(LARGE)) == len(LARGE)
    whole = [request for request in scripted.requests if len(request.body) == len(LARGE)]
    assert len(whole) == 3
    assert all(request.headers["if-none-match"] == "*" for request in whole)


def test_an_upload_that_is_refused_is_not_harmful(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier(**PARTS)
    scripted.script = lambda request: answer.error(403, "AccessDenied") if request.method == "POST" else answer()
    assert tier.store(KEY, view(LARGE), len(LARGE)) == len(LARGE)
