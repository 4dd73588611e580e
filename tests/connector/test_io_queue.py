"""A tier's queue: loads first, what waits can be shed, what runs is finished, no task is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from doubles import Clock, Hold, until

from kvsluice.connector.io_queue import IoQueue

WAIT_S = 20.0


class Task:
    """Notes what becomes of it."""

    def __init__(self, name: str, log: list[str], work: Callable[[], None] | None = None, put_s: float = 0.0) -> None:
        self.name = name
        self.log = log
        self.work = work
        self.put_s = put_s
        self.job_id = id(self)

    def run(self, start_s: float) -> None:
        self.log.append(f"run {self.name}")
        if self.work is not None:
            self.work()

    def shed(self, reason: str) -> None:
        self.log.append(f"shed {self.name} {reason}")

    def crashed(self, error: Exception) -> None:
        self.log.append(f"crashed {self.name} {error}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def queues() -> Iterator[Callable[..., IoQueue]]:
    made: list[IoQueue] = []

    def make(readers: int = 1, writers: int = 1, **options: object) -> IoQueue:
        made.append(IoQueue("t", read_threads=readers, write_threads=writers, **options))
        return made[-1]

    yield make
    for queue in made:
        until(lambda: None, lambda queue=queue: not queue.busy)
        queue.stop()
        assert queue.join(queue._clock() + WAIT_S) == []  # noqa: SLF001 - the queue's own time


def hold_all(queue: IoQueue, readers: int, writers: int, log: list[str]) -> tuple[Hold, Hold]:
    """Keep every thread busy."""
    reading, writing = Hold(), Hold()
    for _ in range(writers):
        queue.put_store(Task("busy", log, writing))
    writing.wait_for(writers)
    for _ in range(readers):
        queue.put_load(Task("busy", log, reading))
    reading.wait_for(readers)
    log.clear()
    return reading, writing


def test_loads_go_before_stores_that_were_put_earlier(queues, log):
    queue = queues()
    reading, writing = hold_all(queue, 1, 1, log)
    for at in range(3):
        queue.put_store(Task(f"store {at}", log))
    for at in range(3):
        queue.put_load(Task(f"load {at}", log))
    assert (queue.state().queued_loads, queue.state().queued_stores, queue.state().running) == (3, 3, 2)
    writing.open()
    until(lambda: None, lambda: len(log) == 6)
    reading.open()
    assert log == [f"run load {at}" for at in range(3)] + [f"run store {at}" for at in range(3)]


def test_readers_never_take_a_store_however_many_wait(queues, log):
    queue = queues(readers=2)
    writing = Hold()
    queue.put_store(Task("busy", log, writing))
    writing.wait_for()
    for at in range(5):
        queue.put_store(Task(f"store {at}", log))
    for at in range(5):
        queue.put_load(Task(f"load {at}", log))
    until(lambda: None, lambda: sum(line.startswith("run load") for line in log) == 5)
    assert not any(line.startswith("run store") for line in log)
    writing.open()


def test_waiting_stores_older_than_the_limit_are_shed_and_younger_ones_stay(queues, log):
    clock = Clock()
    queue = queues(clock=clock)
    reading, writing = hold_all(queue, 1, 1, log)
    for at in range(3):
        queue.put_store(Task(f"store {at}", log, put_s=clock()))
        clock.advance(1.0)
    queue.shed_stores("late", older_than_s=1.5)
    assert log == ["shed store 0 late", "shed store 1 late"]
    assert queue.state().queued_stores == 1
    writing.open()
    reading.open()
    until(lambda: None, lambda: log[-1] == "run store 2")


def test_shedding_leaves_a_running_task_alone(queues, log):
    queue = queues()
    reading, writing = hold_all(queue, 1, 1, log)
    queue.put_store(Task("store", log))
    queue.put_load(Task("load", log))
    queue.shed_stores("reset")
    queue.shed_loads("reset")
    assert log == ["shed store reset", "shed load reset"]
    assert queue.state().running == 2
    writing.open()
    reading.open()


def test_a_task_that_raises_is_told_and_the_thread_lives_on(queues, log, caplog):
    queue = queues()

    def boom() -> None:
        raise ZeroDivisionError("by a stranger")

    queue.put_store(Task("bad", log, boom))
    queue.put_store(Task("good", log))
    until(lambda: None, lambda: len(log) == 3)
    assert log == ["run bad", "crashed bad by a stranger", "run good"]
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_an_action_alone_runs_when_no_store_runs_and_before_what_waits(queues, log):
    queue = queues(readers=1, writers=2)
    writing = Hold()
    queue.put_store(Task("busy", log, writing))
    writing.wait_for()
    done = threading.Event()

    def alone() -> None:
        log.append("alone")
        done.set()

    queue.run_alone(alone)
    assert not done.wait(0.03)
    writing.open()
    assert done.wait(WAIT_S)
    assert log == ["run busy", "alone"]


def test_an_action_that_raises_does_not_end_the_thread(queues, log):
    queue = queues()

    def boom() -> None:
        raise RuntimeError("cannot clear")

    queue.run_alone(boom)
    queue.put_load(Task("load", log))
    queue.put_store(Task("store", log))
    until(lambda: None, lambda: len(log) == 2)


def test_no_task_is_forgotten_when_threads_race_for_an_action(queues, log):
    # Each round wakes threads for tasks and for an action at once; a token lost to the race would
    # leave the last task lying.
    queue = queues(readers=3, writers=3)
    for round_ in range(200):
        for at in range(4):
            queue.put_load(Task(f"load {round_} {at}", log))
            queue.put_store(Task(f"store {round_} {at}", log))
            queue.run_alone(lambda: None)
        until(lambda: None, lambda: not queue.busy)
    assert len(log) == 200 * 8


class Vanishing:
    """An action that another thread takes each time between the look and the taking."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __bool__(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def popleft(self) -> None:
        raise IndexError


