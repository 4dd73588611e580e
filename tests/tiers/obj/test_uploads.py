"""A store in parts: all of it or nothing, on its condition, and nothing unfinished is left behind."""

from __future__ import annotations

import logging
import re
import threading
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.parts import PartCrew
from kvsluice.tiers.obj.uploads import Uploads

BODY = bytes(range(256)) * 64
SPANS = [(0, 4096), (4096, 8192), (8192, 12288), (12288, len(BODY))]
NAME = "p/k~1%20.safetensors"
KEY = "p/k~1 .safetensors"
UPLOAD_ID = "2~a+b/c=&amp;d"
"""As gateways make them up, and as it stands in XML."""


class Store:
    """What a server knows of multipart uploads; a test breaks it where it wants to."""

    def __init__(self, answer, *, conditional=True) -> None:
        self.answer = answer
        self.conditional = conditional
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.listed: list[tuple[str, str, datetime]] = []
        self.aborted: list[tuple[str, str]] = []
        self.instead: dict[str, list] = {}
        """By step ("begin", "part 2", "complete", "abort", "held"), answers that come before the real ones."""
        self.lock = threading.Lock()

    def __call__(self, request):
        with self.lock:
            return self.serve(request)

    def serve(self, request):
        parts = urlsplit(request.path)
        key = unquote(parts.path).removeprefix("/kv-test/")
        query = parse_qs(parts.query, keep_blank_values=True)
        upload_id = query.get("uploadId", [""])[0]
        step = {
            ("POST", False): "begin",
            ("POST", True): "complete",
            ("PUT", True): f"part {query.get('partNumber', [''])[0]}",
            ("PUT", False): "put",
            ("DELETE", True): "abort",
            ("DELETE", False): "delete",
            ("HEAD", False): "held",
            ("GET", False): "list",
        }[request.method, bool(upload_id)]
        scheduled = self.instead.get(step)
        if scheduled:
            return scheduled.pop(0)
        return getattr(self, step.split()[0])(request, key, upload_id, query)

    def begin(self, request, key, upload_id, query):
        self.parts["2~a+b/c=&d"] = {}
        return self.answer(200, f"<R><Key>k</Key><UploadId> {UPLOAD_ID}\n</UploadId></R>".encode())

    def part(self, request, key, upload_id, query):
        if upload_id not in self.parts:
            return self.answer.error(404, "NoSuchUpload")
        number = int(query["partNumber"][0])
        self.parts[upload_id][number] = request.body
        return self.answer(200, b"", {"ETag": f'"part&{number}"'})

    def complete(self, request, key, upload_id, query):
        if upload_id not in self.parts:
            return self.answer.error(404, "NoSuchUpload")
        if self.conditional and key in self.objects and request.headers.get("if-none-match") == "*":
            return self.answer.error(412, "PreconditionFailed")
        told = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>([^<]*)</ETag>", request.body.decode())
        assert told == [(str(number), f"&quot;part&amp;{number}&quot;") for number in range(1, len(told) + 1)]
        held = self.parts.pop(upload_id)
        self.objects[key] = b"".join(held[int(number)] for number, _ in told)
        return self.answer(200, b"\n  <CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def abort(self, request, key, upload_id, query):
        self.aborted.append((key, upload_id))
        if self.parts.pop(upload_id, None) is None and upload_id not in [listed[1] for listed in self.listed]:
            return self.answer.error(404, "NoSuchUpload")
        return self.answer(204)

    def put(self, request, key, upload_id, query):
        self.objects[key] = request.body
        return self.answer(200)

    def delete(self, request, key, upload_id, query):
        self.objects.pop(key, None)
        return self.answer(204)

    def held(self, request, key, upload_id, query):
        return self.answer(200 if key in self.objects else 404)

    def list(self, request, key, upload_id, query):
        assert "uploads" in query
        entries = "".join(
            f"<Upload><Key>{key}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{initiated:%Y-%m-%dT%H:%M:%S.000Z}</Initiated></Upload>"
            for key, upload_id, initiated in self.listed
            if key.startswith(query["prefix"][0])
        )
        return self.answer(
            200,
            b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
            + entries.encode()
            + b"</ListMultipartUploadsResult>",
        )


@pytest.fixture
def store(scripted, answer):
    scripted.script = Store(answer)
    return scripted.script


@pytest.fixture
def make_uploads(scripted, make_access, make_requests, wait_until):
    crews = []

    def make(**options):
        access = make_access()
        requests = make_requests(scripted.endpoint_url, access=access, random_s=lambda most_s: 0.0)
        crews.append(PartCrew(4, "test"))
        given = {"name": "obj", "base": "p/", "headers": {"x-amz-storage-class": "COLD"}, **options}
        uploads = Uploads(requests, access, crews[-1], **given)
        uploads.put_now = lambda body=BODY, spans=SPANS: uploads.put(
            NAME, memoryview(body), spans, requests.now_s() + 5
        )
        uploads.ask_now = lambda: uploads.is_conditional(requests.now_s() + 5)
        return uploads

    yield make
    for crew in crews:
        crew.close()
    # What runs aside asks the server, which ends after this.
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("kvsluice-test-part")])


