"""Traces: what is read, what is refused, how requests are spread; the knobs that are found for them."""

from __future__ import annotations

import gzip
import json

import pytest
from traces import as_lines, public_trace, write

from kvsluice.connector.replay.knobs import find_knobs, pre_run
from kvsluice.connector.replay.trace import make_trace, read_trace, speed_up, spread
from kvsluice.tiers.errors import ConfigError

GOOD = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}


def test_a_request_is_read_with_its_time_lengths_and_keys(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, "", {**GOOD, "timestamp": 2500, "hash_ids": [3, 10]})
    first, second = read_trace(path)
    assert (first.time_s, first.prompt_tokens, first.output_tokens) == (0.0, 700, 5)
    assert second.time_s == 1.5
    assert first.keys[0] == second.keys[0]
    assert len({*first.keys, *second.keys}) == 3


def test_a_gzipped_trace_is_the_same(tmp_path):
    plain = write(tmp_path / "t.jsonl", *as_lines(make_trace(seed=3, num_requests=50, requests_per_s=2)))
    zipped = tmp_path / "anything"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(zipped) == read_trace(plain)


def test_requests_out_of_order_are_put_in_order(tmp_path):
    path = write(tmp_path / "t.jsonl", {**GOOD, "timestamp": 3000}, GOOD)
    assert [request.time_s for request in read_trace(path)] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{not json", "{not json"),
        ("[1]", r"\[1\]"),
        ({key: value for key, value in GOOD.items() if key != "hash_ids"}, "'hash_ids' is missing"),
        ({**GOOD, "timestamp": "noon"}, "timestamp 'noon'"),
        ({**GOOD, "timestamp": -1}, "timestamp -1"),
        ({**GOOD, "timestamp": True}, "timestamp True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp nan"),
        ({**GOOD, "input_length": 0}, "input_length 0"),
        ({**GOOD, "input_length": 1.5}, r"input_length 1\.5"),
        ({**GOOD, "output_length": -2}, "output_length -2"),
        ({**GOOD, "hash_ids": 7}, "hash_ids 7"),
        ({**GOOD, "hash_ids": [3, -9]}, "hash id -9"),
        ({**GOOD, "hash_ids": [3, 1 << 64]}, f"hash id {1 << 64}"),
        ({**GOOD, "hash_ids": [3]}, "1 hash_ids for an input_length of 700"),
        ({**GOOD, "hash_ids": [3, 3]}, "hash id 3 stands twice"),
    ],
)
def test_a_malformed_line_is_refused_with_file_line_and_value(tmp_path, line, named):
    path = write(tmp_path / "bad.jsonl", GOOD, GOOD, line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl', line 3: .*{named}"):
        read_trace(path)


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path):
    empty = write(tmp_path / "empty.jsonl", "")
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (empty, broken, binary, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=path.name):
            read_trace(path)


def test_a_speed_up_moves_arrivals_closer_and_nothing_else():
    requests = make_trace(seed=1, num_requests=20, requests_per_s=1)
    faster = speed_up(requests, 4)
    assert [request.time_s for request in faster] == [request.time_s / 4 for request in requests]
    assert [request.keys for request in faster] == [request.keys for request in requests]
    for factor in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=str(factor)):
            speed_up(requests, factor)


def test_round_robin_takes_nodes_in_turn_and_affinity_keeps_a_conversation_together():
    requests = make_trace(seed=1, num_requests=300, requests_per_s=5)
    assert [request.node for request in spread(requests, 3)] == [at % 3 for at in range(300)]
    homes: dict[bytes, set[int]] = {}
    together = spread(requests, 4, "affinity")
    for request in together:
        homes.setdefault(request.keys[1], set()).add(request.node)
    assert all(len(nodes) == 1 for nodes in homes.values())
    assert {request.node for request in together} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="0"):
        spread(requests, 0)


def test_a_made_up_trace_is_the_same_for_the_same_seed_and_chains_its_keys():
    made = make_trace(seed=5, num_requests=400, requests_per_s=3)
    assert made == make_trace(seed=5, num_requests=400, requests_per_s=3)
    assert made != make_trace(seed=6, num_requests=400, requests_per_s=3)
    before: dict[bytes, bytes | None] = {}
    for request in made:
        for previous, key in zip((None, *request.keys), request.keys, strict=False):
            assert before.setdefault(key, previous) == previous


def test_a_made_up_trace_survives_being_written_and_read(tmp_path):
    made = make_trace(seed=5, num_requests=40, requests_per_s=3)
    path = write(tmp_path / "t.jsonl", *as_lines(made))
    assert [request.keys for request in read_trace(path)] == [request.keys for request in made]


def test_without_caches_and_drops_every_repeated_prefix_is_loaded():
    requests = make_trace(seed=2, num_requests=500, requests_per_s=5)
    found = pre_run(requests, num_nodes=1, gpu_chunks=0, admitted_share=1.0)
    assert found.gpu_hits == 0
    assert found.offered == len({key for request in requests for key in request.keys})
    assert found.loaded + found.offered == sum(len(request.keys) for request in requests)


def test_a_shared_tier_serves_what_other_nodes_stored():
    requests = spread(make_trace(seed=2, num_requests=500, requests_per_s=5), 4)
    shared = pre_run(requests, num_nodes=4, gpu_chunks=0, admitted_share=1.0, shared=True)
    own = pre_run(requests, num_nodes=4, gpu_chunks=0, admitted_share=1.0)
    assert shared.loaded > own.loaded
    assert shared.offered < own.offered


def test_the_knobs_that_are_found_load_the_tier_as_wanted_by_their_own_model():
    requests = make_trace(seed=2, num_requests=2000, requests_per_s=20)
    knobs = find_knobs(requests, num_nodes=1, bytes_per_s=1e9, chunk_bytes=4 << 20, load_share=0.3, offered_ratio=2.0)
    seconds = requests[-1].time_s / knobs.speed_up
    loads_s = knobs.expected.loaded * (4 << 20) / 1e9
    assert loads_s / seconds == pytest.approx(0.3)
    assert knobs.expected.offered * (4 << 20) / 1e9 / (seconds - loads_s) == pytest.approx(2.0, rel=0.05)


def test_a_trace_without_enough_hits_is_refused():
    requests = make_trace(seed=2, num_requests=100, requests_per_s=5, mean_turns=1.0)
    with pytest.raises(ConfigError, match=r"cannot take 0\.3"):
        find_knobs(requests, num_nodes=1, bytes_per_s=1e9, chunk_bytes=4 << 20, load_share=0.3, offered_ratio=2.0)


def test_a_whole_hour_of_chat_is_read_and_counted():
    path = public_trace("mooncake_conversation.jsonl.gz")
    requests = make_trace(seed=1, num_requests=12_031, requests_per_s=3.4) if path is None else read_trace(path)
    found = pre_run(requests, num_nodes=1, gpu_chunks=0, admitted_share=1.0)
    assert len(requests) == 12_031
    assert found.loaded + found.offered == sum(len(request.keys) for request in requests)
    if path is not None:
        assert (found.loaded, found.offered) == (105_710, 182_790)
        assert requests[-1].time_s == pytest.approx(3536.999)
