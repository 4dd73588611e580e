"""Whose keys sign: where they are found, how they are renewed, and that none of it shows."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import boto3.session
import pytest
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import CredentialRetrievalError

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj.access import AccessOptions
from kvsluice.tiers.obj.failures import RequestFailedError
from kvsluice.tiers.obj.requests import Request, no_body

ENDPOINT = "http://127.0.0.1:9000"


NO_KEYS = {"access_key": None, "secret_key": None}


def key_of(headers):
    """The access key that signed."""
    return headers["Authorization"].partition("Credential=")[2].split("/")[0]


# Found


@pytest.mark.parametrize("given", [{"access_key": "a", "secret_key": None}, {"access_key": None, "secret_key": "b"}])
def test_one_key_of_two_is_refused(make_access, given):
    with pytest.raises(ConfigError, match="go together"):
        make_access(**given)


def test_keys_that_are_given_sign_and_are_never_renewed(make_access):
    access = make_access(session_token="token")
    headers = access.sign(access.place(ENDPOINT), "GET", "k", {}, None)
    assert key_of(headers) == "AKIA-TEST"
    assert headers["X-Amz-Security-Token"] == "token"
    assert access.renew(access.keys_number) is False


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


# Rotated


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
    assert access.renew(access.keys_number) is True
    assert signer() == "TWO"
    file.write_text(profile("THREE"))
    clock.now_s += 29.9
    assert access.renew(access.keys_number) is False
    assert signer() == "TWO"
    clock.now_s += 0.2
    assert access.renew(access.keys_number) is True
    assert signer() == "THREE"


def test_keys_that_are_still_the_same_are_no_new_ones(make_access, own_sessions, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    assert access.renew(access.keys_number) is False


def test_keys_that_are_gone_leave_the_old_ones(make_access, make_requests, own_sessions, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    (own_sessions / "credentials").unlink()
    assert access.renew(access.keys_number) is False
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    assert key_of(access.sign(place, "GET", "k", {}, None)) == "ONE"


def test_clients_of_the_old_keys_are_not_used_again(make_access, own_sessions, monkeypatch, clock):
    (own_sessions / "credentials").write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    client = access.client(ENDPOINT)
    assert access.client(ENDPOINT) is client
    (own_sessions / "credentials").write_text(profile("TWO"))
    access.renew(access.keys_number)
    url = access.client(ENDPOINT).generate_presigned_url("get_object", {"Bucket": "b", "Key": "k"}, 60)
    assert parse_qs(urlsplit(url).query)["X-Amz-Credential"][0].startswith("TWO/")
    client.close()


def count_looks(monkeypatch, access):
    """What grows each time other keys are looked for."""
    looks, real = [], access._look_for_keys  # noqa: SLF001 - how often is seen nowhere else

    def look():
        looks.append(threading.current_thread())
        return real()

    monkeypatch.setattr(access, "_look_for_keys", look)
    return looks


def test_many_threads_that_are_refused_at_once_look_once_and_all_have_new_keys(
    make_access, own_sessions, monkeypatch, clock
):
    file = own_sessions / "credentials"
    file.write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    looks = count_looks(monkeypatch, access)
    file.write_text(profile("TWO"))
    refused, found = access.keys_number, []
    threads = [threading.Thread(target=lambda: found.append(access.renew(refused))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [True] * 8
    assert len(looks) == 1


def test_who_was_refused_with_keys_of_before_has_new_ones_at_once(make_access, own_sessions, monkeypatch, clock):
    file = own_sessions / "credentials"
    file.write_text(profile("ONE"))
    access = make_access(**NO_KEYS, clock=clock)
    looks = count_looks(monkeypatch, access)
    file.write_text(profile("TWO"))
    before = access.keys_number
    assert access.renew(before) is True
    after = access.keys_number
    assert (access.renew(before), access.renew(after)) == (True, False)
    # Looked for and found the same: those of before are still not these.
    clock.now_s += 31
    assert (access.renew(after), access.renew(before)) == (False, True)
    assert access.keys_number == after
    assert len(looks) == 2


def test_requests_that_are_refused_at_once_after_a_rotation_all_succeed(
    serve, make_access, make_requests, own_sessions
):
    file = own_sessions / "credentials"
    file.write_text(profile("ONE"))
    access = make_access(**NO_KEYS)
    together = threading.Barrier(8)

    def handle(peer):
        while head := peer.read_head():
            if b"Credential=ONE/" in head:
                together.wait(10)
                peer.answer(403, b"<Code>InvalidAccessKeyId</Code>")
            else:
                peer.answer(200)

    server = serve(handle)
    requests = make_requests(server.url, access=access, max_attempts=1)
    file.write_text(profile("TWO"))
    ended = []

    def send():
        requests.send(Request("GET", "k"), requests.now_s() + 20, no_body)
        ended.append(threading.current_thread())

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(ended) == set(threads)
    assert [sum(key in head for head in server.heads) for key in (b"Credential=ONE/", b"Credential=TWO/")] == [8, 8]


# Given for a time


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
    assert type(error).__name__ in str(caught.value)
    chain = [caught.value]
    while chain:
        one = chain.pop()
        assert "hidden words" not in f"{one!r} {vars(one)}"
        chain += [other for other in (one.__cause__, one.__context__) if other is not None]
    # They cannot be looked at either: those that are refused stay refused.
    assert access.renew(access.keys_number) is False


def test_keys_that_are_renewed_and_still_expired_are_a_failure_of_their_own(
    temporary, make_access, make_requests, fails
):
    access = make_access(**NO_KEYS)
    place = make_requests(ENDPOINT, access=access).endpoints.all[0].place
    temporary.valid_s = -10
    temporary.expire()
    with fails("credentials"):
        access.sign(place, "GET", "k", {}, None)


# Hidden


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

    with pytest.raises((ConfigError, RequestFailedError)) as caught:
        ask()
    seen = caught.value
    while seen is not None:
        assert "hid" not in str(seen)
        seen = None if seen.__suppress_context__ else seen.__cause__ or seen.__context__
    assert server.heads == []
