"""Runs on a CUDA device, or rehearses on the CPU: `make test-gpu`, see scripts/test_gpu.py.

pytest finds these tests with the ini file beside them alone; the project's own leaves them to that command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for folder in (_HERE, _HERE.parents[1] / "benchmarks", _HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), help="the device; cpu rehearses under Triton's interpreter")
    parser.addoption("--outcomes", type=Path, help="a file that gets a JSON line for each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("on", None) == "cpu":
        # Read where a kernel is defined: before Triton is imported.
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a device that was named there is nothing to run."""
    return True if _HERE in collection_path.parents and config.getoption("on", None) is None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        _note(item.config, item.name, item.path.name, report, call)
    if report.failed and _device_is_lost(item.config):
        item.session.shouldstop = f"the device is lost after {item.name}: nothing more can be run in this process"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome != "passed":
        # A whole file that lacks a package.
        _note(collector.config, "", collector.path.name, report, None)
    return report


def _note(
    config: pytest.Config,
    test: str,
    file: str,
    report: pytest.TestReport | pytest.CollectReport,
    call: pytest.CallInfo[None] | None,
) -> None:
    path = config.getoption("outcomes", None)
    if path is None:
        return
    if isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2])
    elif call is not None and call.excinfo is not None:
        why = f"{call.excinfo.typename}: {call.excinfo.value}"
    else:
        why = str(report.longrepr)
    when = getattr(report, "when", "collect")
    line = {"test": test, "file": file, "outcome": report.outcome, "when": when, "why": why}
    with path.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _device_is_lost(config: pytest.Config) -> bool:
    """Whether an earlier launch broke the context for good, as an illegal address does."""
    import torch

    if config.getoption("on", None) != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return True
    return False


@pytest.fixture
def on_cuda(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("on") == "cuda")


@pytest.fixture
def engine(on_cuda: bool) -> Iterator[object]:
    """An engine on a stream of its own; see `gpu_engine.Engine`."""
    from gpu_engine import opened

    with opened(cuda=on_cuda, own_stream=True) as made:
        yield made
