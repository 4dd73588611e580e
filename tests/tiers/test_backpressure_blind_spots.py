"""Where plain rules are blind: each test shows first what they do, then what the gate does with all it sees.

A modelled device runs operations side by side at an equal share of its rate each; the gate hears of
them as a planner does, once a step.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from gates import MIB, Clock

from kvsluice.tiers.backpressure import PLAIN, EMABackpressureDetector, Gate, Signals, Traffic, build_gate

STEP_S = 0.02
ALL = Signals()


def gate_for(clock: Clock, signals: Signals, tier_type: str = "fs") -> Gate:
    given = {name: getattr(signals, name) for name in Signals.__dataclass_fields__}
    gate = build_gate({"signals": given}, tier_type=tier_type, clock=clock)
    assert gate is not None
    return gate


class Tier:
    """Stores that run in batches side by side, and a gate that is told of them."""

    def __init__(self, signals: Signals, tier_type: str = "fs", *, chunk_bytes: int = 4 * MIB) -> None:
        self.clock = Clock()
        self.gate = gate_for(self.clock, signals, tier_type)
        self.traffic = Traffic(self.clock)
        self.chunk_bytes = chunk_bytes

    def run(self, seconds: float, *, side_by_side: int = 1, written: bool = True, late_s: float = 0.0) -> None:
        """A batch of stores that takes `seconds`; who plans hears of it `late_s` later."""
        operations = [self.traffic.start(is_store=True) for _ in range(side_by_side)]
        self.clock.now_s += seconds
        ended = [self.traffic.finish(operation) for operation in operations]
        self.clock.now_s += late_s
        for spent in ended:
            queue_s = 0.0 if self.gate.signals.own_time else late_s
            num_bytes = self.chunk_bytes if written else 0
            self.gate.on_store_ended(num_bytes, spent, queue_s=queue_s, chunk_bytes=self.chunk_bytes)
        self.gate.on_stall(self.traffic.stall(), self.chunk_bytes)

    def hang(self, stores: int) -> None:
        for _ in range(stores):
            self.traffic.start(is_store=True)

    def ask(self, times: int, *, every_s: float = 0.0) -> int:
        """How many of so many stores are admitted, asked at a steady rate, a report at each step."""
        admitted = 0
        heard_s = self.clock.now_s
        for _ in range(times):
            self.clock.now_s += every_s
            if self.clock.now_s - heard_s >= STEP_S:
                heard_s = self.clock.now_s
                self.gate.on_stall(self.traffic.stall(), self.chunk_bytes)
            admitted += self.gate.refusal(16, 0, 5.0) is None
        return admitted

    def drop_rate(self, rounds: int = 400, **batch: float) -> float:
        """Of one store asked after each batch, how many are refused once the gate knows the tier."""
        for _ in range(40):
            self.run(**batch)
        refused = 0
        for _ in range(rounds):
            self.run(**batch)
            refused += not self.gate.should_store(16)
        return refused / rounds


# ---- in flight ---------------------------------------------------------------------------------


def hung(signals: Signals) -> Tier:
    """20 good stores, then eight that never come home."""
    tier = Tier(signals)
    for _ in range(20):
        tier.run(0.004)
    tier.hang(8)
    return tier


def test_a_mount_that_hangs_is_not_seen_by_completions_alone():
    assert hung(PLAIN).ask(10_000, every_s=0.004) == 10_000


def test_a_mount_that_hangs_is_seen_by_the_age_of_what_is_in_flight():
    # 15 % of an age shared by eight stores of 4 MiB passes 30 ms/MiB, where the throttle refuses all, at 6.4 s;
    # from the high mark on, at 2.1 s, ever more are refused: on the average half of those between.
    admitted = hung(ALL).ask(10_000, every_s=0.004)
    assert admitted <= (2.1 + 4.3 / 2) / 0.004 * 1.02
    assert admitted >= 2.1 / 0.004 * 0.9


def test_while_it_hangs_one_store_in_a_while_is_let_through_to_see():
    tier = hung(ALL)
    tier.ask(2_000, every_s=0.004)
    # After 5, 10, 20, 40 s, and from then on every 40 s.
    assert 1 <= tier.ask(10_000, every_s=0.006) <= 3
    assert 14 <= tier.ask(10_000, every_s=0.06) <= 16


def test_what_hangs_for_good_does_not_shut_a_tier_that_works_again():
    tier = hung(ALL)
    tier.ask(15_000, every_s=0.004)
    probed_s = tier.clock.now_s
    while not tier.ask(1, every_s=0.004):
        pass
    assert tier.clock.now_s - probed_s <= 40.0
    tier.run(0.004)
    asked_s = tier.clock.now_s
    while tier.clock.now_s < asked_s + 5.0:
        if tier.ask(1, every_s=0.004):
            tier.run(0.004)
    assert all(tier.ask(1) for _ in range(100))


@pytest.mark.parametrize("signals", [ALL, replace(ALL, goodput=False)], ids=["all", "without goodput"])
def test_one_store_that_is_lost_does_not_shut_a_tier_that_then_has_a_pause(signals):
    tier = Tier(signals)
    tier.hang(1)
    for _ in range(400):
        tier.run(0.004, side_by_side=2)
    tier.clock.now_s += 30.0
    assert tier.ask(500) == 500
    for _ in range(2_000):
        assert tier.ask(1, every_s=0.004) == 1
        tier.run(0.004)


def test_after_a_hang_stores_are_admitted_in_full_within_ten_seconds():
    tier = hung(ALL)
    tier.ask(15_000, every_s=0.004)
    # The eight come home after a minute.
    for operation in list(tier.traffic._stores):  # noqa: SLF001 - the stores that hung
        spent = tier.traffic.finish(operation)
        tier.gate.on_store_ended(tier.chunk_bytes, spent)
    tier.gate.on_stall(tier.traffic.stall(), tier.chunk_bytes)
    recovered_s = tier.clock.now_s
    admitted: list[bool] = []
    while tier.clock.now_s < recovered_s + 10.0:
        admitted.append(tier.gate.should_store(16))
        if admitted[-1]:
            tier.run(0.004)
        else:
            tier.clock.now_s += 0.004
    assert all(admitted[-250:])
    assert not all(admitted[:250])


def test_one_store_that_is_lost_among_many_that_come_home_is_no_hang():
    tier = Tier(ALL)
    tier.hang(1)
    for _ in range(2_000):
        tier.run(0.008, side_by_side=7)
        assert tier.gate.should_store(16)


def test_a_tier_that_hangs_from_its_first_store_on_is_seen_in_warm_up():
    tier = Tier(ALL)
    tier.hang(1)
    tier.ask(500, every_s=0.004)
    assert tier.ask(100, every_s=0.004) == 0


def test_a_plain_detector_that_is_default_constructed_hears_a_patched_clock(monkeypatch):
    detector = EMABackpressureDetector(0.010, 0.002, warmup_completions=0, alpha=1.0)
    detector.on_store_completed(1.0, MIB)
    assert detector.is_under_pressure()
    later_s = time.monotonic() + 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not detector.is_under_pressure()
    monkeypatch.setattr(detector, "update", lambda *_: None)


def test_what_hung_counts_no_more_than_failures_do_once_it_comes_home():
    tier = hung(ALL)
    tier.ask(15_000, every_s=0.004)
    (operation, *_) = tier.traffic._stores  # noqa: SLF001 - as above
    tier.gate.on_store_ended(tier.chunk_bytes, tier.traffic.finish(operation))
    assert tier.gate.stats["store_latency_ema"] <= 4 * 0.010


# ---- only bytes really written -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("signals", "held_per_real", "least", "most"),
    [
        (PLAIN, 0, 0.45, 0.60),
        (PLAIN, 1, 0.0, 0.15),
        (PLAIN, 3, 0.0, 0.0),
        (ALL, 0, 0.45, 0.60),
        (ALL, 1, 0.45, 0.60),
        (ALL, 3, 0.45, 0.60),
    ],
)
def test_chunks_that_were_there_make_a_slow_tier_look_fast_unless_they_teach_nothing(
    signals, held_per_real, least, most
):
    tier = Tier(signals)
    refused = 0
    for number in range(500):
        tier.run(4 * MIB / 50e6)
        for _ in range(held_per_real):
            tier.run(0.0001, written=False)
        if number >= 100:
            refused += not tier.gate.should_store(16)
    assert least <= refused / 400 <= most


# ---- the tier's own time -----------------------------------------------------------------------


def small_jobs(signals: Signals) -> float:
    return Tier(signals, chunk_bytes=128 * 1024).drop_rate(seconds=128 * 1024 / 5e9, late_s=0.002)


def test_small_jobs_that_are_noticed_late_look_slow_where_waiting_counts():
    assert small_jobs(PLAIN) == pytest.approx(0.30, abs=0.05)


def test_small_jobs_that_are_noticed_late_are_not_held_against_the_tier():
    assert small_jobs(ALL) == 0.0


@pytest.mark.parametrize("fixed_cost_s", [None, 0.012], ids=["learned", "given"])
def test_a_fixed_cost_makes_small_jobs_look_slow_unless_it_is_told_apart(fixed_cost_s):
    put = {"seconds": 0.012 + 64 * 1024 / 1e9}
    assert Tier(PLAIN, "obj", chunk_bytes=64 * 1024).drop_rate(**put) == 1.0
    signals = replace(ALL, fixed_cost_s=fixed_cost_s)
    assert Tier(signals, "obj", chunk_bytes=64 * 1024).drop_rate(**put) == 0.0


def test_a_fixed_cost_that_is_told_apart_hides_no_slowness():
    tier = Tier(ALL, "obj", chunk_bytes=64 * 1024)
    assert tier.drop_rate(seconds=0.012) == 0.0
    assert tier.drop_rate(seconds=0.120) == 1.0


def test_a_tier_that_is_slow_from_its_first_store_on_cannot_hide_behind_a_learned_cost():
    assert Tier(ALL).drop_rate(seconds=4 * MIB / 50e6) == pytest.approx(0.5, abs=0.1)
    assert Tier(ALL).gate.fixed_cost_s <= 0.0005


def test_one_store_that_was_lucky_does_not_make_the_others_look_slow():
    tier = Tier(ALL, "obj", chunk_bytes=64 * 1024)
    for number in range(400):
        tier.run(0.0008 if number == 200 else 0.012 + 0.0002 * (number % 12))
        assert tier.gate.should_store(16), number


def test_small_jobs_in_flight_are_not_held_to_what_their_bytes_alone_would_take():
    tier = Tier(ALL, "obj", chunk_bytes=64 * 1024)
    for _ in range(30):
        tier.run(0.012)
    tier.traffic.start(is_store=True)
    tier.clock.now_s += 0.011
    tier.gate.on_stall(tier.traffic.stall(), tier.chunk_bytes)
    assert tier.gate.should_store(16)


# ---- goodput -----------------------------------------------------------------------------------


def side_by_side(signals: Signals, bytes_per_s: float, stores: int) -> float:
    return Tier(signals).drop_rate(seconds=stores * 4 * MIB / bytes_per_s, side_by_side=stores)


def test_many_stores_at_once_look_slow_where_each_is_charged_all_of_its_time():
    assert side_by_side(PLAIN, 1e9, 16) > 0.25


def test_many_stores_at_once_are_told_apart_from_a_slow_device():
    assert side_by_side(ALL, 1e9, 16) == 0.0
    assert side_by_side(ALL, 50e6, 16) == pytest.approx(0.5, abs=0.1)


def test_loads_that_run_beside_a_store_are_not_held_against_the_tier():
    tier = Tier(ALL)
    for _ in range(200):
        loads = [tier.traffic.start(is_store=False) for _ in range(15)]
        tier.run(16 * 4 * MIB / 1e9)
        for load in loads:
            tier.traffic.finish(load)
        assert tier.gate.should_store(16)


def test_loads_that_hang_do_not_hide_that_stores_are_slow():
    tier = Tier(ALL)
    for _ in range(8):
        tier.traffic.start(is_store=False)
    tier.clock.now_s += 10.0
    assert tier.drop_rate(seconds=8 * 0.010 * 4) == 1.0


# ---- the switches ------------------------------------------------------------------------------


def test_with_every_switch_off_a_gate_feeds_its_detector_seconds_and_bytes_as_they_come():
    clock = Clock()
    plain, fed = gate_for(clock, PLAIN), gate_for(clock, PLAIN)
    traffic = Traffic(clock)
    for number in range(200):
        operations = [traffic.start(is_store=True) for _ in range(1 + number % 3)]
        clock.now_s += 0.01 * (number % 7)
        for operation in operations:
            spent = traffic.finish(operation)
            fed.on_store_ended(0 if number % 5 == 0 else 4 * MIB, spent, queue_s=0.002, chunk_bytes=4 * MIB)
            plain.detector.on_store_completed(spent.elapsed_s + 0.002, 4 * MIB)
        traffic.start(is_store=True)
        clock.now_s += 1.0
        fed.on_stall(traffic.stall(), 4 * MIB)
        assert (fed.refusal(16, 1000, 1.0) is None) == plain.should_store(16)
        assert fed.detector.stats == plain.detector.stats
    assert fed.wait_s(1000) == 0.0


def test_queue_time_is_what_stands_before_at_the_rate_of_the_last_stores():
    tier = Tier(ALL)
    assert tier.gate.wait_s(1000) == 0.0
    for _ in range(50):
        tier.run(0.08, side_by_side=8)
    assert tier.gate.wait_s(300) == pytest.approx(3.0)


def test_the_rate_of_the_last_stores_counts_half_after_two_seconds_without_one():
    tier = Tier(ALL)
    for _ in range(50):
        tier.run(0.08, side_by_side=8)
    tier.clock.now_s += 4.0
    assert tier.gate.wait_s(300) == pytest.approx(3.0 / 4)


def test_queue_time_grows_while_nothing_comes_home_and_is_back_with_the_first_that_does():
    tier = Tier(ALL)
    for _ in range(50):
        tier.run(0.08, side_by_side=8)
    tier.hang(8)
    tier.clock.now_s += 4.0
    tier.gate.on_stall(tier.traffic.stall(), tier.chunk_bytes)
    assert tier.gate.wait_s(10) == pytest.approx(10 * 4.0 / 8)
    tier.gate.on_store_ended(tier.chunk_bytes, tier.traffic.finish(next(iter(tier.traffic._stores))))  # noqa: SLF001
    assert tier.gate.wait_s(10) < 10 * 0.1


def test_chunks_that_were_there_shorten_the_queue_as_fast_as_they_really_do():
    tier = Tier(ALL)
    for _ in range(50):
        tier.run(0.001, written=False)
    assert tier.gate.wait_s(1000) == pytest.approx(1.0)
