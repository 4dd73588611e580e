"""Pages to staging memory and back in plain torch: the twin that every other kernel is compared with.

One `index_select` or `index_copy_` for each plane and chunk: right on every device, and slow where a chunk
has many planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from kvsluice.kernels.door import check_pages
from kvsluice.kernels.paged import INTEGER_DTYPES
from kvsluice.kernels.pieces import Piece
from kvsluice.kernels.plan import CopyPlan

__all__ = ["TorchPages"]

_WIDEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A plane as items, blocks first, and where its items lie in a payload."""

    view: torch.Tensor
    item_bytes: int
    offset: int
    block_bytes: int


class TorchPages:
    """See `PageKernel`. Immutable; any number of threads may use one, on different blocks.

    Args:
        plan: the geometry.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        with torch.inference_mode(False):  # views made in inference mode could not be written outside it
            self._planes = tuple(_indexed(plan, number) for number in range(len(plan.planes)))

    def gather(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """See `PageKernel.gather`."""
        check_pages(self.plan, piece, ids, staged, stride_bytes)
        for plane in self._planes[piece.first_plane : piece.last_plane]:
            for chunk in range(len(ids)):
                place = _place(plane, piece, staged, chunk * stride_bytes)
                torch.index_select(plane.view, 0, ids[chunk, piece.first_block : piece.last_block], out=place)

    def scatter(self, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
        """See `PageKernel.scatter`."""
        check_pages(self.plan, piece, ids, staged, stride_bytes)
        for plane in self._planes[piece.first_plane : piece.last_plane]:
            for chunk in range(len(ids)):
                place = _place(plane, piece, staged, chunk * stride_bytes)
                plane.view.index_copy_(0, ids[chunk, piece.first_block : piece.last_block], place)


def _indexed(plan: CopyPlan, number: int) -> _Indexed:
    plane = plan.planes[number]
    tensor, geometry = plan.paged[plane.tensor].tensor, plan.geometries[plane.tensor]
    inner = geometry.inner[:-1]
    start = plane.address - tensor.untyped_storage().data_ptr()
    item_bytes = math.gcd(
        _WIDEST_BYTES,
        tensor.untyped_storage().data_ptr(),
        start,
        plane.offset,
        plane.run_bytes,
        plane.block_stride,
        *(stride for _, stride in inner),
    )
    view = torch.empty(0, dtype=INTEGER_DTYPES[item_bytes], device=plan.device).set_(
        tensor.untyped_storage(),
        start // item_bytes,
        (plan.num_pool_blocks, *(size for size, _ in inner), plane.run_bytes // item_bytes),
        (plane.block_stride // item_bytes, *(stride // item_bytes for _, stride in inner), 1),
    )
    return _Indexed(view, item_bytes, plane.offset, plane.block_bytes)


def _place(plane: _Indexed, piece: Piece, staged: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """The plane's blocks of `piece` in staging memory, shaped as the plane's view."""
    begin = chunk_bytes + piece.shift_bytes + plane.offset - piece.offset + piece.first_block * plane.block_bytes
    num_bytes = (piece.last_block - piece.first_block) * plane.block_bytes
    part = staged[begin : begin + num_bytes].view(plane.view.dtype)
    return part.view(piece.last_block - piece.first_block, *plane.view.shape[1:])
