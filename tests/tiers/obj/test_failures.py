"""What an answer, or none, means: told apart, without the server's words, with a hint where there is one."""

from __future__ import annotations

import http.client
import socket
import ssl

import pytest

from kvsluice.tiers.obj.failures import (
    DEADLINE,
    SHORT_BODY,
    ObjectFailure,
    RequestFailedError,
    failure_of_answer,
    failure_of_error,
)

NOW_EPOCH_S = 1_700_000_000.0
NOW_DATE = "Tue, 14 Nov 2023 22:13:20 GMT"


def answer(status, code=None, headers=None):
    body = b"" if code is None else f"<?xml?><Error><Code>{code}</Code><Message>server words</Message></Error>".encode()
    return failure_of_answer(status, headers or {}, body, NOW_EPOCH_S)


# Answers


@pytest.mark.parametrize(
    ("status", "code", "may_pass", "blames"),
    [
        (301, "PermanentRedirect", False, False),
        (307, "TemporaryRedirect", False, False),
        (400, "AuthorizationHeaderMalformed", False, False),
        (400, "IllegalLocationConstraintException", False, False),
        (400, "ExpiredToken", False, False),
        (400, "RequestTimeout", True, False),
        (401, "Unauthorized", False, False),
        (403, "AccessDenied", False, False),
        (403, "InvalidAccessKeyId", False, False),
        (403, "SignatureDoesNotMatch", False, False),
        (403, "RequestTimeTooSkewed", False, False),
        (403, "QuotaExceeded", False, False),
        (404, "NoSuchKey", False, False),
        (404, "NoSuchBucket", False, False),
        (404, "NoSuchUpload", False, False),
        (405, "MethodNotAllowed", False, False),
        (408, "RequestTimeout", True, True),
        (409, "ConditionalRequestConflict", True, False),
        (409, "OperationAborted", True, False),
        (409, "BucketAlreadyExists", False, False),
        (411, "MissingContentLength", False, False),
        (412, "PreconditionFailed", False, False),
        (416, "InvalidRange", False, False),
        (429, "TooManyRequests", True, True),
        (500, "InternalError", True, True),
        (501, "NotImplemented", False, False),
        (502, "BadGateway", True, True),
        (503, "SlowDown", True, True),
        (503, "ServiceUnavailable", True, True),
        (504, "GatewayTimeout", True, True),
        (507, "InsufficientStorage", False, False),
        (507, "XMinioStorageFull", False, False),
    ],
)
def test_each_answer_is_told_apart(status, code, may_pass, blames):
    failure = answer(status, code)
    assert failure.label == f"{status} {code}"
    assert (failure.may_pass, failure.blames_endpoint) == (may_pass, blames)
    assert str(failure).startswith(f"status {status}, code {code}")


@pytest.mark.parametrize(
    ("status", "code", "what"),
    [
        (404, "NoSuchKey", "is_missing_key"),
        (404, None, "is_missing_key"),
        (404, "NotFound", "is_missing_key"),
        (412, "PreconditionFailed", "is_held_already"),
        (412, None, "is_held_already"),
        (501, None, "is_not_implemented"),
        (501, "NotImplemented", "is_not_implemented"),
        (400, "NotImplemented", "is_not_implemented"),
        (507, None, "is_full"),
        (403, "QuotaExceeded", "is_full"),
        (507, "XMinioStorageFull", "is_full"),
        (503, "InsufficientCapacity", "is_full"),
        (400, "ExpiredToken", "wants_new_credentials"),
        (403, "InvalidAccessKeyId", "wants_new_credentials"),
        (400, "InvalidToken", "wants_new_credentials"),
        (400, "TokenRefreshRequired", "wants_new_credentials"),
        (403, "AccessDenied", None),
        (404, "NoSuchBucket", None),
        (404, "NoSuchUpload", None),
        (409, "ConditionalRequestConflict", None),
        (500, "InternalError", None),
        (503, "SlowDown", None),
    ],
)
def test_what_an_answer_is_for_the_tier(status, code, what):
    failure = answer(status, code)
    kinds = ["is_missing_key", "is_held_already", "is_not_implemented", "is_full", "wants_new_credentials"]
    assert [kind for kind in kinds if getattr(failure, kind)] == ([what] if what else [])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "503"),
        (b"<html><body>502 Bad Gateway</body></html>", "503"),
        (b"<Code></Code>", "503"),
        (b"<Code>" + b"x" * 65 + b"</Code>", "503"),
        (b"<Code>two words</Code>", "503"),
        (b"<Code>a\nb</Code>", "503"),
        (b"<Code>\xff</Code>", "503"),
        (b"<Error>\n <Code>\n SlowDown </Code></Error>", "SlowDown"),
        (b"<Code>First</Code><Code>Second</Code>", "First"),
        (b"\xff\xfe<Code>XMinioStorageFull</Code>", "XMinioStorageFull"),
    ],
)
def test_only_a_plain_code_is_taken_from_a_body(body, code):
    assert failure_of_answer(503, {}, body, NOW_EPOCH_S).code == code


def test_no_word_of_the_server_is_in_what_is_shown():
    failure = answer(403, "AccessDenied", {"x-amz-bucket-region": "server words", "date": "server words"})
    for text in (str(failure), repr(failure), str(RequestFailedError(failure)), failure.label):
        assert "server words" not in text


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("AccessDenied", "these credentials may not do that"),
        ("ExpiredToken", "the session token has expired"),
        ("InvalidAccessKeyId", "the access key is unknown"),
        ("NoSuchBucket", "the bucket does not exist"),
        ("SignatureDoesNotMatch", "the secret key is another one"),
        ("SlowDown", "the server asks for fewer requests"),
    ],
)
def test_a_known_code_comes_with_a_hint(code, hint):
    assert hint in str(answer(400, code))


