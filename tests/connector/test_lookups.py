"""What lookups ask, how they take what comes, and for how long they believe it: virtual time, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from bench import make_key
from doubles import Clock

from kvsluice.connector.account import PlannedTier
from kvsluice.connector.books import Books
from kvsluice.connector.index import UNKNOWN_TTL_S
from kvsluice.connector.listing import LISTED_AT_ONCE, Listed
from kvsluice.connector.load_gate import LoadGate
from kvsluice.connector.lookups import FASTER_WAIT_S, TAKEN_AT_ONCE, Lookups
from kvsluice.connector.orders import (
    HOST,
    Copied,
    Ended,
    Loaded,
    LoadOrder,
    Passed,
    RankReport,
    ResetDone,
    ResetOrder,
    StoreOrder,
    Wrote,
)
from kvsluice.connector.planner import Planner, PlannerSettings
from kvsluice.connector.prober import Answer
from kvsluice.connector.results import Lookup
from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure import Spent

KEYS = [make_key(number) for number in range(10_000)]
NEGATIVE_TTL_S = 5.0
TIMEOUT_S = 1.0


class ScriptedProber:
    """Notes what it is asked; answers what the test says, when it says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[bytes, ...]]] = []
        self.arrived: list[Answer] = []
        self.found: deque[Listed] = deque()
        self.taken = 0

    def ask(self, tier: int, keys: tuple[bytes, ...]) -> bool:
        self.asked.append((tier, keys))
        return True

    def answers(self) -> list[Answer]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def listed(self) -> Listed | None:
        self.taken += bool(self.found)
        return self.found.popleft() if self.found else None

    def forget(self) -> None:
        self.arrived.clear()
        self.found.clear()

    def answer(self, held: int, *, question: int = -1, error: str | None = None) -> None:
        """The newest question, or another one, is answered."""
        tier, keys = self.asked[question]
        self.arrived.append(Answer(0, tier, keys, held, error))


def settings(host_slots: int = 0) -> PlannerSettings:
    return PlannerSettings(
        blocks_per_chunk=1,
        num_blocks=64,
        chunk_bytes=512,
        slot_bytes=8192,
        num_slots=16,
        host_slots=host_slots,
        lookup_timeout_s=TIMEOUT_S,
        negative_ttl_s=NEGATIVE_TTL_S,
    )


class Bench:
    """A planner over tiers that are asked for so many keys at once."""

    def __init__(self, **probe_keys: int) -> None:
        self.clock = Clock()
        self.prober = ScriptedProber()
        self.planner = Planner(
            [PlannedTier(name, name, None, probe_keys=count) for name, count in probe_keys.items()],
            settings(),
            prober=self.prober,
            clock=self.clock,
        )

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        return self.planner.lookup(keys)

    def settled(self, keys: Sequence[bytes]) -> Lookup:
        """Look up until nothing is pending, which is while an answer is being taken."""
        for _ in range(100):
            found = self.lookup(keys)
            if not found.pending:
                return found
        raise AssertionError("still pending")

    def known(self, tier: str = "obj") -> int:
        return self.planner.stats().tiers[tier].known_chunks

    def ask_and_answer(self, keys: Sequence[bytes], held: int, *, error: str | None = None) -> Lookup:
        assert self.lookup(keys).pending
        self.prober.answer(held, error=error)
        return self.settled(keys)

    def miss(self, key: bytes, reason: str) -> None:
        """Load a chunk; the tier does not serve it."""
        self.planner.load([key], [0], None)
        [order] = self.planner.take_orders()
        assert isinstance(order, LoadOrder)
        missed = Loaded(order.job_id, 0, -1, reason, 0, 0.0, 0.0, 0.0, ((0, reason),))
        events = (missed, Passed(order.job_id, 0, 0), Ended(order.job_id, 0))
        self.planner.apply(RankReport(0, events, ()))
        self.planner.check_integrity()


# ---- questions ---------------------------------------------------------------------------------


