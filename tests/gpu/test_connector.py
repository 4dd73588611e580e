"""Chunks through the connector: a rank worker alone where the configuration's package is missing, and all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_engine import Engine, until

from kvsluice.kernels.device import Event

pytest.importorskip("xxhash", reason="a chunk's checksum needs xxhash, which is not installed: no rank worker was run")

from kvsluice.connector.by_layer import LayerWatch
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.orders import Ended, LoadOrder, LoadPart, StoreOrder, StorePart, WorkerEvent
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.worker import RankWorker, WorkerTier
from kvsluice.tiers.chunk_file import ChunkFormat
from kvsluice.tiers.fs import FileSystemTier

BLOCKS = 48
WIDTH = 4
"""Blocks of a chunk."""


class Cache:
    """bf16 K and V of some layers, filled at random, on the device's default stream."""

    def __init__(self, where: torch.device) -> None:
        generator = torch.Generator(where).manual_seed(3)
        self.tensors = {
            f"model.layers.{layer}": torch.randn(2, BLOCKS, 16, 4, 32, generator=generator, device=where).to(
                torch.bfloat16
            )
            for layer in range(6)
        }
        self.layout = KVLayout.from_tensors(self.tensors, tokens_per_block=16, block_dim=1)
        self._first = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def blank(self) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def wrong_layers(self, targets: list[int], sources: list[int]) -> list[str]:
        """Layers whose target blocks do not hold what the source blocks held at first."""
        return [
            name
            for name, tensor in self.tensors.items()
            if not torch.equal(tensor[:, targets], self._first[name][:, sources])
        ]


def blocks_of(*chunks: int) -> list[int]:
    return [chunk * WIDTH + at for chunk in chunks for at in range(WIDTH)]


def keys_of(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number])).digest() for number in range(count)]


@pytest.fixture
def cache(engine: Engine) -> Cache:
    return Cache(engine.where)


@pytest.fixture
def worker(engine: Engine, cache: Cache, tmp_path: Path) -> Iterator[RankWorker]:
    """A worker with an fs tier at position 0, as the connector makes it."""
    fmt = ChunkFormat(cache.layout.chunk_tensors(WIDTH), namespace="gpu", num_tokens=16 * WIDTH)
    region = PinnedRegion(8, fmt.slot_bytes, device=engine.where, pin="on" if engine.is_cuda else "off")
    tier = FileSystemTier(tmp_path, namespace="gpu", capacity_bytes=1 << 28)
    worker = RankWorker(cache.layout, fmt, region, [WorkerTier(0, tier, 2, 2, 10.0)], blocks_per_chunk=WIDTH)
    yield worker
    assert worker.close(timeout_s=10.0) == []


def ended(worker: RankWorker, count: int) -> list[WorkerEvent]:
    """All events until so many parts have ended."""
    events: list[WorkerEvent] = []

    def collected() -> bool:
        events.extend(worker.collect().events)
        return sum(isinstance(event, Ended) for event in events) == count

    until(collected, f"{count} parts of orders")
    return events


def _told(watch: LayerWatch, number: int) -> bool:
    return watch.events(number) is not None


def store(worker: RankWorker, chunks: int, *, tiers: tuple[int, ...]) -> None:
    parts = tuple(StorePart(at, key, tuple(blocks_of(at)), at, tiers) for at, key in enumerate(keys_of(chunks)))
    worker.submit([StoreOrder(1, parts)])
    assert [event for event in ended(worker, chunks) if getattr(event, "reason", None) is not None] == []


def test_a_worker_brings_chunks_back_from_slots_and_from_files(worker: RankWorker, cache: Cache) -> None:
    store(worker, 4, tiers=(0,))
    cache.blank()
    keys = keys_of(4)
    # Two from the slots that hold them, two from files by way of other slots; each into other blocks.
    sources: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, ()), (6, (0,)), (7, (0,))]
    parts = tuple(
        LoadPart(at, keys[at], tuple(blocks_of(8 + at)), slot, source, ()) for at, (slot, source) in enumerate(sources)
    )
    worker.submit([LoadOrder(2, parts, deadline_s=20.0)])
    assert [event for event in ended(worker, 4) if getattr(event, "reason", None) is not None] == []
    assert cache.wrong_layers(blocks_of(8, 9, 10, 11), blocks_of(0, 1, 2, 3)) == []


def test_a_worker_tells_of_layers_one_by_one(worker: RankWorker, cache: Cache) -> None:
    store(worker, 2, tiers=())
    cache.blank()
    watch = LayerWatch(2)
    worker.watch_layers(2, watch)
    parts = tuple(LoadPart(at, key, tuple(blocks_of(5 + at)), at, (), ()) for at, key in enumerate(keys_of(2)))
    worker.submit([LoadOrder(2, parts, deadline_s=20.0)])
    seen: dict[str, torch.Tensor] = {}
    for name, tensor in cache.tensors.items():
        number = cache.layout.last_tensor(name)
        until(partial(_told, watch, number), name)
        events: list[Event] = list(watch.events(number) or ())
        worker.compute_wait(events)
        seen[name] = tensor[:, blocks_of(5, 6)]
    ended(worker, 2)
    assert cache.wrong_layers(blocks_of(5, 6), blocks_of(0, 1)) == []
    assert [
        name for name, tensor in cache.tensors.items() if not torch.equal(seen[name], tensor[:, blocks_of(5, 6)])
    ] == []


def test_the_whole_connector_goes_round(engine: Engine, cache: Cache, tmp_path: Path) -> None:
    for package in ("pydantic", "typing_extensions"):
        pytest.importorskip(package, reason=f"the configuration needs {package}, which is not installed")
    from kvsluice.connector import OffloadConfig, OffloadConnector

    config = OffloadConfig.from_dict(
        {
            "blocks_per_chunk": WIDTH,
            "staging_bytes": "16MiB",
            "pin_memory": "on" if engine.is_cuda else "auto",
            "backpressure": None,
            "tiers": [
                {"type": "host", "capacity": "16MiB"},
                {"type": "fs", "root_dir": str(tmp_path), "capacity": "256MiB"},
            ],
        }
    )
    keys = keys_of(5)
    with OffloadConnector(config, cache.layout) as conn:
        stored = conn.wait([conn.store(keys, blocks_of(*range(5)))], timeout_s=20.0)
        assert [result.failed for result in stored] == [{}]
        cache.blank()
        assert looked_up(conn.lookup, keys) == 5
        job = conn.load(keys, blocks_of(*range(6, 11)), by_layer=True)
        assert all(conn.wait_for_layer(job, name, timeout_s=20.0) for name in cache.tensors)
        assert [result.failed for result in conn.wait([job], timeout_s=20.0)] == [{}]
        assert cache.wrong_layers(blocks_of(*range(6, 11)), blocks_of(*range(5))) == []
        conn.check_integrity()
    # A second engine finds the files.
    cache.blank()
    with OffloadConnector(config, cache.layout) as conn:
        assert looked_up(conn.lookup, keys) == 5
        assert [result.failed for result in conn.wait([conn.load(keys, blocks_of(*range(5)))], timeout_s=20.0)] == [{}]
        assert cache.wrong_layers(blocks_of(*range(5)), blocks_of(*range(5))) == []
        conn.check_integrity()


def looked_up(lookup: Callable[[list[bytes]], object], keys: list[bytes]) -> int:
    """Chunks held, once the answer is there."""
    answers: list[object] = []

    def answered() -> bool:
        answers.append(lookup(keys))
        return not answers[-1].pending  # type: ignore[attr-defined]

    until(answered, "a lookup")
    return int(answers[-1].held)  # type: ignore[attr-defined]
