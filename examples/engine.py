"""A small paged inference engine that offloads its KV cache through KV Sluice.

It has what a real engine has, in little: a paged KV pool with block tables, prefix hashes, prefill
in pieces, a scheduler that preempts the youngest request when blocks run out, greedy decoding. With
a connector it looks each prompt's leading chunks up, loads those that are held, computes the rest
and stores what it computed.

The same prompt gives bit for bit the same logits whether its prefix was computed or loaded. Float
sums depend on the shapes they are taken over, so prefill always goes in pieces of one chunk, aligned
to chunks: piece number n has one shape, whatever happened to the pieces before it.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from block_pool import BlockPool
from paged_model import PagedModel
from torch import Tensor

__all__ = ["Completion", "Engine", "Lookup", "Offloader", "TransferResult", "prefix_keys"]

_ROOT = hashlib.sha256(b"example engine, token ids as 4 little-endian bytes").digest()


class Lookup(Protocol):
    """What the engine reads of a lookup's answer."""

    @property
    def held(self) -> int: ...
    @property
    def pending(self) -> bool: ...


class TransferResult(Protocol):
    """What the engine reads of a finished transfer."""

    @property
    def job_id(self) -> int: ...
    @property
    def done_keys(self) -> Collection[bytes]: ...
    @property
    def failed(self) -> Mapping[bytes, str]: ...


class Offloader(Protocol):
    """The part of `kvsluice.connector.OffloadConnector` that an engine needs."""

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None: ...
    def lookup(self, keys: Sequence[bytes]) -> Lookup: ...
    def store(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int: ...
    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, deadline_s: float | None) -> int: ...
    def poll(self) -> Sequence[TransferResult]: ...
    def poll_released(self) -> Iterable[int]: ...
    def cancel(self, job: int) -> object: ...
    def wait(self, *, timeout_s: float | None) -> Sequence[TransferResult]: ...


def prefix_keys(tokens: Sequence[int], tokens_per_block: int, blocks_per_chunk: int) -> list[bytes]:
    """One 32-byte key per full chunk of `tokens`: the hash of everything up to the chunk's end.

    Blocks are chained with sha256 over token ids, so equal prefixes have equal keys in every
    process. A partial chunk at the end has no key.
    """
    parent = _ROOT
    keys = []
    for block in range(len(tokens) // tokens_per_block):
        ids = tokens[block * tokens_per_block : (block + 1) * tokens_per_block]
        parent = hashlib.sha256(parent + b"".join(token.to_bytes(4, "little") for token in ids)).digest()
        if (block + 1) % blocks_per_chunk == 0:
            keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True)
class Completion:
    """One request, served."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    hit_tokens: int
    """Prompt tokens whose KV was loaded instead of computed."""
    first_token_s: float
    """Seconds from `submit` to the first token."""


class _State(enum.Enum):
    WAITING = enum.auto()
    LOADING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(eq=False, slots=True)
class _Request:
    number: int
    prompt: Sequence[int]
    max_new_tokens: int
    keys: list[bytes]
    wanted: int
    """How many leading chunks it would take from the connector; 0 where it must compute all."""
    submitted_s: float
    state: _State = _State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV is in `blocks`."""
    hit_tokens: int = 0
    load_job: int | None = None
    lookup_since_s: float | None = None
    first_token_s: float | None = None
    output: list[int] = field(default_factory=list)


