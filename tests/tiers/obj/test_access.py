"""boto3's part: where a bucket answers, whose keys sign, that signatures are right, and that no secret shows."""

from __future__ import annotations

import hashlib
import threading
import time
import tracemalloc
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from urllib.parse import parse_qs, quote, urlsplit

import boto3.session
import pytest
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import ClientError, CredentialRetrievalError, EndpointConnectionError

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj.access import AccessOptions, endpoint_of, failure_of_boto
from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.requests import Request, no_body

LARGE_BYTES = 32 << 20
ENDPOINT = "http://127.0.0.1:9000"
NO_KEYS = {"access_key": None, "secret_key": None}


def key_of(headers):
    """The access key that signed."""
    return headers["Authorization"].partition("Credential=")[2].split("/")[0]


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
    from kvsluice.tiers.obj.wire import HttpPool, Timeouts

    endpoint.place, endpoint.pool = place, HttpPool(place.target, Timeouts(5, 5), 1)
    requests.send(Request("PUT", "k", "", {}, memoryview(b"abc")), requests.now_s() + 5, no_body)
    (request,) = scripted.requests
    assert request.path == "http://s3.example/kv-test/k"
    assert (request.headers["host"], request.headers["proxy-authorization"]) == ("s3.example", "Basic dXNlcjpwdw==")
    request.headers.pop("proxy-authorization")
    assert_signed(SimpleNamespace(method=request.method, path="/kv-test/k", headers=request.headers))


# TLS


def test_the_bundle_given_is_what_is_trusted(serve, server_tls, make_access, ca_file, fails):
    from kvsluice.tiers.obj.wire import HttpPool, Timeouts

    server = serve(lambda peer: peer.serve((200, b"")), server_tls)
    trusted = make_access(ca_bundle=str(ca_file)).place(server.url)
    pool = HttpPool(trusted.target, Timeouts(5, 5), 0)
    pool.give(pool.take(time.monotonic() + 5))
    with fails("tls"):
        HttpPool(make_access().place(server.url).target, Timeouts(5, 5), 0).take(time.monotonic() + 5)


def test_the_environments_bundle_is_trusted_where_none_is_given(serve, server_tls, make_access, ca_file, monkeypatch):
    from kvsluice.tiers.obj.wire import HttpPool, Timeouts

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


# Whose keys


@pytest.mark.parametrize("given", [{"access_key": "a", "secret_key": None}, {"access_key": None, "secret_key": "b"}])
def test_one_key_of_two_is_refused(make_access, given):
    with pytest.raises(ConfigError, match="go together"):
        make_access(**given)


def test_keys_that_are_given_sign_and_are_never_renewed(make_access):
    access = make_access(session_token="token")
    headers = access.sign(access.place(ENDPOINT), "GET", "k", {}, None)
    assert key_of(headers) == "AKIA-TEST"
    assert headers["X-Amz-Security-Token"] == "token"
    assert access.renew() is False


def test_no_keys_at_all_are_a_configuration_error_that_says_what_to_do(make_access, own_sessions):
    with pytest.raises(ConfigError, match="no credentials for the obj tier: give access_key and secret_key, or set"):
        make_access(**NO_KEYS)


def test_half_of_the_keys_in_the_environment_is_a_configuration_error(make_access, own_sessions, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-ENV")
    with pytest.raises(ConfigError, match="boto3 refuses"):
        make_access(**NO_KEYS)


def test_the_environments_keys_sign(make_access, make_requests, own_sessions, monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "AKIA-ENV"), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "t")):
        monkeypatch.setenv(f"AWS_{name}", value)
    access = make_access(**NO_KEYS)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    headers = access.sign(place, "GET", "k", {}, None)
    assert (key_of(headers), headers["X-Amz-Security-Token"]) == ("AKIA-ENV", "t")


def profile(key):
    return f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\n"


def test_rotated_keys_are_found_once_in_thirty_seconds(make_access, make_requests, own_sessions, clock):
    file = own_sessions / "credentials"
    file.write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place

    def signer():
        return key_of(access.sign(place, "GET", "k", {}, None))

    assert signer() == "ONE"
    file.write_text(profile("TWO"))
    assert signer() == "ONE"
    assert access.renew() is True
    assert signer() == "TWO"
    file.write_text(profile("THREE"))
    clock.now_s += 29.9
    assert access.renew() is False
    assert signer() == "TWO"
    clock.now_s += 0.2
    assert access.renew() is True
    assert signer() == "THREE"


