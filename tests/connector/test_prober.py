"""The threads that ask tiers: how many at once, what waits too long, how they end."""

from __future__ import annotations

from typing import ClassVar

from bench import make_key
from doubles import PATIENCE_S, Clock, MemoryTier, until

from kvsluice.connector.prober import Answer, Prober
from kvsluice.tiers.chunk_file import stored_key

KEYS = [make_key(number) for number in range(16)]


class DistantTier(MemoryTier):
    """Worth asking several questions at once."""

    tier_type: ClassVar[str] = "distant"
    probe_threads: ClassVar[int] = 3


def answers_of(prober: Prober, count: int) -> list[Answer]:
    arrived: list[Answer] = []
    until(lambda: arrived.extend(prober.answers()), lambda: len(arrived) >= count)
    return arrived


def test_a_distant_tier_is_asked_as_many_questions_at_once_as_it_says():
    tier = DistantTier("obj")
    for key in KEYS:
        tier.images[stored_key(key, 0, 0)] = b"x"
    hold = tier.hold("held_prefix")
    prober = Prober({0: tier})
    for key in KEYS[:5]:
        assert prober.ask(0, (key,))
    hold.wait_for(3)
    assert tier.count("held_prefix") == 3
    assert prober.answers() == []
    hold.open()
    assert sorted(answer.keys for answer in answers_of(prober, 5)) == sorted((key,) for key in KEYS[:5])
    assert prober.close(PATIENCE_S, Clock()) == []


def test_a_question_that_waited_longer_than_its_lookup_is_not_asked_any_more():
    tier, clock = MemoryTier("obj"), Clock()
    hold = tier.hold("held_prefix")
    prober = Prober({0: tier}, max_age_s=1.0, clock=clock)
    prober.ask(0, (KEYS[0],))
    hold.wait_for()
    prober.ask(0, (KEYS[1],))
    clock.advance(0.5)
    prober.ask(0, (KEYS[2],))
    clock.advance(0.9)
    hold.open()
    stale = {answer.keys[0]: answer.is_stale for answer in answers_of(prober, 3)}
    assert stale == {KEYS[0]: False, KEYS[1]: True, KEYS[2]: False}
    assert tier.count("held_prefix") == 2
    assert prober.close(PATIENCE_S, clock) == []
