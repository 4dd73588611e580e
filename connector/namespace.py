"""The namespace: one digest over everything that changes the bytes under a key.

An engine's keys say which tokens a chunk belongs to. They do not say which model computed it, in
which layout or precision, split over how many ranks. All of that goes into the namespace, and a
tier never serves a chunk across two of them.

Two namespaces are equal only when all their facts are: the facts are encoded injectively (every
value carries its type and its length, so no two different values share an encoding) and hashed.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from kvsluice.tiers.errors import ConfigError

__all__ = ["Fact", "ModelIdentity", "Namespace", "encode_fact", "hash_salt", "weights_digest"]

Fact: TypeAlias = bool | int | float | str | bytes | Sequence["Fact"] | Mapping[str, "Fact"] | None
"""A value that can be part of a namespace: JSON's values, and bytes."""

_DIGEST_BYTES: Final = 16
# The prefixes keep the digests of one purpose from ever being those of another; they never change.
_NAMESPACE_DOMAIN: Final = b"kvsluice/namespace/1\x00"
_SALT_DOMAIN: Final = b"kvsluice/salt/1\x00"
_WEIGHTS_DOMAIN: Final = b"kvsluice/weights/1\x00"

_BYTES_KEY: Final = "$bytes"
_WEIGHTS_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".gguf"})
_SAMPLE_BYTES: Final = 64 * 1024
_SAMPLES_PER_FILE: Final = 8


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "big") + payload


def encode_fact(value: Fact, *, where: str = "fact") -> bytes:
    """Encode `value` so that two different values never have the same encoding.

    Every value is a type tag, the length of its payload and the payload. `1`, `True`, `1.0` and
    `"1"` differ; so do `[["a"], "b"]` and `["a", ["b"]]`. A list and a tuple with equal items are
    the same value, and the order of a mapping's keys does not count: both get lost in JSON.

    Args:
        value: what to encode.
        where: what an error calls this value.

    Raises:
        TypeError: a value, or a mapping's key, of a type that is not a fact.
        ValueError: a float that is not finite (JSON has none, and NaN does not equal itself).
    """
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return _tagged(b"b", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"i", int(value).to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value!r}: a namespace holds finite numbers only")
        return _tagged(b"f", struct.pack(">d", value))
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"y", value)
    if isinstance(value, Mapping):
        items: list[tuple[bytes, bytes]] = []
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}: keys are strings")
            items.append((encode_fact(key), encode_fact(item, where=f"{where}[{key!r}]")))
        return _tagged(b"d", b"".join(key + item for key, item in sorted(items)))
    if isinstance(value, (list, tuple)):
        return _tagged(b"l", b"".join(encode_fact(item, where=f"{where}[{i}]") for i, item in enumerate(value)))
    raise TypeError(f"{where} is of type {type(value).__name__}, which a namespace cannot hold: write it as a string")


def _to_json(value: Fact) -> Fact:
    """The same value without bytes and tuples; `_from_json` undoes it after a trip through JSON."""
    if isinstance(value, bytes):
        return {_BYTES_KEY: value.hex()}
    if isinstance(value, Mapping):
        # A key that starts with the mark gets one more, so that no mapping looks like bytes.
        return {f"${key}" if key.startswith("$") else key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Fact) -> Fact:
    if isinstance(value, Mapping):
        if set(value) == {_BYTES_KEY}:
            text = value[_BYTES_KEY]
            if not isinstance(text, str):
                raise ConfigError(f"namespace facts hold {_BYTES_KEY} of type {type(text).__name__}, not a hex string")
            try:
                return bytes.fromhex(text)
            except ValueError as error:
                raise ConfigError(f"namespace facts hold {_BYTES_KEY} {text!r}, which is not hex") from error
        return {key.removeprefix("$"): _from_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_from_json(item) for item in value]
    return value


