"""The demo's hold on an engine process: start it, read what it reports, kill it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from demo_engine import Spec
from pydantic import BaseModel, TypeAdapter
from typing_extensions import Self

__all__ = ["EngineProcess", "Served", "StageError", "StageResult", "TierReport"]


class StageError(Exception):
    """An engine process did not do its part; the message has the end of its log."""


class Served(BaseModel):
    """One prompt as it was served; see `engine.Completion`."""

    run: str
    prompt: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    hit_tokens: int
    first_token_s: float


class TierReport(BaseModel):
    """One tier of one engine process: counts as `(chunks, bytes)`, gate as `(under pressure, s/MiB)`."""

    stored: tuple[int, int]
    loaded: tuple[int, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    missed: dict[str, int]
    gate: tuple[bool, float] | None


@dataclass(slots=True)
class StageResult:
    """All that an engine process reported."""

    served: dict[str, list[Served]] = field(default_factory=dict)
    """By run: "cold", "host", "fs", "obj", "control"."""
    tiers: dict[str, TierReport] = field(default_factory=dict)


_EVENT = TypeAdapter(dict[str, object])


class EngineProcess:
    """One run of `demo_engine.py`. Leaving the context kills what is left of it."""

    def __init__(self, spec: Spec, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("demo_engine.py")
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(asdict(spec))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def run(self, timeout_s: float, progress: Callable[[str, int], None]) -> StageResult:
        """Read its reports until it is done, or until its stores are durable: then kill it.

        Raises:
            StageError: it failed, or said nothing for `timeout_s`.
        """
        result = StageResult()
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise StageError(f"an engine process said nothing for {timeout_s} s") from None
            if line is None:
                code = self._process.wait()
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
                raise StageError(f"an engine process ended with {code}:\n{tail}")
            event = _EVENT.validate_json(line)
            match event["event"]:
                case "served":
                    served = Served.model_validate(event)
                    result.served.setdefault(served.run, []).append(served)
                    progress(f"{served.run} prompt {served.prompt + 1}: {served.first_token_s * 1e3:.0f} ms", 1)
                case "again":
                    progress(f"offering again what was turned away: {event['lacking']}", 0)
                case "stats":
                    result.tiers = TypeAdapter(dict[str, TierReport]).validate_python(event["tiers"])
                    progress("transfers have ended", 1)
                case "durable":
                    os.kill(self._process.pid, signal.SIGKILL)
                    if (code := self._process.wait()) != -signal.SIGKILL:
                        raise StageError(f"an engine process ended with {code} before it could be killed")
                    progress(f"all stored; killed process {self._process.pid}", 1)
                    return result
                case "done":
                    if code := self._process.wait(timeout=timeout_s):
                        raise StageError(f"an engine process ended with {code} after it was done")
                    progress("done", 1)
                    return result
                case other:
                    progress(str(other), 1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)
