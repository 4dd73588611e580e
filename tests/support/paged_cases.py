"""Pages of every shape, parts of chunks in staging memory, and what must be the bytes after a kernel ran.

Memory under test lies between guards: what a kernel writes beside its places is seen. The oracle is `HostCopy`
on pages of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from kvsluice.kernels import CopyPlan, HostCopy, PagedTensor
from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.operations import PageKernel
from kvsluice.kernels.paged import INTEGER_DTYPES
from kvsluice.kernels.pieces import Piece, cut, cut_by_tensor

__all__ = ["DEVICE", "Case", "MakeKernel", "Pages", "Strided", "cases", "check", "random_bytes"]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Where kernels run: on the CPU Triton interprets them."""

_GUARD_BYTES = 1 << 16
_ALIGNMENT_BYTES = 256
_MAX_PIECES = 5
_STAGING_SEED = 100_000
"""So far apart that staging memory never holds what the pages hold."""

MakeKernel = Callable[[CopyPlan], PageKernel]


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Strided:
    """A tensor of pages, and how it lies in memory.

    Attributes:
        shape: in the order in which a chunk keeps it.
        memory_order: its axes from the farthest apart to the nearest.
        padding: by place in the memory order, items left out behind what lies inside that axis.
        gap_items: in front of its first item.
    """

    item_bytes: int
    shape: tuple[int, ...]
    block_axis: int
    rows_per_block: int
    memory_order: tuple[int, ...]
    padding: tuple[int, ...]
    gap_items: int

    @property
    def strides(self) -> tuple[int, ...]:
        strides, span = [0] * len(self.shape), 1
        for axis, padding in zip(reversed(self.memory_order), reversed(self.padding), strict=True):
            strides[axis] = span + padding
            span = strides[axis] * self.shape[axis]
        return tuple(strides)

    @property
    def span_bytes(self) -> int:
        """From its first byte past its last, padding at the end included."""
        items = max(stride * size for stride, size in zip(self.strides, self.shape, strict=True))
        return items * self.item_bytes


