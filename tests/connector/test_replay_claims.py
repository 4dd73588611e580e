"""What the gates promise, in small; that a promise can be seen to be broken; and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import as_lines, write

from kvsluice.connector.calibrate import suggest
from kvsluice.connector.cli import main
from kvsluice.connector.replay import suite
from kvsluice.connector.replay.claims import TIER, check_healthy, check_rows, healthy_cases
from kvsluice.connector.replay.device import DeviceSpec
from kvsluice.connector.replay.rows import ROW_NAMES
from kvsluice.connector.replay.steady import make_steady, measure_device
from kvsluice.connector.replay.suite import Verdict, check_all
from kvsluice.connector.replay.trace import make_trace
from kvsluice.tiers.errors import ConfigError

CHUNK = 4 << 20


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """Conversations of short turns, so that the largest prompts leave the p99 below the loads' deadline."""
    requests = make_trace(seed=1, num_requests=2000, requests_per_s=20, mean_blocks=6.0, mean_turns=3.0)
    told: list[str] = []
    found = check_all(
        requests,
        jobs=1,
        row_names=("one queue", "loads first", "drop", "ours"),
        healthy_requests=100,
        num_nodes=20,
        many_requests=200,
        on_progress=told.append,
    )
    assert len(told) >= 1 + 4 + len(healthy_cases()) + 2
    return found


def test_every_promise_holds_in_small(verdict):
    broken = [f"{claim.name}: {claim.promise}: {claim.found}" for claim in verdict.claims if not claim.holds]
    assert broken == []
    names = {claim.name.split(",")[0] for claim in verdict.claims}
    assert names == {"load", "a", "b", "c", "d", "e", "f", "g"}


@pytest.mark.parametrize("name", ["load", "a", "a, each", "a, chunks", "a, without", "b", "c", "d"])
def test_a_promise_that_is_broken_is_seen(verdict, name):
    rows = {row.row: row for row in verdict.rows}
    ours, drop, queue, first = rows["ours"], rows["drop"], rows["one queue"], rows["loads first"]
    tier = ours.tiers[TIER]
    match name:
        case "load":
            ours = replace(ours, tiers={TIER: replace(tier, load_share=0.1)})
        case "a":
            ours = replace(ours, load=replace(ours.load, p99_s=2.1 * ours.alone.p99_s))
            queue = replace(queue, load=replace(queue.load, p99_s=20 * ours.load.p99_s))
        case "a, chunks":
            ours = replace(ours, load_chunk=replace(ours.load_chunk, p99_s=2.1 * ours.alone_chunk.p99_s))
        case "a, each":
            ours = replace(ours, each_slowdown=replace(ours.each_slowdown, p99_s=2.01))
        case "a, without":
            first = replace(first, each_slowdown=replace(first.each_slowdown, p99_s=3.99))
        case "b":
            ours = replace(ours, tiers={TIER: replace(tier, goodput_share=0.8)})
        case "c":
            drop = replace(drop, tier_hits=ours.tier_hits)
        case "d":
            queue = replace(queue, slowdown_p99=9.9)
    broken = [claim.name for claim in check_rows([ours, drop, queue, first]) if not claim.holds]
    # One claim of three figures.
    assert broken == ["a" if name in ("a, each", "a, chunks") else name]


def test_marks_that_are_too_low_for_a_tier_are_seen_to_drop():
    case = next(case for case in healthy_cases() if "500 MB/s" in case.name)
    strict = {**case.tier, "backpressure": {"high_water_s": 1e-4, "low_water_s": 1e-5}}
    assert check_healthy(case, num_requests=60).holds
    assert not check_healthy(replace(case, tier=strict), num_requests=60).holds


def test_a_replay_of_many_nodes_that_takes_too_long_is_seen(verdict):
    ticks = iter([0.0, 181.0])
    scene = replace(verdict.scene, gpu_chunks=0)
    claim = suite._check_many_nodes(  # noqa: SLF001 - the one claim on real time
        scene, make_trace(seed=1, num_requests=20, requests_per_s=5), 2, 1, lambda: next(ticks)
    )
    assert not claim.holds


def test_steady_traffic_keeps_its_pace_and_repeats_earlier_prompts():
    made = make_steady(seed=1, num_requests=200, requests_per_s=10, chunks=4, hit_share=0.4)
    assert made == make_steady(seed=1, num_requests=200, requests_per_s=10, chunks=4, hit_share=0.4)
    assert [request.time_s for request in made] == sorted(request.time_s for request in made)
    assert made[-1].time_s == pytest.approx(20.0, abs=0.1)
    seen: set[bytes] = set()
    hits = 0
    for request in made:
        hits += seen.issuperset(request.keys)
        seen.update(request.keys)
    assert hits == pytest.approx(80, abs=9)


