"""Loads beside a flood of stores on a device that is slowed for real, and on one that hangs.

    python benchmarks/slowed_device.py [--rate MBPS] [--request-us US] [--seconds S] [--seed N] [--json] [--tiny]

The fs tier lies on an ext4 file system whose block device serves all requests in flight at a fixed
rate, evenly (`slowed_device_mount`). Batches of loads take about 30 % of the device's time: first
alone, then beside twice the stores that the rest of it can take: without a gate and with loads and
stores in one queue (which no setting does), without a gate, with the policy that drops everything
under pressure, and with the defaults; then with the defaults and half the stores that the rest can
take. At last the device hangs for a while, beside as many stores as fit and under the flood.

Exits 1 when a claim fails, and 2 where no device can be slowed: that takes Linux, root, /dev/fuse
and loop devices.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import slowed_device_report as report
from scheduling_path import percentile
from slowed_device_mount import SlowedDevice, UnavailableError, enter_private_mounts
from slowed_device_pace import Speed
from slowed_device_report import FULL_RATE, Costs, HangRun, Report, Run, back_at_rate_s
from slowed_device_traffic import (
    BLOCKS_PER_CHUNK,
    CHUNK_BYTES,
    Demand,
    Engine,
    Hang,
    Record,
    Window,
    cache,
    prepared_keys,
    source_blocks,
    target_blocks,
)

from kvsluice.connector import KVLayout, OffloadConfig, OffloadConnector
from kvsluice.connector.io_queue import IoQueue

LOAD_SHARE = 0.3
"""Of the device's time."""
RATE_MBPS = 150.0
"""Healthy by the marks of a local tier, which call one slow that takes 10 ms and more for a MiB (105 MB/s)."""
FLOOD = 2.0
FITTING = 0.5
"""Stores offered, in what the device can take of them beside the loads."""


@dataclass(frozen=True)
class Times:
    """Seconds of each part of a run, and the chunks that are there to be loaded."""

    warm_s: float
    counted_s: float
    before_hang_s: float
    hang_s: float
    after_hang_s: float
    reuse_s: float
    deadline_s: float
    prepared: int


FULL = Times(
    warm_s=5.0,
    counted_s=30.0,
    before_hang_s=10.0,
    hang_s=10.0,
    after_hang_s=20.0,
    # Twice what a store may wait in the queue: what comes back sooner is in the engine's own cache.
    reuse_s=10.0,
    deadline_s=5.0,
    prepared=64,
)
TINY = Times(
    warm_s=0.1,
    counted_s=0.4,
    before_hang_s=0.2,
    hang_s=0.2,
    after_hang_s=0.3,
    reuse_s=0.2,
    deadline_s=1.0,
    prepared=16,
)


@dataclass(frozen=True)
class Setting:
    """A configuration under test: the gates' and the tier's part of it, and whether its queue is broken on purpose."""

    top: Mapping[str, object]
    tier: Mapping[str, object]
    one_queue: bool = False


DEFAULTS = Setting({}, {})
DROP = Setting({"backpressure": {"policy_cls": "DropStorePolicy"}}, {})
NO_GATE = Setting({"backpressure": None}, {"store_concurrency": "fixed"})
ONE_QUEUE = replace(NO_GATE, one_queue=True)


