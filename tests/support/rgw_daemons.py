"""The daemons behind `rgw.Rgw`, and the keeper: a process that is their parent and outlives none of them.

The keeper ends them and removes the folder when it is told to, at SIGTERM, and when the pipe from its
`Rgw` closes, which the kernel does however a test run ends. Should the keeper itself be killed, the
kernel kills the daemons.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["HOST", "KEEPER_FILE", "KILL_TIMEOUT_S", "KMS_KEY_ID", "RgwError", "Spec", "birth_of", "free_port"]

HOST = "127.0.0.1"
KMS_KEY_ID = "test-key"
"""The one key that server-side encryption with `aws:kms` can name here."""
KEEPER_FILE = "keeper.pid"
KILL_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 60.0
"""About a second on two idle cores; this is for busy ones."""


class RgwError(Exception):
    """The gateway cannot be had, and why."""


@dataclass(frozen=True)
class Spec:
    """What a keeper is to keep."""

    folder: str
    port: int
    access_key: str
    secret_key: str
    capacity_bytes: int
    tethered: bool
    """Whether it ends with whoever started it."""


def free_port() -> int:
    """A port that nobody listens on, from below the range that outgoing connections take theirs from.

    So no client can be given it while its server is down, nor connect to itself.
    """
    lowest, highest = 20_000, 32_000
    for port in random.sample(range(lowest, highest), 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise RgwError(f"no free port between {lowest} and {highest}")


def birth_of(pid: int) -> str | None:
    """When a process was born, in ticks: tells it from a later one with its number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _config(spec: Spec, mon_port: int, fsid: str) -> str:
    folder = spec.folder
    settings: dict[str, dict[str, object]] = {
        "global": {
            "fsid": fsid,
            "mon host": f"v2:{HOST}:{mon_port}",
            "mon initial members": "a",
            "public addr": HOST,
            "cluster addr": HOST,
            # Only loopback reaches these ports. Without cephx no connection can be encrypted, and
            # the gateway asks for that unless each mode is named.
            **{f"auth {side} required": "none" for side in ("cluster", "service", "client")},
            **{
                f"ms {side} mode": "crc"
                for side in ("cluster", "service", "client", "mon cluster", "mon service", "mon client")
            },
            "ms bind msgr1": "false",
            "ms crc data": "false",
            "keyring": f"{folder}/keyring",
            "run dir": folder,
            "admin socket": "",
            "crash dir": f"{folder}/crash",
            "log to file": "false",
            "mon cluster log to file": "false",
            "log to stderr": "true",
            "err to stderr": "true",
            # One copy of everything, on the one OSD.
            "osd pool default size": 1,
            "osd pool default min size": 1,
            "osd pool default pg num": 8,
            "osd pool default pgp num": 8,
            "osd pool default pg autoscale mode": "off",
            "osd crush chooseleaf type": 0,
            "mon allow pool size one": "true",
            # What is asked for before the OSD is up is asked again only after 5 s otherwise.
            "objecter tick interval": 0.1,
            # The gateway writes a line per request otherwise.
            **{f"debug {part}": "0/0" for part in ("ms", "mon", "monc", "paxos", "auth", "osd", "objecter", "rgw")},
        },
        "mon": {
            "mon data": f"{folder}/mon",
            # It keeps a few MB, and shall not refuse to start on a disk that is nearly full.
            "mon data avail warn": 1,
            "mon data avail crit": 0,
            "paxos propose interval": 0.02,
            "paxos min wait": 0.01,
        },
        "osd": {
            "osd data": f"{folder}/osd",
            "osd objectstore": "memstore",
            "memstore device bytes": spec.capacity_bytes,
            # It enters itself into the cluster's map as it starts, so no tool has to.
            "osd crush update on start": "true",
            "osd crush initial weight": 1,
            "crush location": "root=default",
        },
        "client": {
            "rgw data": f"{folder}/rgw",
            "rgw frontends": f"beast endpoint={HOST}:{spec.port} tcp_nodelay=1",
            "rgw thread pool size": 64,
            # So that BUCKET.localhost is understood as well; any other host is taken for the path style.
            "rgw dns name": "localhost",
            "rgw dynamic resharding": "false",
            "rgw override bucket index max shards": 1,
            # What is deleted stays in memory for hours otherwise.
            "rgw gc obj min wait": 5,
            "rgw gc processor period": 5,
            "rgw gc processor max time": 60,
            "rgw crypt require ssl": "false",
            "rgw crypt s3 kms backend": "testing",
            "rgw crypt s3 kms encryption keys": f"{KMS_KEY_ID}=YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=",
        },
    }
    return "".join(
        f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in options.items())
        for section, options in settings.items()
    )


