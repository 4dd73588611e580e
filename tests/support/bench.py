"""A small cache and connectors over it that prove on the way out that nothing leaked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from doubles import MemoryTier, PickledConnector

from kvsluice.connector import KVLayout, OffloadConfig, TransferResult, ladder
from kvsluice.kernels.device import Device
from kvsluice.tiers import Tier

WIDTH = 2
"""Blocks per chunk of the small cache."""
SLOT_BYTES = 8192
"""4096 of header and 512 of payload, rounded up."""


def make_key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big", signed=True)).digest()


def sluice_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvsluice-")}


class Cache:
    """A paged KV cache of two layers, 256 bytes a block, filled with random bytes."""

    def __init__(self, num_blocks: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            f"model.layers.{layer}": torch.randn(num_blocks, 4, 8, generator=generator) for layer in range(2)
        }
        self.layout = KVLayout.from_tensors(self.tensors, tokens_per_block=4)
        self.first = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def blank(self) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def holds(self, targets: Sequence[int], sources: Sequence[int]) -> bool:
        """Whether the target blocks hold what the source blocks held at first."""
        return all(
            torch.equal(tensor[list(targets)], self.first[name][list(sources)]) for name, tensor in self.tensors.items()
        )

    def is_blank(self, blocks: Sequence[int]) -> bool:
        return all(bool((tensor[list(blocks)] == -1.0).all()) for tensor in self.tensors.values())


@dataclass
class Bench:
    """Makes connectors over one small cache; `tiers` are the doubles by name."""

    monkeypatch: pytest.MonkeyPatch
    cache: Cache = field(default_factory=Cache)
    tiers: dict[str, MemoryTier] = field(default_factory=dict)
    made: list[PickledConnector] = field(default_factory=list)
    hung: set[str] = field(default_factory=set)
    """Threads that the test means to leave behind at `close`."""

    def double(self, name: str, images: dict[bytes, bytes] | None = None) -> MemoryTier:
        """Stand a double in for the tier of this name."""
        self.tiers[name] = MemoryTier(name, images)
        return self.tiers[name]

    def config(
        self, *tiers: Mapping[str, object] | str, slots: int = 8, backpressure: object = None, **options: object
    ) -> OffloadConfig:
        """A word is a tier: `host` with 8 slots, `fs` or `obj` (doubles)."""
        return OffloadConfig.from_dict(
            {
                "blocks_per_chunk": WIDTH,
                "staging_bytes": slots * SLOT_BYTES,
                "backpressure": backpressure,
                "tiers": [self._tier(tier) if isinstance(tier, str) else tier for tier in tiers],
                **options,
            }
        )

    def _tier(self, word: str) -> dict[str, object]:
        if word == "host":
            return {"type": "host", "capacity": 8 * SLOT_BYTES}
        if word not in self.tiers:
            self.double(word)
        return {"type": "fs", "name": word, "root_dir": "unused"}

    def connect(
        self,
        *tiers: Mapping[str, object] | str,
        cache: Cache | None = None,
        device: Device | None = None,
        clock: Callable[[], float] | None = None,
        **options: object,
    ) -> PickledConnector:
        config = self.config(*tiers, **options)
        build = _REAL_BUILD

        def build_tier(tier: object, namespace: str, facts: Mapping[str, object]) -> Tier:
            return self.tiers.get(tier.name) or build(tier, namespace, facts)

        self.monkeypatch.setattr(ladder, "open_tier", build_tier)
        layout = (cache or self.cache).layout
        timed = {} if clock is None else {"clock": clock}
        self.made.append(PickledConnector(config, layout, device=device, **timed))
        return self.made[-1]

    def finish(self) -> None:
        """Open what is held, then prove that nothing leaked."""
        for tier in self.tiers.values():
            tier.open_all()
        for connector in self.made:
            connector.check_integrity()
            assert set(connector.close(timeout_s=10.0)) <= self.hung
            connector.check_integrity()
            assert connector.stats().pool.pinned == 0 or self.hung


_REAL_BUILD = ladder.open_tier  # the one seam through which a tier of the test's own gets in


def blocks_of(*chunks: int) -> list[int]:
    """The block ids of these chunks of the small cache."""
    return [chunk * WIDTH + at for chunk in chunks for at in range(WIDTH)]


def one(results: Sequence[TransferResult]) -> TransferResult:
    """The only result there is."""
    assert len(results) == 1, results
    return results[0]
