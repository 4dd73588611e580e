"""What `object_tier` measured: its figures, what must be true of them, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from object_tier_cells import MIB, Spread, Timing, size_name, spread_of
from object_tier_clients import BOTO3, FLOORS, OBSTORE, OURS
from object_tier_parts import LIMITED, PartsCell
from rich.box import SIMPLE
from rich.table import Table

FLOOR_SHARE = 0.9
PUT_OVER_BOTO3 = 1.6
SMALL_GET_OVER_BOTO3 = 2.0
LARGE_BYTES = 4 * MIB
LARGE_IN_FLIGHT = 16
SMALL_BYTES = 64 << 10
WORTH = 1.2
"""From this gain on splitting is said to help: less than that is within the noise of shared cores."""


@dataclass(frozen=True)
class Cell:
    """One size, way and number in flight: for each client the timings of its rounds."""

    operation: str
    size_bytes: int
    in_flight: int
    timings: Mapping[str, Sequence[Timing]]

    def mbps(self, client: str) -> Spread:
        """In 10^6 bytes a second."""
        return spread_of(self._rates(client))

    def _rates(self, client: str) -> list[float]:
        return [timing.operations * self.size_bytes / timing.elapsed_s / 1e6 for timing in self.timings[client]]

    @property
    def floor(self) -> str:
        """The faster of the raw ones."""
        return max((name for name in FLOORS if name in self.timings), key=lambda name: self.mbps(name).median)

    def ratio(self, other: str) -> Spread:
        """Ours as a multiple of another's, round by round."""
        return spread_of([mine / its for mine, its in zip(self._rates(OURS), self._rates(other), strict=True)])

    def cpu_ms(self, client: str) -> float:
        """Of this process, user and system, for an operation."""
        return 1e3 * statistics.median(timing.cpu_s / timing.operations for timing in self.timings[client])

    def as_json(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "size_bytes": self.size_bytes,
            "in_flight": self.in_flight,
            "floor": self.floor,
            "over_floor": vars(self.ratio(self.floor)),
            "over_boto3": vars(self.ratio(BOTO3)),
            "clients": {
                name: {"mbps": vars(self.mbps(name)), "cpu_ms": self.cpu_ms(name), "rounds": [vars(t) for t in timings]}
                for name, timings in self.timings.items()
            },
        }


@dataclass(frozen=True)
class Claim:
    says: str
    value: float
    least: float

    @property
    def ok(self) -> bool:
        return self.value >= self.least

    def as_text(self) -> str:
        return f"{'ok    ' if self.ok else 'FAILED'}  {self.says}: {self.value:.2f}, at least {self.least:g}"


def claims_of(cells: Sequence[Cell]) -> Iterator[Claim]:
    """What must be true of the cells that are there."""
    for cell in cells:
        where = f"{cell.operation} of {size_name(cell.size_bytes)}, {cell.in_flight} in flight"
        if cell.size_bytes >= LARGE_BYTES and cell.in_flight == LARGE_IN_FLIGHT:
            yield Claim(f"{where}: share of the floor ({cell.floor})", cell.ratio(cell.floor).median, FLOOR_SHARE)
            if cell.operation == "PUT":
                yield Claim(f"{where}: multiple of boto3", cell.ratio(BOTO3).median, PUT_OVER_BOTO3)
        if cell.size_bytes == SMALL_BYTES and cell.operation == "GET":
            yield Claim(f"{where}: multiple of boto3", cell.ratio(BOTO3).median, SMALL_GET_OVER_BOTO3)


def _with_spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _short(spread: Spread) -> str:
    return f"{spread.median:.2f} {spread.low:.2f}-{spread.high:.2f}"