def test_an_unknown_code_comes_without_one():
    assert str(answer(418, "Teapot")) == "status 418, code Teapot"


@pytest.mark.parametrize(
    ("date", "hint"),
    [
        ("Tue, 14 Nov 2023 22:43:20 GMT", "this machine's clock is 1800 s behind"),
        ("Tue, 14 Nov 2023 21:43:20 GMT", "this machine's clock is 1800 s ahead"),
        (None, "this machine's clock is wrong"),
        ("", "this machine's clock is wrong"),
        ("server words", "this machine's clock is wrong"),
        ("Mon, 01 Jan 99999 00:00:00 GMT", "this machine's clock is wrong"),
        ("Mon, 01 Jan 2024 00:00:00 +999999", "this machine's clock is wrong"),
    ],
)
def test_a_clock_that_is_off_is_measured_by_the_servers_date(date, hint):
    failure = answer(403, "RequestTimeTooSkewed", {} if date is None else {"date": date})
    assert hint in str(failure)


def test_a_date_says_nothing_where_the_clock_is_not_the_matter():
    assert answer(403, "AccessDenied", {"date": "Tue, 14 Nov 2023 22:43:20 GMT"}).skew_s is None


@pytest.mark.parametrize(("status", "told"), [(301, True), (307, True), (400, True), (403, False), (404, False)])
def test_the_buckets_region_is_told_where_it_is_the_matter(status, told):
    failure = answer(status, None, {"x-amz-bucket-region": "eu-central-1"})
    assert (failure.region == "eu-central-1") is told
    assert ("the bucket is in region eu-central-1" in str(failure)) is told


@pytest.mark.parametrize("region", ["", "server words", "a" * 65, "eu\x1b[31m"])
def test_a_region_that_cannot_be_one_is_not_repeated(region):
    failure = answer(301, "PermanentRedirect", {"x-amz-bucket-region": region})
    assert failure.region is None
    assert not region or region not in str(failure)


@pytest.mark.parametrize(
    ("header", "retry_after_s"),
    [(None, 0.0), ("0", 0.0), ("7", 7.0), ("0.5", 0.5), ("-3", 0.0), (NOW_DATE, 0.0), ("", 0.0), ("nan", 0.0)],
)
def test_the_wait_that_the_server_asks_for_is_known_in_seconds(header, retry_after_s):
    assert answer(503, "SlowDown", {} if header is None else {"retry-after": header}).retry_after_s == retry_after_s


# No answer


@pytest.mark.parametrize(
    ("error", "connecting", "kind"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True, "dns"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True, "dns"),
        (ConnectionRefusedError(111, "Connection refused"), True, "connect"),
        (OSError(113, "No route to host"), True, "connect"),
        (OSError(101, "Network is unreachable"), True, "connect"),
        (TimeoutError("timed out"), True, "connect_timeout"),
        (TimeoutError("timed out"), False, "timeout"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), True, "tls"),
        (ssl.SSLError(1, "wrong version number"), True, "tls"),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), True, "reset"),
        (ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed"), False, "reset"),
        (ConnectionResetError(104, "Connection reset by peer"), False, "reset"),
        (ConnectionResetError(104, "Connection reset by peer"), True, "reset"),
        (BrokenPipeError(32, "Broken pipe"), False, "reset"),
        (OSError(9, "Bad file descriptor"), False, "reset"),
        (http.client.RemoteDisconnected("Remote end closed connection without response"), False, "reset"),
        (http.client.IncompleteRead(b"", 10), False, "reset"),
        (http.client.BadStatusLine("SSH-2.0"), False, "protocol"),
        (http.client.LineTooLong("header line"), False, "protocol"),
    ],
)
def test_each_error_is_told_apart(error, connecting, kind):
    failure = failure_of_error(error, connecting=connecting)
    assert (failure.label, failure.status) == (kind, None)
    assert str(failure).startswith(f"no answer ({kind}")


@pytest.mark.parametrize(
    ("kind", "may_pass", "blames"),
    [
        ("dns", True, True),
        ("connect", True, True),
        ("connect_timeout", True, True),
        ("tls", False, True),
        ("reset", True, True),
        ("timeout", True, True),
        (DEADLINE, False, True),
        (SHORT_BODY, True, True),
        ("protocol", True, True),
        ("replaced", True, False),
        ("credentials", False, False),
        ("breaker_open", False, False),
        ("closed", False, False),
    ],
)
def test_which_errors_may_pass_and_which_are_the_endpoints(kind, may_pass, blames):
    failure = ObjectFailure(None, "", kind)
    assert (failure.may_pass, failure.blames_endpoint) == (may_pass, blames)
    assert str(failure) == f"no answer ({kind})"


def test_a_failure_that_is_known_already_stays_what_it_is():
    failure = ObjectFailure(503, "SlowDown", "status")
    assert failure_of_error(RequestFailedError(failure), connecting=True) is failure


def test_what_a_server_sent_instead_of_http_is_not_repeated():
    failure = failure_of_error(http.client.BadStatusLine("server words\x1b[31m"))
    assert "server words" not in str(failure)


def test_bytes_of_a_body_that_broke_off_are_not_repeated():
    failure = failure_of_error(http.client.IncompleteRead(b"a prompt", 10))
    assert "a prompt" not in str(failure)
