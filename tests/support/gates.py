"""A detector on a virtual clock, and the few words in which its tests speak."""

from __future__ import annotations

from kvsluice.tiers.backpressure import BackpressureDetector, EMABackpressureDetector

MIB = 1 << 20
HIGH, LOW = 0.010, 0.002
FAST, MIDDLE, SLOW = 0.001, 0.005, 0.100


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(clock: Clock, **kwargs: object) -> EMABackpressureDetector:
    arguments = {"high_water_s": HIGH, "low_water_s": LOW, "warmup_completions": 0, "alpha": 1.0} | kwargs
    return EMABackpressureDetector(clock=clock, **arguments)


def complete(detector: BackpressureDetector, s_per_mib: float, times: int = 1) -> None:
    for _ in range(times):
        detector.on_store_completed(s_per_mib * 2, 2 * MIB)


def answers(detector: BackpressureDetector, times: int) -> list[bool]:
    return [detector.should_store(1) for _ in range(times)]
