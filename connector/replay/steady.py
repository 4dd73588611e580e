"""Steady made-up traffic, and the measurements that `kvsluice calibrate` would make of a modelled device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvsluice.connector.calibrate import Cell, Measurement, make_plan
from kvsluice.connector.calibrate.model import Kind
from kvsluice.connector.calibrate.plan import DEFAULT_CONCURRENCIES
from kvsluice.connector.replay.device import Device, DeviceSpec
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.trace import TOKENS_PER_BLOCK, Request

__all__ = ["make_steady", "measure_device"]

_MAX_BYTES: Final = 4 << 30
"""What a calibration moves by default."""


def make_steady(*, seed: int, num_requests: int, requests_per_s: float, chunks: int, hit_share: float) -> list[Request]:
    """Prompts of `chunks` blocks at an even pace, each up to half an interval early or late.

    Args:
        seed: the same seed gives the same requests.
        hit_share: of the requests, those that repeat a prompt of a while ago; the others are new.
    """
    draw = random.Random(seed)
    made = []
    prompts: list[tuple[bytes, ...]] = []
    due = 0.0
    for at in range(num_requests):
        time_s = (at + 0.5 + draw.uniform(-0.5, 0.5)) / requests_per_s
        due += hit_share
        # A prompt of which nothing is stored yet would be no hit: the first ones are all new.
        if due >= 1 and len(prompts) > 8:
            due -= 1
            keys = prompts[draw.randrange(len(prompts) - 8)]
        else:
            first = len(prompts) * chunks
            keys = tuple(one.to_bytes(8, "big") for one in range(first, first + chunks))
            prompts.append(keys)
        made.append(Request(time_s, chunks * TOKENS_PER_BLOCK, 1, keys))
    return made


def measure_device(spec: DeviceSpec, chunk_bytes: int) -> list[Measurement]:
    """The cells that a calibration of default size measures, each in its closed loop."""
    plan = make_plan(chunk_bytes, sizes=None, concurrencies=DEFAULT_CONCURRENCIES, max_bytes=_MAX_BYTES)
    kinds: Sequence[Kind] = ("write", "read")
    return [_measure(spec, cell, kind) for cell in plan.cells for kind in kinds]


def _measure(spec: DeviceSpec, cell: Cell, kind: Kind) -> Measurement:
    timeline = Timeline()
    loop = _ClosedLoop(Device(spec, timeline), timeline, cell)
    for _ in range(cell.concurrency):
        loop.start()
    timeline.run()
    return Measurement(kind, cell.num_bytes, cell.concurrency, tuple(loop.seconds), timeline.now_s)


class _ClosedLoop:
    """Starts an operation whenever one has ended, until enough were made."""

    def __init__(self, device: Device, timeline: Timeline, cell: Cell) -> None:
        self._device = device
        self._timeline = timeline
        self._cell = cell
        self._left = cell.num_ops
        self.seconds: list[float] = []

    def start(self) -> None:
        if self._left:
            self._left -= 1
            self._device.submit(self._cell.num_bytes, partial(self._ended, self._timeline.now_s))

    def _ended(self, start_s: float) -> None:
        self.seconds.append(self._timeline.now_s - start_s)
        self.start()
