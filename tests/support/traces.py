"""Trace files for tests: written, or the public ones where they are to be found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvsluice.connector.replay.trace import Request


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def as_lines(requests: Sequence[Request]) -> list[dict[str, object]]:
    return [
        {
            "timestamp": round(request.time_s * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [int.from_bytes(key, "big") for key in request.keys],
        }
        for request in requests
    ]


def public_trace(name: str) -> Path | None:
    """A public trace, where the environment or a folder beside the repository has it."""
    given = os.environ.get("KVSLUICE_TRACES")
    folders = [Path(given)] if given else [parent / "shared" / "traces" for parent in Path(__file__).parents]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
