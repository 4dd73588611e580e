"""What is concluded from measurements: the fit, the marks, the threads; and how an operation loop is timed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.connector.calibrate import Fit, Measurement, Suggestion, fit, make_plan, suggest
from kvsluice.connector.calibrate.closed_loop import Timed, in_window
from kvsluice.connector.calibrate.model import Kind
from kvsluice.connector.calibrate.plan import DEFAULT_CONCURRENCIES, MIN_CHUNK_BYTES, default_sizes
from kvsluice.connector.calibrate.suggestion import GOOD_SHARE, HIGH_MULTIPLE, LOW_MULTIPLE, TIMER_S
from kvsluice.connector.calibrate.units import format_pair, format_rate, format_seconds, format_size
from kvsluice.tiers.backpressure import EMABackpressureDetector
from kvsluice.tiers.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK = 4 * MIB
CELLS = [
    (cell.num_bytes, cell.concurrency)
    for cell in make_plan(CHUNK, sizes=None, concurrencies=DEFAULT_CONCURRENCIES, max_bytes=16 * GIB).cells
]
SMALLEST, LARGEST = min(CELLS), max(CELLS, key=lambda cell: cell[0] * cell[1])
NOISE = 0.05
# Derandomized where noise is drawn: such a claim holds for nearly all draws, and a run should not depend on which.

bandwidths = st.floats(math.log10(50e6), math.log10(50e9)).map(lambda power: 10.0**power)
fixed_costs = st.one_of(st.just(0.0), st.floats(0.0, 0.030))


class Model:
    """A tier whose operations take exactly what the model says, but for log-normal noise."""

    def __init__(
        self,
        bandwidth: float,
        fixed_s: float,
        *,
        stream: float = math.inf,
        noise: float = NOISE,
        seed: int = 0,
    ) -> None:
        self.bandwidth = bandwidth
        self.fixed_s = fixed_s
        self.stream = stream
        self.noise = noise
        self.random = random.Random(seed)

    def nominal_s(self, num_bytes: int, concurrency: int) -> float:
        return self.fixed_s + num_bytes * max(concurrency / self.bandwidth, 1 / self.stream)

    def operations(self, num_bytes: int, concurrency: int, count: int) -> list[float]:
        nominal_s = self.nominal_s(num_bytes, concurrency)
        return [nominal_s * self.random.lognormvariate(0, self.noise) for _ in range(count)]

    def measure(
        self, kind: Kind = "write", cells: Iterable[tuple[int, int]] = tuple(CELLS), count: int = 32
    ) -> list[Measurement]:
        found = []
        for num_bytes, concurrency in cells:
            seconds = self.operations(num_bytes, concurrency, count)
            found.append(Measurement(kind, num_bytes, concurrency, tuple(seconds), sum(seconds) / concurrency))
        return found

    def both(self) -> list[Measurement]:
        return self.measure("write") + self.measure("read")


def slower(cell: Measurement, factor: float) -> Measurement:
    seconds = tuple(value * factor for value in cell.seconds)
    return Measurement(cell.kind, cell.num_bytes, cell.concurrency, seconds, cell.wall_s * factor)


def transfer_share(model: Model) -> float:
    """What part of the largest cell's operation is transfer."""
    nominal_s = model.nominal_s(*LARGEST)
    return (nominal_s - model.fixed_s) / nominal_s


def assert_found(found: Fit, model: Model, *, fixed: float, bandwidth: float) -> None:
    """Fixed cost within a share of the shortest operation, bandwidth within a share where it can be told."""
    assert abs(found.fixed_cost_s - model.fixed_s) <= fixed * model.nominal_s(*SMALLEST)
    if transfer_share(model) >= 0.4:
        assert not found.bandwidth_is_bound
        assert found.bandwidth_bytes_per_s == pytest.approx(model.bandwidth, rel=bandwidth)
    if found.bandwidth_is_bound:
        assert found.bandwidth_bytes_per_s <= 1.2 * model.bandwidth