def test_keys_that_are_still_the_same_are_no_new_ones(make_access, own_sessions, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    assert access.renew() is False


def test_keys_that_are_gone_leave_the_old_ones(make_access, make_requests, own_sessions, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    (own_sessions / "credentials").unlink()
    assert access.renew() is False
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    assert key_of(access.sign(place, "GET", "k", {}, None)) == "ONE"


def test_clients_of_the_old_keys_are_not_used_again(make_access, own_sessions, monkeypatch, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    client = access.client(ENDPOINT)
    assert access.client(ENDPOINT) is client
    (own_sessions / "credentials").write_text(profile("TWO"))
    access.renew()
    url = access.client(ENDPOINT).generate_presigned_url("get_object", {"Bucket": "b", "Key": "k"}, 60)
    assert parse_qs(urlsplit(url).query)["X-Amz-Credential"][0].startswith("TWO/")
    client.close()


def test_many_threads_that_are_refused_at_once_look_once(make_access, own_sessions, monkeypatch, clock):
    file = own_sessions / "credentials"
    file.write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    file.write_text(profile("TWO"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(access.renew())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found.count(True) >= 1


class Temporary:
    """Keys that a provider hands out for a time, as a role's are."""

    def __init__(self, monkeypatch) -> None:
        self.handed_out = 0
        self.error: Exception | None = None
        self.valid_s = 3600.0
        self.credentials = RefreshableCredentials.create_from_metadata(self.fetch(), self.fetch, "test")
        session = SimpleNamespace(get_credentials=lambda: self.credentials, region_name=None)
        monkeypatch.setattr(boto3.session, "Session", lambda **_: session)

    def fetch(self) -> dict[str, str]:
        if self.error is not None:
            raise self.error
        self.handed_out += 1
        until = datetime.now(timezone.utc) + timedelta(seconds=self.valid_s)
        number = self.handed_out
        return {
            "access_key": f"KEY{number}",
            "secret_key": f"hidden{number}",
            "token": f"token{number}",
            "expiry_time": until.isoformat(),
        }

    def expire(self) -> None:
        """So that boto3 has to fetch newer ones before it hands out any."""
        self.credentials._expiry_time = datetime.now(timezone.utc) + timedelta(seconds=10)  # noqa: SLF001


@pytest.fixture
def temporary(monkeypatch):
    return Temporary(monkeypatch)


def test_keys_that_expire_are_asked_for_at_each_signature(temporary, make_access, make_requests):
    access = make_access(**NO_KEYS)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    for expected in ("KEY1", "KEY1", "KEY2", "KEY2"):
        if expected == "KEY2" and temporary.handed_out == 1:
            temporary.expire()
        headers = access.sign(place, "GET", "k", {}, None)
        assert (key_of(headers), headers["X-Amz-Security-Token"]) == (expected, expected.replace("KEY", "token"))


@pytest.mark.parametrize(
    "error",
    [
        CredentialRetrievalError(provider="p", error_msg="hidden words"),
        OSError("hidden words"),
        RuntimeError("hidden words"),
        ValueError("hidden words"),
        KeyError("hidden words"),
    ],
)
def test_keys_that_cannot_be_renewed_are_a_failure_of_their_own_without_the_helpers_words(
    temporary, make_access, make_requests, fails, error
):
    access = make_access(**NO_KEYS)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    temporary.error = error
    temporary.expire()
    with fails("credentials") as caught:
        access.sign(place, "GET", "k", {}, None)
    assert "hidden words" not in str(caught.value)
    assert type(error).__name__ in str(caught.value)
    # They cannot be looked at either: those that are refused stay refused.
    assert access.renew() is False


def test_keys_that_are_renewed_and_still_expired_are_a_failure_of_their_own(
    temporary, make_access, make_requests, fails
):
    access = make_access(**NO_KEYS)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    temporary.valid_s = -10
    temporary.expire()
    with fails("credentials"):
        access.sign(place, "GET", "k", {}, None)


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


# Secrets


def test_options_show_no_secret():
    options = AccessOptions(access_key="hidden1", secret_key="hidden2", session_token="hidden3", region="here")
    assert "hidden" not in repr(options)
    assert "here" in repr(options)


@pytest.mark.parametrize("bad", ["hidden\n", "hid\r\nden: x", "hidden\u20ac"])
@pytest.mark.parametrize("which", ["access_key", "secret_key", "session_token"])
def test_a_secret_that_no_header_can_carry_is_not_shown_by_its_refusal(serve, make_access, make_requests, which, bad):
    """As of a file that was read with its line break."""
    server = serve(lambda peer: peer.serve((200, b"")))

    def ask():
        access = make_access(**{"session_token": "t", which: bad})
        make_requests(server.url, access=access).send(Request("GET", "k"), time.monotonic() + 5, no_body)

    if which == "secret_key":
        # It goes into no header: the server will say that the signature is not right.
        ask()
        return
    with pytest.raises((ConfigError, RequestFailedError)) as caught:
        ask()
    seen = caught.value
    while seen is not None:
        assert "hid" not in str(seen)
        seen = None if seen.__suppress_context__ else seen.__cause__ or seen.__context__
    assert server.heads == []


# What boto3's own calls fail with


def client_error(status, code):
    return ClientError(
        {"Error": {"Code": code, "Message": "server words"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op"
    )


def test_a_refusal_of_boto3s_call_is_told_as_any_other():
    failure = failure_of_boto(client_error(503, "SlowDown"))
    assert (failure.label, failure.may_pass, failure.blames_endpoint) == ("503 SlowDown", True, True)
    assert "server words" not in str(failure)


@pytest.mark.parametrize("code", ["server words", "x" * 65, ""])
def test_a_code_that_is_none_is_not_repeated(code):
    failure = failure_of_boto(client_error(500, code))
    assert failure.label == "500 500"


def test_a_call_of_boto3_that_nobody_answered_is_told_by_its_kind():
    failure = failure_of_boto(EndpointConnectionError(endpoint_url=ENDPOINT))
    assert failure.status is None
    assert failure.blames_endpoint


def test_closing_closes_the_clients_and_can_be_done_twice(make_access):
    access = make_access()
    closed = []
    client = access.client(ENDPOINT)
    client.close = lambda: closed.append(client)
    access.close()
    access.close()
    assert closed == [client]
