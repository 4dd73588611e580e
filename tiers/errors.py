"""The error tree of KV Sluice.

One base, one class per outcome. Every message names the thing and its value. Errors that a
builtin already describes inherit from it too, so `except ValueError` and `except OSError` keep
working for callers that know nothing of this package.
"""

from __future__ import annotations

__all__ = [
    "ChunkDamagedError",
    "ChunkMissingError",
    "ClosedError",
    "ConfigError",
    "LayoutError",
    "SluiceError",
    "TierError",
    "TierUnavailableError",
]


class SluiceError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SluiceError, ValueError):
    """A configuration that cannot be used: the key, its value and what would do instead."""


class LayoutError(SluiceError, ValueError):
    """KV-cache tensors that cannot be copied as one chunk, or block ids that do not lie in them."""


class ClosedError(SluiceError, RuntimeError):
    """A call on a connector or a tier that has been closed."""


class TierError(SluiceError):
    """One tier operation that did not do what was asked.

    Args:
        message: what happened, naming the tier and the key or path.
        reason: the word the outcome is counted under (see `kvsluice.tiers.reasons`).
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChunkMissingError(TierError):
    """The tier does not hold the chunk."""


class ChunkDamagedError(TierError):
    """The tier holds something under this key that is proven not to be the chunk that was stored."""


class TierUnavailableError(TierError, OSError):
    """The tier could not be reached or refused: I/O error, no space, no permission, timeout."""
