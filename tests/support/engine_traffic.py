"""An engine's traffic: chunks stored, prefixes looked up and loaded at every step, and what each call and job took.

Every chunk has contents of its own, so that what a load brought is proven byte for byte.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from bench import make_key

from kvsluice.connector import KVLayout, OffloadConnector, TransferResult

__all__ = ["CHUNK_BYTES", "SLOT_BYTES", "Engine", "Job", "Paged", "Phase", "resident_bytes", "run_engines"]

TOKENS_PER_BLOCK = 64
WIDTH = 4
"""Blocks in a chunk of 256 tokens, the default."""
LAYERS = 2
CHUNK_BYTES = LAYERS * WIDTH * TOKENS_PER_BLOCK * 64 * 4
SLOT_BYTES = CHUNK_BYTES + 4096
STEP_S = 0.025
PREFIX = 4
"""Chunks that a request asks for."""

_T = TypeVar("_T")


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Paged:
    """A paged KV cache whose chunks' contents follow from their number.

    Args:
        num_chunks: that its blocks hold at once.
    """

    def __init__(self, num_chunks: int = 160) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (num_chunks * WIDTH, TOKENS_PER_BLOCK, 64)
        self.tensors = {f"model.layers.{layer}": torch.zeros(shape) for layer in range(LAYERS)}
        self.layout = KVLayout.from_tensors(self.tensors, tokens_per_block=TOKENS_PER_BLOCK)
        self.free = list(range(num_chunks))
        self._patterns = {
            name: torch.randn((WIDTH, TOKENS_PER_BLOCK, 64), generator=generator) for name in self.tensors
        }

    @staticmethod
    def blocks(places: Sequence[int]) -> list[int]:
        return [place * WIDTH + at for place in places for at in range(WIDTH)]

    def compute(self, place: int, number: int) -> None:
        """As the engine's prefill would: the place holds chunk `number` from here on."""
        for name, tensor in self.tensors.items():
            tensor[place * WIDTH : (place + 1) * WIDTH] = self._patterns[name] + number

    def blank(self, place: int) -> None:
        for tensor in self.tensors.values():
            tensor[place * WIDTH : (place + 1) * WIDTH] = -1.0

    def holds(self, place: int, number: int) -> bool:
        return all(
            torch.equal(tensor[place * WIDTH : (place + 1) * WIDTH], self._patterns[name] + number)
            for name, tensor in self.tensors.items()
        )


