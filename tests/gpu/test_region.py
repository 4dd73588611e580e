"""Host memory is really registered, copies beside a border of a registration arrive, a refusal leaves nothing.

In a rehearsal the driver is a pretended one that keeps the same books.
"""

from __future__ import annotations

import resource
import time
from contextlib import AbstractContextManager
from typing import Literal

import pytest
import torch
from device_copy_flood import move_once
from device_copy_ways import open_way
from gpu_engine import CudaEngine, Engine, new_stream, until
from gpu_pages import Geometry, Laid, Pages, payload_difference, sample_ids

from kvsluice.connector.region import PinnedRegion, registration_pieces
from kvsluice.kernels.driver import DriverError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.operations import ChunkCopy
from kvsluice.kernels.ways import Way
from kvsluice.tiers.errors import ConfigError

SLOT_BYTES = 4096 * 37
"""No multiple of a huge page: pieces end where a page and a slot do."""
PIECE_BYTES = SLOT_BYTES * 3
NUM_SLOTS = 11
GEOMETRY = Geometry(
    "a slot's length", (Laid(torch.uint8, (4096,)), Laid(torch.uint8, (SLOT_BYTES // 4 - 4096,))), 4, 48
)


class Refusing:
    """A driver to which the n-th piece that comes is registered already: as the real one says, where it is real."""

    def __init__(self, engine: Engine, piece: int) -> None:
        self._driver = engine.driver
        self._left = piece

    def current(self, ordinal: int) -> AbstractContextManager[None]:
        return self._driver.current(ordinal)

    def register(self, address: int, num_bytes: int) -> None:
        self._left -= 1
        if self._left >= 0:
            self._driver.register(address, num_bytes)
            return
        self._driver.register(address + 4096, 4096)
        try:
            self._driver.register(address, num_bytes)
        finally:
            self._driver.unregister(address + 4096)

    def unregister(self, address: int) -> None:
        self._driver.unregister(address)


def launch(engine: Engine) -> None:
    """A kernel of torch's that raises what an earlier call left behind."""
    some = torch.zeros(64, device=engine.where)
    engine.finish()
    engine.queue(lambda: some.add_(1.0))
    engine.finish()
    assert float(some.sum()) == 64.0


def test_every_byte_of_the_region_is_registered_until_it_is_closed(engine: Engine) -> None:
    assert len(list(registration_pieces(NUM_SLOTS, SLOT_BYTES, PIECE_BYTES))) == 4
    region = engine.region(NUM_SLOTS, SLOT_BYTES, PIECE_BYTES)
    assert region.pinned
    assert region.refused is None
    slots = [region.tensor(slot) for slot in range(NUM_SLOTS)]
    assert all(engine.is_pinned(slot) for slot in slots)
    region.close()
    assert not any(engine.is_pinned(slot) for slot in slots)
    launch(engine)


def test_a_copy_to_the_region_does_not_hold_the_calling_thread(engine: Engine) -> None:
    """What registration is for: to pageable memory the call returns when the copy is done."""
    region = engine.region(2, 1 << 20)
    source = torch.full((1 << 20,), 7, dtype=torch.uint8, device=engine.where)
    slot = region.tensor(0)
    slot.fill_(0)
    engine.finish()
    engine.delay(0.2)
    started_s = time.monotonic()
    engine.queue(lambda: slot.copy_(source, non_blocking=True))
    taken_s = time.monotonic() - started_s
    early = bool(slot.any())
    engine.finish()
    assert taken_s < 0.1, f"the call took {taken_s:.3f} s of a delay of 0.2 s"
    assert not early
    assert bool((slot == 7).all())


@pytest.mark.parametrize("way", [Way("triton", 2), Way("torch"), Way("batched"), Way("runs"), Way("plain")], ids=str)
def test_slots_beside_a_border_between_registrations_are_copied_right(engine: Engine, way: Way) -> None:
    region = engine.region(NUM_SLOTS, SLOT_BYTES, PIECE_BYTES)
    pages, twin = Pages(GEOMETRY, engine.where), Pages(GEOMETRY, torch.device("cpu"))
    assert pages.plan.num_bytes == SLOT_BYTES
    staging = torch.empty(4 << 20, dtype=torch.uint8, device=engine.where)
    engine.finish()
    out, into = (open_way(pages.plan, way, each, engine.device, staging) for each in ("out", "in"))
    ids = sample_ids(GEOMETRY, NUM_SLOTS, "random", 1)
    chunks = [ChunkCopy(block_ids, region.tensor(slot)) for slot, block_ids in enumerate(ids)]
    move_once(out, chunks, [engine.event()])
    if way.name == "plain":
        move_once(into, chunks, [engine.event()])
        return
    expected = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    for chunk in chunks:
        twin.oracle().gather(chunk.block_ids, expected)
        assert payload_difference(twin.plan, chunk.host, expected) is None
        chunk.host.copy_(chunk.host.roll(chunk.block_ids[0] + 1))
        twin.oracle().scatter(chunk.block_ids, chunk.host)
    move_once(into, chunks, [engine.event()])
    engine.finish()
    assert pages.difference(twin) is None


@pytest.mark.parametrize("piece", [0, 2, 3])
def test_a_refused_piece_takes_all_others_back(engine: Engine, piece: int) -> None:
    driver = Refusing(engine, piece)

    def region(pin: Literal["auto", "on"]) -> PinnedRegion:
        device = torch.device("cuda", engine.where.index or 0)
        facts = None if engine.is_cuda else GpuFacts()
        return PinnedRegion(
            NUM_SLOTS, SLOT_BYTES, device=device, pin=pin, piece_bytes=PIECE_BYTES, driver=driver, facts=facts
        )

    refused = region("auto")
    assert not refused.pinned
    done = min(piece * PIECE_BYTES, NUM_SLOTS * SLOT_BYTES)
    total = NUM_SLOTS * SLOT_BYTES
    assert refused.refused == f"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED after {done} of {total} bytes"
    # The runtime keeps a last error that the next launch would raise; the driver, which was asked, keeps none.
    launch(engine)
    assert not any(engine.is_pinned(refused.tensor(slot)) for slot in range(NUM_SLOTS))
    # Nothing of it stayed behind: all of it can be registered.
    with engine.driver.current(engine.where.index or 0):
        engine.driver.register(refused.tensor(0).data_ptr(), total)
        engine.driver.unregister(refused.tensor(0).data_ptr())
    # Pageable memory still serves.
    source = torch.arange(256, dtype=torch.uint8, device=engine.where).repeat(16)
    engine.finish()
    engine.queue(lambda: refused.tensor(3)[:4096].copy_(source, non_blocking=True))
    engine.finish()
    assert torch.equal(refused.tensor(3)[:4096], source.cpu())
    refused.close()

    driver = Refusing(engine, piece)
    with pytest.raises(ConfigError, match="HOST_MEMORY_ALREADY_REGISTERED"):
        region("on")
    launch(engine)


def test_the_driver_names_what_it_refuses_and_keeps_no_error(engine: Engine) -> None:
    region = engine.region(2, SLOT_BYTES)
    address = region.tensor(0).data_ptr()
    with engine.driver.current(engine.where.index or 0):
        with pytest.raises(DriverError) as twice:
            engine.driver.register(address, 4096)
        with pytest.raises(DriverError) as never:
            engine.driver.unregister(address + SLOT_BYTES)
    assert (twice.value.code, twice.value.name) == (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
    assert (never.value.code, never.value.name) == (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
    launch(engine)


def test_memory_beyond_the_lock_limit_is_refused_whole_or_not_at_all(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA's driver may not ask for the limit, and root is above it: either way the region serves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (PIECE_BYTES, hard))
    try:
        region = PinnedRegion(
            NUM_SLOTS,
            SLOT_BYTES,
            device=torch.device("cuda", engine.where.index or 0),
            pin="auto",
            piece_bytes=PIECE_BYTES,
            driver=engine.driver,
            facts=None if engine.is_cuda else GpuFacts(),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    slots = [region.tensor(slot) for slot in range(NUM_SLOTS)]
    pinned, refused = region.pinned, region.refused
    found = [engine.is_pinned(slot) for slot in slots]
    region.close()
    with capsys.disabled():
        print(f"\nbeyond RLIMIT_MEMLOCK: {'registered all the same' if pinned else refused}")
    assert found == [pinned] * NUM_SLOTS
    launch(engine)


def test_a_copy_across_a_border_between_registrations(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Why slots are never cut in two: it is refused, or it arrives; the test says which. It may cost the device."""
    if not isinstance(engine, CudaEngine):
        pytest.skip("what CUDA does with such a copy cannot be rehearsed")
    driver = engine.driver
    region = engine.region(6, SLOT_BYTES, 2 * SLOT_BYTES)
    across = torch.frombuffer(region.view(0).obj, dtype=torch.uint8)[SLOT_BYTES : 3 * SLOT_BYTES]
    assert across.data_ptr() == region.tensor(1).data_ptr()
    source = torch.randint(256, (2 * SLOT_BYTES,), dtype=torch.uint8, device=engine.where)
    to, come_from, size = (torch.tensor([value]) for value in (across.data_ptr(), source.data_ptr(), 2 * SLOT_BYTES))
    stream = new_stream()
    engine.finish()
    outcomes = []
    for name, copy in (
        ("torch", lambda: across.copy_(source, non_blocking=True)),
        ("batched", lambda: driver.memcpy_batch(to, come_from, size, stream.cuda_stream)),
    ):
        across.fill_(0)
        try:
            with torch.cuda.stream(stream):
                copy()
            until(stream.query, f"a copy across a border by {name}")
            outcomes.append(f"{name}: {'arrives' if torch.equal(across, source.cpu()) else 'WRONG BYTES'}")
        except RuntimeError as error:
            outcomes.append(f"{name}: {str(error).splitlines()[0]}")
    with capsys.disabled():
        print(f"\na copy across a border: {'; '.join(outcomes)}")
    assert not any("WRONG BYTES" in outcome for outcome in outcomes)
