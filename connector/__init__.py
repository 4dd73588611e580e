"""The connector: configuration, KV layout, planner, rank worker, and `OffloadConnector` around them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvsluice.connector.config import OffloadConfig
    from kvsluice.connector.layout import KVLayout
    from kvsluice.connector.namespace import ModelIdentity
    from kvsluice.connector.offload import OffloadConnector
    from kvsluice.connector.results import GateStats, LoadGateStats, Lookup, OffloadStats, TierStats, TransferResult

__all__ = [
    "GateStats",
    "KVLayout",
    "LoadGateStats",
    "Lookup",
    "ModelIdentity",
    "OffloadConfig",
    "OffloadConnector",
    "OffloadStats",
    "TierStats",
    "TransferResult",
]

_HOMES: Final = {
    "GateStats": "results",
    "KVLayout": "layout",
    "LoadGateStats": "results",
    "Lookup": "results",
    "ModelIdentity": "namespace",
    "OffloadConfig": "config",
    "OffloadConnector": "offload",
    "OffloadStats": "results",
    "TierStats": "results",
    "TransferResult": "results",
}
"""Where each name lives. Imported when asked for: a part of the package needs only what it imports itself."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
