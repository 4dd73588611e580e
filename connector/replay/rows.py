"""The policies that are set side by side: each row one more rule than the row before it.

Every row is a configuration of the product; only the first one takes a queue that the product has not. The
last one is the product as it comes: it adapts its writers, and it alone leaves hits unused that are slower to
load than to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from kvsluice.connector.config import OffloadConfig
from kvsluice.tiers.backpressure import PLAIN
from kvsluice.tiers.errors import ConfigError

__all__ = ["MAIN_ROWS", "ROW_NAMES", "Row", "make_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy.

    Attributes:
        name: in tables, claims and plots.
        config: what the planner and the worker are configured with.
        one_queue: loads and stores wait in one line, served by all threads in order of arrival.
    """

    name: str
    config: OffloadConfig
    one_queue: bool = False


_NO_LIMIT: Final = {"max_queue_chunks": 1_000_000_000, "max_queue_s": 1e9, "store_concurrency": "fixed"}
_PLAIN: Final[Mapping[str, object]] = asdict(PLAIN)
_OWN: Final = {"in_flight": False, "queue_time": False}
_IN_FLIGHT: Final = {"queue_time": False}

# What each row lays over an I/O tier's own configuration; gates' keys go into `backpressure`.
_LAYERS: Final[Mapping[str, tuple[Mapping[str, object], Mapping[str, object] | None]]] = {
    "one queue": (_NO_LIMIT, None),
    "loads first": (_NO_LIMIT, None),
    "drop": ({"store_concurrency": "fixed"}, {"policy_cls": "DropStorePolicy", "signals": _PLAIN}),
    "throttle": ({"store_concurrency": "fixed"}, {"signals": _PLAIN}),
    "+ own time": ({"store_concurrency": "fixed"}, {"signals": _OWN}),
    "+ in flight": ({"store_concurrency": "fixed"}, {"signals": _IN_FLIGHT}),
    "+ queue in time": ({"store_concurrency": "fixed"}, {}),
    "ours": ({"store_concurrency": "adaptive"}, {}),
}
_LOAD_GATED: Final = frozenset({"ours"})
ROW_NAMES: Final = tuple(_LAYERS)
MAIN_ROWS: Final = ("one queue", "loads first", "drop", "throttle", "ours")
"""Without the steps between the plain rules and ours."""


def make_rows(tiers: Sequence[Mapping[str, object]], names: Sequence[str] = ROW_NAMES) -> list[Row]:
    """The rows of these names.

    Args:
        tiers: the ladder, as in a configuration; what a row is about is laid over each I/O tier.
        names: of `ROW_NAMES`.

    Raises:
        ConfigError: no such row, or a ladder that no configuration may have.
    """
    rows = []
    for name in names:
        if name not in _LAYERS:
            raise ConfigError(f"there is no row {name!r}; the rows are {', '.join(map(repr, ROW_NAMES))}")
        own, gate = _LAYERS[name]
        load_gate: Mapping[str, object] = {} if name in _LOAD_GATED else {"load_gate": None}
        ladder = [dict(tier) if tier.get("type") == "host" else _laid_over(tier, own, gate) for tier in tiers]
        rows.append(Row(name, OffloadConfig.from_dict({"tiers": ladder, **load_gate}), one_queue=name == "one queue"))
    return rows


def _laid_over(
    tier: Mapping[str, object], own: Mapping[str, object], gate: Mapping[str, object] | None
) -> dict[str, object]:
    given = tier.get("backpressure", {})
    if gate is None:
        return {**tier, **own, "backpressure": None}
    if not isinstance(given, Mapping):
        raise ConfigError(f"backpressure {given!r} of a tier must be a mapping: rows with gates need one")
    return {**tier, **own, "backpressure": {**given, **gate}}
