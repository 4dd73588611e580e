"""How a chunk is cut, who carries the parts, and the trial of whether that is faster."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.tiers.obj.parts import MIN_PART_BYTES, PartCrew, Trial, cut

MIB = 1 << 20


@given(st.integers(1, 1 << 31), st.integers(MIN_PART_BYTES // 2, 1 << 28), st.integers(-3, 40))
def test_spans_cover_all_bytes_once_in_order_and_none_is_too_small(num_bytes, part_bytes, most_parts):
    spans = cut(num_bytes, part_bytes, most_parts)
    assert spans[0][0] == 0
    assert spans[-1][1] == num_bytes
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    lengths = [end - start for start, end in spans]
    assert min(lengths) > 0
    assert all(length >= min(part_bytes, num_bytes) for length in lengths[:-1])
    assert len(spans) <= max(1, min(most_parts, 8))
    assert max(lengths) - lengths[0] == 0


@pytest.mark.parametrize(
    ("num_bytes", "most_parts", "lengths"),
    [
        (15 * MIB, 8, [15 * MIB]),
        (16 * MIB, 8, [8 * MIB, 8 * MIB]),
        (16 * MIB, 1, [16 * MIB]),
        (16 * MIB, 0, [16 * MIB]),
        (16 * MIB, -5, [16 * MIB]),
        (32 * MIB, 3, [11186176, 11186176, 11182080]),
        (1024 * MIB, 40, [128 * MIB] * 8),
        (16 * MIB + 1, 8, [8 * MIB + 4096, 8 * MIB - 4095]),
    ],
)
def test_a_chunk_is_cut_in_about_equal_parts_at_whole_pages(num_bytes, most_parts, lengths):
    assert [end - start for start, end in cut(num_bytes, 8 * MIB, most_parts)] == lengths


# Trial


def run(trial, count, *, whole_s, parts_s):
    """Move `count` chunks of a MiB that take so long; how many went in parts."""
    ways = []
    for _ in range(count):
        in_parts = trial.wants_parts()
        trial.moved(MIB, parts_s if in_parts else whole_s, in_parts=in_parts)
        ways.append(in_parts)
    return ways


@pytest.mark.parametrize(("setting", "in_parts"), [("on", True), ("off", False)])
def test_a_setting_is_obeyed_whatever_is_faster(setting, in_parts):
    slow_one = {"whole_s": 0.1, "parts_s": 1.0} if in_parts else {"whole_s": 1.0, "parts_s": 0.1}
    assert run(Trial(setting), 100, **slow_one) == [in_parts] * 100


def test_both_ways_are_tried_first():
    assert set(run(Trial("auto"), 2, whole_s=1, parts_s=1)) == {True, False}


@pytest.mark.parametrize(("parts_s", "better"), [(0.5, True), (0.82, True), (0.85, False), (1.0, False), (2.0, False)])
def test_the_faster_way_is_taken_and_parts_have_to_gain_a_fifth(parts_s, better):
    ways = run(Trial("auto"), 320, whole_s=1.0, parts_s=parts_s)[32:]
    assert ways.count(not better) == 9
    assert ways.count(better) == 288 - 9


def test_the_slower_way_is_tried_again_and_wins_when_it_has_become_faster():
    trial = Trial("auto")
    assert run(trial, 319, whole_s=1.0, parts_s=2.0)[-1] is False
    after = run(trial, 32 * 12, whole_s=1.0, parts_s=0.2)
    assert after[-32:].count(True) >= 31


def test_while_one_way_has_no_figure_yet_both_go_on_being_tried():
    trial = Trial("auto")
    trial.moved(MIB, 1.0, in_parts=False)
    assert [trial.wants_parts() for _ in range(6)].count(True) == 3


def test_a_chunk_that_took_no_time_is_no_figure():
    trial = Trial("auto")
    trial.moved(MIB, 0.0, in_parts=True)
    assert trial.bytes_per_s == {}


def test_figures_are_smoothed():
    trial = Trial("auto")
    trial.moved(100, 1.0, in_parts=False)
    trial.moved(200, 1.0, in_parts=False)
    trial.moved(300, 1.0, in_parts=True)
    assert trial.bytes_per_s == {"whole": 125.0, "parts": 300.0}


# The crew


@pytest.fixture
def make_crew(wait_until):
    crews = []

    def make(threads):
        crews.append(PartCrew(threads, "crew"))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()
    wait_until(lambda: crew_threads() == [])


@pytest.fixture
def crew(make_crew):
    return make_crew(4)


def crew_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvsluice-crew-part")]


SPANS = [(at, at + 1) for at in range(4)]


def test_what_was_carried_comes_back_in_order(crew):
    assert crew.run_all(lambda span: span[0] * 10, SPANS) == [0, 10, 20, 30]


def test_parts_are_carried_side_by_side(crew):
    together = threading.Barrier(4)
    crew.run_all(lambda span: together.wait(5), SPANS)


def test_one_part_needs_no_thread(crew):
    assert crew.run_all(lambda span: threading.current_thread(), SPANS[:1]) == [threading.current_thread()]
    assert crew_threads() == []


@pytest.mark.parametrize("failing", range(4))
def test_it_comes_back_only_when_all_have_ended(crew, failing):
    failed = threading.Event()
    ended = []

    def carry(span):
        if span[0] == failing:
            failed.set()
            raise ValueError(f"part {failing}")
        failed.wait(5)
        threading.Event().wait(0.02)
        ended.append(span[0])

    with pytest.raises(ValueError, match=f"part {failing}"):
        crew.run_all(carry, SPANS)
    assert sorted(ended) == [at for at in range(4) if at != failing]


def test_of_several_failures_the_first_parts_is_told(crew):
    def carry(span):
        if span[0]:
            raise ValueError(f"part {span[0]}")

    with pytest.raises(ValueError, match="part 1"):
        crew.run_all(carry, SPANS)


def test_parts_that_no_thread_has_time_for_are_carried_by_the_caller(make_crew, wait_until):
    crew = make_crew(1)
    hold = threading.Event()
    busy = threading.Thread(target=crew.run_all, args=(lambda span: hold.wait(5), SPANS[:2]), daemon=True)
    busy.start()
    try:
        wait_until(lambda: len(crew_threads()) == 1)
        # The crew's one thread is taken: nobody else could.
        assert crew.run_all(lambda span: threading.current_thread(), SPANS) == [threading.current_thread()] * 4
    finally:
        hold.set()
        busy.join(5)
    assert not busy.is_alive()


def test_many_callers_share_a_small_crew_and_all_get_their_own(crew):
    found = {}

    def ask(caller):
        found[caller] = crew.run_all(lambda span: (caller, span[0]), SPANS)

    callers = [threading.Thread(target=ask, args=(caller,)) for caller in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(5)
    assert found == {caller: [(caller, at) for at in range(4)] for caller in range(16)}


def test_after_the_end_no_thread_is_left_and_the_caller_carries_alone(crew, wait_until):
    crew.run_all(lambda span: None, SPANS)
    crew.close()
    crew.close()
    wait_until(lambda: crew_threads() == [])
    assert crew.run_all(lambda span: threading.current_thread(), SPANS) == [threading.current_thread()] * 4
    assert crew_threads() == []


def test_the_end_waits_for_nobody(make_crew, wait_until):
    crew = make_crew(2)
    hold = threading.Event()
    busy = threading.Thread(target=crew.run_all, args=(lambda span: hold.wait(5), SPANS), daemon=True)
    busy.start()
    wait_until(lambda: len(crew_threads()) == 2)
    crew.close()
    assert busy.is_alive()
    hold.set()
    busy.join(5)
    assert not busy.is_alive()
    wait_until(lambda: crew_threads() == [])


@pytest.mark.parametrize("started", [0, 2])
def test_where_no_more_threads_can_be_had_the_caller_carries_what_none_takes(crew, monkeypatch, started):
    """As at the interpreter's end."""
    real, made = threading.Thread.start, []

    def start(thread):
        if len(made) == started:
            raise RuntimeError("can't start new thread")
        made.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    carried = []
    crew.run_all(lambda span: carried.append((span, threading.current_thread())), SPANS)
    assert sorted(span for span, _ in carried) == SPANS
    assert {thread for _, thread in carried} <= {threading.current_thread(), *made}


def test_no_thread_of_the_crew_holds_up_the_interpreters_end(crew):
    crew.run_all(lambda span: None, SPANS)
    assert crew_threads()
    assert all(thread.daemon for thread in crew_threads())


def test_what_no_thread_could_be_made_for_is_not_carried_twice(crew, monkeypatch):
    """A thread that gets to it later would write to memory that is somebody else's by then."""
    real, made = threading.Thread.start, []

    def start(thread):
        if made:
            raise RuntimeError("can't start new thread")
        made.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    carried, hold = [], threading.Event()

    def carry(span):
        if threading.current_thread() in made:
            hold.wait(5)
        carried.append(span)
        if span == SPANS[0]:
            # By now all the others were offered to the crew.
            hold.set()

    crew.run_all(carry, SPANS)
    assert sorted(carried) == SPANS
    # The crew's one thread takes what was kept before it comes to this.
    crew.run_all(lambda span: None, SPANS[:2])
    assert sorted(carried) == SPANS
