"""What this project promises of its gates, checked on modelled devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvsluice.connector.calibrate import Suggestion, suggest
from kvsluice.connector.replay.device import DeviceSpec, SlowTime
from kvsluice.connector.replay.knobs import Knobs, find_knobs
from kvsluice.connector.replay.rows import make_rows
from kvsluice.connector.replay.run import RowResult, run_row
from kvsluice.connector.replay.sampler import Sampler, Totals
from kvsluice.connector.replay.scene import Scene, TierModel, World
from kvsluice.connector.replay.steady import make_steady, measure_device
from kvsluice.connector.replay.trace import Request, speed_up
from kvsluice.tiers import reasons

__all__ = ["Claim", "HealthyCase", "check_hang", "check_healthy", "check_rows", "healthy_cases", "loaded_scene"]

TIER: Final = "fs"
THREADS: Final = 8
BYTES_PER_S: Final = 1e9
OPERATION_S: Final = 1e-4
LOAD_SHARE: Final = 0.3
OFFERED_RATIO: Final = 2.0
CHUNK_BYTES: Final = 4 << 20
LADDER: Final[Sequence[Mapping[str, object]]] = (
    {"type": "fs", "root_dir": "/modelled", "name": TIER, "n_read_threads": THREADS, "n_write_threads": THREADS},
)

MAX_SLOWDOWN: Final = 2.0
MIN_UNGATED_SLOWDOWN: Final = 4.0
"""Of single loads ahead of all stores that wait, with no gate: those that run already share the device with them."""
MIN_GOODPUT_SHARE: Final = 0.8
MIN_TIMES_WORSE: Final = 10.0
HANG_S: Final = 60.0
BACK_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise.

    Attributes:
        name: short.
        promise: what must be true.
        holds: whether it is.
        found: the figures that say so.
    """

    name: str
    promise: str
    holds: bool
    found: str


# ---- a trace on a loaded tier ----------------------------------------------------------------


def loaded_scene(requests: Sequence[Request]) -> tuple[Scene, list[Request], Knobs]:
    """The tier that claims are made of, the trace at the speed that loads it as they say, and both knobs.

    Raises:
        ConfigError: the trace has too few hits.
    """
    knobs = find_knobs(
        requests,
        num_nodes=1,
        bytes_per_s=BYTES_PER_S,
        chunk_bytes=CHUNK_BYTES,
        load_share=LOAD_SHARE,
        offered_ratio=OFFERED_RATIO,
    )
    scene = Scene(
        tiers={TIER: TierModel(DeviceSpec(BYTES_PER_S, OPERATION_S))},
        chunk_bytes=CHUNK_BYTES,
        gpu_chunks=knobs.gpu_chunks,
    )
    return scene, speed_up(requests, knobs.speed_up), knobs


def check_rows(results: Sequence[RowResult]) -> list[Claim]:
    """What is promised of the rows "one queue", "loads first", "drop" and "ours" in `loaded_scene`."""
    rows = {result.row: result for result in results}
    ours, drop, one_queue, loads_first = (rows[name] for name in ("ours", "drop", "one queue", "loads first"))
    tier = ours.tiers[TIER]
    each, ungated = ours.each_slowdown, loads_first.each_slowdown
    times_ours = one_queue.load.p99_s / ours.load.p99_s
    return [
        Claim(
            "load",
            f"the tier is as loaded as meant: loads about {LOAD_SHARE:.0%}, offered about {OFFERED_RATIO:g} x the rest",
            abs(tier.load_share - LOAD_SHARE) <= 0.05 and abs(tier.offered_ratio - OFFERED_RATIO) <= 0.25,
            f"loads took {tier.load_share:.1%}, stores were offered {tier.offered_ratio:.2f} times over",
        ),
        Claim(
            "a",
            f"99 % of loads take at most {MAX_SLOWDOWN:g} x what they take alone; the p99 of all is within that, too",
            each.p99_s <= MAX_SLOWDOWN
            and ours.load.p99_s <= MAX_SLOWDOWN * ours.alone.p99_s
            and ours.load_chunk.p99_s <= MAX_SLOWDOWN * ours.alone_chunk.p99_s,
            f"each: median {each.p50_s:.2f} x, p99 {each.p99_s:.2f} x, worst {each.max_s:.2f} x; "
            f"p99 per request {_ms(ours.load.p99_s)} against {_ms(ours.alone.p99_s)}, "
            f"per chunk {_ms(ours.load_chunk.p99_s)} against {_ms(ours.alone_chunk.p99_s)}",
        ),
        Claim(
            "a, without",
            f"loads first and no gate, all writers: 1 % of loads take at least {MIN_UNGATED_SLOWDOWN:g} x what they "
            "take alone",
            ungated.p99_s >= MIN_UNGATED_SLOWDOWN,
            f"each: median {ungated.p50_s:.2f} x, p99 {ungated.p99_s:.2f} x, worst {ungated.max_s:.2f} x",
        ),
        Claim(
            "b",
            f"store goodput above {MIN_GOODPUT_SHARE:.0%} of what the loads leave over",
            tier.goodput_share > MIN_GOODPUT_SHARE,
            f"{tier.goodput_share:.1%}: {tier.goodput_bytes_per_s / 1e6:.0f} MB/s",
        ),
        Claim(
            "c",
            "more hits than dropping under pressure",
            ours.tier_hits > drop.tier_hits,
            f"{ours.tier_hits} against {drop.tier_hits} of {ours.prompt_chunks} chunks; "
            f"{ours.slower_hits} more were computed sooner than loaded",
        ),
        Claim(
            "d",
            f"one queue and no gate: load p99 at least {MIN_TIMES_WORSE:g} x ours, and as many times that alone",
            times_ours >= MIN_TIMES_WORSE and one_queue.slowdown_p99 >= MIN_TIMES_WORSE,
            f"{_ms(one_queue.load.p99_s)}: {times_ours:.1f} x ours, {one_queue.slowdown_p99:.1f} x alone; "
            f"{one_queue.failed_hits} hits came too late",
        ),
    ]


