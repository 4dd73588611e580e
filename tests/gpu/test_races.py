"""Copies beside an engine at work: nothing is read too early, written too early, or called over too early.

Each order is also held against a mover that is broken on purpose. If that one's bytes were right as well, the
test would prove nothing, and it fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from gpu_engine import Engine, new_stream, opened
from gpu_rig import NUM_SLOTS, Break, Rig, hasty, heedless

from kvsluice.kernels.ways import Way

WAYS = (Way("triton", 2), Way("torch"), Way("batched"), Way("runs"))
Round = Callable[[Rig, int, float], "str | None"]
"""Plays one order of things, with a delay of so many seconds in it; what was wrong, or None."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_cuda = metafunc.config.getoption("on") == "cuda"
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", WAYS if on_cuda else WAYS[:3], ids=str)
    if "own_stream" in metafunc.fixturenames:
        streams = [True, False] if on_cuda else [True]
        metafunc.parametrize("own_stream", streams, ids=lambda own: "own stream" if own else "default stream")


@contextlib.contextmanager
def rigged(engine: Engine, way: Way, broken: Break | None = None, layers: int = 4) -> Iterator[Rig]:
    rig = Rig(engine, way, broken=broken, layers=layers)
    try:
        yield rig
    finally:
        rig.close()


def a_writer_is_late(rig: Rig, number: int, delay_s: float) -> str | None:
    """The engine writes blocks after a while, and a store of them is put at once."""
    chunk, slot, late = number % len(rig.ids), number % NUM_SLOTS, 1 - number % 2
    rig.fill_slot(slot, number)
    rig.engine.delay(delay_s)
    rig.write(late)
    rig.store(chunk, slot, rig.engine.event())
    rig.until_over()
    rig.engine.finish()
    return rig.stored_difference(chunk, slot, late)


def a_reader_is_late(rig: Rig, number: int, delay_s: float) -> str | None:
    """The engine reads blocks after a while, and a load into them is put at once."""
    chunk, slot = number % len(rig.ids), number % NUM_SLOTS
    payload = rig.fill_slot(slot, number)
    rig.write(0)
    rig.engine.finish()
    seen = torch.empty_like(rig.contents[0])
    rig.engine.finish()
    rig.engine.delay(delay_s)
    rig.engine.queue(lambda: seen.copy_(rig.pages.memory[0]))
    rig.load(chunk, slot, rig.engine.event())
    rig.until_over()
    rig.engine.finish()
    if not torch.equal(seen, rig.contents[0]):
        return f"{int((seen != rig.contents[0]).sum())} bytes were written before the engine had read them"
    return rig.loaded_difference(chunk, payload, 0)


def blocks_are_written_once_a_store_is_over(rig: Rig, number: int, delay_s: float) -> str | None:
    """The copy is held up, and the engine writes the blocks as soon as the copier says that it is over."""
    chunk, slot, held = number % len(rig.ids), number % NUM_SLOTS, number % 2
    rig.write(held)
    rig.fill_slot(slot, number)
    rig.engine.finish()
    rig.store(chunk, slot, rig.engine.late_event(delay_s))
    rig.until_over()
    rig.write(1 - held)
    rig.engine.finish()
    return rig.stored_difference(chunk, slot, held)


def a_slot_is_filled_once_its_load_is_over(rig: Rig, number: int, delay_s: float) -> str | None:
    """The copy is held up, and a tier fills the slot as soon as the copier says that it is over."""
    chunk, slot = number % len(rig.ids), number % NUM_SLOTS
    rig.write(0)
    payload = rig.fill_slot(slot, number)
    rig.engine.finish()
    rig.load(chunk, slot, rig.engine.late_event(delay_s))
    rig.until_over()
    rig.slot(slot).fill_(0x5A)
    rig.engine.finish()
    return rig.loaded_difference(chunk, payload, 0)


def blocks_are_written_behind_a_fence(rig: Rig, number: int, delay_s: float) -> str | None:
    """As above, where the engine asks for a fence on the blocks and not for the end of a job."""
    chunk, slot, held = number % len(rig.ids), number % NUM_SLOTS, number % 2
    rig.write(held)
    rig.fill_slot(slot, number)
    rig.engine.finish()
    rig.store(chunk, slot, rig.engine.late_event(delay_s))
    rig.copier.fence(frozenset(rig.ids[chunk][:1]), 20.0)
    rig.write(1 - held)
    rig.until_over()
    rig.engine.finish()
    return rig.stored_difference(chunk, slot, held)


ROUNDS: list[tuple[Round, Break]] = [
    (a_writer_is_late, heedless),
    (a_reader_is_late, heedless),
    (blocks_are_written_once_a_store_is_over, hasty),
    (a_slot_is_filled_once_its_load_is_over, hasty),
    (blocks_are_written_behind_a_fence, hasty),
]
EVERY_ROUND = pytest.mark.parametrize(("play", "broken"), ROUNDS, ids=lambda value: value.__name__)


@EVERY_ROUND
def test_bytes_are_right_where(on_cuda: bool, way: Way, own_stream: bool, play: Round, broken: Break) -> None:
    rounds, delay_s = (30, 0.003) if on_cuda else (2, 0.02)
    with opened(cuda=on_cuda, own_stream=own_stream) as engine, rigged(engine, way) as rig:
        wrong = [f"round {number}: {told}" for number in range(rounds) if (told := play(rig, number, delay_s))]
    assert not wrong, f"{len(wrong)} of {rounds} rounds\n" + "\n".join(wrong[:5])


