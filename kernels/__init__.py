"""Gather and scatter between paged KV memory and one contiguous run of bytes."""

from __future__ import annotations

from kvsluice.kernels.host_copy import HostCopy
from kvsluice.kernels.paged import PagedTensor, may_overlap_itself
from kvsluice.kernels.plan import CopyPlan

__all__ = ["CopyPlan", "HostCopy", "PagedTensor", "may_overlap_itself"]