def table_of(cells: Sequence[Cell]) -> Table:
    table = Table(
        title="Object store clients, MB/s",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption_justify="left",
        caption=(
            "Median of the rounds, in which the clients take turns; ratios are taken within a round and stand with "
            "their extremes. A PUT starts from and a GET ends in a page-aligned buffer of the caller: copies that a "
            "client's interface makes necessary are in its time. The floor is the faster of http.client (h) and "
            "urllib3 (u; not for GET) on requests signed beforehand, without the If-None-Match of ours. CPU is this "
            "process's, user and system, per operation."
        ),
    )
    for name, right in (
        ("", False),
        ("size", True),
        ("x", True),
        (OURS, True),
        (BOTO3, True),
        (OBSTORE, True),
        ("floor", True),
        ("ours/floor", True),
        ("ours/boto3", True),
        ("CPU ms: ours", True),
        (BOTO3, True),
        (OBSTORE, True),
        ("floor", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    previous: tuple[int, str] | None = None
    for cell in cells:
        if previous not in (None, (cell.size_bytes, cell.operation)):
            table.add_section()
        previous = (cell.size_bytes, cell.operation)
        named = [OURS, BOTO3, OBSTORE, cell.floor]
        rates = [f"{cell.mbps(name).median:.0f}" if name in cell.timings else "-" for name in named]
        rates[-1] += f" {cell.floor[0]}"
        table.add_row(
            cell.operation,
            size_name(cell.size_bytes),
            str(cell.in_flight),
            *rates,
            _short(cell.ratio(cell.floor)),
            _short(cell.ratio(BOTO3)),
            *[f"{cell.cpu_ms(name):.2f}" if name in cell.timings else "-" for name in named],
        )
    return table


def parts_table_of(cells: Sequence[PartsCell], mbps: float, rtt_ms: float) -> Table:
    parts = sorted({number for cell in cells for number in cell.gain})
    table = Table(
        title="One request, or ranges and multipart uploads in parallel",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption_justify="left",
        caption=(
            "Plain http without a client library. Gain: the rate as a multiple of that with one request, taken "
            "within a round; median and extremes. A multipart upload has two requests more, and parts of 5 MiB or "
            f"more ('-': too small). The limited path gives each connection {mbps:g} MB/s and a round trip of "
            f"{rtt_ms:g} ms; it stands for a wide-area path."
        ),
    )
    for name in ("path", ""):
        table.add_column(name, no_wrap=True)
    for name in ("size", "in flight", "MB/s", "ms", *(f"gain, {number} parts" for number in parts if number > 1)):
        table.add_column(name, justify="right", no_wrap=True)
    previous: tuple[str, int] | None = None
    for cell in cells:
        if previous not in (None, (cell.path, cell.in_flight)):
            table.add_section()
        previous = (cell.path, cell.in_flight)
        one_s = cell.seconds[1].median
        table.add_row(
            cell.path,
            cell.operation,
            size_name(cell.size_bytes),
            str(cell.in_flight),
            f"{cell.size_bytes * cell.in_flight / one_s / 1e6:.0f}",
            f"{one_s * 1e3:.1f}",
            *[_with_spread(cell.gain[number]) if number in cell.gain else "-" for number in parts if number > 1],
        )
    return table


def _best(cell: PartsCell) -> int:
    return max(cell.gain, key=lambda number: cell.gain[number].median)


def threshold_lines(cells: Sequence[PartsCell]) -> Iterator[str]:
    """For each way, the size from which on splitting helps at every size measured, and the best number of parts."""
    ways = {(cell.path, cell.operation, cell.in_flight): None for cell in cells}
    for path, operation, in_flight in ways:
        of_way = [cell for cell in cells if (cell.path, cell.operation, cell.in_flight) == (path, operation, in_flight)]
        helped: list[PartsCell] = []
        for cell in sorted(of_way, key=lambda cell: cell.size_bytes, reverse=True):
            # The worst round must gain, so that a lucky one does not make a threshold.
            if max((gain.low for number, gain in cell.gain.items() if number > 1), default=0.0) < WORTH:
                break
            helped.append(cell)
        where = f"{path:{len(LIMITED) + 1}} {operation}, {in_flight} in flight"
        if not helped:
            yield f"{where}: no gain of {WORTH:g} that lasts to the largest size"
            continue
        best = ", ".join(f"{size_name(cell.size_bytes)} in {_best(cell)}" for cell in reversed(helped))
        yield f"{where}: helps from {size_name(helped[-1].size_bytes)} on; best: {best} parts"