def test_a_modelled_device_is_measured_as_what_it_is():
    found = suggest(measure_device(DeviceSpec(1e9, 1e-3), CHUNK), CHUNK)
    assert found.fixed_cost_s == pytest.approx(1e-3)
    assert found.low_water_s == pytest.approx(2 * (1 << 20) / 1e9, rel=0.06)
    assert found.high_water_s == pytest.approx(4 * (1 << 20) / 1e9, rel=0.06)


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write(tmp_path / "trace.jsonl", *as_lines(make_trace(seed=1, num_requests=60, requests_per_s=10))))


def test_the_command_prints_a_line_per_row(trace, capsys):
    assert main(["replay", trace, "--bandwidth", "200MB", "--rows", "drop,ours", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert "drop" in out
    assert "ours" in out
    assert "60 requests" in out
    assert "row 'ours' done" in err


def test_the_command_writes_one_document_and_a_picture(trace, tmp_path, capsys):
    picture = tmp_path / "rows.png"
    options = ["--nodes", "2", "--shared", "--spread", "affinity", "--slow", "1:2:0.5", "--capacity", "1GB"]
    assert main(["replay", trace, *options, "--rows", "ours", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scene"]["num_nodes"] == 2
    assert found["scene"]["tiers"]["tier"]["device"]["slow"] == [{"start_s": 1.0, "end_s": 2.0, "factor": 0.5}]
    assert [row["row"] for row in found["rows"]] == ["ours"]
    assert found["knobs"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_finds_the_knobs_it_is_asked_for(tmp_path, capsys):
    made = make_trace(seed=1, num_requests=300, requests_per_s=20)
    path = str(write(tmp_path / "trace.jsonl", *as_lines(made)))
    assert main(["replay", path, "--load-share", "0.2", "--offered", "1.5", "--rows", "ours", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["knobs"]["gpu_chunks"] == found["scene"]["gpu_chunks"]
    assert found["knobs"]["speed_up"] == found["speed_up"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rows", "best"], "'best'"),
        (["--spread", "random"], "'random'"),
        (["--slow", "1-2"], "'1-2'"),
        (["--slow", "30:inf:0"], "from 30.0 s to inf s never ends"),
        (["--slow", "30:nan:0"], "to nan s"),
        (["--slow", "30:60:inf"], "factor inf"),
        (["--bandwidth", "fast"], "--bandwidth 'fast'"),
        (["--nodes", "0"], "num_nodes 0"),
        (["--load-share", "0.3", "--speed", "2"], "--speed"),
        (["--claims", "--nodes", "2", "--spread", "affinity"], "leave --nodes, --spread out"),
    ],
)
def test_a_wrong_option_is_refused_with_exit_code_2(trace, capsys, options, named):
    assert main(["replay", trace, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(trace, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    for path in (tmp_path / "nowhere" / "rows.png", file / "rows.png", tmp_path):
        # A row that there is not would be refused next: the picture is looked at first.
        assert main(["replay", trace, "--rows", "best", "--plot", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"cannot be written to '{path}'" in err
    assert main(["replay", trace, "--rows", "best", "--plot", str(file)]) == 2
    assert "'best'" in capsys.readouterr().err
    assert file.read_bytes() == b"x"
    assert main(["replay", trace, "--rows", "best", "--plot", str(tmp_path / "rows.png")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trace.jsonl"]


def test_a_malformed_trace_is_refused_with_exit_code_2(tmp_path, capsys):
    path = write(tmp_path / "bad.jsonl", "{}")
    assert main(["replay", str(path)]) == 2
    assert "line 1: 'timestamp' is missing" in capsys.readouterr().err


def test_a_claim_that_fails_is_exit_code_1_and_says_so(trace, capsys, monkeypatch, verdict):
    from kvsluice.connector.cli import replay as command

    failed = replace(verdict, claims=(replace(verdict.claims[0], holds=False), *verdict.claims[1:]))
    monkeypatch.setattr(command, "check_all", lambda requests, **options: failed)
    assert main(["replay", trace, "--claims"]) == 1
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.setattr(command, "check_all", lambda requests, **options: verdict)
    assert main(["replay", trace, "--claims", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(claim["holds"] for claim in found["claims"])


def test_a_trace_without_hits_cannot_be_claimed_on():
    with pytest.raises(ConfigError, match="hits"):
        check_all(make_trace(seed=1, num_requests=20, requests_per_s=5, mean_turns=1.0), jobs=1)


def test_the_rows_of_the_claims_are_rows():
    assert {"one queue", "loads first", "drop", "ours"} <= set(ROW_NAMES)
