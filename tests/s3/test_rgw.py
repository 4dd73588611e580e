"""The gateway of these tests: it starts, forgets, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import boto3.session
import pytest
import rgw as rgw_module
from botocore.exceptions import ClientError, EndpointConnectionError
from rgw import Rgw, RgwError, free_port

pytestmark = pytest.mark.s3

SCRIPT = Path(rgw_module.__file__)


def alive(pid: int) -> bool:
    """A zombie is not: it holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], folder: Path) -> None:
    deadline_s = time.monotonic() + 20.0
    while any(map(alive, pids)) or folder.exists():
        assert time.monotonic() < deadline_s, (pids, folder)
        time.sleep(0.02)


def test_stores_and_gives_back(rgw: Rgw, bucket: str) -> None:
    rgw.client.put_object(Bucket=bucket, Key="k", Body=b"bytes")
    assert rgw.client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"bytes"


def test_takes_no_other_secret(rgw: Rgw, bucket: str) -> None:
    stranger = boto3.session.Session().client(
        "s3",
        endpoint_url=rgw.endpoint_url,
        aws_access_key_id=rgw.access_key,
        aws_secret_access_key="other",
        region_name="us-east-1",
    )
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.list_objects_v2(Bucket=bucket)
    stranger.close()


def test_started_anew_it_is_empty_on_the_same_port_with_the_same_keys(own_rgw: Rgw) -> None:
    own_rgw.make_bucket("bucket")
    before = dict(own_rgw.pids)
    own_rgw.restart_empty()
    assert own_rgw.client.list_buckets()["Buckets"] == []
    assert set(before) == set(own_rgw.pids) == {"mon", "osd", "rgw"}
    assert not any(map(alive, before.values()))


def test_killed_nobody_answers(own_rgw: Rgw) -> None:
    before = list(own_rgw.pids.values())
    own_rgw.kill()
    assert not any(map(alive, before))
    with pytest.raises(EndpointConnectionError):
        own_rgw.client.list_buckets()


def test_stopped_it_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rgw"
    with Rgw(folder) as running:
        pids = list(running.pids.values())
        assert all(map(alive, pids))
    assert not any(map(alive, pids))
    assert not folder.exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_its_process_ends_by(end: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "rgw"
    program = (
        f"import pathlib, time\nfrom rgw import Rgw\nrgw = Rgw(pathlib.Path({str(folder)!r}))\n"
        "rgw.start()\nprint(*rgw.pids.values(), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        # As a terminal or a runner does it: the whole group.
        os.killpg(owner.pid, end)
    wait_until_gone(pids, folder)


def test_a_port_that_is_taken_is_said(rgw: Rgw) -> None:
    with pytest.raises(RgwError, match=f"port {rgw.port} cannot be had"):
        Rgw(port=rgw.port).start()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RgwError, match="is not empty"):
        Rgw(tmp_path).start()
    assert (tmp_path / "thesis.tex").exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RgwError, match=r"not installed: radosgw.* install"):
        Rgw().start()


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_by_command_it_runs_until_it_is_stopped(tmp_path: Path) -> None:
    folder, port = tmp_path / "rgw", free_port()
    started = run("start", str(folder), str(port))
    try:
        assert started.returncode == 0, started.stderr
        assert f"http://127.0.0.1:{port}" in started.stdout
        assert (folder / "env.sh").stat().st_mode & 0o777 == 0o600
        exports = subprocess.run(
            ["bash", "-c", f". {folder}/env.sh; echo $AWS_ENDPOINT_URL_S3"], capture_output=True, text=True, check=True
        )
        assert exports.stdout.strip() == f"http://127.0.0.1:{port}"
        again = run("start", str(folder), str(port))
        assert again.returncode == 1
        assert "runs in" in again.stderr
        assert "stop it first" in again.stderr
    finally:
        stopped = run("stop", str(folder))
    assert stopped.returncode == 0, stopped.stderr
    assert not folder.exists()
    assert run("stop", str(folder)).returncode == 0


def test_install_adds_nothing_where_nothing_is_missing() -> None:
    # Without apt-get in reach it could not.
    done = run("install")
    assert done.returncode == 0, done.stderr


def test_install_says_what_to_do_where_it_cannot() -> None:
    done = run("install", PATH="/nowhere")
    assert done.returncode == 1
    assert "not installed: radosgw" in done.stderr
    assert "apt-get" in done.stderr
