"""How long the calls on an engine's scheduling path take while the fs tier stores at full rate.

    python benchmarks/scheduling_path.py [--root DIR] [--seconds S] [--json] [--tiny]

One thread plays the engine: every few milliseconds a step with `store`, `load`, `lookup` and `poll`,
each timed, while the fs tier's threads write without a pause. Once with the interpreter to itself
and once beside a thread that computes in Python without a break. The bounds: 2 ms at the 99th
percentile, and 6 ms more (one interpreter switch interval of 5 ms and a little) beside the busy
thread. The baseline printed beside each call is the same call on a connector that has nothing to do.
Exits 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kvsluice.connector import KVLayout, OffloadConfig, OffloadConnector

BOUND_S = 0.002
BUSY_BOUND_S = BOUND_S + 0.006
CALLS = ("store", "load", "lookup", "poll")
TOKENS_PER_BLOCK = 16
BLOCKS_PER_CHUNK = 16
KEYS_PER_CALL = 16
LOOKUP_KEYS = 256


@dataclass(frozen=True)
class Row:
    call: str
    beside: str
    calls: int
    p50_us: float
    p99_us: float
    max_us: float
    idle_p99_us: float
    bound_us: float
    ok: bool


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Busy:
    """A thread that computes in Python until it is told to stop."""

    def __init__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def _spin(self) -> None:
        count = 0
        while not self._stop:
            count += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def layout(num_blocks: int) -> KVLayout:
    """Eight layers of 4 KiB a block: chunks of 512 KiB."""
    kv = {f"layer.{at}": torch.zeros(num_blocks, 2, TOKENS_PER_BLOCK, 2, 16) for at in range(8)}
    return KVLayout.from_tensors(kv, TOKENS_PER_BLOCK)


def steps(
    root: str, seconds: float, busy: bool, *, flood: bool, step_s: float
) -> tuple[dict[str, list[float]], float, int]:
    """Run the engine's loop; seconds per call, fs bytes per second, chunks dropped."""
    chunks = 64
    config = OffloadConfig.from_dict(
        {
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            "staging_bytes": "128MiB",
            "tiers": [{"type": "fs", "root_dir": root, "capacity": "4GiB", "max_queue_chunks": 128}],
            # Without a gate the disk is kept as busy as the threads can make it: the worst case for the calls.
            "backpressure": None,
        }
    )
    samples: dict[str, list[float]] = {call: [] for call in CALLS}

    def timed(call: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        samples[call].append(time.perf_counter() - start)

    with (
        OffloadConnector(config, layout(chunks * BLOCKS_PER_CHUNK)) as conn,
        Busy() if busy else contextlib.nullcontext(),
    ):
        base = [key(number) for number in range(LOOKUP_KEYS)]
        blocks = list(range(chunks * BLOCKS_PER_CHUNK))
        width = KEYS_PER_CALL * BLOCKS_PER_CHUNK
        known = base[:KEYS_PER_CALL]
        conn.wait([conn.store(known, blocks[:width])], timeout_s=30)
        number = 1_000
        end = time.perf_counter() + seconds
        start = time.perf_counter()
        while time.perf_counter() < end:
            begin = time.perf_counter()
            # As an engine does at each step: lookups weigh what is held against it.
            conn.observe_prefill(2048, 0.1)
            if flood:
                fresh = [key(number + at) for at in range(KEYS_PER_CALL)]
                number += KEYS_PER_CALL
            else:
                fresh = known
            timed("store", partial(conn.store, fresh, blocks[width : 2 * width]))
            timed("load", lambda: conn.load(known[:4], blocks[: 4 * BLOCKS_PER_CHUNK]))
            timed("lookup", lambda: conn.lookup(base))
            timed("poll", conn.poll)
            conn.poll_released()
            time.sleep(max(0.0, step_s - (time.perf_counter() - begin)))
        stats = conn.stats().tiers["fs"]
        rate = stats.bytes_stored / (time.perf_counter() - start)
        dropped = sum(stats.dropped.values())
    return samples, rate, dropped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", help="directory on the device to flood; a temporary one by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="per run")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time from one engine step to the next")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a second in all: shows that it runs, measures nothing")
    args = parser.parse_args()
    seconds = 0.2 if args.tiny else args.seconds
    rows = []
    rates = []
    with tempfile.TemporaryDirectory(dir=args.root) as root:
        for busy, bound_s in ((False, BOUND_S), (True, BUSY_BOUND_S)):
            idle, _, _ = steps(f"{root}/i{busy}", seconds / 4, busy, flood=False, step_s=args.step_ms / 1e3)
            samples, rate, dropped = steps(f"{root}/f{busy}", seconds, busy, flood=True, step_s=args.step_ms / 1e3)
            rates.append((rate, dropped))
            for call in CALLS:
                p99_s = percentile(samples[call], 0.99)
                rows.append(
                    Row(
                        call,
                        "a busy thread" if busy else "nothing",
                        len(samples[call]),
                        percentile(samples[call], 0.5) * 1e6,
                        p99_s * 1e6,
                        max(samples[call]) * 1e6,
                        percentile(idle[call], 0.99) * 1e6,
                        bound_s * 1e6,
                        p99_s <= bound_s or args.tiny,
                    )
                )
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    if args.json:
        print(
            json.dumps(
                {"machine": machine, "fs_store_MBps": [r / 1e6 for r, _ in rates], "rows": [asdict(r) for r in rows]}
            )
        )
    else:
        print(
            f"{machine}; fs stores at {rates[0][0] / 1e6:.0f} MB/s, {rates[1][0] / 1e6:.0f} MB/s beside the busy thread"
        )
        print(f"{'call':8}{'beside':16}{'calls':>7}{'p50 us':>9}{'p99 us':>9}{'max us':>9}{'idle p99':>10}{'bound':>8}")
        for row in rows:
            print(
                f"{row.call:8}{row.beside:16}{row.calls:7}{row.p50_us:9.0f}{row.p99_us:9.0f}{row.max_us:9.0f}"
                f"{row.idle_p99_us:10.0f}{row.bound_us:8.0f}  {'ok' if row.ok else 'MISSED'}"
            )
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
