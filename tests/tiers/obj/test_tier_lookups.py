"""Lookups and listings of the object tier where a server refuses, or one of several is gone."""

from __future__ import annotations

import logging
import socket

import pytest

from kvsluice.tiers.errors import TierUnavailableError

KEY = bytes(range(34))
IMAGE = bytes(range(256)) * 16
LISTING = (
    b"<ListBucketResult><IsTruncated>%s</IsTruncated>%s<Contents><Key>default/%s.safetensors</Key></Contents>"
    b"</ListBucketResult>"
)


@pytest.fixture
def dead_url():
    """Nobody listens there, and nobody will."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_a_refused_head_is_asked_again_as_a_get_which_says_why(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier()
    scripted.script = lambda request: (
        answer(403) if request.method == "HEAD" else answer.error(403, "RequestTimeTooSkewed")
    )
    with pytest.raises(TierUnavailableError, match="RequestTimeTooSkewed"):
        tier.held_prefix([KEY])
    assert tier.failure_counts() == {"403 RequestTimeTooSkewed": 1}
    assert [request.method for request in scripted.requests] == ["HEAD", "GET"]
    assert scripted.requests[1].headers["range"] == "bytes=0-0"


@pytest.mark.parametrize(("status", "held"), [(206, 1), (200, 1), (404, 0)])
def test_where_only_heads_are_refused_a_get_tells_what_is_held(scripted, make_scripted_tier, answer, status, held):
    tier = make_scripted_tier()
    scripted.script = lambda request: answer(403) if request.method == "HEAD" else answer(status, b"x")
    assert tier.held_prefix([KEY]) == held


def test_a_listing_goes_on_page_by_page(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier()

    def serve(request):
        if "continuation-token=next" in request.path:
            return answer(200, LISTING % (b"false", b"", b"02"))
        return answer(200, LISTING % (b"true", b"<NextContinuationToken>next</NextContinuationToken>", b"01"))

    scripted.script = serve
    assert list(tier.scan()) == [b"\x01", b"\x02"]


@pytest.mark.parametrize("dead_first", [True, False])
def test_with_one_of_two_endpoints_dead_the_namespace_is_listed_and_cleared_all_the_same(
    scripted, make_scripted_tier, answer, dead_url, dead_first
):
    urls = [dead_url, scripted.endpoint_url] if dead_first else [scripted.endpoint_url, dead_url]
    tier = make_scripted_tier(endpoint_url=urls)
    scripted.script = lambda request: answer(200, LISTING % (b"false", b"", b"01") if request.method == "GET" else b"")
    for _ in range(4):
        assert list(tier.scan()) == [b"\x01"]
    assert tier.clear() == 1
    assert tier.failure_counts() == {}


def test_an_endpoint_that_dies_later_costs_no_listing(serve, make_tier):
    def handle(peer):
        while head := peer.read_request():
            peer.answer(412 if head.startswith(b"PUT") else 200, LISTING % (b"false", b"", b"01"))

    one, two = serve(handle), serve(handle)
    tier = make_tier(one.url, two.url)
    two.close()
    for _ in range(6):
        assert list(tier.scan()) == [b"\x01"]
    assert tier.failure_counts() == {}


def test_the_first_failure_of_a_kind_is_logged_and_the_others_are_counted(scripted, make_scripted_tier, answer, caplog):
    tier = make_scripted_tier()
    scripted.script = lambda request: answer.error(403, "AccessDenied")
    caplog.clear()
    for _ in range(3):
        with pytest.raises(TierUnavailableError):
            tier.load(KEY, memoryview(bytearray(IMAGE)), len(IMAGE))
    scripted.script = lambda request: answer.error(404, "NoSuchBucket")
    with pytest.raises(TierUnavailableError):
        tier.load(KEY, memoryview(bytearray(IMAGE)), len(IMAGE))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["AccessDenied" in text for text in said] == [True, False]
    assert "NoSuchBucket (the bucket does not exist)" in said[1]
    assert tier.failure_counts() == {"403 AccessDenied": 3, "404 NoSuchBucket": 1}


def test_a_put_that_is_refused_names_what_it_was_sent_with(scripted, make_scripted_tier, answer):
    tier = make_scripted_tier(storage_class="NO_SUCH_CLASS")
    scripted.script = lambda request: answer.error(400, "InvalidArgument")
    with pytest.raises(TierUnavailableError, match=r"x-amz-storage-class.*NO_SUCH_CLASS"):
        tier.store(KEY, memoryview(bytearray(IMAGE)), len(IMAGE))


def test_a_put_whose_answer_has_no_end_is_done_and_not_sent_again(scripted, serve, make_tier):
    def handle(peer):
        while head := peer.read_request():
            if head.startswith(b"PUT") and b"probe-" not in head and b"namespace.json" not in head:
                peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                peer.over.wait(30)
                return
            peer.answer(412 if head.startswith(b"PUT") else 200)

    server = serve(handle)
    tier = make_tier(server.url)
    assert tier.store(KEY, memoryview(bytearray(IMAGE)), len(IMAGE)) == len(IMAGE)
    assert sum(head.startswith(b"PUT /kv-test/default/00") for head in server.heads) == 1
    assert tier.failure_counts() == {}