@dataclass(frozen=True)
class Case:
    """A launch for every piece of some chunks, in both directions.

    Attributes:
        tensors: in payload order; all have `pool_blocks` blocks.
        storages: the tensors lie in so many, in turns.
        read_ids, write_ids: by chunk; no block is written twice.
        skip_blocks: of each piece so many of the chunk's blocks are left out.
        slot_bytes, by_tensor: how the payload is cut.
        spare_bytes: between chunks in staging memory, more than needed.
        programs: program instances.
    """

    tensors: tuple[Strided, ...]
    storages: int
    pool_blocks: int
    read_ids: tuple[tuple[int, ...], ...]
    write_ids: tuple[tuple[int, ...], ...]
    skip_blocks: int
    slot_bytes: int
    by_tensor: bool
    spare_bytes: int
    programs: int
    seed: int

    @property
    def num_blocks(self) -> int:
        return len(self.read_ids[0])

    @property
    def pool_bytes(self) -> int:
        """Of all tensors, with what they leave out."""
        return sum(laid.span_bytes for laid in self.tensors)

    def pages(self, device: torch.device) -> Pages:
        """The same pages with the same bytes at every call, in memory of their own."""
        places: list[list[int]] = [[] for _ in range(self.storages)]
        sizes = [_GUARD_BYTES] * self.storages
        for number, laid in enumerate(self.tensors):
            storage = number % self.storages
            start = -(-sizes[storage] // 8) * 8 + laid.gap_items * laid.item_bytes
            places[storage].append(start)
            sizes[storage] = start + laid.span_bytes
        memory = [random_bytes(size + _GUARD_BYTES, self.seed + number).to(device) for number, size in enumerate(sizes)]
        paged = []
        for number, laid in enumerate(self.tensors):
            storage = number % self.storages
            view = torch.empty(0, dtype=INTEGER_DTYPES[laid.item_bytes], device=device).set_(
                memory[storage].untyped_storage(), places[storage].pop(0) // laid.item_bytes, laid.shape, laid.strides
            )
            paged.append(PagedTensor(view, laid.block_axis, laid.rows_per_block, f"tensor {number}"))
        return Pages(memory, CopyPlan(paged, self.num_blocks))

    def pieces(self, plan: CopyPlan) -> list[Piece]:
        """Some of those that the payload is cut into, from all over it."""
        if self.by_tensor:
            pieces = [piece for own in cut_by_tensor(plan, self.slot_bytes) for piece in own]
        else:
            pieces = list(cut(plan, self.slot_bytes))
        some = pieces[:: -(-len(pieces) // _MAX_PIECES)]
        return [left for piece in some if (left := piece.without_blocks(self.skip_blocks)) is not None]


@dataclass(frozen=True)
class Pages:
    """Pages, and all memory around them."""

    memory: list[torch.Tensor]
    plan: CopyPlan

    def same_as(self, other: Pages) -> bool:
        """Whether every byte is, those between and beside the pages included."""
        return all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(self.memory, other.memory, strict=True))


@dataclass
class _Staging:
    """The parts of some chunks in staging memory, amid bytes that nobody may touch.

    Attributes:
        memory: all of it, on the CPU, as it must be.
        staged: what a kernel is given, on the device.
    """

    case: Case
    piece: Piece
    seed: int
    stride_bytes: int = field(init=False)
    memory: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.stride_bytes = self.piece.stride_bytes + self.case.spare_bytes
        chunks = len(self.case.read_ids)
        self._length = (chunks - 1) * self.stride_bytes + self.piece.shift_bytes + self.piece.num_bytes
        # The same bytes in the same places of what a kernel is given, wherever the memory happens to lie.
        noise = random_bytes(self._length + 2 * _GUARD_BYTES, self.seed)
        self._on_device = torch.zeros(len(noise) + _ALIGNMENT_BYTES, dtype=torch.uint8, device=DEVICE)
        self._start = _GUARD_BYTES + -(self._on_device.data_ptr() + _GUARD_BYTES) % _ALIGNMENT_BYTES
        self._on_device[self._start - _GUARD_BYTES :][: len(noise)] = noise.to(DEVICE)
        self.memory = self._on_device.cpu().clone()

    @property
    def staged(self) -> torch.Tensor:
        return self._on_device[self._start : self._start + self._length]

    def written(self, plan: CopyPlan) -> list[slice[int, int, None]]:
        """Of a payload, the bytes that the piece's blocks have."""
        return [
            slice(
                plane.offset + self.piece.first_block * plane.block_bytes,
                plane.offset + self.piece.last_block * plane.block_bytes,
            )
            for plane in plan.planes[self.piece.first_plane : self.piece.last_plane]
        ]

    def part(self, chunk: int, place: slice[int, int, None]) -> torch.Tensor:
        """Those bytes of a chunk's payload, in `memory`."""
        start = self._start + chunk * self.stride_bytes + self.piece.shift_bytes - self.piece.offset
        return self.memory[start + place.start : start + place.stop]

    def as_it_must_be(self) -> bool:
        return torch.equal(self._on_device.cpu(), self.memory)


def _on_device(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """(chunks, num_blocks) amid rows of ids that exist, as a part of a longer table is."""
    beside = [[0] * len(ids[0])]
    return torch.tensor([*beside, *ids, *beside * 64], dtype=torch.int64, device=DEVICE)[1 : 1 + len(ids)]


def check(case: Case, make: MakeKernel) -> None:
    """Gather and scatter every piece of the case; raises AssertionError at the first byte that is wrong."""
    with one_openmp_thread():  # a team of threads for each of thousands of small operators takes longer than they do
        _check_gather(case, make)
        _check_scatter(case, make)


def _check_gather(case: Case, make: MakeKernel) -> None:
    before, pages = case.pages(torch.device("cpu")), case.pages(DEVICE)
    kernel, ids = make(pages.plan), _on_device(case.read_ids)
    oracle = HostCopy(before.plan)
    payloads = [torch.empty(before.plan.num_bytes, dtype=torch.uint8) for _ in case.read_ids]
    for payload, block_ids in zip(payloads, case.read_ids, strict=True):
        oracle.gather(block_ids, payload)
    for number, piece in enumerate(case.pieces(pages.plan)):
        staging = _Staging(case, piece, _STAGING_SEED + case.seed + number)
        kernel.gather(piece, ids, staging.staged, staging.stride_bytes)
        for chunk, payload in enumerate(payloads):
            for place in staging.written(before.plan):
                staging.part(chunk, place).copy_(payload[place])
        assert staging.as_it_must_be(), f"{piece}: wrong bytes in staging memory"
    assert pages.same_as(before), "a gather wrote to the pages"


def _check_scatter(case: Case, make: MakeKernel) -> None:
    expected, pages = case.pages(torch.device("cpu")), case.pages(DEVICE)
    kernel, ids = make(pages.plan), _on_device(case.write_ids)
    oracle = HostCopy(expected.plan)
    payload = torch.empty(expected.plan.num_bytes, dtype=torch.uint8)
    for number, piece in enumerate(case.pieces(pages.plan)):
        staging = _Staging(case, piece, _STAGING_SEED + case.seed + number)
        kernel.scatter(piece, ids, staging.staged, staging.stride_bytes)
        assert staging.as_it_must_be(), f"{piece}: a scatter wrote to staging memory"
        for chunk, block_ids in enumerate(case.write_ids):
            # What is no part of the piece goes back as it is.
            oracle.gather(block_ids, payload)
            for place in staging.written(expected.plan):
                payload[place] = staging.part(chunk, place)
            oracle.scatter(block_ids, payload, case.skip_blocks)
    assert pages.same_as(expected), "wrong bytes in the pages or beside them"


_LONG_RUN_BYTES = (40_000, 65_528, 65_535, 65_536, 65_537, 65_544, 66_560, 73_728, 98_304, 131_088)
"""Around and beyond what a program has in flight."""
_RUN_ITEMS = (31, 32, 33, 48, 64, 96, 100, 127, 128, 256, 511, 512, 513, 576, 656, 1000, 1024, 1536, 2049, 4096)
_ITEM_BYTES = st.sampled_from(sorted(INTEGER_DTYPES))


@st.composite
def _strided(draw: st.DrawFn, pool_blocks: int, inner: Sequence[int], *, item_bytes: int, max_outer: int) -> Strided:
    """`inner` are the sizes behind the block axis where nothing is permuted."""
    rows_per_block = draw(st.sampled_from([1, 1, 2, 3]))
    outer = draw(st.lists(st.integers(1, max_outer), max_size=2)) if max_outer > 1 else []
    shape = (*outer, pool_blocks * rows_per_block, *inner)
    order = tuple(range(len(shape)))
    if math.prod(inner) <= 64 and draw(st.booleans()):
        order = tuple(draw(st.permutations(order)))
    padding = [draw(st.sampled_from([0, 0, 0, 1, 2, 8, 16])) for _ in order]
    if not inner or math.prod(inner) > 64 or draw(st.integers(0, 3)):
        padding[-1] = 0
    return Strided(
        item_bytes, shape, len(outer), rows_per_block, order, tuple(padding), draw(st.sampled_from([0, 0, 1, 2, 4, 5]))
    )


@st.composite
def _long_runs(draw: st.DrawFn) -> tuple[int, int, int, list[Strided]]:
    num_chunks, num_blocks = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3)]))
    pool_blocks = num_chunks * num_blocks + draw(st.integers(0, 1))
    tensors = []
    for _ in range(draw(st.integers(1, 2))):
        item_bytes = draw(_ITEM_BYTES)
        run = (draw(st.sampled_from(_LONG_RUN_BYTES)) // item_bytes,)
        laid = draw(_strided(pool_blocks, run, item_bytes=item_bytes, max_outer=1))
        tensors.append(laid)
    return num_chunks, num_blocks, pool_blocks, tensors


@st.composite
def _many_layers(draw: st.DrawFn) -> tuple[int, int, int, list[Strided]]:
    num_chunks, num_blocks = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4]))
    pool_blocks = num_chunks * num_blocks + draw(st.integers(0, 3))
    kinds = [
        draw(
            _strided(
                pool_blocks,
                (draw(st.integers(1, 40)),),
                item_bytes=draw(_ITEM_BYTES),
                max_outer=2,
            )
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    layers = draw(st.sampled_from([1, 2, 5, 16, 33, 40]))
    return num_chunks, num_blocks, pool_blocks, [kinds[layer % len(kinds)] for layer in range(layers)]


@st.composite
def _any_shape(draw: st.DrawFn) -> tuple[int, int, int, list[Strided]]:
    num_chunks, num_blocks = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4, 7]))
    pool_blocks = num_chunks * num_blocks + draw(st.integers(0, 4))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.lists(st.integers(1, 5), max_size=2))
        if draw(st.booleans()):
            inner = [*inner[:1], draw(st.sampled_from(_RUN_ITEMS))]
        tensors.append(draw(_strided(pool_blocks, inner, item_bytes=draw(_ITEM_BYTES), max_outer=4)))
    return num_chunks, num_blocks, pool_blocks, tensors


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Odd and even sizes, strides, item sizes, layer counts, orders of blocks, and pieces of every kind."""
    num_chunks, num_blocks, pool_blocks, tensors = draw(st.one_of(_any_shape(), _many_layers(), _long_runs()))
    total = num_chunks * num_blocks
    first = draw(st.integers(0, pool_blocks - total))
    order = draw(st.sampled_from(["random", "counting up", "counting down"]))
    written = list(range(first, first + total))
    if order == "random":
        written = draw(st.permutations(range(pool_blocks)))[:total]
    elif order == "counting down":
        written.reverse()
    any_blocks = st.lists(st.integers(0, pool_blocks - 1), min_size=total, max_size=total)
    read = draw(st.one_of(st.just(written), any_blocks))
    # Blocks that are left out may be named twice, and be written in another chunk.
    skip_blocks = draw(st.sampled_from([0, draw(st.integers(0, num_blocks - 1))]))
    write_ids = [written[chunk * num_blocks : (chunk + 1) * num_blocks] for chunk in range(num_chunks)]
    if skip_blocks and draw(st.booleans()):
        write_ids = [[ids[-1]] * skip_blocks + ids[skip_blocks:] for ids in write_ids]
    largest = max(_block_bytes(laid) for laid in tensors)
    payload = sum(_block_bytes(laid) * math.prod(laid.shape[: laid.block_axis]) for laid in tensors) * num_blocks
    slot_bytes = draw(st.sampled_from([largest, 2 * largest, 3 * largest + 100, payload // 2, payload]))
    slot_bytes = -(-max(largest, slot_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES + _ALIGNMENT_BYTES
    return Case(
        tensors=tuple(tensors),
        storages=draw(st.integers(1, min(2, len(tensors)))),
        pool_blocks=pool_blocks,
        read_ids=tuple(tuple(read[chunk * num_blocks : (chunk + 1) * num_blocks]) for chunk in range(num_chunks)),
        write_ids=tuple(map(tuple, write_ids)),
        skip_blocks=skip_blocks,
        slot_bytes=slot_bytes,
        by_tensor=draw(st.booleans()),
        spare_bytes=draw(st.sampled_from([0, 0, 16, 48, 4096])),
        programs=draw(st.sampled_from([1, 2, 3, 7, 1000])),
        seed=draw(st.integers(0, 1000)),
    )


def _block_bytes(laid: Strided) -> int:
    """Of one block under one outer index."""
    return math.prod(laid.shape[laid.block_axis + 1 :]) * laid.rows_per_block * laid.item_bytes
