"""`kvsluice calibrate`: measure a tier, print marks and threads for its configuration."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from kvsluice.connector.calibrate import Calibration, Options, Outcome, Progress
from kvsluice.connector.calibrate import calibrate as measure
from kvsluice.connector.calibrate.model import Fit, Kind
from kvsluice.connector.calibrate.plan import DEFAULT_CONCURRENCIES
from kvsluice.connector.calibrate.units import format_pair, format_rate, format_seconds, format_size
from kvsluice.connector.cli.options import size_of
from kvsluice.connector.cli.output import logs_on, messages, print_json, results
from kvsluice.connector.config import AnyTierConfig, HostTierConfig, OffloadConfig
from kvsluice.tiers.errors import ConfigError

__all__ = ["calibrate"]

_PLAIN_INTERVAL_S: Final = 5.0
"""Between two lines of progress where stderr is no terminal."""


def calibrate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="DIR_OR_S3_URL", help="A folder, or s3://bucket/prefix.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take the tier from this configuration file instead.", show_default=False)
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="Which tier of --config, by name or type.", show_default=False)
    ] = None,
    chunk_bytes: Annotated[str, typer.Option(help="Size of the chunks that will be stored.")] = "4MiB",
    sizes: Annotated[
        str | None, typer.Option(help="Other sizes, as in 64KiB,1MiB.", show_default="64KiB to 16MiB")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Operations at once.")] = ",".join(map(str, DEFAULT_CONCURRENCIES)),
    max_seconds: Annotated[float, typer.Option(help="No operation is started later.")] = 60.0,
    max_bytes: Annotated[str, typer.Option(help="Written and read, all together.")] = "4GiB",
    direct_io: Annotated[str | None, typer.Option(help="auto, on or off, for a folder.", show_default="auto")] = None,
    endpoint_url: Annotated[
        str | None, typer.Option(help="Where the object store answers.", show_default="AWS")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Region to sign for.", show_default="of the environment")] = None,
    ca_bundle: Annotated[
        str | None, typer.Option(help="PEM file of the authorities to trust.", show_default=False)
    ] = None,
    addressing_style: Annotated[
        str | None, typer.Option(help="auto, path or virtual, for s3://.", show_default="auto")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure a tier; print its marks, threads and fixed cost as configuration.

    Writes and reads valid chunk files in a folder or prefix of its own, which is removed afterwards. Credentials of
    an object store come from where boto3 looks for them, or from the configuration file.

    Exit codes: 0 measured, 1 the tier failed or something could not be removed, 2 wrong use.
    """
    given = {
        "direct_io": direct_io,
        "endpoint_url": endpoint_url,
        "region": region,
        "ca_bundle": ca_bundle,
        "addressing_style": addressing_style,
    }
    detector = None
    if config is None:
        if target is None or tier is not None:
            raise ConfigError("give a folder or s3://bucket/prefix, or --config FILE with --tier NAME")
        measured = _tier_at(target, {key: value for key, value in given.items() if value is not None})
    else:
        extra = [f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None]
        if target is not None or extra:
            raise ConfigError(
                f"--config names the tier: leave {', '.join([*extra, *([target] if target else [])])} out"
            )
        measured, detector = _tier_in(config, tier)
    options = Options(
        chunk_bytes=size_of("chunk-bytes", chunk_bytes),
        sizes=None if sizes is None else [size_of("sizes", part) for part in sizes.split(",")],
        concurrencies=[_count("concurrency", part) for part in concurrency.split(",")],
        max_seconds=max_seconds,
        max_bytes=size_of("max-bytes", max_bytes),
    )
    console = messages()
    with logs_on(console), _progress(console, options.max_seconds) as show:
        found = measure(measured, options, detector=detector, on_progress=show)
    if as_json:
        print_json(found.document())
    else:
        _render(results(), found, concurrencies=sorted(set(options.concurrencies)))
    if found.left_behind:
        raise typer.Exit(1)


def _tier_at(target: str, given: dict[str, str]) -> AnyTierConfig:
    """The tier at a folder or an s3 URL."""
    scheme, separator, rest = target.partition("://")
    if not separator:
        entry: dict[str, object] = {"type": "fs", "root_dir": target, **given}
    elif scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        entry = {"type": "obj", "bucket": bucket, **({"prefix": prefix} if prefix else {}), **given}
    else:
        raise ConfigError(f"{target!r}: give a folder or s3://bucket/prefix")
    return OffloadConfig.from_dict({"tiers": [entry]}).tiers[0]


