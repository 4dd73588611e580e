"""Drive a real vLLM engine that lives in a process of its own.

Run as a script this file is the engine's side: it makes one `LLM` and serves commands, one JSON
object a line, from standard input. Imported it is the caller's side: `EngineProcess` starts such a
process, ends it, and talks to it with a deadline on every answer. So a caller imports no vLLM, and
"a new engine" is really a new process, with nothing left of the one before but what a tier kept.

vLLM finds the repository's own top-level folder `kernels` where it looks for Hugging Face's package
of that name, so the repository root must not be on its path: the process runs in a folder of its
own, in which a link makes `kvsluice` importable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, final

__all__ = [
    "EngineError",
    "EngineProcess",
    "Served",
    "chunk_files",
    "distinct_chunks",
    "kv_transfer_config",
    "wait_until",
]

START_TIMEOUT_S: Final = 240.0
"""An engine of this size starts in 20 s on two idle cores; the rest is for machines that are not idle."""
ANSWER_TIMEOUT_S: Final = 120.0
RESET_TIMEOUT_S: Final = 30.0
SHUTDOWN_TIMEOUT_S: Final = 30.0
"""vLLM's own default kills the engine after 5 s, finished or not."""
POLL_S: Final = 0.02
LOG_TAIL_LINES: Final = 40

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    # An idle OpenMP thread spins for 200 ms by default, on the cores that a load would use.
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineError(RuntimeError):
    """The engine's process failed, ended or did not answer in time; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the engine served it.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: the ids that were generated, greedily.
        cached_tokens: prompt tokens that vLLM did not compute, as it counts them (`num_cached_tokens`): its own prefix
            cache's and the connector's, as planned when the request was admitted.
        first_token_s: from the request's arrival to its first token.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    cached_tokens: int
    first_token_s: float


def kv_transfer_config(
    extra_config: Mapping[str, object],
    *,
    connector: str = "SluiceConnector",
    module_path: str = "kvsluice.connector.vllm",
) -> dict[str, object]:
    """What `LLM(kv_transfer_config=...)` takes to use our connector with `extra_config`."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module_path,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra_config),
    }


def distinct_chunks(sequences: Sequence[Sequence[int]], tokens_per_chunk: int) -> int:
    """How many different full chunks `sequences` have together: a chunk is all tokens up to its end."""
    return len(
        {
            tuple(tokens[:end])
            for tokens in sequences
            for end in range(tokens_per_chunk, len(tokens) + 1, tokens_per_chunk)
        }
    )


def chunk_files(root: Path) -> list[Path]:
    """The chunk files below `root`, in the order of their paths."""
    return sorted(root.rglob("*.safetensors"))


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Ask `condition` again and again until it is true, at most for `timeout_s`; whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


