"""`kvsluice doctor`: what this machine offers, what is wrong with it, and what to do about that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsluice.connector.cli.options import size_of
from kvsluice.connector.cli.output import logs_on, messages, print_json, results
from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.doctor import DevicePath, Finding, Level, Pages, Report, Wanted, examine_device_path
from kvsluice.connector.doctor.pages import TOKENS_PER_BLOCK
from kvsluice.connector.doctor.seen import DIRECTIONS, share_of_plain, unusable_because
from kvsluice.tiers.errors import ConfigError

__all__ = ["doctor"]

_PAGES: Final = Pages()
_STYLES: Final[dict[Level, str]] = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A configuration file.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu.", show_default="cuda:0 where it is there")
    ] = None,
    page_bytes: Annotated[
        str, typer.Option(help="A block's keys, or values, in one layer: 16 tokens of Llama 3 in bfloat16.")
    ] = "32KiB",
    layers: Annotated[
        int, typer.Option(help="Layers on the GPU, each with a page of keys and a page of values for a block.")
    ] = _PAGES.num_layers,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(
            help="Blocks in one unit of storage.", show_default=f"CONFIG's, with {TOKENS_PER_BLOCK} tokens each"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Examine the path between GPU and host memory: GPU, link, NUMA node, pinning, and every way to copy.

    Tiers are not looked at. Registers a region of staging_bytes, 1 GiB at most, and copies chunks on scratch memory
    of its own. Without a GPU it examines the CPU's path. What each line means, and the JSON document, are told in
    docs/device-path.md.

    Exit codes: 0 nothing is wrong, 1 a problem was found, 2 wrong use.
    """
    console = messages()
    with logs_on(console):
        wanted = _wanted(
            None if config is None else OffloadConfig.from_file(config),
            device=None if device is None else _device(device),
            page_bytes=size_of("page-bytes", page_bytes),
            layers=layers,
            blocks_per_chunk=blocks_per_chunk,
        )
        section = examine_device_path(
            wanted, on_step=lambda step: console.print(f"doctor: {step}", markup=False, soft_wrap=True)
        )
    report = Report((section,))
    if as_json:
        print_json(report.document())
    else:
        out = results()
        _render_device_path(out, section)
        _render_verdict(out, report)
    if report.level == "problem":
        raise typer.Exit(1)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"--device {text!r}: give cuda, cuda:1 or cpu") from error


def _wanted(
    config: OffloadConfig | None,
    *,
    device: torch.device | None,
    page_bytes: int,
    layers: int,
    blocks_per_chunk: int | None,
) -> Wanted:
    if blocks_per_chunk is None:
        blocks_per_chunk = _PAGES.blocks_per_chunk if config is None else config.blocks_per_chunk_for(TOKENS_PER_BLOCK)
    pages = Pages(page_bytes, layers, blocks_per_chunk)
    return Wanted(device, pages) if config is None else Wanted.by(config, pages, device)


# ---- tables ----------------------------------------------------------------------------------


def _render_device_path(console: Console, section: DevicePath) -> None:
    console.print("device path", style="bold")
    console.print(_finding_table(section.findings))
    if section.seen.copies is not None and section.seen.copies.choices is not None:
        console.print(_way_table(section))


def _finding_table(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("", "what", "found"):
        table.add_column(name, no_wrap=name != "found")
    for finding in findings:
        found = Text(finding.text)
        if finding.remedy is not None:
            found.append(f"\n-> {finding.remedy}", style=_STYLES[finding.level])
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.name), found)
    return table


def _way_table(section: DevicePath) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("", "way", "GB/s", "of plain", "SMs", ""):
        table.add_column(name, justify="right" if name in ("GB/s", "of plain", "SMs") else "left", no_wrap=bool(name))
    copies = section.seen.copies
    assert copies is not None
    for name, choice in zip(DIRECTIONS, copies.choices or (), strict=True):
        if choice.plain_bytes_per_s is not None:
            table.add_row(name, "plain copy", _gb_per_s(choice.plain_bytes_per_s), "", "", "")
        for one in choice.measured:
            share = share_of_plain(choice, one.bytes_per_s)
            table.add_row(
                name,
                one.way.name,
                _gb_per_s(one.bytes_per_s),
                "-" if share is None else f"{share:.0%}",
                "any" if one.way.name == "torch" else str(one.way.programs),
                Text("taken" if one.way == choice.way else unusable_because(one) or ""),
            )
    return table


def _gb_per_s(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g}"


def _render_verdict(console: Console, report: Report) -> None:
    problems, notes = report.count("problem"), report.count("note")
    text = "nothing is wrong between GPU and host memory"
    if problems:
        text = f"{problems} problem{'s' if problems > 1 else ''}"
    if notes:
        text += f", {notes} note{'s' if notes > 1 else ''}"
    console.print(text, style=_STYLES[report.level])
