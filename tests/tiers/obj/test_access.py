"""boto3's part: where a bucket answers, and that signatures are right."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import pytest

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj.access import endpoint_of
from kvsluice.tiers.obj.pool import HttpPool, Timeouts
from kvsluice.tiers.obj.requests import Request, no_body

LARGE_BYTES = 32 << 20
ENDPOINT = "http://127.0.0.1:9000"


def as_received(method, place, tail, headers):
    """What a server sees of a request."""
    return SimpleNamespace(
        method=method, path=place.path + tail, headers={name.lower(): value for name, value in headers.items()}
    )


# Where a bucket answers


@pytest.mark.parametrize(
    ("url", "style", "base", "host", "port"),
    [
        (ENDPOINT, "path", "http://127.0.0.1:9000/kv-test/", "127.0.0.1", 9000),
        (ENDPOINT, "auto", "http://127.0.0.1:9000/kv-test/", "127.0.0.1", 9000),
        ("http://[::1]:9000", "path", "http://[::1]:9000/kv-test/", "::1", 9000),
        ("http://s3.example", "path", "http://s3.example/kv-test/", "s3.example", 80),
        ("http://s3.example:8080", "virtual", "http://kv-test.s3.example:8080/", "kv-test.s3.example", 8080),
        ("https://s3.example", "path", "https://s3.example/kv-test/", "s3.example", 443),
        ("s3.example:8443", "virtual", "https://kv-test.s3.example:8443/", "kv-test.s3.example", 8443),
        ("https://s3.example/below", "path", "https://s3.example/below/kv-test/", "s3.example", 443),
        (None, "auto", "https://kv-test.s3.eu-west-3.amazonaws.com/", "kv-test.s3.eu-west-3.amazonaws.com", 443),
        (None, "virtual", "https://kv-test.s3.eu-west-3.amazonaws.com/", "kv-test.s3.eu-west-3.amazonaws.com", 443),
        (None, "path", "https://s3.eu-west-3.amazonaws.com/kv-test/", "s3.eu-west-3.amazonaws.com", 443),
    ],
)
def test_a_bucket_is_found_where_boto3_finds_it(make_access, url, style, base, host, port):
    place = make_access(addressing_style=style, region="eu-west-3").place(url)
    parts = urlsplit(base)
    assert (place.base, place.path, place.host, place.region) == (base, parts.path, parts.netloc, "eu-west-3")
    assert (place.target.host, place.target.port) == (host, port)
    assert (place.target.tls is not None) is base.startswith("https")
    assert (place.target.proxy, dict(place.proxy_headers)) == (None, {})


@pytest.mark.parametrize("bucket", ["kv.with.dots", "KvUpper"])
def test_a_bucket_that_can_be_no_host_is_in_the_path_at_aws_too(make_access, bucket):
    assert make_access(bucket, region="eu-west-3").place(None).base == f"https://s3.eu-west-3.amazonaws.com/{bucket}/"


def test_without_a_region_there_is_one_to_sign_for(make_access):
    assert make_access().place(ENDPOINT).region == "us-east-1"


def test_an_access_key_with_slashes_does_not_hide_the_region(make_access):
    place = make_access(access_key="a/b/c/d/e", region="eu-west-3").place(ENDPOINT)
    assert place.region == "eu-west-3"


def test_a_bucket_of_another_service_is_refused(make_access):
    with pytest.raises(ConfigError, match="S3 Express"):
        make_access("kv--use1-az4--x-s3", region="us-east-1").place(None)


@pytest.mark.parametrize("bucket", ["a/b", "", "a bucket", "x" * 300])
def test_a_bucket_that_cannot_be_one_is_a_configuration_error(make_access, bucket):
    with pytest.raises(ConfigError, match="boto3 refuses"):
        make_access(bucket).place(ENDPOINT)


@pytest.mark.parametrize(
    ("url", "setting", "signs"),
    [
        ("http://127.0.0.1:9000", "auto", False),
        ("http://127.0.0.1:9000", "on", True),
        ("http://10.0.0.1:9000", "auto", True),
        ("http://10.0.0.1:9000", "off", False),
        ("https://s3.example", "auto", False),
        ("https://s3.example", "on", True),
        (None, "auto", False),
    ],
)
def test_payloads_are_signed_as_told(make_access, url, setting, signs):
    assert make_access(sign_payload=setting, region="us-east-1").place(url).signs_payload is signs


@pytest.mark.parametrize(
    "url",
    [
        "http://me:very-secret@s3.example",
        "http://very-secret@s3.example",
        "http://me:very-secret/x@s3.example",
        "http://me:very-secret?x@s3.example",
        "http://me:#very-secret@s3.example",
        "http://me:?very-secret@s3.example",
        "http://me:very-secret\u2100@s3.example",
        "http://[very-secret@s3.example",
        "ftp://me:very-secret@s3.example",
        "http://s3.example/?key=very-secret",
        "http://s3.example/#very-secret",
    ],
)
def test_a_secret_in_an_endpoint_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="endpoint_url") as caught:
        endpoint_of(url)
    seen = caught.value
    while seen is not None:
        assert "very-secret" not in str(seen)
        seen = None if seen.__suppress_context__ else seen.__cause__ or seen.__context__


# Proxies


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_plain_http_names_the_whole_url_to_the_environments_proxy(make_access, monkeypatch, name):
    monkeypatch.setenv(name, "http://user:hidden@proxy.example:3128")
    place = make_access(addressing_style="path").place("http://s3.example")
    assert place.path == "http://s3.example/kv-test/"
    assert (place.target.proxy.hostname, place.target.proxy.port) == ("proxy.example", 3128)
    assert place.proxy_headers == {"Proxy-Authorization": "Basic dXNlcjpoaWRkZW4="}
    assert "hidden" not in repr(place)
    assert "dXNlcjpoaWRkZW4" not in repr(place)


def test_tls_goes_through_a_tunnel_and_keeps_the_proxys_password_from_the_store(make_access, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://user:hidden@proxy.example:3128")
    place = make_access(addressing_style="path").place("https://s3.example")
    assert place.path == "/kv-test/"
    assert place.proxy_headers == {}
    assert place.target.proxy_headers == {"Proxy-Authorization": "Basic dXNlcjpoaWRkZW4="}


@pytest.mark.parametrize(("no_proxy", "through"), [("127.0.0.1", False), ("*", False), ("other.example", True)])
def test_hosts_that_need_no_proxy_get_none(make_access, monkeypatch, no_proxy, through):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert (make_access().place(ENDPOINT).target.proxy is not None) is through


@pytest.mark.parametrize("proxy", ["https://u:hidden@proxy.example", "socks5://u:hidden@proxy.example"])
def test_a_proxy_of_another_kind_is_refused_without_its_password(make_access, monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ConfigError, match="proxy") as caught:
        make_access().place(ENDPOINT)
    assert "hidden" not in str(caught.value)


def test_a_proxy_of_an_impossible_port_is_refused_without_its_password(make_access, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://u:hidden@proxy.example:99999")
    with pytest.raises(ConfigError, match="proxy") as caught:
        make_access().place(ENDPOINT)
    assert "hidden" not in str(caught.value)


def test_requests_go_through_the_proxy_and_are_signed_for_the_store(
    scripted, make_access, make_requests, monkeypatch, assert_signed
):
    """The scripted server is the proxy here."""
    monkeypatch.setenv("http_proxy", scripted.endpoint_url.replace("//", "//user:pw@"))
    access = make_access(addressing_style="path")
    requests = make_requests("http://s3.example:80", access=access)
    endpoint = requests.endpoints.all[0]
    place = access.place("http://s3.example")
    endpoint.place, endpoint.pool = place, HttpPool(place.target, Timeouts(5, 5), 1)
    requests.send(Request("PUT", "k", "", {}, memoryview(b"abc")), requests.now_s() + 5, no_body)
    (request,) = scripted.requests
    assert request.path == "http://s3.example/kv-test/k"
    assert (request.headers["host"], request.headers["proxy-authorization"]) == ("s3.example", "Basic dXNlcjpwdw==")
    request.headers.pop("proxy-authorization")
    assert_signed(SimpleNamespace(method=request.method, path="/kv-test/k", headers=request.headers))


# TLS


def test_the_bundle_given_is_what_is_trusted(serve, server_tls, make_access, ca_file, fails):
    server = serve(lambda peer: peer.serve((200, b"")), server_tls)
    trusted = make_access(ca_bundle=str(ca_file)).place(server.url)
    pool = HttpPool(trusted.target, Timeouts(5, 5), 0)
    pool.give(pool.take(time.monotonic() + 5))
    with fails("tls"):
        HttpPool(make_access().place(server.url).target, Timeouts(5, 5), 0).take(time.monotonic() + 5)


def test_the_environments_bundle_is_trusted_where_none_is_given(serve, server_tls, make_access, ca_file, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
    server = serve(lambda peer: peer.serve((200, b"")), server_tls)
    pool = HttpPool(make_access().place(server.url).target, Timeouts(5, 5), 0)
    pool.give(pool.take(time.monotonic() + 5))


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_bundle_that_is_none_is_a_configuration_error(make_access, tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ca_bundle '.*ca\.pem' cannot be used"):
        make_access(ca_bundle=str(path)).place("https://s3.example")


# Signatures

NAMES = [
    "p/ns/00ff.safetensors",
    "with space/+plus",
    "~tilde/-._",
    "per%cent/and%20more",
    "ünï/коä/文",
    "a&b=c?d#e;f,g:h@i!j$k'l(m)n*o",
    "..//./x",
]


@pytest.mark.parametrize("style", ["path", "virtual"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_quoted_and_signed_as_boto3_does(make_access, assert_signed, style, name):
    access = make_access(addressing_style=style, region="eu-west-3", session_token="a+token/=")
    url = "http://s3.example:8080"
    place = access.place(url)
    tail = quote(name, safe="/~")
    presigned = access.client(url).generate_presigned_url("get_object", {"Bucket": "kv-test", "Key": name}, 60)
    assert urlsplit(presigned)._replace(query="").geturl() == place.base + tail
    headers = access.sign(place, "PUT", tail, {"if-none-match": "*", "x-amz-storage-class": "C"}, memoryview(b"abc"))
    received = as_received("PUT", place, tail, headers)
    assert_signed(received)
    assert (received.headers["content-length"], received.headers["if-none-match"]) == ("3", "*")
    assert received.headers["x-amz-storage-class"] == "C"
    with pytest.raises(AssertionError):
        assert_signed(received, "another secret")


def test_the_yardstick_of_these_tests_agrees_with_botocores_own_requests(make_access, assert_signed):
    """What botocore itself would send, held against the same reckoning."""
    access = make_access(addressing_style="path", session_token="token", region="eu-west-3")
    client = access.client("http://s3.example:8080")
    sent = []

    def catch(request, **_):
        sent.append(request)
        return SimpleNamespace(status_code=200, headers={}, content=b"", raw=None, text="")

    client.meta.events.register("before-send.s3.PutObject", catch)
    for name in NAMES:
        client.put_object(Bucket="kv-test", Key=name, Body=b"abc", IfNoneMatch="*")
    for name, request in zip(NAMES, sent, strict=True):
        parts = urlsplit(request.url)
        headers = {
            key.lower(): value.decode() if isinstance(value, bytes) else value for key, value in request.headers.items()
        }
        received = SimpleNamespace(method="PUT", path=parts.path, headers={"host": parts.netloc, **headers})
        assert parts.path == f"/kv-test/{quote(name, safe='/~')}"
        assert_signed(received)


@pytest.mark.parametrize("query", ["partNumber=3&uploadId=a%2Fb%2B~", "uploads=", "uploadId=x"])
def test_a_query_is_signed(make_access, assert_signed, query):
    access = make_access()
    place = access.place(ENDPOINT)
    assert_signed(as_received("POST", place, f"k?{query}", access.sign(place, "POST", f"k?{query}", {}, None)))


@pytest.mark.parametrize("body", [None, b"", b"abc", bytes(range(256)) * 1000])
def test_a_signed_payload_is_signed_by_its_digest(make_access, assert_signed, body):
    access = make_access(sign_payload="on")
    place = access.place(ENDPOINT)
    headers = access.sign(place, "PUT", "k", {}, None if body is None else memoryview(body))
    assert headers["X-Amz-Content-SHA256"] == hashlib.sha256(body or b"").hexdigest()
    assert_signed(as_received("PUT", place, "k", headers))


def test_an_unsigned_payload_says_so(make_access, assert_signed):
    access = make_access(sign_payload="off")
    place = access.place("http://10.0.0.1:9000")
    headers = access.sign(place, "PUT", "k", {}, memoryview(b"abc"))
    assert headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
    assert_signed(as_received("PUT", place, "k", headers))


@pytest.mark.parametrize("setting", ["on", "off"])
def test_signing_makes_no_copy_of_the_body(make_access, setting):
    access = make_access(sign_payload=setting)
    place = access.place(ENDPOINT)
    body = memoryview(bytearray(LARGE_BYTES))
    access.sign(place, "PUT", "k", {}, body)
    tracemalloc.start()
    try:
        access.sign(place, "PUT", "k", {}, body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


# The end


def test_closing_closes_the_clients_and_can_be_done_twice(make_access):
    access = make_access()
    closed = []
    client = access.client(ENDPOINT)
    client.close = lambda: closed.append(client)
    access.close()
    access.close()
    assert closed == [client]
