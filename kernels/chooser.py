"""Which way chunks take between the device and host memory: forced, or measured once at start.

    host      pages are in host memory
    batched   the driver's batched copy, page by page; no multiprocessor
    triton    a kernel gathers pages into staging memory on the device, one copy moves them on
    torch     the same with torch's indexing, or page by page where a page exceeds the staging

A way that is asked for by name is taken or its absence raised. `auto` measures each that can be had, on
scratch memory with the chunk's own page sizes and page count, beside a plain copy of the same bytes, and
takes per direction the one that costs the engine least among the fastest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import get_args

import torch

from kvsluice.kernels.device import Device
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.host_copy import HostCopy
from kvsluice.kernels.movers import STAGING_BYTES, DirectMover, Mover, StagedMover
from kvsluice.kernels.plan import CopyPlan
from kvsluice.kernels.trial import Opener, Trial
from kvsluice.kernels.triton_pages import DEFAULT_PROGRAMS
from kvsluice.kernels.ways import TORCH, CopyChoice, CopySetting, Way

__all__ = ["Movers", "open_device_movers", "open_movers"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Movers:
    """Both directions, and how they were chosen."""

    out: Mover
    into: Mover
    choices: tuple[CopyChoice, CopyChoice]
    staging_bytes: int


def open_movers(
    plan: CopyPlan,
    device: Device,
    *,
    setting: CopySetting = "auto",
    staging_bytes: int = STAGING_BYTES,
    scratch: torch.Tensor,
    clock: Callable[[], float] = time.monotonic,
) -> Movers:
    """The movers of both directions for `plan`; on a CUDA device it allocates staging memory and may take seconds.

    Args:
        plan: the geometry.
        device: gives streams and events.
        setting: "auto" measures and chooses; a name takes that way, or raises.
        staging_bytes: of device memory, for both directions together.
        scratch: a chunk's payload in the host memory that copies will use, uint8 (plan.num_bytes,); its bytes
            are lost.
        clock: seconds, monotonic.

    Raises:
        ValueError: a setting that is none.
        DeviceCopyError: the way that was asked for cannot be had, or none at all.
    """
    if setting not in get_args(CopySetting):
        raise ValueError(f"a way to copy is one of {', '.join(get_args(CopySetting))}, got {setting!r}")
    if plan.device.type == "cpu":
        if setting in ("triton", "batched"):
            raise DeviceCopyError(f"copying by {setting} needs a CUDA device, the KV cache is in host memory")
        return _host_movers(plan, device)
    return open_device_movers(plan, device, setting=setting, staging_bytes=staging_bytes, scratch=scratch, clock=clock)


def open_device_movers(
    plan: CopyPlan,
    device: Device,
    *,
    setting: CopySetting,
    staging_bytes: int,
    scratch: torch.Tensor,
    clock: Callable[[], float] = time.monotonic,
) -> Movers:
    """What `open_movers` does for a CUDA device; with pages in host memory it is what tests and rehearsals run.

    Raises:
        DeviceCopyError: as in `open_movers`.
    """
    on_device = torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()
    # The engine's thread gets its device back; and what an engine makes in inference mode could not be written on
    # our threads, which are not in it.
    with on_device, torch.inference_mode(False):
        opener = Opener(device, staging_bytes // 2, clock)
        if setting == "auto":
            choices = Trial(plan, opener, scratch, clock).choose_both()
        else:
            choices = (CopyChoice("out", _named(setting)), CopyChoice("in", _named(setting)))
            opener.prove(plan, choices[0].way, scratch)
        movers, used_bytes = [], 0
        for choice in choices:
            mover = opener.open(plan, choice.way, choice.direction)
            used_bytes += staging_bytes // 2 if isinstance(mover, StagedMover) else 0
            movers.append(mover)
        if setting == "auto":
            del opener
            # Scratch pages, and the staging of ways that were not chosen, are the engine's again.
            torch.cuda.empty_cache()
    _log.info("device copies on %s: %s; %s; %d bytes of staging on the device", plan.device, *choices, used_bytes)
    return Movers(movers[0], movers[1], choices, used_bytes)


def _named(setting: CopySetting) -> Way:
    return {"triton": Way("triton", DEFAULT_PROGRAMS), "torch": TORCH}.get(setting, Way(setting))


def _host_movers(plan: CopyPlan, device: Device) -> Movers:
    copy = HostCopy(plan)
    out, into = (DirectMover(copy, device, direction, name="host") for direction in ("out", "in"))
    return Movers(out, into, (CopyChoice("out", Way("host")), CopyChoice("in", Way("host"))), 0)
