"""A thousand damaged chunks of each kind: none is ever loaded, and each is counted under its reason."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bench import Bench, Cache, blocks_of

from kvsluice.tiers import reasons

WAIT_S = 60.0
TIMES = 1000
AT_ONCE = 50
"""Chunks that are stored, damaged and asked for together."""

Damage = Callable[[Sequence[Path], Sequence[Path], random.Random], None]


def flip_a_bit(files: Sequence[Path], _others: Sequence[Path], source: random.Random) -> None:
    for file in files:
        image = bytearray(file.read_bytes())
        image[source.randrange(len(image))] ^= 1 << source.randrange(8)
        file.write_bytes(image)


def drop_the_last_byte(files: Sequence[Path], _others: Sequence[Path], _source: random.Random) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])


def add_a_byte(files: Sequence[Path], _others: Sequence[Path], source: random.Random) -> None:
    for file in files:
        file.write_bytes(file.read_bytes() + bytes([source.randrange(256)]))


def swap_pairs(files: Sequence[Path], _others: Sequence[Path], source: random.Random) -> None:
    shuffled = source.sample(list(files), len(files))
    for one, other in zip(shuffled[::2], shuffled[1::2], strict=True):
        images = one.read_bytes(), other.read_bytes()
        other.write_bytes(images[0])
        one.write_bytes(images[1])


def take_another_namespaces(files: Sequence[Path], others: Sequence[Path], _source: random.Random) -> None:
    by_name = {file.name: file for file in others}
    for file in files:
        shutil.copyfile(by_name[file.name], file)


def chunk_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "allowed"),
    [
        (flip_a_bit, {reasons.CHECKSUM, reasons.HEADER, reasons.FOREIGN}),
        (drop_the_last_byte, {reasons.SHORT}),
        (add_a_byte, {reasons.OVERSIZE}),
        (swap_pairs, {reasons.FOREIGN}),
        (take_another_namespaces, {reasons.FOREIGN}),
    ],
    ids=["bit flipped", "byte missing", "byte too many", "files swapped", "another namespace"],
)
def test_of_a_thousand_damaged_chunks_none_is_loaded_and_each_is_counted(
    bench: Bench, tmp_path: Path, damage: Damage, allowed: set[str]
) -> None:
    cache = Cache(4 * AT_ONCE)
    own_root, other_root = tmp_path / "own", tmp_path / "other"
    names = [bytes([number]) * 16 for number in range(AT_ONCE)]
    sources, targets = blocks_of(*range(AT_ONCE)), blocks_of(*range(AT_ONCE, 2 * AT_ONCE))

    def connect(root: Path, salt: str):
        tier = {"type": "fs", "root_dir": str(root), "capacity": "1GiB"}
        return bench.connect(tier, cache=cache, slots=2 * AT_ONCE, salt=salt, load_gate=None)

    other = connect(other_root, "another tenant")
    other.wait([other.store(names, sources)], WAIT_S)
    connector = connect(own_root, "ours")
    source = random.Random(7)
    counted: Counter[str] = Counter()
    while counted.total() < TIMES:
        for name, tensor in cache.tensors.items():
            tensor.copy_(cache.first[name])
        (stored,) = connector.wait([connector.store(names, sources)], WAIT_S)
        assert stored.done_keys == tuple(names)
        cache.blank()
        damage(chunk_files(own_root), chunk_files(other_root), source)
        (loaded,) = connector.wait([connector.load(names, targets)], WAIT_S)
        assert loaded.done_keys == ()
        assert cache.is_blank(range(4 * AT_ONCE)), "a byte of a damaged chunk was loaded"
        counted.update(loaded.failed.values())
    assert set(counted) <= allowed
    assert connector.stats().tiers["fs"].missed == counted
