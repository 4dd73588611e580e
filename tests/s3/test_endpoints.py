"""Several endpoints of one store: spreading, failing over and coming back; and none left at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from bench import sluice_threads
from fault_proxy import FaultProxy
from faults import StallBody, slow_down
from obj_calls import BUSY_S, IMAGE, KEY, LENGTH, load, served_again, view
from rgw import HOST, Rgw

from kvsluice.tiers.errors import TierUnavailableError
from kvsluice.tiers.obj import ObjectTier

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]

OPERATION_S = 4.0
THREADS = 8


@pytest.fixture
def proxies(rgw: Rgw) -> Iterator[list[FaultProxy]]:
    """Two ways to the same gateway."""
    with FaultProxy(HOST, rgw.port) as one, FaultProxy(HOST, rgw.port) as other:
        yield [one, other]


@pytest.fixture
def tier(make_tier: MakeTier, proxies: list[FaultProxy]) -> ObjectTier:
    """Over both, with `KEY` held; nothing counted so far."""
    tier = make_tier(
        [proxy.endpoint_url for proxy in proxies],
        read_timeout_s=1.0,
        operation_timeout_s=OPERATION_S,
        max_connections=16,
    )
    tier.store(KEY, view(IMAGE), LENGTH)
    for proxy in proxies:
        proxy.reset_counts()
    return tier


class Traffic:
    """Loads, stores and lookups from several threads at once, and what came of them."""

    def __init__(self, tier: ObjectTier) -> None:
        self._tier = tier
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0

    @contextlib.contextmanager
    def running(self, threads: int = THREADS) -> Iterator[None]:
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(self._work, number) for number in range(threads)]
            try:
                yield
            finally:
                self._stop.set()
                for future in futures:
                    future.result()

    def since(self) -> Counter[str]:
        """Outcomes since the last call."""
        with self._lock:
            outcomes, self.outcomes = self.outcomes, Counter()
            return outcomes

    def _work(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            key = f"{number}-{turn}".encode()
            started_s = time.monotonic()
            try:
                assert self._tier.store(key, view(IMAGE), LENGTH) in (0, LENGTH)
                assert load(self._tier, key, LENGTH) == IMAGE
                assert self._tier.held_prefix([key]) == 1
            except TierUnavailableError as error:
                outcome = str(error).rpartition("(")[2]
            else:
                outcome = "done"
            took_s = time.monotonic() - started_s
            with self._lock:
                self.outcomes[outcome] += 1
                self.longest_s = max(self.longest_s, took_s)


def counts(proxies: Sequence[FaultProxy]) -> list[int]:
    return [proxy.count() for proxy in proxies]


def until(happened: Callable[[], bool], within_s: float) -> float:
    """Wait for it; how long that took."""
    started_s = time.monotonic()
    while not happened():
        assert time.monotonic() - started_s < within_s
        time.sleep(0.005)
    return time.monotonic() - started_s


def test_both_get_their_share(tier: ObjectTier, proxies: list[FaultProxy]) -> None:
    traffic = Traffic(tier)
    with traffic.running():
        time.sleep(1.0)
    assert set(traffic.outcomes) == {"done"}
    assert min(counts(proxies)) > 0.35 * sum(counts(proxies))
    assert tier.failure_counts() == {}


def test_one_after_the_other_they_take_turns(tier: ObjectTier, proxies: list[FaultProxy]) -> None:
    for _ in range(20):
        load(tier, KEY, LENGTH)
    assert counts(proxies) == [10, 10]


@pytest.mark.parametrize("trouble", ["refuses", "stalls", "answers 503", "stalls in mid-body"])
def test_with_one_in_trouble_the_other_serves_and_it_is_used_again_when_it_is_back(
    tier: ObjectTier, proxies: list[FaultProxy], trouble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ill = proxies[0]
    traffic = Traffic(tier)
    with traffic.running():
        time.sleep(0.5)
        assert set(traffic.since()) == {"done"}
        match trouble:
            case "refuses":
                ill.refuse()
            case "stalls":
                ill.stall()
            case "stalls in mid-body":
                ill.inject(StallBody(1000), method="GET")
            case _:
                ill.inject(slow_down())
        time.sleep(1.8)
        outcomes = traffic.since()
        ill.reset_counts()
        time.sleep(0.5)
        tried = ill.count("GET" if trouble == "stalls in mid-body" else None)
        ill.clear()
        ill.reset_counts()
        back_s = until(lambda: ill.count("PUT") > 10 and ill.count("GET") > 10, 5.0)
        traffic.since()
        for proxy in proxies:
            proxy.reset_counts()
        time.sleep(0.7)
        again = traffic.since()
        shares = counts(proxies)
    with capsys.disabled():
        print(
            f"\none {trouble}: {dict(outcomes)} meanwhile, the longest three operations {traffic.longest_s:.2f} s; "
            f"{tried} requests to it in half a second of that; used again after {back_s:.2f} s, shares {shares}"
        )
    assert set(outcomes) == {"done"}
    assert outcomes["done"] > 50
    # Three operations, each with its own deadline; those that met the trouble took one silence.
    assert traffic.longest_s < OPERATION_S + BUSY_S
    # A probe says nothing of bodies that stall: there a load finds out, now and then.
    assert tried <= 10
    assert set(again) == {"done"}
    assert min(shares) > 0.3 * sum(shares)
    assert tier.failure_counts() == {}


@pytest.mark.parametrize("trouble", ["refuse", "stall"])
def test_with_all_dead_operations_fail_at_once_and_it_serves_again_soon(
    tier: ObjectTier, proxies: list[FaultProxy], trouble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = Traffic(tier)
    for proxy in proxies:
        _ = proxy.refuse() if trouble == "refuse" else proxy.stall()
    with traffic.running():
        # Some failures in a row at each, reads and writes apart.
        until(lambda: "breaker_open" in str(traffic.outcomes), 10.0)
    outcomes = traffic.since()
    assert outcomes["done"] == 0
    assert traffic.longest_s < OPERATION_S + BUSY_S
    started_s = time.monotonic()
    for _ in range(20):
        with pytest.raises(TierUnavailableError, match="breaker_open"):
            tier.store(b"other", view(IMAGE), LENGTH)
    assert time.monotonic() - started_s < 1.0
    # By then probes have become rare.
    time.sleep(2.0)
    for proxy in proxies:
        proxy.clear()

    back_s = served_again(tier, within_s=4.5)
    with capsys.disabled():
        print(f"\nall {trouble}: {dict(outcomes)}; serves again {back_s:.2f} s after the end of it")
    # And both of them do.
    for proxy in proxies:
        proxy.reset_counts()
    until(lambda: load(tier, KEY, LENGTH) == IMAGE and min(counts(proxies)) > 5, 5.0)


def test_one_that_is_dead_at_the_start_is_borne_and_used_when_it_comes(
    make_tier: MakeTier, proxies: list[FaultProxy], caplog: pytest.LogCaptureFixture
) -> None:
    ill = proxies[0]
    ill.refuse()
    tier = make_tier([proxy.endpoint_url for proxy in proxies], operation_timeout_s=OPERATION_S)
    assert f"{ill.endpoint_url} cannot be reached" in caplog.text
    assert tier.store(KEY, view(IMAGE), LENGTH) == LENGTH
    for _ in range(10):
        assert load(tier, KEY, LENGTH) == IMAGE
    ill.accept()
    until(lambda: load(tier, KEY, LENGTH) == IMAGE and ill.count("GET") > 3, 5.0)
    assert tier.failure_counts() == {}


@pytest.mark.parametrize("number", [1, 2])
def test_closed_while_operations_hang_it_is_closed_soon_and_leaves_no_thread(
    make_tier: MakeTier, proxies: list[FaultProxy], number: int
) -> None:
    tier = make_tier([proxy.endpoint_url for proxy in proxies[:number]], read_timeout_s=30.0, operation_timeout_s=30.0)
    tier.store(KEY, view(IMAGE), LENGTH)
    for proxy in proxies:
        proxy.stall()

    def hang(turn: int) -> None:
        with pytest.raises(TierUnavailableError):
            _ = load(tier, KEY, LENGTH) if turn % 2 else tier.store(bytes([turn]), view(IMAGE), LENGTH)

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(hang, turn) for turn in range(THREADS)]
        assert not wait(futures, 0.5).done
        started_s = time.monotonic()
        tier.close()
        assert time.monotonic() - started_s < 2.5
        assert not wait(futures, 2.5).not_done
        for future in futures:
            future.result()
    assert sluice_threads() == set()