@pytest.fixture
def uploads(store, make_uploads):
    return make_uploads()


def asked(scripted):
    """All but the listing, which is aside."""
    return [request for request in scripted.requests if request.method != "GET"]


def methods(scripted):
    return [request.method for request in scripted.requests]


# One upload


def test_the_parts_make_up_the_object(store, uploads, assert_signed, scripted):
    assert uploads.put_now() is True
    assert store.objects == {KEY: BODY}
    assert methods(scripted) == ["POST", "PUT", "PUT", "PUT", "PUT", "POST"]
    for request in scripted.requests:
        assert_signed(request)


def test_the_condition_stands_at_the_end_and_the_objects_headers_at_the_start(store, uploads, scripted):
    uploads.put_now()
    begin, *parts, complete = scripted.requests
    assert begin.headers["x-amz-storage-class"] == "COLD"
    assert complete.headers["if-none-match"] == "*"
    for request in (*parts, complete):
        assert "x-amz-storage-class" not in request.headers
    for request in (begin, *parts):
        assert "if-none-match" not in request.headers


def test_etags_stand_in_the_parts_order_whichever_ended_first(store, uploads, scripted):
    """The server checks numbers and etags; here the parts end in the reverse order."""
    ended = [threading.Event() for _ in range(5)]
    ended[4].set()

    def serve(request):
        number = parse_qs(urlsplit(request.path).query).get("partNumber")
        if number is None:
            return store(request)
        assert ended[int(number[0])].wait(5)
        answer = store(request)
        ended[int(number[0]) - 1].set()
        return answer

    scripted.script = serve
    assert uploads.put_now() is True
    assert store.objects == {KEY: BODY}


def test_an_object_that_is_held_is_left_and_the_upload_aborted(store, uploads):
    store.objects[KEY] = b"the first one"
    assert uploads.put_now() is False
    assert store.objects == {KEY: b"the first one"}
    assert store.parts == {}


@pytest.mark.parametrize("step", ["begin", "part 1", "part 3", "part 4", "complete"])
@pytest.mark.parametrize("refusal", [(403, "AccessDenied"), (507, "InsufficientStorage")])
def test_a_failure_at_any_step_is_told_and_leaves_nothing(store, uploads, answer, fails, step, refusal):
    status, code = refusal
    store.instead[step] = [answer.error(status, code)]
    with fails(f"{status} {code}"):
        uploads.put_now()
    assert store.objects == {}
    assert store.parts == {}
    assert len(store.aborted) == (step != "begin")


def test_it_fails_only_when_all_parts_have_ended(store, uploads, answer, scripted, fails):
    """Else a slow one would read memory that holds another chunk by then, and after the abort."""
    refused = threading.Event()
    steps = []

    def serve(request):
        number = parse_qs(urlsplit(request.path).query).get("partNumber")
        if number == ["2"]:
            refused.set()
            return answer.error(403, "AccessDenied")
        if number is not None:
            refused.wait(5)
            threading.Event().wait(0.03)
        steps.append(request.method)
        return store(request)

    scripted.script = serve
    with fails("403 AccessDenied"):
        uploads.put_now()
    assert steps == ["POST", "PUT", "PUT", "PUT", "DELETE"]


