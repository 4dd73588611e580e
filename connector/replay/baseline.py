"""The baseline of a row: the loads that it issued, replayed without any store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvsluice.connector.config import HostTierConfig
from kvsluice.connector.replay.measure import LoadRecord
from kvsluice.connector.replay.rows import Row
from kvsluice.connector.replay.scene import Scene, World
from kvsluice.connector.results import TransferResult

__all__ = ["alone"]


def alone(scene: Scene, row: Row, loads: Sequence[Sequence[LoadRecord]]) -> list[LoadRecord]:
    """The same loads of the same nodes from the same tiers on the same devices, and nothing else.

    What the host tier served is not asked of the others: it takes what it took.
    """
    config = row.config
    names = {at: tier.name for at, tier in enumerate(config.tiers) if not isinstance(tier, HostTierConfig)}
    first = min(names, default=None)
    if first is None:
        return [record for records in loads for record in records]
    given: dict[str, set[bytes]] = {name: set() for name in names.values()}
    below_host = replace(row, config=config.model_copy(update={"tiers": tuple(config.tiers[at] for at in names)}))
    asked: list[list[tuple[LoadRecord, list[bytes]]]] = []
    for records in loads:
        asked.append([])
        for record in records:
            keys: list[bytes] = []
            for part, key in enumerate(record.keys):
                tier, _ = record.served.get(part, (first, 0.0))
                if tier in names:
                    given[names[tier]].add(key)
                    keys.append(key)
            asked[-1].append((record, keys))
    world = World(scene, below_host, given=given)
    for node, wanted in zip(world.nodes, asked, strict=True):
        for record, keys in wanted:
            if keys:
                world.timeline.at(record.start_s, partial(node.load, keys, _ignore))
    world.timeline.run()
    found = []
    for node, wanted in zip(world.nodes, asked, strict=True):
        node.check_over()
        done = iter(node.loads.records)
        for record, keys in wanted:
            from_host_s = [seconds for tier, seconds in record.served.values() if tier not in names]
            latencies_s = [*from_host_s, *(next(done).chunks_s if keys else ())]
            found.append(LoadRecord(record.start_s, record.keys, max(latencies_s), 0, latencies_s))
    return found


def _ignore(result: TransferResult) -> None:
    """Nobody prefills after it."""
