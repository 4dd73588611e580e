"""`kvsluice replay`: a request trace through the real gates and queues, on modelled devices."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsluice.connector.calibrate.units import format_seconds
from kvsluice.connector.cli.options import size_of
from kvsluice.connector.cli.output import messages, print_json, results
from kvsluice.connector.replay import (
    ROW_NAMES,
    Claim,
    DeviceSpec,
    Knobs,
    Latency,
    Request,
    Row,
    RowResult,
    Scene,
    SlowTime,
    TierModel,
    find_knobs,
    make_rows,
    read_trace,
    run_rows,
    speed_up,
    spread,
)
from kvsluice.connector.replay.document import document
from kvsluice.connector.replay.plot import check as check_plot
from kvsluice.connector.replay.plot import plot as write_plot
from kvsluice.connector.replay.suite import check_all
from kvsluice.connector.replay.trace import Spread
from kvsluice.tiers.errors import ConfigError

__all__ = ["replay"]

_TIER: Final = "tier"
_MAX_JOBS: Final = 2


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake's format: JSON lines, plain or gzipped.")],
    nodes: Annotated[int, typer.Option(help="Engines that the requests are spread over.")] = 1,
    spread_by: Annotated[
        str, typer.Option("--spread", help="round-robin, or affinity: a conversation stays on its node.")
    ] = "round-robin",
    speed: Annotated[float, typer.Option(help="How many times as fast the requests arrive.")] = 1.0,
    gpu_chunks: Annotated[int, typer.Option(help="Chunks in each engine's GPU prefix cache.")] = 8192,
    load_share: Annotated[
        float | None,
        typer.Option(
            help="Find --speed and --gpu-chunks so that loads take this share of the tier's time.", show_default=False
        ),
    ] = None,
    offered: Annotated[
        float, typer.Option(help="With --load-share: how many times what loads leave over is offered as stores.")
    ] = 2.0,
    chunk_bytes: Annotated[str, typer.Option(help="KV of 512 tokens.")] = "4MiB",
    bandwidth: Annotated[str, typer.Option(help="Bytes a second of the tier's device.")] = "1GB",
    stream_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second of one operation alone.", show_default="all")
    ] = None,
    operation_us: Annotated[float, typer.Option(help="Fixed cost of an operation, in microseconds.")] = 100.0,
    max_running: Annotated[
        int | None, typer.Option(help="Operations that the device works on at once.", show_default="any number")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="START:END:FACTOR",
            help="Seconds between which the device runs at this share of its speed; 0 hangs. Repeatable.",
            show_default=False,
        ),
    ] = None,
    capacity: Annotated[str | None, typer.Option(help="Bytes that the tier keeps.", show_default="no limit")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="All nodes share one tier; else each has its own.")] = False,
    remote: Annotated[bool, typer.Option("--remote", help="Gates get the marks of a network tier.")] = False,
    high_water_s: Annotated[float | None, typer.Option(help="The gate's high mark.", show_default="preset")] = None,
    low_water_s: Annotated[float | None, typer.Option(help="The gate's low mark.", show_default="preset")] = None,
    read_threads: Annotated[int, typer.Option(help="Of each node.")] = 8,
    write_threads: Annotated[int, typer.Option(help="Of each node.")] = 8,
    staging: Annotated[str, typer.Option(help="Pinned memory of each node for chunks in transit.")] = "8GiB",
    host_capacity: Annotated[
        str | None, typer.Option(help="A host tier of this size above the tier.", show_default="none")
    ] = None,
    prefill: Annotated[float, typer.Option(help="Tokens a second, of each request.")] = 20_000.0,
    copy_bandwidth: Annotated[str, typer.Option(help="Bytes a second between GPU and host.")] = "50GB",
    step_ms: Annotated[float, typer.Option(help="Milliseconds from one scheduler step to the next.")] = 20.0,
    rows: Annotated[str | None, typer.Option(help="Comma-separated.", show_default=", ".join(ROW_NAMES))] = None,
    jobs: Annotated[int, typer.Option(help="Processes at once.")] = min(_MAX_JOBS, os.cpu_count() or 1),
    claims: Annotated[
        bool, typer.Option("--claims", help="Check what the gates promise; the devices are then given.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the rows over time as a PNG.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Replay a request trace on virtual time, one row per policy, on the same arrivals.

    Planner, gates, queues and eviction are the product's own; devices share their bandwidth among all operations
    under way. Each row's loads are replayed alone as well, without any store, to say how much stores slow them down.

    Exit codes: 0 done, 1 a claim does not hold, 2 wrong use.
    """
    if plot is not None:
        check_plot(plot)
    requests = read_trace(trace)
    facts: dict[str, object] = {"trace": str(trace), "requests": len(requests), "trace_s": requests[-1].time_s}
    say = messages()
    if claims:
        _refuse(
            context, "--claims says itself what is modelled", allowed={"trace", "jobs", "claims", "plot", "as_json"}
        )
        verdict = check_all(requests, jobs=jobs, on_progress=lambda done: say.print(done, markup=False))
        done = _Done(verdict.scene, verdict.rows, verdict.knobs.speed_up, verdict.knobs, verdict.claims)
    else:
        if load_share is not None:
            searched = {"speed", "gpu_chunks"}
            _refuse(context, "--load-share finds these", allowed=set(context.params) - searched)
        marks = {"high_water_s": high_water_s, "low_water_s": low_water_s}
        tier = {
            "type": "fs",
            "root_dir": "/modelled",
            "name": _TIER,
            "n_read_threads": read_threads,
            "n_write_threads": write_threads,
            "locality": "REMOTE" if remote else "LOCAL",
            "backpressure": {name: mark for name, mark in marks.items() if mark is not None},
        }
        host = [] if host_capacity is None else [{"type": "host", "capacity": host_capacity}]
        device = DeviceSpec(
            bytes_per_s=size_of("bandwidth", bandwidth),
            operation_s=operation_us / 1e6,
            max_running=max_running,
            stream_bytes_per_s=None if stream_bandwidth is None else size_of("stream-bandwidth", stream_bandwidth),
            slow=tuple(_slow(one) for one in slow or ()),
        )
        scene = Scene(
            tiers={_TIER: TierModel(device, shared, None if capacity is None else size_of("capacity", capacity))},
            chunk_bytes=size_of("chunk-bytes", chunk_bytes),
            num_nodes=nodes,
            gpu_chunks=gpu_chunks,
            prefill_tokens_per_s=prefill,
            staging_bytes=size_of("staging", staging),
            copy_bytes_per_s=size_of("copy-bandwidth", copy_bandwidth),
            step_s=step_ms / 1e3,
        )
        names = ROW_NAMES if rows is None else [name.strip() for name in rows.split(",")]
        done = _run(
            scene,
            make_rows([*host, tier], names),
            spread(requests, nodes, _spread_rule(spread_by)),
            speed=speed,
            targets=None if load_share is None else (load_share, offered),
            jobs=jobs,
            say=say,
        )
    (tier_name,) = done.scene.tiers
    if plot is not None:
        write_plot(done.rows, tier_name, plot, f"{trace.name}, {done.speed_up:.3g} times as fast")
    facts.update({"speed_up": done.speed_up, "knobs": done.knobs})
    if as_json:
        print_json(document(scene=done.scene, rows=done.rows, claims=done.claims, facts=facts))
    else:
        _render(results(), done, tier_name)
    if not all(claim.holds for claim in done.claims):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Done:
    """What was run, and what came of it."""

    scene: Scene
    rows: Sequence[RowResult]
    speed_up: float
    knobs: Knobs | None
    claims: Sequence[Claim] = ()


