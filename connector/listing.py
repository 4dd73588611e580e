"""Finds out at start which chunks a tier holds, so that lookups need not ask for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvsluice.connector.index import MAX_HELD_KEYS
from kvsluice.tiers.base import Tier
from kvsluice.tiers.chunk_file import MAX_KEY_BYTES, engine_key, stored_key
from kvsluice.tiers.errors import SluiceError

__all__ = ["LISTED_AT_ONCE", "Listed", "TierListing"]

_log = logging.getLogger(__name__)

LISTED_AT_ONCE: Final = 1024
"""Keys that one call takes over, which is a fraction of a millisecond of an engine's thread."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Keys of which a tier had every rank's part when it was listed; at most `LISTED_AT_ONCE`."""

    tier: int
    keys: tuple[bytes, ...]


class TierListing:
    """Lists one tier once, in a daemon thread of its own that ends by itself.

    The time is looked at between two keys, so a tier that hangs keeps this thread and nothing else.
    What was found until then, or until an error, is good.

    Args:
        at: the tier's place in the ladder.
        tier: whose `scan` is used.
        found: told of what is held, on the listing's thread; must not block.
        group: the KV-cache group whose chunks count.
        num_ranks: a key is held only where every rank's part is.
        limit_s: how long to go on.
        max_keys: how many keys to tell of, and how many to remember of which parts are yet to come.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        at: int,
        tier: Tier,
        found: Callable[[Listed], None],
        *,
        group: int,
        num_ranks: int,
        limit_s: float,
        max_keys: int = MAX_HELD_KEYS,
        clock: Callable[[], float],
    ) -> None:
        self._at = at
        self._tier = tier
        self._found = found
        self._limit_s = limit_s
        self._max_keys = max_keys
        self._clock = clock
        self._bit_of = {stored_key(b"", group, rank): 1 << rank for rank in range(num_ranks)}
        self._all_ranks = (1 << num_ranks) - 1
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name=f"kvsluice-list-{tier.name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End it at the next key. Never blocks."""
        self._stopped = True

    def _run(self) -> None:
        start_s = self._clock()
        told = 0
        ready: list[bytes] = []
        level, outcome, unexpected = logging.INFO, "all there are", None
        try:
            parts: dict[bytes, int] = {}
            for name in self._tier.scan():
                if self._stopped:
                    return
                if self._clock() - start_s >= self._limit_s:
                    outcome = "the time was up"
                    break
                key = self._whole(name, parts)
                if key is not None:
                    ready.append(key)
                if len(ready) == LISTED_AT_ONCE:
                    self._tell(ready)
                    told += len(ready)
                    ready = []
                if told + len(ready) >= self._max_keys or len(parts) >= self._max_keys:
                    outcome = "no more can be remembered"
                    break
        except SluiceError as error:
            level, outcome = logging.WARNING, f"then failed: {error}"
        except Exception as error:  # noqa: BLE001 - a stranger's tier: an engine can do without the listing
            level, outcome, unexpected = logging.ERROR, f"then failed unexpectedly: {error!r}", error
        if not self._stopped:
            self._tell(ready)
            told += len(ready)
            seconds = self._clock() - start_s
            text = "tier %s: listed %d chunks in %.2f s: %s"
            _log.log(level, text, self._tier.name, told, seconds, outcome, exc_info=unexpected)

    def _whole(self, name: bytes, parts: dict[bytes, int]) -> bytes | None:
        """The key whose last missing part this is; None where others are missing or it is none of ours."""
        key = engine_key(name)
        bit = self._bit_of.get(name[len(key) :])
        if bit is None or not 1 <= len(key) <= MAX_KEY_BYTES:
            return None
        if bit == self._all_ranks:
            return key
        seen = parts.pop(key, 0) | bit
        if seen == self._all_ranks:
            return key
        parts[key] = seen
        return None

    def _tell(self, keys: list[bytes]) -> None:
        if keys:
            self._found(Listed(self._at, tuple(keys)))