@given(bandwidth=bandwidths, fixed_s=fixed_costs, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_fit_finds_fixed_cost_and_bandwidth_where_they_matter(bandwidth, fixed_s, seed):
    model = Model(bandwidth, fixed_s, seed=seed)
    found = fit(model.measure())
    assert_found(found, model, fixed=0.15, bandwidth=0.15)
    for cell in CELLS:
        assert found.seconds(*cell) == pytest.approx(model.nominal_s(*cell), rel=0.2)


@given(bandwidth=bandwidths, fixed_s=fixed_costs)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_without_noise_the_fit_is_exact(bandwidth, fixed_s):
    model = Model(bandwidth, fixed_s, noise=0.0)
    found = fit(model.measure())
    assert found.fixed_cost_s == pytest.approx(fixed_s, abs=1e-6 * model.nominal_s(*SMALLEST))
    if not found.bandwidth_is_bound:
        assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
        assert found.stream_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)


@given(
    bandwidth=bandwidths,
    fixed_s=fixed_costs,
    at=st.integers(0, len(CELLS) - 1),
    factor=st.sampled_from([0.2, 5.0, 50.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_one_cell_that_is_far_off_does_no_harm(bandwidth, fixed_s, at, factor, seed):
    model = Model(bandwidth, fixed_s, seed=seed)
    cells = model.measure()
    cells[at] = slower(cells[at], factor)
    assert_found(fit(cells), model, fixed=0.25, bandwidth=0.25)


@given(stream=st.floats(20e6, 500e6), streams=st.sampled_from([2.5, 6.0, 12.0]), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_tier_whose_streams_are_bounded_keeps_its_fixed_cost(stream, streams, seed):
    model = Model(stream * streams, 0.010, stream=stream, seed=seed)
    found = fit(model.measure())
    assert found.fixed_cost_s == pytest.approx(0.010, rel=0.15)
    assert found.stream_bytes_per_s == pytest.approx(stream, rel=0.15)
    assert found.bandwidth_bytes_per_s == pytest.approx(model.bandwidth, rel=0.25)


def test_one_size_tells_the_fixed_cost_by_its_concurrencies():
    model = Model(1e9, 0.020, noise=0.0)
    found = fit(model.measure(cells=[(CHUNK, n) for n in (1, 2, 4)]))
    assert found.fixed_cost_s == pytest.approx(0.020)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9)


def test_one_cell_tells_no_fixed_cost():
    model = Model(1e9, 0.020, noise=0.0)
    found = fit(model.measure(cells=[(CHUNK, 1)]))
    assert found.fixed_cost_s == 0.0
    assert found.seconds(CHUNK, 1) == pytest.approx(model.nominal_s(CHUNK, 1))


def test_a_fit_takes_one_kind():
    with pytest.raises(ValueError, match=r"one kind, got \['read', 'write'\]"):
        fit(Model(1e9, 0.0).both())
    with pytest.raises(ValueError, match=r"one kind, got \[\]"):
        fit([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 0}, "at least 1"),
        ({"concurrency": 0}, "at least 1"),
        ({"seconds": ()}, "positive"),
        ({"seconds": (0.0,)}, "positive"),
        ({"seconds": (math.inf,)}, "positive"),
        ({"wall_s": -1.0}, "positive"),
    ],
)
def test_what_is_no_measurement_is_refused(change, message):
    good = {"kind": "write", "num_bytes": MIB, "concurrency": 2, "seconds": (1.0, 2.0), "wall_s": 1.5}
    Measurement(**good)
    with pytest.raises(ValueError, match=message):
        Measurement(**{**good, **change})


def test_a_measurement_tells_median_p99_and_throughput():
    cell = Measurement("read", MIB, 2, tuple(float(value) for value in range(200, 0, -1)), 100.0)
    assert (cell.median_s, cell.p99_s) == (100.5, 198.0)
    assert cell.bytes_per_s == 2 * MIB
    assert cell.turn_s == 1.0


# Marks.


def run_gate(model: Model, found: Suggestion, concurrency: int, count: int = 400) -> tuple[bool, float]:
    """Feed a detector with fresh operations: whether it ever was under pressure, and how often under the low mark."""
    gate = EMABackpressureDetector(found.high_water_s, found.low_water_s, clock=lambda: 0.0)
    pressed, low = False, 0
    for seconds in model.operations(CHUNK, concurrency, count):
        gate.on_store_completed(max(0.0, seconds - found.fixed_cost_s) / concurrency, CHUNK)
        pressed |= gate.is_under_pressure()
        low += gate.store_latency_ema < found.low_water_s
    return pressed, low / count


@given(bandwidth=bandwidths, fixed_s=fixed_costs, noise=st.sampled_from([0.05, 0.2]), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_healthy_tier_is_under_the_low_mark_and_never_over_the_high_one(bandwidth, fixed_s, noise, seed):
    model = Model(bandwidth, fixed_s, noise=noise, seed=seed)
    found = suggest(model.both(), CHUNK)
    assert 0 < found.low_water_s < found.high_water_s
    assert MIB / bandwidth < found.low_water_s
    for concurrency in {1, found.n_write_threads}:
        pressed, low = run_gate(model, found, concurrency)
        assert not pressed
        # Where a chunk's transfer drowns in the noise of the fixed cost, 32 operations tell the mean only so well.
        assert low >= (0.95 if CHUNK / bandwidth > noise * fixed_s else 0.5)


@given(bandwidth=st.floats(50e6, 5e9), fixed_s=st.floats(0.0, 0.010), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_tier_at_a_tenth_of_its_rate_is_over_the_high_mark(bandwidth, fixed_s, seed):
    model = Model(bandwidth, fixed_s, seed=seed)
    found = suggest(model.both(), CHUNK)
    slow = Model(bandwidth / 10, fixed_s, seed=seed)
    # Of a chunk that is nearly all fixed cost a tenth of the rate is no ten times the time.
    if CHUNK / bandwidth > fixed_s:
        pressed, low = run_gate(slow, found, found.n_write_threads)
        assert pressed
        # Of 400 the ten of the warm-up.
        assert low <= 0.025


@given(stream=st.floats(20e6, 500e6), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_one_stream_alone_on_a_tier_that_needs_many_is_healthy_too(stream, seed):
    model = Model(10 * stream, 0.005, stream=stream, seed=seed)
    found = suggest(model.both(), CHUNK)
    assert found.n_write_threads >= 8
    for concurrency in (1, 2, found.n_write_threads):
        assert run_gate(model, found, concurrency) == (False, 1.0)


def test_marks_are_multiples_of_the_healthy_sample():
    found = suggest(Model(MIB / 0.00123, 0.0, noise=0.0).both(), CHUNK)
    assert (found.low_water_s, found.high_water_s) == (0.0025, 0.0050)
    assert (LOW_MULTIPLE, HIGH_MULTIPLE) == (2.0, 4.0)


def test_marks_go_up_to_two_digits_and_not_when_they_have_them():
    found = suggest(Model(MIB / 0.0055, 0.0, noise=0.0).both(), CHUNK)
    assert (found.low_water_s, found.high_water_s) == (0.011, 0.022)
    found = suggest(Model(MIB / 0.00552, 0.0, noise=0.0).both(), CHUNK)
    assert (found.low_water_s, found.high_water_s) == (0.012, 0.023)


def test_marks_stay_above_what_a_timer_can_tell():
    found = suggest(Model(500e9, 0.0, noise=0.0).both(), CHUNK)
    assert found.low_water_s == pytest.approx(TIMER_S / 4, rel=0.1)
    assert found.high_water_s >= 2 * TIMER_S / 4
    assert any("least that can be told" in reason for reason in found.reasons)


def test_stalls_that_were_measured_widen_the_marks():
    model = Model(1e9, 0.0, noise=0.0)
    calm = suggest(model.both(), CHUNK)
    stalled = []
    for cell in model.measure():
        # One in eight takes twelve times as long.
        seconds = tuple(value * (12 if at % 8 == 0 else 1) for at, value in enumerate(cell.seconds))
        stalled.append(Measurement("write", cell.num_bytes, cell.concurrency, seconds, sum(seconds) / cell.concurrency))
    found = suggest(stalled + model.measure("read"), CHUNK)
    assert found.low_water_s > 2 * calm.low_water_s
    assert found.high_water_s > 2 * calm.high_water_s
    assert any("p99 is 12 x the median" in reason for reason in found.reasons)


def test_a_disturbed_cell_does_not_move_the_marks_and_is_told():
    cells = Model(1e9, 0.002, seed=1).both()
    calm = suggest(cells, CHUNK)
    at = next(at for at, cell in enumerate(cells) if (cell.num_bytes, cell.concurrency) == (CHUNK, 1))
    cells[at] = slower(cells[at], 20.0)
    found = suggest(cells, CHUNK)
    assert found.low_water_s == pytest.approx(calm.low_water_s, rel=0.2)
    assert found.high_water_s == pytest.approx(calm.high_water_s, rel=0.2)
    assert any("left out: writes with 1 at once" in reason for reason in found.reasons)


def test_every_figure_has_its_reason():
    found = suggest(Model(1e9, 0.002).both(), CHUNK)
    for key in ("fixed_cost_s", "low_water_s", "high_water_s", "n_write_threads", "n_read_threads"):
        assert sum(reason.startswith(f"{key} {getattr(found, key):g}: ") for reason in found.reasons) == 1
    assert all("\n" not in reason for reason in found.reasons)


# Threads.


def with_rates(kind: Kind, rates: dict[int, float]) -> list[Measurement]:
    return [Measurement(kind, CHUNK, n, (n * CHUNK / rate,) * 8, 8 * CHUNK / rate) for n, rate in rates.items()]


def test_threads_are_the_fewest_that_get_nearly_the_best_rate():
    writes = with_rates("write", {1: 50e6, 2: 96e6, 4: 100e6, 8: 99e6})
    reads = with_rates("read", {1: 50e6, 2: 94e6, 4: 100e6, 8: 90e6})
    found = suggest(writes + reads, CHUNK)
    assert GOOD_SHARE == 0.95
    assert (found.n_write_threads, found.n_read_threads) == (2, 4)
    assert found.read_bytes_per_s == pytest.approx(100e6)
    assert any("96% of the best (4 threads)" in reason for reason in found.reasons)


def test_where_more_threads_may_get_more_it_says_so():
    cells = with_rates("write", {1: 1e6, 2: 2e6}) + with_rates("read", {1: 1e6})
    reasons = suggest(cells, CHUNK).reasons
    assert any(reason.startswith("n_write_threads 2") and "more may get more" in reason for reason in reasons)
    assert any(reason.startswith("n_read_threads 1") and "only this was measured" in reason for reason in reasons)


def test_a_size_that_was_not_measured_is_taken_from_the_nearest():
    found = suggest(Model(1e9, 0.002).both(), 6 * MIB)
    assert any("chunks of 6 MiB were not measured: taken from 4 MiB" in reason for reason in found.reasons)


@pytest.mark.parametrize(("kind", "missing"), [("write", "read"), ("read", "write")])
def test_without_one_kind_nothing_is_suggested(kind, missing):
    with pytest.raises(ValueError, match=f"no measurement of a {missing}"):
        suggest(Model(1e9, 0.0).measure(kind), CHUNK)


# The plan.


def test_the_default_plan_fits_its_bound_and_measures_chunks_at_every_concurrency():
    plan = make_plan(CHUNK, sizes=None, concurrencies=DEFAULT_CONCURRENCIES, max_bytes=4 * GIB)
    assert plan.left_out == ()
    assert sum(cell.moved_bytes for cell in plan.cells) <= 4 * GIB
    assert [cell.concurrency for cell in plan.cells if cell.num_bytes == CHUNK] == list(DEFAULT_CONCURRENCIES)
    assert {cell.num_bytes for cell in plan.cells} == {64 * KIB, 256 * KIB, MIB, CHUNK, 16 * MIB}
    assert all(cell.num_ops >= 32 for cell in plan.cells if cell.num_bytes <= CHUNK)


@given(
    chunk=st.integers(MIN_CHUNK_BYTES, 50 * MIB),
    max_bytes=st.integers(MIB, 8 * GIB),
    threads=st.sets(st.integers(1, 40), min_size=1, max_size=5),
)
def test_no_plan_exceeds_its_bytes_and_what_it_leaves_out_is_told(chunk, max_bytes, threads):
    try:
        plan = make_plan(chunk, sizes=None, concurrencies=sorted(threads), max_bytes=max_bytes)
    except ConfigError as error:
        least = int(str(error).rpartition("at least ")[2])
        make_plan(chunk, sizes=None, concurrencies=sorted(threads), max_bytes=least)
        with pytest.raises(ConfigError):
            make_plan(chunk, sizes=None, concurrencies=sorted(threads), max_bytes=least - 1)
        return
    assert sum(cell.moved_bytes for cell in plan.cells) <= max_bytes
    assert all(cell.num_ops >= cell.min_ops for cell in plan.cells)
    assert (plan.cells[0].num_bytes, plan.cells[0].concurrency) == (chunk, min(threads))
    chunks = {cell.concurrency for cell in (*plan.cells, *plan.left_out) if cell.num_bytes == chunk}
    assert chunks == threads


def test_the_chunk_size_takes_the_place_of_the_sizes_near_to_it():
    assert default_sizes(3 * MIB) == (64 * KIB, 256 * KIB, MIB, 3 * MIB, 16 * MIB)
    assert default_sizes(256 * KIB) == default_sizes(CHUNK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [4096]}, "4096 bytes: a chunk file has at least 8192"),
        ({"concurrencies": []}, "give at least one"),
        ({"concurrencies": [0, 1]}, "from 1 on"),
        ({"concurrencies": [1000]}, "1000 chunks of 4 MiB at once"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(CHUNK, **{"sizes": None, "concurrencies": [1], "max_bytes": GIB, **arguments})


# The window of a loop. Each device is driven as a closed loop is: a stream's next operation starts as its last ends.


def fifo(streams: int, count: int) -> list[Timed]:
    """A device that serves one operation a second, first come, first served."""
    started = [0.0] * streams
    ends = []
    for number in range(count):
        at = number % streams
        ends.append(Timed(number + 1.0, started[at]))
        started[at] = number + 1.0
    return ends


def shared(streams: int, count: int) -> list[Timed]:
    """A device whose bandwidth, of one operation a second, is shared by all that are under way."""
    return [Timed((turn + 1.0) * streams, float(turn * streams)) for turn in range(count) for _ in range(streams)]


def independent(streams: int, count: int) -> list[Timed]:
    """Operations that know nothing of each other, each stream with a pace of its own, one a second together."""
    paces = [streams * (0.5 + (at + 0.5) / streams) for at in range(streams)]
    scale = sum(1 / pace for pace in paces)
    return [Timed((turn + 1) * pace * scale, turn * pace * scale) for pace in paces for turn in range(count)]


@pytest.mark.parametrize("device", [fifo, shared, independent])
@pytest.mark.parametrize("streams", [1, 2, 8, 16])
def test_a_window_tells_the_rate_of_the_device_whatever_its_order_of_service(device, streams):
    timed = device(streams, 40 * streams)
    seconds, wall_s = in_window(timed, streams, 32)
    assert len(seconds) == 32
    # A device of one operation a second.
    assert 32 / wall_s == pytest.approx(1.0, rel=0.1)


def test_a_thread_that_does_not_get_to_run_does_not_raise_the_rate():
    # Two threads that take turns of ten operations on one core: never both at once.
    first = [Timed(at + 1.0, float(at)) for at in (*range(10), *range(20, 30))]
    second = [Timed(at + 1.0, float(at)) for at in (*range(10, 20), *range(30, 40))]
    _, wall_s = in_window(first + second, 2, 32)
    assert 32 / wall_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_seconds(12.34), "12.3 s"),
        (format_seconds(0.0021), "2.1 ms"),
        (format_seconds(0.00099999), "1 ms"),
        (format_seconds(35e-6), "35 us"),
        (format_pair(0.0004, 0.123), "0.4/123 ms"),
        (format_size(CHUNK), "4 MiB"),
        (format_size(1023.9 * KIB), "1 MiB"),
        (format_rate(1.5 * GIB), "1.5 GiB/s"),
        (format_rate(123.4 * MIB), "123 MiB/s"),
    ],
)
def test_figures_have_three_digits_and_a_unit(shown, expected):
    assert shown == expected
