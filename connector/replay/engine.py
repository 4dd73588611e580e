"""The engine's part of a replay: a GPU prefix cache in front of the connector, prefill behind it.

    arrives ──▶ GPU cache ──▶ lookup ──▶ load ──▶ prefill of the rest ──▶ store
                                │ pending, or another request loads the same: at the next step again

Open loop: requests arrive when the trace says so, however slow everything is. Prefill takes
`tokens / rate` for each request by itself: there is no queue for the GPU, because what is looked at
here is the storage behind it. Of each prefill the connector is told how long it took, as an engine tells it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial

from kvsluice.connector.replay.node import Node
from kvsluice.connector.replay.timeline import Timeline
from kvsluice.connector.replay.trace import Request
from kvsluice.connector.results import TransferResult

__all__ = ["Engine", "PrefixCache"]


class PrefixCache:
    """Blocks in GPU memory, least recently used out first; of one prefix the end before its beginning.

    Args:
        capacity: blocks; 0 keeps nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are there."""
        blocks = self._blocks
        return next((at for at, key in enumerate(keys) if key not in blocks), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """All of `keys` are there now, and were just used."""
        blocks = self._blocks
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)


class Engine:
    """One engine's requests.

    Args:
        node: its connector.
        timeline: its clock.
        gpu_chunks: blocks of the GPU prefix cache.
        prefill_tokens_per_s: of one request.
    """

    def __init__(self, node: Node, timeline: Timeline, *, gpu_chunks: int, prefill_tokens_per_s: float) -> None:
        self._node = node
        self._timeline = timeline
        self._cache = PrefixCache(gpu_chunks)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._loading: Counter[bytes] = Counter()
        self.requests = 0
        self.prompt_chunks = 0
        self.gpu_hits = 0
        self.tier_hits = 0
        self.failed_hits = 0
        self.slower_hits = 0

    def arrive(self, request: Request) -> None:
        """Now."""
        self.requests += 1
        self.prompt_chunks += len(request.keys)
        self._admit(request)

    def _admit(self, request: Request) -> None:
        first = self._cache.match(request.keys)
        keys = request.keys[first:]
        held = slower = 0
        if keys:
            found = self._node.lookup(keys)
            held, slower = found.held, found.slower
            # What is on its way into the GPU is not loaded twice; it comes, or its deadline does.
            if found.pending or any(self._loading[key] for key in keys[:held]):
                self._node.at_step(partial(self._admit, request))
                return
        self._cache.use(request.keys[:first])
        self.gpu_hits += first
        self.slower_hits += slower
        if held:
            wanted = keys[:held]
            self._loading.update(wanted)
            self._node.load(wanted, partial(self._loaded, request, first, wanted))
        else:
            self._prefill(request, first)

    def _loaded(self, request: Request, first: int, wanted: Sequence[bytes], result: TransferResult) -> None:
        for key in wanted:
            if self._loading[key] == 1:
                del self._loading[key]
            else:
                self._loading[key] -= 1
        got = next((at for at, key in enumerate(wanted) if key in result.failed), len(wanted))
        self.tier_hits += got
        self.failed_hits += len(wanted) - got
        self._cache.use(request.keys[: first + got])
        self._prefill(request, first + got)

    def _prefill(self, request: Request, computed: int) -> None:
        share = 1 - computed / len(request.keys)
        num_tokens = round(request.prompt_tokens * share)
        elapsed_s = num_tokens / self._prefill_tokens_per_s
        self._timeline.after(elapsed_s, partial(self._computed, request, num_tokens, elapsed_s))

    def _computed(self, request: Request, num_tokens: int, elapsed_s: float) -> None:
        # An engine of endless speed has no rate to tell.
        if elapsed_s:
            self._node.observe_prefill(num_tokens, elapsed_s)
        self._cache.use(request.keys)
        # From the first chunk on, as the adapter does: one that was dropped earlier gets another chance.
        self._node.store(request.keys)