def test_a_lookup_of_ten_thousand_unknown_keys_is_one_question_to_a_tier_that_takes_as_many():
    bench = Bench(obj=16_384)
    for _ in range(5):
        assert bench.lookup(KEYS) == Lookup(0, True)
    assert bench.prober.asked == [(0, tuple(KEYS))]
    bench.prober.answer(len(KEYS))
    assert bench.settled(KEYS) == Lookup(len(KEYS), False)
    assert len(bench.prober.asked) == 1


@pytest.mark.parametrize("held", [0, 1, 3217, 9999])
def test_a_prefix_that_ends_somewhere_is_found_with_one_question(held):
    bench = Bench(obj=16_384)
    assert bench.ask_and_answer(KEYS, held) == Lookup(held, False)
    assert bench.settled(KEYS) == Lookup(held, False)
    assert len(bench.prober.asked) == 1


def test_each_tier_is_asked_for_as_many_keys_as_it_says():
    bench = Bench(fs=1024, obj=16_384)
    bench.lookup(KEYS)
    assert [(tier, len(keys)) for tier, keys in bench.prober.asked] == [(0, 1024), (1, 10_000)]


def test_a_tier_that_looks_at_each_key_is_asked_for_a_long_prompt_in_parts():
    bench = Bench(fs=1024)
    for part in range(3):
        assert bench.lookup(KEYS[:2500]).pending
        bench.prober.answer(len(bench.prober.asked[-1][1]))
        assert len(bench.prober.asked) == part + 1
        while bench.lookup(KEYS[:2500]).pending and len(bench.prober.asked) == part + 1:
            pass
    assert bench.settled(KEYS[:2500]) == Lookup(2500, False)
    assert [len(keys) for _, keys in bench.prober.asked] == [1024, 1024, 452]


# ---- answers -----------------------------------------------------------------------------------


def test_a_long_answer_is_taken_in_parts_and_the_lookup_is_pending_until_all_are_in():
    bench = Bench(obj=16_384)
    bench.lookup(KEYS)
    bench.prober.answer(len(KEYS))
    known = [0]
    while bench.lookup(KEYS) == Lookup(0, True):
        known.append(bench.known())
    assert bench.lookup(KEYS) == Lookup(len(KEYS), False)
    assert known == [min(at * TAKEN_AT_ONCE, len(KEYS)) for at in range(len(known))]
    assert len(known) == -(-len(KEYS) // TAKEN_AT_ONCE)
    assert len(bench.prober.asked) == 1, "nobody asks for what is in hand"


def test_many_answers_at_once_are_taken_in_parts_as_well():
    bench = Bench(obj=16_384)
    prompts = [KEYS[at : at + 1000] for at in range(0, 10_000, 1000)]
    for prompt in prompts:
        bench.lookup(prompt)
    bench.prober.arrived = [Answer(0, tier, keys, len(keys), None) for tier, keys in bench.prober.asked]
    before = 0
    while before < len(KEYS):
        bench.planner.apply(RankReport(0, (), ()))
        assert 0 < bench.known() - before <= TAKEN_AT_ONCE
        before = bench.known()
    assert all(bench.settled(prompt) == Lookup(1000, False) for prompt in prompts)


def test_a_reset_drops_the_rest_of_an_answer_that_is_being_taken():
    bench = Bench(obj=16_384)
    bench.lookup(KEYS)
    bench.prober.answer(len(KEYS))
    assert bench.lookup(KEYS).pending
    assert bench.known() == TAKEN_AT_ONCE
    bench.planner.reset()
    [order] = bench.planner.take_orders()
    assert isinstance(order, ResetOrder)
    bench.planner.apply(RankReport(0, (ResetDone(order.reset_id, 0, None),), ()))
    for _ in range(5):
        assert bench.lookup(KEYS) == Lookup(0, True), "asked anew"
    assert bench.known() == 0
    assert len(bench.prober.asked) == 2


def test_a_store_that_ends_while_an_answer_is_taken_leaves_it_right():
    bench = Bench(obj=16_384)
    bench.lookup(KEYS)
    bench.prober.answer(len(KEYS))
    bench.lookup(KEYS)
    bench.planner.store(KEYS[1000:1004], list(range(4)))
    [order] = bench.planner.take_orders()
    assert isinstance(order, StoreOrder)
    for part in range(4):
        wrote = Wrote(order.job_id, part, 0, None, 512, 0.0, Spent.alone(0.1))
        events = (Copied(order.job_id, part, None, 0.1), wrote, Ended(order.job_id, part))
        bench.planner.apply(RankReport(0, events, ()))
    assert bench.settled(KEYS) == Lookup(len(KEYS), False)
    assert bench.known() == len(KEYS)


# ---- how long it is believed -------------------------------------------------------------------


def test_a_tier_that_could_not_be_asked_is_asked_again_soon():
    bench = Bench(obj=16_384)
    assert bench.ask_and_answer(KEYS[:4], 0, error="503 SlowDown") == Lookup(0, False)
    bench.clock.advance(UNKNOWN_TTL_S - 0.01)
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)
    assert len(bench.prober.asked) == 1
    bench.clock.advance(0.01)
    assert bench.ask_and_answer(KEYS[:4], 4) == Lookup(4, False)
    assert bench.planner.stats().tiers["obj"].missed == {"lookup_failed": 1}