def _environment(conf: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
    environment["CEPH_CONF"] = str(conf)
    # With glibc's malloc each buffer of some MB is mapped and unmapped: a third of the throughput.
    # Debian's Ceph depends on this library and yet doesn't use it.
    found = sorted(Path("/usr/lib").glob("*/libtcmalloc.so.4"))
    if found:
        environment["LD_PRELOAD"] = str(found[0])
        environment["TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES"] = str(128 << 20)
    return environment


def _die_with_parent(parent: int) -> Callable[[], None]:
    """For a child before it runs its program. Only right where the parent has one thread."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


@dataclass
class _Daemons:
    """The monitor, the OSD and the gateway of one folder."""

    spec: Spec
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.spec.folder)

    def start(self) -> None:
        """From nothing to a gateway that answers.

        Raises:
            RgwError: one of them ended, or it took too long; the message has the end of its output.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.spec.port))
            except OSError as error:
                raise RgwError(f"port {self.spec.port} cannot be had: {error}") from error
        self._wipe()
        for name in ("mon", "osd", "rgw", "crash"):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "keyring").touch()
        fsid, osd_id, mon_port = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        (self.folder / "ceph.conf").write_text(_config(self.spec, mon_port, fsid))
        monmap = str(self.folder / "monmap")
        self._launch("osd-mkfs", "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id, "--no-mon-config")
        self._finish(
            deadline_s, "monmap", "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"v2:{HOST}:{mon_port}",
            "--enable-all-features", "--set-min-mon-release", "16", monmap,
        )  # fmt: skip
        self._finish(deadline_s, "mon-mkfs", "ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        self._launch("mon", "ceph-mon", "-i", "a", "-f")
        # Who comes before it listens tries again only after seconds.
        while not _listens(mon_port):
            self._check(deadline_s, "mon")
            time.sleep(0.005)
        self._join("osd-mkfs", deadline_s)
        self._launch("osd", "ceph-osd", "-i", "0", "-f")
        # Makes the zone and its pools on the way, and waits for the OSD.
        self._finish(
            deadline_s, "user", "radosgw-admin", "user", "create", "--uid", "tester", "--display-name", "tester",
            "--access-key", self.spec.access_key, "--secret-key", self.spec.secret_key,
        )  # fmt: skip
        self._launch("rgw", "radosgw", "-n", "client.rgw", "-f")
        while not self._serves():
            self._check(deadline_s, "rgw")
            time.sleep(0.02)

    def kill(self) -> None:
        """End them at once: there is nothing to save, and radosgw takes 5 s over SIGTERM.

        Raises:
            RgwError: the kernel did not end one in time.
        """
        for process in self.running.values():
            process.kill()
        while self.running:
            name, process = next(iter(self.running.items()))
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise RgwError(f"{name} (pid {process.pid}) does not end") from error
            del self.running[name]

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.running.items()}

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def _wipe(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != KEEPER_FILE:
                path.unlink()

    def _launch(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.folder / "ceph.conf"),
                preexec_fn=_die_with_parent(os.getpid()),  # noqa: PLW1509 - the keeper has one thread
            )

    def _finish(self, deadline_s: float, name: str, *command: str) -> None:
        self._launch(name, *command)
        self._join(name, deadline_s)

    def _join(self, name: str, deadline_s: float) -> None:
        process = self.running[name]
        while process.poll() is None:
            self._check(deadline_s, name)
            time.sleep(0.005)
        if process.returncode:
            raise self._failure(name, f"ended with {process.returncode}")
        del self.running[name]

    def _check(self, deadline_s: float, waiting_for: str) -> None:
        for name in ("mon", "osd", "rgw"):
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                raise self._failure(name, f"ended with {process.returncode} while starting")
        if time.monotonic() > deadline_s:
            raise self._failure(waiting_for, f"is not done after {_START_TIMEOUT_S:.0f} s")

    def _failure(self, name: str, what: str) -> RgwError:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return RgwError("\n".join([f"{name} {what}; the end of its output:", *lines[-20:]]))

    def _serves(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.spec.port, timeout=5.0)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _keep() -> None:
    """The keeper: a spec comes as the first line, then words; each is answered by one line of JSON."""
    spec = Spec(**json.loads(sys.stdin.readline()))
    daemons = _Daemons(spec)

    def leave(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    try:
        try:
            signal.signal(signal.SIGTERM, leave)
            (daemons.folder / KEEPER_FILE).write_text(f"{os.getpid()} {birth_of(os.getpid())}\n")
            _obey(daemons)
            while not spec.tethered and "rgw" in daemons.running:
                signal.pause()
        finally:
            # A signal may come as late as here; from here on it can't keep us from the rest.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        daemons.remove()


def _obey(daemons: _Daemons) -> None:
    """Until nobody can tell us anything more."""
    actions = {"start": daemons.start, "kill": daemons.kill}
    for line in sys.stdin:
        answer: dict[str, object] = {}
        try:
            actions[line.strip()]()
        except (RgwError, OSError) as error:
            answer["error"] = str(error)
        answer["pids"] = daemons.pids()
        # Who asked may be gone, and then the next line is the end.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _keep()
