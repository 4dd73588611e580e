"""The object tier's benchmark: its parts on virtual time, what it claims, and one tiny run of both tables."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from object_tier_cells import MIB, Timing, aligned_buffers, drive, size_name, spread_of, stamp  # noqa: E402
from object_tier_clients import BOTO3, HTTP_CLIENT, OBSTORE, OURS, URLLIB3  # noqa: E402
from object_tier_http import RefusedError, completion, upload_id_of  # noqa: E402
from object_tier_parts import LIMITED, STRAIGHT, PartsCell, cut, usable  # noqa: E402
from object_tier_path import TokenBucket, limited_path  # noqa: E402
from object_tier_report import Cell, claims_of, table_of, threshold_lines  # noqa: E402
from object_tier_space import Room  # noqa: E402

# ---- timing ----------------------------------------------------------------------------------


def test_each_operation_is_done_once_and_each_slot_by_one_thread_alone() -> None:
    done: list[tuple[int, int]] = []
    threads: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def operation(slot: int, number: int) -> None:
        threads[slot].add(threading.get_ident())
        done.append((slot, number))

    timing = drive(3, 50, operation)
    assert sorted(number for _, number in done) == list(range(50))
    assert all(len(of_slot) <= 1 for of_slot in threads.values())
    assert timing.operations == 50
    assert timing.elapsed_s > 0


def test_as_many_operations_are_in_flight_as_were_asked_for() -> None:
    together = threading.Barrier(4)
    drive(4, 4, lambda slot, number: together.wait(30.0) and None)


def test_what_an_operation_raises_is_raised() -> None:
    def refuse(slot: int, number: int) -> None:
        raise RefusedError(f"no {number}")

    with pytest.raises(RefusedError, match="no "):
        drive(2, 4, refuse)


def test_buffers_are_full_aligned_and_differ_by_their_stamp_alone() -> None:
    one, other = aligned_buffers(2, 3 * MIB)
    assert one == other
    stamp(one, 7)
    assert one != other
    assert int.from_bytes(one[:8], "big") == int.from_bytes(one[-8:], "big") == 7
    assert one[8:-8] == other[8:-8]
    assert len(set(bytes(other[-256:]))) > 100


def test_sizes_have_names() -> None:
    assert [size_name(size) for size in (64 << 10, MIB, 32 * MIB)] == ["64 KiB", "1 MiB", "32 MiB"]


# ---- room on the server ----------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def a_room() -> tuple[Room, Clock]:
    clock = Clock()
    return Room(100, 10.0, lambda: clock.now_s, clock.sleep), clock


def test_a_deleted_tail_takes_room_until_it_is_collected_and_a_head_does_not() -> None:
    room, clock = a_room()
    room.take(100)
    room.give_back(100, 60)
    room.take(40)
    assert clock.now_s == 0.0
    room.take(60)
    assert clock.now_s == room.waited_s == 10.0


def test_room_that_will_never_be_there_is_refused() -> None:
    room, _ = a_room()
    room.take(50)
    with pytest.raises(ValueError, match="no room for 51 bytes beside 50 of 100"):
        room.take(51)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100), st.floats(0.0, 20.0)), max_size=30))
def test_never_more_lies_on_the_server_than_there_is_room_for(turns: list[tuple[int, int, float]]) -> None:
    room, clock = a_room()
    tails: list[tuple[float, int]] = []
    for num_bytes, of_which_tail, pause_s in turns:
        tail_bytes = min(num_bytes, of_which_tail)
        room.take(num_bytes)
        assert num_bytes + sum(tail for freed_s, tail in tails if freed_s > clock.now_s) <= 100
        room.give_back(num_bytes, tail_bytes)
        tails.append((clock.now_s + 10.0, tail_bytes))
        clock.sleep(pause_s)


# ---- parts -----------------------------------------------------------------------------------


@given(st.integers(1, 300 * MIB), st.sampled_from([1, 2, 4, 8]))
def test_the_ranges_of_an_object_are_all_of_it_in_order(num_bytes: int, parts: int) -> None:
    ranges = cut(num_bytes, parts)
    assert len(ranges) == parts
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_bytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    assert all(end >= begin for begin, end in ranges)


def test_powers_of_two_are_cut_evenly() -> None:
    assert [end - begin for begin, end in cut(128 * MIB, 8)] == [16 * MIB] * 8


def test_parts_that_a_multipart_upload_may_not_have_are_left_out() -> None:
    assert usable("PUT", 16 * MIB, 2)
    assert not usable("PUT", 16 * MIB, 4)
    assert usable("GET", 16 * MIB, 4)
    assert usable("PUT", 11 * MIB, 2)


def test_a_multipart_upload_is_completed_with_every_etag_escaped() -> None:
    assert upload_id_of("<R><UploadId>2~abc</UploadId></R>") == "2~abc"
    body = completion(['"one"', '"two"']).decode()
    assert body.count("<Part>") == 2
    assert "<PartNumber>2</PartNumber><ETag>" in body
    with pytest.raises(RefusedError, match="no upload id"):
        upload_id_of("<R/>")


def a_parts_cell(path: str, size_mib: int, gains: dict[int, tuple[float, float, float]]) -> PartsCell:
    spreads = {parts: spread_of(values) for parts, values in gains.items()}
    return PartsCell(path, "GET", size_mib * MIB, 1, {parts: spread_of([1.0]) for parts in gains}, spreads)


def test_a_threshold_needs_a_gain_in_every_round_at_its_size_and_all_larger_ones() -> None:
    even = (1.0, 1.0, 1.0)
    cells = [
        a_parts_cell(STRAIGHT, 16, {1: even, 2: (1.5, 1.6, 1.7)}),
        a_parts_cell(STRAIGHT, 32, {1: even, 2: (0.9, 1.6, 1.7)}),
        a_parts_cell(LIMITED, 16, {1: even, 2: (0.9, 1.6, 1.7)}),
        a_parts_cell(LIMITED, 32, {1: even, 2: (1.3, 1.4, 1.5), 4: (1.8, 1.9, 2.0)}),
        a_parts_cell(LIMITED, 64, {1: even, 2: (1.8, 1.9, 2.0), 4: (1.3, 1.4, 1.5)}),
    ]
    straight, limited = threshold_lines(cells)
    assert "no gain" in straight
    assert "helps from 32 MiB on; best: 32 MiB in 4, 64 MiB in 2 parts" in limited


# ---- the limited path ------------------------------------------------------------------------


def test_a_bucket_lets_a_burst_through_and_the_rest_at_its_rate() -> None:
    bucket = TokenBucket(100.0, 50, 0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(100, 0.0) == 1.0
    assert bucket.take(100, 0.0) == 2.0


def test_a_bucket_that_was_left_alone_holds_one_burst_and_no_more() -> None:
    bucket = TokenBucket(100.0, 50, 0.0)
    bucket.take(50, 0.0)
    assert bucket.take(150, 60.0) == 61.0


def test_the_path_carries_both_directions_whole_and_ends_when_they_do() -> None:
    sent = random.Random(3).randbytes(3 * MIB)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            connection.sendall(stream.read()[::-1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = threading.Thread(target=answer, args=(listener,))
        echo.start()
        with (
            limited_path("127.0.0.1", listener.getsockname()[1], mbps=1000.0, rtt_ms=1.0) as port,
            socket.create_connection(("127.0.0.1", port), timeout=30.0) as near,
            near.makefile("rb") as stream,
        ):
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            assert stream.read() == sent[::-1]
        echo.join(30.0)
    assert not echo.is_alive()


def test_the_path_closes_what_nobody_serves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unserved = listener.getsockname()[1]
    with (
        limited_path("127.0.0.1", unserved, mbps=1000.0, rtt_ms=1.0) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30.0) as near,
    ):
        assert near.recv(1) == b""


# ---- the claims ------------------------------------------------------------------------------


def a_cell(operation: str, size_bytes: int, in_flight: int, **seconds: tuple[float, ...]) -> Cell:
    """Of 10 operations in each round, which took so long."""
    taken = {
        OURS: (1.0, 1.0, 1.0),
        BOTO3: (2.5, 2.5, 2.5),
        HTTP_CLIENT: (1.0, 1.0, 1.0),
        **({URLLIB3: (1.5, 1.5, 1.5)} if operation == "PUT" else {}),
        **seconds,
    }
    return Cell(operation, size_bytes, in_flight, {n: [Timing(10, s, s / 2) for s in of] for n, of in taken.items()})


def test_the_floor_is_the_faster_raw_client() -> None:
    assert a_cell("PUT", 4 * MIB, 16).floor == HTTP_CLIENT
    assert a_cell("PUT", 4 * MIB, 16, urllib3=(0.9, 0.9, 0.9)).floor == URLLIB3
    assert a_cell("GET", 4 * MIB, 16).floor == HTTP_CLIENT


def test_ratios_are_taken_within_a_round() -> None:
    cell = a_cell("GET", 4 * MIB, 16, ours=(1.0, 2.0, 4.0), boto3=(2.0, 4.0, 8.0))
    assert cell.ratio(BOTO3) == spread_of([2.0, 2.0, 2.0])
    assert cell.mbps(OURS).median == pytest.approx(10 * 4 * MIB / 2.0 / 1e6)
    assert cell.cpu_ms(OURS) == pytest.approx(100.0)


def test_all_claims_hold_of_what_they_promise_and_other_cells_have_none() -> None:
    claimed = [a_cell("PUT", 4 * MIB, 16), a_cell("GET", 32 * MIB, 16), a_cell("GET", 64 << 10, 4)]
    unclaimed = [a_cell("PUT", 64 << 10, 16), a_cell("GET", 256 << 10, 16), a_cell("PUT", 32 * MIB, 4)]
    claims = list(claims_of([*claimed, *unclaimed]))
    assert len(claims) == 4
    assert all(claim.ok and claim.as_text().startswith("ok") for claim in claims)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (a_cell("PUT", 4 * MIB, 16, ours=(1.12, 1.12, 1.12)), "PUT of 4 MiB, 16 in flight: share of the floor"),
        (a_cell("GET", 32 * MIB, 16, ours=(1.12, 1.12, 1.12)), "GET of 32 MiB, 16 in flight: share of the floor"),
        (a_cell("PUT", 32 * MIB, 16, boto3=(1.5, 1.5, 1.5)), "PUT of 32 MiB, 16 in flight: multiple of boto3"),
        (a_cell("GET", 64 << 10, 1, boto3=(1.9, 1.9, 1.9)), "GET of 64 KiB, 1 in flight: multiple of boto3"),
    ],
)
def test_a_claim_fails_alone_when_its_figure_is_off(cell: Cell, says: str) -> None:
    failed = [claim for claim in claims_of([cell]) if not claim.ok]
    assert len(failed) == 1
    assert failed[0].as_text().startswith(f"FAILED  {says}")


def test_a_client_that_is_not_installed_leaves_its_columns_empty() -> None:
    table = table_of([a_cell("GET", 4 * MIB, 16)])
    column = next(column for column in table.columns if column.header == OBSTORE)
    assert list(column.cells) == ["-"]


# ---- the program -----------------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    without_aws = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "object_tier.py"), *arguments],
        capture_output=True,
        text=True,
        env={
            **without_aws,
            "PYTHONPATH": str(ROOT),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_CONFIG_FILE": os.devnull,
            **environment,
        },
        timeout=110,
        check=False,
    )


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key"}


def buckets(s3_endpoint: str) -> list[str]:
    import boto3.session

    client = boto3.session.Session().client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="an-access-key",
        aws_secret_access_key="a-secret-key",
    )
    names = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    client.close()
    return names


def test_a_tiny_run_times_every_client_in_every_cell_and_leaves_nothing_behind(
    s3_endpoint: str, tmp_path: Path
) -> None:
    before = buckets(s3_endpoint)
    figures = tmp_path / "figures.json"
    done = run("--tiny", "--claims", "--endpoint-url", s3_endpoint, "--json", str(figures), **CREDENTIALS)
    assert done.returncode == 0, done.stderr
    assert "Object store clients" in done.stdout
    document = json.loads(figures.read_text())
    cells = document["cells"]
    assert [(cell["size_bytes"], cell["operation"], cell["in_flight"]) for cell in cells] == [
        (size, operation, in_flight)
        for size in (64 << 10, 5 * MIB)
        for operation in ("PUT", "GET")
        for in_flight in (1, 2)
    ]
    for cell in cells:
        raw = {HTTP_CLIENT, URLLIB3} if cell["operation"] == "PUT" else {HTTP_CLIENT}
        assert set(cell["clients"]) == {OURS, BOTO3, OBSTORE, *raw}
        assert all(client["mbps"]["low"] > 0 and len(client["rounds"]) == 2 for client in cell["clients"].values())
        assert cell["over_floor"]["low"] <= cell["over_floor"]["median"] <= cell["over_floor"]["high"]
    assert document["machine"]["obstore"]
    assert buckets(s3_endpoint) == before
    assert "a-secret-key" not in done.stdout + done.stderr + figures.read_text()


def test_a_tiny_run_of_the_parts_has_both_paths_and_a_gain_beside_one_request(s3_endpoint: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("--tiny", "--parts", "--endpoint-url", s3_endpoint, "--json", str(figures), **CREDENTIALS)
    assert done.returncode == 0, done.stderr
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["path"], cell["operation"]) for cell in cells] == [
        (path, operation) for path in (STRAIGHT, LIMITED) for operation in ("PUT", "GET")
    ]
    for cell in cells:
        assert set(cell["gain"]) == ({"1", "2"} if cell["operation"] == "PUT" else {"1", "2", "4"})
        assert cell["gain"]["1"]["median"] == 1.0
        assert all(seconds["median"] > 0 for seconds in cell["seconds"].values())
    # 11 MiB at 1000 MB/s of one connection, and a round trip of 2 ms.
    limited = [cell["seconds"]["1"]["low"] for cell in cells if cell["path"] == LIMITED]
    assert all(seconds > 11 * MIB / 1e9 for seconds in limited)


def test_without_a_server_the_program_says_how_to_start_one() -> None:
    done = run("--tiny")
    assert done.returncode == 2
    assert not done.stdout
    assert "make rgw-start" in done.stderr


def test_without_credentials_the_program_says_so(s3_endpoint: str) -> None:
    done = run("--tiny", "--endpoint-url", s3_endpoint)
    assert done.returncode == 2
    assert "AWS_ACCESS_KEY_ID" in done.stderr


def test_the_options_are_explained() -> None:
    assert "--tiny" in run("--help").stdout
