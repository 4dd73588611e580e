"""Gather and scatter between paged KV memory and one contiguous run of bytes."""

from __future__ import annotations

from kvsluice.kernels.paged import PagedTensor, may_overlap_itself
from kvsluice.kernels.torch_copy import CopyPlan, gather, scatter

__all__ = ["CopyPlan", "PagedTensor", "gather", "may_overlap_itself", "scatter"]
