"""Copies between pages on a GPU and pinned host memory, beside a plain copy of as many bytes.

    python benchmarks/device_copy.py [--claims] [--json FILE] [--pages 4,16,2048] [--parts rates,calls,matmul]
    python benchmarks/device_copy.py --device cpu --tiny        a rehearsal: every line runs, nothing is measured

rates   Chunks of about 32 MiB, K and V of up to 32 layers, blocks in random order, out of the pages, into them and
        both at once, for pages of 4 KiB to 2 MiB. Each way, what the connector chooses by itself (`auto`) and the
        plain copy (`plain`: one contiguous run on the device, through the same mover and slots) take turns within a
        round; shares are taken within the round. One thread calls the movers with two submissions under way in each
        direction and does nothing else, so the device is measured and not Python's threads; `auto, copier` is the
        same through the connector's copier thread. Times are of the wall clock, from the first call to the last end;
        the JSON has those between device events as well.
calls   What the engine's thread pays: `compute_event` and `Copier.put`, a rank worker's `submit` and `collect`, and
        what a busy copier does to a thread that launches small kernels.
matmul  bf16 products of 8192 x 8192 on the engine's stream beside a flood through the copier, between two samples
        without one. The connector's streams are more urgent than the engine's; those of `level` are not. Products are
        queued behind a gate, so that no launch is late.

SMs are what is launched: a kernel's program instances, each of which is on one multiprocessor; 0 where the copy
engines do all; `all` where torch decides. Nobody counted them on the chip: the slowdown of the products is the check.
With --claims it exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

if find_spec("torch") is None:
    print(
        f"{sys.executable} has no torch: name a Python that has it, make bench-device-copy PYTHON=...", file=sys.stderr
    )
    raise SystemExit(2)

import torch
from device_copy_engine import EnginePlan, measure_calls, measure_launches
from device_copy_facts import clock_mhz, device_named, facts_of, no_device_line
from device_copy_matmul import MatmulPlan, Products, measure_slowdowns
from device_copy_pages import Pool, Shape, open_region, shape_of
from device_copy_rates import Contenders, RatesPlan, first_line, measure_page
from device_copy_report import Report, call_lines, claims_of, page_lines, rate_head, slowdown_lines
from device_copy_ways import PlainStreams

from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels.device import device_for
from kvsluice.kernels.gpu import gpu_facts
from kvsluice.kernels.operations import Direction

PARTS: Final = ("rates", "calls", "matmul")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and how long each part may take.

    Attributes:
        chunks: of a pool; half of them go out, half in.
        rates_s, matmul_s: after so long only the least number of rounds is made.
        matmul_page_bytes: the smallest that has the full target.
    """

    page_sizes: tuple[int, ...]
    chunk_bytes: int
    chunks: int
    rates: RatesPlan
    rates_s: float
    engine: EnginePlan
    matmul: MatmulPlan
    matmul_s: float
    matmul_page_bytes: int


FULL: Final = Plan(
    page_sizes=tuple(kib << 10 for kib in (4, 8, 16, 24, 32, 64, 256, 2048)),
    chunk_bytes=32 << 20,
    chunks=24,
    rates=RatesPlan(sample_s=0.03, min_rounds=3, max_rounds=7, staging_bytes=64 << 20),
    rates_s=55.0,
    engine=EnginePlan(
        calls=300,
        put_every_s=0.002,
        steps=200,
        step_every_s=0.004,
        step_page_bytes=16 << 10,
        step_layers=8,
        step_blocks=8,
        launch_rounds=10,
    ),
    matmul=MatmulPlan(size=8192, sample_s=0.07, gate_s=0.03, min_rounds=3, max_rounds=6),
    matmul_s=25.0,
    matmul_page_bytes=16 << 10,
)
TINY: Final = Plan(
    page_sizes=(4 << 10, 8 << 10),
    chunk_bytes=32 << 10,
    chunks=4,
    rates=RatesPlan(sample_s=0.0, min_rounds=2, max_rounds=2, staging_bytes=512 << 10),
    rates_s=0.0,
    engine=EnginePlan(
        calls=4,
        put_every_s=0.0,
        steps=6,
        step_every_s=0.0,
        step_page_bytes=512,
        step_layers=2,
        step_blocks=2,
        launch_rounds=1,
    ),
    matmul=MatmulPlan(size=32, sample_s=0.0, gate_s=0.0, min_rounds=1, max_rounds=1),
    matmul_s=0.0,
    matmul_page_bytes=4 << 10,
)


