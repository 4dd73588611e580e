"""Slots are conserved, and a pinned one is never taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsluice.tiers.slots import SlotTable


def held(table: SlotTable, *keys: bytes) -> list[int]:
    slots = []
    for key in keys:
        slot = table.acquire()
        assert slot is not None
        assert table.keep(slot, key)
        table.unpin(slot)
        slots.append(slot)
    return slots


def test_a_new_table_is_all_free():
    usage = SlotTable(3, 2).usage()
    assert (usage.total, usage.free, usage.pinned, usage.held_idle, usage.held, usage.evicted) == (3, 3, 0, 0, 0, 0)


def test_when_all_slots_are_pinned_none_is_given():
    table = SlotTable(2, 2)
    assert {table.acquire(), table.acquire()} == {0, 1}
    assert table.acquire() is None


def test_the_least_recently_used_chunk_gives_way_first():
    table = SlotTable(3, 3)
    slots = held(table, b"a", b"b", b"c")
    table.pin(slots[0])
    table.unpin(slots[0])
    assert table.acquire() == slots[1]
    assert b"b" not in table
    assert table.usage().evicted == 1


def test_a_lookup_does_not_make_a_chunk_look_used():
    table = SlotTable(2, 2)
    slots = held(table, b"a", b"b")
    assert table.find(b"a") == slots[0]
    assert b"a" in table
    assert table.acquire() == slots[0]


def test_a_pinned_chunk_never_gives_way():
    table = SlotTable(2, 2)
    slots = held(table, b"a", b"b")
    table.pin(slots[0])
    assert table.acquire() == slots[1]
    assert table.acquire() is None
    assert table.find(b"a") == slots[0]


def test_free_slots_are_used_before_a_chunk_gives_way():
    table = SlotTable(3, 2)
    held(table, b"a", b"b")
    table.acquire()
    assert table.usage().evicted == 0


def test_keeping_beyond_the_limit_evicts_the_coldest_or_refuses():
    table = SlotTable(4, 1)
    [first] = held(table, b"a")
    slot = table.acquire()
    assert slot is not None
    table.pin(first)
    assert not table.keep(slot, b"b"), "all that is held is pinned"
    table.unpin(first)
    assert table.keep(slot, b"b")
    assert b"a" not in table
    table.check_integrity()


def test_a_key_that_another_slot_holds_is_not_kept_twice():
    table = SlotTable(2, 2)
    held(table, b"a")
    slot = table.acquire()
    assert slot is not None
    assert not table.keep(slot, b"a")
    table.unpin(slot)
    assert table.usage().free == 1


def test_nothing_is_kept_where_nothing_may_be_held():
    table = SlotTable(1, 0)
    slot = table.acquire()
    assert slot is not None
    assert not table.keep(slot, b"a")


def test_a_forgotten_chunk_that_is_in_use_is_freed_after_its_last_use():
    table = SlotTable(1, 1)
    [slot] = held(table, b"a")
    table.pin(slot)
    table.pin(slot)
    assert table.forget_all() == 1
    table.unpin(slot)
    assert table.usage().free == 0
    table.unpin(slot)
    assert table.usage().free == 1
    assert not table.forget(b"a")


@pytest.mark.parametrize(("num_slots", "max_held"), [(0, 0), (1, 2), (1, -1)])
def test_sizes_that_make_no_sense_are_refused(num_slots, max_held):
    with pytest.raises(ValueError, match=f"num_slots {num_slots} .* max_held {max_held}"):
        SlotTable(num_slots, max_held)


def test_misuse_is_refused():
    table = SlotTable(2, 2)
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.pin(0)
    with pytest.raises(ValueError, match="slot 0 is not pinned"):
        table.unpin(0)
    with pytest.raises(ValueError, match="slot 1 is not in transit"):
        table.keep(1, b"a")


class Slots(RuleBasedStateMachine):
    """Any order of calls, against a plain model of which slot holds what and how often it is pinned."""

    @initialize(num_slots=st.integers(1, 5), data=st.data())
    def begin(self, num_slots: int, data: st.DataObject) -> None:
        self.max_held = data.draw(st.integers(0, num_slots))
        self.table = SlotTable(num_slots, self.max_held)
        self.pins: dict[int, int] = {}
        self.key_of: dict[int, bytes] = {}

    def forget_evicted(self, before: set[bytes]) -> None:
        gone = before - set(self.table.keys())
        for slot, key in list(self.key_of.items()):
            if key in gone:
                assert not self.pins.get(slot), "a pinned chunk gave way"
                del self.key_of[slot]

    @rule()
    def acquire(self) -> None:
        before = set(self.table.keys())
        slot = self.table.acquire()
        if slot is None:
            assert len(self.pins) == self.table.num_slots
            return
        assert slot not in self.pins
        self.forget_evicted(before)
        assert slot not in self.key_of
        self.pins[slot] = 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pins)))
        self.table.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]

    @precondition(lambda self: self.pins or self.key_of)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.pins) | set(self.key_of))))
        self.table.pin(slot)
        self.pins[slot] = self.pins.get(slot, 0) + 1

    @precondition(lambda self: set(self.pins) - set(self.key_of))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.pins) - set(self.key_of))))
        before = set(self.table.keys())
        kept = self.table.keep(slot, key)
        self.forget_evicted(before)
        if key in before:
            assert not kept
        if kept:
            self.key_of[slot] = key

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def forget(self, key: bytes) -> None:
        assert self.table.forget(key) == (key in self.key_of.values())
        self.key_of = {slot: held for slot, held in self.key_of.items() if held != key}

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        usage = self.table.usage()
        assert usage.free + usage.held_idle + usage.pinned == usage.total
        assert self.table.pins() == self.pins
        assert usage.held == len(self.key_of) <= self.max_held
        assert {key: self.table.find(key) for key in self.table.keys()} == {  # noqa: SIM118 - not a dict
            key: slot for slot, key in self.key_of.items()
        }


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("_free", lambda free: free.append(free[0])),
        ("_free", lambda free: free.pop()),
        ("_pins", lambda pins: pins.__setitem__(1, 1)),
        ("_slot_of", lambda slot_of: slot_of.__setitem__(b"z", 1)),
        ("_key_of", lambda key_of: key_of.__setitem__(3, b"z")),
    ],
    ids=["free twice", "lost", "pinned and free", "key without slot", "slot without key"],
)
def test_the_integrity_check_finds_a_broken_table(part, change):
    table = SlotTable(4, 4)
    held(table, b"a")
    table.check_integrity()
    change(getattr(table, part))
    with pytest.raises(AssertionError):
        table.check_integrity()
