"""The benchmark of host copies: what it counts, what it claims, and one tiny run of everything it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import cpu_copy  # noqa: E402
from cpu_copy import METHODS, Cell, Share, main  # noqa: E402

WAYS = [f"{direction} {method}" for direction in ("gather", "scatter") for method in METHODS]


def cell(memcpy_s: list[float], auto_s: list[float], page_bytes: int = 16 << 10) -> Cell:
    taken_s = dict.fromkeys(WAYS, memcpy_s) | {"gather auto": auto_s}
    return Cell(4 << 20, 32, page_bytes, memcpy_s, taken_s)


def test_a_share_is_taken_within_each_round_and_beside_it_stands_that_of_the_fastest() -> None:
    slow_machine_in_the_third = cell([1.0, 1.0, 10.0, 0.5, 1.0], [2.0, 1.25, 12.5, 1.0, 1.0])
    assert slow_machine_in_the_third.share("gather auto") == Share(median=0.8, low=0.5, high=0.8, best=0.5)


@pytest.mark.parametrize(("auto_s", "holds"), [(1.42, True), (1.44, False)])
def test_the_claim_is_about_what_the_connector_uses_and_a_miss_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], auto_s: float, holds: bool
) -> None:
    monkeypatch.setattr(cpu_copy, "measure", lambda *_args, **_kwargs: cell([1.0] * 5, [auto_s] * 5))
    assert main(["--layers", "32", "--chunk-mib", "4"]) == 0
    assert main(["--layers", "32", "--chunk-mib", "4", "--claims"]) == (0 if holds else 1)
    lines = capsys.readouterr().out.splitlines()
    share = f"{1 / auto_s:.2f}"
    says = f"chunks of 4 MiB, 32 layers, pages of 16 KiB, gather: share of memcpy {share}, at least 0.70"
    assert f"{'ok    ' if holds else 'MISSED'}  {says}" in lines
    assert any(line.startswith("ok      chunks of 4 MiB") and "scatter" in line for line in lines)


def test_pages_below_the_claim_are_measured_and_claim_nothing() -> None:
    assert list(cell([1.0], [9.0], page_bytes=4 << 10).claims()) == []


@pytest.mark.parametrize("order", ["random", "runs"])
def test_it_runs_tiny_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str], order: str) -> None:
    assert main(["--tiny", "--order", order]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].split() == Cell.heading().split()
    assert len(table) == 3 + 4
    assert main(["--tiny", "--json", "--order", order, "--layers", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["page_bytes"], row["layers"], row["order"]) for row in rows] == [
        (page_bytes, 2, order) for page_bytes in (4 << 10, 16 << 10)
    ]
    for row in rows:
        assert row["rounds"] == 1
        assert list(row["shares"]) == [f"{way} {method}" for method in METHODS for way in ("gather", "scatter")]
        assert all(share["median"] > 0 for share in row["shares"].values())
