"""Gather and scatter in plain torch: the reference that every other kernel is compared with.

Three ways to move the same bytes:

- `runs`: one `memmove` for each run of consecutive bytes; neighbouring blocks become one run.
- `index`: one `index_select` or `index_copy_` for each tensor.
- `staged`: `index` into a temporary on the device, then one copy of the whole chunk.

Host memory uses the first two. A `memmove` costs about 1 us in the interpreter and gives the GIL up
and asks for it again each time, an indexed call does so once for a whole tensor. Measured with
`benchmarks/cpu_copy.py` on a two-core EPYC: indexed copies lead up to 64 KiB a run (twice as fast at
4 KiB), from 256 KiB on both reach a plain memcpy. So runs of `RUN_MIN_BYTES` and more are moved
directly. Indexed copies work on 16-byte items, since `index_copy_` moves one item at a time: items
of 8 bytes take 1.4 times as long.

An indexed copy is kept on the calling thread (see `kvsluice.kernels.openmp`). Where that is not
possible (another threading runtime), every copy is made of runs.

The CUDA path (`staged`) has not run on a GPU yet; the tests drive the same code on host memory.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import torch

from kvsluice.kernels.openmp import one_openmp_thread
from kvsluice.kernels.paged import Geometry, PagedTensor

__all__ = ["RUN_MIN_BYTES", "CopyPlan", "Method", "gather", "scatter"]

Method = Literal["auto", "index", "runs", "staged"]

RUN_MIN_BYTES: Final = 128 << 10
"""Between the sizes up to which indexed copies lead and from which on runs do not cost anything; see above."""

_MAX_SPLIT: Final = 8
"""Up to so many outer indices (K and V, a few heads) are indexed one by one, so that torch copies whole pages."""

_ITEM_DTYPES: Final = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """One indexed copy: a view of the cache, the axis of its blocks, and where its items lie in a chunk."""

    view: torch.Tensor
    axis: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Runs:
    """One tensor as runs of memory: addresses are those of block 0, and of its place in a chunk."""

    starts: tuple[tuple[int, int], ...]
    run_bytes: int
    block_stride: int
    chunk_stride: int
    dense: bool


class CopyPlan:
    """Everything about copying chunks of one geometry that does not depend on the block ids.

    The plan holds the tensors' addresses: they must stay where they are for as long as it is used.
    Immutable to the outside; several threads may use one plan at once, on different blocks.

    Args:
        paged: the tensors of a chunk, in payload order; on one device, with equally many blocks.
        num_blocks: blocks in a chunk, at least 1.
        method: `auto` chooses by device and length of the runs; any other is taken as it is.

    Attributes:
        num_bytes: bytes of a chunk's payload.
        device: where the tensors live.

    Raises:
        TypeError: an entry is not a `PagedTensor`.
        ValueError: no tensors, num_blocks below 1, unlike devices or block counts, or a method that
            cannot serve: `runs` is for host memory.
    """

    def __init__(self, paged: Sequence[PagedTensor], num_blocks: int, *, method: Method = "auto") -> None:
        self.paged = tuple(paged)
        if not self.paged:
            raise ValueError("a copy plan needs at least one tensor")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        first = self.paged[0]
        for item in self.paged:
            if not isinstance(item, PagedTensor):
                raise TypeError(f"a copy plan takes PagedTensor, got {type(item).__name__}")
            for what, here, there in (
                ("device", item.tensor.device, first.tensor.device),
                ("number of blocks", item.num_blocks, first.num_blocks),
            ):
                if here != there:
                    raise ValueError(f"{what} differs: {there} in {first.name}, {here} in {item.name}")
        self.device = first.tensor.device
        if self.device.type == "cpu":
            self._method: Method = method
        elif method in ("auto", "staged"):
            self._method = "staged"
        else:
            raise ValueError(f"method {method!r} is for host memory, the tensors are on {self.device}")
        self.num_blocks = num_blocks
        self.num_pool_blocks = first.num_blocks
        self._geometries = tuple(item.geometry() for item in self.paged)
        offsets = [0]
        for item in self.paged:
            offsets.append(offsets[-1] + item.page_bytes * num_blocks)
        self.num_bytes = offsets[-1]
        self._offsets = tuple(offsets[:-1])
        self._runs = tuple(map(self._plan_runs, range(len(self.paged)))) if self.device.type == "cpu" else ()
        self._pieces = {_WIDEST_BYTES: self._plan_pieces(_WIDEST_BYTES)}

    def gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """Copy blocks into a chunk.

        On the CPU the copy is done on return. On CUDA it is queued on the current stream, and so
        is the copy into a pinned `out`.

        Args:
            block_ids: `num_blocks` ids; one may be named twice.
            out: uint8 (num_bytes,), contiguous; host memory (pinned or not) or the tensors' device.

        Raises:
            TypeError: `out` is not a uint8 tensor.
            ValueError: wrong number of ids, an id outside the pool, or a wrong length, stride or device.
        """
        self._check(block_ids, out, "out")
        if self._method == "staged":
            self._gather_staged(block_ids, out)
        else:
            self._copy_on_host(block_ids, out, into_cache=False)

    def scatter(self, block_ids: Sequence[int], src: torch.Tensor) -> None:
        """Copy a chunk into blocks: the reverse of `gather`, under the same conditions.

        Raises:
            TypeError, ValueError: as in `gather`; also ValueError where an id is named twice.
        """
        self.scatter_tail(block_ids, src, 0)

    def scatter_tail(self, block_ids: Sequence[int], src: torch.Tensor, skip_blocks: int) -> None:
        """Copy all but the first `skip_blocks` blocks of a chunk; those ids are checked and left as they are.

        Args:
            block_ids: `num_blocks` ids, those of the blocks left alone included.
            src: the whole chunk, as in `scatter`.
            skip_blocks: 0 to `num_blocks`.

        Raises:
            TypeError, ValueError: as in `scatter`; also ValueError where `skip_blocks` is out of range.
        """
        self._check(block_ids, src, "src")
        if not 0 <= skip_blocks <= self.num_blocks:
            raise ValueError(f"skip_blocks must be 0 to {self.num_blocks}, got {skip_blocks}")
        written = block_ids[skip_blocks:]
        if len(set(written)) != len(written):
            twice = next(block for block in written if list(written).count(block) > 1)
            raise ValueError(f"block id {twice} is named twice: its bytes would depend on the order of writes")
        if not written:
            return
        if self._method == "staged":
            self._scatter_staged(written, src)
        else:
            self._copy_on_host(written, src, into_cache=True)

    def _check(self, block_ids: Sequence[int], flat: torch.Tensor, what: str) -> None:
        if len(block_ids) != self.num_blocks:
            raise ValueError(f"a chunk has {self.num_blocks} blocks, got {len(block_ids)} block ids")
        if min(block_ids) < 0 or max(block_ids) >= self.num_pool_blocks:
            bad = next(block for block in block_ids if not 0 <= block < self.num_pool_blocks)
            raise ValueError(f"block id {bad} is outside the pool: 0 to {self.num_pool_blocks - 1}")
        if flat.dtype != torch.uint8:
            raise TypeError(f"{what} must be uint8, got {flat.dtype}")
        if flat.dim() != 1 or flat.shape[0] != self.num_bytes or not flat.is_contiguous():
            raise ValueError(
                f"{what} must be contiguous and of shape ({self.num_bytes},), "
                f"got {tuple(flat.shape)} with strides {flat.stride()}"
            )
        if flat.device.type != "cpu" and flat.device != self.device:
            raise ValueError(f"{what} must be in host memory or on {self.device}, got {flat.device}")

    def _copy_on_host(self, block_ids: Sequence[int], flat: torch.Tensor, *, into_cache: bool) -> None:
        """Copy the chunk's last blocks, as many as there are ids."""
        start = self.num_blocks - len(block_ids)
        spans = _spans(block_ids, start)
        pieces = self._pieces_for(flat)
        index: torch.Tensor | None = None
        flat_items: dict[torch.dtype, torch.Tensor] = {}
        base = flat.data_ptr()
        with one_openmp_thread() as limited:
            for runs, own_pieces in zip(self._runs, pieces, strict=True):
                own_spans = spans if runs.dense else [(block, place, 1) for place, block in enumerate(block_ids, start)]
                if self._method == "runs" or (
                    self._method == "auto"
                    and (not limited or runs.run_bytes * len(block_ids) >= RUN_MIN_BYTES * len(own_spans))
                ):
                    _move_runs(runs, own_spans, base, into_cache=into_cache)
                    continue
                if index is None:
                    index = torch.tensor(block_ids, dtype=torch.int64)
                _move_pieces(own_pieces, index, flat, flat_items, into_cache=into_cache)

    def _gather_staged(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        index = self._index_on_device(block_ids)
        direct = out.device == self.device and self.device.type != "cpu"
        chunk = out if direct else self._temporary()
        self._move_all(index, chunk, into_cache=False)
        if not direct:
            out.copy_(chunk, non_blocking=True)
        self._record(index, chunk)

    def _scatter_staged(self, block_ids: Sequence[int], src: torch.Tensor) -> None:
        index = self._index_on_device(block_ids)
        direct = src.device == self.device and self.device.type != "cpu"
        chunk = src if direct else self._temporary()
        if not direct:
            chunk.copy_(src, non_blocking=True)
        self._move_all(index, chunk, into_cache=True)
        self._record(index, chunk)

    def _move_all(self, index: torch.Tensor, chunk: torch.Tensor, *, into_cache: bool) -> None:
        flat_items: dict[torch.dtype, torch.Tensor] = {}
        for own_pieces in self._pieces_for(chunk):
            _move_pieces(own_pieces, index, chunk, flat_items, into_cache=into_cache)

    def _temporary(self) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)

    def _index_on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        # From pageable memory the copy would wait for the stream, and so for the compute before it.
        index = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return index.to(self.device, non_blocking=True)

    def _record(self, *temporaries: torch.Tensor) -> None:
        """Tell the caching allocator that the current stream uses these: their memory is not reused before."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for temporary in temporaries:
                temporary.record_stream(stream)

    def _plan_runs(self, number: int) -> _Runs:
        geometry, tensor = self._geometries[number], self.paged[number].tensor
        run_bytes = geometry.run_bytes
        address = tensor.untyped_storage().data_ptr() + geometry.offset
        inner = geometry.inner[:-1]
        runs_per_block = math.prod(size for size, _ in inner)
        starts = [
            (
                address + outer_offset + inner_offset,
                self._offsets[number] + (outer * self.num_blocks * runs_per_block + run) * run_bytes,
            )
            for outer, outer_offset in enumerate(_offsets(geometry.outer))
            for run, inner_offset in enumerate(_offsets(inner))
        ]
        return _Runs(tuple(starts), run_bytes, geometry.block_stride, runs_per_block * run_bytes, dense=geometry.dense)

    def _pieces_for(self, flat: torch.Tensor) -> tuple[tuple[_Piece, ...], ...]:
        """The pieces whose items are no wider than the alignment of this memory."""
        base_bytes = math.gcd(_WIDEST_BYTES, flat.data_ptr(), flat.storage_offset())
        pieces = self._pieces.get(base_bytes)
        if pieces is None:
            # Two threads may both get here; they write the same value.
            pieces = self._pieces[base_bytes] = self._plan_pieces(base_bytes)
        return pieces

    def _plan_pieces(self, base_bytes: int) -> tuple[tuple[_Piece, ...], ...]:
        with torch.inference_mode(False):  # views made in inference mode could not be written outside it
            return tuple(
                tuple(_pieces(item.tensor, geometry, offset, self.num_blocks, base_bytes))
                for item, geometry, offset in zip(self.paged, self._geometries, self._offsets, strict=True)
            )


def gather(paged: Sequence[PagedTensor], block_ids: Sequence[int], out: torch.Tensor) -> None:
    """Copy blocks into one contiguous run of bytes, tensor after tensor; see `CopyPlan.gather`.

    Plans anew on every call: code that copies often keeps a `CopyPlan`.
    """
    CopyPlan(paged, len(block_ids)).gather(block_ids, out)


def scatter(paged: Sequence[PagedTensor], block_ids: Sequence[int], src: torch.Tensor) -> None:
    """Copy one contiguous run of bytes into blocks, the reverse of `gather`; see `CopyPlan.scatter`."""
    CopyPlan(paged, len(block_ids)).scatter(block_ids, src)


def _offsets(dims: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The offset of every index, in row-major order."""
    for index in product(*(range(size) for size, _ in dims)):
        yield sum(place * stride for place, (_, stride) in zip(index, dims, strict=True))