def test_a_tier_that_does_not_hold_the_chunk_is_believed_for_longer():
    bench = Bench(obj=16_384)
    assert bench.ask_and_answer(KEYS[:4], 0) == Lookup(0, False)
    bench.clock.advance(NEGATIVE_TTL_S - 0.01)
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)
    assert len(bench.prober.asked) == 1
    bench.clock.advance(0.01)
    assert bench.ask_and_answer(KEYS[:4], 4) == Lookup(4, False)


def test_an_answer_that_comes_too_late_for_its_lookup_serves_the_next_one():
    bench = Bench(obj=16_384)
    assert bench.lookup(KEYS[:4]).pending
    bench.clock.advance(TIMEOUT_S)
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)
    bench.clock.advance(UNKNOWN_TTL_S)
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)
    assert len(bench.prober.asked) == 1, "the question is still out"
    assert bench.planner.stats().tiers["obj"].missed == {"lookup_timeout": 2}
    bench.prober.answer(4)
    assert bench.lookup(KEYS[:4]) == Lookup(4, False)


@pytest.mark.parametrize(
    "reason", [reasons.MISSING, reasons.SHORT, reasons.OVERSIZE, reasons.CHECKSUM, reasons.FOREIGN, reasons.HEADER]
)
def test_a_load_that_proves_that_the_chunk_is_gone_is_believed_as_long_as_the_tiers_own_word(reason):
    bench = Bench(obj=16_384)
    bench.ask_and_answer(KEYS[:4], 4)
    bench.miss(KEYS[2], reason)
    assert bench.lookup(KEYS[:4]) == Lookup(2, False)
    bench.clock.advance(NEGATIVE_TTL_S - 0.01)
    assert bench.lookup(KEYS[:4]) == Lookup(2, False)
    bench.clock.advance(0.01)
    assert bench.ask_and_answer(KEYS[:4], 0) == Lookup(2, False)
    assert bench.prober.asked[1:] == [(0, tuple(KEYS[2:4]))]


@pytest.mark.parametrize("reason", [reasons.IO_ERROR, reasons.DEADLINE, reasons.INTERNAL])
def test_a_load_that_failed_otherwise_has_the_tier_asked_again_soon(reason):
    bench = Bench(obj=16_384)
    bench.ask_and_answer(KEYS[:4], 4)
    bench.miss(KEYS[0], reason)
    bench.clock.advance(UNKNOWN_TTL_S - 0.01)
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)
    bench.clock.advance(0.01)
    assert bench.ask_and_answer(KEYS[:4], 4) == Lookup(4, False)


def test_a_load_that_waited_for_a_slot_past_its_deadline_has_the_tier_asked_again_soon():
    bench = Bench(obj=16_384)
    bench.ask_and_answer(KEYS[:20], 20)
    # 16 slots, of which the tier may have 8.
    bench.planner.load(KEYS[:20], list(range(20)), 2.0)
    bench.clock.advance(2.0)
    bench.planner.apply(RankReport(0, (), ()))
    assert bench.planner.stats().tiers["obj"].missed == {reasons.DEADLINE: 12}
    assert bench.lookup(KEYS[8:20]) == Lookup(0, False)
    bench.clock.advance(UNKNOWN_TTL_S)
    assert bench.lookup(KEYS[8:20]) == Lookup(0, True)


