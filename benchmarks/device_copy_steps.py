"""An engine's steps on a rank worker: 16 stores and 4 loads of small chunks, each call on its thread timed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from typing import Final

import torch
from device_copy_engine import LOADS_PER_STEP, STORES_PER_STEP, CallTimes, EnginePlan, pause_until, times_of
from device_copy_pages import Pool, Shape, open_region

from kvsluice.connector.layout import KVLayout
from kvsluice.connector.orders import Copied, Ended, Loaded, LoadOrder, LoadPart, StoreOrder, StorePart
from kvsluice.connector.worker import RankWorker
from kvsluice.tiers.chunk_file import ChunkFormat

__all__ = ["measure_steps"]

_PARTS: Final = STORES_PER_STEP + LOADS_PER_STEP
_STEPS_UNDER_WAY: Final = 4


class _StepEngine:
    """Slots stand in for the host tier: a store ends in one, a load begins in one."""

    def __init__(self, device: torch.device, plan: EnginePlan) -> None:
        shape = Shape(plan.step_page_bytes, plan.step_layers, plan.step_blocks)
        self._pool = Pool(shape, _PARTS * _STEPS_UNDER_WAY, device)
        tensors = {f"layers.{number}": tensor.view(torch.bfloat16) for number, tensor in enumerate(self._pool.tensors)}
        layout = KVLayout.from_tensors(tensors, tokens_per_block=16, block_dim=1)
        fmt = ChunkFormat(
            layout.chunk_tensors(shape.num_blocks), namespace="benchmark", num_tokens=16 * shape.num_blocks
        )
        region = open_region(_PARTS * _STEPS_UNDER_WAY, fmt.slot_bytes, device)
        self._worker = RankWorker(layout, fmt, region, [], blocks_per_chunk=shape.num_blocks)
        self._open: Counter[int] = Counter()

    def close(self) -> None:
        """End its threads and give the memory back."""
        left = self._worker.close(timeout_s=10.0)
        if left:
            raise TimeoutError(f"threads of the rank worker are left: {left}")

    def run(self, steps: int, every_s: float) -> tuple[list[float], list[float]]:
        """Seconds of each `submit`, and of each `collect` that follows it."""
        submits_s, collects_s = [], []
        for step in range(steps):
            orders = self._orders(step)
            self._open[step] = _PARTS
            started_s = time.perf_counter()
            self._worker.submit(orders)
            submitted_s = time.perf_counter()
            self._collect()
            submits_s.append(submitted_s - started_s)
            collects_s.append(time.perf_counter() - submitted_s)
            pause_until(started_s + every_s, partial(self._is_over, step + 1 - _STEPS_UNDER_WAY))
        pause_until(0.0, self._is_idle)
        return submits_s, collects_s

    def _orders(self, step: int) -> list[StoreOrder | LoadOrder]:
        first = step % _STEPS_UNDER_WAY * _PARTS
        places = range(first, first + _PARTS)
        keys = [f"{step}.{place}".encode() for place in places]
        stores = tuple(
            StorePart(part, keys[part], self._pool.block_ids[place], place, ())
            for part, place in enumerate(places[:STORES_PER_STEP])
        )
        loads = tuple(
            LoadPart(part, keys[part], self._pool.block_ids[place], place, (), ())
            for part, place in enumerate(places[STORES_PER_STEP:])
        )
        return [StoreOrder(2 * step, stores), LoadOrder(2 * step + 1, loads, deadline_s=60.0)]

    def _collect(self) -> None:
        for event in self._worker.collect().events:
            match event:
                case Ended():
                    self._open[event.job_id // 2] -= 1
                case Copied() | Loaded() if event.reason is not None:
                    raise RuntimeError(f"a copy failed: {event.reason}")
        self._open = +self._open

    def _is_over(self, step: int) -> bool:
        """Whether the blocks and slots of that step may be used again."""
        self._collect()
        return step not in self._open

    def _is_idle(self) -> bool:
        self._collect()
        return not self._open


def measure_steps(device: torch.device, plan: EnginePlan) -> list[CallTimes]:
    """`RankWorker.submit` of a step's orders and the `collect` behind it, with pauses between steps and without."""
    found = []
    for beside, every_s in (("few steps", 4 * plan.step_every_s), ("step after step", plan.step_every_s)):
        with contextlib.closing(_StepEngine(device, plan)) as engine:
            submits_s, collects_s = engine.run(plan.steps, every_s)
        found.append(times_of(f"submit {STORES_PER_STEP} stores, {LOADS_PER_STEP} loads", beside, submits_s))
        found.append(times_of("collect", beside, collects_s))
    return found
