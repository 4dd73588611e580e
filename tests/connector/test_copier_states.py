"""Preemption and abort at every state of a store and of a load: no block is used by two at once.

The engine writes into the blocks as soon as the connector says that it may: for a store when `poll_released`
names the job, for a load when `poll` does, for both when `fence` returns. The device then finds no two
accesses that nothing ordered, and what the engine wrote is what stays.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from bench import WIDTH, Bench, Cache, blocks_of
from doubles import Hold, until
from fake_device import EngineRead, FakeDevice
from mover_traffic import stage_everything

from kvsluice.connector import copier, transfers, worker
from kvsluice.connector.copier import MAX_FLYING, Copier
from kvsluice.kernels import CopyPlan
from kvsluice.kernels.device import Device, Event
from kvsluice.kernels.movers import Mover, OnTensor, Submission
from kvsluice.kernels.operations import ChunkCopy

STATES = ("waiting", "claimed", "queued", "begun", "half run", "not seen", "told of")
IN_THE_DEVICES_HANDS = ("claimed", "queued", "begun", "half run", "not seen")
ACTIONS = ("nothing", "cancel", "fence", "reset", "close", "close in vain")
KINDS = pytest.mark.parametrize("kind", ["store", "load"])
WATCHED_S = 0.01
"""How long a call that waits for the device is left alone before the device goes on."""


@pytest.fixture
def device(cache: Cache) -> FakeDevice:
    return FakeDevice(CopyPlan(cache.layout.paged, WIDTH))


@pytest.fixture(params=["direct", "staged"])
def movers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How chunks are moved: as pages in host memory are, or through staging memory as on a GPU."""
    if request.param == "staged":
        stage_everything(monkeypatch)
    return request.param