def test_a_tier_that_takes_it_that_a_removed_chunk_is_held_is_not_believed_while_the_proof_is_fresh():
    bench = Bench(obj=16_384)
    bench.ask_and_answer(KEYS[:8], 8)
    bench.miss(KEYS[5], reasons.MISSING)
    bench.miss(KEYS[0], reasons.IO_ERROR)
    bench.clock.advance(UNKNOWN_TTL_S)
    # It bisects: the first and the last are there, so all are.
    assert bench.ask_and_answer(KEYS[:8], 8) == Lookup(5, False)
    bench.clock.advance(NEGATIVE_TTL_S)
    assert bench.ask_and_answer(KEYS[:8], 0) == Lookup(5, False)
    assert bench.prober.asked[-1] == (0, tuple(KEYS[5:8]))


# ---- listings ----------------------------------------------------------------------------------


def batches(keys: Sequence[bytes], tier: int = 0) -> list[Listed]:
    return [Listed(tier, tuple(keys[at : at + LISTED_AT_ONCE])) for at in range(0, len(keys), LISTED_AT_ONCE)]


def test_what_was_listed_is_known_without_a_question():
    bench = Bench(obj=16_384)
    bench.prober.found.extend(batches(KEYS))
    while bench.prober.found:
        bench.planner.apply(RankReport(0, (), ()))
    assert bench.known() == len(KEYS)
    assert bench.lookup(KEYS) == Lookup(len(KEYS), False)
    assert bench.prober.asked == []


def test_one_call_takes_one_batch_of_a_listing_and_none_beside_an_answer():
    bench = Bench(obj=16_384)
    bench.prober.found.extend(batches(KEYS[5000:]))
    bench.lookup(KEYS[:3000])
    assert bench.known() == LISTED_AT_ONCE
    bench.prober.answer(3000)
    bench.lookup(KEYS[:3000])
    assert (bench.known(), bench.prober.taken) == (LISTED_AT_ONCE + TAKEN_AT_ONCE, 1)
    bench.lookup(KEYS[:3000])
    assert (bench.known(), bench.prober.taken) == (LISTED_AT_ONCE + 3000, 1)
    bench.lookup(KEYS[:3000])
    assert (bench.known(), bench.prober.taken) == (2 * LISTED_AT_ONCE + 3000, 2)


def test_a_chunk_found_absent_stays_so_whatever_an_older_listing_says():
    bench = Bench(obj=16_384)
    bench.ask_and_answer(KEYS[:1], 0)
    bench.prober.found.extend(batches(KEYS[:4]))
    bench.planner.apply(RankReport(0, (), ()))
    assert bench.known() == 3
    assert bench.lookup(KEYS[:4]) == Lookup(0, False)


def test_a_tier_that_a_reset_has_not_emptied_yet_takes_nothing_from_a_listing():
    bench = Bench(obj=16_384)
    bench.planner.reset()
    bench.prober.found.extend(batches(KEYS[:4]))
    bench.planner.apply(RankReport(0, (), ()))
    assert bench.known() == 0


# ---- faster tiers and what slower ones say -----------------------------------------------------


def heard(bench: Bench, keys: Sequence[bytes]) -> None:
    """Tier 1 was listed, and these keys were found."""
    bench.prober.found.extend(batches(keys, tier=1))
    while bench.prober.found:
        bench.planner.apply(RankReport(0, (), ()))


def test_a_faster_tier_is_asked_about_what_a_slower_one_was_listed_with():
    bench = Bench(fs=1024, obj=16_384)
    heard(bench, KEYS[:8])
    assert bench.lookup(KEYS[:8]) == Lookup(8, True)
    assert bench.prober.asked == [(0, tuple(KEYS[:8]))]
    bench.prober.answer(5)
    assert bench.lookup(KEYS[:8]) == Lookup(8, False)
    assert (bench.known("fs"), bench.known("obj")) == (5, 8)
    assert len(bench.prober.asked) == 1, "from the sixth chunk on it was told"


