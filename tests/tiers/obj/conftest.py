"""What the object tier's tests share: one session of boto3, tiers on the scripted server."""

from __future__ import annotations

import boto3.session
import pytest

from kvsluice.tiers.obj import ObjectTier

_session = boto3.session.Session()


@pytest.fixture(autouse=True)
def one_session(monkeypatch):
    """A new session parses megabytes of service descriptions: ten times the cost of its client."""
    monkeypatch.setattr(boto3.session, "Session", lambda **_: _session)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_scripted_tier(scripted, answer):
    """Makes tiers on the scripted server, which at their start takes conditions on PUT as S3 does."""
    tiers = []

    def make(**options):
        scripted.script = lambda request: answer(412 if request.method == "PUT" else 200)
        given = {"endpoint_url": scripted.endpoint_url, "access_key": "a", "secret_key": "b", "max_attempts": 1}
        tiers.append(ObjectTier("kv-test", **{**given, **options}))
        scripted.script = lambda request: answer()
        scripted.requests.clear()
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
