"""Finds the speed-up of a trace and the size of the GPU cache at which a tier is loaded as wanted.

A trace has so many hits and so many new chunks, and both knobs change what of that reaches the tier: a
larger GPU cache takes hits away from it, a faster replay leaves it less time. The search runs on a model
without devices, in which the tier takes the wanted share of what is offered, from the head of each
prompt on; what a real run then does differs by what its policy drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.replay.engine import PrefixCache
from kvsluice.connector.replay.trace import Request
from kvsluice.tiers.errors import ConfigError

__all__ = ["Knobs", "PreRun", "find_knobs", "pre_run"]

MAX_GPU_CHUNKS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PreRun:
    """Chunks, over a whole trace: served by the GPU's cache, loaded from the tier, offered to it as new."""

    gpu_hits: int
    loaded: int
    offered: int


@dataclass(frozen=True, slots=True)
class Knobs:
    """What was found.

    Attributes:
        gpu_chunks: per node.
        speed_up: of the trace's own time.
        expected: what the model says of them.
    """

    gpu_chunks: int
    speed_up: float
    expected: PreRun


def pre_run(
    requests: Sequence[Request], *, num_nodes: int, gpu_chunks: int, admitted_share: float, shared: bool = False
) -> PreRun:
    """One pass over the trace, without time.

    Args:
        requests: in order of time.
        num_nodes: that they go to.
        gpu_chunks: of each node's cache.
        admitted_share: of all offered chunks, those that the tier takes, heads of prompts first.
        shared: one tier for all nodes, else each has its own.
    """
    caches = [PrefixCache(gpu_chunks) for _ in range(num_nodes)]
    tiers: list[set[bytes]] = [set() for _ in range(1 if shared else num_nodes)]
    gpu_hits = loaded = offered = 0
    room = 0.0
    for request in requests:
        cache, tier = caches[request.node], tiers[0 if shared else request.node]
        keys = request.keys
        in_gpu = cache.match(keys)
        held = next((at for at in range(in_gpu, len(keys)) if keys[at] not in tier), len(keys))
        gpu_hits += in_gpu
        loaded += held - in_gpu
        cache.use(keys)
        fresh = [key for key in keys if key not in tier]
        offered += len(fresh)
        room += admitted_share * len(fresh)
        taken = fresh[: int(room)]
        room -= len(taken)
        tier.update(taken)
    return PreRun(gpu_hits, loaded, offered)


def find_knobs(
    requests: Sequence[Request],
    *,
    num_nodes: int,
    bytes_per_s: float,
    chunk_bytes: int,
    load_share: float,
    offered_ratio: float,
    shared: bool = False,
) -> Knobs:
    """The knobs at which loads take `load_share` of the tier's time, and stores come `offered_ratio` times the rest.

    Args:
        requests: in order of time, at the trace's own speed.
        bytes_per_s: of all the tier's devices together.

    Raises:
        ConfigError: the trace has too few hits for that, whatever the cache.
    """
    if not (0 < load_share < 1 and offered_ratio > 0):
        raise ConfigError(f"load_share {load_share} must lie between 0 and 1, offered_ratio {offered_ratio} above 0")
    wanted = load_share / (offered_ratio * (1 - load_share))

    def run(gpu_chunks: int) -> PreRun:
        return pre_run(
            requests,
            num_nodes=num_nodes,
            gpu_chunks=gpu_chunks,
            admitted_share=min(1.0, 1 / offered_ratio),
            shared=shared,
        )

    found = run(0)
    if found.loaded < wanted * found.offered:
        raise ConfigError(
            f"the trace has {found.loaded} hits to {found.offered} new chunks even without a GPU cache: loads cannot "
            f"take {load_share} of the time where stores are offered {offered_ratio} times over"
        )
    # The larger the cache, the fewer loads; the largest that leaves enough of them is wanted.
    enough, too_large = 0, 1
    while too_large < MAX_GPU_CHUNKS and (tried := run(too_large)).loaded >= wanted * tried.offered:
        enough, found, too_large = too_large, tried, 2 * too_large
    while too_large - enough > max(1, enough // 100):
        middle = (enough + too_large) // 2
        tried = run(middle)
        if tried.loaded >= wanted * tried.offered:
            enough, found = middle, tried
        else:
            too_large = middle
    duration_s = found.loaded * chunk_bytes / bytes_per_s / load_share
    return Knobs(enough, requests[-1].time_s / duration_s, found)
