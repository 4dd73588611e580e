"""What a lookup costs on a real gateway: few requests where nothing is known, none where the bucket was listed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench import make_key
from engine_traffic import Paged
from fault_proxy import FaultProxy
from rgw import Rgw

from kvsluice.connector import Lookup, OffloadConnector
from kvsluice.tiers.chunk_file import stored_key
from kvsluice.tiers.obj import ObjectTier

pytestmark = pytest.mark.s3

Connect = Callable[..., OffloadConnector]

NUM_KEYS = 10_000
MOST_REQUESTS = 20
COUNTS = [NUM_KEYS, NUM_KEYS - 1, 3217, 1, 0]
"""From the most down, as objects are only taken away in between."""
BUCKET = "lookups"
KEYS = [make_key(number) for number in range(NUM_KEYS)]
NAMES = [stored_key(key, 0, 0) for key in KEYS]


class Held:
    """A bucket with a prefix of the keys, as objects of one byte: a lookup does not look inside."""

    def __init__(self, rgw: Rgw) -> None:
        self._rgw = rgw
        self._count = 0
        rgw.make_bucket(BUCKET)
        # The namespace that a connector over these tensors has.
        self.layout = Paged(num_chunks=2).layout

    def hold(self, count: int, namespace: str) -> None:
        """Have the first so many keys held, and no other."""
        tier = ObjectTier(BUCKET, namespace=namespace, endpoint_url=self._rgw.endpoint_url, **self._rgw.credentials)
        one = memoryview(bytearray(1))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: tier.store(name, one, 1), NAMES[self._count : count]))
        gone = [{"Key": tier.object_key(name)} for name in NAMES[count : self._count]]
        for at in range(0, len(gone), 1000):
            self._rgw.client.delete_objects(Bucket=BUCKET, Delete={"Objects": gone[at : at + 1000], "Quiet": True})
        tier.close()
        self._count = count


@pytest.fixture(scope="module")
def held(rgw: Rgw) -> Iterator[Held]:
    return Held(rgw)


def settled(connector: OffloadConnector, keys: list[bytes]) -> Lookup:
    """The answer, looked up until nobody is being asked any more, as an engine does at its steps."""
    end_s = time.monotonic() + 20.0
    while (found := connector.lookup(keys)).pending:
        assert time.monotonic() < end_s
        connector.poll()
        time.sleep(0.002)
    return found


def test_listed_at_its_start_a_connector_knows_ten_thousand_keys_without_a_question(
    rgw: Rgw, held: Held, proxy: FaultProxy, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    first = connect(rgw, BUCKET, held.layout, {"list_at_start_s": 0})
    held.hold(NUM_KEYS, first.namespace)
    started_s = time.monotonic()
    # A listing may take longer on a machine that has more to do.
    through = {"endpoint_url": proxy.endpoint_url, "list_at_start_s": 20.0}
    connector = connect(rgw, BUCKET, held.layout, through)
    asked_at_start = proxy.count("HEAD")
    while connector.stats().tiers["obj"].known_chunks < NUM_KEYS:
        assert time.monotonic() - started_s < 20.0
        connector.poll()
        time.sleep(0.002)
    listed_s = time.monotonic() - started_s
    assert connector.lookup(KEYS) == Lookup(NUM_KEYS, pending=False)
    assert proxy.count("HEAD") == asked_at_start
    # The start asks for one more, to see whether it may list.
    assert proxy.count("GET") <= 2 + NUM_KEYS // 1000
    with capsys.disabled():
        print(f"\n{NUM_KEYS} keys were known {listed_s:.2f} s after the connector was asked for")


@pytest.mark.parametrize("count", COUNTS)
def test_a_prefix_of_ten_thousand_unknown_keys_costs_twenty_requests_at_most(
    rgw: Rgw, held: Held, proxy: FaultProxy, connect: Connect, count: int
) -> None:
    through = {"endpoint_url": proxy.endpoint_url, "list_at_start_s": 0}
    connector = connect(rgw, BUCKET, held.layout, through, lookup_timeout_s=10.0)
    held.hold(count, connector.namespace)
    tier = ObjectTier(BUCKET, namespace=connector.namespace, endpoint_url=proxy.endpoint_url, **rgw.credentials)
    proxy.reset_counts()
    assert tier.held_prefix(NAMES) == count
    assert proxy.count() <= MOST_REQUESTS
    if 0 < count < NUM_KEYS:
        assert proxy.count() <= 2 + math.ceil(math.log2(NUM_KEYS))
    tier.close()
    proxy.reset_counts()
    assert settled(connector, KEYS) == Lookup(count, pending=False)
    assert proxy.count() <= MOST_REQUESTS
    assert set(proxy.counts()) == {"HEAD"}
    # And now it is known.
    proxy.reset_counts()
    assert connector.lookup(KEYS) == Lookup(count, pending=False)
    assert connector.lookup(KEYS[: count + 1]) == Lookup(count, pending=False)
    assert proxy.count() == 0
