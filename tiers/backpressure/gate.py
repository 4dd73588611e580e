"""The gate of one tier: what its ranks report, turned into what a detector is fed.

A detector knows one thing, how long a store took for its bytes. That alone cannot tell a slow tier
from a busy one, from one that hangs, or from one that had the chunk already. The gate stands before
it and feeds it the right figure:

    Wrote ──▶ bytes really written, the tier's own time, less the fixed cost, its share ──▶ detector
    stall ──▶ the same for the oldest store that has not come home: a sample still growing ─▶ detector

Each of these corrections is a switch in `Signals`. With all of them off the detector sees what a
plain connector would feed it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from kvsluice.tiers import reasons
from kvsluice.tiers.backpressure.base import BackpressureDetector, is_network
from kvsluice.tiers.backpressure.traffic import LOST_S, Spent, Stall
from kvsluice.tiers.errors import ConfigError

__all__ = [
    "LOCAL_FIXED_COST_S",
    "NETWORK_FIXED_COST_S",
    "PLAIN",
    "Gate",
    "Signals",
    "SupportsLowMark",
    "max_fixed_cost_s",
]

_MIB: Final = 1 << 20

LOCAL_FIXED_COST_S: Final = 0.0005
"""The most that is taken for a fixed cost on a local tier: a system call, a seek on flash. A guess."""
NETWORK_FIXED_COST_S: Final = 0.030
"""The same over a network: a small PUT to a distant object store takes 10 to 30 ms. A guess."""
FIXED_COST_FALL: Final = 0.3
FIXED_COST_RISE: Final = 1 / 64
"""A learned cost follows the fastest of the last stores: it falls by a third of the way and rises slowly. A guess."""
DRAIN_ALPHA: Final = 0.15
"""Weight of a new store in the measured rate; the detector's own default."""
PROBE_AFTER_S: Final = LOST_S
MAX_PROBE_AFTER_S: Final = 40.0
"""Seconds without a store coming home after which one is let through, then twice as long, up to the latter."""
_DRAIN_KEEP: Final = 1 - DRAIN_ALPHA
DRAIN_HALF_LIFE_S: Final = 2.0
"""The measured rate counts half after so long without a store; the detector's own default."""


def max_fixed_cost_s(tier_type: str, locality: str | None) -> float:
    """The most that a gate of this kind of tier learns as a fixed cost; none for host memory, which has none."""
    if tier_type == "host":
        return 0.0
    return NETWORK_FIXED_COST_S if is_network(tier_type, locality) else LOCAL_FIXED_COST_S


