"""Request traces in Mooncake's format: what arrives when, and which prefix it shares with what came before.

One JSON object per line, plain or gzipped:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

`timestamp` in milliseconds; `hash_ids` has one id per block of 512 prompt tokens, the last of which may
be partly filled. Ids are chained: an id stands for all tokens up to its block's end.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from kvsluice.tiers.errors import ConfigError

__all__ = ["TOKENS_PER_BLOCK", "Request", "Spread", "make_trace", "read_trace", "speed_up", "spread"]

TOKENS_PER_BLOCK: Final = 512

Spread = Literal["round-robin", "affinity"]
_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        time_s: of arrival, from the trace's start.
        prompt_tokens, output_tokens: lengths.
        keys: one per block of the prompt.
        node: where it goes.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]
    node: int = 0


def read_trace(path: Path) -> list[Request]:
    """The requests of one file, in order of time.

    Raises:
        ConfigError: the file cannot be read, holds no request, or a line is not one; names file, line
            and value.
    """
    try:
        with path.open("rb") as stream:
            zipped = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as lines:
            requests = list(_parse(lines, str(path)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"trace {str(path)!r} holds no request")
    requests.sort(key=lambda request: request.time_s)
    first_s = requests[0].time_s
    return [replace(request, time_s=request.time_s - first_s) for request in requests] if first_s else requests


def _parse(lines: Iterable[str], path: str) -> Iterator[Request]:
    keys: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {path!r}, line {number}"
        try:
            entry: object = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON: {line.strip()[:80]!r}: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: {line.strip()[:80]!r} is no JSON object")
        for name in _FIELDS:
            if name not in entry:
                raise ConfigError(f"{where}: {name!r} is missing")
        prompt_tokens = _whole(entry["input_length"], "input_length", where, at_least=1)
        hashes = _hashes(entry["hash_ids"], prompt_tokens, where)
        yield Request(
            time_s=_milliseconds(entry["timestamp"], where) / 1000,
            prompt_tokens=prompt_tokens,
            output_tokens=_whole(entry["output_length"], "output_length", where, at_least=0),
            keys=tuple(keys.setdefault(one, one.to_bytes(8, "big")) for one in hashes),
        )


def _whole(value: object, name: str, where: str, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{where}: {name} {value!r} is no whole number from {at_least} on")
    return value


def _milliseconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: timestamp {value!r} is no time in milliseconds")
    return float(value)


def _hashes(value: object, prompt_tokens: int, where: str) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: hash_ids {value!r} is no list")
    hashes = [_whole(one, "hash id", where, at_least=0) for one in value]
    for one in hashes:
        if one >= 1 << 64:
            raise ConfigError(f"{where}: hash id {one} needs more than 64 bits")
    blocks = -(-prompt_tokens // TOKENS_PER_BLOCK)
    if len(hashes) != blocks:
        raise ConfigError(
            f"{where}: {len(hashes)} hash_ids for an input_length of {prompt_tokens}: "
            f"{blocks} blocks of {TOKENS_PER_BLOCK} tokens"
        )
    if len(set(hashes)) != len(hashes):
        twice = next(one for one in hashes if hashes.count(one) > 1)
        raise ConfigError(f"{where}: hash id {twice} stands twice, and a prefix has one end")
    return hashes


def speed_up(requests: Sequence[Request], factor: float) -> list[Request]:
    """The same requests, arriving `factor` times as fast.

    Raises:
        ConfigError: a factor that is not above 0.
    """
    if not 0 < factor < float("inf"):
        raise ConfigError(f"a speed-up of {factor} must be above 0")
    return [replace(request, time_s=request.time_s / factor) for request in requests]


def spread(requests: Sequence[Request], num_nodes: int, rule: Spread = "round-robin") -> list[Request]:
    """The same requests, each with the node it goes to.

    "round-robin" takes the nodes in turn. "affinity" sends what shares a conversation's first own block
    to one node, as a router that knows conversations does: the second id names one, because the first is a
    system prompt that many conversations share.

    Raises:
        ConfigError: fewer than one node.
    """
    if num_nodes < 1:
        raise ConfigError(f"the number of nodes is {num_nodes}: it must be at least 1")
    if rule == "round-robin":
        return [replace(request, node=at % num_nodes) for at, request in enumerate(requests)]
    homes: dict[bytes, int] = {}
    spreaded = []
    for request in requests:
        conversation = request.keys[min(1, len(request.keys) - 1)]
        spreaded.append(replace(request, node=homes.setdefault(conversation, len(homes) % num_nodes)))
    return spreaded


def make_trace(
    *,
    seed: int,
    num_requests: int,
    requests_per_s: float,
    mean_turns: float = 4.0,
    mean_blocks: float = 8.0,
    think_s: float = 30.0,
) -> list[Request]:
    """A made-up trace of the shape of chat traffic: conversations that share a first block and grow turn by turn.

    Args:
        seed: the same seed gives the same trace.
        num_requests: requests in all.
        requests_per_s: conversations start so that about this many requests arrive per second.
        mean_turns: turns per conversation (geometric).
        mean_blocks: blocks that a turn adds (exponential, at least one).
        think_s: mean pause between two turns (exponential).
    """
    draw = random.Random(seed)
    made: list[Request] = []
    next_id = 1
    start_s = 0.0
    while len(made) < 2 * num_requests:
        start_s += draw.expovariate(requests_per_s / mean_turns)
        hashes, time_s = [0], start_s
        while True:
            added = 1 + int(draw.expovariate(1 / mean_blocks))
            hashes = [*hashes, *range(next_id, next_id + added)]
            next_id += added
            keys = tuple(one.to_bytes(8, "big") for one in hashes)
            output = 1 + int(draw.expovariate(1 / 300))
            made.append(Request(time_s, len(keys) * TOKENS_PER_BLOCK, output, keys))
            if draw.random() < 1 / mean_turns:
                break
            time_s += draw.expovariate(1 / think_s)
    # The middle of twice as many: neither the first conversations alone, nor the last ones running out.
    made.sort(key=lambda request: request.time_s)
    first_s = made[num_requests // 2].time_s
    middle = made[num_requests // 2 : num_requests // 2 + num_requests]
    return [replace(request, time_s=request.time_s - first_s) for request in middle]
