"""boto3's own calls: what they fail with, in the words of our own requests, and that no secret comes out with it."""

from __future__ import annotations

import pytest
from botocore import exceptions
from botocore.exceptions import ClientError

from kvsluice.tiers.errors import TierUnavailableError
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.s3_client import boto_errors, failure_of_boto

ENDPOINT = "http://127.0.0.1:9000"


def client_error(status, code):
    return ClientError(
        {"Error": {"Code": code, "Message": "server words"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op"
    )


# What they fail with


def test_a_refusal_of_boto3s_call_is_told_as_any_other():
    failure = failure_of_boto(client_error(503, "SlowDown"))
    assert (failure.label, failure.may_pass, failure.blames_endpoint) == ("503 SlowDown", True, True)
    assert "server words" not in str(failure)


@pytest.mark.parametrize("code", ["server words", "x" * 65, ""])
def test_a_code_that_is_none_is_not_repeated(code):
    failure = failure_of_boto(client_error(500, code))
    assert failure.label == "500 500"


@pytest.mark.parametrize(
    ("error", "kind", "blames"),
    [
        (exceptions.EndpointConnectionError(endpoint_url=ENDPOINT, error="words"), "connect", True),
        (exceptions.ConnectTimeoutError(endpoint_url=ENDPOINT, error="words"), "connect_timeout", True),
        (exceptions.ReadTimeoutError(endpoint_url=ENDPOINT, error="words"), "timeout", True),
        (exceptions.ConnectionClosedError(endpoint_url=ENDPOINT, error="words"), "reset", True),
        (exceptions.SSLError(endpoint_url=ENDPOINT, error="words"), "tls", True),
        (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), "short_body", True),
        (exceptions.CredentialRetrievalError(provider="words", error_msg="words"), "credentials", False),
        (exceptions.ProxyConnectionError(proxy_url="http://u:words@p", error="words"), "ProxyConnectionError", True),
        (ConnectionResetError(104, "words"), "ConnectionResetError", True),
    ],
)
def test_a_call_of_boto3_that_nobody_answered_is_told_by_its_kind_in_our_words(error, kind, blames):
    assert isinstance(error, boto_errors())
    failure = failure_of_boto(error)
    assert failure == ObjectFailure(None, "", kind)
    assert (failure.label, failure.blames_endpoint) == (kind, blames)
    assert str(failure) == f"no answer ({kind})"


# What comes out with it

ACCESS_KEY = "AKIA-HIDDEN"
SECRET_KEY = "very-secret-key"
TOKEN = "session-token-that-nobody-may-see"
LISTING = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>default/01.safetensors</Key></Contents>"
    b"</ListBucketResult>"
)


@pytest.fixture
def tier(make_scripted_tier):
    return make_scripted_tier(
        access_key=ACCESS_KEY, secret_key=SECRET_KEY, session_token=TOKEN, read_timeout_s=0.2, max_attempts=1
    )


def shown(error):
    """All that a report of an error and of what led to it may print."""
    chain, texts = [error], []
    while chain:
        one = chain.pop()
        texts.append(f"{one} {one!r} {one.args!r} {vars(one)!r}")
        chain += [other for other in (one.__cause__, one.__context__) if other is not None]
    return texts


def repeating(answer, request):
    """A refusal that says what it was sent, as some servers do."""
    words = "".join(f"<Said>{value}</Said>" for value in request.headers.values())
    return answer(403, f"<Error><Code>SignatureDoesNotMatch</Code>{words}</Error>".encode(), {"x-said": TOKEN})


BROKEN = {
    "refused": repeating,
    "not now": lambda answer, request: answer.error(503, "SlowDown"),
    "hung up": lambda answer, request: answer(hang_up=True),
    "cut off": lambda answer, request: answer(200, b"<List", declared_bytes=1000),
    "not xml": lambda answer, request: answer(200, TOKEN.encode()),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("step", ["list", "clear"])
def test_what_boto3_was_sent_comes_out_with_no_error_and_no_log(scripted, tier, answer, caplog, broken, step):
    def serve(request):
        if step == "clear" and request.method == "GET":
            return answer(200, LISTING)
        return BROKEN[broken](answer, request)

    scripted.script = serve
    with pytest.raises(TierUnavailableError, match=f"could not {step}") as caught:
        tier.clear() if step == "clear" else list(tier.scan())
    assert isinstance(caught.value.__cause__, RequestFailedError)
    said = [*shown(caught.value), caplog.text]
    assert not [text for text in said if TOKEN in text or SECRET_KEY in text or ACCESS_KEY in text]


def test_boto3s_own_errors_would_tell(scripted, tier, answer):
    """Without this the test above could not fail."""
    for broken in ("hung up", "refused"):
        scripted.script = lambda request, broken=broken: BROKEN[broken](answer, request)
        client = tier._access.client(scripted.endpoint_url)  # noqa: SLF001 - the very client that the tier calls
        with pytest.raises(boto_errors()) as caught:
            client.delete_objects(Bucket="kv-test", Delete={"Objects": [{"Key": "k"}]})
        assert [text for text in shown(caught.value) if TOKEN in text]


def test_a_listing_that_fails_is_counted_by_its_kind_and_its_row_opens_the_breaker(scripted, tier, answer):
    scripted.script = lambda request: answer(hang_up=True)
    for _ in range(3):
        with pytest.raises(TierUnavailableError):
            list(tier.scan())
    assert tier.failure_counts() == {"reset": 2, "breaker_open": 1}


def test_a_listing_that_nobody_reads_to_its_end_says_nothing_of_the_endpoint(scripted, tier, answer):
    scripted.script = lambda request: answer(200, LISTING)
    keys = tier.scan()
    assert next(keys) == b"\x01"
    keys.close()
    assert tier.failure_counts() == {}
    assert list(tier.scan()) == [b"\x01"]
