"""What copies cost a model that computes beside them: a loop of matrix products alone and under a flood."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from device_copy_flood import CopierFlood
from device_copy_rates import MODES, Contenders, Mode, first_line
from device_copy_ways import label_of, open_way

from kvsluice.connector.copier import Copier
from kvsluice.kernels.device import Device
from kvsluice.kernels.movers import Mover
from kvsluice.kernels.operations import Direction
from kvsluice.kernels.ways import Way

__all__ = ["LEVEL", "MatmulPlan", "Products", "Slowdown", "measure_slowdowns"]

LEVEL: Final = Way("triton", 2)
"""Measured once more on streams that are no more urgent than the engine's: what it costs that the others are."""
_SPIN_CYCLES: Final = 20_000_000
_RAMP_S: Final = 0.01
"""A flood runs for so long before the products begin."""


@dataclass(frozen=True, slots=True)
class MatmulPlan:
    """How long is measured.

    Attributes:
        size: rows and columns of the matrices.
        sample_s: of products in a row.
        gate_s: the device waits for so long before the first, so that all of them are queued by then.
        min_rounds, max_rounds: between them, as many as the time allows.
    """

    size: int
    sample_s: float
    gate_s: float
    min_rounds: int
    max_rounds: int


@dataclass(slots=True)
class Slowdown:
    """One way's flood in one mode.

    Attributes:
        shares: round by round, time of the products under the flood over their time alone, less 1.
        gb_per_s: copied meanwhile, while products ran.
        late: rounds whose products were not all queued when the first began; they say more about the host.
    """

    name: str
    mode: Mode
    shares: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)
    late: int = 0
    failure: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.shares) if self.shares else None


@dataclass(frozen=True, slots=True)
class Run:
    """One sample: how long its products took, and whether the first began before all were queued."""

    elapsed_s: float
    late: bool


