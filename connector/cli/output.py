"""Where the commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Final

from rich.console import Console
from rich.logging import RichHandler

__all__ = ["STOPS", "logs_on", "messages", "print_json", "results", "say_error", "terminated_as_exit"]

STOPS: Final[Mapping[signal.Signals, str]] = {
    signal.Signals[name]: word
    for name, word in {"SIGTERM": "terminated", "SIGHUP": "hung up"}.items()
    if name in signal.Signals.__members__
}
"""The signals that end a command as Ctrl-C does, as far as the platform has them, and the word for each."""

_PLAIN_WIDTH = 120
"""Columns where the output is no terminal: wide enough that no table is folded."""


def results() -> Console:
    """stdout, as it is now."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def messages() -> Console:
    """stderr, as it is now: progress, logs and errors."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PLAIN_WIDTH, highlight=False)


def print_json(document: Mapping[str, object]) -> None:
    """The one document of `--json`."""
    print(json.dumps(document, indent=2, allow_nan=False))


def say_error(message: str) -> None:
    """One red line on stderr, whatever line breaks the message has."""
    text = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    messages().print(f"kvsluice: {text}", style="red", markup=False, soft_wrap=True)


@contextlib.contextmanager
def logs_on(console: Console) -> Iterator[None]:
    """Have the package's warnings printed on `console`, above a progress bar that is live there."""
    handler = RichHandler(logging.WARNING, console=console, show_time=False, show_path=False)
    logger = logging.getLogger("kvsluice")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _exit_on(number: int, frame: FrameType | None) -> None:
    # Whoever ends a session sends several: none of the others may stop the clean-up.
    for other in STOPS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Turn each of `STOPS` into `SystemExit(128 + its number)`, so that a command's clean-up runs.

    On the main thread alone; from the first one on they are ignored. One that is ignored before stays so:
    `nohup` ignores SIGHUP for what it starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in ours:
            signal.signal(number, _exit_on)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
