"""Runs of many tensors as the rows of one matrix, so that one call of torch moves all of them.

    memory    ..| layer 0: block | block | ... |....| layer 7: block | block | ... |..
    matrix    a row for every place at which a run could begin, from the first tensor to the last

A row is as long as a run. Rows lie closer together than that and overlap, and the matrix spans whatever lies
between the tensors. Only rows that are the run of a block are ever named: nothing else is read or written.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Final

import torch

from kvsluice.kernels.plan import Plane

__all__ = ["MAX_ELEMENTS", "PlaneGroup", "Rows", "fast_by_the_byte", "groups_of"]

_WIDE: Final = torch.complex128
_NARROW: Final = torch.float8_e4m3fn
"""Items of 16 bytes and of one. A copy of either keeps every bit pattern, unlike one of bool."""

MAX_ELEMENTS: Final = 1 << 62
"""Of a matrix. torch counts in 64 bits, and a heap and a mapping may lie 2^46 bytes apart."""


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Neighbouring planes that hold their blocks alike: as long, as far apart, in as many runs.

    Attributes:
        planes: in payload order.
        bounds: where each tensor's planes begin, and at the end `len(planes)`.
    """

    planes: tuple[Plane, ...]
    bounds: tuple[int, ...]

    @property
    def run_bytes(self) -> int:
        """Length of every run."""
        return self.planes[0].run_bytes

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks of a plane are one run."""
        return self.planes[0].block_stride == self.planes[0].block_bytes == self.run_bytes

    def within(self, tensors: range | None) -> tuple[int, int]:
        """First and last plane, exclusive, of those of the plan's tensors (a range of step 1; None: all)."""
        if tensors is None:
            return 0, len(self.planes)
        first_tensor, count = self.planes[0].tensor, len(self.bounds) - 1
        first, last = (self.bounds[min(max(at - first_tensor, 0), count)] for at in (tensors.start, tensors.stop))
        return first, max(first, last)


def groups_of(planes: Sequence[Plane]) -> Iterator[PlaneGroup]:
    """All planes of a plan in payload order, in groups as large as can be. A tensor is never divided."""
    group: list[Plane] = []
    bounds: list[int] = []
    for _, members in groupby(planes, key=lambda plane: plane.tensor):
        own = tuple(members)
        if group and not _go_together([*group, *own]):
            yield PlaneGroup(tuple(group), (*bounds, len(group)))
            group, bounds = [], []
        bounds.append(len(group))
        group += own
    yield PlaneGroup(tuple(group), (*bounds, len(group)))


def _go_together(planes: Sequence[Plane]) -> bool:
    addresses = [plane.address for plane in planes]
    run_bytes = planes[0].run_bytes
    return (
        len({(plane.run_bytes, plane.block_bytes, plane.block_stride) for plane in planes}) == 1
        and (max(addresses) - min(addresses)) * run_bytes < MAX_ELEMENTS
    )


