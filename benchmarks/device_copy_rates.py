"""The rounds of `device_copy`: on one page size, every way and the plain copy take turns."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from device_copy_flood import CopierFlood, Moved, flood, move_once
from device_copy_pages import Pool, Shape
from device_copy_ways import PLAIN, WAYS, label_of, open_way

from kvsluice.connector.copier import Copier
from kvsluice.connector.region import PinnedRegion
from kvsluice.kernels.chooser import open_movers
from kvsluice.kernels.device import Device
from kvsluice.kernels.movers import Mover
from kvsluice.kernels.operations import ChunkCopy, Direction
from kvsluice.kernels.ways import CopyChoice

__all__ = [
    "AUTO",
    "COPIER",
    "MODES",
    "Contenders",
    "Entry",
    "Mode",
    "PageRates",
    "RatesPlan",
    "first_line",
    "measure_page",
]

AUTO: Final = "auto"
"""What the connector takes when nothing is forced, through its movers."""
COPIER: Final = "auto, copier"
"""The same through the connector's copier thread."""

Mode = str
MODES: Final[Mapping[Mode, tuple[Direction, ...]]] = {"out": ("out",), "in": ("in",), "both": ("out", "in")}


@dataclass(frozen=True, slots=True)
class RatesPlan:
    """How long is measured.

    Attributes:
        sample_s: a way's turn.
        min_rounds, max_rounds: of a page size; between them, as many as its time allows.
        staging_bytes: as in the configuration: for both directions together.
    """

    sample_s: float
    min_rounds: int
    max_rounds: int
    staging_bytes: int