class _Bench:
    """One run: memory, streams, and what was found so far.

    Args:
        plan: how much is measured.
        where: the device.
        parts: of `PARTS`.
        show: gets every line of the tables as soon as it is known.
    """

    def __init__(self, plan: Plan, where: torch.device, parts: Sequence[str], show: Callable[[str], None]) -> None:
        self._plan = plan
        self._where = where
        self._parts = parts
        self._show = show
        # One for all: it makes each of its streams once, so that no two ways wait for each other.
        self._device = device_for(where)
        self._level = PlainStreams(self._device)
        directions: tuple[Direction, ...] = ("out", "in")
        self._staging = {
            each: torch.empty(plan.rates.staging_bytes // 2, dtype=torch.uint8, device=where) for each in directions
        }
        self._kept: Contenders | None = None
        self._products: Products | None = None
        self.report = Report(facts_of(where), matmul_page_bytes=plan.matmul_page_bytes)

    def run(self) -> None:
        """Measure everything; a part that fails says so in the report's notes, and the others go on."""
        if self._where.type == "cpu":
            self._note("a rehearsal on the CPU: no figure below means anything")
        shapes = [shape_of(page_bytes, self._plan.chunk_bytes) for page_bytes in self._plan.page_sizes]
        payload_bytes = max(shape.chunk_bytes for shape in shapes)
        started_s = time.perf_counter()
        region = open_region(self._plan.chunks, payload_bytes, self._where)
        took_s = time.perf_counter() - started_s
        pinned = "registered" if region.pinned else f"NOT REGISTERED: {region.refused}"
        slots = f"{region.num_slots} slots of {region.slot_bytes} bytes on NUMA node {region.numa_node}"
        self._note(f"host memory: {slots}, {pinned}; ready after {took_s:.2f} s")
        if "matmul" in self._parts:
            # First of all: the products bring the clocks up, and this part must not find them cold later.
            self._guarded("matmul", self._warm_up)
        if "rates" in self._parts:
            self._show_all(rate_head())
            page_s = self._plan.rates_s / len(shapes)
            for shape in shapes:
                self._guarded(f"{shape.page_bytes >> 10} KiB pages", partial(self._page, shape, region, page_s))
        if "calls" in self._parts:
            self._guarded("calls", partial(self._calls, region))
            self._guarded("steps", self._steps)
            self._show_all(call_lines(self.report))
        if "matmul" in self._parts:
            self._guarded("matmul", partial(self._matmul, region))
            self._show_all(slowdown_lines(self.report))
        region.close()

    def _guarded(self, what: str, part: Callable[[], None]) -> None:
        gc.collect()
        gc.disable()
        try:
            part()
        except Exception as error:  # noqa: BLE001 - as many figures as can be had
            self._note(f"FAILED {what}: {first_line(error)}")
        finally:
            gc.enable()

    def _note(self, line: str) -> None:
        self.report.notes.append(line)
        self._show(line)

    def _show_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._show(line)

    def _warm_up(self) -> None:
        self._products = Products(self._plan.matmul, self._where)

    def _contenders(self, shape: Shape, region: PinnedRegion) -> Contenders:
        pool = Pool(shape, self._plan.chunks, self._where)
        contenders = Contenders(pool, region, self._device, self._staging)
        contenders.open_all(self._plan.rates.staging_bytes)
        return contenders

    def _page(self, shape: Shape, region: PinnedRegion, page_s: float) -> None:
        until_s = time.perf_counter() + page_s
        contenders = self._contenders(shape, region)
        page = measure_page(contenders, self._plan.rates, until_s)
        self.report.pages.append(page)
        self._show_all(page_lines(page))
        if shape.page_bytes == self._plan.matmul_page_bytes:
            self._kept = contenders
        if self._where.type == "cuda" and len(self.report.pages) == 1:
            # An idle link is trained down; this one has just been busy.
            gpu = gpu_facts(self._where)
            self._note(f"link after the first pages: generation {gpu.pcie_generation}, {gpu.pcie_width} lanes")

    def _kept_contenders(self, region: PinnedRegion) -> Contenders:
        if self._kept is None:
            shape = shape_of(self._plan.matmul_page_bytes, self._plan.chunk_bytes)
            self._kept = self._contenders(shape, region)
        return self._kept

    def _calls(self, region: PinnedRegion) -> None:
        contenders = self._kept_contenders(region)
        self.report.calls += measure_calls(contenders, self._plan.engine)
        self.report.launches = measure_launches(contenders, self._plan.engine)

    def _steps(self) -> None:
        if find_spec("xxhash") is None:
            self._note("steps of a rank worker: not measured, xxhash is not installed")
            return
        from device_copy_steps import measure_steps

        self.report.calls += measure_steps(self._where, self._plan.engine)

    def _matmul(self, region: PinnedRegion) -> None:
        if self._products is None:
            return
        contenders, until_s = self._kept_contenders(region), time.perf_counter() + self._plan.matmul_s
        found = measure_slowdowns(contenders, self._level, self._products, self._plan.matmul, until_s)
        self.report.slowdowns, self.report.alone_tflops = found
        if self._where.type == "cuda":
            self._note(f"SM clock after the products: {clock_mhz(self._where)} MHz")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether the targets were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small and short: only shows that it runs; judges nothing")
    parser.add_argument("--claims", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--pages", metavar="KIB,KIB", help="page sizes instead of 4,8,16,24,32,64,256,2048")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure; %(default)s by default")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts are {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.device == "cuda" and (line := no_device_line()) is not None:
        print(line, file=sys.stderr)
        return 2
    if options.device == "cpu":
        # Read where a kernel is defined: before Triton is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    plan = TINY if options.tiny or options.device == "cpu" else FULL
    if options.pages:
        plan = replace(plan, page_sizes=tuple(int(kib) << 10 for kib in options.pages.split(",")))
    bench = _Bench(plan, device_named(options.device), parts, partial(print, flush=True))
    judged = options.device == "cuda" and not options.tiny
    try:
        bench.run()
    finally:
        claims = list(claims_of(bench.report, plan.page_sizes, parts))
        if options.json is not None:
            document = bench.report.as_json() | {"judged": judged, "claims": [claim.as_json() for claim in claims]}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1))
    for claim in claims:
        print(claim.as_text(judged=judged))
    return 1 if options.claims and judged and not all(claim.ok for claim in claims) else 0


if __name__ == "__main__":
    raise SystemExit(main())