class Rows:
    """The runs of a group of planes, moved by one `index_select` or one `index_put_`.

    `index_select` moves a row by one memcpy, where it has fewer than 32,768 items. `index_put_` has a loop over items,
    whose speed is up to torch's compiler and differs tenfold: measured in the caches, items of 16 bytes and items of an
    opaque byte come to 27 GB/s, integers of 8, 4, 2 and 1 bytes to 7, 6, 5 and 2. In cold memory bytes lead by 3 %.
    `index_copy_` comes to 25 with 16 bytes, and takes no opaque ones.

    Immutable; any number of threads may use one, on different blocks.

    Args:
        group: its memory stays where it is for as long as this is used.
        num_blocks: blocks in a chunk.
        num_pool_blocks: blocks in the pool.
    """

    def __init__(self, group: PlaneGroup, num_blocks: int, num_pool_blocks: int) -> None:
        first = group.planes[0]
        self._num_blocks = num_blocks
        self._offset = first.offset
        self._plane_bytes = num_blocks * first.block_bytes
        addresses = [[plane.address + run_offset for run_offset in plane.run_offsets] for plane in group.planes]
        start = min(map(min, addresses))
        num_bytes = max(map(max, addresses)) - start + (num_pool_blocks - 1) * first.block_stride + first.run_bytes
        step = math.gcd(first.block_stride, *(address - start for own in addresses for address in own)) or 1
        count = (num_bytes - first.run_bytes) // step + 1
        self._stride = first.block_stride // step
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside it
            # (planes, 1, runs): the rows of block 0.
            starts = [[[(address - start) // step for address in own]] for own in addresses]
            self._starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
            self._first_bytes = _memory(start, num_bytes, torch.uint8).as_strided((count,), (step,))
            self._narrow = _memory(start, num_bytes, _NARROW).as_strided((count, first.run_bytes), (step, 1))
            self._wide: torch.Tensor | None = None
            item_bytes = _WIDE.itemsize
            if math.gcd(item_bytes, start, step, first.run_bytes) == item_bytes:
                shape = (count, first.run_bytes // item_bytes)
                self._wide = _memory(start, num_bytes, _WIDE).as_strided(shape, (step // item_bytes, 1))

    def gather(self, planes: tuple[int, int], block_ids: torch.Tensor, chunk_address: int) -> None:
        """Copy blocks into a chunk.

        Args:
            planes: first and last, exclusive, of the group's.
            block_ids: int64 (num_blocks, 1), inside the pool.
            chunk_address: of the payload's first byte, in host memory.
        """
        index = self._index(planes, block_ids)
        address, num_bytes = self._place(planes, chunk_address)
        matrix = self._narrow if self._wide is None or address % _WIDE.itemsize else self._wide
        out = _memory(address, num_bytes, matrix.dtype).view(len(index), -1)
        torch.index_select(matrix, 0, index, out=out)

    def scatter(self, planes: tuple[int, int], block_ids: torch.Tensor, chunk_address: int) -> None:
        """Copy the chunk's last blocks, as many as there are ids, into the blocks of these ids; see `gather`."""
        index = self._index(planes, block_ids)
        address, num_bytes = self._place(planes, chunk_address)
        matrix = self._narrow
        if self._wide is not None and address % _WIDE.itemsize == 0 and not fast_by_the_byte():
            matrix = self._wide
        source = _memory(address, num_bytes, matrix.dtype)
        if len(block_ids) == self._num_blocks:
            matrix.index_put_((index,), source.view(len(index), -1))
        else:
            runs = self._starts.shape[2]
            source = source.view(-1, self._num_blocks, runs, matrix.shape[1])[:, -len(block_ids) :]
            matrix.index_put_((index.view(-1, len(block_ids), runs),), source)

    def _index(self, planes: tuple[int, int], block_ids: torch.Tensor) -> torch.Tensor:
        """The rows of these blocks, int64 (rows,), in the order of the payload."""
        first, last = planes
        starts = self._starts if last - first == len(self._starts) else self._starts[first:last]
        index = torch.add(starts, block_ids, alpha=self._stride).reshape(-1)
        # The processor reads a byte of many rows at once, and so finds their pages in the page tables before the copy,
        # which would come to them one by one. Worth 2 to 8 % of a copy in cold memory.
        torch.index_select(self._first_bytes, 0, index)
        return index

    def _place(self, planes: tuple[int, int], chunk_address: int) -> tuple[int, int]:
        """Address and number of the payload's bytes that are these planes."""
        first, last = planes
        return chunk_address + self._offset + first * self._plane_bytes, (last - first) * self._plane_bytes


def _memory(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as a flat tensor, which does not keep it alive."""
    array = (ctypes.c_ubyte * num_bytes).from_address(address)
    return torch.frombuffer(array, dtype=dtype, count=num_bytes // dtype.itemsize)


@cache
def fast_by_the_byte() -> bool:
    """Whether this build of torch scatters opaque bytes no slower than items of 16: a matter of its compiler.

    Where it does, it is by loads and stores as wide as the processor has them.
    """
    index = torch.arange(16, device="cpu")
    best_s = {}
    for dtype in (_NARROW, _WIDE):
        rows, source = (
            torch.zeros((len(index), 16 << 10), dtype=torch.uint8, device="cpu").view(dtype) for _ in range(2)
        )
        taken_s = []
        for _ in range(9):
            start_s = time.perf_counter()
            rows.index_put_((index,), source)
            taken_s.append(time.perf_counter() - start_s)
        best_s[dtype] = min(taken_s)
    return best_s[_NARROW] < 1.3 * best_s[_WIDE]
