"""How `object_tier` times operations: so many in flight, one buffer for each of them."""

from __future__ import annotations

import itertools
import mmap
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Of one cell.

    Attributes:
        operations: that were done.
        elapsed_s: from the start of the first to the end of the last.
        cpu_s: user and system time of this process alone, all of its threads.
    """

    operations: int
    elapsed_s: float
    cpu_s: float


def drive(in_flight: int, operations: int, operation: Callable[[int, int], None]) -> Timing:
    """Do `operation(slot, number)` for each number, in `in_flight` threads of which each has its slot.

    The threads wait for each other before the clock starts. What an operation raises is raised here.
    """
    numbers = itertools.count()
    gate = threading.Barrier(in_flight + 1)

    def work(slot: int) -> None:
        gate.wait()
        # One step of an itertools.count is atomic in CPython.
        while (number := next(numbers)) < operations:
            operation(slot, number)

    with ThreadPoolExecutor(in_flight) as pool:
        done = [pool.submit(work, slot) for slot in range(in_flight)]
        # The clock first: once the gate opens, the other threads may have the interpreter for a while.
        started_s, cpu_s = time.perf_counter(), time.process_time()
        gate.wait()
        for future in done:
            future.result()
        return Timing(operations, time.perf_counter() - started_s, time.process_time() - cpu_s)


def aligned_buffers(count: int, num_bytes: int) -> list[memoryview]:
    """Buffers that begin on a page, as those of a pinned region do, full of bytes that do not compress."""
    pattern = random.Random(7).randbytes(MIB + 4099)
    buffers = [memoryview(mmap.mmap(-1, num_bytes)) for _ in range(count)]
    for buffer in buffers:
        for begin in range(0, num_bytes, len(pattern)):
            count_bytes = min(len(pattern), num_bytes - begin)
            buffer[begin : begin + count_bytes] = pattern[:count_bytes]
    return buffers


def stamp(buffer: memoryview, number: int) -> None:
    """Make the buffer's bytes those of one object and of no other."""
    buffer[:8] = buffer[-8:] = number.to_bytes(8, "big")


@dataclass(frozen=True)
class Spread:
    """A median and the extremes around it."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def size_name(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes >> 10} KiB"
