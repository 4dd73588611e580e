"""What `device_copy` measured: its figures, what must be true of them, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from device_copy_engine import CallTimes, LaunchTimes
from device_copy_matmul import Slowdown
from device_copy_rates import AUTO, MODES, Entry, Mode, PageRates

__all__ = [
    "Claim",
    "Report",
    "Spread",
    "call_lines",
    "claims_of",
    "page_lines",
    "rate_head",
    "size_name",
    "slowdown_lines",
    "spread_of",
]

LARGE_PAGE_BYTES = 16 << 10
LARGE_SHARE = 0.90
SMALL_SHARE = 0.75
"""For pages below 16 KiB, of which the target names 4 KiB."""
MAX_SLOWDOWN = 0.02


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure's rounds."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread | None:
    """None of none."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


@dataclass(slots=True)
class Report:
    """All that one run has found so far; parts that were left out are empty.

    Attributes:
        facts: of the machine, by name.
        pages: by page size.
        alone_tflops: of the products alone, sample by sample.
        matmul_page_bytes: of the pages that were copied beside them.
        notes: what a reader must know.
    """

    facts: Mapping[str, object]
    matmul_page_bytes: int
    pages: list[PageRates] = field(default_factory=list)
    slowdowns: list[Slowdown] = field(default_factory=list)
    alone_tflops: list[float] = field(default_factory=list)
    calls: list[CallTimes] = field(default_factory=list)
    launches: LaunchTimes | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Ready for `json.dumps`."""
        return {
            "facts": dict(self.facts),
            "pages": [_page_as_json(page) for page in self.pages],
            "matmul": {
                "page_bytes": self.matmul_page_bytes,
                "alone_tflops": list(self.alone_tflops),
                "beside": [asdict(slowdown) for slowdown in self.slowdowns],
            },
            "calls": [asdict(call) for call in self.calls],
            "launches": None if self.launches is None else asdict(self.launches),
            "notes": list(self.notes),
        }


def _page_as_json(page: PageRates) -> dict[str, object]:
    return {
        "page_bytes": page.shape.page_bytes,
        "layers": page.shape.layers,
        "num_blocks": page.shape.num_blocks,
        "chunk_bytes": page.shape.chunk_bytes,
        "rounds": page.rounds,
        "choices": list(page.choices),
        "choosing_s": page.choosing_s,
        "ways": [
            {
                "name": entry.name,
                "programs": dict(entry.programs),
                "failure": entry.failure,
                "wrong_bytes": entry.wrong_bytes,
                "moved": {
                    mode: [
                        {**asdict(one), "gb_per_s": one.gb_per_s, "device_gb_per_s": one.device_gb_per_s}
                        for one in moved
                    ]
                    for mode, moved in entry.moved.items()
                },
                "shares": {mode: page.shares(entry.name, mode) for mode in MODES},
            }
            for entry in page.entries.values()
        ],
    }


@dataclass(frozen=True, slots=True)
class Claim:
    """One target. `value` is None where nothing was measured, which is no success."""

    says: str
    value: float | None
    bound: float
    at_least: bool

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value < self.bound

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"ok": self.ok}

    def as_text(self, *, judged: bool) -> str:
        """One line, without a verdict where a rehearsal ran and nothing was measured."""
        verdict = ("ok" if self.ok else "MISSED") if judged else "-"
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{verdict:6} {self.says}: {value}, {'at least' if self.at_least else 'below'} {self.bound:g}"


def claims_of(report: Report, page_sizes: Sequence[int], parts: Sequence[str]) -> Iterator[Claim]:
    """The targets, for what the connector chooses by itself, and that no way moves wrong bytes.

    Args:
        report: what was found.
        page_sizes, parts: what was asked for: what failed altogether is a target missed.
    """
    pages = {page.shape.page_bytes: page for page in report.pages}
    if "rates" in parts:
        for page_bytes in page_sizes:
            page = pages.get(page_bytes)
            for mode in MODES:
                share = None if page is None else spread_of(page.shares(AUTO, mode))
                yield Claim(
                    f"{size_name(page_bytes)} pages, {mode}, share of plain",
                    None if share is None else share.median,
                    LARGE_SHARE if page_bytes >= LARGE_PAGE_BYTES else SMALL_SHARE,
                    at_least=True,
                )
        wrong = [
            entry.name for page in report.pages for entry in page.entries.values() if entry.wrong_bytes is not None
        ]
        yield Claim("ways with wrong bytes", len(wrong) if len(pages) == len(page_sizes) else None, 1, at_least=False)
    slowdowns = {slowdown.mode: slowdown for slowdown in report.slowdowns if slowdown.name == AUTO}
    for mode in MODES if "matmul" in parts else ():
        yield Claim(
            f"{size_name(report.matmul_page_bytes)} pages, {mode}, slowdown of matmul",
            slowdowns[mode].median if mode in slowdowns else None,
            MAX_SLOWDOWN,
            at_least=False,
        )


def size_name(num_bytes: int) -> str:
    """A whole number of MiB or KiB."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def rate_head() -> Iterator[str]:
    """What stands over the lines of all page sizes."""
    yield "GB/s (10^9), share of plain in the same round: median low-high | calling thread's us a chunk"
    yield f"{'way':<12} SMs" + "".join(f" | {mode:>5} {'share':>14}" for mode in MODES) + " |  out   in"