@final
class EngineProcess:
    """A vLLM engine in a process of its own. A context manager; not thread-safe.

    Args:
        model: directory with the model.
        work_dir: made if missing; holds the link to the package, and the engine's log.
        kv_transfer: see `kv_transfer_config`; None starts vLLM without a connector.
        engine_args: more arguments for `LLM`, as JSON values.
        python_path: more folders to import from, for a connector that is not part of the package.
        environment: more environment variables.

    Raises:
        EngineError: the engine did not start.
    """

    def __init__(
        self,
        model: Path,
        work_dir: Path,
        *,
        kv_transfer: Mapping[str, object] | None = None,
        engine_args: Mapping[str, object] | None = None,
        python_path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        work_dir = work_dir.resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        package = work_dir / "kvsluice"
        if not package.is_symlink():
            package.symlink_to(Path(__file__).resolve().parents[1] / "kvsluice", target_is_directory=True)
        self.log_path = work_dir / "engine.log"
        settings = {
            "model": str(model.resolve()),
            "kv_transfer_config": None if kv_transfer is None else dict(kv_transfer),
            **(engine_args or {}),
        }
        answers, answers_of_child = os.pipe()
        self._unread = b""
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._commands: IO[bytes]
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve()), str(answers_of_child)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(answers_of_child,),
                    cwd=work_dir,
                    env={
                        **os.environ,
                        **ENVIRONMENT,
                        "PYTHONPATH": os.pathsep.join([str(work_dir), *(str(path.resolve()) for path in python_path)]),
                        **(environment or {}),
                    },
                    start_new_session=True,  # so that a failed engine and its workers can be ended as one group
                )
        finally:
            os.close(answers_of_child)
        assert self._process.stdin is not None
        self._commands = self._process.stdin
        started = time.monotonic()
        try:
            self._ask("start", START_TIMEOUT_S, settings=settings)
        except BaseException:
            self._kill()
            raise
        self.start_s = time.monotonic() - started

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, read_caches: bool = True, at_once: bool = False
    ) -> list[Served]:
        """Serve `prompts` greedily.

        Args:
            prompts: token ids.
            max_tokens: generated for each, whatever tokens they are.
            read_caches: False makes vLLM compute the whole prompt, whatever its prefix cache or the connector holds.
            at_once: submit all of them together instead of one after the other.

        Raises:
            EngineError: the engine failed.
        """
        served = self._ask(
            "generate",
            ANSWER_TIMEOUT_S,
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            read_caches=read_caches,
            at_once=at_once,
        )
        assert isinstance(served, list)
        return [
            Served(one["prompt_tokens"], tuple(one["tokens"]), one["cached_tokens"], one["first_token_s"])
            for one in served
        ]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Make vLLM forget its own prefix cache, so that the next hits come from the connector.

        It cannot while blocks are in use, be it by stores that are still being copied: asks again until it does.

        Raises:
            EngineError: it did not within `RESET_TIMEOUT_S`.
        """
        if not self._ask("reset", ANSWER_TIMEOUT_S, reset_connector=reset_connector):
            raise EngineError(f"vLLM's prefix cache was not reset within {RESET_TIMEOUT_S} s: blocks stayed in use")

    def connector_stats(self) -> dict[str, object]:
        """The connector's newest statistics: `OffloadStats` as nested dicts; empty if it sent none yet.

        Statistics travel with the engine's steps: this serves one tiny request to have a step.
        """
        stats = self._ask("stats", ANSWER_TIMEOUT_S)
        assert isinstance(stats, dict)
        return stats

    def close(self) -> None:
        """End the engine in an orderly way and wait for the process. Idempotent.

        Raises:
            EngineError: it did not end in time, or not cleanly; it is killed then.
        """
        if self._commands.closed:
            return
        try:
            self._ask("close", SHUTDOWN_TIMEOUT_S + ANSWER_TIMEOUT_S)
            self._commands.close()
            self._process.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"the engine process did not end: {self._log_tail()}") from error
        finally:
            self._kill()
        if self._process.returncode != 0:
            raise EngineError(f"the engine process ended with {self._process.returncode}: {self._log_tail()}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()  # the error that is on its way says more than whatever an orderly end would meet

    def _ask(self, command: str, timeout_s: float, **arguments: object) -> object:
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._commands.write(line.encode())
            self._commands.flush()
        except OSError as error:
            raise EngineError(f"the engine process is gone before {command!r}: {self._log_tail()}") from error
        answer: dict[str, object] = json.loads(self._read_line(command, timeout_s))
        if "error" in answer:
            raise EngineError(f"{command!r} failed: {answer['error']}: {self._log_tail()}")
        return answer["result"]

    def _read_line(self, command: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not selector.select(remaining_s):
                    raise EngineError(f"no answer to {command!r} within {timeout_s} s: {self._log_tail()}")
                received = self._answers.read(65536)
                if not received:
                    raise EngineError(f"the engine process ended at {command!r}: {self._log_tail()}")
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        with self.log_path.open(encoding="utf-8", errors="replace") as log:
            return "\n".join(["its log ends with", *(line.rstrip() for line in deque(log, LOG_TAIL_LINES))])

    def _kill(self) -> None:
        if not self._commands.closed:
            with contextlib.suppress(BrokenPipeError):  # what was left to flush has no reader any more
                self._commands.close()
        with contextlib.suppress(ProcessLookupError):  # after an orderly end nobody of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()


def _serve(answers: IO[str]) -> None:
    """The engine's side: answer commands until `close` or the end of standard input."""
    from vllm_server import EngineServer

    server: EngineServer | None = None
    for line in sys.stdin:
        request: dict[str, object] = json.loads(line)
        command = request.pop("command")
        try:
            if command == "start":
                server = EngineServer(request["settings"])
                result: object = None
            elif server is None:
                raise EngineError(f"{command!r} before 'start'")
            else:
                result = server.handle(str(command), request)
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller is told, and the log has the rest
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            answers.write(json.dumps({"result": result}) + "\n")
        answers.flush()
        if command == "close":
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="serve commands for EngineProcess")
    parser.add_argument("answers_fd", type=int)
    with os.fdopen(parser.parse_args().answers_fd, "w", encoding="utf-8") as stream:
        _serve(stream)
