"""Loads whose layers an engine takes one by one, while later ones are still on their way.

    tier threads       Cohort                     copier                         engine's thread
    chunk read ──────▶ waits for its order's ───▶ layer 0 of all chunks, event ─▶ LayerWatch.events(0)
    chunk missed ────▶ others                     layer 1 of all chunks, event ─▶ LayerWatch.events(1)

A layer is of use when every chunk has it, so the chunks of one order are copied together, layer by layer.
They all hold their slots already: waiting for each other cannot starve them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvsluice.connector.copier import Copier, CopyTask
from kvsluice.kernels.device import Event

__all__ = ["Cohort", "LayerWatch"]


class LayerWatch:
    """What of one load job has been queued on the device, by tensor. Thread-safe.

    Args:
        num_chunks: chunks of the job.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._lock = threading.Lock()
        self._events: dict[int, list[Event]] = {}
        self._missed = False

    @property
    def missed(self) -> bool:
        """Whether any chunk was a miss: the job is of no use layer by layer."""
        return self._missed

    def on_tensor(self, number: int, event: Event) -> None:
        """One chunk's tensor is there once `event` has passed."""
        with self._lock:
            self._events.setdefault(number, []).append(event)

    def on_missed(self) -> None:
        """A chunk will not come."""
        self._missed = True

    def events(self, number: int) -> Sequence[Event] | None:
        """The events behind which every chunk has the tensor; None while some are not queued yet."""
        with self._lock:
            events = self._events.get(number, [])
            return list({id(event): event for event in events}.values()) if len(events) == self._num_chunks else None


class Cohort:
    """Chunks of one order that are copied together: each arrives once it is read and proven, or leaves. Thread-safe.

    Args:
        copier: gets them.
        num_chunks: chunks of the order.
    """

    def __init__(self, copier: Copier, num_chunks: int) -> None:
        self._copier = copier
        self._lock = threading.Lock()
        self._arrived: list[CopyTask] = []
        self._decided: set[int] = set()
        self._num_chunks = num_chunks
        self._gone = False

    def arrive(self, task: CopyTask) -> None:
        """`task` can be copied."""
        with self._lock:
            self._arrived.append(task)
            self._decide(task)

    def leave(self, task: CopyTask) -> None:
        """`task` will not be copied. Nothing more happens to one that has arrived: the copier finds it revoked."""
        with self._lock:
            self._decide(task)

    def _decide(self, task: CopyTask) -> None:
        self._decided.add(id(task))
        self._gone = self._gone or len(self._decided) == self._num_chunks
        if self._gone:
            # Also one that was given up long ago, and whose tier only now comes back with it.
            arrived, self._arrived = self._arrived, []
            self._copier.put_by_tensor(arrived)
