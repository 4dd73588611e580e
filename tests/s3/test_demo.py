"""The main job on a real object store, as somebody would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rgw import Rgw

pytestmark = pytest.mark.s3

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.timeout(240)
def test_an_engine_s_cache_outlives_it_in_the_gateway(rgw: Rgw, tmp_path: Path) -> None:
    """Both sizes at once, as two engines on one store and one bucket."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment["AWS_ACCESS_KEY_ID"] = rgw.access_key
    environment["AWS_SECRET_ACCESS_KEY"] = rgw.secret_key
    # As it says it is: made if it is missing.
    running = {}
    for size in ("tiny", "full"):
        command = [sys.executable, str(DEMO), "--size", size, "--endpoint-url", rgw.endpoint_url]
        running[size] = subprocess.Popen(
            [*command, "--work-dir", str(tmp_path / size)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        said = {size: process.communicate()[0] for size, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    for size, words in said.items():
        assert running[size].returncode == 0, words
        assert words.splitlines()[-1] == "identical tokens: yes"
        assert rgw.secret_key not in words
    logs = list(tmp_path.rglob("*.log"))
    assert len(logs) == 6
    assert not any(rgw.secret_key in log.read_text(errors="replace") for log in logs)
