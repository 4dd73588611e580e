"""What the scheduler knows of one tier without asking it: keys held, and keys lately found absent.

All of it is belief. Another process may delete a chunk or add one; a load proves or disproves a held
key, and an absent one is asked for again once its answer has expired.

    held       stored or loaded by us, told by the tier, or listed at start
    absent     told by the tier, or proven by a load: believed for `negative_ttl_s`
    doubted    an error or a deadline, so that nobody knows: asked for again soon

What was told or listed is hearsay until we have loaded it: then nothing is known of the other tiers either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final, TypeVar

__all__ = ["MAX_ABSENT_KEYS", "MAX_HELD_KEYS", "UNKNOWN_TTL_S", "TierIndex"]

MAX_HELD_KEYS: Final = 2_000_000
"""About 250 MB at 32-byte keys; past it the key known longest is forgotten and asked for when needed."""
MAX_ABSENT_KEYS: Final = 100_000
"""Of keys found absent, and of doubted ones, each."""
UNKNOWN_TTL_S: Final = 1.0
"""How long a key that nobody could tell of is left alone, where `negative_ttl_s` is not less: a tier that comes
back serves again about a second later, and one that stays away is asked for a prompt once a second."""

_T = TypeVar("_T")

_SHARDS: Final = 64
_PLACES: Final = 4096
_SHIFT: Final = 40
"""A dict finds its places by the low bits of a key's hash, so the dict is found by others."""
_MASK: Final = _PLACES - 1
_DROPPED_IN: Final = 4096
_SMALL: Final = 65_536
"""Up to that many keys one dict does: to double it takes under 2 ms."""


def _spread(shards: list[dict[bytes, bool]]) -> list[dict[bytes, bool]]:
    """`_PLACES` references to the shards: from the first to the last, each has a little more than the one before."""
    weights = [2.0 ** (at / len(shards)) for at in range(len(shards))]
    places: list[dict[bytes, bool]] = []
    share = 0.0
    for shard, weight in zip(shards, weights, strict=True):
        share += weight / sum(weights)
        places += [shard] * (round(share * _PLACES) - len(places))
    return places


