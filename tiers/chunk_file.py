"""The chunk file: one chunk of KV cache as a valid, aligned, checksummed `.safetensors` file.

    byte 0        8                          header_bytes               file_bytes   slot_bytes
         | length | JSON, padded with spaces | payload, layer by layer | (slack)    |

The same bytes lie in a slot of pinned memory, in a file and in an object, so that a store is one
write of one run of memory. The header of a layout is a template: only key and checksum differ
between chunks, and they are patched in place.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvsluice.tiers import reasons
from kvsluice.tiers.base import MAX_STORED_KEY_BYTES, round_up
from kvsluice.tiers.errors import ChunkDamagedError

__all__ = [
    "DTYPE_BYTES",
    "FORMAT_VERSION",
    "MAX_KEY_BYTES",
    "ChunkFormat",
    "TensorSpec",
    "check_key",
    "engine_key",
    "stored_key",
]

FORMAT_VERSION: Final = 1
_FORMAT: Final = f"kvsluice-{FORMAT_VERSION}"

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of the dtypes that safetensors names and a KV cache may have."""

_SUFFIX: Final = struct.Struct(">HH")
MAX_KEY_BYTES: Final = MAX_STORED_KEY_BYTES - _SUFFIX.size - 12
"""64: the longest digest in use. The rest of the stored key is the group, the rank and room to grow."""

_CHECKSUM_HEX: Final = 32
_NO_CHECKSUM: Final = b"0" * _CHECKSUM_HEX
_LENGTH: Final = struct.Struct("<Q")


def check_key(key: bytes) -> None:
    """Refuse a key that no tier could keep.

    Raises:
        ValueError: the key is not bytes, is empty or is longer than `MAX_KEY_BYTES`.
    """
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        shown = f"{len(key)} bytes" if isinstance(key, bytes) else repr(key)
        raise ValueError(f"a key is 1 to {MAX_KEY_BYTES} bytes, got {shown}")


def stored_key(key: bytes, group: int, rank: int) -> bytes:
    """The opaque key under which a tier keeps one rank's part of one group's chunk."""
    return key + _SUFFIX.pack(group, rank)


