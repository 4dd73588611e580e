"""Every way of copying moves every geometry as the host's oracle does, to the byte, and touches nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from device_copy_ways import open_way
from gpu_engine import Engine, until
from gpu_pages import Geometry, Pages, geometries, payload_difference, random_bytes, sample_ids

from kvsluice.kernels.device import Event
from kvsluice.kernels.movers import RING_SLOTS, Mover, Submission
from kvsluice.kernels.operations import ChunkCopy, Direction
from kvsluice.kernels.ways import Way

HEADER_BYTES = 4096
GUARD_BYTES = 4096
WAYS = (Way("triton", 1), Way("triton", 2), Way("triton", 4), Way("torch"), Way("batched"), Way("runs"))
REHEARSED = (Way("triton", 2), Way("torch"), Way("batched"), Way("runs"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_cuda = metafunc.config.getoption("on") == "cuda"
    if "geometry" in metafunc.fixturenames:
        found = list(geometries(large=on_cuda))
        metafunc.parametrize("geometry", found, ids=[geometry.name for geometry in found])
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", WAYS if on_cuda else REHEARSED, ids=str)


class Bench:
    """Pages of one geometry, their twin, and slots between guards; `complaints` say what was wrong."""

    def __init__(self, engine: Engine, geometry: Geometry, way: Way, direction: Direction) -> None:
        self.engine = engine
        self.geometry = geometry
        self.way = way
        self.direction = direction
        self.pages = Pages(geometry, engine.where)
        self.twin = Pages(geometry, torch.device("cpu"))
        self.oracle = self.twin.oracle()
        self.plan = self.pages.plan
        self.slot_bytes = -(-(HEADER_BYTES + self.plan.num_bytes + GUARD_BYTES) // 4096) * 4096
        self.region = engine.region(6, self.slot_bytes)
        self.complaints: list[str] = []
        engine.finish()

    def staging_sizes(self) -> list[tuple[str, int]]:
        """Slots that hold several chunks, and slots that hold a block and hardly more."""
        if self.way.name in ("batched", "runs"):
            return [("no staging", 0)]
        largest = max(plane.block_bytes for plane in self.plan.planes)
        tight = -(-(largest + 16) // 256) * 256
        # At most some hundred pieces: a large payload of small blocks would make thousands.
        tight = max(tight, self.plan.num_bytes // 100 // 256 * 256)
        return [("roomy staging", RING_SLOTS * 3 * (self.plan.num_bytes + 512)), ("tight staging", RING_SLOTS * tight)]

    def mover(self, staging_bytes: int) -> Mover:
        staging = torch.empty(max(1, staging_bytes), dtype=torch.uint8, device=self.engine.where)
        self.engine.finish()
        return open_way(self.plan, self.way, self.direction, self.engine.device, staging)

    def chunks(self, ids: Sequence[tuple[int, ...]], skips: Sequence[int], seed: int) -> list[ChunkCopy]:
        """Each with a slot of its own, full of new bytes."""
        made = []
        for slot, (block_ids, skip_blocks) in enumerate(zip(ids, skips, strict=True)):
            memory = self.region.tensor(slot)
            memory.copy_(random_bytes(len(memory), seed + slot))
            made.append(ChunkCopy(block_ids, memory[HEADER_BYTES : HEADER_BYTES + self.plan.num_bytes], skip_blocks))
        return made

    def submit(self, mover: Mover, chunks: Sequence[ChunkCopy], *, by_tensor: bool) -> None:
        told: list[int] = []

        def on_tensor(number: int, event: Event) -> None:
            told.append(number)

        submission: Submission = mover.submit([self.engine.event()], chunks, on_tensor if by_tensor else None)
        until(submission.query, f"a submission of {mover.name}")
        if submission.error is not None:
            raise submission.error
        seconds = submission.seconds()
        submission.release()
        if seconds < 0.0:
            self.complaints.append(f"a submission took {seconds} s")
        if by_tensor and told != list(range(len(self.plan.paged))):
            self.complaints.append(f"told of tensors {told}")

    def out(self, mover: Mover, ids: Sequence[tuple[int, ...]], what: str, *, by_tensor: bool, seed: int) -> None:
        chunks = self.chunks(ids, [0] * len(ids), seed)
        expected = [self.region.tensor(slot).clone() for slot in range(len(ids))]
        for memory, chunk in zip(expected, chunks, strict=True):
            self.oracle.gather(chunk.block_ids, memory[HEADER_BYTES : HEADER_BYTES + self.plan.num_bytes])
        self.submit(mover, chunks, by_tensor=by_tensor)
        for slot, memory in enumerate(expected):
            found = self.region.tensor(slot)
            if torch.equal(found, memory):
                continue
            payload = slice(HEADER_BYTES, HEADER_BYTES + self.plan.num_bytes)
            where = payload_difference(self.plan, found[payload], memory[payload]) or "bytes beside the payload"
            self.complaints.append(f"{what}: chunk {slot}: {where}")
        self.see_pages(what)

    def into(
        self,
        mover: Mover,
        ids: Sequence[tuple[int, ...]],
        skips: Sequence[int],
        what: str,
        *,
        by_tensor: bool,
        seed: int,
    ) -> None:
        chunks = self.chunks(ids, skips, seed)
        before = [self.region.tensor(slot).clone() for slot in range(len(ids))]
        for chunk in chunks:
            self.oracle.scatter(chunk.block_ids, chunk.host, chunk.skip_blocks)
        self.submit(mover, chunks, by_tensor=by_tensor)
        self.see_pages(what)
        for slot, memory in enumerate(before):
            if not torch.equal(self.region.tensor(slot), memory):
                self.complaints.append(f"{what}: a load wrote to slot {slot}")

    def see_pages(self, what: str) -> None:
        self.engine.finish()
        where = self.pages.difference(self.twin)
        if where is not None:
            self.complaints.append(f"{what}: {where}")

    def check(self) -> None:
        assert not self.complaints, "\n".join(self.complaints[:6])


def test_a_store_takes_the_bytes_of_its_blocks_and_no_others(engine: Engine, geometry: Geometry, way: Way) -> None:
    bench = Bench(engine, geometry, way, "out")
    for staging, staging_bytes in bench.staging_sizes():
        mover = bench.mover(staging_bytes)
        for seed, (order, chunks) in enumerate([("random", 3), ("up", 1), ("down", 2), ("twice", 5)]):
            by_tensor = seed % 2 == 1
            ids = sample_ids(geometry, chunks, order, seed)
            what = f"{staging}, ids {order}, {len(ids)} chunks, by tensor: {by_tensor}"
            bench.out(mover, ids, what, by_tensor=by_tensor, seed=100 * seed)
    bench.check()


def test_a_load_writes_the_blocks_it_is_to_write_and_no_others(engine: Engine, geometry: Geometry, way: Way) -> None:
    bench = Bench(engine, geometry, way, "in")
    last = geometry.num_blocks - 1
    for staging, staging_bytes in bench.staging_sizes():
        mover = bench.mover(staging_bytes)
        for seed, (order, skips) in enumerate(
            [("random", (0, 0, last)), ("up", (0,)), ("down", (1, 0)), ("random", (geometry.num_blocks, 0))]
        ):
            by_tensor = seed % 2 == 1
            ids = sample_ids(geometry, len(skips), order, seed)
            used = skips[: len(ids)]
            what = f"{staging}, ids {order}, skipped {used}, by tensor: {by_tensor}"
            bench.into(mover, ids, used, what, by_tensor=by_tensor, seed=100 * seed)
    bench.check()


def test_a_byte_that_is_wrong_is_found_and_named(engine: Engine, geometry: Geometry) -> None:
    """What the other tests rest on: one bit that is flipped in pages or payload does not pass."""
    pages, twin = Pages(geometry, engine.where), Pages(geometry, torch.device("cpu"))
    engine.finish()
    assert pages.difference(twin) is None
    block = geometry.pool_blocks - 1
    plane = twin.plan.planes[-1]
    at = plane.address + block * plane.block_stride + plane.run_offsets[-1] + plane.run_bytes - 1
    storage = (len(geometry.tensors) - 1) % geometry.storages
    pages.memory[storage][at - twin.memory[storage].data_ptr()] += 1
    named = f"({twin.plan.paged[-1].name}), block {block}, its byte {plane.block_bytes - 1}:"
    assert named in str(pages.difference(twin))
    payload = torch.zeros(twin.plan.num_bytes, dtype=torch.uint8)
    twin.oracle().gather(sample_ids(geometry, 1, "random", 0)[0], payload)
    other = payload.clone()
    other[-1] += 1
    assert f"block at place {geometry.num_blocks - 1}, its byte {plane.block_bytes - 1}:" in str(
        payload_difference(twin.plan, other, payload)
    )
