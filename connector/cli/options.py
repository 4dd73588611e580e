"""What several commands read from their options."""

from __future__ import annotations

from kvsluice.connector.config import parse_size
from kvsluice.tiers.errors import ConfigError

__all__ = ["size_of"]


def size_of(option: str, text: str) -> int:
    """Bytes, from an option's text such as `4MiB`.

    Raises:
        ConfigError: no size; the message names the option.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--{option} {text!r}: {error}") from error
