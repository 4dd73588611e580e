"""Gates: a detector (is this tier under pressure?) plus a policy (what do we do about it?), and what feeds them.

Class names, constructor parameters, defaults and meanings are those of vLLM's tiered offloading, so
that configurations move over. A gate belongs to one thread, the planner's.
"""

from __future__ import annotations

from kvsluice.tiers.backpressure.base import BackpressureDetector, BackpressurePolicy, SupportsSeverity
from kvsluice.tiers.backpressure.config import INHERIT, build_gate, merge_backpressure
from kvsluice.tiers.backpressure.ema import EMABackpressureDetector
from kvsluice.tiers.backpressure.gate import PLAIN, Gate, Signals, SupportsLowMark
from kvsluice.tiers.backpressure.limit import StoreLimit
from kvsluice.tiers.backpressure.policies import DropAccountingPolicy, DropStorePolicy, ThrottledDropPolicy
from kvsluice.tiers.backpressure.traffic import LOST_S, NOTHING, Operation, Spent, Stall, Traffic

__all__ = [
    "INHERIT",
    "LOST_S",
    "NOTHING",
    "PLAIN",
    "BackpressureDetector",
    "BackpressurePolicy",
    "DropAccountingPolicy",
    "DropStorePolicy",
    "EMABackpressureDetector",
    "Gate",
    "Operation",
    "Signals",
    "Spent",
    "Stall",
    "StoreLimit",
    "SupportsLowMark",
    "SupportsSeverity",
    "ThrottledDropPolicy",
    "Traffic",
    "build_gate",
    "merge_backpressure",
]
