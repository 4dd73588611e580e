"""What `slowed_device` measured: its figures, what must be true of them, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from slowed_device_pace import Speed

ALONE = "loads alone"
ONE_QUEUE = "one queue, no gate"
NO_GATE = "no gate"
DROP = "DropStorePolicy"
OURS = "defaults"
FITTING = "defaults, stores fit"
HANG_FITTING = "hang, stores fit"
HANG_FLOOD = "hang under the flood"

MAX_P99_RATIO = 2.0
MIN_ONE_QUEUE_RATIO = 10.0
MIN_GOODPUT = 0.8
FULL_RATE = 0.8
"""Of the rate before the hang; counts as full."""
MAX_RECOVERY_S = 10.0
RATE_WINDOW_S = 2.0
_STEP_S = 0.1
MAX_HANG_S_OF_STORES = 2.0
"""Stores admitted during a hang, in seconds of what a healthy device can take."""


_COLUMNS = (
    ("loads", 7),
    ("p50 ms", 8),
    ("p99 ms", 8),
    ("ratio", 7),
    ("offered", 9),
    ("stored", 8),
    ("goodput", 9),
    ("hits", 12),
    ("busy", 6),
    ("with loads", 12),
    ("late us", 9),
)


@dataclass(frozen=True)
class Costs:
    """Device time of one chunk's load and store, nothing else going on."""

    load_s: float
    store_s: float


@dataclass(frozen=True)
class Run:
    """One run's figures, over its counted seconds.

    Attributes:
        name: what went on.
        loads: batches. Those with a chunk that missed count with the time until that was known.
        load_p50_ms, load_p99_ms: from when a batch should have been asked for until all of it was there.
        missed: chunks that missed, by reason.
        offered, admitted, stored: chunks.
        goodput: stored, as a share of what the device could have taken in the time that loads left.
        lookups, hits: chunks that were offered, looked up some seconds later.
        dropped: chunks dropped or failed, by reason.
        load_share, busy_share: of the device's time, for reading and for anything.
        late_us: by which the device answered later than it should, on average: this machine's fault.
        accounted: whether each store and load of the run, the uncounted seconds too, came to one end.
    """

    name: str
    loads: int
    load_p50_ms: float
    load_p99_ms: float
    missed: Mapping[str, int]
    offered: int
    admitted: int
    stored: int
    goodput: float
    lookups: int
    hits: int
    dropped: Mapping[str, int]
    load_share: float
    busy_share: float
    late_us: float
    accounted: bool


@dataclass(frozen=True)
class HangRun:
    """What a hang of the device did.

    Attributes:
        name: what went on beside it.
        offered, admitted: chunks, while it lasted.
        stored_per_s: chunks in each second from the first that counts on; the hang begins `before_s` later.
        chunks_per_s_before: the mean of those before it.
        back_s: from its end until the rate was there again; None where that was not seen.
        loads_missed: chunks, by reason.
    """

    name: str
    before_s: float
    hang_s: float
    offered: int
    admitted: int
    stored_per_s: list[int]
    chunks_per_s_before: float
    back_s: float | None
    loads_missed: Mapping[str, int]
    accounted: bool


@dataclass(frozen=True)
class Claim:
    says: str
    value: str
    ok: bool


