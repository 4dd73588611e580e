"""Storage tiers, the chunk file and the gates that guard the tiers.

Nothing here knows an engine: a tier moves opaque images under opaque keys.
"""

from kvsluice.tiers.base import ALIGNMENT_BYTES, Tier, TierUsage
from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import (
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigError,
    LayoutError,
    SluiceError,
    TierError,
    TierUnavailableError,
)
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.host import HostTier
from kvsluice.tiers.obj import ObjectTier

__all__ = [
    "ALIGNMENT_BYTES",
    "ChunkDamagedError",
    "ChunkMissingError",
    "ClosedError",
    "ConfigError",
    "FileSystemTier",
    "HostTier",
    "LayoutError",
    "ObjectTier",
    "SluiceError",
    "Tier",
    "TierError",
    "TierUnavailableError",
    "TierUsage",
    "check_tier",
]
