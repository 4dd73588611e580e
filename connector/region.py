"""The rank's pinned region: one mapping of exactly the size asked for, cut into slots.

For a CUDA device it lies on the NUMA node next to that device and is registered with CUDA's driver, so
that the device copies to and from it at full rate and asynchronously. Where registration is refused
the region stays pageable: slower, never wrong.

    mapping      | slot | slot | slot | slot | slot | slot | slot |
    registered   | piece              | piece              | piece |
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Literal, Protocol

import torch

from kvsluice.kernels.driver import NO_DRIVER, DriverError, open_driver
from kvsluice.kernels.gpu import GpuFacts, gpu_facts
from kvsluice.tiers.base import ALIGNMENT_BYTES
from kvsluice.tiers.errors import ConfigError

__all__ = ["PIECE_BYTES", "HostDriver", "LinuxNuma", "Numa", "PinnedRegion", "registration_pieces"]

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 30
"""The region is registered in pieces of about this size. One call for all of it holds the driver's lock for
seconds, in which the engine cannot launch anything, and is refused by some drivers (reported for 580 and newer at
512 GiB of 4 KiB pages, whose table then outgrows 2 GiB). And a refusal can say how far it came."""

_HUGE_PAGE_BYTES: Final = 2 << 20

_SYS_NODES: Final = Path("/sys/devices/system/node")
_MPOL_PREFERRED: Final = 1
_MBIND_NUMBERS: Final = {"x86_64": 237, "aarch64": 235}
"""By machine, the system call's number: the C library has no function for it."""


class HostDriver(Protocol):
    """What the region uses of `kvsluice.kernels.driver.CudaDriver`. Its calls raise `DriverError`."""

    def current(self, ordinal: int) -> AbstractContextManager[None]:
        """A context of that device on the calling thread for the length of a block."""
        ...

    def register(self, address: int, num_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class Numa(Protocol):
    """The machine's memory nodes."""

    def nodes(self) -> frozenset[int]:
        """Those that have memory; empty where the system does not say."""
        ...

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        """Have pages of this range that are not there yet come from `node` as long as it has any. Raises OSError."""
        ...


class LinuxNuma:
    """Nodes from /sys, placement by the system call `mbind`."""

    def nodes(self) -> frozenset[int]:
        """See `Numa`."""
        try:
            ranges = (_SYS_NODES / "has_memory").read_text().strip()
        except OSError:
            return frozenset()
        found: set[int] = set()
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            if first.isdecimal():
                found.update(range(int(first), int(last or first) + 1))
        return frozenset(found)

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        """See `Numa`. Docker's default profile refuses it (EPERM) to containers without CAP_SYS_NICE."""
        number = _MBIND_NUMBERS.get(platform.machine())
        if number is None:
            raise OSError(f"the number of mbind on {platform.machine()} is not known")
        mask, num_bits = node_mask(node)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        failed = libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(num_bytes),
            ctypes.c_long(_MPOL_PREFERRED),
            ctypes.byref(mask),
            ctypes.c_ulong(num_bits),
            ctypes.c_ulong(0),
        )
        if failed:
            error = ctypes.get_errno()
            raise OSError(error, f"mbind to node {node}: {os.strerror(error)}")


