"""The object tier's large chunks: in parts and ranges where that is allowed, whole where it is not."""

from __future__ import annotations

import pytest

from kvsluice.tiers.errors import ChunkDamagedError, ConfigError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.reasons import IO_ERROR, OVERSIZE, SHORT

KEY = bytes(range(34))
MIB = 1 << 20


PARTS = {"parts": "on", "part_bytes": 5 * MIB, "max_connections": 4}


LARGE = bytes(range(256)) * (10 * MIB // 256)


def view(image: bytes) -> memoryview:
    return memoryview(bytearray(image))


def in_ranges(answer, held, etag=lambda start: '"e"'):
    """Answers GETs of ranges of `held`."""

    def serve(request):
        start, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        headers = {"Content-Range": f"bytes {start}-{last}/{len(held)}", "ETag": etag(start)}
        return answer(206, held[start : last + 1], headers)

    return serve


def test_a_part_below_what_s3_takes_is_a_configuration_error():
    with pytest.raises(ConfigError, match=f"part_bytes is {5 * MIB - 1}"):
        ObjectTier("kv-test", part_bytes=5 * MIB - 1)


def test_a_large_chunk_goes_and_comes_in_parts(bucket, monkeypatch):
    # moto says of every upload that it began in 2010, so that one under way passes for a forgotten one.
    monkeypatch.setattr("kvsluice.tiers.obj.uploads.Uploads.abort_orphans", lambda uploads: 0)
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


@pytest.mark.parametrize(("part_bytes", "num_bytes"), [(5 * MIB, 10 * MIB - 1), (8 * MIB, 16 * MIB - 1)])
def test_below_twice_a_part_all_goes_whole(scripted, make_scripted_tier, answer, part_bytes, num_bytes):
    tier = make_scripted_tier(**{**PARTS, "part_bytes": part_bytes})
    image = bytes(num_bytes)
    scripted.script = lambda request: answer(200, image if request.method == "GET" else b"")
    assert tier.store(KEY, view(image), num_bytes) == num_bytes
    assert tier.load(KEY, view(image), num_bytes) == num_bytes
    put, get = scripted.requests
    assert (put.method, len(put.body)) == ("PUT", num_bytes)
    assert (get.method, get.headers.get("range")) == ("GET", None)


# Ranges of a load


@pytest.mark.parametrize(
    ("connections", "num_mib", "ranges_mib"),
    [(16, 16, [4, 4, 4, 4]), (3, 24, [8, 8, 8]), (2, 16, [8, 8]), (1, 16, []), (16, 20, [4] * 5), (16, 64, [8] * 8)],
)
def test_ranges_may_be_half_as_long_as_a_part(scripted, make_scripted_tier, answer, connections, num_mib, ranges_mib):
    tier = make_scripted_tier(parts="on", max_connections=connections)
    image = bytes(range(256)) * (num_mib * MIB // 256)
    whole = in_ranges(answer, image)
    scripted.script = lambda request: whole(request) if "range" in request.headers else answer(200, image)
    buffer = view(bytes(len(image)))
    assert tier.load(KEY, buffer, len(image)) == len(image)
    assert buffer == image
    asked = sorted(
        tuple(map(int, request.headers["range"].removeprefix("bytes=").split("-")))
        for request in scripted.requests
        if "range" in request.headers
    )
    assert [last + 1 - start for start, last in asked] == [mib * MIB for mib in ranges_mib]


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
    assert ["range" in request.headers for request in scripted.requests] == [True] * 4 + [False] * 2
    assert len([record for record in caplog.records if "does not answer to ranges" in record.getMessage()]) == 1


# Parts of a store


@pytest.mark.parametrize(("num_mib", "parts_mib"), [(16, [8, 8]), (20, [10, 10]), (24, [8, 8, 8])])
def test_parts_of_a_store_are_not_as_fine_as_ranges(scripted, make_scripted_tier, answer, num_mib, parts_mib):
    tier = make_scripted_tier(parts="on")

    def serve(request):
        if request.method == "POST" and "uploads=" in request.path:
            return answer(200, b"<R><UploadId>u</UploadId></R>")
        if request.method == "POST" and "probe-" in request.path:
            return answer.error(412, "PreconditionFailed")
        return answer(404 if request.method == "HEAD" else 200, b"", {"ETag": '"e"'})

    scripted.script = serve
    image = bytes(num_mib * MIB)
    assert tier.store(KEY, view(image), len(image)) == len(image)
    sent = {
        request.path.partition("partNumber=")[2].partition("&")[0]: len(request.body)
        for request in scripted.requests
        if "partNumber" in request.path and "probe-" not in request.path
    }
    assert sent == {str(number): mib * MIB for number, mib in enumerate(parts_mib, start=1)}


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


@pytest.mark.parametrize("parts", ["on", "auto"])
@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented")])
def test_where_an_upload_is_refused_large_chunks_go_whole(
    scripted, make_scripted_tier, answer, caplog, parts, status, code
):
    tier = make_scripted_tier(**{**PARTS, "parts": parts})

    def serve(request):
        if request.method == "POST":
            return answer.error(status, code)
        return answer(404 if request.method == "HEAD" else 200)

    scripted.script = serve
    for _ in range(4):
        assert tier.store(KEY, view(LARGE), len(LARGE)) == len(LARGE)
    assert [len(request.body) for request in scripted.requests if request.headers.get("if-none-match") == "*"] == [
        len(LARGE)
    ] * 4
    assert scripted.count("POST") == 1
    assert tier.failure_counts() == {}
    (record,) = [record for record in caplog.records if "an upload is refused" in record.getMessage()]
    assert record.levelname == "WARNING"
