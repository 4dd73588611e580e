"""The gate, rule by rule, on a clock that moves only when told to."""

from __future__ import annotations

import itertools
import math

import pytest
from gates import FAST, HIGH, SLOW, Clock, answers, complete, make
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.tiers.backpressure import (
    BackpressureDetector,
    BackpressurePolicy,
    DropAccountingPolicy,
    DropStorePolicy,
    SupportsSeverity,
    ThrottledDropPolicy,
)
from kvsluice.tiers.errors import ConfigError


class YesNoDetector(BackpressureDetector):
    """Knows pressure and nothing more; writes down what it hears."""

    pressure = False

    def __init__(self, policy: BackpressurePolicy | None = None, **kwargs) -> None:
        super().__init__(policy, **kwargs)
        self.heard: list[tuple[float, int]] = []

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        self.heard.append((elapsed_s, num_bytes))

    def is_under_pressure(self) -> bool:
        return self.pressure

    def reset(self) -> None:
        self.heard.clear()


class DegreeDetector(YesNoDetector):
    """A stranger's detector that says how bad it is."""

    pressure = True
    degree = 0.0

    def severity(self) -> float:
        return self.degree


@pytest.fixture
def clock() -> Clock:
    return Clock()


# The detector's contract.


def test_a_detector_without_severity_drops_everything_by_default_and_one_with_it_throttles(clock):
    assert type(YesNoDetector().policy) is DropStorePolicy
    assert type(DegreeDetector().policy) is ThrottledDropPolicy
    assert type(make(clock).policy) is ThrottledDropPolicy


def test_severity_is_a_protocol_that_can_be_asked_for(clock):
    assert isinstance(make(clock), SupportsSeverity)
    assert isinstance(DegreeDetector(), SupportsSeverity)
    assert not isinstance(YesNoDetector(), SupportsSeverity)


def test_throttling_without_severity_is_refused_at_construction_and_names_both():
    with pytest.raises(ConfigError, match=r"ThrottledDropPolicy .*YesNoDetector has no severity\(\)"):
        YesNoDetector(ThrottledDropPolicy())


def test_a_falsy_policy_is_still_the_policy_that_was_given():
    class EmptyPolicy(DropStorePolicy):
        def __len__(self) -> int:
            return 0

    policy = EmptyPolicy()
    assert YesNoDetector(policy).policy is policy


@pytest.mark.parametrize("name", ["on_store_completed", "is_under_pressure", "reset"])
def test_a_detector_must_define(name):
    assert name in BackpressureDetector.__abstractmethods__
    partial = type("Partial", (YesNoDetector,), {name: getattr(BackpressureDetector, name)})
    with pytest.raises(TypeError, match=name):
        partial()


def test_update_reports_the_time_since_submission(clock):
    detector = YesNoDetector(clock=clock)
    clock.now_s = 5.0
    detector.update(3.5, 7)
    assert detector.heard == [(1.5, 7)]


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_update_without_bytes_does_nothing_at_all(num_bytes):
    def no_clock() -> float:
        raise AssertionError("the clock was read")

    detector = YesNoDetector(clock=no_clock)
    detector.update(0.0, num_bytes)
    assert detector.heard == []


def test_a_refusal_is_reported_to_the_policy_with_its_blocks_and_an_admission_is_not():
    detector = YesNoDetector()
    assert detector.should_store(3)
    detector.pressure = True
    assert not detector.should_store(4)
    assert not detector.should_store(5)
    assert detector.policy.pop_stores_dropped() == (2, 9)


def test_the_plain_detector_has_no_defaults_no_stats_and_ignores_failures():
    detector = YesNoDetector()
    assert detector.on_store_failed() is None
    assert YesNoDetector.default_config("fs", locality="REMOTE") is None
    assert detector.stats == {}


# The policies.


@pytest.mark.parametrize("name", ["should_store", "on_store_skipped", "pop_stores_dropped", "reset"])
def test_a_policy_must_define(name):
    assert name in BackpressurePolicy.__abstractmethods__
    with pytest.raises(TypeError, match="should_store"):
        DropAccountingPolicy()


