"""What the object tier is told, and what it refuses to start with."""

from __future__ import annotations

import hashlib
import socket
import sys

import pytest

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.obj.access import endpoint_of, signs_payload

KEY = bytes(range(34))
IMAGE = bytes(range(256)) * 64


def view(image: bytes) -> memoryview:
    return memoryview(bytearray(image))


# Endpoints


def test_an_endpoint_without_a_scheme_is_https():
    parts = endpoint_of("s3.example:8443")
    assert parts is not None
    assert parts.geturl() == "https://s3.example:8443"


@pytest.mark.parametrize("endpoint", ["ftp://s3.example", "https://", "http://host:0", "http://host:port"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="endpoint_url"):
        endpoint_of(endpoint)


@pytest.mark.parametrize("urls", [[], ["https://s3.example", "https://s3.example"]])
def test_each_endpoint_is_given_once_and_at_least_one(urls):
    with pytest.raises(ConfigError, match="endpoint_url"):
        ObjectTier("kv-test", endpoint_url=urls, access_key="a", secret_key="b")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://s3.example", "https://S3.Example/"),
        ("https://s3.example", "s3.example"),
        ("https://s3.example", "https://s3.example:443"),
        ("http://s3.example:80/", "http://s3.example"),
        ("http://s3.example/below", "http://s3.example/below/"),
    ],
)
@pytest.mark.parametrize("style", ["path", "virtual"])
def test_one_endpoint_given_in_two_ways_is_refused(one, other, style):
    """As two it would be asked twice where it has failed once."""
    with pytest.raises(ConfigError, match="endpoint_url names one endpoint in two ways"):
        ObjectTier("kv-test", endpoint_url=[one, other], access_key="a", secret_key="b", addressing_style=style)


@pytest.mark.parametrize("second", ["http://127.0.0.1:2", "http://127.0.0.2:1", "http://127.0.0.1:1/below"])
def test_endpoints_that_differ_in_one_thing_are_two(second):
    with pytest.raises(ConfigError, match="cannot be reached"):
        ObjectTier(
            "kv-test",
            endpoint_url=["http://127.0.0.1:1", second],
            access_key="a",
            secret_key="b",
            max_attempts=1,
            connect_timeout_s=0.2,
        )


def test_credentials_in_the_endpoint_are_refused_without_repeating_them():
    with pytest.raises(ConfigError, match="endpoint_url holds credentials") as caught:
        ObjectTier("kv-test", endpoint_url="https://me:very-secret@s3.example")
    assert "very-secret" not in str(caught.value)


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


# The bucket, and who we are


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


def test_a_bucket_in_another_region_is_a_configuration_error_that_names_it(scripted, answer):
    scripted.script = lambda request: answer(301, b"", {"x-amz-bucket-region": "eu-west-3"})
    with pytest.raises(ConfigError, match=r"another region: set region .*eu-west-3"):
        ObjectTier("kv-test", endpoint_url=scripted.endpoint_url, access_key="a", secret_key="b")


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


def test_one_of_two_keys_is_refused():
    with pytest.raises(ConfigError, match="go together"):
        ObjectTier("kv-test", access_key="a")


@pytest.mark.parametrize("namespace", ["", "../up", "a/b", ".", "x" * 129])
def test_a_namespace_that_is_no_plain_name_is_refused(namespace):
    with pytest.raises(ConfigError, match="namespace"):
        ObjectTier("kv-test", namespace=namespace)


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
