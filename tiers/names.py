"""What the tiers that outlive a process call things: namespaces, chunk files, the facts beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from kvsluice.tiers.base import MAX_STORED_KEY_BYTES
from kvsluice.tiers.errors import ConfigError

__all__ = ["NAMESPACE_FILE", "check_namespace", "check_stored_key", "facts_document", "file_name", "key_of"]

NAMESPACE_FILE: Final = "namespace.json"
"""Stands beside the chunks and says what the namespace is, so that tools can."""

_SUFFIX: Final = ".safetensors"
_NAMESPACE = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_FILE_NAME = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{MAX_STORED_KEY_BYTES}}})\.safetensors")


def check_namespace(namespace: str) -> str:
    """The namespace as it came, proven to be one plain path component.

    Raises:
        ConfigError: it could be taken for another folder, or is longer than 128 characters.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace {namespace!r} cannot name a folder: give a hex digest, or 1 to 128 letters, digits, '_' and '-'"
        )
    return namespace


def check_stored_key(key: bytes) -> bytes:
    """The key as it came.

    Raises:
        ValueError: it has no bytes, or more than `MAX_STORED_KEY_BYTES`.
    """
    if not 1 <= len(key) <= MAX_STORED_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes: a stored key has 1 to {MAX_STORED_KEY_BYTES}")
    return key


def file_name(key: bytes) -> str:
    """`<key in hex>.safetensors`.

    Raises:
        ValueError: as `check_stored_key`.
    """
    return check_stored_key(key).hex() + _SUFFIX


def key_of(name: str) -> bytes | None:
    """The key whose `file_name` is `name`; `None` for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return bytes.fromhex(match.group(1)) if match else None


def facts_document(facts: Mapping[str, object]) -> bytes:
    """The content of `namespace.json`.

    Raises:
        ConfigError: the facts cannot be written as JSON.
    """
    try:
        return (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"namespace_facts cannot be written as JSON: {error}") from error