@pytest.mark.parametrize("policy", [DropStorePolicy(), ThrottledDropPolicy()], ids=lambda p: type(p).__name__)
def test_every_policy_counts_stores_and_blocks_and_popping_or_reset_zeroes_them(policy):
    assert isinstance(policy, DropAccountingPolicy)
    policy.on_store_skipped(3)
    policy.on_store_skipped(4)
    assert policy.pop_stores_dropped() == (2, 7)
    assert policy.pop_stores_dropped() == (0, 0)
    policy.on_store_skipped(5)
    policy.reset()
    assert policy.pop_stores_dropped() == (0, 0)


def test_drop_store_refuses_exactly_while_under_pressure():
    detector = YesNoDetector()
    policy = DropStorePolicy()
    for pressure in (False, True, True, False):
        detector.pressure = pressure
        assert policy.should_store(detector) is not pressure


@pytest.mark.parametrize(
    ("marks", "ramp_factor", "percent"),
    [
        (0.5, 2.0, 0),  # pressure kept by hysteresis, the EMA below the mark
        (1.0, 2.0, 0),
        (1.8, 2.0, 40),
        (2.0, 2.0, 50),
        (2.8, 2.0, 90),
        (3.0, 2.0, 100),
        (9.0, 2.0, 100),
        (2.0, 4.0, 25),
        (2.0, 0.5, 100),
    ],
)
def test_the_drop_rate_ramps_from_the_high_mark(clock, marks, ramp_factor, percent):
    detector = make(clock, low_water_s=0.001, policy=ThrottledDropPolicy(ramp_factor))
    complete(detector, SLOW)
    detector.store_latency_ema = marks * HIGH
    assert answers(detector, 1000).count(False) == pytest.approx(10 * percent, abs=1)


def test_throttling_admits_all_without_pressure_however_severe():
    detector = DegreeDetector()
    detector.pressure, detector.degree = False, 99.0
    assert all(answers(detector, 10))


@pytest.mark.parametrize("high", [0.0, -1.0])
def test_a_high_mark_of_zero_or_less_refuses_all_while_under_pressure(clock, high):
    detector = make(clock, high_water_s=high, low_water_s=high)
    assert all(answers(detector, 3))
    complete(detector, FAST)
    assert not any(answers(detector, 10))


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.0, 1.2), max_size=20), st.integers(1, 400), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_drops_stay_within_one_of_the_rate_over_any_run(rate, before, num_decisions, data):
    detector = DegreeDetector(ThrottledDropPolicy(ramp_factor=1.0))
    for detector.degree in before:
        detector.should_store(1)
    detector.degree = rate
    drops = [not admitted for admitted in answers(detector, num_decisions)]
    start = data.draw(st.integers(0, num_decisions - 1))
    totals = itertools.accumulate(drops[start:])
    assert all(abs(total - rate * count) <= 1 for count, total in enumerate(totals, start=1))


def test_drops_follow_the_rate_over_a_million_decisions():
    detector = DegreeDetector(ThrottledDropPolicy(ramp_factor=1.0))
    detector.degree = 0.1
    policy = detector.policy
    drops = sum(not policy.should_store(detector) for _ in range(1_000_000))
    assert drops == 100_000


def test_reset_forgets_the_share_of_a_drop_that_was_owed():
    detector = DegreeDetector(ThrottledDropPolicy())
    detector.degree = 1.5
    assert answers(detector, 7) == [True, False, False, False, True, False, False]
    detector.policy.reset()
    assert answers(detector, 2) == [True, False]


def test_a_severity_that_is_no_number_drops_nothing():
    detector = DegreeDetector()
    detector.degree = math.nan
    assert all(answers(detector, 3))


@pytest.mark.parametrize("ramp_factor", [0, -1.0, math.nan, "2", True, None])
def test_a_ramp_that_is_none_is_refused_with_its_value(ramp_factor):
    with pytest.raises(ConfigError, match=rf"ramp_factor .*got {ramp_factor!r}"):
        ThrottledDropPolicy(ramp_factor)
