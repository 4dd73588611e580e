"""All claims in one go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvsluice.connector.replay.claims import (
    LADDER,
    TIER,
    Claim,
    check_hang,
    check_healthy,
    check_rows,
    healthy_cases,
    loaded_scene,
)
from kvsluice.connector.replay.knobs import Knobs
from kvsluice.connector.replay.rows import MAIN_ROWS, ROW_NAMES, make_rows
from kvsluice.connector.replay.run import RowResult, run_rows
from kvsluice.connector.replay.scene import Scene
from kvsluice.connector.replay.trace import Request, spread

__all__ = ["Verdict", "check_all"]

MANY_NODES: Final = 100
MANY_NODES_GPU_CHUNKS: Final = 512
MAX_REPLAY_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check_all` found.

    Attributes:
        scene, knobs, rows: of the trace on a loaded tier.
        claims: all of them, in order.
    """

    scene: Scene
    knobs: Knobs
    rows: tuple[RowResult, ...]
    claims: tuple[Claim, ...]


def check_all(
    requests: Sequence[Request],
    *,
    jobs: int,
    row_names: Sequence[str] = ROW_NAMES,
    healthy_requests: int = 2000,
    num_nodes: int = MANY_NODES,
    many_requests: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[str], None] = lambda done: None,
) -> Verdict:
    """Check every claim.

    Args:
        requests: at the trace's own speed, in order of time.
        jobs: processes at once.
        row_names: at least "one queue", "loads first", "drop" and "ours".
        healthy_requests: length of each steady run.
        num_nodes: that the trace is spread over in the last one, as far as its first `many_requests`.
        clock: real seconds, for how long that one takes; nothing else looks at it.
        on_progress: told of each step that is done.

    Raises:
        ConfigError: a trace that cannot load the tier as the claims need it.
    """
    scene, loaded, knobs = loaded_scene(requests)
    on_progress(f"knobs found: {knobs.speed_up:.3g} times as fast, GPU caches of {knobs.gpu_chunks} chunks")
    rows = run_rows(
        scene, make_rows(LADDER, row_names), loaded, jobs=jobs, on_done=lambda row: on_progress(f"row {row.row!r} done")
    )
    claims = check_rows(rows)
    for case in healthy_cases():
        claims.append(check_healthy(case, num_requests=healthy_requests))
        on_progress(f"{case.name} done")
    for hits in (False, True):
        claims += check_hang(hits=hits)
        on_progress("hang done")
    claims.append(_check_many_nodes(scene, requests[:many_requests], num_nodes, jobs, clock))
    return Verdict(scene, knobs, tuple(rows), tuple(claims))


def _check_many_nodes(
    scene: Scene, requests: Sequence[Request], num_nodes: int, jobs: int, clock: Callable[[], float]
) -> Claim:
    many = replace(
        scene,
        num_nodes=num_nodes,
        gpu_chunks=MANY_NODES_GPU_CHUNKS,
        tiers={TIER: replace(scene.tiers[TIER], shared=True)},
    )
    start_s = clock()
    results = run_rows(many, make_rows(LADDER, MAIN_ROWS), spread(requests, num_nodes), jobs=jobs, baseline=False)
    took_s = clock() - start_s
    traffic = results[-1].tiers[TIER]
    return Claim(
        "g",
        f"{results[0].window_s:.0f} s of the trace on {num_nodes} nodes that share a tier replay within "
        f"{MAX_REPLAY_S:.0f} s",
        took_s <= MAX_REPLAY_S,
        f"{len(results)} rows in {took_s:.0f} s, {jobs} processes; in ours {traffic.stored} "
        f"chunks were stored and {traffic.read} read",
    )
