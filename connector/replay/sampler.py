"""Looks at a run at regular moments of virtual time, up to the last arrival."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsluice.connector.replay.measure import LoadRecord, Series, percentile
from kvsluice.connector.replay.scene import World

__all__ = ["Sampler", "Totals"]


@dataclass(slots=True)
class Totals:
    """One tier since the start, all nodes together; counts are chunks."""

    stored: int = 0
    already_held: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    read: int = 0
    written: int = 0
    queued_stores: int = 0
    ema_s: float = math.nan

    @property
    def refused(self) -> int:
        return self.dropped.total() + self.failed.total()

    @property
    def offered(self) -> int:
        return self.stored + self.already_held + self.refused


class Sampler:
    """Plans its looks when it is made, before the run.

    Args:
        world: what is looked at.
        window_s: the last look.
        num_intervals: looks in all.

    Attributes:
        totals: by tier, as of the last look.
        ema_s: by tier, at each look.
        looks: by tier, all of them.
    """

    def __init__(self, world: World, window_s: float, num_intervals: int) -> None:
        self._world = world
        self._end_s = [window_s * (at + 1) / num_intervals for at in range(num_intervals)]
        self.looks: dict[str, list[Totals]] = {name: [] for name in world.contents}
        for end_s in self._end_s:
            world.timeline.at(end_s, self._look)

    @property
    def totals(self) -> dict[str, Totals]:
        return {name: looks[-1] for name, looks in self.looks.items()}

    @property
    def ema_s(self) -> dict[str, list[float]]:
        return {name: [look.ema_s for look in looks] for name, looks in self.looks.items()}

    def series(self, name: str, loads: Sequence[LoadRecord]) -> Series:
        """One tier's; load latencies are those of all tiers."""
        looks = [Totals(), *self.looks[name]]
        pairs = list(itertools.pairwise(looks))
        interval_s = self._end_s[0]
        chunk_bytes = self._world.scene.chunk_bytes
        latencies: list[list[float]] = [[] for _ in self._end_s]
        for record in loads:
            at = min(int(record.start_s / interval_s), len(latencies) - 1)
            latencies[at].append(record.latency_s)
        return Series(
            end_s=tuple(self._end_s),
            load_p99_s=tuple(percentile(sorted(values), 0.99) for values in latencies),
            store_bytes_per_s=tuple(
                (after.written - before.written) * chunk_bytes / interval_s for before, after in pairs
            ),
            ema_s=tuple(look.ema_s for look in looks[1:]),
            drop_share=tuple(
                (after.refused - before.refused) / (after.offered - before.offered)
                if after.offered > before.offered
                else math.nan
                for before, after in pairs
            ),
            queued_stores=tuple(look.queued_stores for look in looks[1:]),
        )

    def _look(self) -> None:
        now = {name: Totals() for name in self.looks}
        for name, contents in self._world.contents.items():
            now[name].read = sum(content.chunks_read for content in contents)
            now[name].written = sum(content.chunks_written for content in contents)
        for node in self._world.nodes:
            for name, tier in node.planner.stats().tiers.items():
                totals = now.get(name)
                if totals is None:
                    continue
                totals.stored += tier.chunks_stored
                totals.already_held += tier.chunks_already_held
                totals.dropped.update(tier.dropped)
                totals.failed.update(tier.failed)
                totals.queued_stores += tier.queued_stores
                if tier.gate is None:
                    continue
                # What is in flight counts as the policy counts it.
                ema_s = max(tier.gate.store_latency_ema_s, tier.gate.detector.get("in_flight_ema", 0.0))
                if not totals.ema_s >= ema_s:
                    totals.ema_s = ema_s
        for name, totals in now.items():
            self.looks[name].append(totals)
