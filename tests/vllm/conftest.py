"""Real vLLM engines, as few as will do: each takes many seconds to start.

`first` is an engine that computed every prompt, with a host tier above a folder of chunk files; it is
over when a test sees it. `second` is a live one, a new process, whose only tier is that folder.
`hostile` is what came of the scenarios of `hostile_engine.py`, one engine in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "examples"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from vllm_engine import (  # noqa: E402
    ENVIRONMENT,
    EngineProcess,
    chunk_files,
    distinct_chunks,
    kv_transfer_config,
    wait_until,
)
from vllm_model import make_model  # noqa: E402
from vllm_scenario import LONE_PROMPT, PROMPTS, TOKENS_PER_CHUNK, First, Second, sluice_config  # noqa: E402

STORES_TIMEOUT_S = 60.0
HOSTILE_TIMEOUT_S = 400.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> First:
    base = tmp_path_factory.mktemp("first")
    root = base / "chunks"
    root.mkdir()
    with EngineProcess(
        model, base / "engine", kv_transfer=kv_transfer_config(sluice_config(root, host=True))
    ) as engine:
        cold = engine.generate(PROMPTS, read_caches=False)
        sequences = [prompt + list(served.tokens[:-1]) for prompt, served in zip(PROMPTS, cold, strict=True)]
        shared_files = _stored(root, distinct_chunks(sequences, TOKENS_PER_CHUNK))
        (lone,) = engine.generate([LONE_PROMPT], read_caches=False)
        sequences.append(LONE_PROMPT + list(lone.tokens[:-1]))
        all_files = _stored(root, distinct_chunks(sequences, TOKENS_PER_CHUNK))
        kept = base / "kept"
        shutil.copytree(root, kept)
        for path in chunk_files(root):
            path.unlink()
        engine.reset_prefix_cache()
        again = engine.generate(PROMPTS)
        stats = engine.connector_stats()
    lone_files = [kept / path.relative_to(root) for path in sorted(all_files - shared_files)]
    return First(cold, lone, again, kept, lone_files, stats)


@pytest.fixture(scope="session")
def second(model: Path, first: First, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    base = tmp_path_factory.mktemp("second")
    zero_dir = base / "zero"
    zero_dir.mkdir()
    transfer = kv_transfer_config(
        sluice_config(first.root, host=False), connector="ZeroingConnector", module_path="zeroing_connector"
    )
    with EngineProcess(
        model,
        base / "engine",
        kv_transfer=transfer,
        python_path=[HERE],
        environment={"KVSLUICE_TEST_ZERO_DIR": str(zero_dir)},
    ) as engine:
        yield Second(engine, zero_dir / "on")


@pytest.fixture(scope="session")
def hostile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    base = tmp_path_factory.mktemp("hostile")
    # vLLM must not find the repository's own folder `kernels`, so the package is linked into a folder of its own.
    (base / "kvsluice").symlink_to(HERE.parents[1] / "kvsluice", target_is_directory=True)
    results = base / "results.json"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Idle compute threads would spin for 200 ms on cores that the engine's other threads need.
        "KMP_BLOCKTIME": "0",
        "PYTHONPATH": os.pathsep.join([str(base), str(HERE.parents[1] / "examples")]),
    }
    with (base / "engine.log").open("w", encoding="utf-8") as log:
        ended = subprocess.run(
            [sys.executable, str(HERE / "hostile_engine.py"), str(model), str(base / "chunks"), str(results)],
            cwd=base,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=HOSTILE_TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, (base / "engine.log").read_text(encoding="utf-8", errors="replace")[-4000:]
    told: dict[str, dict[str, object]] = json.loads(results.read_text(encoding="utf-8"))
    return told


def _stored(root: Path, expected: int) -> set[Path]:
    assert wait_until(lambda: len(chunk_files(root)) >= expected, timeout_s=STORES_TIMEOUT_S), (
        f"{len(chunk_files(root))} of {expected} chunk files"
    )
    files = set(chunk_files(root))
    assert len(files) == expected
    return files
