"""The device copy benchmark: what it holds against its targets, and one rehearsal of all that a GPU machine runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import device_copy_rates  # noqa: E402
from device_copy_flood import Moved, flood  # noqa: E402
from device_copy_matmul import Slowdown  # noqa: E402
from device_copy_pages import Pool, Shape, open_region, shape_of  # noqa: E402
from device_copy_rates import AUTO, MODES, Contenders, Entry, PageRates  # noqa: E402
from device_copy_report import Report, claims_of, page_lines, spread_of  # noqa: E402
from device_copy_ways import PLAIN, WAYS, label_of, open_way  # noqa: E402

from kvsluice.kernels.device import CpuDevice, Device, Event  # noqa: E402
from kvsluice.kernels.movers import Mover, OnTensor, Submission  # noqa: E402
from kvsluice.kernels.operations import ChunkCopy  # noqa: E402
from kvsluice.kernels.plan import CopyPlan  # noqa: E402
from kvsluice.kernels.ways import TORCH, Way  # noqa: E402

CPU = torch.device("cpu")
KIB = 1 << 10
SIZES = tuple(kib * KIB for kib in (4, 8, 16, 24, 32, 64, 256, 2048))

# ---- shapes and pages ------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", SIZES)
def test_a_chunk_has_16_to_32_mib_and_at_least_two_blocks_in_pages_of_that_size(page_bytes: int) -> None:
    shape = shape_of(page_bytes, 32 << 20)
    assert 16 << 20 <= shape.chunk_bytes <= 32 << 20
    assert shape.num_blocks >= 2
    assert shape.layers <= 32
    assert shape.pages * page_bytes == shape.chunk_bytes


def test_no_block_is_in_two_chunks_and_a_payload_is_what_the_blocks_hold() -> None:
    pool = Pool(Shape(64, 2, 3), 4, CPU)
    assert sorted(block for ids in pool.block_ids for block in ids) == list(range(12))
    payload = pool.payload(1).view(torch.int16).view(2, 2, 3, 32)
    for layer, tensor in enumerate(pool.tensors):
        for place, block in enumerate(pool.block_ids[1]):
            assert torch.equal(payload[layer, :, place], tensor[:, block])
    pool.blank(1)
    assert not pool.payload(1).any()
    assert pool.payload(0).any()


# ---- floods and proofs -----------------------------------------------------------------------


def contenders() -> Contenders:
    pool = Pool(Shape(64, 2, 2), 4, CPU)
    staging = {"out": torch.empty(1 << 16, dtype=torch.uint8), "in": torch.empty(1 << 16, dtype=torch.uint8)}
    return Contenders(pool, open_region(4, 4096, CPU), CpuDevice(), staging)


def test_a_flood_counts_what_it_moved() -> None:
    made = contenders()
    mover = open_way(made.pool.plan, Way("batched"), "out", made.device, made.staging["out"])
    moved = flood({"out": mover}, {"out": made.copies["out"]}, 0.01)
    assert moved.chunks > 1
    assert moved.num_bytes == moved.chunks * made.pool.plan.num_bytes
    assert moved.wall_s >= 0.01
    assert moved.device_s is not None
    assert 0 < moved.device_s <= moved.wall_s
    assert moved.call_s is not None
    assert moved.call_s <= moved.wall_s


@dataclass
class Elsewhere:
    """Moves the right number of bytes, of other blocks."""

    mover: Mover
    name: str = "elsewhere"
    max_chunks: int = 32

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        return self.mover.submit(ready, [ChunkCopy(copy.block_ids[::-1], copy.host) for copy in copies], on_tensor)


@pytest.mark.parametrize("wrong", ["out", "in"])
def test_a_way_that_moves_wrong_bytes_is_told_of(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(plan: CopyPlan, way: Way, direction: str, device: Device, staging: torch.Tensor) -> Mover:
        mover = open_way(plan, way, direction, device, staging)
        return Elsewhere(mover) if (way, direction) == (TORCH, wrong) else mover

    made = contenders()
    monkeypatch.setattr(device_copy_rates, "open_way", opened)
    monkeypatch.setattr(device_copy_rates, "WAYS", (Way("batched"), TORCH))
    made.open_all(1 << 20)
    assert {name: entry.failure for name, entry in made.entries.items()} == dict.fromkeys(made.entries)
    told = {name: entry.wrong_bytes for name, entry in made.entries.items() if entry.wrong_bytes is not None}
    assert list(told) == ["torch"]
    assert told["torch"].startswith(f"{wrong}: ")


# ---- targets ---------------------------------------------------------------------------------


def page(page_bytes: int, share: float, *, wrong_bytes: str | None = None, rounds: int = 3) -> PageRates:
    """Rates at which `auto` has this share of the plain copy in every mode."""
    entries = {name: Entry(name, {"out": 0, "in": 0}) for name in (label_of(PLAIN), AUTO)}
    for number in range(rounds):
        for mode in MODES:
            # The plain copy differs from round to round; shares are taken within one.
            plain = Moved(10**9 * (number + 1), 1, 1.0)
            entries[label_of(PLAIN)].moved[mode].append(plain)
            entries[AUTO].moved[mode].append(Moved(int(share * plain.num_bytes), 1, 1.0))
    entries[AUTO].wrong_bytes = wrong_bytes
    return PageRates(shape_of(page_bytes, 32 << 20), entries, ("stores by batched",), 0.1, rounds)


def report(*pages: PageRates, slowdown: float | None = 0.01) -> Report:
    made = Report({}, 16 * KIB, pages=list(pages))
    if slowdown is not None:
        made.slowdowns = [Slowdown(AUTO, mode, [slowdown]) for mode in MODES]
    return made


def missed(made: Report, sizes: Sequence[int], parts: Sequence[str] = ("rates", "matmul")) -> list[str]:
    return [claim.says for claim in claims_of(made, sizes, parts) if not claim.ok]


def test_nine_tenths_of_the_plain_copy_are_asked_of_large_pages_and_three_quarters_of_small_ones() -> None:
    sizes = (4 * KIB, 8 * KIB, 16 * KIB, 2048 * KIB)
    assert missed(report(*(page(size, 0.91) for size in sizes)), sizes) == []
    assert missed(report(*(page(size, 0.76) for size in sizes)), sizes) == [
        f"{size} pages, {mode}, share of plain" for size in ("16 KiB", "2 MiB") for mode in MODES
    ]
    assert missed(report(page(4 * KIB, 0.74)), (4 * KIB,)) == [f"4 KiB pages, {mode}, share of plain" for mode in MODES]


def test_two_percent_of_slowdown_are_too_many() -> None:
    assert missed(report(slowdown=0.0199), (), ("matmul",)) == []
    assert missed(report(slowdown=0.02), (), ("matmul",)) == [
        f"16 KiB pages, {mode}, slowdown of matmul" for mode in MODES
    ]


def test_what_was_asked_for_and_not_measured_is_a_target_missed() -> None:
    made = report(page(4 * KIB, 0.9, rounds=0), slowdown=None)
    every = list(claims_of(made, (4 * KIB, 16 * KIB), ("rates", "matmul")))
    assert not any(claim.ok for claim in every)
    assert len(every) == 3 + 3 + 1 + 3
    assert every[0].as_text(judged=True) == "MISSED 4 KiB pages, out, share of plain: not measured, at least 0.75"


def test_wrong_bytes_miss_whatever_the_rates_are() -> None:
    assert missed(report(page(4 * KIB, 1.0, wrong_bytes="out: 7 bytes")), (4 * KIB,)) == ["ways with wrong bytes"]


def test_a_rehearsal_is_given_no_verdict() -> None:
    first = next(claims_of(report(page(4 * KIB, 0.1)), (4 * KIB,), ("rates",)))
    assert first.as_text(judged=False) == "-      4 KiB pages, out, share of plain: 0.1, at least 0.75"
    assert first.as_text(judged=True).startswith("MISSED ")


def test_a_way_without_figures_says_why_in_its_line() -> None:
    made = page(4 * KIB, 0.9)
    made.entries[AUTO].failure = "DeviceCopyError: no way"
    made.entries[AUTO].moved = {mode: [] for mode in MODES}
    assert [line for line in page_lines(made) if line.startswith("auto")][-1].endswith("| DeviceCopyError: no way")
    assert spread_of([]) is None


# ---- everything ------------------------------------------------------------------------------


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "test_gpu.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )


def test_a_rehearsal_runs_every_test_and_every_part_of_the_benchmark(tmp_path: Path) -> None:
    done = script("--rehearse", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    outcomes = [json.loads(line) for line in (tmp_path / "test-gpu-outcomes.jsonl").read_text().splitlines()]
    assert {one["file"] for one in outcomes} == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len(outcomes) > 100
    not_run = [one["test"] for one in outcomes if one["outcome"] == "skipped"]
    assert not_run == ["test_a_copy_across_a_border_between_registrations"]
    found = json.loads((tmp_path / "device_copy.json").read_text())
    names = [label_of(PLAIN), *map(label_of, WAYS), AUTO, "auto, copier"]
    for one in found["pages"]:
        assert [way["name"] for way in one["ways"]] == names
        assert [way["failure"] for way in one["ways"]] == [None] * len(names)
        assert [way["wrong_bytes"] for way in one["ways"]] == [None] * len(names)
        assert all(len(moved) == one["rounds"] for way in one["ways"] for moved in way["moved"].values())
    assert [each["failure"] for each in found["matmul"]["beside"]] == [None] * 3 * 8
    assert len(found["calls"]) == 8
    assert found["launches"]["alone_us"] > 0
    assert not found["judged"]
    assert not [note for note in found["notes"] if note.startswith("FAILED")]
    assert "MISSED" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_line_and_exits_2(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("no CUDA device: ")
    assert done.stderr == ""


def test_the_benchmark_alone_refuses_a_machine_without_a_device_and_parts_that_it_does_not_have() -> None:
    for arguments, said in (
        (("--parts", "rates,colour"), "--parts are rates, calls, matmul, got colour"),
        (("--help",), ""),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "device_copy.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == (2 if said else 0)
        assert said in done.stderr
