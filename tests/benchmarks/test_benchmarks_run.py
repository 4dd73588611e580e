"""Each benchmark runs, tiny, and prints what it promises; nothing is measured here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    # From the checkout as well as installed: the folder of three links must be found.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--tiny", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scheduling_path_benchmark_times_each_call_alone_and_beside_a_busy_thread() -> None:
    rows = json.loads(run("scheduling_path.py", "--json"))["rows"]
    assert [(row["call"], row["beside"]) for row in rows] == [
        (call, beside) for beside in ("nothing", "a busy thread") for call in ("store", "load", "lookup", "poll")
    ]
    assert all(row["calls"] > 0 and row["p99_us"] > 0 for row in rows)


def test_the_slow_tier_benchmark_shows_both_phases() -> None:
    seconds = json.loads(run("slow_tier.py", "--json"))
    assert {second["tier"] for second in seconds} == {"slow", "healthy"}
    assert sum(second["stored"] for second in seconds) > 0


def test_the_copy_benchmark_puts_memcpy_beside_each_method() -> None:
    assert "memcpy" in run("cpu_copy.py")


def test_the_gate_benchmark_has_a_row_for_each_state_and_call_and_says_whether_vllm_is_here() -> None:
    document = json.loads(run("gate_cost.py", "--json"))
    assert [(row["state"], row["call"]) for row in document["rows"]] == [
        (state, call) for state in ("healthy", "between", "throttled") for call in ("decision", "completion")
    ]
    assert all((row["vllm_us"] is not None) == document["vllm"] for row in document["rows"])
    assert all(row["gate_us"] > 0 and row["detector_us"] > 0 for row in document["rows"])


@pytest.mark.parametrize(
    "name", ["scheduling_path.py", "slow_tier.py", "cpu_copy.py", "gate_cost.py", "slowed_device.py"]
)
def test_every_benchmark_says_what_its_options_are(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=True,
    )
    assert "--tiny" in done.stdout