def _spans(block_ids: Sequence[int], start: int) -> list[tuple[int, int, int]]:
    """(first id, its place in the chunk, count) of each longest run of ids that count up by one from `start` on."""
    spans: list[tuple[int, int, int]] = []
    first = previous = block_ids[0]
    first_place = start
    for place, block in enumerate(block_ids[1:], start + 1):
        if block != previous + 1:
            spans.append((first, first_place, place - first_place))
            first, first_place = block, place
        previous = block
    spans.append((first, first_place, start + len(block_ids) - first_place))
    return spans


def _move_runs(runs: _Runs, spans: Sequence[tuple[int, int, int]], base: int, *, into_cache: bool) -> None:
    cache_at: list[int] = []
    chunk_at: list[int] = []
    for address, offset in runs.starts:
        cache_at += [address + block * runs.block_stride for block, _, _ in spans]
        chunk_at += [base + offset + place * runs.chunk_stride for _, place, _ in spans]
    lengths = [count * runs.run_bytes for _, _, count in spans] * len(runs.starts)
    target, source = (cache_at, chunk_at) if into_cache else (chunk_at, cache_at)
    # The fastest loop that the interpreter has: at 16 KiB a run, its own time is half of the whole.
    deque(map(ctypes.memmove, target, source, lengths), maxlen=0)