@dataclass(frozen=True)
class Report:
    """All of it. `runs` and `hangs` are in the order in which they ran."""

    machine: str
    device: Speed
    chunk_bytes: int
    costs: Costs
    runs: Sequence[Run]
    hangs: Sequence[HangRun]

    @property
    def accounted(self) -> bool:
        return all(run.accounted for run in self.runs) and all(hang.accounted for hang in self.hangs)

    def run(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def p99_ratio(self, name: str) -> float:
        """A run's load p99 in that of the loads alone."""
        return self.run(name).load_p99_ms / self.run(ALONE).load_p99_ms

    def claims(self) -> list[Claim]:
        """What must be true of the defaults, each with what was measured."""
        ours, drop, fitting = self.run(OURS), self.run(DROP), self.run(FITTING)
        ratio, dropped = self.p99_ratio(OURS), sum(fitting.dropped.values())
        most = MAX_HANG_S_OF_STORES / self.costs.store_s
        made = [
            Claim(
                f"load p99 under the flood is at most {MAX_P99_RATIO:g} times its value alone",
                f"{ratio:.2f}",
                ratio <= MAX_P99_RATIO,
            ),
            Claim("it is longer without the gate", f"{self.p99_ratio(NO_GATE):.2f}", self.p99_ratio(NO_GATE) > ratio),
            Claim(
                f"in one queue and without a gate it is at least {MIN_ONE_QUEUE_RATIO:g} times as long",
                f"{self.p99_ratio(ONE_QUEUE):.1f}",
                self.p99_ratio(ONE_QUEUE) >= MIN_ONE_QUEUE_RATIO,
            ),
            Claim(
                f"stores get at least {MIN_GOODPUT:.0%} of what the loads leave",
                f"{ours.goodput:.0%}",
                ours.goodput >= MIN_GOODPUT,
            ),
            Claim(f"more hits than with {DROP}", f"{ours.hits} against {drop.hits}", ours.hits > drop.hits),
            Claim("of stores that fit none is dropped", f"{dropped} of {fitting.offered}", dropped == 0),
        ]
        for hang in self.hangs:
            back = "not seen" if hang.back_s is None else f"{hang.back_s:.1f} s"
            made += [
                Claim(
                    f"{hang.name}: at most {most:.0f} stores are admitted meanwhile",
                    f"{hang.admitted} of {hang.offered}",
                    hang.admitted <= most,
                ),
                Claim(
                    f"{hang.name}: back at {FULL_RATE:.0%} of the rate within {MAX_RECOVERY_S:g} s of its end",
                    back,
                    hang.back_s is not None and hang.back_s <= MAX_RECOVERY_S,
                ),
            ]
        return made

    def as_json(self) -> str:
        claims = [asdict(claim) for claim in self.claims()]
        return json.dumps({**asdict(self), "claims": claims, "accounted": self.accounted})

    def as_text(self) -> str:
        device, costs = self.device, self.costs
        speed = f"{device.bytes_per_s / 1e6:g} MB/s and {device.per_request_s * 1e6:g} us a request"
        times = f"{costs.load_s * 1e3:.1f} ms of it to load and {costs.store_s * 1e3:.1f} ms to store"
        lines = [
            f"{self.machine}; ext4 on a device of {speed};",
            f"a chunk of {self.chunk_bytes / 2**20:g} MiB takes {times}",
            f"{'':22}" + "".join(f"{title:>{width}}" for title, width in _COLUMNS),
        ]
        for run in self.runs:
            hits = f"{run.hits}/{run.lookups}"
            lines.append(
                f"{run.name:22}{run.loads:7}{run.load_p50_ms:8.1f}{run.load_p99_ms:8.1f}{self.p99_ratio(run.name):7.2f}"
                f"{run.offered:9}{run.stored:8}{run.goodput:9.0%}{hits:>12}{run.busy_share:6.0%}{run.load_share:12.0%}"
                f"{run.late_us:9.0f}"
            )
        lines += [
            f"{run.name:22}dropped: {by_reason(run.dropped)}; loads missed: {by_reason(run.missed)}"
            for run in self.runs
        ]
        for hang in self.hangs:
            lines += [
                f"{hang.name:22}{hang.admitted} of {hang.offered} stores admitted in {hang.hang_s:g} s; loads missed: "
                + by_reason(hang.loads_missed),
                f"    stored in each second from {hang.before_s:g} s before it on: "
                + " ".join(map(str, hang.stored_per_s)),
            ]
        for claim in self.claims():
            lines.append(f"{'ok' if claim.ok else 'FAILED':8}{claim.says}: {claim.value}")
        lines.append(f"{'ok' if self.accounted else 'FAILED':8}every store and load came to one end")
        return "\n".join(lines)


def back_at_rate_s(stored: list[float], from_s: float, watched_s: float, per_s: float) -> float | None:
    """The first time after `from_s` from which on a window of stores ran at the rate; `None` if there is none."""
    for step in range(int((watched_s - RATE_WINDOW_S) / _STEP_S) + 1):
        begin_s = from_s + step * _STEP_S
        if sum(begin_s <= at_s < begin_s + RATE_WINDOW_S for at_s in stored) >= per_s * RATE_WINDOW_S:
            return step * _STEP_S
    return None


def by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"
