"""Storage tiers, the chunk file and the gates that guard the tiers.

Nothing here knows an engine: a tier moves opaque images under opaque keys.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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

_HOMES: Final = {
    "ALIGNMENT_BYTES": "base",
    "ChunkDamagedError": "errors",
    "ChunkMissingError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "FileSystemTier": "fs",
    "HostTier": "host",
    "LayoutError": "errors",
    "ObjectTier": "obj",
    "SluiceError": "errors",
    "Tier": "base",
    "TierError": "errors",
    "TierUnavailableError": "errors",
    "TierUsage": "base",
    "check_tier": "check",
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
