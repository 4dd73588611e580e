"""What a step's prefill is said to have taken is the engine's time for it, and nobody else's."""

from __future__ import annotations

import pytest
from doubles import Clock

from kvsluice.connector.prefill_meter import MAX_STEPS, PrefillMeter


class Steps:
    """An engine's steps, at times that the test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.meter = PrefillMeter(self.clock)

    def made(self, step: int, num_tokens: int, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.meter.made(step, num_tokens)

    def output(self, step: int, after_s: float) -> tuple[int, float] | None:
        self.clock.advance(after_s)
        return self.meter.output(step)


def test_a_step_takes_from_when_it_is_made_until_its_output_is_in():
    steps = Steps()
    steps.made(1, 512)
    assert steps.output(1, 0.25) == (512, pytest.approx(0.25))


def test_what_the_engine_is_idle_before_a_step_is_nobodys_time():
    steps = Steps()
    steps.made(1, 512)
    steps.output(1, 0.25)
    steps.made(2, 256, after_s=60.0)
    assert steps.output(2, 0.125) == (256, pytest.approx(0.125))


def test_a_step_that_is_made_while_another_runs_takes_from_the_others_end():
    steps = Steps()
    steps.made(1, 512)
    steps.made(2, 512, after_s=0.001)
    assert steps.output(1, 0.25) == (512, pytest.approx(0.251))
    steps.made(3, 512, after_s=0.001)
    assert steps.output(2, 0.25) == (512, pytest.approx(0.251))
    assert steps.output(3, 0.25) == (512, pytest.approx(0.25))


def test_a_step_that_only_decodes_is_no_prefill_and_its_time_is_not_the_next_ones():
    steps = Steps()
    steps.made(1, 0)
    steps.made(2, 512)
    assert steps.output(1, 1.0) is None
    assert steps.output(2, 0.25) == (512, pytest.approx(0.25))


def test_after_an_output_that_never_came_the_next_one_says_nothing_and_those_after_it_do():
    steps = Steps()
    steps.made(1, 512)
    steps.made(2, 512)
    assert steps.output(2, 0.5) is None
    steps.made(3, 512)
    assert steps.output(3, 0.25) == (512, pytest.approx(0.25))


def test_an_output_that_comes_twice_or_of_a_step_that_was_never_made_says_nothing():
    steps = Steps()
    steps.made(1, 512)
    steps.output(1, 0.25)
    assert steps.output(1, 0.25) is None
    assert steps.output(7, 0.25) is None


def test_steps_without_any_output_are_forgotten():
    steps = Steps()
    for step in range(10 * MAX_STEPS):
        steps.made(step, 512)
    assert steps.output(10 * MAX_STEPS - 1, 0.25) is None
    steps.made(10 * MAX_STEPS, 512)
    assert steps.output(10 * MAX_STEPS, 0.25) == (512, pytest.approx(0.25))
