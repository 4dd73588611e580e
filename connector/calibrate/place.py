"""Where is measured: a tier in a place of its own on the operator's storage, removed afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvsluice.connector.calibrate.units import format_size
from kvsluice.connector.config_tiers import AnyTierConfig, FsTierConfig, ObjTierConfig
from kvsluice.connector.ladder import open_tier
from kvsluice.tiers.base import Tier
from kvsluice.tiers.directio import probe_direct
from kvsluice.tiers.errors import ConfigError, TierUnavailableError
from kvsluice.tiers.fs import FileSystemTier
from kvsluice.tiers.fs_quota import reserve_of
from kvsluice.tiers.fs_tree import create_private_file

__all__ = ["Place", "name_of", "open_place"]

_log = logging.getLogger(__name__)

_NAME: Final = "kvsluice-calibrate-"
SPACE_BYTES: Final = 1 << 30
"""What may lie on a tier at once, where its largest cell does not need more: it is cleared less often."""


@dataclass(slots=True)
class Place:
    """A tier that is empty, ours alone, and gone when it is closed.

    Attributes:
        path: the folder or prefix that is removed.
        reads: where reads come from, for people.
        direct: whether they went past the page cache; None for a tier that has none here.
        space_bytes: what may lie there at once.
        left_behind: after closing, what could not be removed, and why.
    """

    tier: Tier
    path: str
    reads: str
    direct: bool | None
    space_bytes: int
    left_behind: list[str] = field(default_factory=list)


def name_of(config: AnyTierConfig) -> str:
    """What is measured, as an operator would name it."""
    match config:
        case FsTierConfig():
            return config.root_dir
        case ObjTierConfig():
            urls = [config.endpoint_url] if isinstance(config.endpoint_url, str) else config.endpoint_url
            at = f" at {' and '.join(urls)}" if urls else ""
            return f"s3://{config.bucket}/{config.prefix}".rstrip("/") + at
        case _:
            return config.name or config.type


@contextlib.contextmanager
def open_place(config: AnyTierConfig, *, space_bytes: int, connections: int) -> Iterator[Place]:
    """Open the tier that `config` describes, in a namespace of its own; remove that on every way out.

    Args:
        config: of an `fs` or an `obj` tier. Its capacity is not used: nothing of anybody's is evicted.
        space_bytes: must find room.
        connections: kept open by an obj tier.

    Raises:
        ConfigError: no such folder or bucket, not writable, too little space, or a kind of tier that does no I/O.
    """
    match config:
        case FsTierConfig():
            with _open_folder(config, space_bytes) as place:
                yield place
        case ObjTierConfig():
            with _open_prefix(config, space_bytes, connections) as place:
                yield place
        case _:
            raise ConfigError(f"tier {name_of(config)!r} is of type {config.type!r}: fs and obj tiers are measured")


@contextlib.contextmanager
def _open_folder(config: FsTierConfig, space_bytes: int) -> Iterator[Place]:
    root = Path(config.root_dir).absolute()
    free_bytes = _free_bytes(root)
    if free_bytes < space_bytes:
        raise ConfigError(
            f"{root} has too little space: {format_size(max(0, free_bytes))} are free beside what a tier leaves to"
            f" others, {format_size(space_bytes)} are needed; lower max_bytes or chunk_bytes"
        )
    earlier = sorted(str(path) for path in root.glob(f".{_NAME}*"))
    if earlier:
        _log.warning("%s: of a run that is under way or was killed; remove it in the latter case", ", ".join(earlier))
    path = root / f".{_NAME}{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        left_behind: list[str] = []
        stack.callback(_remove_folder, path, left_behind)
        try:
            path.mkdir(mode=0o700)
            direct = config.direct_io != "off" and _direct_works(path)
        except OSError as error:
            raise ConfigError(f"{root} cannot be written: {error}") from error
        own = config.model_copy(update={"root_dir": str(path), "capacity": free_bytes})
        tier = open_tier(own, "calibration")
        assert isinstance(tier, FileSystemTier)
        stack.callback(tier.close)
        tier.quota.wait_idle()
        space_bytes = max(space_bytes, min(SPACE_BYTES, free_bytes // 2))
        yield Place(tier, str(path), _reads(path, direct), direct, space_bytes, left_behind)


def _free_bytes(root: Path) -> int:
    try:
        if not root.is_dir():
            raise ConfigError(f"there is no folder {str(root)!r}: name one on the file system that is to be measured")
        status = os.statvfs(root)
    except OSError as error:
        raise ConfigError(f"{root} cannot be used: {error}") from error
    return status.f_bavail * status.f_frsize - reserve_of(status)


def _direct_works(folder: Path) -> bool:
    path = folder / "probe"
    fd = create_private_file(str(path))
    try:
        return probe_direct(fd) is None
    finally:
        os.close(fd)
        path.unlink()


def _reads(folder: Path, direct: bool) -> str:
    kind = _file_system(folder)
    if kind in ("tmpfs", "ramfs"):
        return f"from memory ({kind})"
    how = "from the device, with direct I/O" if direct else "perhaps from the page cache, without direct I/O"
    return f"{how} ({kind})" if kind else how


def _file_system(path: Path) -> str:
    """Its kind, such as ext4; empty where that is not known."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The third field is the device; the kind comes after a lone dash, as the fields before it vary in number.
    rows = (line.split() for line in mounts.splitlines())
    return next((row[row.index("-") + 1] for row in rows if row[2] == wanted and "-" in row), "")


def _remove_folder(path: Path, left_behind: list[str]) -> None:
    # Everything that can go goes; the second try is for the error of what cannot.
    shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _leave(left_behind, f"{path}: {error}")


@contextlib.contextmanager
def _open_prefix(config: ObjTierConfig, space_bytes: int, connections: int) -> Iterator[Place]:
    namespace = f"{_NAME}{secrets.token_hex(4)}"
    tier = open_tier(config.model_copy(update={"n_read_threads": connections}), namespace)
    path = "/".join(part for part in (f"s3://{config.bucket}", config.prefix.strip("/"), namespace) if part) + "/"
    place = Place(tier, path, "from the object store", None, max(space_bytes, SPACE_BYTES))
    with contextlib.closing(tier):
        try:
            yield place
        finally:
            try:
                tier.clear()
            except TierUnavailableError as error:
                _leave(place.left_behind, f"{path}: {error}")


def _leave(left_behind: list[str], what: str) -> None:
    left_behind.append(what)
    _log.error("not removed: %s", what)
