"""The queue rules without threads: who is next, how many stores at once, and nobody who was sent away is forgotten."""

from __future__ import annotations

import pytest
from doubles import Clock

from kvsluice.connector.lane import Lane
from kvsluice.tiers.backpressure import LOST_S, Spent, Stall, StoreLimit


class Task:
    def __init__(self, name: str, put_s: float = 0.0, job_id: int | None = None) -> None:
        self.name = name
        self.put_s = put_s
        self.job_id = id(self) if job_id is None else job_id
        self.shed_as: str | None = None

    def run(self, start_s: float) -> None:
        raise NotImplementedError

    def shed(self, reason: str) -> None:
        self.shed_as = reason

    def crashed(self, error: Exception) -> None:
        raise NotImplementedError


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Two(StoreLimit):
    """Two stores at once, one beside loads, whatever runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(2, clock)
        self.taught: list[bool] = []

    def on_store_ended(self, spent: Spent) -> None:
        self.taught.append(True)

    def on_load_ended(self, spent: Spent) -> None:
        self.taught.append(False)


@pytest.fixture
def limit(clock: Clock) -> Two:
    return Two(clock)


@pytest.fixture
def lane(limit: Two, clock: Clock) -> Lane:
    return Lane(limit, clock)


def names(*taken: tuple[Task, bool] | None) -> list[str | None]:
    return [None if one is None else one[0].name for one in taken]


def test_loads_go_first_to_whoever_asks_and_stores_to_writers_alone(clock):
    lane = Lane(None, clock)
    lane.put_store(Task("store"))
    lane.put_load(Task("load 1"))
    lane.put_load(Task("load 2"))
    assert names(lane.take(is_writer=True), lane.take(is_writer=False)) == ["load 1", "load 2"]
    assert lane.take(is_writer=False) is None
    assert names(lane.take(is_writer=True)) == ["store"]


def test_without_a_limit_every_writer_may_store(clock):
    lane = Lane(None, clock)
    for number in range(9):
        lane.put_store(Task(f"{number}"))
    assert all(lane.take(is_writer=True) for _ in range(9))
    assert lane.state().store_limit == 0


def test_with_a_limit_no_more_stores_run_than_it_says(lane):
    for number in range(4):
        lane.put_store(Task(f"{number}"))
    assert lane.state().store_limit == 2
    assert names(*(lane.take(is_writer=True) for _ in range(4))) == ["0", "1", None, None]
    assert lane.state().running == 2


def test_writers_that_were_sent_away_are_called_back_one_for_each_place(lane):
    for number in range(6):
        lane.put_store(Task(f"{number}"))
    for _ in range(6):
        lane.take(is_writer=True)
    for name in ("2", "3", "4", "5"):
        assert lane.release(is_store=True) == 1
        assert names(lane.take(is_writer=True)) == [name]
    assert [lane.release(is_store=True), lane.release(is_store=True)] == [0, 0]


def test_a_load_that_waits_lets_one_store_run_and_its_end_calls_the_others(lane):
    for number in range(3):
        lane.put_store(Task(f"{number}"))
    lane.put_load(Task("load"))
    assert names(*(lane.take(is_writer=True) for _ in range(3))) == ["load", "0", None]
    assert lane.release(is_store=False) == 1
    assert names(lane.take(is_writer=True)) == ["1"]


def test_a_store_that_is_stuck_counts_no_more(lane, clock):
    for number in range(6):
        lane.put_store(Task(f"{number}"))
    for _ in range(3):
        lane.take(is_writer=True)
    lane.begin(is_store=True)
    lane.begin(is_store=True)
    assert not lane.may_be_stuck
    assert lane.take(is_writer=True) is None
    clock.advance(LOST_S + 0.1)
    assert lane.may_be_stuck
    assert names(lane.take(is_writer=True), lane.take(is_writer=True)) == ["2", "3"]
    lane.begin(is_store=True)
    lane.begin(is_store=True)
    assert lane.take(is_writer=True) is None


def test_what_begins_and_ends_is_charged_its_share(lane, clock):
    first, second = lane.begin(is_store=True), lane.begin(is_store=True)
    clock.advance(2.0)
    assert lane.state().stall == Stall(2.0, 2.0, 1.0, 1.0)
    assert lane.finish(first, whole_chunk=True) == Spent(2.0, 1.0, 1.0)
    assert lane.state().stall == Stall(2.0, 0.0, 0.0, 0.0)
    lane.finish(second, whole_chunk=False)
    assert lane.state().stall == Stall()


def test_only_whole_chunks_teach_the_limit(lane, limit):
    for is_store in (True, False):
        for whole_chunk in (True, False):
            lane.finish(lane.begin(is_store=is_store), whole_chunk=whole_chunk)
    assert limit.taught == [True, False]


def test_waiting_stores_older_than_a_limit_are_shed_and_younger_ones_stay(clock):
    lane = Lane(None, clock)
    tasks = [Task("old", clock()), Task("young", clock() + 2.0)]
    for task in tasks:
        lane.put_store(task)
    clock.advance(3.0)
    assert not lane.shed_stores("late", older_than_s=1.5)
    assert [task.shed_as for task in tasks] == ["late", None]
    assert lane.busy
    lane.shed_stores("gone")
    assert tasks[1].shed_as == "gone"
    assert not lane.busy


def test_behind_a_store_that_waited_too_long_its_whole_job_goes_and_no_other(clock):
    lane = Lane(None, clock)
    now_s = clock()
    tasks = [
        Task("head", now_s, 1),
        Task("tail", now_s + 2, 1),
        Task("other", now_s + 2, 2),
        Task("again", now_s + 2, 1),
    ]
    for task in tasks:
        lane.put_store(task)
    clock.advance(3.0)
    lane.shed_stores("late", older_than_s=1.5)
    assert [task.shed_as for task in tasks] == ["late", "late", None, None]


def test_a_load_that_is_stuck_counts_no_more_and_stores_run_as_if_none_were_there(lane, clock):
    lane.put_load(Task("stuck"))
    lane.take(is_writer=False)
    lane.begin(is_store=False)
    for number in range(4):
        lane.put_store(Task(f"{number}"))
    assert names(lane.take(is_writer=True), lane.take(is_writer=True)) == ["0", None]
    clock.advance(LOST_S + 0.1)
    assert names(lane.take(is_writer=True)) == ["1"]


def test_writers_that_were_sent_away_are_called_back_beside_a_store_that_is_stuck(lane, clock):
    for number in range(6):
        lane.put_store(Task(f"{number}"))
    for _ in range(4):
        lane.take(is_writer=True)
    stuck = lane.begin(is_store=True)
    other = lane.begin(is_store=True)
    clock.advance(LOST_S + 0.1)
    lane.finish(other, whole_chunk=True)
    assert lane.release(is_store=True) == 2
    assert names(lane.take(is_writer=True), lane.take(is_writer=True)) == ["2", "3"]
    lane.finish(stuck, whole_chunk=True)
