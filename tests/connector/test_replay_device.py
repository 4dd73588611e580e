"""The modelled device against closed forms, and against the same device computed step by step."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.connector.replay.device import Device, DeviceSpec, SlowTime
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.tiers.errors import ConfigError

RATE = 1000.0


def run(spec: DeviceSpec, jobs: list[tuple[float, int]]) -> list[float]:
    """When each job of `(start_s, num_bytes)` ends."""
    timeline = Timeline()
    device = Device(spec, timeline)
    ends = [math.nan] * len(jobs)

    def ended(at: int) -> None:
        ends[at] = timeline.now_s

    for at, (start_s, num_bytes) in enumerate(jobs):
        timeline.at(start_s, partial(device.submit, num_bytes, partial(ended, at)))
    timeline.run()
    assert device.under_way == 0
    return ends


def test_actions_run_in_order_of_time_and_those_of_one_time_as_they_were_planned():
    timeline = Timeline()
    seen: list[tuple[float, str]] = []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timeline.at(time_s, lambda name=name: seen.append((timeline(), name)))
    timeline.at(1.5, lambda: timeline.at(0.5, lambda: seen.append((timeline(), "late"))))
    timeline.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.5, "late"), (2.0, "c")]


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_equal_operations_that_run_at_once_take_as_many_times_as_long(count):
    assert run(DeviceSpec(RATE), [(1.0, 500)] * count) == pytest.approx([1.0 + count * 0.5] * count)


def test_an_operation_is_slower_only_while_another_runs():
    # The first has the device for 0.5 s, then half of it until its other 500 bytes are through.
    assert run(DeviceSpec(RATE), [(0.0, 1000), (0.5, 1000)]) == pytest.approx([1.5, 2.0])


def test_a_shorter_operation_overtakes():
    assert run(DeviceSpec(RATE), [(0.0, 1000), (0.0, 100)]) == pytest.approx([1.1, 0.2])


def test_fixed_costs_pass_at_once_and_use_no_bandwidth():
    assert run(DeviceSpec(RATE, operation_s=0.25), [(0.0, 500)] * 2) == pytest.approx([1.25] * 2)
    assert run(DeviceSpec(RATE, operation_s=0.25), [(0.0, 0)] * 50) == pytest.approx([0.25] * 50)


def test_past_its_limit_the_device_serves_in_order_of_arrival():
    ends = run(DeviceSpec(RATE, operation_s=0.1, max_running=2), [(0.0, 100)] * 5)
    assert ends == pytest.approx([0.3, 0.3, 0.6, 0.6, 0.8])


def test_one_stream_gets_no_more_than_it_can():
    spec = DeviceSpec(RATE, stream_bytes_per_s=100.0)
    assert run(spec, [(0.0, 100)]) == pytest.approx([1.0])
    assert run(spec, [(0.0, 100)] * 10) == pytest.approx([1.0] * 10)
    assert run(spec, [(0.0, 100)] * 20) == pytest.approx([2.0] * 20)


def test_a_slow_time_slows_by_its_factor_and_only_while_it_lasts():
    spec = DeviceSpec(RATE, slow=(SlowTime(1.0, 2.0, 0.25),))
    # 1000 bytes before, 250 in it, 750 after.
    assert run(spec, [(0.0, 2000), (3.5, 100)]) == pytest.approx([2.75, 3.6])


def test_a_hang_adds_its_length_to_all_that_is_under_way():
    spec = DeviceSpec(RATE, slow=(SlowTime(1.0, 61.0, 0.0),))
    assert run(spec, [(0.0, 2000)]) == pytest.approx([62.0])


def test_in_a_hang_a_question_is_not_answered_either():
    spec = DeviceSpec(RATE, operation_s=0.01, slow=(SlowTime(1.0, 2.0, 0.0),))
    assert run(spec, [(0.5, 0), (1.5, 0)]) == pytest.approx([0.51, 2.0])


def step_by_step(jobs: list[tuple[float, int]], rate: float, stream: float, slow: SlowTime) -> list[float]:
    """The same device, with the bytes that each operation still lacks: O(n) an event."""
    left = {at: float(num_bytes) for at, (_, num_bytes) in enumerate(jobs)}
    ends = [math.nan] * len(jobs)
    moments = sorted({start for start, _ in jobs} | {slow.start_s, slow.end_s})
    now = 0.0
    while left:
        running = [at for at in left if jobs[at][0] <= now]
        factor = slow.factor if slow.start_s <= now < slow.end_s else 1.0
        speed = factor * min(stream, rate / len(running)) if running else 0.0
        following = min((moment for moment in moments if moment > now), default=math.inf)
        first = min((left[at] for at in running), default=math.inf)
        # What lasts no longer than rounding has ended.
        passed = min(following - now, first / speed if speed else math.inf)
        now += passed
        for at in running:
            left[at] -= passed * speed
            if left[at] <= 1e-7 and speed:
                ends[at] = now
                del left[at]
    return ends


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 40).map(lambda tenths: tenths / 8), st.integers(1, 3000)), min_size=1),
    factor=st.sampled_from([0.0, 0.25, 0.5]),
    stream=st.sampled_from([100.0, 700.0, 1e9]),
)
def test_attained_service_gives_what_step_by_step_gives(jobs, factor, stream):
    slow = SlowTime(1.0, 2.5, factor)
    spec = DeviceSpec(RATE, stream_bytes_per_s=stream, slow=(slow,))
    assert run(spec, jobs) == pytest.approx(step_by_step(jobs, RATE, stream, slow), rel=1e-6, abs=1e-6)


def test_a_device_that_is_never_idle_moves_its_whole_rate():
    jobs = [(0.0, 1 + at % 97) for at in range(5000)]
    assert max(run(DeviceSpec(RATE), jobs)) == pytest.approx(sum(size for _, size in jobs) / RATE)


def test_what_a_device_can_do_on_average_counts_its_slow_times():
    spec = DeviceSpec(RATE, slow=(SlowTime(1.0, 2.0, 0.0), SlowTime(3.0, 5.0, 0.5)))
    assert spec.mean_bytes_per_s(1.0) == RATE
    assert spec.mean_bytes_per_s(4.0) == pytest.approx(RATE * 2.5 / 4)
    assert spec.mean_bytes_per_s(10.0) == pytest.approx(RATE * 8 / 10)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DeviceSpec(0.0), "bytes_per_s 0.0"),
        (lambda: DeviceSpec(math.nan), "bytes_per_s nan"),
        (lambda: DeviceSpec(1.0, operation_s=-1.0), "operation_s -1.0"),
        (lambda: DeviceSpec(1.0, max_running=0), "max_running 0"),
        (lambda: DeviceSpec(1.0, stream_bytes_per_s=-2.0), "stream_bytes_per_s -2.0"),
        (lambda: DeviceSpec(1.0, slow=(SlowTime(1, 3, 0), SlowTime(2, 4, 0))), "overlap"),
        (lambda: SlowTime(3.0, 3.0, 0.0), "3.0 s"),
        (lambda: SlowTime(1.0, 3.0, -0.5), "factor -0.5"),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_name_and_value(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
