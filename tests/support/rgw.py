"""A throw-away Ceph RADOS Gateway on the loopback interface, for the tests and for trying things out.

One monitor, one OSD that keeps everything in memory, one gateway, all from Debian's packages; no
manager, and no authentication between them.

    python tests/support/rgw.py install          adds the packages that are missing, as root
    python tests/support/rgw.py start DIR PORT   in the background; DIR/env.sh says how to reach it
    python tests/support/rgw.py stop DIR

A keeper process holds the daemons (see `rgw_daemons`); nothing is left behind, however a test run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import rgw_daemons
from rgw_daemons import HOST, KEEPER_FILE, KILL_TIMEOUT_S, KMS_KEY_ID, RgwError, Spec, birth_of, free_port
from typing_extensions import Self

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["KMS_KEY_ID", "REGION", "Rgw", "RgwError", "free_port", "missing_programs"]

REGION = "us-east-1"

_PROGRAMS = {
    "radosgw": "radosgw",
    "radosgw-admin": "ceph-common",
    "ceph-mon": "ceph-mon",
    "monmaptool": "ceph-base",
    "ceph-osd": "ceph-osd",
}
"""What is run, and the Debian package that has it."""


def missing_programs() -> list[str]:
    """What is not installed, of all that is run."""
    return [program for program in _PROGRAMS if shutil.which(program) is None]


# ---- the gateway, as tests see it ------------------------------------------------------------------


_BUCKET = "kv-cache"


class Rgw:
    """A gateway that runs while the context is entered, and leaves neither processes nor files.

    Not thread-safe: one thread at a time starts, kills and stops it.

    Args:
        folder: empty or absent; `None` for a temporary one. Removed at the end.
        port: of the S3 service; `None` for a free one.
        access_key, secret_key: `None` for random ones.
        capacity_bytes: room for objects. Each byte stored takes two of memory; when it is full GET
            goes on, PUT and DELETE hang.
        tethered: whether it ends with this process.
    """

    def __init__(
        self,
        folder: Path | None = None,
        port: int | None = None,
        *,
        access_key: str | None = None,
        secret_key: str | None = None,
        capacity_bytes: int = 4 << 30,
        tethered: bool = True,
    ) -> None:
        self._folder = folder
        self.port = port or free_port()
        self.access_key = access_key or "AK" + secrets.token_hex(9).upper()
        self.secret_key = secret_key or secrets.token_hex(20)
        self._capacity_bytes = capacity_bytes
        self._tethered = tethered
        self._keeper: subprocess.Popen[str] | None = None
        self._client: S3Client | None = None
        self.pids: dict[str, int] = {}
        """Of the daemons that run, by name: `mon`, `osd`, `rgw`."""

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def credentials(self) -> dict[str, str]:
        """As the object tier takes them."""
        return {"access_key": self.access_key, "secret_key": self.secret_key}

    @property
    def environment(self) -> dict[str, str]:
        """As AWS' own tools take them."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
        }

    @property
    def client(self) -> S3Client:
        """A plain client past the tier, to prepare and to look; thread-safe."""
        if self._client is None:
            import boto3.session
            from botocore.config import Config

            self._client = boto3.session.Session().client(
                "s3",
                endpoint_url=self.endpoint_url,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                region_name=REGION,
                config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, max_pool_connections=32),
            )
        return self._client

    def make_bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it serves.

        Raises:
            RgwError: a program is missing, or a daemon would not start.
        """
        if self._keeper is not None:
            raise RgwError("it is running")
        if missing := missing_programs():
            raise RgwError(f"not installed: {', '.join(missing)}; run: {sys.executable} {__file__} install")
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="kvsluice-rgw-"))
        else:
            folder = self._folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise RgwError(f"{folder} is not empty")
        self._keeper = subprocess.Popen(
            [sys.executable, rgw_daemons.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # An untethered one would keep our caller's open.
            stderr=None if self._tethered else subprocess.DEVNULL,
            # Out of the terminal's reach: an interrupt is for the tests, which then end in order.
            start_new_session=True,
            text=True,
        )
        spec = Spec(
            str(folder), self.port, self.access_key, self.secret_key, self._capacity_bytes, tethered=self._tethered
        )
        try:
            self._tell(json.dumps(asdict(spec)) + "\nstart")
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End all daemons as a crash would; nothing answers, and what was stored is lost."""
        self._tell("kill")

    def restart_empty(self) -> None:
        """Kill it, and start it on the same port with the same keys and nothing stored, not even buckets."""
        self.kill()
        self._tell("start")

    def stop(self) -> None:
        """End it and remove its folder; may be called twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.stdout.close()
        # In the middle of a start it hears the pipe close only after that.
        self._keeper.terminate()
        self._keeper.wait(2 * KILL_TIMEOUT_S)
        self._keeper = None
        self.pids = {}

    def detach(self) -> None:
        """Leave an untethered one running by itself."""
        if self._keeper is None or self._tethered:
            raise RgwError("only one that runs untethered can be left")
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        self._keeper.returncode = 0  # it is nobody's child from here on, and no warning is due
        self._keeper = None

    def _tell(self, words: str) -> None:
        if self._keeper is None:
            raise RgwError("it is not running")
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(words + "\n")
        self._keeper.stdin.flush()
        line = self._keeper.stdout.readline()
        if not line:
            raise RgwError("the keeper ended")
        answer = json.loads(line)
        self.pids = answer["pids"]
        if "error" in answer:
            raise RgwError(answer["error"])


# ---- the command line ------------------------------------------------------------------------------


def _install() -> None:
    missing = missing_programs()
    if not missing:
        return
    packages = sorted({_PROGRAMS[program] for program in missing})
    # Recommended packages would bring a manager and a dashboard.
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    if shutil.which("apt-get") is None:
        raise RgwError(
            f"not installed: {', '.join(missing)}; there is no apt-get: install Ceph's radosgw by other means"
        )
    if os.geteuid() != 0:
        raise RgwError(f"not installed: {', '.join(missing)}; as root, run: {shlex.join(command)}")
    print(f"adding {', '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-q"], [*command, "-o", "DPkg::Lock::Timeout=120"]):
        done = subprocess.run(
            step,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RgwError(f"{shlex.join(step)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    if still := missing_programs():
        raise RgwError(f"still not installed: {', '.join(still)}")


def _start(folder: Path, port: int) -> None:
    if (folder / KEEPER_FILE).exists():
        raise RgwError(f"one runs in {folder} already, or was killed: stop it first")
    rgw = Rgw(folder, port, tethered=False)
    rgw.start()
    rgw.make_bucket(_BUCKET)
    exports = "".join(f"export {name}={value}\n" for name, value in rgw.environment.items())
    env_file = folder.absolute() / "env.sh"
    env_file.touch(mode=0o600)
    env_file.write_text(exports)
    rgw.detach()
    print(f"serves at {rgw.endpoint_url}, with a bucket {_BUCKET!r}; for its credentials: . {env_file}")


def _stop(folder: Path) -> None:
    keeper_file = folder / KEEPER_FILE
    try:
        word, birth = keeper_file.read_text().split()
    except FileNotFoundError:
        print(f"nothing runs in {folder}")
        return
    pid = int(word)
    if birth_of(pid) != birth:
        raise RgwError(f"the keeper of {folder} is gone, and its daemons with it: remove the folder")
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 2 * KILL_TIMEOUT_S
    while folder.exists():
        if time.monotonic() > deadline_s:
            raise RgwError(f"the keeper of {folder} (pid {pid}) does not end")
        time.sleep(0.02)
    print("stopped")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rgw.py", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install", help="add the packages that are missing, as root")
    start = verbs.add_parser("start", help="in the background, until it is stopped")
    start.add_argument("folder", type=Path, help="empty or absent; takes the daemons' files")
    start.add_argument("port", type=int, help="of the S3 service, on loopback")
    verbs.add_parser("stop", help="end it and remove its folder").add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.verb == "install":
            _install()
        elif args.verb == "start":
            _start(args.folder, args.port)
        else:
            _stop(args.folder)
    except RgwError as error:
        print(f"rgw: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