def _move_pieces(
    pieces: Sequence[_Piece],
    index: torch.Tensor,
    flat: torch.Tensor,
    flat_items: dict[torch.dtype, torch.Tensor],
    *,
    into_cache: bool,
) -> None:
    """Copy the last `len(index)` blocks of each piece; `flat_items` keeps `flat` in each item dtype for later calls."""
    for piece in pieces:
        dtype, item_bytes = piece.view.dtype, piece.view.element_size()
        items = flat_items.get(dtype)
        if items is None:
            items = flat_items[dtype] = torch.empty(0, dtype=dtype, device=flat.device).set_(
                flat.untyped_storage(), int(flat.storage_offset()) // item_bytes, (len(flat) // item_bytes,), (1,)
            )
        chunk = items.as_strided(piece.shape, piece.strides, items.storage_offset() + piece.offset // item_bytes)
        if len(index) < chunk.shape[piece.axis]:
            chunk = chunk.narrow(piece.axis, chunk.shape[piece.axis] - len(index), len(index))
        if into_cache:
            piece.view.index_copy_(piece.axis, index, chunk)
        else:
            torch.index_select(piece.view, piece.axis, index, out=chunk)


def _pieces(
    tensor: torch.Tensor, geometry: Geometry, offset: int, num_blocks: int, base_bytes: int
) -> Iterator[_Piece]:
    """Indexed copies of one tensor, over the widest items that all its addresses and lengths allow."""
    address = tensor.untyped_storage().data_ptr() + geometry.offset
    strides = [stride for _, stride in (*geometry.outer, *geometry.inner[:-1])]
    item_bytes = math.gcd(
        base_bytes, address, geometry.offset, offset, geometry.run_bytes, geometry.block_stride, *strides
    )
    split = geometry.num_outer <= _MAX_SPLIT
    kept = () if split else geometry.outer
    inner = [*geometry.inner[:-1], (geometry.run_bytes // item_bytes, item_bytes)]
    dims = [*kept, (geometry.num_blocks, geometry.block_stride), *inner]
    shape = (*(size for size, _ in kept), num_blocks, *(size for size, _ in inner))
    dense = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    for number, start in enumerate(_offsets(geometry.outer) if split else (0,)):
        view = torch.empty(0, dtype=_ITEM_DTYPES[item_bytes], device=tensor.device).set_(
            tensor.untyped_storage(),
            (geometry.offset + start) // item_bytes,
            [size for size, _ in dims],
            [stride // item_bytes for _, stride in dims],
        )
        yield _Piece(view, len(kept), offset + number * num_blocks * geometry.block_bytes, shape, dense)
