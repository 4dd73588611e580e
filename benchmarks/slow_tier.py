"""A tier that takes a second per chunk, a flood of stores, and then the same tier healthy again.

    python benchmarks/slow_tier.py [--json] [--tiny]

A wrapper around the fs tier sleeps before each write while it is "slow". The flood goes on all the
time. Every second one line: stores asked for, stored and dropped in that second, the gate's EMA
against its marks, slots in use, and resident memory. Exits 1 unless the gate dropped stores while
the tier was slow, let them through again afterwards, and memory stayed flat.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from scheduling_path import BLOCKS_PER_CHUNK, key, layout

from kvsluice.connector import OffloadConfig, OffloadConnector
from kvsluice.tiers import FileSystemTier


class SlowTier(FileSystemTier):
    """The fs tier, `delay_s` slower for each chunk."""

    delay_s = 0.0

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        time.sleep(self.delay_s)
        return super().store(key, buffer, num_bytes)


@dataclass(frozen=True)
class Second:
    at_s: float
    tier: str
    asked: int
    stored: int
    dropped: int
    ema_s_per_mib: float
    pinned_slots: int
    resident_mib: float


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def run(slow_s: float, healthy_s: float, delay_s: float, tick_s: float) -> list[Second]:
    seconds = []
    chunks = 64
    with tempfile.TemporaryDirectory() as root:
        config = OffloadConfig.from_dict(
            {
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "staging_bytes": "64MiB",
                "tiers": [{"type": "fs", "root_dir": root, "capacity": "512MiB", "max_queue_s": 2.0}],
            }
        )
        with patch("kvsluice.connector.ladder.FileSystemTier", SlowTier):
            conn = OffloadConnector(config, layout(chunks * BLOCKS_PER_CHUNK))
        number = asked = stored = dropped = 0
        blocks = list(range(BLOCKS_PER_CHUNK))
        begin = next_line = time.monotonic()
        with conn:
            while (now := time.monotonic()) < begin + slow_s + healthy_s:
                slow = now < begin + slow_s
                SlowTier.delay_s = delay_s if slow else 0.0
                conn.store([key(number)], blocks)
                number += 1
                conn.poll()
                conn.poll_released()
                if now >= next_line:
                    stats = conn.stats()
                    tier = stats.tiers["fs"]
                    now_dropped = sum(tier.dropped.values())
                    seconds.append(
                        Second(
                            now - begin,
                            "slow" if slow else "healthy",
                            number - asked,
                            tier.chunks_stored - stored,
                            now_dropped - dropped,
                            tier.gate.store_latency_ema_s if tier.gate else 0.0,
                            stats.pool.pinned,
                            resident_mib(),
                        )
                    )
                    asked, stored, dropped = number, tier.chunks_stored, now_dropped
                    next_line += tick_s
                time.sleep(0.004)
            conn.check_integrity()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of a minute; shows that it runs")
    args = parser.parse_args()
    seconds = run(3.0, 1.0, 0.2, 0.5) if args.tiny else run(15.0, 35.0, 1.0, 1.0)
    slow = [second for second in seconds[1:] if second.tier == "slow"]
    healthy = [second for second in seconds if second.tier == "healthy"]
    # Half of the flood refused in the last third of the slow phase; half of it stored in the last of the healthy one.
    late = slow[-max(1, len(slow) // 3) :]
    dropped = sum(second.dropped for second in late) > 0.5 * sum(second.asked for second in late)
    last = healthy[-max(1, len(healthy) // 5) :]
    recovered = sum(second.stored for second in last) > 0.5 * sum(second.asked for second in last)
    half = len(seconds) // 4
    growth_mib = seconds[-1].resident_mib - seconds[half].resident_mib
    flat = growth_mib < 80.0  # the region's own 64 MiB become resident as its slots are first used
    if args.json:
        print(json.dumps([asdict(second) for second in seconds]))
    else:
        print(f"{'s':>5} {'tier':8}{'asked':>7}{'stored':>8}{'dropped':>9}{'EMA s/MiB':>11}{'slots':>7}{'RSS MiB':>9}")
        for row in seconds:
            print(
                f"{row.at_s:5.1f} {row.tier:8}{row.asked:7}{row.stored:8}{row.dropped:9}{row.ema_s_per_mib:11.4f}"
                f"{row.pinned_slots:7}{row.resident_mib:9.0f}"
            )
        print(f"dropped while slow: {dropped}; stored again afterwards: {recovered}; memory grew {growth_mib:.0f} MiB")
    return 0 if args.tiny or (dropped and recovered and flat) else 1


if __name__ == "__main__":
    sys.exit(main())
