"""After a reset nothing from before it is used: not what waits, not what runs, not what has just arrived."""

from __future__ import annotations

from bench import WIDTH, Bench, make_key

from kvsluice.connector.ledger import Ledger
from kvsluice.tiers import reasons

KEYS = [make_key(number) for number in range(2)]


def test_a_load_that_was_over_but_not_told_of_before_the_reset_is_a_miss(bench: Bench) -> None:
    conn = bench.connect("host")
    conn.wait([conn.store(KEYS, list(range(2 * WIDTH)))], timeout_s=10)
    job = conn.load(KEYS, list(range(8, 8 + 2 * WIDTH)))
    while conn.stats().jobs_open:
        pass
    conn.reset(timeout_s=10)
    (result,) = conn.poll()
    assert result.job_id == job
    assert result.done_keys == ()
    assert result.failed == dict.fromkeys(KEYS, reasons.RESET)


def test_a_part_that_was_loaded_before_the_reset_is_a_miss_although_its_job_goes_on() -> None:
    ledger = Ledger()
    job = ledger.open("load", tuple(KEYS), 0.0)
    ledger.decide(job, 0, None, 0.0)
    ledger.spoil_loads(reasons.RESET)
    ledger.decide(job, 1, reasons.MISSING, 0.0)
    (result,) = ledger.take_results()
    assert result.failed == {KEYS[0]: reasons.RESET, KEYS[1]: reasons.MISSING}


def test_a_result_that_nobody_took_before_the_reset_is_a_miss_and_a_store_stays_done() -> None:
    ledger = Ledger()
    loaded, stored = ledger.open("load", (KEYS[0],), 0.0), ledger.open("store", (KEYS[1],), 0.0)
    ledger.decide(loaded, 0, None, 0.0)
    ledger.decide(stored, 0, None, 0.0)
    ledger.spoil_loads(reasons.RESET)
    load, store = ledger.take_results()
    assert load.failed == {KEYS[0]: reasons.RESET}
    assert store.done_keys == (KEYS[1],)
