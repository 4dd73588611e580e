"""What one decision and one completion of a gate cost, beside vLLM's own detector in the same run.

    python -m benchmarks.gate_cost [--tiny] [--json]

Three states of a tier are played: healthy (below the low mark), between the marks, and throttled
(above the high mark, so that the policy decides each time). The contenders are vLLM's
`EMABackpressureDetector`, ours of the same name alone, and our gate as the connector calls it: the
detector behind all that tells a slow tier from a busy one. They take turns within one run; the
median of the rounds counts. Without vLLM in this interpreter's environment its column stays empty.
Exits 1 where a call of ours takes longer than the bound.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol, cast

from kvsluice.tiers.backpressure import EMABackpressureDetector, Gate, Spent, Stall

BOUND_US: Final = 2.0
HIGH_S, LOW_S = 0.010, 0.002
CHUNK_BYTES: Final = 2 << 20
STATES: Final = {"healthy": 0.001, "between": 0.005, "throttled": 0.020}
"""Seconds per MiB that each state's stores take."""


class _Make(Protocol):
    """vLLM's constructor, as far as it is used."""

    def __call__(self, *, high_water_s: float, low_water_s: float) -> Detector: ...


class Detector(Protocol):
    """What vLLM's class and ours have in common."""

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None: ...

    def should_store(self, num_blocks: int) -> bool: ...


@dataclass(frozen=True)
class Row:
    """Microseconds per call."""

    state: str
    call: str
    vllm_us: float | None
    detector_us: float
    gate_us: float

    @property
    def ok(self) -> bool:
        return self.detector_us <= BOUND_US and self.gate_us <= BOUND_US


def vllm_detector() -> Callable[[], Detector] | None:
    """Makes vLLM's detector with our marks; None where vLLM is not here."""
    try:
        module = importlib.import_module("vllm.v1.kv_offload.tiering.backpressure")
    except ImportError:
        return None
    make = cast(_Make, module.EMABackpressureDetector)
    return lambda: make(high_water_s=HIGH_S, low_water_s=LOW_S)


def our_detector() -> EMABackpressureDetector:
    return EMABackpressureDetector(HIGH_S, LOW_S)


def timed(call: Callable[[], object], calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started_s) / calls * 1e6


def completion_of(detector: Detector, elapsed_s: float) -> Callable[[], object]:
    return lambda: detector.on_store_completed(elapsed_s, CHUNK_BYTES)


def decision_of(detector: Detector) -> Callable[[], object]:
    return lambda: detector.should_store(16)


def contenders(state: str, baseline: Callable[[], Detector] | None) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(column, call, what to time) of each contender, brought into its state."""
    elapsed_s = STATES[state] * CHUNK_BYTES / (1 << 20)
    for column, make in (("vllm", baseline), ("detector", our_detector)):
        if make is None:
            continue
        detector = make()
        for _ in range(200):
            detector.on_store_completed(elapsed_s, CHUNK_BYTES)
        yield column, "completion", completion_of(detector, elapsed_s)
        yield column, "decision", decision_of(detector)
    gate = Gate(our_detector())
    spent = Spent(4 * elapsed_s, elapsed_s, elapsed_s)
    for _ in range(200):
        gate.on_store_ended(CHUNK_BYTES, spent)
    yield "gate", "completion", lambda: gate.on_store_ended(CHUNK_BYTES, spent, queue_s=0.1, chunk_bytes=CHUNK_BYTES)
    yield "gate", "decision", lambda: gate.wait_s(100) < 5.0 and gate.should_store(16)
    stall = Stall(elapsed_s, elapsed_s, elapsed_s)
    yield "gate", "report", lambda: gate.on_stall(stall, CHUNK_BYTES)


def measure(rounds: int, calls: int, baseline: Callable[[], Detector] | None) -> list[Row]:
    order = random.Random(7)
    taken_us: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(rounds):
        for state in STATES:
            timings = list(contenders(state, baseline))
            for column, call, what in order.sample(timings, len(timings)):
                taken_us.setdefault((state, call, column), []).append(timed(what, calls))
    rows = []
    for state in STATES:
        for call in ("decision", "completion"):
            of = {
                column: statistics.median(taken_us[state, call, column])
                for column in ("vllm", "detector", "gate")
                if (state, call, column) in taken_us
            }
            rows.append(Row(state, call, of.get("vllm"), of["detector"], of["gate"]))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few calls: only shows that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args(arguments)
    baseline = vllm_detector()
    rows = measure(1 if options.tiny else 15, 20 if options.tiny else 20_000, baseline)
    if options.json:
        print(json.dumps({"bound_us": BOUND_US, "vllm": baseline is not None, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{platform.machine()}, Python {platform.python_version()}; microseconds a call, bound {BOUND_US}")
        if baseline is None:
            print("vLLM is not installed in this environment: no baseline (make bench-gate has it)")
        print(f"{'tier':<10} {'call':<11} {'vLLM':>7} {'detector':>9} {'gate':>7}")
        for row in rows:
            theirs = "-" if row.vllm_us is None else f"{row.vllm_us:.3f}"
            verdict = "ok" if row.ok else "TOO SLOW"
            print(f"{row.state:<10} {row.call:<11} {theirs:>7} {row.detector_us:>9.3f} {row.gate_us:>7.3f}  {verdict}")
    # A machine that is busy with tests says nothing about microseconds.
    return 0 if options.tiny or all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
