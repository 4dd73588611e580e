"""The rounds of `object_tier`: the clients take turns on one size, way and number in flight after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from object_tier_cells import Timing, aligned_buffers, drive, stamp
from object_tier_clients import Client, Contenders, Item
from object_tier_http import RefusedError
from object_tier_report import Cell
from object_tier_space import HEAD_BYTES, Space


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        cell_s: a client's turn takes about that long, as its own warm-up tells.
        min_per_slot: operations of a turn for each one in flight, at least.
        max_cell_bytes: of a turn, unless `min_per_slot` asks for more.
        sources: objects that the GETs of one size read in turn.
    """

    sizes_bytes: Sequence[int]
    in_flight: Sequence[int]
    rounds: int
    cell_s: float
    min_per_slot: int = 2
    max_cell_bytes: int = 256 << 20
    sources: int = 8


class _Bench:
    """All cells of one size."""

    def __init__(self, contenders: Contenders, space: Space, plan: Plan, size_bytes: int) -> None:
        self._contenders = contenders
        self._space = space
        self._plan = plan
        self._size_bytes = size_bytes
        self._buffers = aligned_buffers(max(plan.in_flight), size_bytes)
        self._sources: list[Item] = []

    @contextmanager
    def sources(self) -> Iterator[None]:
        """While inside, the objects that are read lie on the server, no two alike."""
        self._sources = self._contenders.new_items(self._plan.sources)
        client = self._contenders.clients("GET")[-1]
        client.prepare("PUT", 1, self._sources)
        with self._room(self._sources):
            for number, item in enumerate(self._sources):
                stamp(self._buffers[0], number)
                client.put(0, item, self._buffers[0])
            yield

    @contextmanager
    def _room(self, items: list[Item]) -> Iterator[None]:
        """Room for these objects, which are gone on the way out."""
        num_bytes = len(items) * self._size_bytes
        self._space.room.take(num_bytes)
        try:
            yield
        finally:
            tail_bytes = len(items) * max(0, self._size_bytes - HEAD_BYTES)
            self._space.delete([item.name for item in items], num_bytes, tail_bytes)

    def turn(self, client: Client, operation: str, in_flight: int, operations: int) -> Timing:
        return (
            self._put(client, in_flight, operations) if operation == "PUT" else self._get(client, in_flight, operations)
        )

    def _put(self, client: Client, in_flight: int, operations: int) -> Timing:
        items = self._contenders.new_items(operations)
        with self._room(items):
            client.prepare("PUT", in_flight, items)
            return drive(in_flight, operations, lambda slot, at: client.put(slot, items[at], self._buffers[slot]))

    def _get(self, client: Client, in_flight: int, operations: int) -> Timing:
        sources = self._sources
        client.prepare("GET", in_flight, sources)

        def one(slot: int, at: int) -> None:
            client.get(slot, sources[at % len(sources)], self._buffers[slot])

        timing = drive(in_flight, operations, one)
        self._compare(client)
        return timing

    def _compare(self, client: Client) -> None:
        """One more GET, past the clock, into a buffer that held other bytes: all of them are compared."""
        number = len(self._sources) - 1
        expected, buffer = aligned_buffers(2, self._size_bytes)
        stamp(expected, number)
        buffer[:] = bytes(self._size_bytes)
        client.get(0, self._sources[number], buffer)
        if buffer != expected:
            raise RefusedError(f"{client.name}: GET of {self._sources[number].name} gave other bytes than were put")

    def operations(self, client: Client, operation: str, in_flight: int) -> int:
        """For a turn of about `cell_s`: tried out, which opens the connections as well."""
        least = self._plan.min_per_slot * in_flight
        if self._plan.cell_s <= 0:
            return least
        tried = self.turn(client, operation, in_flight, max(in_flight, 4))
        wanted = math.ceil(tried.operations / tried.elapsed_s * self._plan.cell_s)
        return max(least, min(wanted, self._plan.max_cell_bytes // self._size_bytes))

    def cell(self, operation: str, in_flight: int) -> Cell:
        clients = self._contenders.clients(operation)
        operations = {client.name: self.operations(client, operation, in_flight) for client in clients}
        timings: dict[str, list[Timing]] = {client.name: [] for client in clients}
        for number in range(self._plan.rounds):
            turn = number % len(clients)
            # Every other round the other way round, so that nobody always follows the same one.
            order = clients[turn:] + clients[:turn]
            for client in order if number % 2 else reversed(order):
                timings[client.name].append(self.turn(client, operation, in_flight, operations[client.name]))
        return Cell(operation, self._size_bytes, in_flight, timings)


def measure(contenders: Contenders, space: Space, plan: Plan) -> Iterator[Cell]:
    """Cell by cell, as they are done."""
    for size_bytes in plan.sizes_bytes:
        bench = _Bench(contenders, space, plan, size_bytes)
        for in_flight in plan.in_flight:
            yield bench.cell("PUT", in_flight)
        with bench.sources():
            for in_flight in plan.in_flight:
                yield bench.cell("GET", in_flight)
