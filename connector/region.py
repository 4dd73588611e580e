"""The rank's pinned region: one mapping of exactly the size asked for, cut into slots.

It is registered with the CUDA driver where there is one, so that the device copies to and from it at
full rate and asynchronously. Where registration is refused the region stays pageable: slower, never
wrong.
"""

from __future__ import annotations

import logging
import mmap
from typing import Literal, Protocol

import torch

from kvsluice.tiers.base import ALIGNMENT_BYTES
from kvsluice.tiers.errors import ConfigError

__all__ = ["PinnedRegion"]

_log = logging.getLogger(__name__)


class _CudaRuntime(Protocol):
    """The two calls of CUDA's runtime that are used here; torch ships them untyped."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...  # noqa: N802

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802


def _cudart() -> _CudaRuntime:
    runtime: _CudaRuntime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch gives no types
    return runtime


class PinnedRegion:
    """`num_slots` slots of `slot_bytes` each. Slots are handed out elsewhere; this is the memory.

    Args:
        num_slots, slot_bytes: the region's size is their product, exactly.
        device: the device whose copies use the region.
        pin: "auto" registers with CUDA where `device` is a CUDA device and falls back with one
            warning, "on" fails where it cannot, "off" never does.

    Raises:
        ConfigError: the memory cannot be had, or `pin` is "on" and the registration was refused.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        device: torch.device,
        pin: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        if slot_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"slot_bytes {slot_bytes} is not a multiple of {ALIGNMENT_BYTES}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        try:
            self._mapping = mmap.mmap(-1, num_slots * slot_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot map {num_slots} slots of {slot_bytes} bytes: {error}") from error
        # Fewer page faults and TLB misses on a mapping of gigabytes; a hint, so refusal is no matter.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                _log.debug("no huge pages for the region: %s", error)
        self._view = memoryview(self._mapping)
        self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.pinned = False
        self._touched = bytearray(num_slots)
        if pin != "off" and device.type == "cuda":
            self._register(pin)
        elif pin == "on":
            raise ConfigError(f"pin_memory 'on' needs a CUDA device, the KV cache is on {device}")

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, 4096-aligned."""
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def tensor(self, slot: int) -> torch.Tensor:
        """The same bytes as a uint8 tensor of shape (slot_bytes,)."""
        return self._tensor[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def touch(self, slot: int) -> None:
        """Have the slot's pages backed before a timed copy, once; pinned memory is already.

        A first copy would else be charged with the kernel's zeroing of its pages, and a gate would
        read that as a slow tier.
        """
        if not self._touched[slot]:
            self.tensor(slot)[::ALIGNMENT_BYTES] = 0
            self._touched[slot] = 1

    def close(self) -> None:
        """Undo the registration. The memory itself goes when the last view of it does. Idempotent."""
        if self.pinned:
            _cudart().cudaHostUnregister(self._tensor.data_ptr())
            self.pinned = False

    def _register(self, pin: Literal["auto", "on"]) -> None:
        # Not yet run on a GPU.
        size = self.num_slots * self.slot_bytes
        result = _cudart().cudaHostRegister(self._tensor.data_ptr(), size, 0)
        self.pinned = int(result) == 0
        if self.pinned:
            self._touched = bytearray(b"\x01") * self.num_slots
            return
        what = f"pinning {size} bytes was refused (cudaHostRegister: {result}); raise the memlock limit (ulimit -l)"
        if pin == "on":
            raise ConfigError(what)
        _log.warning("%s. Copies go through pageable memory and are slower.", what)
