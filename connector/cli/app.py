"""The typer application: which commands there are, and what becomes of an error."""

from __future__ import annotations

import importlib.metadata
import signal
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from kvsluice.connector.cli.calibrate import calibrate
from kvsluice.connector.cli.doctor import doctor
from kvsluice.connector.cli.output import STOPS, say_error, terminated_as_exit
from kvsluice.connector.cli.replay import replay
from kvsluice.tiers.errors import ConfigError, LayoutError, SluiceError

__all__ = ["app", "run"]

_STOPPED: Final = {128 + number: word for number, word in {signal.SIGINT: "interrupted", **STOPS}.items()}

app = typer.Typer(
    name="kvsluice",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("calibrate")(calibrate)
app.command("doctor")(doctor)
app.command("replay")(replay)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("kvsluice"))
        raise typer.Exit


@app.callback()
def _kvsluice(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV Sluice: KV-cache offload to host memory, filesystem and object store."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. One of our own errors is one red line on stderr."""
    try:
        with terminated_as_exit():
            app(args=None if argv is None else list(argv), prog_name="kvsluice")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code in _STOPPED:
            say_error(_STOPPED[code])
        return code
    except SluiceError as error:
        say_error(str(error))
        return 2 if isinstance(error, (ConfigError, LayoutError)) else 1
    return 0
