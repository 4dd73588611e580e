"""One command for a machine with a GPU: facts, correctness on the device, races, and the copy benchmark.

    make test-gpu [PYTHON=python3] [ARGS="--out DIR"]
    make test-gpu ARGS=--rehearse        on the CPU, small: every line of it runs but CUDA's own

Needs torch, triton, numpy, safetensors, nvidia-ml-py, cuda-bindings and pytest, takes under 5 minutes, installs
nothing and reaches no network. A step that fails or overruns does not keep the next from running. What each step
printed, every test's outcome and the benchmark's figures lie under --out as well. Exits 0 where every test passed
and every target was met, 1 where not, 2 where there is no CUDA device or a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
TESTS = ROOT / "tests" / "gpu"

PACKAGES = ("torch", "triton", "numpy", "safetensors", "pynvml", "cuda.bindings", "pytest")
NO_DEVICE = 2
"""What the facts exit with where there is no CUDA device; they have said so."""
MAX_LINES = 15
"""Of failures at the end, so that the tables stay in sight."""
WHOLE_S = 290.0
FACTS_S = 45.0
TESTS_S = 130.0
"""All tests together; the benchmark has what is left of the whole, and needs about 100 s of it."""
GROUPS = (
    ("kernels", ("test_kernels.py",), 75.0),
    ("races", ("test_races.py", "test_layers.py"), 75.0),
    # The region's last test asks CUDA for something that may cost the process its device.
    ("connector", ("test_chooser.py", "test_connector.py", "test_region.py"), 60.0),
)
"""A process each: a test that breaks the device's context takes none of the others with it."""


class Steps:
    """Runs programs one after the other, each with a limit, and keeps what they print."""

    def __init__(self, out: Path, *, rehearse: bool) -> None:
        self._out = out
        self._begin_s = time.monotonic()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCHMARKS)]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            # Whatever plugins this machine has are not needed, and some import much.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        for name in ("CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET"):
            # The first would make every race go well.
            self._environment.pop(name, None)
        if rehearse:
            self._environment["TRITON_INTERPRET"] = "1"

    def left_s(self) -> float:
        """Of the whole."""
        return WHOLE_S - (time.monotonic() - self._begin_s)

    def run(self, name: str, limit_s: float, *arguments: str) -> int:
        """The exit code of `python ARGUMENTS`; one that overruns is told to say where it is, and ended."""
        limit_s = min(limit_s, self.left_s())
        started_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        overran = threading.Event()

        def end() -> None:
            overran.set()
            # Python's fault handler prints where every thread is.
            process.send_signal(signal.SIGABRT)
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()

        timer = threading.Timer(max(1.0, limit_s), end)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        with (self._out / f"test-gpu-{name}.log").open("w") as log:
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
        code = process.wait()
        timer.cancel()
        if code != NO_DEVICE:
            ended = f"was ended, with {code}," if overran.is_set() else f"ended with {code}"
            print(f"=== {name} {ended} after {time.monotonic() - started_s:.0f} of at most {limit_s:.0f} s", flush=True)
        return code or int(overran.is_set())


def run_tests(steps: Steps, out: Path, *, rehearse: bool) -> list[str]:
    """What went wrong, one line each."""
    device = "cpu" if rehearse else "cuda"
    files = [name for _, names, _ in GROUPS for name in names]
    groups = [("tests", tuple(files), TESTS_S)] if rehearse else list(GROUPS)
    wrong: list[str] = []
    outcomes = out / "test-gpu-outcomes.jsonl"
    outcomes.write_text("")
    until_s = time.monotonic() + TESTS_S
    for name, names, limit_s in groups:
        before = len(outcomes_in(outcomes))
        code = steps.run(
            name,
            max(10.0, min(limit_s, until_s - time.monotonic())),
            *("-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS)),
            *("--on", device, "--outcomes", str(outcomes), *(str(TESTS / each) for each in names)),
        )
        own = outcomes_in(outcomes)[before:]
        failed = [
            f"{one['file']} {one['test']} ({one['when']}): {one['why']}" for one in own if one["outcome"] == "failed"
        ]
        wrong += failed
        if code and not failed:
            wrong.append(f"{name}: pytest ended with {code} after {len(own)} tests: see test-gpu-{name}.log")
    print_outcomes(outcomes_in(outcomes))
    return wrong


def outcomes_in(path: Path) -> list[dict[str, str]]:
    """What tests/gpu/conftest.py wrote: test, file, outcome, when, why."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_outcomes(outcomes: Sequence[dict[str, str]]) -> None:
    """How many tests passed, and what was not run and why."""
    counts = {kind: sum(one["outcome"] == kind for one in outcomes) for kind in ("passed", "failed", "skipped")}
    print(f"tests: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} not run")
    for one in outcomes:
        if one["outcome"] == "skipped":
            print(f"not run: {one['file']} {one['test']}: {one['why']}")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, under Triton's interpreter, small")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="for logs and figures; build/ by default")
    parser.add_argument("--skip", choices=("tests", "benchmark"), help="leave one of the two out")
    options = parser.parse_args(arguments)
    missing = [package for package in PACKAGES if not _installed(package)]
    if missing:
        print(
            f"{sys.executable} has no {', '.join(missing)}: name a Python that has it, make test-gpu PYTHON=...",
            file=sys.stderr,
        )
        return NO_DEVICE
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    steps = Steps(out, rehearse=options.rehearse)
    device = "cpu" if options.rehearse else "cuda"
    code = steps.run("facts", FACTS_S, str(BENCHMARKS / "device_copy_facts.py"), "--device", device)
    if code == NO_DEVICE:
        return NO_DEVICE
    wrong = [] if code == 0 else [f"facts: exit {code}"]
    if options.skip != "tests":
        wrong += run_tests(steps, out, rehearse=options.rehearse)
    if options.skip != "benchmark":
        small = ["--tiny"] if options.rehearse else []
        code = steps.run(
            "benchmark",
            steps.left_s() - 2.0,
            *(str(BENCHMARKS / "device_copy.py"), "--device", device, *small),
            *("--claims", "--json", str(out / "device_copy.json")),
        )
        if code:
            wrong.append(f"benchmark: exit {code}: a target was missed or it did not end")
    for line in wrong[:MAX_LINES]:
        print(f"FAILED {line.splitlines()[0][:300]}")
    if len(wrong) > MAX_LINES:
        print(f"FAILED and {len(wrong) - MAX_LINES} more")
    print(f"logs and figures: {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
