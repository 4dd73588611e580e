"""Pages to staging memory and back with a Triton kernel that takes a few multiprocessors and no more.

A chunk's runs are rows of a table on the device, so one launch moves any number of layers and chunks:

    row    page of block 0 | from block to block | place in the payload | from block to block      (in items)

Pages are addressed from one aligned anchor: the compiler knows then that a run begins on a 16-byte
boundary, and moves 16 bytes per thread and access. Runs of unlike length or alignment make groups, with
a launch each.

Seen without a GPU: the kernel's results under Triton's interpreter, and the machine code that Triton makes
of it for an H100. It has not run on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol, cast

import torch

from kvsluice.kernels.door import check_pages
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.paged import INTEGER_DTYPES
from kvsluice.kernels.pieces import Piece
from kvsluice.kernels.plan import CopyPlan

__all__ = ["DEFAULT_PROGRAMS", "NUM_WARPS", "TritonPages"]

DEFAULT_PROGRAMS: Final = 2
"""Of 132 multiprocessors on an H100 1.5 %, which is below what an engine's throughput varies by."""

NUM_WARPS: Final = 16
_ITEMS_IN_FLIGHT: Final = 8192
"""What a program reads before it writes, 64 KiB in items of 8 bytes: 128 bytes a thread. At some 0.8 us a memory
access takes, one multiprocessor then moves tens of GB/s each way; a guess until it has been measured on a GPU."""
_WIDEST_BYTES: Final = 8
_VECTOR_BYTES: Final = 16
_TILE_THREADS: Final = (32, 16, 8, 4, 2, 1)
"""Threads that share a tile: a whole warp where runs are long, so that one address serves 4 KiB."""
_TILE_STEPS: Final = 8
"""Accesses that each of them makes in it."""
_MAX_IDLE: Final = 1 / 8
"""So much of a run's length its last tile may reach past its end."""


class _Launch(Protocol):
    def __call__(self, *args: object, **constants: object) -> object: ...


class _Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> _Launch: ...


def _kernel(device: torch.device) -> _Kernel:
    try:
        module = import_module("kvsluice.kernels.triton_kernel")
    except ImportError as error:
        raise DeviceCopyError(f"the Triton kernel needs Triton, which cannot be imported: {error}") from error
    if module.IS_INTERPRETED is not (device.type == "cpu"):
        # The interpreter hands out addresses of copies that it makes: ours reach from one tensor to another.
        mode = "interprets kernels (TRITON_INTERPRET)" if module.IS_INTERPRETED else "does not interpret kernels"
        raise DeviceCopyError(f"Triton {mode}, and the KV cache is on {device}")
    return cast("_Kernel", vars(module)["copy_pages"])


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one length and alignment: a table of rows, and how the kernel walks them.

    Attributes:
        rows: int64 (rows, 4), on the pages' device.
        first_rows: by plane, its first row here; one more at the end.
        item_bytes: of the kernel's items.
        run_items, tile_items: length of a run, and of the tiles that cover it.
        aligned_items: every run begins at a multiple of so many items.
    """

    rows: torch.Tensor
    first_rows: tuple[int, ...]
    item_bytes: int
    run_items: int
    tile_items: int
    aligned_items: int
    anchor: torch.Tensor

    @property
    def tiles(self) -> int:
        """Tiles that a program has in flight."""
        return _ITEMS_IN_FLIGHT // self.tile_items

    def arguments(
        self, ids: torch.Tensor, staged: torch.Tensor, numbers: tuple[int, ...], *, into_pages: bool
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The kernel's arguments and constants for this group."""
        constants: dict[str, object] = {
            "INTO_PAGES": into_pages,
            "ALIGNED_ITEMS": self.aligned_items,
            "EVEN": self.run_items % self.tile_items == 0,
            "TILES": self.tiles,
            "TILE_ITEMS": self.tile_items,
            "STEPS": _TILE_STEPS,
            "num_warps": NUM_WARPS,
        }
        return (self.anchor, self.rows, ids, _items(staged, self.item_bytes), *numbers), constants