def page_lines(page: PageRates) -> Iterator[str]:
    """What the connector chose, and one line for each way."""
    chosen = "; ".join(choice.partition(" (")[0] for choice in page.choices)
    yield (
        f"--- {size_name(page.shape.page_bytes)} pages, {page.shape.pages} a chunk, {page.rounds} rounds; "
        f"auto: {chosen or 'nothing'} ({page.choosing_s:.1f} s)"
    )
    for entry in page.entries.values():
        yield _rate_line(page, entry)


def slowdown_lines(report: Report) -> Iterator[str]:
    """What floods cost the matrix products."""
    alone = spread_of(report.alone_tflops)
    rate = "" if alone is None else f" (alone {alone.median:.0f}, {alone.low:.0f}-{alone.high:.0f} TFLOP/s)"
    pages = f"{size_name(report.matmul_page_bytes)} pages"
    yield f"matrix products{rate} beside floods of {pages}: slowdown in %, GB/s meanwhile"
    yield f"{'way':<15}" + "".join(f" | {mode:>5} low,high      GB/s" for mode in MODES)
    for name in dict.fromkeys(slowdown.name for slowdown in report.slowdowns):
        yield _slowdown_line(name, {each.mode: each for each in report.slowdowns if each.name == name})


def call_lines(report: Report) -> Iterator[str]:
    """What the engine's thread pays."""
    yield f"{'calls on the engine thread':<28} {'beside':<16} {'calls':>6} {'p50 us':>8} {'p99 us':>8} {'max us':>8}"
    for call in report.calls:
        yield (
            f"{call.call:<28} {call.beside:<16} {call.calls:>6} {call.p50_us:>8.1f} {call.p99_us:>8.1f} "
            f"{call.max_us:>8.1f}"
        )
    if report.launches is not None:
        launches = report.launches
        yield f"a small launch: {launches.alone_us:.1f} us alone, {launches.beside_us:.1f} us beside a flood both ways"


def _rate_line(page: PageRates, entry: Entry) -> str:
    line = f"{entry.name:<12} {_programs(entry):>3}"
    if entry.failure is not None and not any(entry.moved.values()):
        return f"{line} | {entry.failure[:120]}"
    for mode in MODES:
        rate = spread_of([moved.gb_per_s for moved in entry.moved[mode]])
        share = spread_of(page.shares(entry.name, mode))
        line += f" | {_rate_cell(rate, share):>20}"
    calls = [spread_of([moved.call_us_per_chunk or 0.0 for moved in entry.moved[mode]]) for mode in ("out", "in")]
    line += " |" + "".join(
        f"{call.median:>5.0f}" if call is not None and call.median else f"{'-':>5}" for call in calls
    )
    if entry.wrong_bytes is not None:
        line += f" WRONG BYTES {entry.wrong_bytes}"
    if entry.failure is not None:
        line += f" {entry.failure[:80]}"
    return line


def _rate_cell(rate: Spread | None, share: Spread | None) -> str:
    if rate is None or share is None:
        return "-"
    if share.low == share.high == 1.0:
        return f"{rate.median:>5.1f} {rate.low:>6.1f}-{rate.high:<7.1f}"
    return f"{rate.median:>5.1f} {share.median:.2f} {share.low:.2f}-{share.high:.2f}"


def _programs(entry: Entry) -> str:
    """What each direction's kernel takes."""
    shown = ["all" if programs is None else str(programs) for programs in entry.programs.values()]
    return "/".join(dict.fromkeys(shown)) if shown else "-"


def _slowdown_line(name: str, modes: Mapping[Mode, Slowdown]) -> str:
    line = f"{name:<15}"
    for slowdown in modes.values():
        share, rate = spread_of(slowdown.shares), spread_of(slowdown.gb_per_s)
        if share is None or rate is None:
            line += f" | {(slowdown.failure or '-')[:24]:>24}"
            continue
        late = f" {slowdown.late} late" if slowdown.late else ""
        extremes = f"{100 * share.low:.1f},{100 * share.high:.1f}"
        line += f" | {100 * share.median:>5.1f} {extremes:<11} {rate.median:>6.1f}{late}"
    return line
