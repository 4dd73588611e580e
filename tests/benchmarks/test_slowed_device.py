"""The slowed device: its pace on virtual time, what its benchmark claims, and one tiny run of all of it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import slowed_device_report as names  # noqa: E402
from slowed_device_pace import SharedPace, Speed  # noqa: E402
from slowed_device_report import Costs, HangRun, Report, Run, back_at_rate_s  # noqa: E402
from slowed_device_server import Counters  # noqa: E402
from slowed_device_traffic import arrivals  # noqa: E402

SPEED = Speed(100.0, 0.5)


def ends(pace: SharedPace[str], until_s: float) -> list[tuple[float, str]]:
    """Follow the pace as its server does, from end to end."""
    ended = []
    while (next_s := pace.next_end_s()) is not None and next_s <= until_s:
        ended += pace.take_ended(next_s)
    return [(round(at_s, 9), request) for at_s, request in ended + pace.take_ended(until_s)]


# ---- the pace --------------------------------------------------------------------------------


def test_a_request_alone_takes_its_bytes_at_the_rate_and_the_fixed_time() -> None:
    pace: SharedPace[str] = SharedPace(SPEED, 10.0)
    pace.arrive(10.0, "a", 200)
    assert ends(pace, 20.0) == [(12.5, "a")]
    assert pace.busy_s == pytest.approx(2.5)


def test_requests_in_flight_share_the_device_evenly() -> None:
    pace: SharedPace[str] = SharedPace(Speed(100.0, 0.0), 0.0)
    pace.arrive(0.0, "long", 300)
    pace.arrive(1.0, "short", 100)
    # One second alone, two at half the rate, and the last of the three again alone.
    assert ends(pace, 10.0) == [(3.0, "short"), (4.0, "long")]


def test_a_hang_adds_its_own_length_and_ends_nothing_meanwhile() -> None:
    pace: SharedPace[str] = SharedPace(Speed(100.0, 0.0), 0.0)
    pace.arrive(0.0, "before", 100)
    pace.freeze(0.25)
    assert pace.next_end_s() is None
    pace.arrive(5.0, "during", 100)
    assert pace.take_ended(60.0) == []
    pace.thaw(60.25)
    assert ends(pace, 100.0) == [(61.75, "before"), (62.0, "during")]
    assert pace.busy_s == pytest.approx(2.0)


def test_a_server_that_looks_late_takes_each_end_at_its_own_time() -> None:
    pace: SharedPace[str] = SharedPace(Speed(100.0, 0.0), 0.0)
    for name in "abc":
        pace.arrive(0.0, name, 100)
    pace.arrive(1.0, "d", 300)
    assert [(round(at_s, 9), name) for at_s, name in pace.take_ended(100.0)] == [
        (3.666666667, "a"),
        (3.666666667, "b"),
        (3.666666667, "c"),
        (6.0, "d"),
    ]


def test_a_new_speed_counts_for_the_requests_to_come() -> None:
    pace: SharedPace[str] = SharedPace(Speed(100.0, 0.0), 0.0)
    pace.arrive(0.0, "old", 100)
    pace.speed = Speed(1000.0, 0.0)
    pace.arrive(1.0, "new", 100)
    assert ends(pace, 10.0) == [(1.0, "old"), (1.1, "new")]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 1000)), min_size=1, max_size=20))
def test_the_device_does_exactly_the_work_that_was_brought(requests: list[tuple[float, int]]) -> None:
    pace: SharedPace[int] = SharedPace(SPEED, 0.0)
    now_s, came_s, device_s, ended = 0.0, [], [], []
    for gap_s, num_bytes in requests:
        now_s += gap_s
        ended += pace.take_ended(now_s)
        device_s.append(pace.arrive(now_s, len(came_s), num_bytes))
        came_s.append(now_s)
    ended += pace.take_ended(now_s + 1e6)
    assert sorted(number for _, number in ended) == list(range(len(requests)))
    assert pace.busy_s == pytest.approx(sum(device_s))
    assert all(at_s >= came_s[number] + device_s[number] - 1e-6 for at_s, number in ended)


@pytest.mark.parametrize(("bytes_per_s", "per_request_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_speed_that_is_none_is_refused(bytes_per_s: float, per_request_s: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        Speed(bytes_per_s, per_request_s)


def test_counters_are_subtracted_and_what_is_in_flight_is_not() -> None:
    added = Counters(reads=5, read_bytes=700, in_flight=3).since(Counters(reads=2, read_bytes=100, in_flight=2))
    assert added == Counters(reads=3, read_bytes=600, in_flight=3)


# ---- the traffic -----------------------------------------------------------------------------


def test_arrivals_repeat_with_their_seed_and_keep_their_rate() -> None:
    first, again = (list(itertools.islice(arrivals(20.0, 4, seed), 10_000)) for seed in (3, 3))
    assert first == again
    assert 10_000 * 4 / first[-1] == pytest.approx(20.0, rel=0.05)
    assert list(arrivals(0.0, 4, 3)) == []


# ---- the claims ------------------------------------------------------------------------------


def a_run(name: str, p99_ms: float, *, goodput: float = 0.9, hits: int = 100, dropped: int = 0) -> Run:
    return Run(
        name=name,
        loads=100,
        load_p50_ms=10.0,
        load_p99_ms=p99_ms,
        missed={},
        offered=200,
        admitted=200 - dropped,
        stored=200 - dropped,
        goodput=goodput,
        lookups=200,
        hits=hits,
        dropped={"gate": dropped} if dropped else {},
        load_share=0.3,
        busy_share=0.9,
        late_us=50.0,
        accounted=True,
    )


def a_hang(name: str, *, admitted: int = 20, back_s: float | None = 1.0) -> HangRun:
    return HangRun(name, 10.0, 10.0, 600, admitted, [60] * 10, 60.0, back_s, {}, True)


def a_report() -> Report:
    """One of which every claim holds."""
    runs = [
        a_run(names.ALONE, 50.0),
        a_run(names.ONE_QUEUE, 2000.0),
        a_run(names.NO_GATE, 150.0),
        a_run(names.DROP, 60.0, hits=20),
        a_run(names.OURS, 80.0),
        a_run(names.FITTING, 60.0),
    ]
    hangs = [a_hang(names.HANG_FITTING), a_hang(names.HANG_FLOOD)]
    return Report("a machine", Speed(1e8, 1e-4), 2**20, Costs(0.01, 0.01), runs, hangs)


def with_run(name: str, **changes: object) -> Report:
    report = a_report()
    return replace(report, runs=[replace(run, **changes) if run.name == name else run for run in report.runs])


def with_hang(name: str, **changes: object) -> Report:
    report = a_report()
    return replace(report, hangs=[replace(hang, **changes) if hang.name == name else hang for hang in report.hangs])


def test_all_claims_hold_of_what_they_promise() -> None:
    report = a_report()
    assert all(claim.ok for claim in report.claims())
    assert report.accounted
    assert "FAILED" not in report.as_text()


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (with_run(names.OURS, load_p99_ms=101.0), "at most 2 times"),
        (with_run(names.NO_GATE, load_p99_ms=79.0), "longer without the gate"),
        (with_run(names.ONE_QUEUE, load_p99_ms=499.0), "10 times as long"),
        (with_run(names.OURS, goodput=0.79), "of what the loads leave"),
        (with_run(names.OURS, hits=20), "more hits than"),
        (with_run(names.FITTING, dropped={"gate": 1}), "none is dropped"),
        (with_hang(names.HANG_FLOOD, admitted=201), "hang under the flood: at most 200 stores"),
        (with_hang(names.HANG_FITTING, admitted=201), "hang, stores fit: at most 200 stores"),
        (with_hang(names.HANG_FITTING, back_s=None), "hang, stores fit: back"),
        (with_hang(names.HANG_FLOOD, back_s=10.1), "hang under the flood: back"),
    ],
)
def test_a_claim_fails_alone_when_its_figure_is_off(report: Report, says: str) -> None:
    failed = [claim.says for claim in report.claims() if not claim.ok]
    assert len(failed) == 1
    assert says in failed[0]
    assert f"FAILED  {failed[0]}" in report.as_text()


def test_the_rate_is_back_where_a_whole_window_runs_at_it() -> None:
    slow = [100.0 + at / 5 for at in range(20)]
    fast = [104.0 + at / 50 for at in range(500)]
    assert back_at_rate_s([*slow, *fast], 100.0, 20.0, 40.0) == pytest.approx(3.5, abs=0.11)
    assert back_at_rate_s(slow, 100.0, 20.0, 40.0) is None


# ---- the program -----------------------------------------------------------------------------


def run_tiny(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "slowed_device.py"), "--tiny", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=110,
        check=False,
    )


def can_slow_a_device() -> bool:
    tools = ("losetup", "mkfs.ext4", "mount", "umount")
    devices = (Path("/dev/fuse"), Path("/dev/loop-control"))
    return os.geteuid() == 0 and all(map(shutil.which, tools)) and all(device.exists() for device in devices)


def test_a_tiny_run_accounts_for_every_store_and_load_and_leaves_no_mount_behind(
    tmp_path: Path,
) -> None:
    done = run_tiny(TMPDIR=str(tmp_path))
    if not can_slow_a_device():
        assert done.returncode == 2
        assert "no device can be slowed here" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["accounted"]
    runs = {run["name"]: run for run in report["runs"]}
    assert list(runs) == [names.ALONE, names.ONE_QUEUE, names.NO_GATE, names.DROP, names.OURS, names.FITTING]
    assert all(run["loads"] > 0 and run["load_p99_ms"] >= run["load_p50_ms"] > 0 for run in runs.values())
    assert runs[names.ALONE]["offered"] == runs[names.ALONE]["stored"] == 0
    # Of a chunk's own bytes alone the device needs this; what it needed was measured.
    least_s = report["chunk_bytes"] / report["device"]["bytes_per_s"]
    assert least_s < report["costs"]["load_s"] < 2 * least_s
    assert least_s < report["costs"]["store_s"] < 2 * least_s
    assert all(0 < run["busy_share"] <= 1.01 for run in runs.values())
    assert [hang["name"] for hang in report["hangs"]] == [names.HANG_FITTING, names.HANG_FLOOD]
    assert len(report["claims"]) == 10
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert str(tmp_path) not in subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True).stdout
    assert not list(tmp_path.iterdir())


def test_without_the_tools_for_it_the_program_says_what_is_missing(tmp_path: Path) -> None:
    done = run_tiny(PATH=str(tmp_path))
    assert done.returncode == 2
    assert not done.stdout
    assert "no device can be slowed here" in done.stderr
    if os.geteuid() == 0 and sys.platform == "linux":
        assert "losetup" in done.stderr
