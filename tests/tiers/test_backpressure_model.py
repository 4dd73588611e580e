"""The EMA detector beside a plain model of its rules, over drawn histories."""

from __future__ import annotations

import pytest
from gates import FAST, HIGH, LOW, MIDDLE, SLOW, Clock, complete
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.tiers.backpressure import DropStorePolicy, EMABackpressureDetector


class Table:
    """The rules of the table once more, written down as plainly as they are stated."""

    def __init__(self, clock: Clock, alpha: float, warmup: int, half_life_s: float, cooldown_s: float, failures: int):
        self.clock, self.alpha, self.warmup = clock, alpha, warmup
        self.half_life_s, self.cooldown_s, self.failures = half_life_s, cooldown_s, failures
        self.samples: list[float] = []
        self.ema, self.updated_s, self.pressure = 0.0, 0.0, False
        self.good_run = self.bad_run = 0
        self.cooldown_from_s: float | None = None
        self.cooldown_asked = 0

    def switch(self, pressure: bool) -> None:
        if pressure:
            self.good_run, self.cooldown_from_s = 0, None
        elif self.pressure:
            self.cooldown_from_s, self.cooldown_asked = self.clock(), 0
        self.pressure = pressure

    def completed(self, sample: float) -> None:
        self.bad_run = 0
        self.samples.append(sample)
        if len(self.samples) <= self.warmup:
            if len(self.samples) == self.warmup:
                self.ema, self.updated_s = sum(self.samples) / self.warmup, self.clock()
            return
        self.ema, self.updated_s = self.alpha * sample + (1 - self.alpha) * self.ema, self.clock()
        if self.ema > HIGH:
            self.switch(True)
        elif self.ema < LOW:
            self.switch(False)
            self.good_run += 1
        else:
            self.good_run = 0

    def failed(self) -> None:
        self.good_run = 0
        self.bad_run += 1
        if self.bad_run >= self.failures:
            self.ema, self.updated_s = max(self.ema, 4 * HIGH), self.clock()
            self.switch(True)

    def admits(self) -> bool:
        if self.pressure:
            self.ema *= 0.5 ** ((self.clock() - self.updated_s) / self.half_life_s)
            self.updated_s = self.clock()
            if self.ema < LOW:
                self.switch(False)
        if self.pressure:
            return False
        if self.good_run >= 10:
            return True
        if self.cooldown_from_s is not None and self.clock() - self.cooldown_from_s < self.cooldown_s:
            self.cooldown_asked += 1
            return self.cooldown_asked % 2 == 1
        return True


EVENTS = st.one_of(
    st.tuples(st.just("completed"), st.sampled_from([FAST, FAST, MIDDLE, 2 * HIGH, SLOW]), st.integers(1, 12)),
    st.tuples(st.just("failed"), st.just(0.0), st.integers(1, 4)),
    st.tuples(st.just("asked"), st.just(0.0), st.integers(1, 5)),
    st.tuples(st.just("waited"), st.sampled_from([0.1, 0.5, 1.0, 7.0]), st.just(1)),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from([0.15, 0.6, 1.0]), st.sampled_from([0, 1, 10]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_decision_is_the_table_s(events, alpha, warmup):
    clock = Clock()
    table = Table(clock, alpha, warmup, half_life_s=2.0, cooldown_s=1.0, failures=3)
    detector = EMABackpressureDetector(
        HIGH, LOW, alpha, warmup, failure_threshold=3, policy=DropStorePolicy(), clock=clock
    )
    refused = 0
    for kind, value, times in events:
        for _ in range(times):
            if kind == "completed":
                table.completed(value)
                complete(detector, value)
            elif kind == "failed":
                table.failed()
                detector.on_store_failed()
            elif kind == "waited":
                clock.now_s += value
            else:
                admitted = detector.should_store(1)
                assert admitted is table.admits()
                refused += not admitted
                assert detector.is_healthy() is (table.good_run >= 10)
            assert detector.store_latency_ema == pytest.approx(table.ema)
    assert detector.policy.pop_stores_dropped() == (refused, refused)