@EVERY_ROUND
def test_a_broken_mover_is_caught_where(on_cuda: bool, way: Way, own_stream: bool, play: Round, broken: Break) -> None:
    delay_s = 0.02 if on_cuda else 0.15
    with opened(cuda=on_cuda, own_stream=own_stream) as engine, rigged(engine, way, broken) as rig:
        # The first round sets up what a first copy needs, which may take longer than the delay.
        play(rig, 0, delay_s)
        lost = any(play(rig, number, delay_s) for number in range(1, 5))
    assert lost, "a mover without this order was right every time: the race cannot be lost here, nothing is proven"


def test_hundreds_of_copies_come_right_beside_a_busy_engine(engine: Engine, way: Way) -> None:
    """Lanes of their own: written, stored, written again, loaded elsewhere and read, as fast as the copier goes."""
    copies, lanes, layers = (600, NUM_SLOTS, 16) if engine.is_cuda else (24, 4, 3)
    with rigged(engine, way, layers=layers) as rig:
        payloads = [rig.fill_slot(0, 1000 + number) for number in range(5)]
        on_device = [payload.to(engine.where) for payload in payloads]
        index = [torch.tensor(ids, device=engine.where) for ids in rig.ids]
        wrong_bytes = torch.zeros((), dtype=torch.int64, device=engine.where)
        size = 4096 if engine.is_cuda else 16
        matrix = torch.randn(size, size, device=engine.where).to(torch.bfloat16)
        product = torch.empty_like(matrix)
        other = new_stream() if engine.is_cuda else None
        engine.finish()

        def planes(payload: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number, item in enumerate(rig.plan.paged):
                part = payload[rig.plan.offsets[number] : rig.plan.offsets[number + 1]]
                yield item.tensor, part.view(item.tensor.dtype).view(2, -1, item.tensor.shape[2])

        def engine_writes(chunk: int, version: int) -> None:
            for tensor, part in planes(on_device[version % len(payloads)]):
                tensor.index_copy_(1, index[chunk], part)

        def engine_reads(chunk: int, version: int) -> None:
            for tensor, part in planes(on_device[version % len(payloads)]):
                wrong_bytes.add_((tensor.index_select(1, index[chunk]) != part).sum())

        def compute() -> None:
            """Products on a third stream, as many as are done in a few milliseconds."""
            if other is not None and other.query():
                with torch.cuda.stream(other):
                    for _ in range(20):
                        torch.mm(matrix, matrix, out=product)

        complaints: list[str] = []
        versions = {}
        for lane in range(lanes):
            versions[lane] = lane
            engine.queue(partial(engine_writes, lane, lane))
            rig.store(lane, lane, engine.event())
        under_way, left = lanes, copies - lanes
        while under_way:
            compute()
            task = rig.until_over()
            under_way -= 1
            lane = next(lane for lane in range(lanes) if task.chunk.host.data_ptr() == rig.slot(lane).data_ptr())
            version = versions[lane]
            if task.is_store:
                # The blocks are the engine's again at once, the slot is whole.
                engine.queue(partial(engine_writes, lane, version + 1))
                if not torch.equal(rig.slot(lane), payloads[version % len(payloads)]):
                    complaints.append(f"store of lane {lane}, version {version}")
            else:
                engine.queue(partial(engine_reads, lanes + lane, version))
                # The slot is free: whatever is in it must not reach the pages any more.
                rig.slot(lane).fill_(0xA5)
                versions[lane] += 1
            if task.is_store or left > 0:
                chunk, put = (lanes + lane, rig.load) if task.is_store else (lane, rig.store)
                put(chunk, lane, engine.event())
                under_way, left = under_way + 1, left - 1
        engine.finish()
        assert not complaints, complaints[:5]
        assert int(wrong_bytes) == 0, f"{int(wrong_bytes)} items of loaded blocks were wrong when the engine read them"


def test_memory_that_the_engine_has_freed_and_still_writes_is_left_alone(on_cuda: bool, way: Way) -> None:
    """torch gives memory that was freed to the next who asks on the same stream, whatever is still queued there.

    The engine frees buffers of the size that block ids have, and its stream comes to fill them with zeros while the
    copies read their ids.
    """
    wrong: list[str] = []
    for _ in range(4):
        # A new copier, whose first submission has no buffers yet, and an engine on the stream that threads begin with.
        with opened(cuda=on_cuda, own_stream=False) as engine, rigged(engine, way) as rig:
            for slot in range(NUM_SLOTS):
                rig.fill_slot(slot, slot)
            held_up_s = 0.03
            ready = engine.late_event(held_up_s + 0.002)
            engine.delay(held_up_s)
            engine.queue(partial(_fill_and_free, engine.where, 16 * len(rig.ids[0]), 160 if on_cuda else 1))
            for slot in range(NUM_SLOTS):
                rig.store(slot, slot, ready)
            for _ in range(NUM_SLOTS):
                rig.until_over()
            engine.finish()
            wrong += [told for slot in range(NUM_SLOTS) if (told := rig.stored_difference(slot, slot, 0))]
    assert not wrong, f"{len(wrong)} of {4 * NUM_SLOTS} chunks\n" + "\n".join(wrong[:3])


def _fill_and_free(where: torch.device, num_ids: int, times: int) -> None:
    buffers = [torch.empty(num_ids, dtype=torch.int64, device=where) for _ in range(16)]
    for _ in range(times):
        for buffer in buffers:
            buffer.zero_()
