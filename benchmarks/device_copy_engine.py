"""What the engine's own thread pays: for handing chunks to a copier, for a step's orders, and beside a busy copier."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final

import torch
from device_copy_flood import PATIENCE_S, ChunkTask, CopierFlood
from device_copy_rates import AUTO, Contenders

from kvsluice.connector.copier import Copier

__all__ = ["CallTimes", "EnginePlan", "LaunchTimes", "measure_calls", "measure_launches", "pause_until", "times_of"]

STORES_PER_STEP: Final = 16
LOADS_PER_STEP: Final = 4
_LAUNCHES: Final = 200
_WAITING: Final = 64
"""Chunks that were put by hand may be under way at once."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How long is measured.

    Attributes:
        calls: of each kind.
        put_every_s, step_every_s: from one call to the next.
        steps: of an engine with a rank worker.
        step_page_bytes, step_layers, step_blocks: its small chunks.
        launch_rounds: of small kernels, each alone and beside a flood.
    """

    calls: int
    put_every_s: float
    steps: int
    step_every_s: float
    step_page_bytes: int
    step_layers: int
    step_blocks: int
    launch_rounds: int


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long one kind of call held the engine's thread."""

    call: str
    beside: str
    calls: int
    p50_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Microseconds that a small kernel costs the thread that launches it, alone and beside a flood both ways."""

    alone_us: float
    beside_us: float


def times_of(call: str, beside: str, samples_s: Sequence[float]) -> CallTimes:
    """Of at least one sample."""
    ordered = sorted(samples_s)
    p50_s, p99_s = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return CallTimes(call, beside, len(ordered), p50_s * 1e6, p99_s * 1e6, ordered[-1] * 1e6)


@contextlib.contextmanager
def _copier(contenders: Contenders) -> Iterator[Copier]:
    movers = contenders.movers[AUTO]
    copier = Copier(contenders.device, movers["out"], movers["in"])
    try:
        yield copier
    finally:
        copier.close(time.monotonic() + PATIENCE_S)


@contextlib.contextmanager
def _flooded(copier: Copier, contenders: Contenders) -> Iterator[None]:
    copies = dict(contenders.copies)
    if contenders.pool.device.type == "cpu":
        # A copy is over when it is issued, and loads go first: if they never ended no store would ever be made.
        del copies["in"]
    flood = CopierFlood(copier, copies, contenders.device.compute_event())
    flood.start()
    try:
        yield
    finally:
        flood.stop()


def measure_calls(contenders: Contenders, plan: EnginePlan) -> list[CallTimes]:
    """`compute_event` and `Copier.put` of one chunk and of a step's, by themselves and beside a flood."""
    found = []
    with _copier(contenders) as copier:
        for beside, around in (("nothing", contextlib.nullcontext()), ("a flood", _flooded(copier, contenders))):
            with around:
                for stores, loads in ((1, 0), (STORES_PER_STEP, LOADS_PER_STEP)):
                    samples_s = _time_puts(copier, contenders, stores, loads, plan)
                    found.append(times_of(f"put {stores} stores, {loads} loads", beside, samples_s))
    return found


def _time_puts(copier: Copier, contenders: Contenders, stores: int, loads: int, plan: EnginePlan) -> list[float]:
    over: list[ChunkTask] = []
    out, into = cycle(contenders.copies["out"]), cycle(contenders.copies["in"])
    samples_s: list[float] = []
    put = 0
    # Fewer of the large ones, of which each takes the device milliseconds.
    for _ in range(max(2, plan.calls // (1 + loads))):
        wanted = [(next(out), True) for _ in range(stores)] + [(next(into), False) for _ in range(loads)]
        started_s = time.perf_counter()
        ready = contenders.device.compute_event()
        copier.put([ChunkTask(chunk, is_store=store, ready=ready, on_over=over.append) for chunk, store in wanted])
        samples_s.append(time.perf_counter() - started_s)
        put += len(wanted)
        pause_until(started_s + plan.put_every_s, partial(_no_more_than, _WAITING, put, over))
    pause_until(0.0, partial(_no_more_than, 0, put, over))
    for task in over:
        if task.error is not None:
            raise task.error
    return samples_s


def _no_more_than(waiting: int, put: int, over: Sequence[ChunkTask]) -> bool:
    return put - len(over) <= waiting


def pause_until(at_s: float, ready: Callable[[], bool]) -> None:
    """Sleep until `time.perf_counter` says so, and on until `ready`.

    Raises:
        TimeoutError: it was not after `PATIENCE_S`.
    """
    end_s = time.perf_counter() + PATIENCE_S
    while (left_s := at_s - time.perf_counter()) > 0 or not ready():
        if time.perf_counter() > end_s:
            raise TimeoutError(f"copies that were put are not over after {PATIENCE_S:g} s")
        time.sleep(max(left_s, 0.0002))


def measure_launches(contenders: Contenders, plan: EnginePlan) -> LaunchTimes:
    """A thread that launches small kernels all the time, as an engine's does, alone and beside a flood both ways."""
    some = torch.zeros(16, device=contenders.pool.device)

    def once() -> float:
        started_s = time.perf_counter()
        for _ in range(_LAUNCHES):
            some.add_(1.0)
        taken_s = time.perf_counter() - started_s
        # Outside of the time, and so seldom that the device's queue is never full.
        some.cpu()
        return taken_s / _LAUNCHES * 1e6

    alone_us, beside_us = [], []
    with _copier(contenders) as copier:
        once()
        for _ in range(plan.launch_rounds):
            alone_us.append(once())
            with _flooded(copier, contenders):
                beside_us.append(once())
    return LaunchTimes(statistics.median(alone_us), statistics.median(beside_us))
