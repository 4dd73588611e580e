"""A load in ranges: all of one object, or an error that says which kind; never a write after the end."""

from __future__ import annotations

import re
import threading

import pytest

from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.parts import PartCrew, cut
from kvsluice.tiers.obj.ranges import NoRangesError, OtherLengthError, get_in_ranges

OBJECT = bytes(range(256)) * 64
OBJECT_BYTES = len(OBJECT)
SPANS = [(0, 4096), (4096, 8192), (8192, 12288), (12288, 16384)]


def span_of(head):
    start, last = re.search(rb"range: bytes=(\d+)-(\d+)", head).groups()
    return int(start), int(last) + 1


def answer_range(peer, span, held=OBJECT, etag=b'"e"', **instead):
    """As S3 answers; what is given `instead` takes the place of a header."""
    start, end = span
    if start >= len(held):
        peer.answer(416, b"<Code>InvalidRange</Code>")
        return
    body = instead.get("body", held[start:end])
    content_range = instead.get("content_range", b"bytes %d-%d/%d" % (start, min(end, len(held)) - 1, len(held)))
    headers = [b"Content-Range: " + content_range] if content_range is not None else []
    peer.answer(206, body, *headers, *([b"ETag: " + etag] if etag is not None else []))


def answers(respond):
    """What a server does with a connection: `respond(peer, span)` for each request for a range."""

    def handle(peer):
        while head := peer.read_head():
            respond(peer, span_of(head))

    return handle


@pytest.fixture
def crew():
    crew = PartCrew(8, "test")
    yield crew
    crew.close()


@pytest.fixture
def load(serve, make_requests, crew):
    """Loads the object from a server that responds so; the buffer, which a failure leaves in `load.buffer`."""

    def load(respond, spans=SPANS, *, num_bytes=OBJECT_BYTES, max_attempts=1):
        load.server = serve(answers(respond))
        requests = make_requests(load.server.url, max_attempts=max_attempts)
        load.buffer = bytearray(num_bytes)
        view = memoryview(load.buffer)
        get_in_ranges(requests, crew, "key", view, spans, requests.now_s() + 5)
        return load.buffer

    return load


def test_the_ranges_make_up_the_object(load):
    assert load(answer_range) == OBJECT
    assert sorted(span_of(head) for head in load.server.heads) == SPANS


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, 10_000, 16_384])
def test_any_length_is_put_together(load, num_bytes):
    spans = cut(num_bytes, 1000, 8)
    respond = lambda peer, span: answer_range(peer, span, OBJECT[:num_bytes])  # noqa: E731
    assert load(respond, spans, num_bytes=num_bytes) == OBJECT[:num_bytes]


def test_ranges_are_asked_for_side_by_side(load):
    all_there = threading.Barrier(len(SPANS))

    def respond(peer, span):
        all_there.wait(5)
        answer_range(peer, span)

    assert load(respond) == OBJECT


@pytest.mark.parametrize("failing", SPANS)
def test_a_range_that_fails_ends_the_load_only_when_all_others_have_ended(load, failing):
    """Else a slow one would write to memory that is somebody else's by then."""
    refused = threading.Event()
    ended = []

    def respond(peer, span):
        if span == failing:
            peer.answer(403, b"<Code>AccessDenied</Code>")
            refused.set()
            return
        refused.wait(5)
        # Slow: until well after the failure.
        peer.over.wait(0.03)
        ended.append(span)
        answer_range(peer, span)

    with pytest.raises(RequestFailedError, match="AccessDenied"):
        load(respond)
    assert sorted(ended) == [span for span in SPANS if span != failing]
    for start, end in ended:
        assert load.buffer[start:end] == OBJECT[start:end]