# ---- a tier that is well ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HealthyCase:
    """A tier that can take what is offered, and the configuration in front of it.

    Attributes:
        name: what it stands for.
        device: the modelled device.
        tier: its configuration; named `TIER`.
        bytes_per_s: that it moves with the threads it has, loads and stores together.
    """

    name: str
    device: DeviceSpec
    tier: Mapping[str, object]
    bytes_per_s: float


HEALTHY_LOAD: Final = 0.7
HEALTHY_HITS: Final = 0.43
"""Of the requests: loads are then three sevenths of what is moved."""
HEALTHY_CHUNKS: Final = 8


def healthy_cases() -> list[HealthyCase]:
    """Four decades of speed with marks from `suggest`, and the presets on what they are meant for."""
    cases = []
    for bytes_per_s, operation_s in (
        (50e6, 5e-3),
        (50e6, 1e-4),
        (500e6, 1e-4),
        (5e9, 1e-4),
        (50e9, 1e-4),
        (50e9, 1e-5),
    ):
        device = DeviceSpec(bytes_per_s, operation_s)
        found = suggest(measure_device(device, CHUNK_BYTES), CHUNK_BYTES)
        tier = {"type": "fs", "root_dir": "/modelled", "name": TIER, **_suggested(found)}
        reached = _reached(device, min(found.n_read_threads, found.n_write_threads))
        name = f"{bytes_per_s / 1e6:.0f} MB/s, {operation_s * 1e6:.0f} us, calibrated"
        cases.append(HealthyCase(name, device, tier, reached))
    for bytes_per_s in (1e9, 3e9, 7e9):
        device = DeviceSpec(bytes_per_s, 1e-4)
        tier = {"type": "fs", "root_dir": "/modelled", "name": TIER}
        name = f"LOCAL preset, NVMe of {bytes_per_s / 1e9:.0f} GB/s"
        cases.append(HealthyCase(name, device, tier, _reached(device, 4)))
    for operation_s in (0.010, 0.030, 0.050):
        device = DeviceSpec(10e9, operation_s, stream_bytes_per_s=100e6)
        tier = {"type": "obj", "bucket": "modelled", "name": TIER}
        name = f"NETWORK preset, object store of 100 MB/s a stream, {operation_s * 1e3:.0f} ms"
        cases.append(HealthyCase(name, device, tier, _reached(device, 8)))
    return cases


def _suggested(found: Suggestion) -> dict[str, object]:
    return {
        "n_read_threads": found.n_read_threads,
        "n_write_threads": found.n_write_threads,
        "backpressure": {
            "high_water_s": found.high_water_s,
            "low_water_s": found.low_water_s,
            "fixed_cost_s": found.fixed_cost_s,
        },
    }


def _reached(device: DeviceSpec, threads: int) -> float:
    """What so many operations at once move."""
    stream = min(device.stream_bytes_per_s or device.bytes_per_s, device.bytes_per_s)
    alone_s = device.operation_s + CHUNK_BYTES / stream
    return min(device.bytes_per_s, threads * CHUNK_BYTES / alone_s)


def check_healthy(case: HealthyCase, *, num_requests: int = 2000) -> Claim:
    """Nothing is dropped where all that is offered fits."""
    requests = make_steady(
        seed=1,
        num_requests=num_requests,
        requests_per_s=HEALTHY_LOAD * case.bytes_per_s / (HEALTHY_CHUNKS * CHUNK_BYTES),
        chunks=HEALTHY_CHUNKS,
        hit_share=HEALTHY_HITS,
    )
    scene = Scene(
        tiers={TIER: TierModel(case.device)},
        chunk_bytes=CHUNK_BYTES,
        gpu_chunks=0,
        prefill_tokens_per_s=math.inf,
        copy_bytes_per_s=4 * max(50e9, case.bytes_per_s),
    )
    (row,) = make_rows([case.tier], ("ours",))
    result = run_row(scene, row, requests)
    tier = result.tiers[TIER]
    lost = sum(tier.dropped.values()) + sum(tier.failed.values())
    hits = result.tier_hits + result.failed_hits
    return Claim(
        f"e, {case.name}",
        f"at {HEALTHY_LOAD:.0%} of what it can do nothing is dropped",
        lost == 0 and result.failed_hits == 0,
        f"{lost} of {tier.offered} stores dropped, {result.failed_hits} of {hits} hits failed in "
        f"{result.window_s:.3g} s; EMA at most {tier.ema_max_s * 1e3:.3g} ms/MiB",
    )