@pytest.mark.parametrize("step", ["begin", "part 2", "complete"])
def test_what_may_pass_is_tried_again_at_each_step(store, uploads, answer, step):
    store.instead[step] = [answer.error(503, "SlowDown"), answer(hang_up=True)]
    assert uploads.put_now() is True
    assert store.objects == {KEY: BODY}
    assert store.parts == {}


def test_a_lost_answer_of_the_end_is_looked_up(store, uploads, scripted, answer):
    def serve(request):
        found = store(request)
        lost = request.method == "POST" and "uploadId" in request.path and found.status == 200
        return answer(hang_up=True) if lost else found

    scripted.script = serve
    assert uploads.put_now() is True
    assert store.objects == {KEY: BODY}
    assert methods(scripted)[-3:] == ["POST", "POST", "HEAD"]


def test_a_lost_answer_of_the_end_may_be_followed_by_its_condition(store, uploads, scripted, answer, caplog):
    """Where the server looks at the condition first, its own object is what it finds."""

    def serve(request):
        if KEY in store.objects and request.method == "POST":
            return answer.error(412, "PreconditionFailed")
        found = store(request)
        return answer(hang_up=True) if KEY in store.objects and request.method == "POST" else found

    scripted.script = serve
    assert uploads.put_now() is False
    assert store.objects == {KEY: BODY}
    assert caplog.text == ""


def test_an_upload_that_somebody_aborted_put_nothing(store, uploads, answer):
    store.instead["complete"] = [answer.error(404, "NoSuchUpload")]
    with pytest.raises(RequestFailedError) as caught:
        uploads.put_now()
    assert caught.value.failure.status == 404
    assert store.objects == {}


@pytest.mark.parametrize(
    "body",
    [
        b"<Error><Code>InternalError</Code><Message>server words</Message></Error>",
        b"   \n<?xml version='1.0'?>\n<Error>\n <Message>server words</Message><Code> InternalError </Code></Error>",
    ],
)
def test_a_success_that_is_none_is_a_failure(store, uploads, answer, fails, body):
    """S3 begins the answer before it knows its end, so the status says nothing."""
    store.instead["complete"] = [answer(200, body)] * 3
    with fails("200 InternalError") as caught:
        uploads.put_now()
    assert "server words" not in str(caught.value)
    assert store.parts == {}


@pytest.mark.parametrize("body", [b"", b"<UploadId></UploadId>", b"<UploadId>" + b"x" * 2000 + b"</UploadId>", b"\xff"])
def test_a_start_without_an_id_is_a_failure(store, uploads, answer, fails, body):
    store.instead["begin"] = [answer(200, body)]
    with fails("protocol"):
        uploads.put_now()


def test_a_part_without_an_etag_is_a_failure_and_the_upload_aborted(store, uploads, answer, fails):
    store.instead["part 2"] = [answer(200)] * 3
    with fails("protocol"):
        uploads.put_now()
    assert store.parts == {}


def test_an_abort_that_fails_is_logged_and_hides_nothing(store, uploads, answer, fails, caplog):
    store.instead["part 2"] = [answer.error(403, "AccessDenied")]
    store.instead["abort"] = [answer.error(405, "MethodNotAllowed")]
    with fails("403 AccessDenied"):
        uploads.put_now()
    assert "could not be aborted: status 405" in caplog.text
    assert "server words" not in caplog.text


def test_an_upload_that_could_not_be_aborted_is_aborted_with_the_next_one(store, uploads, answer, fails):
    store.instead["part 2"] = [answer.error(403, "AccessDenied")]
    store.instead["abort"] = [answer.error(405, "MethodNotAllowed")]
    with fails("403 AccessDenied"):
        uploads.put_now()
    assert len(store.parts) == 1
    store.instead.clear()
    assert uploads.put_now() is True
    assert store.parts == {}


# The condition


@pytest.mark.parametrize("conditional", [True, False])
def test_whether_the_server_keeps_the_condition_is_tried_once_and_nothing_is_left(
    store, uploads, scripted, conditional
):
    store.conditional = conditional
    assert uploads.ask_now() is conditional
    count = len(asked(scripted))
    assert uploads.ask_now() is conditional
    assert len(asked(scripted)) == count
    assert store.objects == {}
    assert store.parts == {}
    assert all(request.path.startswith("/kv-test/p/probe-") for request in asked(scripted))
    assert not uploads.are_refused


