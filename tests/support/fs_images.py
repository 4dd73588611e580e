"""One chunk image and the buffers to move it in, for the tests of the filesystem tier."""

from __future__ import annotations

import mmap
from pathlib import Path

from kvsluice.tiers.base import round_up

KEY = bytes(range(34))
NUM_BYTES = 3 * 4096 + 100
IMAGE = (bytes(range(256)) * 64)[:NUM_BYTES]


def aligned(image: bytes, room_bytes: int | None = None) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, round_up(room_bytes or len(image))))
    buffer[: len(image)] = image
    return buffer


def unaligned(image: bytes) -> memoryview:
    return aligned(b"\0" + image, len(image) + 1)[1 : 1 + len(image)]


BUFFERS = {"aligned": aligned, "unaligned": unaligned}


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir() or path.is_symlink())
