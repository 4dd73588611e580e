"""Measures a tier cell by cell, through the tier's own `store` and `load`, on valid chunk files."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvsluice.connector.calibrate.closed_loop import ClosedLoop, Limits, Timed
from kvsluice.connector.calibrate.model import Kind, Measurement
from kvsluice.connector.calibrate.plan import KINDS, Cell, Plan, warm_up
from kvsluice.tiers.base import Tier, round_up
from kvsluice.tiers.chunk_file import ChunkFormat, TensorSpec, stored_key
from kvsluice.tiers.errors import TierError, TierUnavailableError
from kvsluice.tiers.fs_tree import fan_out
from kvsluice.tiers.reasons import INTERNAL

__all__ = ["Meter", "Outcome", "Progress"]

MAX_FAILED: Final = 3
"""A tier that fails in more cells than this is not fit to be measured."""
WARM_UP_SHARE: Final = 0.1
"""Of the time, at the most."""
NUM_FOLDERS: Final = 32
"""Keys are chosen so that they fall into so many of the filesystem tier's fan-out folders, all made in the warm-up:
a tier in use has long made its folders, and a store that makes one is slower."""
TIME_IS_UP: Final = "the time was up (max_seconds)"
TOO_MANY_BYTES: Final = "more bytes than allowed (max_bytes)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell written or read: its measurement, or why there is none."""

    kind: Kind
    num_bytes: int
    concurrency: int
    measurement: Measurement | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is measured now; `done` of `total` are over. `kind` is None in the warm-up and at the end."""

    done: int
    total: int
    kind: Kind | None
    num_bytes: int
    concurrency: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Images:
    """Chunk images of one size: a buffer per thread with the payload in it, and the header of each key."""

    fmt: ChunkFormat
    buffers: tuple[memoryview, ...]
    keys: tuple[bytes, ...]
    names: tuple[bytes, ...]
    headers: tuple[bytes, ...]


class Meter:
    """Writes and reads every cell of a plan, once. Used by one thread.

    The tier's namespace is taken to be the meter's own: it is cleared whenever what was written would
    grow beyond `space_bytes`, but not at the end.

    Args:
        tier: where to; not closed here.
        plan: what to measure, in which order.
        max_seconds: no operation is started later; those under way are waited for.
        space_bytes: what may lie on the tier at once; at least `plan.space_bytes`.
        clock: seconds, monotonic.
        on_progress: called before each step and at the end.
    """

    def __init__(
        self,
        tier: Tier,
        plan: Plan,
        *,
        max_seconds: float,
        space_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._tier = tier
        self._plan = plan
        self._max_seconds = max_seconds
        self._space_bytes = max(space_bytes, plan.space_bytes)
        self._clock = clock
        self._on_progress = on_progress
        self._start_s = clock()
        self._hard_s = self._start_s + max_seconds
        self._left = KINDS * len(plan.cells)
        self._failed = 0
        self._lying_bytes = 0
        self._payload = memoryview(os.urandom(max(cell.num_bytes for cell in plan.cells)))
        self._keys: list[bytes] = []
        self._used_keys = 0
        self._numbers = count()
        self.moved_bytes = 0
        """Written and read so far."""

    @property
    def elapsed_s(self) -> float:
        """Since the meter was made."""
        return self._clock() - self._start_s

    def run(self) -> tuple[Outcome, ...]:
        """The outcome of every cell, written and read.

        A cell that fails is an outcome without a measurement; more than `MAX_FAILED` end the run.

        Raises:
            TierError: the warm-up failed, too many cells did, or a chunk came back with other bytes.
        """
        self._tell(None)
        self._warm_up()
        outcomes: list[Outcome] = []
        for cell in self._plan.cells:
            outcomes += self._measure(cell)
        for cell in self._plan.left_out:
            outcomes += [_outcome("write", cell, TOO_MANY_BYTES), _outcome("read", cell, TOO_MANY_BYTES)]
        self._tell(None)
        return tuple(outcomes)

    def _warm_up(self) -> None:
        """Folders, connections and the like are made here, so that no cell pays for them."""
        cell = warm_up(self._plan.max_concurrency)
        images = self._images(cell)
        soft_s = self._start_s + WARM_UP_SHARE * self._max_seconds
        self._loop("write", cell, images, range(len(images.keys)), soft_s)
        self._clear()

    def _measure(self, cell: Cell) -> list[Outcome]:
        if self._clock() >= self._hard_s:
            self._left -= KINDS
            return [_outcome("write", cell, TIME_IS_UP), _outcome("read", cell, TIME_IS_UP)]
        if self._lying_bytes + cell.written_bytes > self._space_bytes:
            self._clear()
        images = self._images(cell)
        written, numbers = self._try("write", cell, images, range(len(images.keys)))
        read, _ = self._try("read", cell, images, numbers)
        # Nothing to read is no trouble of its own.
        return [written, read if numbers else _outcome("read", cell, written.missing)]

    def _try(self, kind: Kind, cell: Cell, images: _Images, numbers: Sequence[int]) -> tuple[Outcome, list[int]]:
        """The outcome, and which images went through."""
        self._tell(kind, cell)
        now_s = self._clock()
        soft_s = now_s + (self._hard_s - now_s) / self._left
        self._left -= 1
        if not numbers:
            return _outcome(kind, cell, TIME_IS_UP), []
        try:
            loop = self._loop(kind, cell, images, numbers, soft_s)
        except TierUnavailableError as error:
            self._failed += 1
            if self._failed > MAX_FAILED:
                raise
            return _outcome(kind, cell, str(error)), []
        if not loop.is_enough:
            return _outcome(kind, cell, TIME_IS_UP), loop.ended
        seconds, wall_s = loop.results()
        measurement = Measurement(kind, cell.num_bytes, cell.concurrency, seconds, wall_s)
        return Outcome(kind, cell.num_bytes, cell.concurrency, measurement), loop.ended

    def _loop(self, kind: Kind, cell: Cell, images: _Images, numbers: Sequence[int], soft_s: float) -> ClosedLoop:
        tier, clock, num_bytes, header_bytes = self._tier, self._clock, cell.num_bytes, images.fmt.header_bytes
        held = [-1] * cell.concurrency

        def write(stream: int, number: int) -> Timed:
            at, buffer = numbers[number], images.buffers[stream]
            buffer[:header_bytes] = images.headers[at]
            start_s = clock()
            written = tier.store(images.names[at], buffer, num_bytes)
            end_s = clock()
            if written != num_bytes:
                raise TierError(f"{tier.name}: a store of {num_bytes} bytes wrote {written}", reason=INTERNAL)
            return Timed(end_s, start_s)

        def read(stream: int, number: int) -> Timed:
            at, buffer = numbers[number % len(numbers)], images.buffers[stream]
            start_s = clock()
            tier.load(images.names[at], buffer, num_bytes)
            end_s = clock()
            held[stream] = at
            return Timed(end_s, start_s)

        if kind == "read":
            for buffer in images.buffers:
                buffer[:header_bytes] = bytes(header_bytes)
        limits = Limits(cell.num_ops, cell.min_ops, cell.max_started, soft_s, self._hard_s)
        loop = ClosedLoop(write if kind == "write" else read, cell.concurrency, limits, clock)
        loop.run()
        self.moved_bytes += len(loop.ended) * num_bytes
        # Not timed: what came back last has to be what was stored.
        for buffer, at in zip(images.buffers, held, strict=True):
            if at >= 0:
                images.fmt.verify(buffer, num_bytes, images.keys[at])
        return loop

    def _images(self, cell: Cell) -> _Images:
        self._lying_bytes += cell.written_bytes
        keys = self._take_keys(cell.max_started)
        fmt = _format(cell.num_bytes)
        buffers = []
        for _ in range(cell.concurrency):
            buffer = memoryview(mmap.mmap(-1, round_up(cell.num_bytes)))
            buffer[fmt.header_bytes : cell.num_bytes] = self._payload[: fmt.payload_bytes]
            buffers.append(buffer)
        headers = []
        for key in keys:
            fmt.seal(buffers[0], key)
            headers.append(bytes(buffers[0][: fmt.header_bytes]))
        return _Images(fmt, tuple(buffers), keys, tuple(stored_key(key, 0, 0) for key in keys), tuple(headers))

    def _take_keys(self, num_keys: int) -> tuple[bytes, ...]:
        """Keys under which nothing lies."""
        end = self._used_keys + num_keys
        while len(self._keys) < end:
            key = hashlib.sha256(next(self._numbers).to_bytes(8, "big")).digest()
            if int(fan_out(stored_key(key, 0, 0)), 16) < NUM_FOLDERS:
                self._keys.append(key)
        taken = tuple(self._keys[self._used_keys : end])
        self._used_keys = end
        return taken

    def _clear(self) -> None:
        self._tier.clear()
        self._lying_bytes = self._used_keys = 0

    def _tell(self, kind: Kind | None, cell: Cell | None = None) -> None:
        total = KINDS * len(self._plan.cells)
        size, threads = (cell.num_bytes, cell.concurrency) if cell else (0, 0)
        self._on_progress(Progress(total - self._left, total, kind, size, threads, self.elapsed_s))


def _outcome(kind: Kind, cell: Cell, missing: str) -> Outcome:
    return Outcome(kind, cell.num_bytes, cell.concurrency, None, missing)


def _format(num_bytes: int) -> ChunkFormat:
    """A chunk file of exactly `num_bytes`."""

    def of(payload_bytes: int) -> ChunkFormat:
        return ChunkFormat([TensorSpec("calibration", "U8", (payload_bytes,))], namespace="calibration", num_tokens=1)

    return of(num_bytes - of(1).header_bytes)
