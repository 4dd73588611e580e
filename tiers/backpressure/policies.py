"""The policies: refuse everything under pressure, or refuse in proportion to it.

Thread-safety: none needed or given; a policy lives on its detector's thread.
"""

from __future__ import annotations

import abc
from typing import Final

from kvsluice.tiers.backpressure.base import BackpressureDetector, BackpressurePolicy, SupportsSeverity
from kvsluice.tiers.errors import ConfigError

__all__ = ["DropAccountingPolicy", "DropStorePolicy", "ThrottledDropPolicy"]

# The drop rate is summed as an integer count of 2**-60ths, so that no rounding error piles up over
# millions of decisions: every double from 2**-7 to 1 is a whole number of them.
_WHOLE_DROP: Final = 1 << 60
_WHOLE_DROP_FLOAT: Final = float(_WHOLE_DROP)


class DropAccountingPolicy(BackpressurePolicy, abc.ABC):
    """Keeps the two counters, so that every policy counts alike. A subclass answers `should_store`."""

    __slots__ = ("_blocks_dropped", "_stores_dropped")

    def __init__(self) -> None:
        self._stores_dropped = 0
        self._blocks_dropped = 0

    def on_store_skipped(self, num_blocks: int) -> None:
        self._stores_dropped += 1
        self._blocks_dropped += num_blocks

    def pop_stores_dropped(self) -> tuple[int, int]:
        dropped = (self._stores_dropped, self._blocks_dropped)
        self._stores_dropped = 0
        self._blocks_dropped = 0
        return dropped

    def reset(self) -> None:
        self._stores_dropped = 0
        self._blocks_dropped = 0


class DropStorePolicy(DropAccountingPolicy):
    """Refuses exactly while the detector is under pressure."""

    __slots__ = ()

    def should_store(self, detector: BackpressureDetector) -> bool:
        return not detector.is_under_pressure()


class ThrottledDropPolicy(DropAccountingPolicy):
    """Refuses a share of the stores that grows with severity, while the detector is under pressure.

    `drop_rate = min(1, severity / ramp_factor)`. For a detector with a high mark that is 0 % at the
    mark and 100 % at `1 + ramp_factor` times it; one without a proportion (a mark of 0 or less)
    reports an infinite severity, and all is refused.

    The refusals follow the rate by error diffusion: each decision adds the rate to a debt, and a
    store is dropped whenever the debt reaches a whole one. The debt stays in [0, 1), so over any run
    of N decisions at a constant rate r the drops differ from r*N by less than one.

    Args:
        ramp_factor: high marks between the first drop and the last admission; above 0. The default
            keeps some stores flowing up to three times the mark, so that a tier under moderate
            pressure stays populated and keeps being measured.

    Raises:
        ConfigError: `ramp_factor` is not a number above 0.
    """

    __slots__ = ("_debt", "_ramp_factor")

    def __init__(self, ramp_factor: float = 2.0) -> None:
        super().__init__()
        if isinstance(ramp_factor, bool) or not isinstance(ramp_factor, (int, float)) or not ramp_factor > 0:
            raise ConfigError(f"ramp_factor must be a number above 0, got {ramp_factor!r}")
        self._ramp_factor = ramp_factor
        self._debt = 0

    def check_detector(self, detector: BackpressureDetector) -> None:
        if not isinstance(detector, SupportsSeverity):
            raise ConfigError(
                f"{type(self).__name__} drops in proportion to severity, and {type(detector).__name__} has no "
                "severity() method: add one (see SupportsSeverity) or use DropStorePolicy"
            )

    def should_store(self, detector: BackpressureDetector) -> bool:
        if not detector.is_under_pressure():
            return True
        # check_detector looked when the two were put together; isinstance of a protocol, or a cast, is too dear here.
        severity: float = detector.severity()  # type: ignore[attr-defined]
        drop_rate = severity / self._ramp_factor
        if not drop_rate > 0.0:  # a severity that is no number drops nothing either
            return True
        if drop_rate >= 1.0:
            return False
        debt = self._debt + int(drop_rate * _WHOLE_DROP_FLOAT)
        if debt >= _WHOLE_DROP:
            self._debt = debt - _WHOLE_DROP
            return False
        self._debt = debt
        return True

    def reset(self) -> None:
        super().reset()
        self._debt = 0
