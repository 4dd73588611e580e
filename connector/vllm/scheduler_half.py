"""The adapter in the scheduler process: the planner behind vLLM's scheduler-side calls.

Blocks are held by reference while a copy reads them, so that finish, abort, preemption and
re-admission need no word from us:

    order made ── touch ──▶ request may go, blocks stay ──▶ every rank has copied ── free ──▶ pool

Bookkeeping is by job id. A request id may come again while jobs of its namesake still run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.ladder import Geometry, build_tiers, listing_times_s, load_gate_for, planned_tiers
from kvsluice.connector.planner import Planner
from kvsluice.connector.prefill_meter import PrefillMeter
from kvsluice.connector.prober import Prober
from kvsluice.connector.results import TransferResult
from kvsluice.connector.vllm.wire import FailedLoad, SluiceStats, StartedLoad, StepOrders, StepReports
from kvsluice.tiers import reasons
from kvsluice.tiers.base import Tier
from kvsluice.tiers.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

_log = logging.getLogger(__name__)

STORE_PATIENCE_S = 10.0
"""How long an idle engine goes on stepping for the sake of stores; a hung tier must not keep it awake."""
RESET_PATIENCE_S = 30.0
SLOT_PATIENCE_S = 0.1
"""How long a store may wait for a slot while a request waits for its blocks: a tier that works frees one sooner."""
SETTLE_STEPS = 2
"""Steps from telling vLLM that a load is over until other requests see its blocks as their own prefix hit:
one where steps are scheduled one by one, two where the next is scheduled before the last one's output is in."""


@dataclass(slots=True)
class _RequestState:
    """What is kept per live request."""

    request: Request
    chunks_offered: int = 0
    may_load: bool = True
    may_store: bool = True
    planned: tuple[int, int] | None = None
    """First chunk and number of chunks of the last lookup's answer."""
    load_job: int | None = None


@dataclass(slots=True)
class _LoadJob:
    request_id: str
    keys: tuple[bytes, ...]
    blocks: dict[bytes, tuple[int, ...]] = field(default_factory=dict)


