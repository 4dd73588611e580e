"""The command line `kvsluice`: one module per command, which parses, calls a library function and renders.

Exit codes: 0 fine, 1 the check or measurement failed, 2 wrong use or configuration, 130 interrupted
(143 terminated, 129 hung up). Results go to stdout, progress and messages to stderr; with `--json` stdout is one
JSON document, or empty where the command failed before it had one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own arguments); the exit code.

    typer and rich are imported here, so that the package imports without the `cli` extra.
    """
    try:
        from kvsluice.connector.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"kvsluice: the command line needs {error.name}: pip install 'kvsluice[cli]'", file=sys.stderr)
        return 2
    return run(argv)
