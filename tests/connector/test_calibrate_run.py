"""How a tier is measured: on a virtual clock, on a folder, on a bucket; and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles import PATIENCE_S, Clock, Hold, MemoryTier
from safetensors.torch import load as load_safetensors

from kvsluice.connector import OffloadConfig
from kvsluice.connector.calibrate import (
    Calibration,
    Meter,
    Options,
    Outcome,
    Plan,
    calibrate,
    fit,
    make_plan,
    place,
    suggest,
)
from kvsluice.connector.calibrate.closed_loop import HANG_S
from kvsluice.connector.calibrate.measure import MAX_FAILED, TIME_IS_UP, TOO_MANY_BYTES
from kvsluice.connector.calibrate.place import open_place
from kvsluice.connector.config import AnyTierConfig
from kvsluice.tiers import FileSystemTier, ObjectTier, reasons
from kvsluice.tiers.errors import ChunkDamagedError, ConfigError, SluiceError, TierUnavailableError
from kvsluice.tiers.fs_tree import fan_out

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL = Options(chunk_bytes=64 * KIB, sizes=[16 * KIB], concurrencies=[1, 2], max_bytes=32 * MIB)


def meter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvsluice-calibrate-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in meter_threads():
        thread.join(PATIENCE_S)
    assert meter_threads() == []


class VirtualTier(MemoryTier):
    """Takes virtual time: a fixed cost that passes for all at once, then a bandwidth that all share.

    The clock moves when every thread of the meter is inside, as threads are real and time is not.
    """

    def __init__(self, clock: Clock, *, fixed_s: float, bytes_per_s: float) -> None:
        super().__init__("virtual")
        self.clock = clock
        self.fixed_s = fixed_s
        self.bytes_per_s = bytes_per_s
        self.most_bytes = 0
        self._inside: list[list[float]] = []
        self._moved = threading.Condition()

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        written = super().store(key, buffer, num_bytes)
        self.most_bytes = max(self.most_bytes, sum(map(len, list(self.images.values()))))
        self._pass(num_bytes)
        return written

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        loaded = super().load(key, buffer, num_bytes)
        self._pass(num_bytes)
        return loaded

    def _pass(self, num_bytes: int) -> None:
        mine = [self.fixed_s, float(num_bytes)]
        with self._moved:
            self._inside.append(mine)
            while mine in self._inside:
                if len(self._inside) == len(meter_threads()):
                    self._advance()
                else:
                    self._moved.wait(0.0005)

    def _advance(self) -> None:
        """To the next moment at which a fixed cost or a transfer ends."""
        sharing = sum(fixed <= 0 for fixed, _ in self._inside)
        rate = self.bytes_per_s / max(1, sharing)
        step_s = min(fixed if fixed > 0 else left / rate for fixed, left in self._inside)
        self.clock.advance(step_s)
        for one in self._inside:
            if one[0] > 0:
                one[0] = one[0] - step_s if one[0] - step_s > 1e-12 else 0.0
            else:
                one[1] -= step_s * rate
        self._inside = [one for one in self._inside if one[0] > 0 or one[1] > 1e-3]
        self._moved.notify_all()


def plan_of(**changes: object) -> Plan:
    arguments = {"sizes": [64 * KIB], "concurrencies": [1, 2, 4], "max_bytes": GIB, **changes}
    return make_plan(int(arguments.pop("chunk_bytes", MIB)), **arguments)


def meter_of(tier: MemoryTier, clock: Callable[[], float], plan: Plan | None = None, **changes: object) -> Meter:
    return Meter(tier, plan or plan_of(), clock=clock, **{"max_seconds": 1e6, "space_bytes": GIB, **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(clock: Clock) -> VirtualTier:
    return VirtualTier(clock, fixed_s=0.010, bytes_per_s=100e6)


def measured(outcomes: tuple[Outcome, ...], kind: str) -> list:
    return [outcome.measurement for outcome in outcomes if outcome.kind == kind and outcome.measurement]


@pytest.mark.parametrize("kind", ["write", "read"])
def test_the_model_of_a_tier_comes_back_from_measuring_it(tier, clock, kind):
    outcomes = meter_of(tier, clock).run()
    cells = measured(outcomes, kind)
    assert [(cell.num_bytes, cell.concurrency) for cell in cells] == [
        (MIB, 1),
        (64 * KIB, 1),
        (MIB, 2),
        (MIB, 4),
        (64 * KIB, 2),
        (64 * KIB, 4),
    ]
    for cell in cells:
        expected_s = 0.010 + cell.concurrency * cell.num_bytes / 100e6
        assert cell.seconds == pytest.approx([expected_s] * len(cell.seconds))
        assert cell.bytes_per_s == pytest.approx(cell.concurrency * cell.num_bytes / expected_s)
    found = fit(cells)
    assert found.fixed_cost_s == pytest.approx(0.010)
    assert found.bandwidth_bytes_per_s == pytest.approx(100e6)
    assert tier.count("store") > sum(len(cell.seconds) for cell in cells)


def test_what_is_suggested_for_a_virtual_tier_is_what_the_model_says(tier, clock):
    outcomes = meter_of(tier, clock).run()
    found = suggest([*measured(outcomes, "write"), *measured(outcomes, "read")], MIB)
    assert found.fixed_cost_s == 0.010
    assert found.low_water_s == pytest.approx(2 * MIB / 100e6, rel=0.1)
    assert found.high_water_s == pytest.approx(4 * MIB / 100e6, rel=0.1)
    # 1 MiB in 10 + 10.5, in 10 + 21, in 10 + 42 ms for 1, 2 and 4: 49, 65 and 81 % of the bandwidth.
    assert found.n_write_threads == 4


def test_every_image_is_a_valid_chunk_file_of_the_size_that_is_measured(tier, clock):
    images: dict[int, bytes] = {}
    clear = tier.clear

    def keep() -> int:
        images.update({len(image): image for image in tier.images.values()})
        return clear()

    tier.clear = keep
    meter_of(tier, clock, plan_of(concurrencies=[1])).run()
    tier.clear()
    assert set(images) == {8 * KIB, 64 * KIB, MIB}
    for size, image in images.items():
        (tensor,) = load_safetensors(image).values()
        assert tensor.numel() == size - 4096


def test_keys_fall_into_few_folders_all_made_in_the_warm_up(tier, clock):
    meter_of(tier, clock).run()
    stored = [name for call, name in zip(tier.calls, tier.names, strict=True) if call == "store"]
    assert len({fan_out(name) for name in stored}) <= 32
    assert len(stored) > 300


def test_bytes_and_space_stay_within_their_bounds(tier, clock):
    plan = plan_of(max_bytes=80 * MIB)
    assert plan.left_out
    meter = meter_of(tier, clock, plan, space_bytes=0)
    outcomes = meter.run()
    assert 0 < meter.moved_bytes <= 80 * MIB
    assert tier.most_bytes <= plan.space_bytes
    left_out = {(outcome.num_bytes, outcome.concurrency) for outcome in outcomes if outcome.missing == TOO_MANY_BYTES}
    assert left_out == {(cell.num_bytes, cell.concurrency) for cell in plan.left_out}


def test_when_the_time_is_up_the_cells_that_were_not_measured_are_told(tier, clock):
    started_s = clock()
    outcomes = meter_of(tier, clock, max_seconds=1.5).run()
    assert clock() - started_s <= 1.5 + 2 * 0.052
    missing = [outcome for outcome in outcomes if outcome.measurement is None]
    assert missing
    assert {outcome.missing for outcome in missing} == {TIME_IS_UP}
    # The most telling come first: one thread, then chunks.
    done = [(outcome.num_bytes, outcome.concurrency) for outcome in outcomes if outcome.measurement]
    assert done[:4] == [(MIB, 1), (MIB, 1), (64 * KIB, 1), (64 * KIB, 1)]


def test_a_cell_gives_way_once_it_has_enough_and_its_share_of_the_time_is_over(tier, clock):
    outcomes = meter_of(tier, clock, max_seconds=6.0).run()
    assert all(outcome.measurement is not None for outcome in outcomes)
    counts = [len(outcome.measurement.seconds) for outcome in outcomes]
    assert min(counts) >= 8
    assert counts[0] < 32


def test_progress_is_told_step_by_step_from_nothing_to_all(tier, clock):
    steps = []
    meter_of(tier, clock, plan_of(concurrencies=[1, 2]), on_progress=steps.append).run()
    assert [step.done for step in steps] == [0, *range(8), 8]
    assert {step.total for step in steps} == {8}
    assert [step.kind for step in steps[1:3]] == ["write", "read"]
    assert (steps[0].kind, steps[-1].kind) == (None, None)


def full() -> TierUnavailableError:
    return TierUnavailableError("virtual: no room", reason=reasons.DISK_FULL)


def test_a_cell_that_fails_is_told_and_the_others_are_measured(tier, clock):
    step = iter(range(100))

    def fail_in_the_second(progress) -> None:
        if next(step) == 3:
            tier.fail("store", full())

    outcomes = meter_of(tier, clock, on_progress=fail_in_the_second).run()
    missing = [outcome for outcome in outcomes if outcome.measurement is None]
    assert [(outcome.kind, outcome.missing) for outcome in missing] == [
        ("write", "virtual: no room"),
        ("read", "virtual: no room"),
    ]
    assert len(outcomes) == 12


def test_a_tier_that_goes_on_failing_ends_the_run(tier, clock):
    steps = []

    def fail_from_now_on(progress) -> None:
        steps.append(progress)
        if len(steps) == 2:
            tier.fail_always("store", full())

    with pytest.raises(TierUnavailableError, match="no room"):
        meter_of(tier, clock, on_progress=fail_from_now_on).run()
    writes = [step for step in steps if step.kind == "write"]
    assert len(writes) == MAX_FAILED + 1


def test_a_tier_that_fails_at_once_ends_the_run_in_the_warm_up(tier, clock):
    tier.fail_always("store", full())
    with pytest.raises(TierUnavailableError, match="no room"):
        meter_of(tier, clock).run()


def test_other_bytes_than_were_stored_end_the_run(tier, clock):
    tier_load = tier.load

    def flip(key: bytes, buffer: memoryview, num_bytes: int) -> int:
        loaded = tier_load(key, buffer, num_bytes)
        buffer[num_bytes - 1] ^= 1
        return loaded

    tier.load = flip
    with pytest.raises(ChunkDamagedError, match="checksum"):
        meter_of(tier, clock).run()


def test_a_load_that_reads_nothing_is_no_load(tier, clock):
    tier.load = lambda key, buffer, num_bytes: num_bytes
    ticks = iter(range(10**9))
    with pytest.raises(ChunkDamagedError):
        meter_of(tier, lambda: clock() + next(ticks) * 1e-6).run()


def test_a_tier_that_hangs_is_given_up_and_its_threads_end_when_it_comes_back(clock):
    tier = MemoryTier("hung")
    hold = Hold()
    store = tier.store

    def hang(key: bytes, buffer: memoryview, num_bytes: int) -> int:
        hold()
        return store(key, buffer, num_bytes)

    tier.store = hang
    ticks = iter(range(10**9))
    try:
        with pytest.raises(TierUnavailableError, match=rf"not come back within {HANG_S:g} s"):
            # Every look at the clock takes two seconds.
            meter_of(tier, lambda: 2.0 * next(ticks), max_seconds=10.0).run()
    finally:
        hold.open()


# The whole, on a folder.


def folder(root: Path, **keys: object) -> AnyTierConfig:
    return OffloadConfig.from_dict({"tiers": [{"type": "fs", "root_dir": str(root), **keys}]}).tiers[0]


@pytest.fixture(scope="module")
def measured_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    root = tmp_path_factory.mktemp("measured")
    (root / "mine").write_text("stays")
    return root, calibrate(folder(root), SMALL)


def test_a_folder_is_measured_and_left_as_it_was(measured_folder):
    root, found = measured_folder
    assert [path.name for path in root.rglob("*")] == ["mine"]
    assert all(outcome.measurement is not None for outcome in found.outcomes)
    assert found.left_behind == ()
    assert 0 < found.moved_bytes <= SMALL.max_bytes
    assert found.target == str(root)
    assert found.direct in (True, False)
    assert ("with direct I/O" in found.reads) == found.direct or "memory" in found.reads


def test_the_snippet_is_a_tier_that_the_configuration_accepts(measured_folder):
    root, found = measured_folder
    tier = OffloadConfig.from_dict({"tiers": [found.snippet]}).tiers[0]
    assert tier.n_write_threads == found.suggestion.n_write_threads
    assert tier.n_read_threads == found.suggestion.n_read_threads
    assert found.snippet == {
        "type": "fs",
        "root_dir": str(root),
        "n_read_threads": tier.n_read_threads,
        "n_write_threads": tier.n_write_threads,
        "backpressure": {
            "high_water_s": found.suggestion.high_water_s,
            "low_water_s": found.suggestion.low_water_s,
            "fixed_cost_s": found.suggestion.fixed_cost_s,
        },
    }


def test_the_document_is_json_and_holds_every_cell(measured_folder):
    _, found = measured_folder
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert len(document["grid"]) == len(found.outcomes) == 8
    assert {cell["kind"] for cell in document["grid"]} == {"write", "read"}
    assert all(cell["operations"] >= 8 and cell["bytes_per_s"] > 0 for cell in document["grid"])
    assert document["snippet"] == found.snippet
    assert document["suggestion"]["reasons"] == list(found.suggestion.reasons)
    assert set(document["fit"]) == {"write", "read"}


def test_a_configured_gate_keeps_what_is_not_measured(tmp_path):
    own = {"cooldown_s": 3.0, "high_water_s": 9.0, "detector_args": {"low_water_s": 1.0, "alpha": 0.5}}
    found = calibrate(folder(tmp_path, name="nvme", capacity="1GiB", backpressure=own), SMALL)
    gate = found.snippet["backpressure"]
    assert gate["cooldown_s"] == 3.0
    assert gate["detector_args"] == {"alpha": 0.5}
    assert gate["high_water_s"] == found.suggestion.high_water_s
    assert (found.snippet["name"], found.snippet["capacity"]) == ("nvme", GIB)
    OffloadConfig.from_dict({"tiers": [found.snippet]})


def test_a_gate_of_another_class_is_replaced_as_the_marks_are_not_its(tmp_path):
    found = calibrate(folder(tmp_path), SMALL, detector="my.own.Detector")
    assert found.snippet["backpressure"]["backpressure_cls"] == "EMABackpressureDetector"
    OffloadConfig.from_dict({"tiers": [found.snippet]})


def test_direct_io_that_is_switched_off_is_said(tmp_path):
    found = calibrate(folder(tmp_path, direct_io="off"), SMALL)
    assert found.direct is False
    assert "page cache" in found.reads or "memory" in found.reads
    assert found.snippet["direct_io"] == "off"


class Stop(BaseException):
    """As an interrupt is: no `Exception`."""


@pytest.mark.parametrize("error", [full(), Stop(), RuntimeError("a bug")])
def test_an_error_in_mid_run_leaves_nothing(tmp_path, monkeypatch, error):
    store = FileSystemTier.store
    calls = iter(range(10**9))

    def fail(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        if next(calls) > 200 and not isinstance(error, Stop):
            raise error
        return store(self, key, buffer, num_bytes)

    def stop(progress) -> None:
        if progress.done == 3:
            assert list(tmp_path.iterdir()) != []
            if isinstance(error, Stop):
                raise error

    monkeypatch.setattr(FileSystemTier, "store", fail)
    with pytest.raises(type(error)):
        calibrate(folder(tmp_path), SMALL, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_operations_are_under_way_leaves_nothing(tmp_path, monkeypatch):
    store = FileSystemTier.store
    calls = iter(range(10**9))

    def interrupt(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        if next(calls) == 150:
            os.kill(os.getpid(), signal.SIGINT)
        return store(self, key, buffer, num_bytes)

    monkeypatch.setattr(FileSystemTier, "store", interrupt)
    with pytest.raises(KeyboardInterrupt):
        # Long enough for the signal to arrive in the middle of a cell.
        calibrate(folder(tmp_path), Options(chunk_bytes=MIB, sizes=[], concurrencies=[2], max_bytes=2 * GIB))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "not permitted", str(path))

    monkeypatch.setattr(place.shutil, "rmtree", refuse)
    found = calibrate(folder(tmp_path), SMALL)
    (left,) = found.left_behind
    assert str(next(tmp_path.iterdir())) in left
    assert "not permitted" in left
    assert left in caplog.text
    assert found.suggestion.n_write_threads >= 1


def test_a_folder_of_a_killed_run_is_named(tmp_path, caplog):
    (tmp_path / ".kvsluice-calibrate-12345678").mkdir()
    calibrate(folder(tmp_path), SMALL)
    assert f"{tmp_path}/.kvsluice-calibrate-12345678: of a run that is under way or was killed" in caplog.text


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        calibrate(folder(tmp_path / "typo"), SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="there is no folder"):
        calibrate(folder(tmp_path / "file"), SMALL)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if ".kvsluice-calibrate-" in self.name:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: .*Permission denied"):
        calibrate(folder(tmp_path), SMALL)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused_with_both_figures(tmp_path, monkeypatch):
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    monkeypatch.setattr(place, "reserve_of", lambda status: free - 5 * MIB)
    with pytest.raises(ConfigError, match=r"too little space: .* MiB are free .*, 10 MiB are needed"):
        calibrate(folder(tmp_path), Options(chunk_bytes=MIB, sizes=[], concurrencies=[1], max_bytes=20 * MIB + 2 * MIB))
    assert list(tmp_path.iterdir()) == []


def test_a_host_tier_is_refused():
    tier = OffloadConfig.from_dict({"tiers": [{"type": "host", "capacity": "1GiB"}]}).tiers[0]
    with pytest.raises(ConfigError, match="'host': fs and obj tiers are measured"):
        calibrate(tier, SMALL)


def test_time_that_allows_nothing_is_an_error_of_the_run_or_of_use(tmp_path):
    with pytest.raises(ConfigError, match="max_seconds is 0"):
        Options(max_seconds=0)
    ticks = iter(range(10**9))
    with pytest.raises(SluiceError, match=r"not one write could be measured within 5 s: the time was up"):
        calibrate(folder(tmp_path), Options(chunk_bytes=64 * KIB, max_seconds=5.0), clock=lambda: float(next(ticks)))
    assert list(tmp_path.iterdir()) == []


def test_the_place_takes_no_part_in_the_capacity_of_the_tier(tmp_path):
    with open_place(folder(tmp_path, capacity=4096), space_bytes=MIB, connections=1) as found:
        assert found.tier.store(b"k" * 36, memoryview(bytearray(65536)), 65536) == 65536
        assert found.space_bytes >= MIB
    assert list(tmp_path.iterdir()) == []


# On a bucket.


@pytest.fixture
def bucket(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AnyTierConfig, Callable[[], list[str]]]]:
    """A tier on a bucket with a stranger's object in it, and what keys the bucket has."""
    import boto3.session

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    client = boto3.session.Session().client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="calibrated")
    client.put_object(Bucket="calibrated", Key="team-a/mine", Body=b"stays")
    config = {"type": "obj", "bucket": "calibrated", "prefix": "team-a", "endpoint_url": s3_endpoint}

    def keys() -> list[str]:
        return [entry["Key"] for entry in client.list_objects_v2(Bucket="calibrated").get("Contents", ())]

    yield OffloadConfig.from_dict({"tiers": [config]}).tiers[0], keys
    for key in keys():
        client.delete_object(Bucket="calibrated", Key=key)
    client.delete_bucket(Bucket="calibrated")
    client.close()