class SchedulerHalf:
    """The scheduler's side. All calls come on vLLM's scheduler thread."""

    def __init__(
        self,
        config: OffloadConfig,
        *,
        hash_block_size: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size % hash_block_size:
            raise ConfigError(f"block_size {block_size} is no multiple of hash_block_size {hash_block_size}")
        self._config = config
        self._clock = clock
        self._hash_block_size = hash_block_size
        self._block_size = block_size
        self._blocks_per_chunk = config.blocks_per_chunk_for(block_size)
        self._chunk_tokens = self._blocks_per_chunk * block_size
        self._pool: BlockPool | None = None
        self._planner: Planner | None = None
        self._prober: Prober | None = None
        self._tiers: dict[int, Tier] = {}
        self._requests: dict[str, _RequestState] = {}
        self._loads: dict[int, _LoadJob] = {}
        self._loading: Counter[bytes] = Counter()
        self._settling: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self._steps = 0
        self._meter = PrefillMeter(clock)
        self._held_blocks: dict[int, list[int]] = {}
        self._store_started_s: dict[int, float] = {}
        self._started_loads: list[StartedLoad] = []
        self._failed_loads: list[FailedLoad] = []
        self._reset_until_s = 0.0
        self._stats_changed = False

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def handshake(self, geometries: list[Geometry]) -> None:
        """Start planning with what the workers found out.

        Raises:
            ConfigError: ranks that would not share chunks, slots or names.
        """
        first = geometries[0]
        for rank, geometry in enumerate(geometries):
            if geometry != first:
                raise ConfigError(f"rank {rank} has another KV geometry than rank 0: {geometry} and {first}")
        self._tiers = build_tiers(self._config, first.namespace, first.facts)
        self._prober = Prober(
            self._tiers,
            num_ranks=len(geometries),
            max_age_s=self._config.lookup_timeout_s,
            listing_times_s=listing_times_s(self._config),
            clock=self._clock,
        )
        self._planner = Planner(
            planned_tiers(self._config, self._clock),
            first.settings(self._config, num_ranks=len(geometries)),
            prober=self._prober,
            load_gate=load_gate_for(self._config, first),
            clock=self._clock,
        )
        _log.info(
            "kvsluice scheduler: namespace %s, chunks of %d tokens, configuration %s",
            first.namespace,
            self._chunk_tokens,
            self._config.redacted(),
        )

    # ---- requests ----------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = _RequestState(request)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that are worth loading; None while that is still being found out."""
        state = self._requests.get(request.request_id)
        if state is None or self._planner is None or not state.may_load or request.skip_reading_prefix_cache:
            return 0, False
        first = computed // self._chunk_tokens
        keys = self._chunk_keys(request, first)
        if not keys:
            return 0, False
        found = self._planner.lookup(keys)
        if found.pending:
            return None, False
        external = (first + found.held) * self._chunk_tokens - computed
        if external <= 0:
            return 0, False
        # Blocks that are being loaded become shareable when they have arrived: waiting for them is cheaper
        # than loading them twice, and bounded by their own deadline.
        if not self._loading.keys().isdisjoint(keys[: found.held]):
            return None, False
        state.planned = (first, found.held)
        return external, True

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has blocks for the hit: load into them."""
        state = self._requests.get(request.request_id)
        if external <= 0 or state is None or state.planned is None or self._planner is None:
            return
        first, held = state.planned
        state.planned = None
        table = blocks.get_block_ids()[0]
        width = self._blocks_per_chunk
        keys = tuple(self._chunk_keys(request, first, first + held))
        computed = (first + held) * self._chunk_tokens - external
        block_ids = table[first * width : (first + held) * width]
        skip = computed // self._block_size - first * width
        job = self._planner.load(keys, block_ids, None, skip_blocks=skip)
        load = _LoadJob(request.request_id, keys)
        for at, key in enumerate(keys):
            load.blocks[key] = tuple(block_ids[at * width + (skip if at == 0 else 0) : (at + 1) * width])
        self._loads[job] = load
        self._loading.update(keys)
        self._started_loads.append(StartedLoad(job, request.request_id, len(keys)))
        state.load_job = job

    def finished(self, request: Request) -> None:
        """The request is over, in whatever way. What runs for it goes on by job id."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.load_job in self._loads and self._planner is not None:
            assert state.load_job is not None
            self._planner.cancel(state.load_job)

    # ---- steps -------------------------------------------------------------------------------

    def build_step(self, step: SchedulerOutput) -> StepOrders:
        """Orders of this step: loads that were allocated, and the chunks that its forward completes."""
        if self._planner is None:
            return StepOrders()
        self._steps += 1
        while self._settling and self._settling[0][0] <= self._steps:
            self._loading.subtract(self._settling.popleft()[1])
            self._loading += Counter()
        for request_id in step.preempted_req_ids or ():
            if (state := self._requests.get(request_id)) is not None:
                # It computes everything anew, with the weights of now.
                state.chunks_offered = 0
                state.may_store = True
        prefill_tokens = 0
        for request_id, scheduled in step.num_scheduled_tokens.items():
            if (state := self._requests.get(request_id)) is not None:
                prefill_tokens += self._prefill_tokens(state.request, scheduled)
                self._offer(state, scheduled, step)
        self._meter.made(self._steps, prefill_tokens)
        self._yield_blocks(step)
        self._take_results()
        orders = StepOrders(
            self._planner.take_orders(), tuple(self._started_loads), tuple(self._failed_loads), self._steps
        )
        self._started_loads.clear()
        self._failed_loads.clear()
        return orders

    @staticmethod
    def _prefill_tokens(request: Request, scheduled: int) -> int:
        """Of the tokens that a step computes for a request, those that are known: a prompt's, or a preempted one's.

        Not the last: a step of decoding computes that one, and draft tokens or placeholders behind it.
        """
        computed: int = request.num_computed_tokens
        known: int = request.num_tokens
        return max(0, min(computed + scheduled, known - 1) - computed)

    def _offer(self, state: _RequestState, scheduled: int, step: SchedulerOutput) -> None:
        assert self._planner is not None
        request = state.request
        if not state.may_store:
            return
        # Rejected draft tokens are scheduled as well, but no token that is known lacks its KV but the last.
        ready = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if self._config.offload_prompt_only:
            ready = min(ready, request.num_prompt_tokens)
        first, end = state.chunks_offered, ready // self._chunk_tokens
        if end <= first:
            return
        keys = self._chunk_keys(request, first, end)
        tables = step.kv_connector_block_state.get_block_ids(request.request_id)
        if not keys or tables is None:
            return
        width = self._blocks_per_chunk
        block_ids = tables[0][first * width : (first + len(keys)) * width]
        state.chunks_offered = first + len(keys)
        job = self._planner.store(keys, block_ids)
        self._store_started_s[job] = self._clock()
        self._hold(job, block_ids)
        # A job that no tier takes is over at once; its blocks go back in the same call.
        self._release()

    def apply(self, reports: StepReports | None) -> None:
        """Take in what the workers saw."""
        if self._planner is None or reports is None:
            return
        prefilled = self._meter.output(reports.step)
        if prefilled is not None:
            self._planner.observe_prefill(*prefilled)
            self._stats_changed = True
        for report in reports.reports:
            self._stats_changed = self._stats_changed or bool(report.events)
            self._planner.apply(report)
        self._take_results()

    def _take_results(self) -> None:
        assert self._planner is not None
        self._release()
        for result in self._planner.take_results():
            self._stats_changed = True
            if result.kind == "load":
                self._finish_load(result)
            else:
                self._store_started_s.pop(result.job_id, None)

    def _finish_load(self, result: TransferResult) -> None:
        load = self._loads.pop(result.job_id)
        # Not before the request itself has been admitted: another one would load the same chunks again.
        self._settling.append((self._steps + 1 + SETTLE_STEPS, load.keys))
        failed = tuple(block for key in result.failed for block in load.blocks[key])
        state = self._requests.get(load.request_id)
        if state is not None and state.load_job == result.job_id:
            state.load_job = None
            # A second try could fail the same way: the request computes what is missing.
            state.may_load = state.may_load and not failed
            if failed:
                state.chunks_offered = 0
                _log.info(
                    "request %s: %d of %d chunks were not loaded (%s) and are computed",
                    load.request_id,
                    len(result.failed),
                    len(load.keys),
                    ", ".join(sorted(set(result.failed.values()))),
                )
        if failed:
            self._failed_loads.append(FailedLoad(result.job_id, failed))

    # ---- blocks ------------------------------------------------------------------------------

    def _hold(self, job: int, block_ids: list[int]) -> None:
        assert self._pool is not None
        pool = self._pool
        pool.touch([pool.blocks[block] for block in block_ids])
        self._held_blocks[job] = block_ids

    def _release(self) -> None:
        assert self._planner is not None
        for job in self._planner.take_released():
            block_ids = self._held_blocks.pop(job, None)
            if block_ids is not None and self._pool is not None:
                pool = self._pool
                # Tail first: vLLM takes free blocks from the front, and the head of a prefix is worth most.
                pool.free_blocks(pool.blocks[block] for block in reversed(block_ids))

    def free_blocks_for_request(self) -> bool:
        """vLLM is about to preempt for want of blocks: whether it should wait a step for ours instead.

        Only for blocks that nobody but a store holds. Those that wait for a slot are given up here and
        now; copies under way are over soon, by the device's time, never a tier's.
        """
        if self._planner is None or not self._held_blocks:
            return False
        return self._give_up_waiting(list(self._held_blocks))

    def _yield_blocks(self, step: SchedulerOutput) -> None:
        """Give up stores that have waited for a slot for long where a request waits for their blocks.

        Else a tier that takes nothing any more would keep, for as long as its stores may wait, KV
        blocks from requests that have no use for the tier.
        """
        assert self._planner is not None
        if not self._held_blocks or self._pool is None:
            return
        now_s = self._clock()
        late = [job for job in self._held_blocks if now_s - self._store_started_s.get(job, now_s) >= SLOT_PATIENCE_S]
        if not late:
            return
        free = self._pool.get_num_free_blocks()
        for request_id, state in self._requests.items():
            wanted = -(-state.request.num_tokens // self._block_size)
            if wanted > free and state.load_job is None and request_id not in step.num_scheduled_tokens:
                self._give_up_waiting(late)
                return

    def _give_up_waiting(self, jobs: list[int]) -> bool:
        """Shed what waits for a slot and alone keeps blocks from the pool; whether blocks came or come free."""
        assert self._planner is not None
        assert self._pool is not None
        blocks = self._pool.blocks
        ours = frozenset(block for job in jobs for block in self._held_blocks[job] if blocks[block].ref_cnt == 1)
        if not ours:
            return False
        self._planner.fence(ours, reasons.BLOCKS_WANTED)
        self._release()
        return True

    # ---- the rest ----------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether an idle engine should go on stepping for us: always for a bounded time only."""
        now_s = self._clock()
        if self._loads or self._failed_loads or self._held_blocks:
            return True
        if any(now_s - start_s < STORE_PATIENCE_S for start_s in self._store_started_s.values()):
            return True
        return now_s < self._reset_until_s and self._planner is not None and self._planner.reset_outcome() is None

    def reset(self) -> bool:
        """Stop serving what is held, and have the tiers emptied."""
        if self._planner is None:
            return True
        self._planner.reset()
        self._take_results()
        for state in self._requests.values():
            # A reset may follow a change of weights: what builds on KV from before it must not be served later.
            state.may_store = state.may_store and state.request.num_computed_tokens == 0
        self._reset_until_s = self._clock() + RESET_PATIENCE_S
        return True

    def stats(self) -> SluiceStats | None:
        """The newest snapshot where something has changed."""
        if self._planner is None or not self._stats_changed:
            return None
        self._stats_changed = False
        return SluiceStats.of(self._planner.stats())

    def shutdown(self) -> None:
        if self._prober is not None:
            self._prober.close(0.5, self._clock)
            self._prober = None
        for tier in self._tiers.values():
            tier.close()
        self._tiers = {}

    def _chunk_keys(self, request: Request, first: int = 0, end: int | None = None) -> list[bytes]:
        """The keys of the request's full chunks from `first` on: the hash of the prefix that ends with each."""
        per_chunk = self._chunk_tokens // self._hash_block_size
        hashes = request.block_hashes
        full = len(hashes) // per_chunk
        chunks = range(first, full if end is None else min(end, full))
        return [bytes(hashes[(at + 1) * per_chunk - 1]) for at in chunks]