def hash_salt(salt: str) -> str:
    """What `namespace.json` shows in place of an operator's salt: 64 hex characters.

    The prefix is fixed, so equal salts give equal hashes: that is how one tenant's engines find
    each other's chunks. It also means that whoever can read the store can try guesses: a short or
    guessable salt keeps tenants apart, but it is not a secret. Draw 128 bits at random for that.
    """
    return hashlib.sha256(_SALT_DOMAIN + salt.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Which model computed the KV, at which precision, split how, under which hashes.

    Replicas (data parallelism) are not here: each computes the same bytes under the same key, and
    counting them would make a deployment forget its chunks whenever it grows.
    """

    name: str
    """Model name or path, as the engine was given it."""
    revision: str | None = None
    """Commit of a hub model; `None` where there is none."""
    weights_digest: str | None = None
    """`weights_digest(path)` of a local folder; `None` for a hub model, which `revision` pins."""
    attention_facts: Mapping[str, Fact] = field(default_factory=dict)
    """The part of the model's config that shapes its KV: RoPE, heads, head size, window, scaling."""
    kv_dtype: str
    """The dtype the KV cache really has, after "auto" was resolved, e.g. "fp8_e4m3"."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    hash_facts: Mapping[str, Fact] = field(default_factory=dict)
    """How the engine makes its keys: the algorithm, its seed, tokens per hash."""

    def __post_init__(self) -> None:
        for size in ("tensor_parallel", "pipeline_parallel", "prefill_context_parallel", "decode_context_parallel"):
            _check_count(size, getattr(self, size))
        for word in ("name", "kv_dtype"):
            if not getattr(self, word):
                raise ConfigError(f"{word} of a model identity is empty")

    def facts(self) -> dict[str, Fact]:
        """Every field by name."""
        return {
            "name": self.name,
            "revision": self.revision,
            "weights_digest": self.weights_digest,
            "attention": self.attention_facts,
            "kv_dtype": self.kv_dtype,
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "prefill_context_parallel": self.prefill_context_parallel,
            "decode_context_parallel": self.decode_context_parallel,
            "hash": self.hash_facts,
        }


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}: it must be an integer of at least 1")


@dataclass(frozen=True)
class Namespace:
    """A digest and the facts it stands for; build one with `Namespace.build`.

    Immutable and free of secrets, so it can be shared between threads, pickled and logged.
    """

    digest: str
    """32 hex characters: the first 128 bits of a SHA-256. Two different sets of facts meet by chance once in
    about 2**64 namespaces, and whoever could search for such a pair would need about as many attempts."""
    facts: Mapping[str, Fact]
    """What `namespace.json` holds: JSON values only, the salt hashed, bytes as `{"$bytes": hex}`."""

    @classmethod
    def build(
        cls,
        *,
        layout_facts: Mapping[str, Fact],
        blocks_per_chunk: int,
        tokens_per_block: int,
        model: ModelIdentity,
        salt: str | None,
        weights_version: str | int | None,
        format_version: int,
    ) -> Namespace:
        """The namespace of one engine's chunks. The rank is no part of it: it stands in a chunk's name.

        Args:
            layout_facts: shape, stride order, dtype and layer names of each group, as the layout reports them.
            blocks_per_chunk: engine blocks in one chunk.
            tokens_per_block: tokens in one engine block.
            model: which model computed the KV.
            salt: an operator's salt, which keeps tenants apart; `None` for none.
            weights_version: what an engine bumps when it changes its weights in place. `1` and `"1"` differ.
            format_version: version of the chunk file.

        Raises:
            ConfigError: a count below 1.
            TypeError: a fact of a type that cannot be encoded.
            ValueError: a float that is not finite.
        """
        _check_count("blocks_per_chunk", blocks_per_chunk)
        _check_count("tokens_per_block", tokens_per_block)
        _check_count("format_version", format_version)
        facts: dict[str, Fact] = {
            "format_version": format_version,
            "layout": layout_facts,
            "blocks_per_chunk": blocks_per_chunk,
            "tokens_per_block": tokens_per_block,
            "model": model.facts(),
            "salt_sha256": None if salt is None else hash_salt(salt),
            "weights_version": weights_version,
        }
        digest = _digest(facts)
        return cls(digest=digest, facts={key: _to_json(value) for key, value in facts.items()})

    @classmethod
    def from_facts(cls, facts: Mapping[str, Fact]) -> Namespace:
        """The namespace that these `facts`, as read back from a `namespace.json`, stand for.

        Its digest tells whether the file still belongs to the folder it lies in.

        Raises:
            ConfigError: bytes that are not hex.
            TypeError: a value that JSON cannot hold.
        """
        return cls(digest=_digest({key: _from_json(value) for key, value in facts.items()}), facts=dict(facts))


def _digest(facts: Mapping[str, Fact]) -> str:
    encoded = encode_fact(facts, where="namespace")
    return hashlib.sha256(_NAMESPACE_DOMAIN + encoded).digest()[:_DIGEST_BYTES].hex()


def _sample_offsets(size_bytes: int) -> list[int]:
    """Where the samples of a file start: first, last, and evenly between; the whole file where it is small."""
    if size_bytes <= _SAMPLES_PER_FILE * _SAMPLE_BYTES:
        return list(range(0, size_bytes, _SAMPLE_BYTES))
    last = size_bytes - _SAMPLE_BYTES
    return [last * i // (_SAMPLES_PER_FILE - 1) for i in range(_SAMPLES_PER_FILE)]


def weights_digest(path: str) -> str | None:
    """A sampled digest (64 hex characters) of the weights in a local folder; `None` where there are none.

    Names, sizes and eight 64 KiB samples (first, last, six between) of every `*.safetensors`,
    `*.bin`, `*.pt` and `*.gguf` file directly in the folder: at most 512 KiB are read per file,
    whatever its size; a file up to that size is read whole. Training touches all of a model's
    weights, so samples see it; an edit of a few tensors by hand can slip between them: bump
    `weights_version` for that. Links are followed, as a hub cache is made of them.

    Blocks on I/O: call it once at start, never on a scheduling path.

    Args:
        path: a folder; anything else (a hub name, a single file) gives `None`.

    Raises:
        OSError: a weights file could not be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = sorted(
        (entry for entry in folder.iterdir() if entry.suffix in _WEIGHTS_SUFFIXES and entry.is_file()),
        key=lambda entry: entry.name,
    )
    if not files:
        return None
    digest = hashlib.sha256(_WEIGHTS_DOMAIN)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            size_bytes = file.stat().st_size
            digest.update(encode_fact([file.name, size_bytes]))
            for offset in _sample_offsets(size_bytes):
                stream.seek(offset)
                digest.update(encode_fact([offset, stream.read(_SAMPLE_BYTES)]))
    return digest.hexdigest()
