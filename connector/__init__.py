"""The connector: configuration, KV layout, planner, rank worker, and `OffloadConnector` around them."""

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