@runtime_checkable
class SupportsLowMark(Protocol):
    """A detector with a mark below which a store counts as fast; what is learned of fixed costs starts there."""

    @property
    def low_water_s(self) -> float:
        """Seconds per MiB."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a gate looks at beyond seconds and bytes; all on by default.

    Attributes:
        in_flight: the oldest store that has not come home counts as a sample that is still growing.
        written_only: a chunk that the tier had already teaches nothing. Off: it counts as written.
        own_time: the tier's own I/O time counts. Off: the time in its queue counts too.
        goodput: of that time, a store's share beside all that runs at once. Off: the whole of it.
        queue_time: a store that could not start within the tier's `max_queue_s` at the measured rate
            is refused before it takes a buffer. Off: only the count of open stores is bounded.
        fixed_cost_s: seconds of each store that do not depend on its size and are not held against the
            tier; 0 for none, None to learn it from the fastest store seen.

    Raises:
        ConfigError: a switch that is no bool, a cost that is no number of seconds.
    """

    in_flight: bool = True
    written_only: bool = True
    own_time: bool = True
    goodput: bool = True
    queue_time: bool = True
    fixed_cost_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("in_flight", "written_only", "own_time", "goodput", "queue_time"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        cost_s = self.fixed_cost_s
        if cost_s is None:
            return
        if isinstance(cost_s, bool) or not isinstance(cost_s, (int, float)) or not 0 <= cost_s < math.inf:
            raise ConfigError(f"fixed_cost_s must be a number of seconds from 0 on, or null, got {cost_s!r}")


PLAIN: Final = Signals(
    in_flight=False, written_only=False, own_time=False, goodput=False, queue_time=False, fixed_cost_s=0.0
)
"""All off: the detector alone."""


class Gate:
    """A detector with its policy, and what it is fed.

    Thread-safety: none; the planner's thread alone.

    Args:
        detector: made by `build_gate`, or a stranger's.
        signals: what to look at.
        max_fixed_cost_s: the most that is learned as a fixed cost, where that is learned.
        clock: seconds, monotonic.
    """

    __slots__ = (
        "_clock",
        "_drain_s",
        "_drained_s",
        "_first_fixed_cost_s",
        "_goodput",
        "_learns",
        "_low_s_per_byte",
        "_own_time",
        "_probe_after_s",
        "_probe_at_s",
        "_quiet_s",
        "_stall_drain_s",
        "_tell",
        "_written_only",
        "detector",
        "fixed_cost_s",
        "should_store",
        "signals",
    )

    def __init__(
        self,
        detector: BackpressureDetector,
        signals: Signals | None = None,
        *,
        max_fixed_cost_s: float = LOCAL_FIXED_COST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.detector = detector
        self.signals = Signals() if signals is None else signals
        self.should_store = detector.should_store
        """Ask about one store of so many blocks: the detector's own method, without a call between."""
        self._tell = detector.on_store_completed
        self._written_only = self.signals.written_only
        self._own_time = self.signals.own_time
        self._goodput = self.signals.goodput
        low_s = detector.low_water_s if isinstance(detector, SupportsLowMark) else None
        self._learns = self.signals.fixed_cost_s is None and low_s is not None and max_fixed_cost_s > 0
        self._low_s_per_byte = (low_s or 0.0) / _MIB
        self._first_fixed_cost_s = self.signals.fixed_cost_s or (max_fixed_cost_s if self._learns else 0.0)
        self.fixed_cost_s = self._first_fixed_cost_s
        """Seconds of each store that are not held against the tier."""
        self._drain_s = 0.0
        self._drained_s = 0.0
        self._stall_drain_s = 0.0
        self._quiet_s = 0.0
        self._probe_at_s = 0.0
        self._probe_after_s = PROBE_AFTER_S

    # What the ranks report.

    def on_store_ended(self, num_bytes: int, spent: Spent, *, queue_s: float = 0.0, chunk_bytes: int = 0) -> None:
        """One rank's store is over and the tier holds the chunk.

        Args:
            num_bytes: really written; 0 where the tier had the chunk.
            spent: the tier's own time.
            queue_s: how long it waited for a thread before.
            chunk_bytes: what was to be written.
        """
        # Spelled out, without a call for each rule: this is paid for every chunk of every tier.
        drain_s = self._drain_s
        self._drain_s = DRAIN_ALPHA * spent.drain_s + _DRAIN_KEEP * drain_s if drain_s else spent.drain_s
        self._drained_s = self._clock()
        self._probe_after_s = PROBE_AFTER_S
        # One came home; whether the others hang is told by the next report.
        self._stall_drain_s = self._quiet_s = 0.0
        if num_bytes <= 0:
            if self._written_only:
                return
            num_bytes = chunk_bytes
        elapsed_s = own_s = spent.elapsed_s
        if self._learns:
            # What the fastest store took beyond what its bytes may take on a tier that is well. A tier that
            # has been slow from its first store on cannot hide behind it: it is bounded.
            beyond_s = elapsed_s - self._low_s_per_byte * num_bytes
            known_s = self.fixed_cost_s
            if beyond_s < known_s:
                # Not all the way: one that was lucky must not make the others look slow.
                self.fixed_cost_s = known_s + FIXED_COST_FALL * (max(0.0, beyond_s) - known_s)
            else:
                self.fixed_cost_s = known_s + FIXED_COST_RISE * (self._first_fixed_cost_s - known_s)
        if self.fixed_cost_s:
            own_s = elapsed_s - self.fixed_cost_s
            if own_s < 0.0:
                own_s = 0.0
        # Fixed costs of stores that run at once pass at once; what is left of them is shared.
        if self._goodput and elapsed_s > 0.0:
            own_s *= spent.share_s / elapsed_s
        if not self._own_time:
            own_s += queue_s
        self._tell(own_s, num_bytes)

    def on_store_failed(self) -> None:
        """One rank's store failed through the tier's fault."""
        self.detector.on_store_failed()

    def on_stall(self, stall: Stall, chunk_bytes: int) -> None:
        """How long stores have been under way on one rank without one coming home, as of its report.

        Args:
            stall: all 0 where none is under way.
            chunk_bytes: what each of them is to write.
        """
        self._stall_drain_s = stall.drain_s
        self._quiet_s = stall.quiet_s
        if self.signals.in_flight:
            age_s = stall.quiet_s
            own_s = max(0.0, age_s - self.fixed_cost_s)
            if self._goodput and age_s > 0.0:
                own_s *= stall.share_s / age_s
            self.detector.on_store_in_flight(own_s, chunk_bytes)

    # What is asked.

    def refusal(self, num_blocks: int, stores_ahead: int, max_wait_s: float) -> str | None:
        """Ask about one store of `num_blocks` blocks that comes behind `stores_ahead` others.

        None lets it go. Else why not: `queue_slow` where it would wait for longer than `max_wait_s`,
        `gate` where the detector's policy says so. Where nothing has come home for long, one store in a
        while is let through all the same: what hangs may be lost for good, and then only a new one can
        tell that the tier works again.
        """
        if self.wait_s(stores_ahead) > max_wait_s:
            reason = reasons.QUEUE_SLOW
        elif self.should_store(num_blocks):
            return None
        else:
            reason = reasons.GATE
        # Without either signal nothing that hangs is held against the tier, and the detector's word is all.
        hangs = self._quiet_s >= PROBE_AFTER_S and (self.signals.in_flight or self.signals.queue_time)
        return None if hangs and self._may_probe() else reason

    def _may_probe(self) -> bool:
        now_s = self._clock()
        if now_s < self._probe_at_s:
            return False
        self._probe_at_s = now_s + self._probe_after_s
        self._probe_after_s = min(2 * self._probe_after_s, MAX_PROBE_AFTER_S)
        return True

    def wait_s(self, stores_ahead: int) -> float:
        """How long a store will wait that comes behind `stores_ahead` others, at the rate of the last ones.

        0.0 before the first has come home, and with `queue_time` off. What the last ones took says less the
        longer ago it was: on a tier that others use as well it may have been their doing.
        """
        drain_s = self._drain_s
        if not drain_s or not stores_ahead or not self.signals.queue_time:
            return 0.0
        idle_s = self._clock() - self._drained_s
        if idle_s > 0.0:
            drain_s *= 0.5 ** (idle_s / DRAIN_HALF_LIFE_S)
        return stores_ahead * (drain_s if drain_s > self._stall_drain_s else self._stall_drain_s)  # noqa: FURB136

    def is_under_pressure(self) -> bool:
        """The detector's word; may bring its state up to date with the clock."""
        return self.detector.is_under_pressure()

    @property
    def stats(self) -> Mapping[str, float]:
        """The detector's, and `fixed_cost` and `store_interval` in seconds: what is measured here."""
        return {
            **self.detector.stats,
            "fixed_cost": self.fixed_cost_s,
            "store_interval": max(self._drain_s, self._stall_drain_s),
        }
