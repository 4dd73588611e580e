"""The load gate: is a hit worth loading, or has the engine computed it sooner?

    lookup ──▶ held chunks, each with the tier that would serve it
                   │
                   ▼   time to load the first m + time to compute the others, least at which m?
               the first m are offered; the others are `slower`

Both sides are measured: how fast each tier's loads come, in whatever company, and how many tokens
the engine prefills in a second. Loads that are open already stand in front of those asked about, so
many requests at once cannot all be sent to a tier that serves only some of them in time.

An estimate that says "slower" keeps everybody away, and so is never proven wrong. Therefore it loses
weight with time, and once it would say "faster", a probe is let through: a few chunks, one probe at
a time per tier, and given up where it takes clearly longer than computing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.load_rates import HALF_LIFE_S, PrefillRate, TierLoadTimes
from kvsluice.connector.orders import HOST
from kvsluice.connector.results import LoadGateStats
from kvsluice.tiers.backpressure import Spent

__all__ = ["PROBE_CHUNKS", "LoadGate", "LoadTier"]

_log = logging.getLogger(__name__)

PROBE_CHUNKS: Final = 8
"""The most chunks of a probe. As many as most tiers serve at once, so that it shows what the tier can do."""
PROBE_PATIENCE: Final = 2.0
"""A probe that takes this many times as long as computing its chunks would have has told enough."""
LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadTier:
    """An I/O tier as the load gate sees it.

    Attributes:
        name: for logs and statistics.
        width: loads that may run at once on one rank.
        interval_s: fixed seconds per chunk; None to measure them.
    """

    name: str
    width: int
    interval_s: float | None = None


@dataclass(slots=True)
class _Stage:
    """One of the things that loads go through side by side; the slowest says how long all take."""

    name: str
    times: TierLoadTimes
    probe_s: float = -math.inf
    """When a probe was last let through."""
    probe_keys: frozenset[bytes] = frozenset()
    """The chunks that it offered, until a load asks for them."""
    is_silent: bool = False
    """Whether the last that was asked of it failed."""
    is_back: bool = False
    """Whether it has answered since, and no probe has been let through for that."""


class _Line:
    """What stands before one stage, and how long it takes until so and so many have come.

    Args:
        count: loads that are open already.
        table: see `TierLoadTimes.table`.
        kept: what the table is multiplied by.
    """

    __slots__ = ("count", "interval_s", "table", "width")

    def __init__(self, count: int, table: Sequence[float], kept: float) -> None:
        self.count = count
        self.table = table if kept == 1.0 else [time_s * kept for time_s in table]
        self.width = len(table) - 1
        self.interval_s = self.table[-1] / self.width

    def time_s(self, count: int) -> float:
        """Until `count` loads have come."""
        return self.table[count] if count <= self.width else count * self.interval_s


class LoadGate:
    """Not thread-safe: the planner's alone. Every time is the planner's own, handed in as `now_s`.

    Args:
        tiers: the I/O tiers by their place in the ladder.
        tokens_per_chunk: what the engine computes for a chunk that is not loaded.
        prefill_tokens_per_s: fixed rate of the engine; None to have it told by `observe_prefill`.
        margin: a load must take less than this many times as long as computing.
    """

    def __init__(
        self,
        tiers: Mapping[int, LoadTier],
        *,
        tokens_per_chunk: int,
        prefill_tokens_per_s: float | None = None,
        margin: float = 1.0,
    ) -> None:
        self._tokens = tokens_per_chunk
        self._margin = margin
        self._prefill = PrefillRate(prefill_tokens_per_s)
        self._stages = {at: _Stage(tier.name, TierLoadTimes(tier.width, tier.interval_s)) for at, tier in tiers.items()}
        # One thread makes the copies of all loads, so it is a stage of its own and never two wide.
        self._stages[HOST] = _Stage("host memory", TierLoadTimes(1))
        self._logged_s = -math.inf

    # ---- what is measured --------------------------------------------------------------------

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        """See `OffloadConnector.observe_prefill`."""
        self._prefill.observe(num_tokens, elapsed_s)

    def on_opened(self, tier: int, now_s: float) -> None:
        """A load was asked for from `tier`, or from a slot (`HOST`), where none was open."""
        self._stages[tier].times.on_opened(now_s)

    def on_loaded(self, tier: int, drain_s: float, elapsed_s: float, now_s: float) -> None:
        """A chunk has come from `tier` on every rank; the times are the slowest rank's."""
        stage = self._stages[tier]
        stage.times.on_loaded(drain_s, elapsed_s, now_s)
        # Whatever it was before, what it does now is being measured.
        stage.is_silent = stage.is_back = False

    def on_copied(self, copy_s: float, now_s: float) -> None:
        """A chunk was copied into its blocks on every rank."""
        times = self._stages[HOST].times
        times.on_loaded(copy_s, copy_s, now_s)
        # Copies are made one by one: none waits for others to be taken together with.
        times.on_quiet(now_s)

    def on_late(self, tier: int, waited_s: float, place: int, now_s: float) -> None:
        """A chunk did not come from `tier` in `waited_s`; `place` loads were to come up to and with it."""
        self._stages[tier].times.on_late(waited_s, place, now_s)

    def on_failed(self, tier: int, waited_s: float, place: int, now_s: float) -> None:
        """A load of a chunk from `tier` failed after `waited_s`; `place` as in `on_late`."""
        self._stages[tier].times.on_failed(waited_s, place, now_s)
        self.on_asked(tier, answered=False)

    def on_asked(self, tier: int, *, answered: bool) -> None:
        """`tier` was asked what it holds. Once it answers again, how slow it was while it went is not waited out."""
        stage = self._stages[tier]
        stage.is_back = answered and (stage.is_back or stage.is_silent)
        stage.is_silent = not answered

    def on_lost(self, tier: int) -> None:
        """A load at `tier` was given up, or came from elsewhere."""
        self._stages[tier].times.on_lost()

    def on_quiet(self, tier: int, now_s: float) -> None:
        """No load is open at `tier` any more."""
        self._stages[tier].times.on_quiet(now_s)

    def on_stall(self, tier: int, stall: Spent, now_s: float) -> None:
        """What the next load to come from `tier` has taken so far, on the rank that has waited longest.

        To be told only while a load is open there: a read that everybody has given up may never end.
        """
        self._stages[tier].times.on_stall(stall, now_s)

    # ---- what is asked -----------------------------------------------------------------------

    def offer(
        self,
        served_by: Sequence[int],
        open_loads: Mapping[int, int],
        now_s: float,
        *,
        probe_keys: Sequence[bytes] | None,
    ) -> int:
        """How many leading chunks are worth loading.

        Args:
            served_by: per chunk the tier that it would come from, `HOST` for a slot.
            open_loads: by tier, loads that wait for it or are being read; under `HOST` those of slots.
            now_s: by the planner's clock.
            probe_keys: the chunks' keys, at least as many as `served_by`; None where the answer is not
                acted upon, so that it holds no probe.
        """
        chunk_s = self._chunk_s
        stages = {at: self._stages[at] for at in {*served_by, HOST}}
        if chunk_s is None or not any(stage.times.known for stage in stages.values()):
            return len(served_by)
        lines = self._lines(stages, open_loads)
        if self._all_gain(stages, lines, served_by, chunk_s):
            return len(served_by)
        best = _best(lines, served_by, chunk_s)
        if best == len(served_by):
            return best
        self._tell(stages, open_loads, served_by, best, chunk_s, now_s)
        if probe_keys is None:
            return best
        at = served_by[best]
        probed = self._probe(stages, open_loads, served_by, best, chunk_s, now_s)
        if probed:
            stages[at].probe_s, stages[at].probe_keys = now_s, frozenset(probe_keys[best : best + probed])
        return best + probed

    def patience_s(self, sources: Iterable[int], keys: Sequence[bytes], timeout_s: float, now_s: float) -> float:
        """How long a load of `keys` from `sources` may take: less than `timeout_s` where a probe offered them."""
        chunk_s = self._chunk_s
        for at in sources:
            stage = self._stages[at]
            if chunk_s is not None and not stage.probe_keys.isdisjoint(keys):
                stage.probe_keys = frozenset()
                if now_s - stage.probe_s < HALF_LIFE_S:
                    timeout_s = min(timeout_s, PROBE_PATIENCE * len(keys) * chunk_s)
        return timeout_s

    @property
    def stats(self) -> LoadGateStats:
        """Both sides as they are known now."""
        token_s = self._prefill.token_s
        return LoadGateStats(
            prefill_tokens_per_s=None if token_s is None else 1.0 / token_s,
            load_interval_s={stage.name: stage.times.interval_s for at, stage in self._stages.items() if at != HOST},
            copy_s=self._stages[HOST].times.interval_s,
        )

    # ---- the rest ----------------------------------------------------------------------------

    @property
    def _chunk_s(self) -> float | None:
        """What a chunk may take to load; None while the engine's rate is not known."""
        token_s = self._prefill.token_s
        return None if token_s is None else self._margin * self._tokens * token_s

    @staticmethod
    def _lines(
        stages: Mapping[int, _Stage], open_loads: Mapping[int, int], now_s: float | None = None
    ) -> dict[int, _Line]:
        """What stands before each stage; with `now_s` what is known of it counts less the older it is."""
        return {
            at: _Line(
                # Every load ends with a copy, wherever it came from.
                sum(open_loads.values()) if at == HOST else open_loads.get(at, 0),
                stage.times.table(),
                1.0 if now_s is None else stage.times.kept(now_s),
            )
            for at, stage in stages.items()
        }

    @staticmethod
    def _all_gain(
        stages: Mapping[int, _Stage], lines: Mapping[int, _Line], served_by: Sequence[int], chunk_s: float
    ) -> bool:
        """Whether it is plain that all are worth it, without a look at each.

        Where no chunk more adds more than it would take to compute, more is never worse than less; then
        all are best unless none is. The first chunk of a tier adds the wait for those that stand there
        already: told apart only for the first of all.
        """
        for at, stage in stages.items():
            if stage.times.steepest_s > chunk_s or (lines[at].count and at not in (served_by[0], HOST)):
                return False
        return max(_times_s(lines, served_by).values()) < len(served_by) * chunk_s

    def _probe(
        self,
        stages: Mapping[int, _Stage],
        open_loads: Mapping[int, int],
        served_by: Sequence[int],
        best: int,
        chunk_s: float,
        now_s: float,
    ) -> int:
        """How many chunks beyond the `best` ones are offered to find out what the next one's tier does now."""
        at = served_by[best]
        stage = stages[at]
        # Loads that are open find it out anyway.
        if open_loads.get(at, 0) or now_s - stage.probe_s < HALF_LIFE_S:
            return 0
        if stage.is_back:
            stage.is_back = False
            return min(len(served_by) - best, PROBE_CHUNKS, stage.times.width)
        if all(known.times.kept(now_s) == 1.0 for known in stages.values()):
            return 0
        hoped = _best(self._lines(stages, open_loads, now_s), served_by, chunk_s)
        if hoped <= best:
            return 0
        return min(hoped - best, PROBE_CHUNKS, stage.times.width)

    def _tell(
        self,
        stages: Mapping[int, _Stage],
        open_loads: Mapping[int, int],
        served_by: Sequence[int],
        best: int,
        chunk_s: float,
        now_s: float,
    ) -> None:
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        times_s = _times_s(self._lines(stages, open_loads), served_by)
        slowest = max(times_s, key=lambda at: times_s[at])
        _log.warning(
            "hits of %s are not used where computing is faster: to load %d chunks takes %.3f s, for %s alone: behind "
            "%d others, %.1f ms from one to the next; to compute them takes %.3f s, at %.0f tokens/s (margin %g)",
            stages[served_by[best]].name,
            len(served_by),
            times_s[slowest],
            "the copies into blocks" if slowest == HOST else stages[slowest].name,
            sum(open_loads.values()) if slowest == HOST else open_loads.get(slowest, 0),
            (stages[slowest].times.interval_s or 0.0) * 1e3,
            len(served_by) * chunk_s / self._margin,
            self._tokens * self._margin / chunk_s,
            self._margin,
        )


def _best(lines: Mapping[int, _Line], served_by: Sequence[int], chunk_s: float) -> int:
    """The number of leading chunks to load for which loading those and computing the others takes least."""
    copies = lines[HOST]
    counts = {at: line.count for at, line in lines.items()}
    best, best_s, slowest_s = 0, 0.0, 0.0
    for number, at in enumerate(served_by, start=1):
        if at != HOST:
            line = lines[at]
            count = counts[at] = counts[at] + 1
            # `time_s` without the call: a long prompt has hundreds of chunks.
            time_s = line.table[count] if count <= line.width else count * line.interval_s
            if time_s > slowest_s:
                slowest_s = time_s
        time_s = (copies.count + number) * copies.interval_s
        if time_s > slowest_s:
            slowest_s = time_s
        # What is not computed is taken off what all would take to compute.
        if slowest_s - number * chunk_s < best_s:
            best, best_s = number, slowest_s - number * chunk_s
    return best


def _times_s(lines: Mapping[int, _Line], served_by: Sequence[int]) -> dict[int, float]:
    """By stage, how long it takes until all have gone through."""
    counts = Counter(served_by)
    counts[HOST] = len(served_by)
    return {at: line.time_s(line.count + counts[at]) for at, line in lines.items()}
