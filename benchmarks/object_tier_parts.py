"""The second part of `object_tier`: one request for an object, or several parts of it side by side.

Plain HTTP without any client library around it, straight to the server and over a path that limits
each connection. A GET is split into ranges, a PUT into a multipart upload with its two requests more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from object_tier_cells import MIB, Spread, Timing, aligned_buffers, drive, spread_of, stamp
from object_tier_http import Connection, RefusedError, Signer, completion, upload_id_of
from object_tier_path import limited_path
from object_tier_space import HEAD_BYTES, Space

MIN_PART_BYTES: Final = 5 * MIB
"""Of every part of a multipart upload but the last, by the S3 reference; RGW refuses smaller ones."""
STRAIGHT = "straight"
LIMITED = "limited"


@dataclass(frozen=True)
class PartsPlan:
    """What is measured.

    Attributes:
        parts: the first is what the others are compared with.
        cell_bytes: of a cell; at least two operations for each one in flight are done in any case.
        mbps, rtt_ms: of each connection over the limited path.
    """

    sizes_bytes: Sequence[int]
    in_flight: Sequence[int]
    parts: Sequence[int]
    rounds: int
    cell_bytes: int
    mbps: float
    rtt_ms: float


@dataclass(frozen=True)
class PartsCell:
    """One size and way, and what became of it with each number of parts.

    Attributes:
        seconds: an operation takes, for each number of parts.
        gain: rate as a multiple of the rate with one request in the same round.
    """

    path: str
    operation: str
    size_bytes: int
    in_flight: int
    seconds: dict[int, Spread]
    gain: dict[int, Spread]


def cut(num_bytes: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges [begin, end) of whole MiB, as even as that allows, for an object of so many bytes.

    The first ones are the longer ones; the last one has what is left.
    """
    step = -(-num_bytes // parts)
    step = -(-step // MIB) * MIB if num_bytes >= parts * MIB else step
    bounds = [min(number * step, num_bytes) for number in range(parts + 1)]
    return list(itertools.pairwise(bounds))


class Mover:
    """Moves one object at a time, over as many connections as it has parts at most. One thread's own."""

    def __init__(self, signer: Signer, port: int | None, max_parts: int) -> None:
        self._signer = signer
        self._connections = [Connection(signer.endpoint, port) for _ in range(max_parts)]
        self._pool = ThreadPoolExecutor(max_parts)

    def prepare(self) -> None:
        for _ in self._pool.map(Connection.prepare, self._connections):
            pass

    def get(self, key: str, buffer: memoryview, parts: int) -> None:
        if parts == 1:
            self._connections[0].get(self._signer.sign("GET", key), buffer)
            return

        def one(number: int, bounds: tuple[int, int]) -> None:
            begin, end = bounds
            request = self._signer.sign("GET", key, headers={"Range": f"bytes={begin}-{end - 1}"})
            self._connections[number].get(request, buffer[begin:end])

        for _ in self._pool.map(one, range(parts), cut(buffer.nbytes, parts)):
            pass

    def put(self, key: str, buffer: memoryview, parts: int) -> None:
        if parts == 1:
            self._connections[0].put(self._signer.sign("PUT", key), buffer)
            return
        first = self._connections[0]
        upload_id = upload_id_of(first.call(self._signer.sign("POST", key, "uploads=")))

        def one(number: int, bounds: tuple[int, int]) -> str:
            query = f"partNumber={number + 1}&uploadId={upload_id}"
            return self._connections[number].put(self._signer.sign("PUT", key, query), buffer[slice(*bounds)])

        etags = list(self._pool.map(one, range(parts), cut(buffer.nbytes, parts)))
        first.call(self._signer.sign("POST", key, f"uploadId={upload_id}"), completion(etags))

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


class _Bench:
    """All cells of one path, size and number in flight."""

    def __init__(self, space: Space, movers: list[Mover], buffers: list[memoryview], plan: PartsPlan) -> None:
        self._space = space
        self._movers = movers
        self._buffers = buffers
        self._size_bytes = buffers[0].nbytes
        self._operations = max(2 * len(movers), plan.cell_bytes // self._size_bytes)
        self._keys = [f"{space.prefix}/parts/{number}" for number in range(self._operations)]

    def _drive(self, operation: str, parts: int) -> Timing:
        for mover in self._movers:
            mover.prepare()

        def one(slot: int, number: int) -> None:
            if operation == "GET":
                self._movers[slot].get(self._keys[number % len(self._movers)], self._buffers[slot], parts)
            else:
                self._movers[slot].put(self._keys[number], self._buffers[slot], parts)

        return drive(len(self._movers), self._operations, one)

    def get(self, parts: int) -> Timing:
        timing = self._drive("GET", parts)
        # One more, so that its bytes are there to be compared and in no other buffer before.
        buffer = self._buffers[0]
        for number in range(2):
            buffer[:] = bytes(buffer.nbytes)
            self._movers[0].get(self._keys[number % len(self._movers)], buffer, parts)
            if int.from_bytes(buffer[:8], "big") != number % len(self._movers) or buffer[:8] != buffer[-8:]:
                raise RefusedError(f"GET in {parts} parts: other bytes than were put")
        return timing

    def put(self, parts: int) -> Timing:
        num_bytes = self._operations * self._size_bytes
        self._space.room.take(num_bytes)
        try:
            return self._drive("PUT", parts)
        finally:
            head_bytes = self._operations * min(self._size_bytes, HEAD_BYTES) if parts == 1 else 0
            self._space.delete(self._keys, num_bytes, num_bytes - head_bytes)

    @contextmanager
    def sources(self) -> Iterator[None]:
        """While inside, the objects that are read lie on the server."""
        num_bytes = len(self._movers) * self._size_bytes
        self._space.room.take(num_bytes)
        for slot, (mover, buffer) in enumerate(zip(self._movers, self._buffers, strict=True)):
            stamp(buffer, slot)
            mover.put(self._keys[slot], buffer, 1)
        try:
            yield
        finally:
            self._space.delete(self._keys[: len(self._movers)], num_bytes, num_bytes)


def usable(operation: str, size_bytes: int, parts: int) -> bool:
    """Whether the server takes so many parts; ranges may be as small as they like."""
    if operation == "GET" or parts == 1:
        return True
    return all(end - begin >= MIN_PART_BYTES for begin, end in cut(size_bytes, parts)[:-1])


def _measure(path: str, port: int | None, signer: Signer, space: Space, plan: PartsPlan) -> Iterator[PartsCell]:
    for size_bytes in plan.sizes_bytes:
        for in_flight in plan.in_flight:
            with ExitStack() as stack:
                movers = [Mover(signer, port, max(plan.parts)) for _ in range(in_flight)]
                for mover in movers:
                    stack.callback(mover.close)
                buffers = aligned_buffers(in_flight, size_bytes)
                bench = _Bench(space, movers, buffers, plan)
                yield _cell(path, "PUT", bench, size_bytes, in_flight, plan)
                with bench.sources():
                    yield _cell(path, "GET", bench, size_bytes, in_flight, plan)


def _cell(path: str, operation: str, bench: _Bench, size_bytes: int, in_flight: int, plan: PartsPlan) -> PartsCell:
    parts = [number for number in plan.parts if usable(operation, size_bytes, number)]
    run = bench.put if operation == "PUT" else bench.get
    seconds: dict[int, list[float]] = {number: [] for number in parts}
    for number_of_round in range(plan.rounds):
        turn = number_of_round % len(parts)
        for number in parts[turn:] + parts[:turn]:
            timing = run(number)
            seconds[number].append(timing.elapsed_s * in_flight / timing.operations)
    gains = {number: [one / many for one, many in zip(seconds[1], seconds[number], strict=True)] for number in parts}
    return PartsCell(
        path,
        operation,
        size_bytes,
        in_flight,
        {number: spread_of(values) for number, values in seconds.items()},
        {number: spread_of(values) for number, values in gains.items()},
    )


def measure_parts(signer: Signer, space: Space, plan: PartsPlan) -> Iterator[PartsCell]:
    """Cell by cell, as they are done; the limited path is for plain http alone."""
    yield from _measure(STRAIGHT, None, signer, space, plan)
    if signer.endpoint.scheme != "http":
        raise RefusedError("the limited path forwards plain http alone: give an http endpoint for --parts")
    host, port = signer.endpoint.hostname or "", signer.endpoint.port or 80
    with limited_path(host, port, plan.mbps, plan.rtt_ms) as forwarder:
        yield from _measure(LIMITED, forwarder, signer, space, plan)