def _drop_first(keys: dict[bytes, _T], limit: int) -> int:
    """Drop the keys that were put first, one of some thousand that `limit` allows; how many.

    To find the first one a dict walks over the places of all that were dropped before it, so it is asked seldom.
    """
    first = list(islice(keys, max(1, limit // _DROPPED_IN)))
    for key in first:
        del keys[key]
    return len(first)


class TierIndex:
    """Not thread-safe: the planner's alone.

    A dict that doubles its room is copied in one go, on the engine's thread: some 15 ms at 350,000 keys,
    60 ms at 1,400,000. So the held keys are spread over many, and as each gets other numbers of keys than
    the next, they double one at a time.
    """

    def __init__(self, negative_ttl_s: float, *, max_held: int = MAX_HELD_KEYS, max_absent: int = MAX_ABSENT_KEYS):
        self._negative_ttl_s = negative_ttl_s
        self._unknown_ttl_s = min(UNKNOWN_TTL_S, negative_ttl_s)
        self._max_held = max_held
        self._max_absent = max_absent
        # Whether it is hearsay. A dict keeps insertion order, so its first key is the one known longest.
        self._shards: list[dict[bytes, bool]] = [{} for _ in range(1 if max_held <= _SMALL else _SHARDS)]
        self._places = _spread(self._shards)
        self._num_held = 0
        self._absent_until: dict[bytes, float] = {}
        self._doubted_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return self._num_held

    def holds(self, key: bytes) -> bool:
        return key in self._places[hash(key) >> _SHIFT & _MASK]

    def knows_by_hearsay(self, key: bytes) -> bool:
        """Whether the tier told of it, or it was listed, and we have neither stored nor loaded it."""
        return self._places[hash(key) >> _SHIFT & _MASK].get(key, False)

    def count_held(self, keys: Sequence[bytes], first: int, above: Sequence[Callable[[bytes], bool]]) -> int:
        """How many keys from `keys[first]` on are held, up to the next after it that one of `above` holds too."""
        # The body of `holds`, without a call for each of thousands.
        places = self._places
        for at in range(first, len(keys)):
            key = keys[at]
            if key not in places[hash(key) >> _SHIFT & _MASK]:
                return at - first
            if at > first:
                for holds in above:
                    if holds(key):
                        return at - first
        return len(keys) - first

    def lacks(self, key: bytes, now_s: float) -> bool:
        """Whether the key was lately found absent, or could not be told of, so that it is not asked for now."""
        until_s = self._absent_until.get(key)
        if until_s is not None and now_s < until_s:
            return True
        until_s = self._doubted_until.get(key)
        return until_s is not None and now_s < until_s

    def add(self, key: bytes) -> None:
        """The key is held: we have just stored or loaded it."""
        self._absent_until.pop(key, None)
        self._doubted_until.pop(key, None)
        self._put(key, hearsay=False)

    def add_answered(self, keys: Collection[bytes], now_s: float) -> None:
        """The tier says that it holds them.

        Those that were lately found absent stay so: a tier that bisects has looked at a few keys, and
        takes it that the others are held.
        """
        if self._absent_until:
            absent = {key for key in self._absent_until.keys() & keys if now_s < self._absent_until[key]}
            keys = [key for key in keys if key not in absent] if absent else keys
        for until_s in (self._absent_until, self._doubted_until):
            if until_s:
                for key in until_s.keys() & keys:
                    del until_s[key]
        self._put_all(keys)

    def add_listed(self, keys: Collection[bytes]) -> None:
        """The tier held them some time ago. Whatever else is known of a key is newer, and none gives way to them."""
        if self._absent_until or self._doubted_until:
            keys = [key for key in keys if key not in self._absent_until and key not in self._doubted_until]
        if self._num_held + len(keys) > self._max_held:
            keys = [key for key in keys if not self.holds(key)][: max(0, self._max_held - self._num_held)]
        self._put_all(keys)

    def remove(self, key: bytes, now_s: float) -> None:
        """The key is not held: do not say so again before the answer expires."""
        self._forget(key)
        self._note(self._absent_until, key, now_s + self._negative_ttl_s)

    def doubt(self, key: bytes, now_s: float) -> None:
        """Nobody knows whether the key is held, or it cannot be served now: ask again in a while."""
        self._forget(key)
        self._note(self._doubted_until, key, now_s + self._unknown_ttl_s)

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
        self._num_held = 0
        self._absent_until.clear()
        self._doubted_until.clear()

    def _put(self, key: bytes, *, hearsay: bool) -> None:
        shard = self._places[hash(key) >> _SHIFT & _MASK]
        if key in shard:
            shard[key] = shard[key] and hearsay
            return
        if self._num_held >= self._max_held:
            # Of this shard, not of all: with keys that are digests that comes to nearly the same.
            self._num_held -= _drop_first(shard or max(self._shards, key=len), self._max_held)
        shard[key] = hearsay
        self._num_held += 1

    def _put_all(self, keys: Collection[bytes]) -> None:
        """By hearsay."""
        if self._num_held + len(keys) > self._max_held:
            for key in keys:
                self._put(key, hearsay=True)
            return
        # Thousands at once: without a call for each.
        places = self._places
        for key in keys:
            shard = places[hash(key) >> _SHIFT & _MASK]
            if key not in shard:
                shard[key] = True
                self._num_held += 1

    def _forget(self, key: bytes) -> None:
        shard = self._places[hash(key) >> _SHIFT & _MASK]
        if key in shard:
            del shard[key]
            self._num_held -= 1

    def _note(self, until_s: dict[bytes, float], key: bytes, end_s: float) -> None:
        until_s.pop(key, None)
        if len(until_s) >= self._max_absent:
            _drop_first(until_s, self._max_absent)
        until_s[key] = end_s