TINY = Options(chunk_bytes=64 * KIB, sizes=[16 * KIB], concurrencies=[1, 2], max_bytes=8 * MIB, max_seconds=5.0)


def test_a_bucket_is_measured_and_left_as_it_was(bucket):
    tier, keys = bucket
    found = calibrate(tier, TINY)
    assert keys() == ["team-a/mine"]
    assert found.left_behind == ()
    assert found.direct is None
    assert found.target.startswith("s3://calibrated/team-a at http://")
    assert OffloadConfig.from_dict({"tiers": [found.snippet]}).tiers[0].bucket == "calibrated"


def test_an_interrupt_leaves_the_bucket_as_it_was(bucket):
    tier, keys = bucket

    def stop(progress) -> None:
        if progress.done == 1:
            assert len(keys()) > 1
            raise Stop

    with pytest.raises(Stop):
        calibrate(tier, TINY, on_progress=stop)
    assert keys() == ["team-a/mine"]


def test_objects_that_cannot_be_removed_are_named(bucket, monkeypatch, caplog):
    tier, _ = bucket
    clears = iter([ObjectTier.clear])

    def clear(self: ObjectTier) -> int:
        for first in clears:
            return first(self)
        raise TierUnavailableError("obj: could not list", reason=reasons.IO_ERROR)

    monkeypatch.setattr(ObjectTier, "clear", clear)
    (left,) = calibrate(tier, TINY).left_behind
    assert left.startswith("s3://calibrated/team-a/kvsluice-calibrate-")
    assert left.endswith("/: obj: could not list")
    assert left in caplog.text


def test_no_such_bucket_is_refused_by_name(s3_endpoint, monkeypatch):
    keys = {"access_key": "test-access", "secret_key": "very-secret"}
    config = {"type": "obj", "bucket": "not-there", "endpoint_url": s3_endpoint, **keys}
    tier = OffloadConfig.from_dict({"tiers": [config]}).tiers[0]
    with pytest.raises(ConfigError, match=r"bucket 'not-there' at http://.* does not exist"):
        calibrate(tier, TINY)


def test_secrets_do_not_reach_the_snippet(s3_endpoint, bucket):
    tier, _ = bucket
    keys = {"access_key": "test-access", "secret_key": "very-secret", "session_token": "session-secret"}
    config = {**tier.model_dump(exclude_unset=True), **keys}
    found = calibrate(OffloadConfig.from_dict({"tiers": [config]}).tiers[0], TINY)
    text = json.dumps(found.document())
    assert "secret" not in text
    assert "test-access" not in text