def test_a_faster_tier_is_asked_for_a_long_prompt_as_far_as_it_holds_it():
    bench = Bench(fs=1024, obj=16_384)
    heard(bench, KEYS)
    for part in range(3):
        assert bench.lookup(KEYS) == Lookup(len(KEYS), True)
        assert len(bench.prober.asked) == part + 1
        bench.prober.answer(1024 if part < 2 else 0)
    assert bench.lookup(KEYS) == Lookup(len(KEYS), False)
    assert bench.known("fs") == 2048


def test_a_faster_tier_that_hangs_does_not_hold_up_what_a_slower_one_holds():
    bench = Bench(fs=1024, obj=16_384)
    heard(bench, KEYS[:8])
    assert bench.lookup(KEYS[:8]) == Lookup(8, True)
    bench.clock.advance(FASTER_WAIT_S + 0.001)
    for _ in range(3):
        assert bench.lookup(KEYS[:8]) == Lookup(8, False)
    assert len(bench.prober.asked) == 1
    assert bench.planner.stats().tiers["fs"].missed == {}
    bench.prober.answer(8)
    bench.lookup(KEYS[:8])
    assert bench.known("fs") == 8, "late, and good for the next one"


def test_a_slower_tier_that_answers_first_does_not_keep_a_faster_one_from_being_heard():
    bench = Bench(fs=1024, obj=16_384)
    assert bench.lookup(KEYS[:8]) == Lookup(0, True)
    bench.prober.answer(8, question=1)
    assert bench.lookup(KEYS[:8]) == Lookup(8, True)
    bench.prober.answer(8, question=0)
    assert bench.lookup(KEYS[:8]) == Lookup(8, False)
    assert len(bench.prober.asked) == 2


def test_what_we_stored_or_loaded_ourselves_has_no_faster_tier_asked():
    bench = Bench(fs=1024, obj=16_384)
    heard(bench, KEYS[:1])
    bench.planner.load(KEYS[:1], [0], None)
    [order] = bench.planner.take_orders()
    assert isinstance(order, LoadOrder)
    loaded = Loaded(order.job_id, 0, 1, None, 512, 0.0, 0.0, 0.1)
    copied_up = [Wrote(order.job_id, 0, 0, reasons.DISK_FULL, 0, 0.0, Spent.alone(0.1))]
    events = (loaded, *copied_up, Ended(order.job_id, 0))
    bench.planner.apply(RankReport(0, events, ()))
    assert bench.lookup(KEYS[:1]) == Lookup(1, False)
    assert bench.prober.asked == []
    bench.prober.arrived = [Answer(0, 1, (KEYS[0],), 1, None)]
    assert bench.lookup(KEYS[:1]) == Lookup(1, False), "hearsay does not take that back"
    assert bench.prober.asked == []


# ---- which tier serves -------------------------------------------------------------------------


class NotingGate(LoadGate):
    """Offers all, and notes where each chunk would come from."""

    def __init__(self) -> None:
        super().__init__({}, tokens_per_chunk=16)
        self.served_by: list[int] = []

    def offer(self, served_by: Sequence[int], *args: object, **options: object) -> int:
        self.served_by = list(served_by)
        return len(served_by)


def test_each_chunk_of_a_prefix_that_lies_in_several_tiers_comes_from_the_fastest_that_has_it():
    books = Books([PlannedTier(name, name, None) for name in ("host", "fs", "obj")], settings(host_slots=8), Clock())
    gate = NotingGate()
    lookups = Lookups(books, None, gate)
    for at, keys in ((1, KEYS[2:4]), (2, KEYS[1:9])):
        books.tiers[at].index.add_answered(tuple(keys), 0.0)
    for key in (KEYS[0], KEYS[6]):
        slot = books.slots.acquire()
        assert slot is not None
        books.slots.keep(slot, key)
        books.slots.unpin(slot)
    assert lookups.lookup(KEYS) == Lookup(9, False)
    assert gate.served_by == [HOST, 2, 1, 1, 2, 2, HOST, 2, 2]
    books.tiers[1].resetting = True
    assert lookups.lookup(KEYS) == Lookup(9, False)
    assert gate.served_by == [HOST, 2, 2, 2, 2, 2, HOST, 2, 2]
