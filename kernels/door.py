"""What every kernel between pages and staging memory checks before it touches either."""

from __future__ import annotations

import torch

from kvsluice.kernels.pieces import Piece
from kvsluice.kernels.plan import CopyPlan

__all__ = ["STAGING_ALIGNMENT_BYTES", "check_pages"]

STAGING_ALIGNMENT_BYTES = 16
"""The widest access that a kernel makes."""


def check_pages(plan: CopyPlan, piece: Piece, ids: torch.Tensor, staged: torch.Tensor, stride_bytes: int) -> None:
    """Refuse what a kernel could not move. The ids themselves are on the device: their values are checked before.

    Raises:
        TypeError: ids that are not int64, or staging memory that is not uint8.
        ValueError: a piece that is not the plan's; ids that are not (chunks, num_blocks), contiguous and on the
            plan's device; staging memory that is elsewhere, unaligned, not contiguous, or too short.
    """
    if not _belongs(plan, piece):
        raise ValueError(
            f"{piece} is no part of a chunk of {len(plan.planes)} planes, {plan.num_blocks} blocks and "
            f"{plan.num_bytes} bytes"
        )
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, got {ids.dtype}")
    if ids.dim() != 2 or ids.shape[1] != plan.num_blocks or not len(ids) or not ids.is_contiguous():
        raise ValueError(
            f"ids must be contiguous and of shape (chunks, {plan.num_blocks}), "
            f"got {tuple(ids.shape)} with strides {ids.stride()}"
        )
    if staged.dtype != torch.uint8:
        raise TypeError(f"staging memory must be uint8, got {staged.dtype}")
    for what, tensor in (("ids", ids), ("staging memory", staged)):
        if tensor.device != plan.device:
            raise ValueError(f"{what} must be on {plan.device}, got {tensor.device}")
    if staged.dim() != 1 or not staged.is_contiguous() or staged.data_ptr() % STAGING_ALIGNMENT_BYTES:
        raise ValueError(
            f"staging memory must be contiguous and aligned to {STAGING_ALIGNMENT_BYTES} bytes, got shape "
            f"{tuple(staged.shape)} with strides {staged.stride()} at {staged.data_ptr():#x}"
        )
    if stride_bytes % STAGING_ALIGNMENT_BYTES or (len(ids) > 1 and stride_bytes < piece.shift_bytes + piece.num_bytes):
        raise ValueError(f"{stride_bytes} bytes from chunk to chunk do not hold {piece.num_bytes} bytes of a chunk")
    needed_bytes = (len(ids) - 1) * stride_bytes + piece.shift_bytes + piece.num_bytes
    if len(staged) < needed_bytes:
        raise ValueError(f"{len(ids)} chunks need {needed_bytes} bytes of staging memory, got {len(staged)}")


def _belongs(plan: CopyPlan, piece: Piece) -> bool:
    """Whether a piece is the plan's: what it names must be what lies between its offset and its end."""
    if not (
        0 <= piece.first_plane < piece.last_plane <= len(plan.planes)
        and 0 <= piece.first_block < piece.last_block <= plan.num_blocks
    ):
        return False
    first, last = plan.planes[piece.first_plane], plan.planes[piece.last_plane - 1]
    begin = first.offset + piece.first_block * first.block_bytes
    end = last.offset + piece.last_block * last.block_bytes
    return first.offset <= piece.offset <= begin and piece.offset + piece.num_bytes == end