def test_one_that_loses_the_race_for_an_action_takes_the_task_behind_its_token(queues, log):
    queue = queues(readers=1, writers=1)
    reading, writing = hold_all(queue, 1, 1, log)
    queue.put_store(Task("store", log))
    queue._exclusive = Vanishing(queue._for_writers.qsize())  # noqa: SLF001 - the race cannot be had on demand
    writing.open()
    until(lambda: None, lambda: log == ["run store"])
    reading.open()


def test_every_task_ends_exactly_once_while_stores_are_shed_and_run_by_many_threads(queues, log):
    queue = queues(readers=2, writers=3)
    stop = threading.Event()
    shedder = threading.Thread(
        target=lambda: [queue.shed_stores("late", older_than_s=0.0) for _ in iter(stop.is_set, True)]
    )
    shedder.start()
    for at in range(2000):
        queue.put_store(Task(f"store {at}", log, put_s=queue._clock()))  # noqa: SLF001 - the queue's own time
        if at % 3 == 0:
            queue.put_load(Task(f"load {at}", log))
    until(lambda: None, lambda: not queue.busy)
    stop.set()
    shedder.join()
    names = [line.removeprefix("run ").removeprefix("shed ").removesuffix(" late") for line in log]
    assert len(names) == len(set(names)) == 2000 + 667


def test_with_few_stores_at_once_every_task_still_ends_and_no_writer_is_forgotten(queues, log):
    queue = queues(readers=2, writers=4, adapt_stores=True)
    together: list[int] = []

    def store() -> None:
        together.append(queue.lane.running_stores)

    for at in range(1000):
        queue.put_store(Task(f"store {at}", log, store))
        if at % 5 == 0:
            queue.put_load(Task(f"load {at}", log))
        if at % 50 == 0:
            queue.shed_loads("shed")
    until(lambda: None, lambda: not queue.busy)
    names = [line.removeprefix("run ").removeprefix("shed ").removesuffix(" shed") for line in log]
    assert len(names) == len(set(names)) == 1200
    assert 1 <= max(together) <= 4


def test_a_store_waits_for_the_one_that_runs_while_a_load_is_under_way_and_goes_on_after_it(queues, log):
    queue = queues(readers=1, writers=3, adapt_stores=True)
    reading, writing = Hold(), Hold()
    queue.put_load(Task("load", log, reading))
    reading.wait_for()
    queue.put_store(Task("first", log, writing))
    writing.wait_for()
    queue.put_store(Task("second", log))
    # A third thread asks and is sent away: nothing tells of that but the lane's own count.
    until(lambda: None, lambda: queue.lane._held_back >= 1)  # noqa: SLF001
    assert "run second" not in log
    reading.open()
    until(lambda: None, lambda: "run second" in log)
    writing.open()


def test_after_stop_threads_that_hang_are_named_and_the_others_end(log):
    queue = IoQueue("t", read_threads=1, write_threads=2)
    hold = Hold()
    queue.put_store(Task("hung", log, hold))
    hold.wait_for()
    queue.stop()
    left = queue.join(queue._clock() + 0.2)  # noqa: SLF001 - the queue's own time
    assert len(left) == 1
    assert left[0] in ("kvsluice-t-1", "kvsluice-t-2")
    hold.open()
    assert queue.join(queue._clock() + WAIT_S) == []  # noqa: SLF001