# ---- a tier that hangs -----------------------------------------------------------------------

HANG_AT_S: Final = 30.0
AFTER_HANG_S: Final = 30.0
HANG_LOAD: Final = 0.7
LOOK_S: Final = 0.25


def check_hang(*, hits: bool, bytes_per_s: float = BYTES_PER_S) -> list[Claim]:
    """A tier that hangs for a minute in the middle of a steady load."""
    end_s = HANG_AT_S + HANG_S
    window_s = end_s + AFTER_HANG_S
    requests_per_s = HANG_LOAD * bytes_per_s / (HEALTHY_CHUNKS * CHUNK_BYTES)
    requests = make_steady(
        seed=1,
        num_requests=int(requests_per_s * window_s),
        requests_per_s=requests_per_s,
        chunks=HEALTHY_CHUNKS,
        hit_share=HEALTHY_HITS if hits else 0.0,
    )
    device = DeviceSpec(bytes_per_s, OPERATION_S, slow=(SlowTime(HANG_AT_S, end_s, 0.0),))
    scene = Scene(tiers={TIER: TierModel(device)}, chunk_bytes=CHUNK_BYTES, gpu_chunks=0, prefill_tokens_per_s=math.inf)
    (row,) = make_rows(LADDER, ("ours",))
    world = World(scene, row)
    for request in requests:
        world.timeline.at(request.time_s, partial(world.engines[0].arrive, request))
    sampler = Sampler(world, window_s, round(window_s / LOOK_S))
    admitted: list[int] = []
    for moment_s in (HANG_AT_S, end_s):
        world.timeline.at(moment_s, lambda: admitted.append(_admitted(world)))
    world.timeline.run()
    world.nodes[0].check_over()

    # All that is offered while nothing ends: new prompts, and such as could not be loaded.
    rate = requests_per_s * HEALTHY_CHUNKS
    tier = row.config.tiers[0]
    bound = math.sqrt(THREADS * tier.max_queue_s * rate) + rate * scene.step_s + HEALTHY_CHUNKS
    seen = admitted[1] - admitted[0]
    looks = sampler.looks[TIER]
    back_s = _last_drop_s(looks) - end_s
    before = _written(looks, HANG_AT_S - BACK_WITHIN_S, HANG_AT_S)
    after = _written(looks, end_s + BACK_WITHIN_S, end_s + 2 * BACK_WITHIN_S)
    what = "loads and stores" if hits else "stores"
    return [
        Claim(
            f"f, hang of {what}",
            f"{HANG_S:.0f} s without an end: at most {bound:.0f} stores are admitted meanwhile",
            seen <= bound,
            f"{seen} of about {rate * HANG_S:.0f} offered; the bound is sqrt({THREADS} writers x "
            f"{tier.max_queue_s:g} s x {rate:.0f}/s), and what one step and one prompt bring",
        ),
        Claim(
            f"f, back to {what}",
            f"full store rate within {BACK_WITHIN_S:.0f} s of recovering",
            back_s <= BACK_WITHIN_S and after >= 0.95 * before,
            f"the last store was dropped {max(0.0, back_s):.2f} s after; {BACK_WITHIN_S:.0f} s later "
            f"{after / BACK_WITHIN_S:.0f} chunks/s, {before / BACK_WITHIN_S:.0f} before the hang",
        ),
    ]


def _admitted(world: World) -> int:
    """Stores that the tier's gate has let through since the start."""
    node = world.nodes[0]
    stats = node.planner.stats()
    dropped = stats.tiers[TIER].dropped
    before_sent = sum(dropped.get(reason, 0) for reason in (reasons.POOL_FULL, reasons.SLOT_SHARE))
    return node.sent_stores + stats.stores_waiting + before_sent


def _last_drop_s(looks: Sequence[Totals]) -> float:
    last = max((at for at in range(1, len(looks)) if looks[at].refused > looks[at - 1].refused), default=0)
    return (last + 1) * LOOK_S


def _written(looks: Sequence[Totals], start_s: float, end_s: float) -> int:
    """Chunks between two moments; the look at the end of an interval is the one before the next begins."""
    return looks[round(end_s / LOOK_S) - 1].written - looks[round(start_s / LOOK_S) - 1].written


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