def _run(
    scene: Scene,
    rows: Sequence[Row],
    requests: Sequence[Request],
    *,
    speed: float,
    targets: tuple[float, float] | None,
    jobs: int,
    say: Console,
) -> _Done:
    """Replay the rows; `targets` are the share of loads and the ratio of offered stores to search knobs for."""
    knobs = None
    if targets is not None:
        (model,) = scene.tiers.values()
        knobs = find_knobs(
            requests,
            num_nodes=scene.num_nodes,
            bytes_per_s=model.device.bytes_per_s * (1 if model.shared else scene.num_nodes),
            chunk_bytes=scene.chunk_bytes,
            load_share=targets[0],
            offered_ratio=targets[1],
            shared=model.shared,
        )
        speed, scene = knobs.speed_up, replace(scene, gpu_chunks=knobs.gpu_chunks)
    finished = run_rows(
        scene,
        rows,
        speed_up(requests, speed),
        jobs=jobs,
        on_done=lambda row: say.print(f"row {row.row!r} done", markup=False),
    )
    return _Done(scene, finished, speed, knobs)


def _refuse(context: typer.Context, why: str, *, allowed: set[str]) -> None:
    """Options that were given and are not allowed beside another one."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name not in allowed and source is not None and source.name == "COMMANDLINE":
            given.append(parameter.opts[0])
    if given:
        raise ConfigError(f"{why}: leave {', '.join(given)} out")


def _spread_rule(text: str) -> Spread:
    for rule in get_args(Spread):
        if rule == text:
            return cast(Spread, rule)
    raise ConfigError(f"--spread {text!r} is none of {', '.join(get_args(Spread))}")


def _slow(text: str) -> SlowTime:
    try:
        start_s, end_s, factor = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise ConfigError(f"--slow {text!r} is not START:END:FACTOR, as in 30:90:0") from error
    return SlowTime(start_s, end_s, factor)


# ---- tables ----------------------------------------------------------------------------------


def _render(console: Console, done: _Done, tier: str) -> None:
    device = done.scene.tiers[tier].device
    console.print(
        f"{done.scene.num_nodes} nodes, tier of {device.bytes_per_s / 1e6:.0f} MB/s"
        f"{' shared by all' if done.scene.tiers[tier].shared else ''}, GPU caches of {done.scene.gpu_chunks} chunks, "
        f"trace {done.speed_up:.3g} times as fast: {done.rows[0].window_s:.0f} s, {done.rows[0].requests} requests, "
        f"{done.rows[0].prompt_chunks} chunks\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(_row_table(done.rows, tier))
    if done.claims:
        console.print(_claim_table(done.claims))


def _row_table(rows: Sequence[RowResult], tier: str) -> Table:
    """Two lines a row: median over p99 where a cell has both."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_lines=True)
    for name in ("row", "load\np50/p99", "chunk\np50/p99", "x alone\np99; each", "stored\nof the rest"):
        table.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    for name in ("hits\nfailed/slower", "not stored, by reason", "queue\nworst", "EMA mean\nmax"):
        table.add_column(name, justify="left" if "reason" in name else "right", no_wrap="reason" not in name)
    for row in rows:
        at = row.tiers[tier]
        lost = {**at.dropped, **{f"{reason} (failed)": count for reason, count in at.failed.items()}}
        cells = (
            row.row,
            _latency(row.load),
            _latency(row.load_chunk),
            f"{_times(row.slowdown_p99)}\n{_times(row.each_slowdown.p99_s)}",
            f"{at.goodput_bytes_per_s / 1e6:.0f} MB/s\n{at.goodput_share:.1%}",
            f"{row.tier_hits}\n{row.failed_hits}/{row.slower_hits}",
            ", ".join(f"{reason} {count}" for reason, count in lost.items()) or "-",
            str(at.worst_queue),
            f"{_milli(at.ema_mean_s)}\n{_milli(at.ema_max_s)}",
        )
        table.add_row(*(Text(cell) for cell in cells))
    table.caption = (
        "load: from the request to its last chunk, failed ones too; x alone: against the same loads without any store, "
        "the p99s and the p99 of each load against itself; of the rest: of what loads leave over; "
        "slower: held, and computed all the same, since that was sooner; EMA in ms/MiB"
    )
    table.caption_justify = "left"
    return table


def _claim_table(claims: Sequence[Claim]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("", "claim", "promise", "found"):
        table.add_column(name)
    for claim in claims:
        verdict = Text("ok", style="green") if claim.holds else Text("FAILED", style="bold red")
        table.add_row(verdict, Text(claim.name), Text(claim.promise), Text(claim.found))
    return table


def _latency(latency: Latency) -> str:
    if not latency.count:
        return "-"
    return f"{format_seconds(latency.p50_s)}\n{format_seconds(latency.p99_s)}"


def _times(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.2f}"


def _milli(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.3g}"
