"""Runs one row, then the loads that it issued alone, and puts the figures together."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvsluice.connector.config import HostTierConfig
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.replay.baseline import alone
from kvsluice.connector.replay.measure import Latency, LoadRecord, Series, slowdowns
from kvsluice.connector.replay.rows import Row
from kvsluice.connector.replay.sampler import Sampler
from kvsluice.connector.replay.scene import Scene, World
from kvsluice.connector.replay.trace import Request
from kvsluice.tiers.errors import ConfigError

__all__ = ["RowResult", "TierResult", "run_row", "run_rows"]

NUM_INTERVALS: Final = 120
"""Intervals of the series over time: more would not be told apart in a plot."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """One tier, all nodes together, from the first arrival to the last; counts are chunks.

    Attributes:
        offered: stores that were planned for it: not those of chunks it was known to hold.
        stored, already_held: really written, and found to be there by the write.
        dropped, failed: the others, each by reason. What is still open at the last arrival is in none.
        read: read by loads.
        capacity_bytes_per_s: what its devices can do on average, slow times included.
        load_share: of that, what loads took.
        goodput_bytes_per_s: newly stored.
        goodput_share, offered_ratio: what was stored, and what was offered, over what the loads left of that.
        worst_queue: most stores that ever waited for a thread, on one node.
        ema_mean_s, ema_max_s: of the highest of the nodes' gates, s/MiB; NaN without gates.
        evicted: over the whole run.
    """

    offered: int
    stored: int
    already_held: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    read: int
    capacity_bytes_per_s: float
    load_share: float
    goodput_bytes_per_s: float
    goodput_share: float
    offered_ratio: float
    worst_queue: int
    ema_mean_s: float
    ema_max_s: float
    evicted: int
    series: Series


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row.

    Attributes:
        row: its name.
        requests, prompt_chunks: of the trace.
        gpu_hits, tier_hits, failed_hits: prompt chunks that came from the GPU's cache, from a tier, and those
            that a tier was known to hold and that did not come.
        slower_hits: those that a tier was known to hold and that were computed, because the load gate said that
            to load them takes longer; in none of the others.
        load, load_chunk: per request and per chunk.
        alone, alone_chunk: the very same loads at the same times, with no store anywhere.
        slowdown_p99: of `load`'s p99 over `alone`'s.
        each_slowdown: per request, its time over its time alone: median and p99.
        window_s: from the first arrival to the last.
        end_s: when all was over.
        tiers: by name.
    """

    row: str
    requests: int
    prompt_chunks: int
    gpu_hits: int
    tier_hits: int
    failed_hits: int
    slower_hits: int
    load: Latency
    load_chunk: Latency
    alone: Latency
    alone_chunk: Latency
    slowdown_p99: float
    each_slowdown: Latency
    window_s: float
    end_s: float
    tiers: Mapping[str, TierResult]


def run_row(scene: Scene, row: Row, requests: Sequence[Request], *, baseline: bool = True) -> RowResult:
    """Replay `requests`, which are in order of time, under one policy.

    Args:
        baseline: replay the loads alone, too; else what is compared with them is NaN.

    Raises:
        ConfigError: no request, or one that goes to a node that the scene has not; a tier that it has not.
        AssertionError: chunks or slots got lost: a fault of this package or of the product's planner.
    """
    if not requests:
        raise ConfigError("there is no request to replay")
    for request in requests:
        if not 0 <= request.node < scene.num_nodes:
            raise ConfigError(f"a request goes to node {request.node}, there are {scene.num_nodes}")
    world = World(scene, row)
    for request in requests:
        world.timeline.at(request.time_s, partial(world.engines[request.node].arrive, request))
    # A trace whose requests all come at once still has some time to it.
    window_s = max(requests[-1].time_s, scene.step_s)
    sampler = Sampler(world, window_s, NUM_INTERVALS)
    with _load_gate_unlogged():
        world.timeline.run()
    for node in world.nodes:
        node.check_over()
    undisturbed = alone(scene, row, [node.loads.records for node in world.nodes]) if baseline else []
    loads = [record for node in world.nodes for record in node.loads.records]
    load, load_alone = _latency(loads), _latency(undisturbed)
    return RowResult(
        row=row.name,
        requests=sum(engine.requests for engine in world.engines),
        prompt_chunks=sum(engine.prompt_chunks for engine in world.engines),
        gpu_hits=sum(engine.gpu_hits for engine in world.engines),
        tier_hits=sum(engine.tier_hits for engine in world.engines),
        failed_hits=sum(engine.failed_hits for engine in world.engines),
        slower_hits=sum(engine.slower_hits for engine in world.engines),
        load=load,
        load_chunk=_chunk_latency(loads),
        alone=load_alone,
        alone_chunk=_chunk_latency(undisturbed),
        slowdown_p99=load.p99_s / load_alone.p99_s,
        each_slowdown=Latency.of(slowdowns(loads, undisturbed) if baseline else ()),
        window_s=window_s,
        end_s=world.timeline.now_s,
        tiers={
            tier.name: _tier_result(world, sampler, at, tier.name, window_s)
            for at, tier in enumerate(row.config.tiers)
            if not isinstance(tier, HostTierConfig)
        },
    )


