"""What Triton compiles for an H100 moves 16 bytes a thread, all of them at once, and is compiled once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvsluice.kernels.triton_pages import NUM_WARPS

if TYPE_CHECKING:  # it runs as a program of its own
    from machine_code import MachineCode, Report

PAGE_BYTES = {"4 KiB": 4 << 10, "16 KiB": 16 << 10, "24 KiB": 24 << 10, "no power of two": 656 * 64, "2 MiB": 2 << 20}
THREADS = NUM_WARPS * 32
IN_FLIGHT_BYTES = 64 << 10
SM_REGISTERS = 65536
SM_SHARED_BYTES = 227 << 10
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, SUPPORT / "machine_code.py", *map(str, PAGE_BYTES.values())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made: Report = json.loads(done.stdout)
    return made


@pytest.fixture(params=[(size, way) for size in PAGE_BYTES for way in ("gather", "scatter")], ids=" ".join)
def code(report: Report, request: pytest.FixtureRequest) -> MachineCode:
    size, way = request.param
    (found,) = (
        code
        for code in report["codes"]
        if code["page_bytes"] == PAGE_BYTES[size] and code["into_pages"] == (way == "scatter")
    )
    return found


def named(code: MachineCode, instruction: str) -> list[int]:
    """The places of an instruction in the program."""
    return [place for place, text in enumerate(code["sass"]) if re.search(rf"\b{instruction}\b", text)]


def test_pages_are_read_and_written_16_bytes_a_thread(code: MachineCode) -> None:
    accesses = re.findall(r"\b(ld|st)\.global\S*?((?:\.v\d)?\.[bu]\d+)", code["ptx"])
    assert {width for way, width in accesses if way == "st"} <= {".v2.b64", ".v4.b32"}
    wide = [way for way, width in accesses if width in (".v2.b64", ".v4.b32")]
    assert wide.count("ld") == wide.count("st") == IN_FLIGHT_BYTES // (16 * THREADS)
    assert len(named(code, r"LDG\.E\.128")) == len(named(code, r"STG\.E\.128")) == wide.count("st")
    assert len(named(code, r"STG\.\S+")) == wide.count("st")


def test_a_program_reads_all_that_it_has_in_flight_before_it_writes(code: MachineCode) -> None:
    assert max(named(code, r"LDG\.\S+")) < min(named(code, r"STG\.\S+"))


def test_a_thread_works_out_one_address_for_all_that_it_moves(code: MachineCode) -> None:
    # A block id, and the four numbers of a row.
    assert len(named(code, r"LDG\.E\.64")) == 5


def test_a_program_fits_on_a_multiprocessor_and_spills_nothing(code: MachineCode) -> None:
    assert code["spilled_bytes"] == 0
    assert code["registers"] * THREADS <= SM_REGISTERS
    assert code["shared_bytes"] <= SM_SHARED_BYTES


def test_warps_do_not_wait_for_each_other(code: MachineCode) -> None:
    assert not named(code, r"BAR\.\S+")


def test_no_launch_compiles_what_was_not_compiled_before(report: Report) -> None:
    assert report["compiled_after_launches"] == report["compiled"]


def test_page_sizes_share_their_kernels(report: Report) -> None:
    # Both directions, for runs that tiles fill and for runs that they do not.
    assert report["compiled"] == 4


def test_no_number_that_a_kernel_is_launched_with_is_compiled_into_it(report: Report) -> None:
    assert report["compiled_for_any_int"] == 1


def test_triton_is_imported_by_the_one_who_needs_it() -> None:
    program = "import sys; import kvsluice.kernels.triton_pages; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
