"""Whatever happens to its transfers, the engine serves the right tokens, keeps no block and goes on.

Every scenario of `hostile_engine.py` ends with a proof that all blocks and slots came back; what it
raised is under `error`.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Told = dict[str, dict[str, object]]
BOUNDED_S = 8.0
"""What is bounded ends in one to three seconds; the rest is for machines that are not idle."""


def outcome_of(hostile: Told, scenario: str) -> dict[str, object]:
    outcome = hostile[scenario]
    assert "error" not in outcome, outcome["error"]
    return outcome


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def test_preemption_amid_stores_and_loads_changes_no_token(hostile: Told) -> None:
    outcome = outcome_of(hostile, "preempted_while_stores_and_loads_run")
    assert number(outcome["preempted"]) > 0
    assert number(outcome["loaded"]) > 0
    assert outcome["same"] == [True, True, True]


def test_a_chunk_lost_after_the_lookup_is_computed_once_and_stored_again_wherever_it_stands(hostile: Told) -> None:
    outcomes = outcome_of(hostile, "chunks_lost_between_lookup_and_load")["outcomes"]
    assert isinstance(outcomes, list)
    assert len(outcomes) == 8
    for outcome in outcomes:
        assert outcome["same"]
        assert outcome["misses"] == 1
        assert outcome["lookups"] <= 4, "the request was asked about again and again"
        assert outcome["stored again"]


def test_a_load_that_hangs_ends_at_its_deadline_and_holds_up_nobody_else(hostile: Told) -> None:
    outcome = outcome_of(hostile, "a_load_that_hangs")
    assert outcome["same"] == [True, True]
    assert outcome["others first"]
    assert outcome["free while it hangs"]


def test_stores_that_hang_keep_no_blocks_from_requests_and_no_idle_engine_awake(hostile: Told) -> None:
    outcome = outcome_of(hostile, "stores_that_hang")
    given_up = outcome["given up"]
    assert isinstance(given_up, dict)
    assert given_up.get("blocks_wanted", 0) > 0, "no store was given up: the scenario needs less room"
    # Left alone they would keep the blocks for as long as a store may wait, 5 s each time the pool is full.
    assert number(outcome["hung_s"]) < number(outcome["healthy_s"]) + 3.0
    assert number(outcome["idle_s"]) < BOUNDED_S
    assert outcome["reset while it hangs"]


def test_requests_that_end_early_and_come_again_under_their_id_get_their_own_tokens(hostile: Told) -> None:
    assert outcome_of(hostile, "requests_that_end_early")["same"] == [True, True, True]


def test_of_requests_with_one_prefix_at_once_one_loads_and_the_others_share_its_blocks(hostile: Told) -> None:
    outcome = outcome_of(hostile, "one_prefix_at_once")
    assert outcome["same"] == [True, True, True]
    assert outcome["loaded"] == 8


def test_a_local_hit_inside_a_chunk_loads_the_rest_of_it(hostile: Told) -> None:
    outcome = outcome_of(hostile, "a_local_hit_inside_a_chunk")
    assert outcome["same"]
    assert (outcome["cached"], outcome["loaded"]) == (512, 6)


def test_a_prompt_of_whole_chunks_is_loaded_whole(hostile: Told) -> None:
    outcome = outcome_of(hostile, "a_prompt_of_whole_chunks")
    assert outcome["same"]
    assert outcome["cached"] == 512


def test_a_reset_while_a_load_runs_is_a_miss(hostile: Told) -> None:
    assert outcome_of(hostile, "reset_while_a_load_runs")["same"]


def test_after_a_reset_of_the_connector_nothing_hits_and_no_file_is_left(hostile: Told) -> None:
    outcome = outcome_of(hostile, "reset_of_the_connector")
    assert outcome["reset"]
    assert outcome["same"]
    assert outcome["cached"] == 0
    assert outcome["files"] == 0


def test_a_request_that_runs_through_a_reset_stores_nothing_any_more(hostile: Told) -> None:
    assert outcome_of(hostile, "a_running_request_stores_nothing_after_a_reset")["files"] == 0


def test_a_tier_that_fails_at_everything_costs_no_request(hostile: Told) -> None:
    assert outcome_of(hostile, "a_tier_that_fails_at_everything")["same"] == [True, True]


def test_a_folder_of_chunks_that_is_gone_costs_no_request(hostile: Told) -> None:
    assert outcome_of(hostile, "a_folder_that_is_gone")["same"]


def test_hits_that_are_slower_than_recompute_are_computed_and_used_again_when_they_are_not(hostile: Told) -> None:
    outcome = outcome_of(hostile, "hits_that_are_slower_than_recompute")
    assert outcome["outcomes"] == [
        {"same": True, "cached": 0, "unused": 8},
        {"same": True, "cached": 512, "unused": 0},
    ]
    measured = outcome["measured"]
    assert isinstance(measured, dict)
    assert number(measured["prefill_tokens_per_s"]) > 0
    assert number(measured["load_interval_s"]["fs"]) > 0


def test_a_configuration_that_would_fail_later_is_refused_with_what_to_write(hostile: Told) -> None:
    told = outcome_of(hostile, "configurations_that_are_refused")
    assert 'add "kv_load_failure_policy":"recompute" to --kv-transfer-config' in str(told["policy"])
    assert "unknown key 'staging_byte'" in str(told["key"])
    assert "'staging_bytes'" in str(told["key"])
    assert 'it must be "kv_both"' in str(told["role"])


def test_a_shutdown_with_hung_transfers_is_bounded_and_requests_are_still_answered(hostile: Told) -> None:
    outcome = outcome_of(hostile, "shutdown_with_everything_hung")
    assert number(outcome["took_s"]) < 4.0
    assert outcome["same"]


def test_no_request_of_any_scenario_ended_with_an_error(hostile: Told) -> None:
    assert hostile["finish reasons"] == ["length"]