@dataclass(slots=True)
class Entry:
    """One way on one page size.

    Attributes:
        name: for the table.
        programs: by direction, the program instances of the kernel; 0 where there is none; None where torch
            or CUDA decides.
        moved: by mode, a flood for each round.
        failure: why there are no figures, or no more of them.
        wrong_bytes: what differed from the oracle.
    """

    name: str
    programs: Mapping[Direction, int | None]
    moved: dict[Mode, list[Moved]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    failure: str | None = None
    wrong_bytes: str | None = None


@dataclass(frozen=True, slots=True)
class PageRates:
    """All ways on one page size; `entries` by name, the plain copy first.

    Attributes:
        choices: what `auto` chose and what it measured itself, as the connector's log says it.
        choosing_s: how long that took.
    """

    shape: Shape
    entries: Mapping[str, Entry]
    choices: tuple[str, ...]
    choosing_s: float
    rounds: int

    def shares(self, name: str, mode: Mode) -> list[float]:
        """Round by round, a way's rate over that of the plain copy."""
        plain, own = self.entries[label_of(PLAIN)].moved[mode], self.entries[name].moved[mode]
        return [mine.gb_per_s / its.gb_per_s for mine, its in zip(own, plain, strict=False)]


@dataclass
class Contenders:
    """Movers of every way over one pool, each proven to move the right bytes.

    Args:
        pool: the pages.
        region: at least as many slots as the pool has chunks.
        device: gives streams, the same ones to all.
        staging: by direction, for the ways that have a kernel.
    """

    pool: Pool
    region: PinnedRegion
    device: Device
    staging: Mapping[Direction, torch.Tensor]
    entries: dict[str, Entry] = field(default_factory=dict)
    movers: dict[str, dict[Direction, Mover]] = field(default_factory=dict)
    choices: tuple[CopyChoice, ...] = ()
    choosing_s: float = 0.0
    copies: Mapping[Direction, Sequence[ChunkCopy]] = field(init=False)

    def __post_init__(self) -> None:
        # One half of the chunks for each direction: what is read is never written.
        count = len(self.pool.block_ids)
        self.copies = {
            "out": self.pool.copies(range(count // 2), self.region),
            "in": self.pool.copies(range(count // 2, count), self.region),
        }

    def open_all(self, staging_bytes: int) -> None:
        """Open what can be had; what cannot says why in its entry."""
        for way in (PLAIN, *WAYS):
            name = label_of(way)
            entry = self.entries[name] = Entry(name, {"out": way.programs, "in": way.programs})
            try:
                movers = {
                    direction: open_way(self.pool.plan, way, direction, self.device, self.staging[direction])
                    for direction in MODES["both"]
                }
                self._add(entry, movers, proven=way != PLAIN)
            except Exception as error:  # noqa: BLE001 - whatever a machine lacks, the other ways are measured
                entry.failure = first_line(error)
        self.open_auto(staging_bytes)

    def open_auto(self, staging_bytes: int) -> None:
        """Let the connector choose."""
        entry = self.entries[AUTO] = Entry(AUTO, {})
        try:
            started_s = time.perf_counter()
            opened = open_movers(
                self.pool.plan,
                self.device,
                setting="auto",
                staging_bytes=staging_bytes,
                scratch=self.copies["in"][0].host,
            )
            self.choosing_s = time.perf_counter() - started_s
            self.choices = opened.choices
            entry.programs = {choice.direction: choice.way.programs for choice in opened.choices}
            self._add(entry, {"out": opened.out, "in": opened.into}, proven=True)
        except Exception as error:  # noqa: BLE001 - as above
            entry.failure = first_line(error)

    def _add(self, entry: Entry, movers: dict[Direction, Mover], *, proven: bool) -> None:
        if proven:
            entry.wrong_bytes = self._wrong_bytes(movers)
        else:
            for direction, mover in movers.items():
                move_once(mover, self.copies[direction][:1])
        self.movers[entry.name] = movers

    def _wrong_bytes(self, movers: Mapping[Direction, Mover]) -> str | None:
        """Move a chunk each way, which warms the way up, and compare all its bytes."""
        ready = [self.device.compute_event()]
        out = self.copies["out"][0]
        out.host.fill_(0)
        move_once(movers["out"], [out], ready)
        wrong = _difference("out", out.host, self.pool.payload(0))
        if wrong is None:
            number = len(self.pool.block_ids) // 2
            chunk = self.copies["in"][0]
            self.pool.blank(number)
            move_once(movers["in"], [chunk], [self.device.compute_event()])
            wrong = _difference("in", self.pool.payload(number), chunk.host)
        return wrong


def _difference(direction: Direction, found: torch.Tensor, expected: torch.Tensor) -> str | None:
    if torch.equal(found, expected):
        return None
    wrong = (found != expected).nonzero()
    return f"{direction}: {len(wrong)} of {len(expected)} bytes, the first at {int(wrong[0])}"


def first_line(error: BaseException) -> str:
    """What failed, for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measure_page(contenders: Contenders, plan: RatesPlan, until_s: float) -> PageRates:
    """Rounds in which every way has a turn in each mode, in a new order each time.

    Args:
        contenders: opened.
        plan: see `RatesPlan`.
        until_s: as `time.perf_counter` counts: from then on, no more than the least number of rounds.
    """
    entries = dict(contenders.entries)
    copier: Copier | None = None
    if AUTO in contenders.movers:
        movers = contenders.movers[AUTO]
        copier = Copier(contenders.device, movers["out"], movers["in"])
        entries[COPIER] = Entry(COPIER, entries[AUTO].programs)
    shuffle = random.Random(3)
    rounds = 0
    try:
        while rounds < plan.min_rounds or (rounds < plan.max_rounds and time.perf_counter() < until_s):
            turns = [(entry, mode) for entry in entries.values() for mode in MODES if entry.failure is None]
            for entry, mode in shuffle.sample(turns, len(turns)):
                if entry.failure is None:
                    try:
                        entry.moved[mode].append(_turn(contenders, copier, entry.name, mode, plan.sample_s))
                    except Exception as error:  # noqa: BLE001 - the other ways go on
                        entry.failure = f"{mode}: {first_line(error)}"
            rounds += 1
    finally:
        if copier is not None:
            copier.close(time.monotonic() + 5.0)
    return PageRates(contenders.pool.shape, entries, tuple(map(str, contenders.choices)), contenders.choosing_s, rounds)


def _turn(contenders: Contenders, copier: Copier | None, name: str, mode: Mode, seconds: float) -> Moved:
    copies = {direction: contenders.copies[direction] for direction in MODES[mode]}
    if name != COPIER:
        return flood({each: contenders.movers[name][each] for each in MODES[mode]}, copies, seconds)
    assert copier is not None
    return CopierFlood(copier, copies, contenders.device.compute_event()).run(seconds)
