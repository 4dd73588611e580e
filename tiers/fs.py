"""The filesystem tier: one file per chunk, on a local disk or a shared mount."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from kvsluice.tiers.base import Tier, TierUsage
from kvsluice.tiers.directio import DirectMode, ImageIO
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, ConfigError, TierUnavailableError
from kvsluice.tiers.fs_quota import DiskQuota
from kvsluice.tiers.fs_tree import (
    allocated_bytes,
    create_private_file,
    fan_out,
    make_private_directory,
    make_root,
    temp_name,
    walk_namespace,
)
from kvsluice.tiers.names import NAMESPACE_FILE, check_namespace, facts_document, file_name
from kvsluice.tiers.reasons import DISK_FULL, IO_ERROR, MISSING, OVERSIZE, SHORT

__all__ = ["FileSystemTier"]

logger = logging.getLogger(__name__)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""How file systems say that they know no hard links."""


class FileSystemTier(Tier):
    """Chunks as files under `<root_dir>/<namespace>/<fan-out>/<key in hex>.safetensors`.

    A chunk is written to a private temporary file beside its place and then linked there, so it is
    visible only when it is whole and never takes the place of other bytes. Nothing is synced: a
    cache may lose chunks with the power, and a file that comes back torn is told by its length and
    by the checksum in its header, while a sync per chunk would wait for the disk's own cache.

    Files have mode 0600 and directories 0700 whatever the umask. The root may be a symlink; below
    it none is followed. Capacity is kept as `DiskQuota` says, for all namespaces under the root.

    Thread-safe; several processes may share a root.

    Args:
        root_dir: made where it is absent; must be writable.
        namespace: one plain path component, normally a hex digest.
        namespace_facts: written to `namespace.json` where that is absent; must hold no secrets.
        name: what errors and metrics call this tier.
        capacity_bytes: the most to keep, in allocated bytes; `None` for 80 % of what is free at the
            start plus what is already used.
        direct_io: `"on"` fails without it, `"off"` never tries, `"auto"` probes once and falls back.
        clock: seconds, monotonic; times the stamping of hits.

    Raises:
        ConfigError: an argument cannot be used; it names the argument and why.
    """

    tier_type: ClassVar[str] = "fs"

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        *,
        namespace: str = "default",
        namespace_facts: Mapping[str, object] | None = None,
        name: str = "fs",
        capacity_bytes: int | None = None,
        direct_io: DirectMode = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        root = self._make_root(root_dir)
        check_namespace(namespace)
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes}: give at least 1, or nothing for a share of the disk"
            )
        if direct_io not in ("auto", "on", "off"):
            raise ConfigError(f"direct_io is {direct_io!r}: give 'auto', 'on' or 'off'")
        self._namespace_dir = f"{root}/{namespace}"
        self._fan_outs: set[str] = set()
        self._can_link = True
        try:
            make_private_directory(self._namespace_dir)
            self._io = self._probe(direct_io)
            if namespace_facts is not None:
                self._write_facts_if_room(facts_document(namespace_facts))
            self.quota = DiskQuota(root, namespace, label=name, capacity_bytes=capacity_bytes, clock=clock)
            """The capacity keeper; its `run_pending` and `wait_idle` serve tools and tests."""
        except OSError as error:
            raise ConfigError(f"root_dir {root!r} cannot be written: {error}") from error
        self.quota.start()

    @staticmethod
    def _make_root(root_dir: str | os.PathLike[str]) -> str:
        root = Path(root_dir).absolute()
        try:
            make_root(root)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"root_dir {str(root)!r} is not a directory, or lies below a file: name a directory"
            ) from error
        except OSError as error:
            raise ConfigError(f"root_dir {str(root)!r} cannot be made: {error}") from error
        return str(root)

    def _probe(self, direct_io: DirectMode) -> ImageIO:
        path = f"{self._namespace_dir}/{temp_name()}"
        fd = create_private_file(path)
        try:
            return ImageIO(direct_io, fd, self._namespace_dir)
        finally:
            os.close(fd)
            Path(path).unlink()

    def _write_facts_if_room(self, document: bytes) -> None:
        try:
            self._write_facts(document)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # Its chunks can still be read, and evicting will make room.
            logger.warning("%s: %s could not be written: %s", self.name, NAMESPACE_FILE, error)

    def _write_facts(self, document: bytes) -> None:
        place = f"{self._namespace_dir}/{NAMESPACE_FILE}"
        if self._status(place) is not None:
            return
        path = f"{self._namespace_dir}/{temp_name()}"
        fd = create_private_file(path)
        try:
            try:
                self._io.write(fd, memoryview(document), len(document))
            finally:
                os.close(fd)
            self._publish(path, place, len(document))
        finally:
            Path(path).unlink(missing_ok=True)

    def path_of(self, key: bytes) -> str:
        """Where the chunk of this key lies, held or not.

        Raises:
            ValueError: no key is that long, or empty.
        """
        return f"{self._namespace_dir}/{fan_out(key)}/{file_name(key)}"

    def store(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        path = self._enter(key, buffer, num_bytes)
        try:
            if self._folder_is_real(fan_out(key)) and self._is_whole(self._status(path), num_bytes):
                return 0
        except OSError as error:
            raise self._unavailable("store", path, error) from error
        reserved = self.quota.admit(num_bytes)
        allocated = chunks = 0
        try:
            replaced, allocated = self._write(path, fan_out(key), buffer, num_bytes)
            if allocated:
                chunks = 1
        except OSError as error:
            raise self._unavailable("store", path, error) from error
        finally:
            self.quota.settle(reserved, allocated, new_chunks=chunks)
        if replaced is not None:
            self.quota.note_removed(allocated_bytes(replaced))
        return num_bytes if allocated else 0

    def _write(self, path: str, folder: str, buffer: memoryview, num_bytes: int) -> tuple[os.stat_result | None, int]:
        """The file that had to give way, and what the new one takes: 0 where another writer was first."""
        fd, temp = self._open_temp(folder)
        try:
            try:
                self._io.write(fd, buffer, num_bytes)
            finally:
                # A network file system may report a failed write only here; the error is the store's.
                os.close(fd)
            # Asked after the close: some file systems hold blocks in advance while a file is open.
            status = os.lstat(temp)
            published, replaced = self._publish(temp, path, num_bytes)
        finally:
            self._remove_temp(temp)
        # Some file systems count blocks late: never take a file for free.
        return replaced, (allocated_bytes(status) or num_bytes) if published else 0

    def _open_temp(self, folder: str) -> tuple[int, str]:
        directory = f"{self._namespace_dir}/{folder}"
        path = f"{directory}/{temp_name()}"
        if self._folder_is_real(folder):
            try:
                return create_private_file(path), path
            except FileNotFoundError:
                # Somebody removed the folder, or the whole tree, under the running tier.
                self._fan_outs.discard(folder)
        make_root(Path(self._namespace_dir).parent)
        make_private_directory(self._namespace_dir)
        make_private_directory(directory)
        self._fan_outs.add(folder)
        return create_private_file(path), path

    def _remove_temp(self, temp: str) -> None:
        try:
            Path(temp).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: temporary file %s stays behind: %s", self.name, temp, error)

    def _publish(self, temp: str, path: str, num_bytes: int) -> tuple[bool, os.stat_result | None]:
        """Give a whole file its name: whether it was needed, and the file that had to give way."""
        if self._can_link:
            try:
                os.link(temp, path, follow_symlinks=False)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._can_link = False
                logger.warning("%s: no hard links in %s (%s): renaming instead", self.name, self._namespace_dir, error)
            else:
                return True, None
        # What is there is either whole, and stays, or something that no load would take. Without
        # hard links two writers of one key may both get here: the namespace says their bytes agree.
        status = self._status(path)
        if self._is_whole(status, num_bytes):
            return False, None
        Path(temp).replace(path)
        return True, status if status is not None and stat.S_ISREG(status.st_mode) else None

    def load(self, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        path = self._enter(key, buffer, num_bytes)
        try:
            found = self._read(path, fan_out(key), buffer, num_bytes)
        except OSError as error:
            raise self._unavailable("load", path, error) from error
        if found is None:
            raise ChunkMissingError(f"{self.name}: no chunk at {path}", reason=MISSING)
        if found != num_bytes:
            raise ChunkDamagedError(
                f"{self.name}: {path} has {found} bytes, the chunk has {num_bytes}",
                reason=SHORT if found < num_bytes else OVERSIZE,
            )
        self.quota.note_hit(key)
        return num_bytes

    def _read(self, path: str, folder: str, buffer: memoryview, num_bytes: int) -> int | None:
        """The bytes that the file has, all of them read if they are `num_bytes`; `None` where there is no chunk."""
        if not self._folder_is_real(folder):
            return None
        try:
            # Non-blocking, so that a pipe in a chunk's place does not hold the thread.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            # Other than asked for even though the size was right: cut while it was read.
            return status.st_size if status.st_size != num_bytes else self._io.read(fd, buffer, num_bytes)
        finally:
            os.close(fd)

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        for count, key in enumerate(keys):
            path = self.path_of(key)
            try:
                if not self._folder_is_real(fan_out(key)):
                    return count
                status = self._status(path)
            except OSError as error:
                raise self._unavailable("look up", path, error) from error
            if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size:
                return count
        return len(keys)

    def delete(self, key: bytes) -> bool:
        self._check_open()
        path = self.path_of(key)
        try:
            return self._folder_is_real(fan_out(key)) and self._remove(path)
        except OSError as error:
            raise self._unavailable("delete", path, error) from error

    def _remove(self, path: str) -> bool:
        status = self._status(path)
        if status is None:
            return False
        try:
            Path(path).unlink()
        except FileNotFoundError:
            return False
        if stat.S_ISREG(status.st_mode):
            self.quota.note_removed(allocated_bytes(status))
        return True

    def scan(self) -> Iterator[bytes]:
        self._check_open()
        try:
            for found in walk_namespace(self._namespace_dir):
                if found.key is not None and found.num_bytes:
                    yield found.key
        except OSError as error:
            raise self._unavailable("list", self._namespace_dir, error) from error

    def clear(self) -> int:
        """As `Tier.clear`; `namespace.json` and other writers' temporary files stay."""
        self._check_open()
        dropped = 0
        failure: OSError | None = None
        try:
            for found in walk_namespace(self._namespace_dir):
                if found.key is None:
                    continue
                try:
                    dropped += self._remove(found.path)
                except OSError as error:
                    failure = error
        except OSError as error:
            failure = error
        if failure is not None:
            raise self._unavailable("clear", self._namespace_dir, failure) from failure
        return dropped

    def take_evicted(self, max_keys: int | None = None) -> list[bytes]:
        return self.quota.take_evicted(max_keys)

    def usage(self) -> TierUsage:
        """Counts every namespace under the root, as the capacity does; `None` until the first walk has ended."""
        return self.quota.usage()

    def close(self) -> None:
        super().close()
        self.quota.close()

    def _enter(self, key: bytes, buffer: memoryview, num_bytes: int) -> str:
        self._check_image(buffer, num_bytes)
        return self.path_of(key)

    def _folder_is_real(self, folder: str) -> bool:
        """Whether a fan-out folder exists, looked at once: only the owner could put a symlink there later."""
        if folder in self._fan_outs:
            return True
        path = f"{self._namespace_dir}/{folder}"
        status = self._status(path)
        if status is None:
            return False
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{path} is not a directory (symlinks are not followed here)")
        self._fan_outs.add(folder)
        return True

    @staticmethod
    def _status(path: str) -> os.stat_result | None:
        try:
            return os.lstat(path)
        except FileNotFoundError:
            return None

    @staticmethod
    def _is_whole(status: os.stat_result | None, num_bytes: int) -> bool:
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == num_bytes

    def _unavailable(self, action: str, path: str, error: OSError) -> TierUnavailableError:
        reason = DISK_FULL if error.errno in _FULL else IO_ERROR
        return TierUnavailableError(f"{self.name}: could not {action} {path}: {error}", reason=reason)
