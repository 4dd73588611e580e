"""Loads whose layers are taken one by one: each is whole behind its event, while later ones are still to come."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from device_copy_flood import ChunkTask
from device_copy_ways import open_way
from gpu_engine import PATIENCE_S, Engine, until
from gpu_pages import Geometry, Laid, Pages, payload_difference, random_bytes, sample_ids

from kvsluice.connector.by_layer import Cohort, LayerWatch
from kvsluice.connector.copier import Copier
from kvsluice.kernels.device import Event
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.kernels.ways import Way

WAYS = (Way("triton", 2), Way("torch"), Way("batched"), Way("runs"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_cuda = metafunc.config.getoption("on") == "cuda"
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", WAYS if on_cuda else WAYS[:3], ids=str)


class Loads:
    """Two chunks of eight layers in slots, and a copier that brings them in layer by layer.

    On a GPU a layer of both is 8 MiB: the link needs 0.15 ms or more for each.
    """

    def __init__(self, engine: Engine, way: Way) -> None:
        self.engine = engine
        layers, items, num_blocks = (8, 32768, 32) if engine.is_cuda else (4, 64, 2)
        geometry = Geometry("layers", (Laid(torch.bfloat16, (2, items), 1),) * layers, num_blocks, 2 * num_blocks)
        self.pages = Pages(geometry, engine.where)
        self.plan = self.pages.plan
        self.ids = sample_ids(geometry, 2, "random", 9)
        self.region = engine.region(2, -(-self.plan.num_bytes // 4096) * 4096)
        self.chunks = [
            ChunkCopy(ids, self.region.tensor(slot)[: self.plan.num_bytes]) for slot, ids in enumerate(self.ids)
        ]
        for slot, chunk in enumerate(self.chunks):
            chunk.host.copy_(random_bytes(self.plan.num_bytes, 50 + slot))
        self.index = [torch.tensor(ids, device=engine.where) for ids in self.ids]
        staging = torch.empty(32 << 20 if engine.is_cuda else 4096, dtype=torch.uint8, device=engine.where)
        engine.finish()
        out, self.into = (open_way(self.plan, way, each, engine.device, staging) for each in ("out", "in"))
        self.copier = Copier(engine.device, out, self.into)

    def seen(self, number: int) -> list[torch.Tensor]:
        """On the engine's stream: what the chunks' blocks hold of this layer when that stream comes to it."""
        found: list[torch.Tensor] = []
        tensor = self.plan.paged[number].tensor
        self.engine.queue(lambda: found.extend(tensor.index_select(1, index) for index in self.index))
        return found

    def difference(self, number: int, found: list[torch.Tensor]) -> str | None:
        """Where that is not what the slots hold; the device is idle."""
        begin, end = self.plan.offsets[number], self.plan.offsets[number + 1]
        for chunk, part in zip(self.chunks, found, strict=True):
            payload = chunk.host.clone()
            payload[begin:end] = part.cpu().contiguous().view(torch.uint8).flatten()
            told = payload_difference(self.plan, payload, chunk.host)
            if told is not None:
                return told
        return None

    def close(self) -> None:
        self.engine.finish()
        assert self.copier.close(time.monotonic() + PATIENCE_S) == []


def _told(watch: LayerWatch, number: int) -> bool:
    return watch.events(number) is not None


def test_a_stream_that_waits_for_a_layer_sees_all_of_it(engine: Engine, way: Way) -> None:
    loads = Loads(engine, way)
    layers = len(loads.plan.paged)
    watch, cohort = LayerWatch(2), Cohort(loads.copier, 2)
    over: list[ChunkTask] = []
    ready = engine.event()
    tasks = [
        ChunkTask(chunk, is_store=False, ready=ready, on_over=over.append, on_tensor=watch.on_tensor)
        for chunk in loads.chunks
    ]
    cohort.arrive(tasks[0])
    assert watch.events(0) is None
    cohort.arrive(tasks[1])
    found = []
    for number in range(layers):
        until(partial(_told, watch, number), f"layer {number}'s events")
        for event in watch.events(number) or ():
            engine.wait(event)
        found.append(loads.seen(number))
    until(lambda: len(over) == 2, "the loads")
    loads.close()
    assert [task.error for task in over] == [None, None]
    wrong = [f"layer {number}: {told}" for number in range(layers) if (told := loads.difference(number, found[number]))]
    assert not wrong, "\n".join(wrong)


def test_a_stream_that_does_not_wait_sees_a_layer_too_early(engine: Engine, way: Way) -> None:
    """What makes the test above worth something."""
    loads = Loads(engine, way)
    watch, cohort = LayerWatch(2), Cohort(loads.copier, 2)
    over: list[ChunkTask] = []
    held_up = engine.late_event(0.02 if engine.is_cuda else 0.2)
    for chunk in loads.chunks:
        cohort.arrive(ChunkTask(chunk, is_store=False, ready=held_up, on_over=over.append, on_tensor=watch.on_tensor))
    last = len(loads.plan.paged) - 1
    until(lambda: watch.events(last) is not None, "the last layer's events")
    early = loads.seen(last)
    until(lambda: len(over) == 2, "the loads")
    loads.close()
    assert loads.difference(last, early) is not None, "nothing was lost by not waiting: the race is not there"


def test_early_layers_are_there_long_before_the_last(engine: Engine, way: Way) -> None:
    """By the device's own events: a layer is told of when it is there, not when all are."""
    loads = Loads(engine, way)
    events: list[tuple[int, Event]] = []
    for repetition in range(3):
        events.clear()
        submission = loads.into.submit(
            [engine.event()], loads.chunks, lambda number, event: events.append((number, event))
        )
        until(submission.query, f"load {repetition}")
        assert submission.error is None
        submission.release()
    assert [number for number, _ in events] == list(range(len(loads.plan.paged)))
    at_s = [event.seconds_since(submission.start) for _, event in events]
    whole_s = submission.end.seconds_since(submission.start)
    loads.close()
    shown = ", ".join(f"{each * 1e3:.2f}" for each in at_s)
    assert at_s == sorted(at_s), f"ms: {shown}"
    if engine.is_cuda:
        assert at_s[0] < whole_s / 3, f"the first of {len(at_s)} layers after {shown} ms of {whole_s * 1e3:.2f}"
