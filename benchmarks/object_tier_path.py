"""A TCP forwarder on loopback that limits each connection: it stands for a wide-area path.

    python benchmarks/object_tier_path.py HOST PORT MBPS RTT_MS

On such a path one connection gets what its window, its losses and the provider's limit per connection
leave it, and each answer comes a round trip later; more connections get more. Here each connection
and direction has a token bucket of its own, and what is passed on is passed on half a round trip
later. Slow start, losses and a limit for all connections together are not modelled.

Prints its own port, serves until its standard input ends, and then takes its connections with it.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_PIECE_BYTES: Final = 64 << 10
_BURST_BYTES: Final = 256 << 10
"""What a connection that idled may send at once: a few pieces, so that late wake-ups do not cost rate."""
_QUEUED_PIECES: Final = 1024
"""Bounds what is on its way; a rate and a delay ask for far less."""


class TokenBucket:
    """When the next bytes may pass at `bytes_per_s`. Not thread-safe: one direction's own."""

    def __init__(self, bytes_per_s: float, burst_bytes: int, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._paid_until_s = now_s - self._burst_s

    def take(self, num_bytes: int, now_s: float) -> float:
        """The time at which `num_bytes` more have passed; never before `now_s`."""
        self._paid_until_s = max(self._paid_until_s, now_s - self._burst_s) + num_bytes / self._bytes_per_s
        return max(now_s, self._paid_until_s)


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def _read(source: socket.socket, pieces: queue.Queue[tuple[float, bytes]], bytes_per_s: float, delay_s: float) -> None:
    bucket = TokenBucket(bytes_per_s, _BURST_BYTES, time.monotonic())
    try:
        while piece := source.recv(_PIECE_BYTES):
            passed_s = bucket.take(len(piece), time.monotonic())
            pieces.put((passed_s + delay_s, piece))
            # Until it has passed nothing more is read, so that the sender feels the limit.
            _sleep_until(passed_s)
    except OSError:
        pass  # The other end is told below, as it would be by an end of the stream.
    finally:
        pieces.put((time.monotonic() + delay_s, b""))


def _write(pieces: queue.Queue[tuple[float, bytes]], source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            due_s, piece = pieces.get()
            _sleep_until(due_s)
            if not piece:
                break
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # Nobody takes what comes from the source any more: end it, so that its sender hears of that.
        with suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)
        while pieces.get()[1]:
            pass


def _forward(near: socket.socket, far: socket.socket, bytes_per_s: float, delay_s: float) -> None:
    """Both directions of one connection, until both have ended."""
    threads = []
    for source, target in ((near, far), (far, near)):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUED_PIECES)
        threads += [
            threading.Thread(target=_read, args=(source, pieces, bytes_per_s, delay_s), daemon=True),
            threading.Thread(target=_write, args=(pieces, source, target), daemon=True),
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    near.close()
    far.close()


def _serve(listener: socket.socket, host: str, port: int, bytes_per_s: float, delay_s: float) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((host, port))
        except OSError:
            near.close()
            continue
        threading.Thread(target=_forward, args=(near, far, bytes_per_s, delay_s), daemon=True).start()


@contextmanager
def limited_path(host: str, port: int, mbps: float, rtt_ms: float) -> Iterator[int]:
    """A forwarder to `host:port` in a process of its own, which shares no interpreter with the clients; its port."""
    command = [sys.executable, __file__, host, str(port), str(mbps), str(rtt_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def main() -> int:
    host, port, mbps, rtt_ms = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        serving = threading.Thread(target=_serve, args=(listener, host, port, mbps * 1e6, rtt_ms / 2e3), daemon=True)
        serving.start()
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