class Products:
    """bf16 products of random matrices on the current stream, timed by the device.

    Args:
        plan: see `MatmulPlan`.
        device: where; on the CPU a clock times them.
    """

    def __init__(self, plan: MatmulPlan, device: torch.device) -> None:
        self._plan = plan
        self._cuda = device.type == "cuda"
        generator = torch.Generator(device).manual_seed(5)
        self._left, self._right = (
            torch.randn(plan.size, plan.size, generator=generator, device=device).to(torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)
        self._count = 1
        self._cycles_per_s = 0.0
        if self._cuda:
            self._cycles_per_s = self._spin_rate()
        # The second time nothing is set up any more, and clocks have risen.
        for _ in range(2):
            once_s = self.run(lambda: None).elapsed_s / self._count
            self._count = max(2, round(plan.sample_s / once_s))

    @property
    def count(self) -> int:
        """Products in a sample."""
        return self._count

    @property
    def flop(self) -> float:
        """Of one product."""
        return 2.0 * self._plan.size**3

    def run(self, on_begin: Callable[[], None]) -> Run:
        """Queue a sample's products and wait for them; `on_begin` is called when the first begins."""
        if not self._cuda:
            started_s = time.perf_counter()
            on_begin()
            self._multiply()
            return Run(time.perf_counter() - started_s, late=False)
        begin, end = _timed_event(), _timed_event()
        _spin(int(self._plan.gate_s * self._cycles_per_s))
        begin.record()
        self._multiply()
        end.record()
        late = _has_passed(begin)
        begin.synchronize()
        on_begin()
        end.synchronize()
        return Run(_seconds(begin, end), late=late)

    def _multiply(self) -> None:
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)

    def _spin_rate(self) -> float:
        """Cycles that `torch.cuda._sleep` spins in a second, at the highest clock that was seen."""
        rates: list[float] = []
        for _ in range(4):
            begin, end = _timed_event(), _timed_event()
            begin.record()
            _spin(_SPIN_CYCLES)
            end.record()
            end.synchronize()
            rates.append(_SPIN_CYCLES / _seconds(begin, end))
        return max(rates)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch gives no types


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call] # as above


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def _spin(cycles: int) -> None:
    """Keep the current stream busy on one multiprocessor; torch has no public name for it."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call] # noqa: SLF001


def measure_slowdowns(
    contenders: Contenders,
    level: Device,
    products: Products,
    plan: MatmulPlan,
    until_s: float,
    *,
    ramp_s: float = _RAMP_S,
) -> tuple[list[Slowdown], list[float]]:
    """Every way's flood in each mode, between two samples without one, in a new order each round.

    Args:
        contenders: opened.
        level: gives streams of the engine's priority.
        products: warmed up.
        plan: see `MatmulPlan`.
        until_s: as `time.perf_counter` counts: from then on, no more than the least number of rounds.

    Returns:
        The slowdowns, and TFLOP/s of the products alone, sample by sample.
    """
    floods, slowdowns = _floods(contenders, level)
    copiers = {name: Copier(device, movers["out"], movers["in"]) for name, (device, movers) in floods.items()}
    ready = contenders.device.compute_event()
    shuffle = random.Random(4)
    alone: list[float] = []
    try:
        rounds = 0
        while rounds < plan.min_rounds or (rounds < plan.max_rounds and time.perf_counter() < until_s):
            before_s = products.run(_nothing).elapsed_s
            for slowdown in shuffle.sample(slowdowns, len(slowdowns)):
                if slowdown.failure is not None:
                    continue
                copies = {each: contenders.copies[each] for each in MODES[slowdown.mode]}
                flood = CopierFlood(copiers[slowdown.name], copies, ready)
                try:
                    run, gb_per_s = _beside(flood, products, ramp_s)
                except Exception as error:  # noqa: BLE001 - the other ways go on
                    slowdown.failure = first_line(error)
                    continue
                after_s = products.run(_nothing).elapsed_s
                slowdown.shares.append(run.elapsed_s / ((before_s + after_s) / 2) - 1)
                slowdown.gb_per_s.append(gb_per_s)
                slowdown.late += run.late
                alone.append(products.count * products.flop / after_s / 1e12)
                before_s = after_s
            rounds += 1
    finally:
        for copier in copiers.values():
            copier.close(time.monotonic() + 5.0)
    return slowdowns, alone


def _floods(
    contenders: Contenders, level: Device
) -> tuple[dict[str, tuple[Device, Mapping[Direction, Mover]]], list[Slowdown]]:
    floods: dict[str, tuple[Device, Mapping[Direction, Mover]]] = {
        name: (contenders.device, movers) for name, movers in contenders.movers.items()
    }
    failures = {name: entry.failure for name, entry in contenders.entries.items()}
    name = f"{label_of(LEVEL)}, level"
    failures[name] = None
    try:
        floods[name] = (
            level,
            {
                each: open_way(contenders.pool.plan, LEVEL, each, level, contenders.staging[each])
                for each in ("out", "in")
            },
        )
    except Exception as error:  # noqa: BLE001 - a machine without Triton
        failures[name] = first_line(error)
    return floods, [Slowdown(name, mode, failure=failure) for name, failure in failures.items() for mode in MODES]


def _beside(flood: CopierFlood, products: Products, ramp_s: float) -> tuple[Run, float]:
    """A sample under the flood, and GB/s of the flood while the products ran."""
    seen: list[tuple[float, int]] = []

    def look() -> None:
        seen.append((time.perf_counter(), flood.num_bytes))

    flood.start()
    time.sleep(ramp_s)
    try:
        run = products.run(look)
        look()
    finally:
        flood.stop()
    (begin_s, begin_bytes), (end_s, end_bytes) = seen
    return run, (end_bytes - begin_bytes) / max(end_s - begin_s, 1e-9) / 1e9


def _nothing() -> None:
    """A sample alone."""
