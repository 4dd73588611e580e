"""The demo as a whole, at its tiny size: real engine processes, real tiers, a real kill."""

from __future__ import annotations

import re
from pathlib import Path

import demo
import pytest
from demo_engine import SIZES, distinct_chunks, expected_hit, make_prompts
from demo_process import EngineProcess, Served, StageError, StageResult, TierReport


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run_demo(tmp_path: Path, *more: str) -> int:
    return demo.main(["--size", "tiny", "--work-dir", str(tmp_path), *more])


def good_results() -> dict[str, StageResult]:
    """What the three engines report when all is well."""
    size = SIZES["tiny"]

    def served(run: str, tokens: tuple[int, ...] = (1, 2, 3)) -> list[Served]:
        return [
            Served(
                run=run,
                prompt=number,
                tokens=tokens,
                prompt_tokens=len(prompt),
                hit_tokens=0 if run == "cold" else expected_hit(size, len(prompt)),
                first_token_s=0.5,
            )
            for number, prompt in enumerate(make_prompts(size))
        ]

    chunks = (distinct_chunks(size), 4096)
    tier = TierReport(stored=chunks, loaded=chunks, dropped={"gate": 2}, failed={}, missed={}, gate=(False, 0.01))
    tiers = {name: tier.model_copy() for name in ("host", "fs", "obj")}
    return {
        "cold": StageResult({"cold": served("cold"), "host": served("host")}, dict(tiers)),
        "fs": StageResult({"fs": served("fs"), "control": served("control", (4, 5, 6))[:1]}, dict(tiers)),
        "obj": StageResult({"obj": served("obj"), "control": served("control", (4, 5, 6))[:1]}, dict(tiers)),
    }


def test_the_demo_gets_its_hits_from_every_tier_and_ends_with_identical_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "identical tokens: yes"
    assert any(re.search(r"killed process \d+", line) for line in lines)


def test_a_damaged_file_costs_the_hit_but_not_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path, "--break", "fs") == 1
    out = capsys.readouterr().out
    assert re.search(r"a hit is missing: \d of 6 chunks came from the fs tier \(1 checksum\)", out)
    assert out.splitlines()[-1] == "identical tokens: yes"


def test_a_deleted_object_costs_the_hit_but_not_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path, "--break", "obj") == 1
    out = capsys.readouterr().out
    assert re.search(r"a hit is missing: \d of 6 chunks came from the obj tier", out)
    assert out.splitlines()[-1] == "identical tokens: yes"


def test_nothing_is_wrong_with_results_as_they_must_be() -> None:
    assert demo.find_troubles(SIZES["tiny"], good_results()) == []


def test_different_tokens_are_named_with_prompt_and_tier() -> None:
    results = good_results()
    results["obj"].served["obj"][1].tokens = (1, 2, 9)
    assert demo.find_troubles(SIZES["tiny"], results) == [
        "tokens of prompt 2 differ: cold (1, 2, 3), from obj (1, 2, 9)"
    ]


@pytest.mark.parametrize("run", ["host", "fs", "obj"])
def test_a_prompt_that_hit_too_little_is_named(run: str) -> None:
    results = good_results()
    results["cold" if run == "host" else run].served[run][0].hit_tokens = 48
    assert demo.find_troubles(SIZES["tiny"], results) == [f"a hit is missing: prompt 1 took 48 of 64 tokens from {run}"]


def test_hits_that_came_from_another_tier_are_missing_hits() -> None:
    results = good_results()
    results["obj"].tiers["obj"].loaded = (1, 8192)
    (trouble,) = demo.find_troubles(SIZES["tiny"], results)
    assert trouble == "a hit is missing: 1 of 6 chunks came from the obj tier (none missed)"


@pytest.mark.parametrize("stage", ["fs", "obj"])
def test_a_control_that_gives_the_same_tokens_fails_the_demo(stage: str) -> None:
    results = good_results()
    results[stage].served["control"][0].tokens = (1, 2, 3)
    (trouble,) = demo.find_troubles(SIZES["tiny"], results)
    assert trouble.startswith("the comparison proves nothing")


def test_an_engine_process_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "fs"
    in_the_way.write_text("a file where the fs tier's folder has to be")
    assert run_demo(tmp_path) == 1
    out = capsys.readouterr().out
    assert "an engine process ended with 1" in out
    assert "Error" in out
    assert "identical tokens" not in out


def test_a_silent_engine_process_is_given_up(tmp_path: Path) -> None:
    spec = demo.Spec("tiny", "cold", str(tmp_path / "fs"), "bucket", "http://127.0.0.1:1", "prefix")
    with EngineProcess(spec, {}, tmp_path / "log") as process, pytest.raises(StageError, match="said nothing for 0"):
        process.run(0, lambda note, done: None)


def test_a_store_that_cannot_be_used_is_one_line_that_names_bucket_and_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo-secret")
    assert run_demo(tmp_path, "--endpoint-url", "http://127.0.0.1:1", "--bucket", "kv-cache") == 1
    shown = capsys.readouterr().out
    assert "bucket 'kv-cache' at http://127.0.0.1:1 cannot be reached" in shown
    assert "Traceback" not in shown
    assert "demo-secret" not in shown