class Scene:
    """One job of one chunk on a device that stands still, brought to a state, and what becomes of its blocks."""

    def __init__(
        self, bench: Bench, device: FakeDevice, keys: Sequence[bytes], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Nothing here hangs by accident, so nobody waits for it to end by itself.
        monkeypatch.setattr(copier, "JOIN_S", WATCHED_S)
        monkeypatch.setattr(worker, "JOIN_S", WATCHED_S)
        self.kind = kind
        self.device = device
        self.connector = bench.connect("host", device=device)
        self.rng = random.Random(kind)
        self._bench = bench
        self._keys = keys
        self._monkeypatch = monkeypatch
        self._hold: Hold | None = None
        self._named: set[int] = set()
        self._job = -1
        self.blocks = blocks_of(0 if kind == "store" else 10)
        if kind == "load":
            self.connector.store(keys[:3], blocks_of(0, 1, 2))
            until(device.run, lambda: not self._copier.busy)
            device.run()
            self.connector.poll()
            self.connector.poll_released()
        else:
            device.engine_writes(self.blocks)
        self.old = [item.tensor[self.blocks] for item in device.plan.paged]
        self.source = device.engine_reads(blocks_of(0))
        self.before = device.engine_reads(self.blocks)
        self.after = self.before
        """What the job's chunk holds; what the engine finds in the blocks before the job, and once it is over."""

    # ---- to a state ---------------------------------------------------------------------------

    def reach(self, state: str) -> None:
        match state:
            case "waiting":
                # In the copier: as many others as may be are in the device's hands.
                for number in range(1, 1 + MAX_FLYING):
                    self.start(number)
                    self._until_queued(number)
                self.start()
            case "claimed":
                # The copier is about to hand it to the device.
                hold = self._hold_prepare()
                self.start()
                hold.wait_for()
            case _:
                self.start()
                self._until_queued(1)
                self._run_to(state)

    def _run_to(self, state: str) -> None:
        submission = self._flying[0][1]
        match state:
            case "begun":
                self.device.run(only=["compute"])
                self._run_until(lambda: submission.start.passed)
                assert not submission.end.passed
            case "half run":
                self._run_until(lambda: self.device.queued_copies() == 0)
                assert not submission.end.passed
            case "not seen":
                self.device.unseen = True
                self.device.run()
            case "told of":
                self.device.run()
                until(lambda: None, lambda: not self._copier.busy)

    def _run_until(self, there: Callable[[], bool]) -> None:
        while not there():
            assert self.device.run(self.rng, steps=1)

    def _hold_prepare(self) -> Hold:
        self._hold = hold = Hold()
        of = transfers.StoreTransfer if self.kind == "store" else transfers.LoadTransfer
        real = of.prepare

        def prepare(transfer: transfers.StoreTransfer | transfers.LoadTransfer) -> ChunkCopy:
            hold()
            return real(transfer)

        self._monkeypatch.setattr(of, "prepare", prepare)
        return hold

    def start(self, number: int = 0) -> None:
        """Ask for the job, or for another like it."""
        if self.kind == "store":
            job = self.connector.store(self._keys[number : number + 1], blocks_of(number))
        else:
            job = self.connector.load(self._keys[number : number + 1], blocks_of(10 + number))
        if number == 0:
            self._job = job

    def _until_queued(self, submissions: int) -> None:
        until(lambda: None, lambda: len(self._flying) == submissions)

    @property
    def _copier(self) -> Copier:
        return self.connector._worker._copier  # noqa: SLF001 - states that nothing outside can see

    @property
    def _flying(self) -> Sequence[tuple[object, Submission]]:
        direction = self._copier._out if self.kind == "store" else self._copier._in  # noqa: SLF001 - as above
        return direction.flying

    # ---- from there ----------------------------------------------------------------------------

    def act(self, action: str) -> bool:
        """Do it; whether that alone makes the blocks the engine's again."""
        match action:
            case "cancel":
                self.connector.cancel(self._job)
            case "fence":
                self._while_the_device_goes_on(lambda: self.connector.fence(self.blocks))
            case "reset":
                self._while_the_device_goes_on(self.connector.reset)
            case "close":
                self._while_the_device_goes_on(self.connector.close)
            case "close in vain":
                self._bench.hung = {"kvsluice-copy"}
                self.connector.close(timeout_s=WATCHED_S)
        return action == "fence"

    def _while_the_device_goes_on(self, call: Callable[[], object]) -> None:
        over = threading.Event()
        thread = threading.Thread(target=lambda: (call(), over.set()))
        thread.start()
        over.wait(WATCHED_S)
        self.go_on()
        until(lambda: self.device.run(self.rng, steps=2), over.is_set)
        thread.join()

    def go_on(self) -> None:
        """Whatever held it back holds it no more."""
        self.device.unseen = False
        if self._hold is not None:
            self._hold.open()

    def is_named(self) -> bool:
        """Whether the connector has said that the blocks are free."""
        if self.kind == "store":
            self._named.update(self.connector.poll_released())
        else:
            self._named.update(result.job_id for result in self.connector.poll())
        return self._job in self._named

    def until_named(self) -> None:
        self.go_on()
        until(lambda: self.device.run(self.rng, steps=1), self.is_named)

    def use_at_once(self) -> EngineRead:
        """The engine uses the blocks; what it reads after its own write."""
        self.after = self.device.engine_reads(self.blocks)
        self.device.engine_writes(self.blocks)
        return self.device.engine_reads(self.blocks)

    def write_at_once(self) -> None:
        """The engine uses the blocks; what it writes is what stays."""
        written = self.use_at_once()
        self.finish()
        last = self.device.engine_reads(self.blocks)
        self.device.run()
        assert all(map(torch.equal, last.seen, written.seen))

    def finish(self) -> None:
        """All that is under way comes to its end."""
        self.go_on()
        until(lambda: self.device.run(self.rng), lambda: not self._copier.busy or not self._copier_lives())
        self.device.run()
        assert self.device.idle

    def _copier_lives(self) -> bool:
        return self._copier._thread.is_alive()  # noqa: SLF001 - as above


@KINDS
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("action", ACTIONS)
def test_blocks_are_the_engines_again_when_it_is_told_so_and_not_before(
    bench, device, movers, keys, monkeypatch, kind, state, action
):
    scene = Scene(bench, device, keys, kind, monkeypatch)
    scene.reach(state)
    free = scene.act(action) or scene.is_named()
    if action in ("nothing", "cancel", "close in vain") and state in IN_THE_DEVICES_HANDS:
        assert not free, "the device still has it"
    if action == "close in vain" and not free:
        scene.finish()
        assert not scene.is_named(), "nobody looks any more"
    else:
        if not free:
            scene.until_named()
        scene.write_at_once()
    device.check()


@KINDS
@pytest.mark.parametrize("state", STATES)
def test_bytes_are_those_of_the_moment_of_the_call_whatever_comes_after(
    bench, device, movers, keys, monkeypatch, kind, state
):
    scene = Scene(bench, device, keys, kind, monkeypatch)
    scene.reach(state)
    scene.until_named()
    scene.write_at_once()
    if kind == "load":
        assert same(scene.after, scene.source)
        assert all(map(torch.equal, scene.before.seen, scene.old))
    else:
        again = scene.connector.load(keys[:1], blocks_of(8))
        until(device.run, lambda: [result.job_id for result in scene.connector.poll()] == [again])
        loaded = device.engine_reads(blocks_of(8))
        device.run()
        assert same(loaded, scene.source)
    device.check()


def same(one: EngineRead, other: EngineRead) -> bool:
    """Whether both have run and saw the same bytes."""
    return bool(one.seen) and all(map(torch.equal, one.seen, other.seen))


# ---- copiers that are broken on purpose --------------------------------------------------------


class _AtOnce:
    """An event that has passed before anything has run."""

    passed = True

    def query(self) -> bool:
        return True

    def seconds_since(self, start: Event) -> float:
        return 0.0


class _Changed:
    """A mover in whose calls something is different."""

    def __init__(self, mover: Mover, *, waits: bool = True, told_at_once: bool = False) -> None:
        self._mover = mover
        self._waits = waits
        self._told_at_once = told_at_once
        self.name = mover.name
        self.max_chunks = mover.max_chunks

    def submit(
        self, ready: Sequence[Event], copies: Sequence[ChunkCopy], on_tensor: OnTensor | None = None
    ) -> Submission:
        made = self._mover.submit(ready if self._waits else [], copies, on_tensor)
        return replace(made, start=_AtOnce(), end=_AtOnce(), before=None, _ids=None) if self._told_at_once else made


class ReleasesAtIssue(Copier):
    def __init__(self, device: Device, out: Mover, into: Mover, **options: object) -> None:
        super().__init__(device, *(_Changed(mover, told_at_once=True) for mover in (out, into)), **options)


class WaitsForNothing(Copier):
    def __init__(self, device: Device, out: Mover, into: Mover, **options: object) -> None:
        super().__init__(device, *(_Changed(mover, waits=False) for mover in (out, into)), **options)


class FencesNothing(Copier):
    def fence(self, block_ids: frozenset[int], timeout_s: float) -> None:
        """Return at once."""


@KINDS
@pytest.mark.parametrize(
    ("broken", "action"),
    [(ReleasesAtIssue, "nothing"), (ReleasesAtIssue, "cancel"), (WaitsForNothing, "nothing"), (FencesNothing, "fence")],
)
def test_a_copier_that_is_broken_on_purpose_is_found(bench, device, movers, keys, monkeypatch, kind, broken, action):
    monkeypatch.setattr(worker, "Copier", broken)
    scene = Scene(bench, device, keys, kind, monkeypatch)
    scene.start()
    until(lambda: None, lambda: device.queued_copies() > 0)
    if not scene.act(action):
        if broken is ReleasesAtIssue:
            until(lambda: None, scene.is_named)
        else:
            scene.until_named()
    scene.use_at_once()
    scene.finish()
    found = [race for race in device.races if "Engine" in race]
    assert found, "the engine and a copy were at the same pages"