def _tier_in(path: Path, wanted: str | None) -> tuple[AnyTierConfig, str | None]:
    """The tier of a configuration file, and the class of its gate."""
    config = OffloadConfig.from_file(path)
    measurable = [tier for tier in config.tiers if not isinstance(tier, HostTierConfig)]
    found = [tier for tier in measurable if wanted is None or tier.name == wanted]
    found = found or [tier for tier in measurable if tier.type == wanted]
    if len(found) != 1:
        names = ", ".join(repr(tier.name) for tier in measurable)
        what = (
            "--tier is missing"
            if wanted is None
            else f"--tier {wanted!r} names {'no' if not found else 'more than one'} tier"
        )
        raise ConfigError(f"{path}: {what}; there are {names or 'none'} of type fs or obj")
    gate = found[0].backpressure_for(config.backpressure) or {}
    detector = gate.get("backpressure_cls")
    return found[0], None if detector is None else str(detector)


def _count(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--{option} {text!r}: give whole numbers, as in 1,2,4") from error


@contextlib.contextmanager
def _progress(console: Console, max_seconds: float) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a plain line every few seconds elsewhere."""
    if not console.is_terminal:
        yield _plain_progress(console, max_seconds)
        return
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of {max_seconds:g} s at the most"),
        console=console,
        transient=True,
    )
    with bar:
        row = bar.add_task("starting", total=None)
        yield lambda progress: bar.update(
            row, description=_step(progress), completed=progress.done, total=progress.total, refresh=True
        )


def _plain_progress(console: Console, max_seconds: float) -> Callable[[Progress], None]:
    next_s = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal next_s
        if time.monotonic() < next_s and progress.done < progress.total:
            return
        next_s = time.monotonic() + _PLAIN_INTERVAL_S
        console.print(
            f"calibrate: {progress.done}/{progress.total}, {progress.elapsed_s:.0f} of {max_seconds:g} s:"
            f" {_step(progress)}",
            soft_wrap=True,
        )

    return show


def _step(progress: Progress) -> str:
    if progress.kind is None:
        return "done" if progress.done == progress.total else "warming up"
    return f"{progress.kind} {format_size(progress.num_bytes)} x {progress.concurrency}"


def _render(console: Console, found: Calibration, *, concurrencies: Sequence[int]) -> None:
    console.print(
        f"{found.target}: {format_size(found.moved_bytes)} in {found.elapsed_s:.0f} s; reads came {found.reads}",
        markup=False,
        soft_wrap=True,
    )
    fits: dict[Kind, Fit] = {"write": found.write_fit, "read": found.read_fit}
    chosen = {"write": found.suggestion.n_write_threads, "read": found.suggestion.n_read_threads}
    for kind, of in fits.items():
        outcomes = [outcome for outcome in found.outcomes if outcome.kind == kind]
        console.print(f"\n{kind}s: throughput, and median/p99 of one")
        console.print(_table(outcomes, concurrencies, (found.chunk_bytes, chosen[kind])))
        alone, shared = format_rate(of.stream_bytes_per_s), format_rate(of.bandwidth_bytes_per_s)
        console.print(
            f"fit: a {kind} takes {format_seconds(of.fixed_cost_s)} and its bytes"
            f" {'at least ' if of.bandwidth_is_bound else ''}at {shared} shared by all, {alone} for one alone",
            soft_wrap=True,
        )
    console.print()
    for why, cells in _missing(found.outcomes).items():
        console.print(f"not measured: {', '.join(cells)}: {why}", style="yellow", markup=False, soft_wrap=True)
    console.print("into the configuration, as this tier's entry in tiers:")
    console.print(json.dumps(found.snippet, indent=2), markup=False, soft_wrap=True)
    console.print("\nwhy:")
    for reason in found.suggestion.reasons:
        console.print(f"  {reason}", markup=False, soft_wrap=True)


def _missing(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """The cells that were not measured, by why; one that was neither written nor read is told once."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.missing:
            cell = f"{format_size(outcome.num_bytes)} x {outcome.concurrency}"
            kinds.setdefault((outcome.missing, cell), []).append(outcome.kind)
    found: dict[str, list[str]] = {}
    for (why, cell), missing in kinds.items():
        found.setdefault(why, []).append(cell if len(missing) > 1 else f"{missing[0]} {cell}")
    return found


def _table(outcomes: Sequence[Outcome], concurrencies: Sequence[int], chosen: tuple[int, int]) -> Table:
    """Sizes down, concurrencies across; a cell is throughput over `median / p99`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("at once")
    for concurrency in concurrencies:
        table.add_column(str(concurrency), justify="right", no_wrap=True)
    by_cell = {(outcome.num_bytes, outcome.concurrency): outcome for outcome in outcomes}
    for size in sorted({size for size, _ in by_cell}):
        row = [Text(format_size(size))]
        for concurrency in concurrencies:
            outcome = by_cell.get((size, concurrency))
            style = "bold green" if (size, concurrency) == chosen else ""
            row.append(Text(_cell(outcome), style=style))
        table.add_row(*row)
    return table


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    measured = outcome.measurement
    if measured is None:
        return "-"
    return f"{format_rate(measured.bytes_per_s)}\n{format_pair(measured.median_s, measured.p99_s)}"
