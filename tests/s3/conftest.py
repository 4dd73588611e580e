"""A real Ceph RADOS Gateway, and what can be put in front of it. Without one these tests fail; none is skipped."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import botocore.session
import pytest
from engine_traffic import SLOT_BYTES
from fault_proxy import FaultProxy
from obj_calls import IMAGE, KEY, LENGTH, OPERATION_S, READ_S, view
from rgw import HOST, Rgw
from tls_terminator import PrivateCa, TlsTerminator

from kvsluice.connector import KVLayout, OffloadConfig, OffloadConnector
from kvsluice.tiers.obj import ObjectTier

_numbers = count()

Connect = Callable[..., OffloadConnector]
MakeTier = Callable[..., ObjectTier]


@pytest.fixture(scope="session", autouse=True)
def _service_descriptions_are_read_once() -> Iterator[None]:
    """Every tier has a session of boto3 of its own, and each of those reads a megabyte of them: most of its cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.lru_cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session")
def rgw() -> Iterator[Rgw]:
    """For all tests that do not end it."""
    with Rgw() as running:
        # One that is nearly empty can take itself for a full one: something has to stay.
        running.client.put_object(Bucket=running.make_bucket("ballast"), Key="ballast", Body=os.urandom(64 << 20))
        yield running


@pytest.fixture
def own_rgw() -> Iterator[Rgw]:
    """For a test that kills it."""
    with Rgw() as running:
        yield running


@pytest.fixture
def bucket(rgw: Rgw) -> str:
    """A fresh one."""
    return rgw.make_bucket(f"test-{next(_numbers)}")


@pytest.fixture
def proxy(rgw: Rgw) -> Iterator[FaultProxy]:
    """In front of `rgw`, without a fault so far."""
    with FaultProxy(HOST, rgw.port) as running:
        yield running


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> PrivateCa:
    """Signs the certificate of `tls`."""
    return PrivateCa(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def tls(rgw: Rgw, ca: PrivateCa) -> Iterator[TlsTerminator]:
    """In front of `rgw`, with a certificate for loopback."""
    with TlsTerminator(HOST, rgw.port, ca) as running:
        yield running


@pytest.fixture
def make_tier(rgw: Rgw, bucket: str) -> Iterator[MakeTier]:
    """Tiers over one namespace of a fresh bucket, closed at the end; no thread of theirs is left."""
    made: list[ObjectTier] = []
    before = set(threading.enumerate())

    def make(endpoint_url: str | list[str] | None = None, **options: object) -> ObjectTier:
        chosen = {"namespace": "ab12", "prefix": "team-a", "endpoint_url": endpoint_url or rgw.endpoint_url}
        made.append(ObjectTier(bucket, **{**chosen, **rgw.credentials, **options}))
        return made[-1]

    yield make
    for tier in made:
        tier.close()
    assert threads_left(before) == set()


@pytest.fixture
def tier(make_tier: MakeTier, proxy: FaultProxy) -> ObjectTier:
    """Behind the proxy, with `KEY` held and times that a test can wait for; nothing counted so far."""
    tier = make_tier(proxy.endpoint_url, read_timeout_s=READ_S, operation_timeout_s=OPERATION_S)
    tier.store(KEY, view(IMAGE), LENGTH)
    proxy.reset_counts()
    return tier


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connectors over one obj tier each, defaults but for the memory; proven whole and closed at the end."""
    made: list[OffloadConnector] = []
    before = set(threading.enumerate())

    def make(
        rgw: Rgw, bucket: str, layout: KVLayout, tier: Mapping[str, object] | None = None, **options: object
    ) -> OffloadConnector:
        obj = {"type": "obj", "bucket": bucket, "endpoint_url": rgw.endpoint_url, **rgw.credentials, **(tier or {})}
        config = OffloadConfig.from_dict({"staging_bytes": 96 * SLOT_BYTES, "tiers": [obj], **options})
        made.append(OffloadConnector(config, layout))
        return made[-1]

    yield make
    for connector in made:
        connector.check_integrity()
        assert connector.close(timeout_s=20.0) == []
        connector.check_integrity()
        assert connector.stats().pool.pinned == 0
    assert threads_left(before) == set()


def threads_left(before: set[threading.Thread]) -> set[str]:
    """Threads of ours that are not of `before` and do not end; a moment is given to those that are about to."""
    end_s = time.monotonic() + 5.0
    while True:
        new = {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kvsluice-")}
        if not new or time.monotonic() > end_s:
            return new
        time.sleep(0.01)