def test_while_one_finds_out_others_do_not_wait(store, uploads, scripted):
    asked, go_on = threading.Event(), threading.Event()

    def serve(request):
        asked.set()
        assert go_on.wait(5)
        return store(request)

    scripted.script = serve
    found = []
    first = threading.Thread(target=lambda: found.append(uploads.ask_now()))
    first.start()
    assert asked.wait(5)
    assert uploads.ask_now() is None
    go_on.set()
    first.join(5)
    assert found == [True]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (409, "OperationAborted"),
        (507, "XMinioStorageFull"),
        (403, "QuotaExceeded"),
        (400, "ExpiredToken"),
        (403, "InvalidAccessKeyId"),
    ],
)
def test_a_try_that_fails_for_now_is_tried_again_in_a_while(store, uploads, answer, fails, monkeypatch, status, code):
    """Space can be made, and keys be rotated."""
    store.instead["begin"] = [answer.error(status, code)] * 3
    with fails(f"{status} {code}"):
        uploads.ask_now()
    assert store.objects == {}
    store.instead.clear()
    assert uploads.ask_now() is None, "every second large store would pay for it"
    monkeypatch.setattr(uploads, "_try_again_s", 0.0)
    assert uploads.ask_now() is True
    assert not uploads.are_refused


def test_a_try_that_nobody_answers_is_tried_again_in_a_while(store, uploads, answer, fails, monkeypatch):
    store.instead["begin"] = [answer(hang_up=True)] * 9
    with fails("reset"):
        uploads.ask_now()
    store.instead.clear()
    assert uploads.ask_now() is None
    monkeypatch.setattr(uploads, "_try_again_s", 0.0)
    assert uploads.ask_now() is True


@pytest.mark.parametrize("step", ["put", "begin", "part 1", "complete"])
@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (405, "MethodNotAllowed")]
)
def test_a_try_that_is_refused_is_remembered_and_said_once(
    store, uploads, answer, scripted, caplog, step, status, code
):
    store.instead[step] = [answer.error(status, code)] * 9
    assert uploads.ask_now() is False
    count = len(scripted.requests)
    for _ in range(3):
        assert uploads.ask_now() is False
    assert uploads.are_refused
    assert len(scripted.requests) == count
    assert store.objects == {}
    assert store.parts == {}
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.getMessage().startswith(
        f"obj: chunks are stored whole: an upload is refused: status {status}, code {code}"
    )


# What was cut off


def test_uploads_of_long_ago_are_aborted_and_younger_ones_left(store, uploads):
    now = datetime.now(timezone.utc)
    store.listed = [
        ("p/old +1", "id/1+x", now - timedelta(minutes=61)),
        ("p/new", "id2", now - timedelta(minutes=59)),
        ("p/newest", "id3", now + timedelta(minutes=5)),
        ("other/old", "id4", now - timedelta(days=9)),
    ]
    assert uploads.abort_orphans() == 1
    assert store.aborted == [("p/old +1", "id/1+x")]


def test_a_first_question_for_the_condition_tidies_up_aside(store, uploads, scripted, wait_until):
    """The store that asks waits for no listing, which may take long."""
    answered = threading.Event()

    def serve(request):
        if request.method == "GET":
            answered.wait(5)
        return store(request)

    scripted.script = serve
    store.listed = [("p/old", "id1", datetime.now(timezone.utc) - timedelta(hours=2))]
    assert uploads.ask_now() is True
    assert ("p/old", "id1") not in store.aborted
    answered.set()
    wait_until(lambda: ("p/old", "id1") in store.aborted)
    assert uploads.ask_now() is True
    assert methods(scripted).count("GET") == 1


def test_where_uploads_are_refused_none_is_looked_for(store, uploads, answer, scripted, wait_until):
    store.instead["begin"] = [answer.error(403, "AccessDenied")]
    assert uploads.ask_now() is False
    assert methods(scripted) == ["PUT", "POST", "DELETE"]


def test_a_listing_that_is_refused_is_logged_and_no_failure(store, uploads, answer, caplog):
    store.instead["list"] = [answer.error(403, "AccessDenied")] * 3
    assert uploads.abort_orphans() == 0
    assert "could not be listed: status 403, code AccessDenied" in caplog.text
    assert "server words" not in caplog.text
