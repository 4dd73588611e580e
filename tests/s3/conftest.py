"""A real Ceph RADOS Gateway, and what can be put in front of it. Without one these tests fail; none is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from fault_proxy import FaultProxy
from rgw import HOST, Rgw
from tls_terminator import PrivateCa, TlsTerminator

_numbers = count()


@pytest.fixture(scope="session")
def rgw() -> Iterator[Rgw]:
    """For all tests that do not end it."""
    with Rgw() as running:
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
