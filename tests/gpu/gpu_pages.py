"""Pages of many shapes on a device, their twin in host memory, and where exactly two of them differ."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor
from kvsluice.kernels.paged import INTEGER_DTYPES
from kvsluice.kernels.plan import Plane

__all__ = ["Geometry", "Laid", "Pages", "geometries", "payload_difference", "random_bytes", "sample_ids"]

_GUARD_BYTES = 4096
"""Around the pages, so that a byte that is written beside them is seen."""


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Eight at a time: a test of large pages spends most of its time here.
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-num_bytes // 8),), dtype=torch.int64, generator=generator)
    return words.view(torch.uint8)[:num_bytes]


@dataclass(frozen=True)
class Laid:
    """A tensor of pages, and how it lies in memory.

    Attributes:
        shape: in the order in which a chunk keeps it; the block axis' size is filled in.
        order: its axes from the farthest apart to the nearest; as they come if empty.
        padding: by axis of `order`, items left out behind what lies inside that axis; none if empty.
        gap_items: in front of its first item.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    block_axis: int = 0
    rows_per_block: int = 1
    order: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    gap_items: int = 0

    def placed(self, pool_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape, strides, and bytes from the first to past the last."""
        shape = list(self.shape)
        shape.insert(self.block_axis, pool_blocks * self.rows_per_block)
        order = self.order or tuple(range(len(shape)))
        padding = self.padding or (0,) * len(shape)
        strides, span = [0] * len(shape), 1
        for axis, items in zip(reversed(order), reversed(padding), strict=True):
            strides[axis] = span + items
            span = strides[axis] * shape[axis]
        return tuple(shape), tuple(strides), span * self.dtype.itemsize


@dataclass(frozen=True)
class Geometry:
    """Tensors of one chunk; in turns they lie in so many storages."""

    name: str
    tensors: tuple[Laid, ...]
    num_blocks: int
    pool_blocks: int
    storages: int = 1


_BF16, _F32, _I64, _U8, _F8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn


def geometries(*, large: bool) -> Iterator[Geometry]:
    """As engines have them, and worse. Not `large`: some that Triton's interpreter can do in a second."""
    layers = 8 if large else 1
    yield Geometry("llama, K and V outside", (Laid(_BF16, (2, 16, 2, 32), 1),) * layers, 4, 19)
    yield Geometry("fp8, heads before tokens", (Laid(_F8, (2, 3, 8, 24), 1, order=(0, 2, 1, 3, 4)),) * layers, 2, 13)
    yield Geometry("one byte a block", (Laid(_U8, ()), Laid(_F8, (1,), gap_items=3)), 5, 23)
    yield Geometry("padding that spoils alignment", (Laid(_BF16, (4, 33), padding=(1, 3, 0), gap_items=5),) * 2, 3, 8)
    yield Geometry("several rows a block", (Laid(_F32, (7, 3), 0, 3), Laid(_BF16, (20,), 0, 2)), 3, 9, 2)
    if not large:
        yield Geometry("pages beyond what a program holds", (Laid(_U8, (66_000,)),), 2, 4)
        return
    yield Geometry("blocks first, heads inside", (Laid(_BF16, (2, 8, 4, 16)),) * 6, 3, 11, 2)
    yield Geometry("MLA", (Laid(_BF16, (16, 576)),) * 4, 3, 10)
    yield Geometry("odd pages", (Laid(_U8, (37,)), Laid(_U8, (4097,), gap_items=1)), 3, 9)
    yield Geometry("padded pages", (Laid(_BF16, (24, 40), padding=(8, 8, 0)),) * 2, 3, 8)
    yield Geometry("items apart", (Laid(_F32, (6, 5), padding=(2, 0, 1)), Laid(_U8, (9,), padding=(0, 2))), 2, 7)
    kinds = (Laid(_BF16, (8, 128)), Laid(_BF16, (2, 8, 48), 1), Laid(_F32, (7, 33)), Laid(_I64, (5,), gap_items=1))
    yield Geometry("layers unlike each other", kinds * 8, 2, 9, 2)
    yield Geometry("many small layers", (Laid(_BF16, (2, 16, 8)),) * 61, 7, 40)
    sizes = (65_535, 65_536, 65_537, 98_312, 131_088)
    yield Geometry("pages around 64 KiB", tuple(Laid(_U8, (size,)) for size in sizes), 3, 7)
    yield Geometry("pages of 2 MiB and more", (Laid(_BF16, (1 << 20,)), Laid(_U8, ((1 << 21) + 24,))), 2, 6)
    yield Geometry("chunks of 8 MiB", (Laid(_BF16, (2, 16, 8, 64), 1),) * 16, 16, 48)
    for seed in range(12):
        yield _drawn(seed)


def _drawn(seed: int) -> Geometry:
    """Any shape, permuted and padded as the seed has it."""
    source = random.Random(seed)
    tensors = []
    for _ in range(source.choice((1, 2, 3, 7))):
        inner = [source.choice((1, 2, 3, 5, 8, 16, 24, 37, 64, 129, 500)) for _ in range(source.randint(0, 3))]
        while math.prod(inner) > 3_000:
            inner.pop()
        axis = source.randint(0, len(inner))
        order = list(range(len(inner) + 1))
        if source.random() < 0.3:
            source.shuffle(order)
        padding = [source.choice((0, 0, 0, 1, 4, 8)) for _ in order]
        padding[-1] = source.choice((0, 0, 0, 1))
        rows, gap_items = source.choice((1, 1, 2)), source.choice((0, 0, 1, 3))
        dtype = source.choice((_BF16, _F32, _I64, _U8, _F8))
        tensors.append(Laid(dtype, tuple(inner), axis, rows, tuple(order), tuple(padding), gap_items))
    num_blocks = source.randint(1, 6)
    pool_blocks = 3 * num_blocks + source.randint(0, 3)
    return Geometry(f"drawn {seed}", tuple(tensors), num_blocks, pool_blocks, source.choice((1, min(2, len(tensors)))))


def sample_ids(geometry: Geometry, chunks: int, order: str, seed: int) -> list[tuple[int, ...]]:
    """For each chunk its blocks: no block twice, unless the pool is too small for so many or `order` is "twice"."""
    count = geometry.num_blocks
    source = random.Random(seed)
    if order == "twice":
        return [tuple(source.choices(range(geometry.pool_blocks), k=count)) for _ in range(chunks)]
    ids = source.sample(range(geometry.pool_blocks), geometry.pool_blocks)
    if order != "random":
        ids = sorted(ids, reverse=order == "down")
    return [tuple(ids[chunk * count : (chunk + 1) * count]) for chunk in range(min(chunks, len(ids) // count))]


class Pages:
    """A geometry in memory of its own, with the same random bytes for the same seed wherever it is.

    Attributes:
        plan: of a chunk.
        memory: the storages, all bytes around the pages included.
    """

    def __init__(self, geometry: Geometry, where: torch.device, seed: int = 0) -> None:
        places: list[tuple[int, int]] = []
        sizes = [_GUARD_BYTES] * geometry.storages
        for number, laid in enumerate(geometry.tensors):
            storage = number % geometry.storages
            start = -(-sizes[storage] // 16) * 16 + laid.gap_items * laid.dtype.itemsize
            places.append((storage, start))
            sizes[storage] = start + laid.placed(geometry.pool_blocks)[2]
        self.memory = [random_bytes(size + _GUARD_BYTES, seed + number).to(where) for number, size in enumerate(sizes)]
        paged = []
        for number, (laid, (storage, start)) in enumerate(zip(geometry.tensors, places, strict=True)):
            shape, strides, _ = laid.placed(geometry.pool_blocks)
            tensor = torch.empty(0, dtype=laid.dtype, device=where).set_(
                self.memory[storage].untyped_storage(), start // laid.dtype.itemsize, shape, strides
            )
            view = tensor.view(INTEGER_DTYPES[laid.dtype.itemsize])
            paged.append(PagedTensor(view, laid.block_axis, laid.rows_per_block, f"tensor {number}"))
        self.plan = CopyPlan(paged, geometry.num_blocks)

    def oracle(self) -> HostCopy:
        """What must come of copies; for a twin in host memory."""
        return HostCopy(self.plan, method="runs")

    def difference(self, twin: Pages) -> str | None:
        """The first byte that is not as in `twin`, which is in host memory, or None."""
        for storage, (own, its) in enumerate(zip(self.memory, twin.memory, strict=True)):
            found = own.cpu()
            if not torch.equal(found, its):
                at = int((found != its).nonzero()[0])
                where = _place_in_pages(twin.plan, its.data_ptr() + at)
                return f"storage {storage}, {where}: {_shown(found, its, at)}"
        return None


def payload_difference(plan: CopyPlan, found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The first byte of a chunk that is not as expected, or None."""
    if torch.equal(found, expected):
        return None
    at = int((found != expected).nonzero()[0])
    number = max(number for number, plane in enumerate(plan.planes) if plane.offset <= at)
    plane = plan.planes[number]
    block, byte = divmod(at - plane.offset, plane.block_bytes)
    return f"{_named(plan, number)}, block at place {block}, its byte {byte}: {_shown(found, expected, at)}"


def _named(plan: CopyPlan, number: int) -> str:
    plane = plan.planes[number]
    return f"plane {number} of {len(plan.planes)} ({plan.paged[plane.tensor].name})"


def _place_in_pages(plan: CopyPlan, address: int) -> str:
    for number, plane in enumerate(plan.planes):
        for block in range(plan.num_pool_blocks):
            byte = _byte_in_block(plane, address - plane.address - block * plane.block_stride)
            if byte is not None:
                return f"{_named(plan, number)}, block {block}, its byte {byte}"
    return "outside of all pages"


def _byte_in_block(plane: Plane, offset: int) -> int | None:
    """Which byte of the block this is, counted as a chunk keeps them."""
    for run, run_offset in enumerate(plane.run_offsets):
        if run_offset <= offset < run_offset + plane.run_bytes:
            return run * plane.run_bytes + offset - run_offset
    return None


def _shown(found: torch.Tensor, expected: torch.Tensor, at: int) -> str:
    wrong = int((found != expected).sum())
    here, there = (bytes(memory[at : at + 8].tolist()).hex() for memory in (found, expected))
    return f"{here} instead of {there}; {wrong} of {len(expected)} bytes differ"