@contextlib.contextmanager
def _load_gate_unlogged() -> Iterator[None]:
    """Keep to itself what a load gate of this thread warns of.

    It does so once a minute of virtual time on each node, about a tier that is modelled: `slower_hits` says it.
    """
    logger = logging.getLogger(LoadGate.__module__)
    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


def run_rows(
    scene: Scene,
    rows: Sequence[Row],
    requests: Sequence[Request],
    *,
    jobs: int = 1,
    baseline: bool = True,
    on_done: Callable[[RowResult], None] = lambda result: None,
) -> list[RowResult]:
    """`run_row` for each of `rows`, in up to `jobs` processes at once; the results do not depend on their number.

    Args:
        baseline: as in `run_row`.
        on_done: told of each row in the order of `rows`.

    Raises:
        ConfigError, AssertionError: as `run_row` does.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: it must be at least 1")
    if jobs == 1 or len(rows) == 1:
        results = []
        for row in rows:
            results.append(run_row(scene, row, requests, baseline=baseline))
            on_done(results[-1])
        return results
    # Spawned, not forked: torch has threads by now.
    with ProcessPoolExecutor(min(jobs, len(rows)), mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(run_row, scene, row, requests, baseline=baseline) for row in rows]
        results = []
        for one in pending:
            results.append(one.result())
            on_done(results[-1])
        return results


def _latency(loads: Sequence[LoadRecord]) -> Latency:
    return Latency.of([record.latency_s for record in loads])


def _chunk_latency(loads: Sequence[LoadRecord]) -> Latency:
    return Latency.of([seconds for record in loads for seconds in record.chunks_s])


def _tier_result(world: World, sampler: Sampler, at: int, name: str, window_s: float) -> TierResult:
    totals = sampler.totals[name]
    capacity = sum(device.spec.mean_bytes_per_s(window_s) for device in world.devices[name])
    chunk_bytes = world.scene.chunk_bytes
    read_bytes_per_s = totals.read * chunk_bytes / window_s
    left = capacity - read_bytes_per_s
    goodput = totals.written * chunk_bytes / window_s
    offered = totals.stored + totals.already_held + totals.dropped.total() + totals.failed.total()
    ema_s = sampler.ema_s[name]
    return TierResult(
        offered=offered,
        stored=totals.stored,
        already_held=totals.already_held,
        dropped=dict(sorted(totals.dropped.items())),
        failed=dict(sorted(totals.failed.items())),
        read=totals.read,
        capacity_bytes_per_s=capacity,
        load_share=read_bytes_per_s / capacity,
        goodput_bytes_per_s=goodput,
        goodput_share=goodput / left,
        offered_ratio=offered * chunk_bytes / window_s / left,
        worst_queue=max(node.worst_queued_stores[at] for node in world.nodes),
        ema_mean_s=sum(ema_s) / len(ema_s),
        ema_max_s=max(ema_s),
        evicted=sum(content.evicted_chunks for content in world.contents[name]),
        series=sampler.series(name, [record for node in world.nodes for record in node.loads.records]),
    )