class Engine:
    """Serves requests over one KV pool. Single-threaded, like a real engine's scheduling loop.

    Args:
        model: what computes.
        caches: the KV pool, as `paged_model.new_kv_caches` makes it.
        blocks_per_chunk: the connector's; also sets the prefill piece.
        connector: None for an engine that computes everything.
        max_running: requests computed at once; the others wait.
        lookup_patience_s: how long a request waits for a pending lookup before it takes what is known.
        load_deadline_s: how long a load may take before its missing part counts as a miss.
        on_loaded: called with the blocks of each load that has ended, before they are used.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: PagedModel,
        caches: Mapping[str, Tensor],
        *,
        blocks_per_chunk: int,
        connector: Offloader | None = None,
        max_running: int = 4,
        lookup_patience_s: float = 2.0,
        load_deadline_s: float = 20.0,
        on_loaded: Callable[[Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        first = next(iter(caches.values()))
        self.pool = BlockPool(first.shape[0])
        self.tokens_per_block = first.shape[2]
        self.blocks_per_chunk = blocks_per_chunk
        self.tokens_per_chunk = blocks_per_chunk * self.tokens_per_block
        self.preemptions = 0
        self._model, self._caches, self._connector = model, caches, connector
        self._max_running, self._on_loaded = max_running, on_loaded
        self._lookup_patience_s, self._load_deadline_s, self._clock = lookup_patience_s, load_deadline_s, clock
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._loading: dict[int, _Request] = {}
        self._completions: dict[int, Completion] = {}
        self._submitted = 0
        self._starved = False
        """A running request waits for blocks. Nothing is admitted then: a new one would take them first, for ever."""

    def submit(self, prompt: Sequence[int], max_new_tokens: int, *, reuse: bool = True) -> int:
        """Queue a request; its number. `reuse=False` computes every token, whatever the tiers hold.

        Raises:
            ValueError: an empty prompt, no token asked for, or more tokens than the KV pool has room for.
        """
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"nothing to do for {len(prompt)} prompt tokens and max_new_tokens={max_new_tokens}")
        if (needed := self._blocks_for(len(prompt) + max_new_tokens)) > self.pool.num_blocks:
            raise ValueError(f"the request needs {needed} KV blocks, the pool has {self.pool.num_blocks}")
        keys = prefix_keys(prompt, self.tokens_per_block, self.blocks_per_chunk) if self._connector else []
        # The last token is always computed, hit or not: its logits are the first answer.
        wanted = min(len(keys), (len(prompt) - 1) // self.tokens_per_chunk) if reuse else 0
        self._submitted += 1
        self._waiting.append(_Request(self._submitted, prompt, max_new_tokens, keys, wanted, self._clock()))
        return self._submitted

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, reuse: bool = True
    ) -> list[Completion]:
        """Serve `prompts` together and wait for all."""
        numbers = [self.submit(prompt, max_new_tokens, reuse=reuse) for prompt in prompts]
        while self._waiting or self._running:
            if not self.step():
                time.sleep(0.0002)  # every request waits for a transfer: let its threads run
        return [self._completions.pop(number) for number in numbers]

    def step(self) -> bool:
        """One turn of the scheduler: take in finished transfers, admit, compute. Whether it computed anything."""
        self._pump()
        while not self._starved and self._admit():
            pass
        busy = prefilled = self._starved = False
        for request in list(self._running):
            if request.state is _State.PREFILL and not prefilled:
                busy |= (prefilled := self._prefill_piece(request))
            elif request.state is _State.DECODE:
                busy |= self._decode(request)
        return busy

    def drain(self, timeout_s: float) -> None:
        """Wait until every transfer has ended and its blocks are free.

        Raises:
            TimeoutError: some had not by then.
        """
        if self._connector:
            for result in self._connector.wait(timeout_s=timeout_s):
                self._finish_load(result)
            self._pump()

    def check_integrity(self) -> None:
        """No block is lost, and none belongs to two requests; see `BlockPool.check_integrity`."""
        self.pool.check_integrity()
        owned = [block for request in self._running for block in request.blocks]
        if len(owned) != len(set(owned)):
            raise AssertionError("a block belongs to two requests")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    # Transfers

    def _pump(self) -> None:
        if self._connector:
            for result in self._connector.poll():
                self._finish_load(result)
            for job in self._connector.poll_released():
                self.pool.unpin(job)

    def _finish_load(self, result: TransferResult) -> None:
        """Count what a load brought; the rest is computed. Results of stores need nothing: see `poll_released`."""
        request = self._loading.pop(result.job_id, None)
        if request is None:
            return
        self.pool.unpin(result.job_id)
        if request.load_job != result.job_id:
            return  # preempted meanwhile
        done = set(result.done_keys)
        if self._on_loaded:
            self._on_loaded(request.blocks)
        chunks = 0
        while chunks < request.wanted and request.keys[chunks] in done:
            chunks += 1
        request.computed = request.hit_tokens = chunks * self.tokens_per_chunk
        request.load_job, request.state = None, _State.PREFILL

    def _admit(self) -> bool:
        """Start the oldest waiting request, if it can start; whether it did."""
        if not self._waiting or len(self._running) >= self._max_running:
            return False
        request = self._waiting[0]
        if self._connector and request.wanted:
            now_s = self._clock()
            if request.lookup_since_s is None:
                request.lookup_since_s = now_s
            answer = self._connector.lookup(request.keys[: request.wanted])
            if answer.pending and now_s - request.lookup_since_s < self._lookup_patience_s:
                return False
            if answer.held:
                blocks = self.pool.take(answer.held * self.blocks_per_chunk)
                if blocks is None:
                    return False
                request.blocks, request.state = blocks, _State.LOADING
                job = self._connector.load(request.keys[: answer.held], blocks, deadline_s=self._load_deadline_s)
                self.pool.pin(job, blocks)
                self._loading[job] = request
                request.load_job = job
        if request.state is _State.WAITING:
            request.state = _State.PREFILL
        self._running.append(self._waiting.popleft())
        return True

    # Computing

    def _prefill_piece(self, request: _Request) -> bool:
        start = request.computed
        end = min(start + self.tokens_per_chunk, len(request.prompt))
        if not self._reserve(request, end):
            return False
        started_s = self._clock()
        logits = self._model.forward(list(request.prompt[start:end]), start, request.blocks, self._caches)
        token = int(logits.argmax())  # after each piece: it waits for the device, so the time below is the device's
        if self._connector:
            self._connector.observe_prefill(end - start, self._clock() - started_s)
        request.computed = end
        if end == len(request.prompt):
            self._store(request)
            request.state = _State.DECODE
            self._emit(request, token)
        return True

    def _decode(self, request: _Request) -> bool:
        # A request earlier in the same step may have preempted this one.
        if request.state is not _State.DECODE or not self._reserve(request, request.computed + 1):
            return False
        logits = self._model.forward(request.output[-1:], request.computed, request.blocks, self._caches)
        request.computed += 1
        self._emit(request, int(logits.argmax()))
        return True

    def _emit(self, request: _Request, token: int) -> None:
        request.output.append(token)
        if request.first_token_s is None:
            request.first_token_s = self._clock() - request.submitted_s
        if len(request.output) == request.max_new_tokens:
            self._running.remove(request)
            self.pool.release(request.blocks)
            self._completions[request.number] = Completion(
                tuple(request.output), len(request.prompt), request.hit_tokens, request.first_token_s
            )

    def _store(self, request: _Request) -> None:
        """Offer every full chunk of the prompt; a tier that has one already leaves it as it is.

        Not the generated tokens: they were computed one by one, in shapes that no prefill repeats.
        """
        if self._connector and request.keys:
            blocks = request.blocks[: len(request.keys) * self.blocks_per_chunk]
            self.pool.pin(self._connector.store(request.keys, blocks), blocks)

    # Blocks

    def _reserve(self, request: _Request, tokens: int) -> bool:
        """Blocks for `tokens` tokens, preempting younger requests if it must; whether it has them."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        while missing > 0:
            taken = self.pool.take(missing)
            if taken is not None:
                request.blocks += taken
                return True
            victim = self._running[-1]
            if victim is request:
                self._starved = True  # until older requests finish, or pinned blocks come back
                return False
            self._preempt(victim)
        return True

    def _preempt(self, victim: _Request) -> None:
        """Take a request's blocks and send it back to the queue's head, to start over.

        What it had generated is dropped: greedy decoding finds the same tokens again, in the same
        shapes. A transfer on its blocks keeps them pinned until it has ended.
        """
        self.preemptions += 1
        self._running.remove(victim)
        if victim.load_job is not None and self._connector:
            self._connector.cancel(victim.load_job)
        self.pool.release(victim.blocks)
        victim.state, victim.blocks, victim.computed, victim.hit_tokens = _State.WAITING, [], 0, 0
        victim.load_job, victim.lookup_since_s, victim.output = None, None, []
        self._waiting.appendleft(victim)
