"""A detector that smooths seconds per MiB and keeps two marks apart.

    sample ──▶ EMA ──▶ above high: pressure on        asked while on: the EMA decays with the
                       below low:  pressure off       silence, and pressure ends below low
                       between:    as it was

A store that has not come home is a sample that still grows: it is not folded in, but what the EMA
would be if it ended now counts as the EMA does, from the high mark on, until it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Final

from kvsluice.tiers.backpressure.base import BackpressureDetector, BackpressurePolicy, is_network, monotonic_s
from kvsluice.tiers.errors import ConfigError

__all__ = ["EMABackpressureDetector"]

_MIB: Final = 1 << 20
_NEVER: Final = -math.inf
"""A moment whose distance to any other is longer than every cooldown."""


class EMABackpressureDetector(BackpressureDetector):
    """Pressure from an exponential moving average (EMA) of store latency, with hysteresis.

    The unit is seconds per MiB (2**20 bytes) of one store, so that jobs of any size compare.

    Thread-safety: none; every call comes from the planner's thread.

    Args:
        high_water_s: s/MiB; an EMA above it puts the tier under pressure.
        low_water_s: s/MiB, at most `high_water_s`; an EMA below it ends the pressure. An EMA is never
            below 0, so a low mark of 0 is never crossed.
        alpha: weight of a new sample, in (0, 1]. Larger reacts sooner and is noisier.
        warmup_completions: samples that are only collected; the last sets the EMA to their mean, so
            that a cold start is not taken for pressure. 0 starts from an EMA of 0.
        decay_half_life_s: under pressure, the EMA halves in this much silence, so that a tier that is
            sent nothing is tried again. 0 or less: no decay.
        cooldown_s: after pressure ends, every second store is refused for this long, so that the
            backlog does not come down on the tier at once. 0 or less: no cooldown.
        failure_threshold: this many failed stores in a row put the tier under pressure, in warm-up
            too. None: failures never do.
        policy, clock: see `BackpressureDetector`.

    Raises:
        ConfigError: an argument out of its range, by name and value; or a policy that does not fit.
    """

    __slots__ = (
        "_alpha",
        "_cleared_at",
        "_completions",
        "_cooldown_count",
        "_cooldown_s",
        "_decay_half_life_s",
        "_ema",
        "_failure_streak",
        "_failure_threshold",
        "_healthy_streak",
        "_high",
        "_ignored_samples",
        "_keep",
        "_last_update",
        "_low",
        "_stalled",
        "_under_pressure",
        "_warmup_completions",
        "_warmup_sum",
        "_would_be",
    )

    DEFAULT_ALPHA: ClassVar[float] = 0.15
    DEFAULT_WARMUP_COMPLETIONS: ClassVar[int] = 10
    DEFAULT_DECAY_HALF_LIFE_S: ClassVar[float] = 2.0
    DEFAULT_COOLDOWN_S: ClassVar[float] = 1.0

    # The marks that vLLM's detector of this name ships, so that a configuration moves over unchanged.
    LOCAL_HIGH_WATER_S: ClassVar[float] = 0.010
    """100 MiB/s: far below what an NVMe drive or host memory sustains."""
    LOCAL_LOW_WATER_S: ClassVar[float] = 0.002
    """500 MiB/s."""
    NETWORK_HIGH_WATER_S: ClassVar[float] = 0.050
    """20 MiB/s per store: a network filesystem or object store in trouble."""
    NETWORK_LOW_WATER_S: ClassVar[float] = 0.010
    """100 MiB/s."""

    DEFAULT_FAILURE_THRESHOLD: ClassVar[int] = 3
    """For `fs` and `obj`, whose stores can fail one by one; one or two in a row may be chance."""
    FAILURE_HIGH_MARKS: ClassVar[float] = 4.0
    """Where failures put the EMA, in high marks: past 3, where the default throttle refuses all."""
    HEALTHY_COMPLETIONS: ClassVar[int] = 10
    """Completions below the low mark, in a row, after which a store is admitted without more questions."""

    def __init__(
        self,
        high_water_s: float,
        low_water_s: float,
        alpha: float = DEFAULT_ALPHA,
        warmup_completions: int = DEFAULT_WARMUP_COMPLETIONS,
        decay_half_life_s: float = DEFAULT_DECAY_HALF_LIFE_S,
        cooldown_s: float = DEFAULT_COOLDOWN_S,
        failure_threshold: int | None = None,
        policy: BackpressurePolicy | None = None,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        super().__init__(policy=policy, clock=clock)
        self._high = _number("high_water_s", high_water_s, finite=True)
        self._low = _number("low_water_s", low_water_s, finite=True)
        if low_water_s > high_water_s:
            raise ConfigError(f"low_water_s must be at most high_water_s, got {low_water_s!r} > {high_water_s!r}")
        self._alpha = _number("alpha", alpha)
        if not 0 < alpha <= 1:
            raise ConfigError(f"alpha must be in (0, 1], got {alpha!r}")
        self._warmup_completions = _count("warmup_completions", warmup_completions, at_least=0)
        self._decay_half_life_s = _number("decay_half_life_s", decay_half_life_s)
        self._cooldown_s = _number("cooldown_s", cooldown_s)
        self._failure_threshold = (
            None if failure_threshold is None else _count("failure_threshold", failure_threshold, at_least=1)
        )
        self._keep = 1 - alpha
        self._clear_state()

    def _clear_state(self) -> None:
        self._ema = 0.0
        self._under_pressure = False
        self._completions = 0
        self._warmup_sum = 0.0
        self._last_update = 0.0
        self._healthy_streak = 0
        self._failure_streak = 0
        self._ignored_samples = 0
        self._cleared_at = _NEVER
        self._cooldown_count = 0
        self._would_be = 0.0
        self._stalled = False

    @classmethod
    def default_config(cls, tier_type: str, *, locality: str | None = None) -> dict[str, object] | None:
        """The marks for this kind of tier, and for `fs` and `obj` how many failures are too many.

        `obj` and every tier whose locality is REMOTE (any case) get the network marks, all others
        the local ones.
        """
        network = is_network(tier_type, locality)
        config: dict[str, object] = {
            "high_water_s": cls.NETWORK_HIGH_WATER_S if network else cls.LOCAL_HIGH_WATER_S,
            "low_water_s": cls.NETWORK_LOW_WATER_S if network else cls.LOCAL_LOW_WATER_S,
        }
        if tier_type in ("fs", "obj"):
            config["failure_threshold"] = cls.DEFAULT_FAILURE_THRESHOLD
        return config

    # What comes in.

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """One store took `elapsed_s` seconds and really wrote `num_bytes` bytes.

        A store that wrote nothing (the tier had the chunk) teaches nothing. An elapsed time that is
        none (negative, NaN or infinite) is counted and not folded in: it would stay in the EMA.
        """
        if num_bytes <= 0:
            return
        self._failure_streak = 0
        if not 0.0 <= elapsed_s < math.inf:
            self._ignored_samples += 1
            return
        self._completions += 1
        sample_s = elapsed_s / (num_bytes / _MIB)
        if self._stalled:
            sample_s = self._after_stall(sample_s)
        if self._completions > self._warmup_completions:
            self._fold_sample(sample_s, self._clock())
            return
        self._warmup_sum += sample_s
        if self._completions == self._warmup_completions:
            # No state follows from it: pressure that failures caused ends when somebody asks.
            self._ema = self._warmup_sum / self._completions
            self._last_update = self._clock()

    def on_store_failed(self) -> None:
        """One store failed. Enough in a row are pressure, now; each one more is so again.

        The EMA is raised to `FAILURE_HIGH_MARKS` high marks and decays from there, so that a store
        is let through again to try the tier.
        """
        self._healthy_streak = 0
        self._failure_streak += 1
        threshold = self._failure_threshold
        if threshold is not None and self._failure_streak >= threshold:
            self._ema = max(self._ema, self.FAILURE_HIGH_MARKS * self._high)
            self._last_update = self._clock()
            self._enter_pressure()

    def on_store_in_flight(self, elapsed_s: float, num_bytes: int) -> None:
        """The oldest store under way has taken `elapsed_s` so far: a sample that is still growing.

        Once the EMA would be over the high mark if that store ended now, the tier is under pressure,
        in warm-up too, and severity grows with the store's age: a tier that hangs is sent nothing,
        probes neither. It ends with the report that says that stores come home again.
        """
        if num_bytes <= 0 or not 0.0 < elapsed_s < math.inf:
            self._would_be = 0.0
            return
        self._would_be = self._alpha * (elapsed_s / (num_bytes / _MIB)) + self._keep * self._ema
        if self._would_be > self._high:
            self._stalled = True
            self._enter_pressure()

    def reset(self) -> None:
        """Back to the state after construction, warm-up and policy included."""
        self._clear_state()
        self._policy.reset()

    # What follows from it.

    def _after_stall(self, sample_s: float) -> float:
        """What a store that comes home after a stall counts for.

        Its age has been held against the tier while it lasted. Folded in whole, a minute's hang would
        keep the tier shut for another twenty seconds after it works again.
        """
        if sample_s <= self._high:
            self._stalled = False
            return sample_s
        return min(sample_s, self.FAILURE_HIGH_MARKS * self._high) if self._high > 0 else sample_s

    def _fold_sample(self, sample_s: float, now_s: float) -> None:
        self._ema = self._alpha * sample_s + self._keep * self._ema
        self._last_update = now_s
        self._follow_ema(now_s)

    def _follow_ema(self, now_s: float) -> None:
        if self._ema > self._high:
            self._enter_pressure()
        elif self._ema < self._low:
            if self._under_pressure:
                self._leave_pressure(now_s)
            self._healthy_streak += 1
        else:
            self._healthy_streak = 0

    def _enter_pressure(self) -> None:
        self._under_pressure = True
        self._healthy_streak = 0
        self._cleared_at = _NEVER

    def _leave_pressure(self, now_s: float) -> None:
        self._under_pressure = False
        self._cleared_at = now_s
        self._cooldown_count = 0

    # What is asked.

    def is_under_pressure(self) -> bool:
        """Whether the tier is under pressure now.

        Asked under pressure it changes the state: the EMA decays by the time since the last update,
        and one that has come below the low mark ends the pressure and starts the cooldown.
        """
        if not self._under_pressure:
            return False
        now_s = self._clock()
        if self._would_be > self._high:
            # Nothing comes in, and yet it is no silence: a store is on its way.
            self._last_update = now_s
            return True
        idle_s = now_s - self._last_update
        if idle_s > 0 and self._decay_half_life_s > 0:
            self._ema *= 0.5 ** (idle_s / self._decay_half_life_s)
            self._last_update = now_s
        if self._ema < self._low and not self._would_be > self._low:
            self._leave_pressure(now_s)
            return False
        return True

    def _is_over(self) -> bool:
        """Whether `is_under_pressure()` would end the pressure now; changes nothing."""
        if self._would_be > self._low:
            return False
        idle_s = self._clock() - self._last_update
        decays = idle_s > 0 and self._decay_half_life_s > 0
        return self._ema * (0.5 ** (idle_s / self._decay_half_life_s) if decays else 1.0) < self._low

    def is_healthy(self) -> bool:
        """Whether stores are admitted at once: no pressure, and the last completions were all below the low mark."""
        return self._healthy_streak >= self.HEALTHY_COMPLETIONS and not self._under_pressure

    def severity(self) -> float:
        """`max(0, ema - high) / high`, or infinite for a high mark of 0 or less; a query (see `SupportsSeverity`).

        While a store is under way that would take the EMA higher, by what it would be.
        """
        if self._high <= 0:
            return math.inf
        # Asked for each store under pressure: a conditional costs a third of a call of max().
        ema_s = self._ema if self._ema > self._would_be else self._would_be  # noqa: FURB136
        return (ema_s - self._high) / self._high if ema_s > self._high else 0.0

    @property
    def high_water_s(self) -> float:
        """s/MiB above which the tier is under pressure."""
        return self._high

    @property
    def low_water_s(self) -> float:
        """s/MiB below which pressure ends."""
        return self._low

    def should_store(self, num_blocks: int) -> bool:
        """Whether one store of `num_blocks` blocks may go; a refusal is counted by the policy.

        Changes the state as `is_under_pressure()` does, and counts the requests of a cooldown.
        """
        # is_healthy(), spelled out: this is the path of every store to a tier that is well.
        if self._healthy_streak >= self.HEALTHY_COMPLETIONS and not self._under_pressure:
            return True
        if not self.is_under_pressure() and self._clock() - self._cleared_at < self._cooldown_s:
            self._cooldown_count += 1
            if self._cooldown_count % 2 == 0:
                self._policy.on_store_skipped(num_blocks)
                return False
        # super().should_store(), spelled out for the same reason.
        policy = self._policy
        if policy.should_store(self):
            return True
        policy.on_store_skipped(num_blocks)
        return False

    @property
    def store_latency_ema(self) -> float:
        """s/MiB as of the last update; idle decay is applied when pressure is asked for, not here.

        Setting it is an update, from which idle decay counts; pressure itself stays as it is until
        the next completion or question.
        """
        return self._ema

    @store_latency_ema.setter
    def store_latency_ema(self, value_s: float) -> None:
        self._ema = value_s
        self._last_update = self._clock()

    @property
    def stats(self) -> dict[str, float]:
        """`store_latency_ema` (s/MiB), and as numbers the state behind it; reading changes nothing.

        `under_pressure` is 1.0 or 0.0, idle decay included; `in_flight_ema` what the EMA would be if the
        oldest store under way ended now. `completions` counts samples since
        construction or `reset()`, the two streaks count completions below the low mark and failures
        in a row, `ignored_samples` the completions whose elapsed time was none.
        """
        return {
            "store_latency_ema": self._ema,
            "under_pressure": float(self._under_pressure and not self._is_over()),
            "in_flight_ema": self._would_be,
            "completions": float(self._completions),
            "healthy_streak": float(self._healthy_streak),
            "failure_streak": float(self._failure_streak),
            "ignored_samples": float(self._ignored_samples),
        }


def _number(name: str, value: object, *, finite: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if finite and math.isinf(value):
        raise ConfigError(f"{name} must be finite, got {value!r}")
    return value


def _count(name: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, got {value!r}")
    return value