def node_mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], int]:
    """The kernel's bit mask with this one node, however high its number, and the mask's length as `mbind` counts it."""
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // word_bits + 1))()
    mask[node // word_bits] = 1 << node % word_bits
    # The kernel takes one off before it reads.
    return mask, len(mask) * word_bits + 1


def registration_pieces(num_slots: int, slot_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is registered at a time: all slots once, in order, none of them cut in two.

    CUDA refuses a copy whose host range reaches from one registration into another (invalid value), and
    a copy stays within its slot. Pieces also end where pages do, since a page cannot be registered
    twice, and on multiples of huge pages where the slots allow it. A piece is at most `piece_bytes`
    long, unless that is too short for the fewest slots that end where a page does.
    """
    unit = math.lcm(slot_bytes, _HUGE_PAGE_BYTES)
    if unit > piece_bytes:
        unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    step = max(unit, piece_bytes // unit * unit)
    total = num_slots * slot_bytes
    for offset in range(0, total, step):
        yield offset, min(step, total - offset)


class PinnedRegion:
    """`num_slots` slots of `slot_bytes` each. Slots are handed out elsewhere; this is the memory.

    Args:
        num_slots, slot_bytes: the region's size is their product, exactly.
        device: the device whose copies use the region.
        pin: "auto" registers with CUDA where `device` is a CUDA device and falls back with one
            warning, "on" fails where it cannot, "off" never does.
        piece_bytes: see `PIECE_BYTES`.
        driver: stands in for `open_driver()`.
        facts: stand in for `gpu_facts(device)`.
        numa: stands in for `LinuxNuma()`.

    Attributes:
        pinned: whether all of it is registered with CUDA.
        refused: why it is not, None where it was.
        numa_node: the node that its pages prefer, None where nobody was asked to place them.

    Raises:
        ValueError: num_slots below 1, or slot_bytes that is no multiple of 4096.
        ConfigError: the memory cannot be had, or `pin` is "on" and it cannot be pinned.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        device: torch.device,
        pin: Literal["auto", "on", "off"] = "auto",
        piece_bytes: int = PIECE_BYTES,
        driver: HostDriver | None = None,
        facts: GpuFacts | None = None,
        numa: Numa | None = None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        if slot_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"slot_bytes {slot_bytes} is not a multiple of {ALIGNMENT_BYTES}")
        if pin == "on" and device.type != "cuda":
            raise ConfigError(f"pin_memory 'on' needs a CUDA device, the KV cache is on {device}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.pinned = False
        self.refused: str | None = f"the KV cache is on {device}" if device.type != "cuda" else "pin_memory is 'off'"
        self.numa_node: int | None = None
        self._device = device
        self._driver = driver
        self._registered: list[int] = []
        self._touched = bytearray(num_slots)
        self._mapping = _map(num_slots, slot_bytes)
        self._view = memoryview(self._mapping)
        with torch.inference_mode(False):  # what is made in inference mode could not be written on other threads
            self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if device.type != "cuda":
            return
        try:
            # Before the first touch, which registering is: a page stays where it was put.
            self._place(facts, LinuxNuma() if numa is None else numa)
            if pin != "off":
                self._pin(pin, piece_bytes)
        except BaseException:
            self._unregister()
            del self._tensor
            self._view.release()
            self._mapping.close()
            raise

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
        """Undo the registration, once no copy is under way. Idempotent; what CUDA refuses is logged, not raised.

        The memory itself goes when the last view of it does.
        """
        self.pinned = False
        self._unregister()

    def _place(self, facts: GpuFacts | None, numa: Numa) -> None:
        """Ask for pages of the node next to the device, where there is a choice. Never fatal."""
        nodes = numa.nodes()
        if len(nodes) < 2:
            return
        node = (gpu_facts(self._device) if facts is None else facts).numa_node
        if node not in nodes:
            _log.info("the region is not placed: NUMA node of %s is %s, of %s", self._device, node, sorted(nodes))
            return
        try:
            numa.prefer(self._tensor.data_ptr(), len(self._mapping), node)
        except OSError as error:
            _log.info("the region is not placed on NUMA node %d, next to %s: %s", node, self._device, error)
            return
        self.numa_node = node

    def _pin(self, pin: Literal["auto", "on"], piece_bytes: int) -> None:
        """Register every piece, or none."""
        total, done = len(self._mapping), 0
        base = self._tensor.data_ptr()
        try:
            if self._driver is None:
                self._driver = open_driver()
            with self._driver.current(self._ordinal()):
                for offset, length in registration_pieces(self.num_slots, self.slot_bytes, piece_bytes):
                    self._driver.register(base + offset, length)
                    self._registered.append(base + offset)
                    done += length
        except DriverError as error:
            self._unregister()
            self.refused = f"{error.name} after {done} of {total} bytes"
            what = f"pinning {total} bytes of host memory failed after {done} of them: {error}. {_advice(error)}"
            if pin == "on":
                raise ConfigError(what) from error
            _log.warning("%s Copies go through pageable memory and are slower.", what)
            return
        self.pinned = True
        self.refused = None
        self._touched = bytearray(b"\x01") * self.num_slots

    def _unregister(self) -> None:
        """Give every piece back, the last one first; one that is refused does not keep the others."""
        if self._driver is None or not self._registered:
            return
        count = len(self._registered)
        failed: list[str] = []
        try:
            with self._driver.current(self._ordinal()):
                while self._registered:
                    failed += _errors_of(self._driver.unregister, self._registered.pop())
        except DriverError as error:
            # No context to do it in, or none to go back to.
            failed.append(str(error))
            self._registered.clear()
        if failed:
            _log.warning("unpinning the region's %d pieces: %d calls failed: %s", count, len(failed), failed[0])

    def _ordinal(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index


def _errors_of(call: Callable[[int], None], address: int) -> list[str]:
    try:
        call(address)
    except DriverError as error:
        return [str(error)]
    return []


def _advise(mapping: mmap.mmap, name: str) -> None:
    """Tell the kernel about the mapping's use; a refusal is no matter."""
    try:
        mapping.madvise(getattr(mmap, name))
    except (AttributeError, OSError) as error:
        _log.debug("no %s for the region: %s", name, error)


def _map(num_slots: int, slot_bytes: int) -> mmap.mmap:
    """Memory of our own, of exactly that size.

    Private, since the kernel has no huge pages for shared anonymous memory unless somebody turned them
    on (`shmem_enabled` is "never"). And not for children: a fork would mark the pages as to be copied, and
    the device, or a direct read, would go on filling pages that are no longer ours.
    """
    try:
        mapping = mmap.mmap(-1, num_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"cannot map {num_slots} slots of {slot_bytes} bytes: {error}") from error
    _advise(mapping, "MADV_DONTFORK")
    # Fewer page faults and TLB misses on a mapping of gigabytes.
    _advise(mapping, "MADV_HUGEPAGE")
    return mapping


def _advice(error: DriverError) -> str:
    """What to do about memory that was not pinned."""
    if error.code == NO_DRIVER:
        return "Or set pin_memory to 'off'."
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return (
        f"RLIMIT_MEMLOCK is {soft} (hard limit {hard}). Raise it (ulimit -l unlimited; docker run --ulimit memlock=-1; "
        "LimitMEMLOCK=infinity in a systemd unit), lower staging_bytes or the host tier's capacity, "
        "or set pin_memory to 'off'."
    )
