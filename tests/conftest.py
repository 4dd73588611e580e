"""What all tests share: small layouts, keys, and connectors that prove on the way out that nothing leaked."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# The stand-ins are modules beside each other, so that tests can import their names.
_SUPPORT = Path(__file__).parent / "support"
if str(_SUPPORT) not in sys.path:
    sys.path.append(str(_SUPPORT))

from bench import Bench, Cache, make_key, sluice_threads  # noqa: E402 - found only from here on


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Makes connectors; on the way out all are intact and closed, and no thread of theirs is left."""
    before = sluice_threads()
    made = Bench(monkeypatch)
    yield made
    made.finish()
    for thread in threading.enumerate():
        if thread.name.startswith("kvsluice-"):
            thread.join(5.0)
    assert sluice_threads() <= before


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's S3 on a free loopback port."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def cache(bench: Bench) -> Cache:
    return bench.cache


@pytest.fixture
def keys() -> list[bytes]:
    return [make_key(number) for number in range(64)]
