"""How a wrong configuration is told: the key, its value, the tier it stands in, and no secret.

pydantic's own messages name a key by its path in our models and can print what was passed. Here
they become one line each in the words the operator wrote, with everything masked that is a secret
or looks like one, wherever it stands.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pydantic import ValidationError

from kvsluice.tiers.errors import ConfigError

__all__ = ["KnownKeys", "Origin", "Path", "config_error", "is_secret_key", "scrub", "show", "unknown_key"]

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands in the translated configuration, e.g. `("tiers", 1, "root_dir")`."""

_MASK: Final = "'**********'"
_SECRET_FIELDS: Final = ("access_key", "secret_key", "session_token", "salt", "password")
_NAMES_OF_KEYS: Final = frozenset({"sse_kms_key_id"})
"""Say which key, not the key."""
# "tokens" in the plural counts text; in the singular it opens doors.
_SECRET_WORD: Final = re.compile(r"key|token(?!s)|secret|passw|pwd|credential|private|auth|cookie|signature|salt")
_USERINFO: Final = re.compile(r"//[^/@\s]*@")
_KEY_SHAPED: Final = re.compile(
    r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+=_-][A-Za-z0-9+/=_-]{19,}|.*-----BEGIN.*", re.DOTALL
)
_MAX_SHOWN: Final = 120
# Shorter ones are words that stand in messages anyway; masking them would only garble the text.
_MIN_SCRUBBED: Final = 4


@dataclass(frozen=True)
class KnownKeys:
    """The keys that are understood: at the top, per tier type, and within each key that holds keys of its own."""

    top: tuple[str, ...]
    tiers: Mapping[str, tuple[str, ...]]
    nested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """What the operator wrote, for errors to speak of: names of tiers and keys, and secrets to keep out."""

    tier_labels: tuple[str, ...] = ()
    names: Mapping[Path, str] = field(default_factory=dict)
    secrets: frozenset[str] = frozenset()

    @classmethod
    def secrets_in(cls, values: object) -> frozenset[str]:
        """Every string in `values` that stands under a secret's key or as the userinfo of a URL."""
        return frozenset(text for text in _secrets_in(values, hidden=False) if len(text) >= _MIN_SCRUBBED)

    def tier_label(self, index: int) -> str:
        """What to call the tier at `index`, e.g. `tiers[1] ('fs')`."""
        return self.tier_labels[index] if index < len(self.tier_labels) else f"tiers[{index}]"


def _secrets_in(value: object, *, hidden: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, hidden=hidden or is_secret_key(str(key)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item, hidden=hidden)
    elif hidden and not isinstance(value, (bool, type(None))):
        yield str(value)
    elif isinstance(value, str) and (match := _USERINFO.search(value)):
        yield from match.group()[2:-1].split(":", 1)


def is_secret_key(key: str) -> bool:
    """Whether what stands under `key` must not be shown; a misspelt secret's name counts."""
    word = key.lower()
    if word in _NAMES_OF_KEYS:
        return False
    return bool(_SECRET_WORD.search(word) or difflib.get_close_matches(word, _SECRET_FIELDS, n=1, cutoff=0.7))


def scrub(text: str, secrets: frozenset[str]) -> str:
    """`text` with every one of the `secrets` in it masked."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def show(key: str, value: object, secrets: frozenset[str]) -> str:
    """`value` as a message may show it: masked where it is a secret or looks like one, and not too long."""
    if is_secret_key(key):
        return _MASK
    if isinstance(value, str):
        if _KEY_SHAPED.fullmatch(value):
            return _MASK
        text = repr(_USERINFO.sub("//***@", value))
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name!r}: {show(str(name), item, secrets)}" for name, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(show(key, item, secrets) for item in value) + "]"
    else:
        text = repr(value)
    text = scrub(text, secrets)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def unknown_key(where: str, key: str, value: object, known: Sequence[str], secrets: frozenset[str]) -> str:
    """The message about a key that nobody knows, with the nearest one that is known."""
    nearest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.0)
    hint = f"; the nearest known key is {nearest[0]!r}" if nearest else ""
    return f"{where}: unknown key {scrub(key, secrets)!r} with the value {show(key, value, secrets)}{hint}"


def config_error(error: ValidationError, origin: Origin, known: KnownKeys) -> ConfigError:
    """The `ConfigError` that says what pydantic's `error` does, one line per wrong key."""
    lines: dict[Path, list[str]] = {}
    for item in error.errors(include_url=False):
        path = _plain(item["loc"], known)
        context = item.get("ctx", {})
        line = _line(item["type"], item["msg"], path, item["input"], str(context.get("tag", "")), origin, known)
        told = lines.setdefault(path, [])
        # A value that fits no member of a union is told once per member; the first says enough.
        if not told:
            told.append(line)
    return ConfigError("\n".join(line for told in lines.values() for line in told))


def _plain(loc: Path, known: KnownKeys) -> Path:
    """`loc` without the tag that pydantic puts after a tier's index, and cut at the key it is about."""
    if len(loc) >= 2 and loc[0] == "tiers" and isinstance(loc[1], int):
        rest = loc[2:]
        if rest and rest[0] in known.tiers:
            rest = rest[1:]
        return (*loc[:2], *rest[:1])
    return loc[:2] if loc and loc[0] in known.nested else loc[:1]


def _line(kind: str, message: str, path: Path, value: object, tag: str, origin: Origin, known: KnownKeys) -> str:
    in_tier = len(path) >= 2 and isinstance(path[1], int)
    where = origin.tier_label(path[1]) if in_tier and isinstance(path[1], int) else "configuration"
    if not in_tier and len(path) == 2:
        where = f"configuration: {path[0]}"
    key = str(path[-1]) if path and not (in_tier and len(path) == 2) else ""
    name = scrub(origin.names.get(path, key), origin.secrets)
    types = ", ".join(repr(tier_type) for tier_type in known.tiers)
    if kind == "extra_forbidden":
        return _unknown(where, key, value, path, origin, known)
    if kind == "missing":
        return f"{where}: the key {name!r} is missing"
    if kind == "union_tag_invalid":
        return f"{where}: unknown tier type {show('type', tag, origin.secrets)}; known are {types}"
    if kind == "union_tag_not_found":
        return f"{where}: the key 'type' is missing; known types are {types}"
    reason = message.removeprefix("Value error, ")
    if not key or (path == ("tiers",) and isinstance(value, (list, tuple))):
        # What is wrong is the whole: the reason names its parts, the value would only repeat them all.
        return f"{where}: {reason}"
    return f"{where}: {name} is {show(key, value, origin.secrets)}: {reason}"


def _unknown(where: str, key: str, value: object, path: Path, origin: Origin, known: KnownKeys) -> str:
    if len(path) > 1 and str(path[0]) in known.nested:
        return unknown_key(where, key, value, known.nested[str(path[0])], origin.secrets)
    if len(path) > 1:
        keys = next((keys for tier_type, keys in known.tiers.items() if where.endswith(f"({tier_type!r})")), ())
        line = unknown_key(where, key, value, keys, origin.secrets)
        return f"{line}; it is a key of the configuration, outside of its tiers" if key in known.top else line
    owners = [tier_type for tier_type, keys in known.tiers.items() if key in keys]
    line = unknown_key(where, key, value, known.top, origin.secrets)
    return f"{line}; it is a key of a tier of type {' or '.join(map(repr, owners))}" if owners else line