class Bench:
    """Runs on devices of one speed, each of them new."""

    def __init__(self, scratch: Path, speed: Speed, times: Times, seed: int) -> None:
        self._scratch = scratch
        self._speed = speed
        self._times = times
        self._devices = 0
        self._demand = Demand(
            0.0, 0.0, prepared=times.prepared, reuse_s=times.reuse_s, deadline_s=times.deadline_s, seed=seed
        )
        seconds = times.warm_s + max(times.counted_s, times.before_hang_s + times.hang_s + times.after_hang_s)
        # Room for all that the device can take in a run: evicting is another benchmark's business.
        self._size_bytes = int(1.2 * speed.bytes_per_s * seconds) + 2**29
        self.costs = self._measure_costs()
        # For all runs: filling it with zeros takes longer than a short run.
        self._cache = cache(self.demand(0.0))

    def _new_device(self) -> SlowedDevice:
        self._devices += 1
        scratch = self._scratch / str(self._devices)
        scratch.mkdir()
        return SlowedDevice(scratch, self._size_bytes)

    def _connect(self, device: SlowedDevice, setting: Setting, layout: KVLayout) -> OffloadConnector:
        tier = {
            "type": "fs",
            "root_dir": str(device.root / "kv"),
            "capacity": self._size_bytes * 4 // 5,
            "direct_io": "on",
            **setting.tier,
        }
        config = OffloadConfig.from_dict({"blocks_per_chunk": BLOCKS_PER_CHUNK, "tiers": [tier], **setting.top})
        return OffloadConnector(config, layout)

    def _prepare(self, device: SlowedDevice, layout: KVLayout) -> None:
        keys = prepared_keys(self._demand)
        with self._connect(device, NO_GATE, layout) as conn:
            jobs = [conn.store([name], source_blocks(at)) for at, name in enumerate(keys)]
            failed = [result.failed for result in conn.wait(jobs, timeout_s=60.0) if result.failed]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(keys)} chunks to be loaded could not be stored: {failed[0]}")

    def _measure_costs(self) -> Costs:
        keys, layout = prepared_keys(self._demand), cache(self._demand)
        with self._new_device() as device:
            device.set_speed(self._speed)
            before = device.counters()
            self._prepare(device, layout)
            between = device.counters()
            with self._connect(device, NO_GATE, layout) as conn:
                for name in keys:
                    result = conn.wait([conn.load([name], target_blocks(0))], timeout_s=60.0)[0]
                    if result.failed:
                        raise RuntimeError(f"a chunk that was just stored could not be loaded: {result.failed}")
            after = device.counters()
        return Costs(
            (after.read_device_s - between.read_device_s) / len(keys),
            (between.write_device_s - before.write_device_s) / len(keys),
        )

    def demand(self, stores: float) -> Demand:
        """The usual loads, and `stores` times what the device can take beside them."""
        return replace(
            self._demand,
            loads_per_s=LOAD_SHARE / self.costs.load_s,
            stores_per_s=stores * (1.0 - LOAD_SHARE) / self.costs.store_s,
        )

    def run(self, name: str, setting: Setting, stores: float) -> Run:
        window = Window(self._times.warm_s, self._times.counted_s)
        record, accounted = self._drive(setting, self.demand(stores), window, None)
        loads = [(took_s, missed) for due_s, took_s, missed in record.loads if due_s in window]
        stored = sum(at_s in window for at_s in record.stored)
        reused = [hit for due_s, hit in record.reused if due_s in window]
        device = record.device_end.since(record.device_begin)
        took_s = [took_s for took_s, _ in loads] or [0.0]
        return Run(
            name,
            len(loads),
            percentile(took_s, 0.5) * 1e3,
            percentile(took_s, 0.99) * 1e3,
            dict(record.missed),
            sum(at_s in window for at_s in record.offered),
            sum(at_s in window for at_s in record.admitted),
            stored,
            stored * self.costs.store_s / (record.window_s - device.read_device_s),
            len(reused),
            sum(reused),
            dict(Counter(reason for at_s, reason in record.dropped if at_s in window)),
            device.read_device_s / record.window_s,
            device.busy_s / record.window_s,
            1e6 * device.late_s / max(1, device.reads + device.writes + device.others),
            accounted,
        )

    def run_hang(self, name: str, setting: Setting, stores: float) -> HangRun:
        times = self._times
        hang = Hang(times.warm_s + times.before_hang_s, times.warm_s + times.before_hang_s + times.hang_s)
        window = Window(times.warm_s, times.before_hang_s + times.hang_s + times.after_hang_s)
        record, accounted = self._drive(setting, self.demand(stores), window, hang)
        during = Window(hang.begin_s, times.hang_s)
        before = sum(at_s in Window(times.warm_s, times.before_hang_s) for at_s in record.stored)
        seconds = range(int(window.counted_s))
        return HangRun(
            name,
            times.before_hang_s,
            times.hang_s,
            sum(at_s in during for at_s in record.offered),
            sum(at_s in during for at_s in record.admitted),
            [sum(at_s in Window(times.warm_s + second, 1.0) for at_s in record.stored) for second in seconds],
            before / times.before_hang_s,
            back_at_rate_s(record.stored, hang.end_s, times.after_hang_s, FULL_RATE * before / times.before_hang_s),
            dict(record.missed),
            accounted,
        )

    def _drive(self, setting: Setting, demand: Demand, window: Window, hang: Hang | None) -> tuple[Record, bool]:
        """One run on a new device, and whether its books agree."""
        put_load = IoQueue.put_store if setting.one_queue else IoQueue.put_load
        with self._new_device() as device, patch.object(IoQueue, "put_load", put_load):
            self._prepare(device, self._cache)
            device.set_speed(self._speed)
            with self._connect(device, setting, self._cache) as conn:
                record = Engine(conn, device, demand).run(window, hang)
                conn.check_integrity()
                stats = conn.stats().tiers["fs"]
        accounted = (
            record.open_stores == record.open_loads == 0
            and len(record.offered) == len(record.stored) + len(record.dropped)
            and stats.chunks_stored == len(record.stored)
            and stats.chunks_loaded == len(record.loads) * demand.load_batch - sum(record.missed.values())
        )
        return record, accounted


def measure(scratch: Path, speed: Speed, times: Times, seed: int) -> Report:
    """Everything, one after the other; takes what `times` say and a second or two more for each run."""
    bench = Bench(scratch, speed, times, seed)
    runs = [
        bench.run(report.ALONE, DEFAULTS, 0.0),
        bench.run(report.ONE_QUEUE, ONE_QUEUE, FLOOD),
        bench.run(report.NO_GATE, NO_GATE, FLOOD),
        bench.run(report.DROP, DROP, FLOOD),
        bench.run(report.OURS, DEFAULTS, FLOOD),
        bench.run(report.FITTING, DEFAULTS, FITTING),
    ]
    hangs = [
        bench.run_hang(report.HANG_FITTING, DEFAULTS, FITTING),
        bench.run_hang(report.HANG_FLOOD, DEFAULTS, FLOOD),
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return Report(machine, speed, CHUNK_BYTES, bench.costs, runs, hangs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=RATE_MBPS, help=f"the device's MB/s (default: {RATE_MBPS:g})")
    parser.add_argument("--request-us", type=float, default=100.0, help="its microseconds a request (default: 100)")
    parser.add_argument("--seconds", type=float, default=FULL.counted_s, help="counted, of each run (default: 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few seconds in all: shows that it runs, claims nothing")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    times = TINY if args.tiny else replace(FULL, counted_s=args.seconds)
    speed = Speed(args.rate * 1e6, args.request_us * 1e-6)
    try:
        enter_private_mounts()
        with tempfile.TemporaryDirectory(prefix="slowed-device-") as scratch:
            measured = measure(Path(scratch), speed, times, args.seed)
    except UnavailableError as error:
        print(f"no device can be slowed here: {error}", file=sys.stderr)
        return 2
    print(measured.as_json() if args.json else measured.as_text())
    return 0 if measured.accounted and (args.tiny or all(claim.ok for claim in measured.claims())) else 1


if __name__ == "__main__":
    sys.exit(main())