def test_a_range_that_breaks_off_is_asked_for_again_alone(load):
    broken = threading.Event()

    def respond(peer, span):
        if span == SPANS[2] and not broken.is_set():
            broken.set()
            peer.send(b"HTTP/1.1 206 OK\r\nContent-Range: bytes 8192-12287/16384\r\nContent-Length: 4096\r\n\r\nXXXX")
            peer.sock.shutdown(2)
            return
        answer_range(peer, span)

    assert load(respond, max_attempts=2) == OBJECT
    assert sorted(span_of(head) for head in load.server.heads) == sorted([*SPANS, SPANS[2]])


@pytest.mark.parametrize("etags", [(b'"a"', b'"b"'), (b'"a"', None)])
def test_an_object_that_was_replaced_meanwhile_could_not_be_read_and_is_not_damaged(load, fails, etags):
    with fails("replaced") as caught:
        load(lambda peer, span: answer_range(peer, span, etag=etags[span == SPANS[3]]))
    assert not caught.value.failure.blames_endpoint


def test_a_server_without_etags_is_taken_at_its_word(load):
    assert load(lambda peer, span: answer_range(peer, span, etag=None)) == OBJECT


def test_the_whole_object_instead_of_a_range_is_a_server_without_ranges(load):
    with pytest.raises(NoRangesError, match="200"):
        load(lambda peer, span: peer.answer(200, OBJECT))
    assert load.buffer == bytes(len(OBJECT))


@pytest.mark.parametrize("held_bytes", [0, 100, 4096, 10_000, 16_383])
def test_a_shorter_object_is_told_by_a_length_that_is_less(load, held_bytes):
    with pytest.raises(OtherLengthError) as caught:
        load(lambda peer, span: answer_range(peer, span, OBJECT[:held_bytes]))
    assert caught.value.num_bytes <= held_bytes


def test_a_longer_object_is_told_by_its_length(load):
    with pytest.raises(OtherLengthError) as caught:
        load(lambda peer, span: answer_range(peer, span, OBJECT + b"x"))
    assert caught.value.num_bytes == len(OBJECT) + 1


@pytest.mark.parametrize(
    "told",
    [
        None,
        b"",
        b"bytes",
        b"bytes */16384",
        b"bytes 0-4095/*",
        b"bytes 1-4096/16384",
        b"bytes 0-16383/16384",
        b"bytes 4096-4095/16384",
        b"bytes -1-4095/16384",
        b"items 0-4095/16384",
        b"bytes 0-4095/" + b"9" * 5_000,
    ],
)
def test_a_content_range_that_is_not_the_one_asked_for_is_a_server_without_ranges(load, told):
    def respond(peer, span):
        answer_range(peer, span, **({"content_range": told} if span == SPANS[0] else {}))

    with pytest.raises(NoRangesError):
        load(respond)
    assert load.buffer[:4096] == bytes(4096)


@pytest.mark.parametrize("sent", [4095, 4097])
def test_a_range_of_another_length_than_it_says_is_a_server_without_ranges(load, sent):
    with pytest.raises(NoRangesError):
        load(lambda peer, span: answer_range(peer, span, body=bytes(sent)))


def test_ranges_in_pieces_are_put_together(load):
    def respond(peer, span):
        start, end = span
        head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes %d-%d/%d\r\nTransfer-Encoding: chunked\r\n\r\n"
        middle = start + 1000
        peer.send(head % (start, end - 1, len(OBJECT)))
        peer.send(
            b"3e8\r\n", OBJECT[start:middle], b"\r\n%x\r\n" % (end - middle), OBJECT[middle:end], b"\r\n0\r\n\r\n"
        )

    assert load(respond) == OBJECT


def test_a_missing_object_is_missing(load):
    with pytest.raises(RequestFailedError) as caught:
        load(lambda peer, span: peer.answer(404, b"<Code>NoSuchKey</Code>"))
    assert caught.value.failure.is_missing_key


def test_a_closed_crew_leaves_the_ranges_to_the_caller(load, crew):
    crew.close()
    assert load(answer_range) == OBJECT
