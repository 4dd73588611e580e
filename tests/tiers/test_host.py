"""The host tier on its own: what every tier promises, and eviction of the coldest."""

from __future__ import annotations

import threading

import pytest

from kvsluice.tiers import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigError,
    HostTier,
    TierUnavailableError,
    check_tier,
    reasons,
)


def view(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def test_passes_the_conformance_suite():
    report = check_tier(lambda: HostTier(64 * 2**20, slot_bytes=65_537), persistent=False)
    assert report.tier_type == "host"
    assert not report.persistent


def test_sizes_are_rounded_down_to_whole_slots_never_up():
    assert HostTier(3 * 4096 + 4095, slot_bytes=100).usage().capacity_bytes == 3 * 4096


@pytest.mark.parametrize(("capacity", "slot"), [(4095, 100), (0, 100), (8192, 8193), (8192, 0), (8192, -1)])
def test_a_capacity_that_holds_no_slot_is_refused_by_name_and_value(capacity, slot):
    with pytest.raises(ConfigError, match=f"tier warm: capacity {capacity} holds no slot of {slot} bytes"):
        HostTier(capacity, slot_bytes=slot, name="warm")


def test_a_full_tier_drops_the_coldest_chunk_and_counts_it():
    tier = HostTier(2 * 4096, slot_bytes=4096)
    tier.store(b"a", view(b"1"), 1)
    tier.store(b"b", view(b"2"), 1)
    tier.load(b"a", view(b"?"), 1)
    tier.store(b"c", view(b"3"), 1)
    assert sorted(tier.scan()) == [b"a", b"c"]
    assert tier.usage().evicted_chunks == 1
    assert tier.take_evicted() == [b"b"]
    assert tier.take_evicted() == []


def test_asking_does_not_make_a_chunk_look_used():
    tier = HostTier(2 * 4096, slot_bytes=4096)
    tier.store(b"a", view(b"1"), 1)
    tier.store(b"b", view(b"2"), 1)
    assert tier.held_prefix([b"a", b"b", b"c"]) == 2
    tier.store(b"c", view(b"3"), 1)
    assert tier.held_prefix([b"a"]) == 0


def test_an_image_larger_than_a_slot_is_refused():
    tier = HostTier(2 * 4096, slot_bytes=4096)
    with pytest.raises(ValueError, match="image of 4097 bytes, slots have 4096"):
        tier.store(b"a", view(bytes(4097)), 4097)


def test_a_store_from_a_buffer_that_is_too_small_gives_its_slot_back():
    tier = HostTier(4096, slot_bytes=4096)
    with pytest.raises(ValueError, match="num_bytes is 3, the buffer has 2"):
        tier.store(b"a", view(b"12"), 3)
    assert list(tier.scan()) == []
    assert tier.store(b"a", view(b"123"), 3) == 3


@pytest.mark.parametrize(("asked", "reason"), [(4, reasons.SHORT), (2, reasons.OVERSIZE)])
def test_another_length_is_damage(asked, reason):
    tier = HostTier(4096, slot_bytes=4096)
    tier.store(b"a", view(b"123"), 3)
    with pytest.raises(ChunkDamagedError, match="has 3 bytes") as caught:
        tier.load(b"a", view(b"????"), asked)
    assert caught.value.reason == reason


def test_a_chunk_that_is_not_there_is_missing():
    with pytest.raises(ChunkMissingError, match="no chunk 61") as caught:
        HostTier(4096, slot_bytes=4096).load(b"a", view(b"?"), 1)
    assert caught.value.reason == reasons.MISSING


def test_after_close_work_is_refused_and_closing_again_is_harmless():
    tier = HostTier(4096, slot_bytes=4096)
    tier.close()
    tier.close()
    for call in (lambda: tier.store(b"a", view(b"1"), 1), lambda: tier.load(b"a", view(b"?"), 1)):
        with pytest.raises(ClosedError, match="tier 'host' is closed"):
            call()


def test_a_chunk_that_is_being_read_is_not_taken_for_another(monkeypatch):
    tier = HostTier(4096, slot_bytes=4096)
    tier.store(b"a", view(b"old"), 3)
    entered, go = threading.Event(), threading.Event()
    real = HostTier._slot  # noqa: SLF001 - the moment of the copy

    def slow(self: HostTier, slot: int) -> memoryview:
        if threading.current_thread() is reader:
            entered.set()
            assert go.wait(20.0)
        return real(self, slot)

    monkeypatch.setattr(HostTier, "_slot", slow)
    buffer = bytearray(3)
    reader = threading.Thread(target=lambda: tier.load(b"a", memoryview(buffer), 3))
    reader.start()
    assert entered.wait(20.0)
    with pytest.raises(TierUnavailableError, match="every slot is in use") as caught:
        tier.store(b"b", view(b"new"), 3)
    assert caught.value.reason == reasons.POOL_FULL
    assert tier.delete(b"a")
    with pytest.raises(TierUnavailableError):
        tier.store(b"b", view(b"new"), 3)
    go.set()
    reader.join()
    assert bytes(buffer) == b"old"
    assert tier.store(b"b", view(b"new"), 3) == 3
