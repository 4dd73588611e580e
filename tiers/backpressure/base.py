"""What a gate is made of: a detector, a policy, and the word they share, severity.

The detector turns completions into a pressure state; the policy turns pressure into an answer.

Thread-safety: a gate belongs to one thread, the planner's. Nothing here takes a lock, because
ranks report and stores are planned on that thread alone.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = [
    "BackpressureDetector",
    "BackpressurePolicy",
    "SupportsSeverity",
    "default_policy_class",
    "is_network",
    "monotonic_s",
]


def monotonic_s() -> float:
    """`time.monotonic()`, looked up at each call: who replaces it for a test is heard."""
    return time.monotonic()


@runtime_checkable
class SupportsSeverity(Protocol):
    """A detector that can say how bad the pressure is, not only that there is some.

    A policy that answers in proportion asks for this and for nothing else of a detector.
    """

    def severity(self) -> float:
        """How far the tier is past its own high mark, in high marks.

        0.0 at the mark or below it, 1.0 at twice the mark; `math.inf` where no proportion exists (a
        mark of 0 or less) and every store counts as too much. A query: it changes nothing. It means
        something while `is_under_pressure()`, which is asked first and brings the state up to date.
        """


class BackpressurePolicy(abc.ABC):
    """What to do about pressure. One policy serves one detector, on that detector's thread."""

    def check_detector(self, detector: BackpressureDetector) -> None:  # noqa: B027 - most policies take any detector
        """Called once, where the two are put together: a policy that needs more than yes or no refuses here.

        Raises:
            ConfigError: this policy cannot work with that detector.
        """

    @abc.abstractmethod
    def should_store(self, detector: BackpressureDetector) -> bool:
        """Whether one store may go to the tier now. A refusal is counted by `on_store_skipped`, not here."""

    @abc.abstractmethod
    def on_store_skipped(self, num_blocks: int) -> None:
        """One store of `num_blocks` blocks was refused."""

    @abc.abstractmethod
    def pop_stores_dropped(self) -> tuple[int, int]:
        """`(stores, blocks)` refused since the last call, which also zeroes both."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Back to the state after construction, counters included."""


class BackpressureDetector(abc.ABC):
    """Whether a tier is under pressure, told from its completions; and the gate in front of that tier.

    Args:
        policy: what to do about pressure. None takes `ThrottledDropPolicy()` where the detector
            reports severity (`SupportsSeverity`), `DropStorePolicy()` where it does not.
        clock: seconds from any fixed point, never running backwards.

    Raises:
        ConfigError: the policy needs severity and this detector has none.
    """

    def __init__(self, policy: BackpressurePolicy | None = None, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._policy = default_policy_class(type(self))() if policy is None else policy
        self._policy.check_detector(self)

    @property
    def policy(self) -> BackpressurePolicy:
        """The policy that this gate asks."""
        return self._policy

    @abc.abstractmethod
    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """One store took `elapsed_s` seconds of the tier's own time and really wrote `num_bytes` bytes."""

    @abc.abstractmethod
    def is_under_pressure(self) -> bool:
        """Whether the tier is under pressure now; may bring the detector's state up to date with the clock."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Back to the state after construction, the policy included."""

    def on_store_failed(self) -> None:  # noqa: B027 - a detector that learns nothing from failures is whole
        """One store failed; a detector that only knows durations learns nothing from it."""

    def on_store_in_flight(self, elapsed_s: float, num_bytes: int) -> None:  # noqa: B027 - as above
        """The oldest store that has not come home has taken `elapsed_s` so far and is to write `num_bytes`.

        Called at every report; `elapsed_s` is 0 where none is under way. A detector that only knows
        completions learns nothing from it, and does not notice a tier that hangs.
        """

    def update(self, submit_time: float, num_bytes: int) -> None:
        """A store that started at `submit_time` (same clock) has just completed; nothing for `num_bytes <= 0`."""
        if num_bytes <= 0:
            return
        self.on_store_completed(self._clock() - submit_time, num_bytes)

    def should_store(self, num_blocks: int) -> bool:
        """Ask the policy about one store of `num_blocks` blocks; a refusal is counted there."""
        policy = self._policy
        if policy.should_store(self):
            return True
        policy.on_store_skipped(num_blocks)
        return False

    @classmethod
    def default_config(cls, tier_type: str, *, locality: str | None = None) -> dict[str, object] | None:
        """Constructor arguments that suit this kind of tier, or None where there are none to give.

        Args:
            tier_type: the word configuration uses: `host`, `fs`, `obj`, or a stranger's own.
            locality: `LOCAL`, `REMOTE` or not said.
        """
        return None

    @property
    def stats(self) -> dict[str, float]:
        """A snapshot for metrics; reading it changes nothing."""
        return {}


def is_network(tier_type: str, locality: str | None) -> bool:
    """Whether a tier is reached over a network: `obj`, and whatever says so of itself (in any case)."""
    return tier_type == "obj" or (locality is not None and locality.upper() == "REMOTE")


def default_policy_class(detector_cls: type[BackpressureDetector]) -> type[BackpressurePolicy]:
    """The policy that a detector of this class gets when none is named."""
    # The policies import this module for the two base classes above.
    from kvsluice.tiers.backpressure.policies import DropStorePolicy, ThrottledDropPolicy

    return ThrottledDropPolicy if issubclass(detector_cls, SupportsSeverity) else DropStorePolicy