class Phase:
    """What the calls of some time took. Small, so that a long run's figures are not what its memory is."""

    def __init__(self) -> None:
        self.took_s = array("d")
        self.worst = ("", 0.0)

    def add(self, name: str, took_s: float) -> None:
        self.took_s.append(took_s)
        if took_s > self.worst[1]:
            self.worst = (name, took_s)

    def quantile(self, share: float) -> float:
        """Seconds that this share of the calls stayed below."""
        ordered = sorted(self.took_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    def __str__(self) -> str:
        name, worst_s = self.worst
        return (
            f"{len(self.took_s)} calls, p50 {self.quantile(0.5) * 1e3:.2f} ms, "
            f"p99.9 {self.quantile(0.999) * 1e3:.1f} ms, worst {worst_s * 1e3:.0f} ms ({name})"
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One job that is over."""

    kind: str
    start_s: float
    end_s: float
    done: int
    reasons: tuple[str, ...]

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class _Request:
    """A prefix that somebody wants; looked up until it is known how much of it there is."""

    numbers: list[int]


@dataclass
class Engine:
    """Drives a connector as an engine's scheduler does, on the caller's thread.

    Args:
        tokens_per_s: what it tells the connector about its own prefill; None for an engine that says nothing.
        max_requests: that look up or load at once.
    """

    connector: OffloadConnector
    paged: Paged
    tokens_per_s: float | None = None
    max_requests: int = 16
    phase: Phase = field(default_factory=Phase)
    """Where calls are counted now; replaced to count others apart."""
    jobs: list[Job] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    """Chunks that a load claimed to have brought and had not."""
    not_held: int = 0
    starved: int = 0
    """Steps that found no blocks free to compute in."""
    _random: random.Random = field(default_factory=lambda: random.Random(11))
    _next: int = 0
    _requests: list[_Request] = field(default_factory=list)
    _stores: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    _held_back: dict[int, int] = field(default_factory=dict)
    _loads: dict[int, tuple[float, list[int], list[int]]] = field(default_factory=dict)

    def step(self) -> None:
        self._store_one()
        self._look_up()
        self._take(self._timed("poll", self.connector.poll))
        for job in self._timed("poll_released", self.connector.poll_released):
            self.paged.free.append(self._held_back.pop(job))
        self._timed("stats", self.connector.stats)

    def drain(self, timeout_s: float) -> None:
        """Until all jobs are over."""
        end_s = time.monotonic() + timeout_s
        while self._stores or self._loads:
            assert time.monotonic() < end_s, (self._stores, self._loads)
            self._take(self.connector.poll())
            for job in self.connector.poll_released():
                self.paged.free.append(self._held_back.pop(job))
            time.sleep(0.005)

    def load_all(self, numbers: Sequence[int], timeout_s: float) -> Counter[str]:
        """Load each of these chunks, a prefix's worth at a time; what came of them, by reason, "done" for success."""
        self.drain(timeout_s)
        outcomes: Counter[str] = Counter()
        for at in range(0, len(numbers), PREFIX):
            self._load(list(numbers[at : at + PREFIX]))
            self.drain(timeout_s)
            # Nothing else was open.
            outcomes["done"] += self.jobs[-1].done
            outcomes.update(self.jobs[-1].reasons)
        return outcomes

    # ---- figures -----------------------------------------------------------------------------

    def over(self, kind: str, start_s: float, end_s: float) -> list[Job]:
        """Jobs of this kind that ended in this time."""
        return [job for job in self.jobs if job.kind == kind and start_s <= job.end_s < end_s]

    def first_done(self, kind: str, after_s: float) -> float:
        """When the first chunk was stored or loaded by a job that was begun after this moment; endless if none was."""
        return min(
            (job.end_s for job in self.jobs if job.kind == kind and job.start_s >= after_s and job.done),
            default=float("inf"),
        )

    # ---- a step ------------------------------------------------------------------------------

    def _store_one(self) -> None:
        if not self.paged.free:
            self.starved += 1
            return
        place, number = self.paged.free.pop(), self._next
        self._next += 1
        self.paged.compute(place, number)
        if self.tokens_per_s is not None:
            tokens = WIDTH * TOKENS_PER_BLOCK
            self.connector.observe_prefill(tokens, tokens / self.tokens_per_s)
        start_s = time.monotonic()
        job = self._timed("store", lambda: self.connector.store([make_key(number)], self.paged.blocks([place])))
        self._stores[job] = (start_s, place, number)
        self._held_back[job] = place

    def _look_up(self) -> None:
        while self.stored and len(self._requests) + len(self._loads) < self.max_requests:
            first = self._random.choice(self.stored)
            self._requests.append(_Request(list(range(first, first + PREFIX))))
            if self._random.random() < 0.7:
                break
        waiting, self._requests = self._requests, []
        for request in waiting:
            keys = [make_key(number) for number in request.numbers]
            found = self._timed("lookup", lambda keys=keys: self.connector.lookup(keys))
            if found.pending:
                self._requests.append(request)
            elif found.held:
                self._load(request.numbers[: found.held])
            else:
                self.not_held += 1

    def _load(self, numbers: list[int]) -> None:
        if len(self.paged.free) < len(numbers):
            self.starved += 1
            return
        places = [self.paged.free.pop() for _ in numbers]
        for place in places:
            self.paged.blank(place)
        keys = [make_key(number) for number in numbers]
        start_s = time.monotonic()
        job = self._timed("load", lambda: self.connector.load(keys, self.paged.blocks(places)))
        self._loads[job] = (start_s, places, numbers)

    def _take(self, results: Sequence[TransferResult]) -> None:
        now_s = time.monotonic()
        for result in results:
            if result.kind == "store":
                start_s, _, number = self._stores.pop(result.job_id)
                if result.done_keys:
                    self.stored.append(number)
            else:
                start_s, places, numbers = self._loads.pop(result.job_id)
                for place, number in zip(places, numbers, strict=True):
                    if make_key(number) in result.done_keys and not self.paged.holds(place, number):
                        self.wrong.append(number)
                self.paged.free += places
            self.jobs.append(
                Job(result.kind, start_s, now_s, len(result.done_keys), tuple(sorted(result.failed.values())))
            )

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        start_s = time.monotonic()
        result = call()
        self.phase.add(name, time.monotonic() - start_s)
        return result


def run_engines(engines: Sequence[Engine], seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
    """Step after step of each in turn, for so long or until something is so."""
    end_s = time.monotonic() + seconds
    while (step_s := time.monotonic()) < end_s and not until():
        for engine in engines:
            engine.step()
        time.sleep(max(0.0, step_s + STEP_S - time.monotonic()))