def engine_key(name: bytes) -> bytes:
    """The key that `stored_key` made `name` of."""
    return name[: -_SUFFIX.size]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a chunk as the file names it: name, safetensors dtype code, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, row-major and dense."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class ChunkFormat:
    """The chunk file of one layout, namespace, group and rank. Immutable and thread-safe.

    Args:
        tensors: what a chunk holds, in payload order; names are unique.
        namespace: hex digest over everything that changes the bytes under a key.
        num_tokens: tokens that one chunk covers.
        group, rank, num_ranks: whose part of the chunk this is.
        extra: further string pairs for `__metadata__`, the same in every chunk.

    Attributes:
        header_bytes: where the payload starts; a multiple of 4096.
        payload_bytes: bytes of all tensors.
        file_bytes: length of the file, exactly.
        slot_bytes: `file_bytes` rounded up to 4096, so that a slot can be written directly.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        *,
        namespace: str,
        num_tokens: int,
        group: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.namespace = namespace
        self.group = group
        self.rank = rank
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names) or "__metadata__" in names or not names:
            raise ValueError(f"tensor names must be unique and not '__metadata__', got {names}")
        metadata = {
            "format": _FORMAT,
            "namespace": namespace,
            "group": str(group),
            "rank": str(rank),
            "ranks": str(num_ranks),
            "tokens": str(num_tokens),
            **(extra or {}),
        }
        self._metadata = metadata
        self._entries: dict[str, dict[str, object]] = {}
        offset = 0
        for spec in self.tensors:
            end = offset + spec.num_bytes
            self._entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        self.payload_bytes = offset
        longest = _LENGTH.size + len(self._json("f" * 2 * MAX_KEY_BYTES))
        self.header_bytes = round_up(longest)
        self.file_bytes = self.header_bytes + self.payload_bytes
        self.slot_bytes = round_up(self.file_bytes)
        self._templates: dict[int, tuple[bytes, int, int]] = {}

    def seal(self, buffer: memoryview, key: bytes) -> None:
        """Write the header of `key` in front of the payload that lies in `buffer` already.

        Costs one pass over the payload for the checksum (xxh3, 128 bit). Two threads may seal the
        same bytes at once: each writes the same header in one go, so a reader of a sealed chunk
        never sees it change.
        """
        header, at = self._header(key)
        digest = self._checksum(header, buffer)
        buffer[: self.header_bytes] = header[:at] + digest + header[at + _CHECKSUM_HEX :]

    def verify(self, buffer: memoryview, num_bytes: int, key: bytes, *, checksum: bool = True) -> None:
        """Prove that `buffer[:num_bytes]` is the whole chunk that was stored under `key`.

        Without `checksum` length and header alone are proven, at the cost of a look at the header.

        Raises:
            ChunkDamagedError: it is not; the reason says in which way.
        """
        if num_bytes != self.file_bytes:
            reason = reasons.SHORT if num_bytes < self.file_bytes else reasons.OVERSIZE
            raise self._damaged(key, reason, f"{num_bytes} bytes where a chunk has {self.file_bytes}")
        header, at = self._header(key)
        found = bytes(buffer[: self.header_bytes])
        if found[:at] != header[:at] or found[at + _CHECKSUM_HEX :] != header[at + _CHECKSUM_HEX :]:
            raise self._classify(found, key)
        if checksum and found[at : at + _CHECKSUM_HEX] != self._checksum(header, buffer):
            raise self._damaged(key, reasons.CHECKSUM, "the checksum does not match the bytes")

    def _checksum(self, blank_header: bytes, buffer: memoryview) -> bytes:
        state = xxhash.xxh3_128(blank_header)
        state.update(buffer[self.header_bytes : self.file_bytes])
        return state.hexdigest().encode()

    def _header(self, key: bytes) -> tuple[bytes, int]:
        """The header of `key` with its checksum zeroed, and where the checksum stands."""
        template = self._templates.get(len(key))
        if template is None:
            check_key(key)
            mark = "#" * (2 * len(key))
            text = self._json(mark)
            padded = text.ljust(self.header_bytes - _LENGTH.size)
            whole = _LENGTH.pack(len(padded)) + padded
            # Key and checksum stand first in the metadata, so the first marks found are theirs.
            checksum_at = whole.index(_NO_CHECKSUM)
            template = (whole, checksum_at, whole.index(mark.encode()))
            self._templates[len(key)] = template
        whole, checksum_at, key_at = template
        return whole[:key_at] + key.hex().encode() + whole[key_at + 2 * len(key) :], checksum_at

    def _json(self, key_text: str) -> bytes:
        metadata = {"checksum": _NO_CHECKSUM.decode(), "key": key_text, **self._metadata}
        return json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()

    def _classify(self, found: bytes, key: bytes) -> ChunkDamagedError:
        """Say why a header that is not ours is not: bounded work, whatever it holds."""
        try:
            metadata = json.loads(found[_LENGTH.size :])["__metadata__"]
            foreign = metadata["format"] == _FORMAT and (
                metadata["namespace"] != self.namespace
                or metadata["key"] != key.hex()
                or metadata["group"] != str(self.group)
                or metadata["rank"] != str(self.rank)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            foreign = False
        if foreign:
            return self._damaged(key, reasons.FOREIGN, "the header names another namespace, key, group or rank")
        return self._damaged(key, reasons.HEADER, "the header is not this layout's")

    def _damaged(self, key: bytes, reason: str, what: str) -> ChunkDamagedError:
        return ChunkDamagedError(f"chunk {key.hex()} of namespace {self.namespace}: {what}", reason=reason)