class TritonPages:
    """See `PageKernel`. One thread at a time.

    Args:
        plan: the geometry; tensors on a CUDA device, or in host memory under Triton's interpreter.
        programs: program instances, each of which takes up to one multiprocessor.

    Raises:
        DeviceCopyError: Triton is not installed, or interprets kernels where the tensors are on a GPU, or does not
            where they are in host memory.
        ValueError: programs below 1.
    """

    def __init__(self, plan: CopyPlan, *, programs: int = DEFAULT_PROGRAMS) -> None:
        if programs < 1:
            raise ValueError(f"programs must be at least 1, got {programs}")
        self.plan = plan
        self.programs = programs
        self._kernel = _kernel(plan.device)
        self._groups = _groups(plan)

    def gather(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """See `PageKernel.gather`."""
        self._launch(piece, ids, staged, stride_bytes, into_pages=False)

    def scatter(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """See `PageKernel.scatter`."""
        self._launch(piece, ids, staged, stride_bytes, into_pages=True)

    def compile(self, staged: torch.Tensor, *, into_pages: bool) -> None:
        """Compile, load and launch what one direction needs, so that no later launch has to. It may take seconds.

        On the current stream; what is launched moves nothing.
        """
        ids = torch.zeros((1, self.plan.num_blocks), dtype=torch.int64, device=self.plan.device)
        for group in self._groups:
            # The numbers do not matter: the kernel is not specialised on them.
            args, constants = group.arguments(ids, staged, (0,) * 10, into_pages=into_pages)
            self._kernel[(1,)](*args, **constants)

    def _launch(
        self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int, *, into_pages: bool
    ) -> None:
        check_pages(self.plan, piece, ids, staged, stride_bytes)
        num_blocks = piece.last_block - piece.first_block
        for group in self._groups:
            first_row = group.first_rows[piece.first_plane]
            num_rows = group.first_rows[piece.last_plane] - first_row
            if not num_rows:
                continue
            tiles_per_run = -(-group.run_items // group.tile_items)
            num_tiles = len(ids) * num_rows * num_blocks * tiles_per_run
            numbers = (
                first_row,
                num_rows,
                piece.first_block,
                num_blocks,
                self.plan.num_blocks,
                stride_bytes // group.item_bytes,
                (piece.shift_bytes - piece.offset) // group.item_bytes,
                group.run_items // group.aligned_items,
                tiles_per_run,
                num_tiles,
            )
            args, constants = group.arguments(ids, staged, numbers, into_pages=into_pages)
            self._kernel[(min(self.programs, -(-num_tiles // group.tiles)),)](*args, **constants)


def _items(memory: torch.Tensor, item_bytes: int) -> torch.Tensor:
    return memory[: len(memory) // item_bytes * item_bytes].view(INTEGER_DTYPES[item_bytes])


def _groups(plan: CopyPlan) -> tuple[_Group, ...]:
    rows: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    counts: dict[tuple[int, int], list[int]] = {}
    for number, plane in enumerate(plan.planes):
        for run, run_offset in enumerate(plane.run_offsets):
            address, place = plane.address + run_offset, plane.offset + run * plane.run_bytes
            numbers = (address, plane.block_stride, place, plane.block_bytes)
            kind = (plane.run_bytes, math.gcd(_VECTOR_BYTES, plane.run_bytes, *numbers))
            rows.setdefault(kind, []).append(numbers)
            counts.setdefault(kind, [0] * len(plan.planes))[number] += 1
    return tuple(_group(plan.device, kind, rows[kind], counts[kind]) for kind in rows)


def _group(
    device: torch.device, kind: tuple[int, int], rows: list[tuple[int, int, int, int]], counts: list[int]
) -> _Group:
    run_bytes, aligned_bytes = kind
    item_bytes = min(aligned_bytes, _WIDEST_BYTES)
    run_items = run_bytes // item_bytes
    dtype = INTEGER_DTYPES[item_bytes]
    anchor = torch.zeros(_VECTOR_BYTES // item_bytes, dtype=dtype, device=device)
    if anchor.data_ptr() % _VECTOR_BYTES:
        raise DeviceCopyError(f"{device}: memory is not aligned to {_VECTOR_BYTES} bytes: {anchor.data_ptr():#x}")
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    table[:, 0] -= anchor.data_ptr()
    table //= item_bytes
    first_rows = [0]
    for count in counts:
        first_rows.append(first_rows[-1] + count)
    return _Group(
        rows=table.to(device),
        first_rows=tuple(first_rows),
        item_bytes=item_bytes,
        run_items=run_items,
        tile_items=_tile_items(run_items, aligned_bytes // item_bytes),
        aligned_items=aligned_bytes // item_bytes,
        anchor=anchor,
    )


def _tile_items(run_items: int, aligned_items: int) -> int:
    """The longest tile that leaves few items idle, or the shortest."""
    lengths = [threads * aligned_items * _TILE_STEPS for threads in _TILE_THREADS]
    return next((length for length in lengths if -run_items % length <= _MAX_IDLE * run_items), lengths[-1])
