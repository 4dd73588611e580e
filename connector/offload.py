"""`OffloadConnector`: both halves of the connector in one process, for any paged engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from typing_extensions import Self

from kvsluice.connector.by_layer import LayerWatch
from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.ladder import listing_times_s, load_gate_for, open_rank, planned_tiers
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.namespace import ModelIdentity
from kvsluice.connector.orders import Order, RankReport
from kvsluice.connector.planner import Planner
from kvsluice.connector.prober import Prober
from kvsluice.connector.results import Lookup, OffloadStats, TransferResult
from kvsluice.kernels.device import Device
from kvsluice.kernels.ways import CopyChoice
from kvsluice.tiers import reasons
from kvsluice.tiers.errors import ClosedError

__all__ = ["OffloadConnector"]

_log = logging.getLogger(__name__)

_WAIT_STEP_S = 0.0005
_LAYERED_KEPT = 1024
"""Loads by layer whose outcome is remembered past their result: many more than an engine has requests under way."""
_LAYER_STEP_S = 0.0001
"""A layer of a long prompt takes the link a fraction of a millisecond."""


class OffloadConnector:
    """Stores KV-cache blocks in tiers and brings them back, without ever holding up its caller.

    One thread, the engine's, calls everything here. `lookup`, `store`, `load`, `poll`,
    `poll_released`, `cancel` and `stats` return after bounded work in memory; `fence` may wait for
    the device; `wait`, `wait_for_layer`, `reset` and `close` wait as long as they are told to. Work goes on in
    background threads, but results and free slots are taken in by `poll` (and by `store` and
    `load`): an engine calls it at every step.

    Blocks named in `store` must keep their contents until `poll_released` names the job (or `fence`
    returns); blocks named in `load` belong to the connector until `poll` names the job.

    Args:
        config: what to store where; see `OffloadConfig`.
        layout: the engine's KV tensors; they must stay where they are until `close`.
        model: who computed the KV. None takes the configuration's `model`; then the keys alone tell
            two models of equal shape apart.
        device: streams and events to use; None chooses by the layout's device.
        clock: seconds, monotonic.

    Raises:
        TypeError: `config` or `layout` is something else.
        ConfigError: something in `config` cannot be used: a directory that cannot be written, a bucket
            that does not exist, a size that holds no chunk. Nothing is left running.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        model: ModelIdentity | None = None,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(config, OffloadConfig) or not isinstance(layout, KVLayout):
            raise TypeError(
                f"OffloadConnector takes an OffloadConfig and a KVLayout, got {type(config).__name__} and "
                f"{type(layout).__name__}; OffloadConfig.from_dict makes the one, KVLayout.from_tensors the other"
            )
        self._clock = clock
        ladder = planned_tiers(config, clock)
        rank = open_rank(config, layout, model, device=device, clock=clock)
        geometry = rank.geometry
        self._worker = rank.worker
        self._prober = Prober(
            rank.tiers, max_age_s=config.lookup_timeout_s, listing_times_s=listing_times_s(config), clock=clock
        )
        self._planner = Planner(
            ladder,
            geometry.settings(config),
            prober=self._prober,
            load_gate=load_gate_for(config, geometry),
            clock=clock,
        )
        self._layout = layout
        self._ready: dict[int, TransferResult] = {}
        self._watches: dict[int, LayerWatch] = {}
        self._layered: dict[int, bool] = {}
        """Of loads by layer whose result was handed out lately, whether every chunk came."""
        self._left: tuple[str, ...] | None = None
        self.namespace = geometry.namespace
        """Hex digest over everything that changes the bytes under a key."""
        self.blocks_per_chunk = geometry.blocks_per_chunk
        """Blocks that `store` and `load` take per key."""
        self.copy_choices: tuple[CopyChoice, CopyChoice] = rank.worker.copy_choices
        """How stores and loads pass between device and host memory, and what was measured at start."""
        _log.info(
            "kvsluice: namespace %s, %d slots of %d bytes, tiers %s",
            geometry.namespace,
            geometry.num_slots,
            geometry.slot_bytes,
            ", ".join(tier.name for tier in ladder),
        )

    def lookup(self, keys: Sequence[bytes], group: int = 0) -> Lookup:
        """How many leading chunks of a prefix can be loaded. Never blocks.

        What is not known is asked for in the background: `pending` says that an answer is still to
        come, for at most `lookup_timeout_s`. Looking up neither keeps a chunk alive nor makes it
        look used.

        Where the engine tells how fast it computes (`observe_prefill`), chunks that it would have
        computed sooner are not offered: they count as `slower`.

        Args:
            keys: one per chunk, in prefix order.
            group: KV-cache group.

        Raises:
            ValueError: a key that no tier could keep among those that must be asked for, no such group.
            ClosedError: the connector is closed.
        """
        self._check_open(group)
        return self._planner.lookup(keys)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> int:
        """Store chunks in every tier whose gate lets them through. Never blocks.

        The copy out of the blocks comes after all that the engine's stream holds at this call.

        Args:
            keys: one per chunk, each 1 to 64 bytes, each once.
            block_ids: `blocks_per_chunk` ids per key, in order.
            group: KV-cache group.

        Returns:
            The job's id, for `poll`, `poll_released`, `cancel` and `wait`.

        Raises:
            LayoutError: a block id outside the pool, or counts that do not match.
            ValueError: a key that cannot be kept, a key given twice, no such group.
            ClosedError: the connector is closed.
        """
        self._check_open(group)
        job = self._planner.store(keys, block_ids)
        self._send()
        return job

    def load(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        group: int = 0,
        deadline_s: float | None = None,
        *,
        by_layer: bool = False,
    ) -> int:
        """Bring chunks back into blocks, from the fastest tier that has them. Never blocks.

        Each chunk is proven by its checksum before it is copied. A chunk that is missing, damaged or
        late is a miss, with its reason in the result; its blocks then hold nothing of value.

        Args:
            keys: one per chunk, each once.
            block_ids: `blocks_per_chunk` ids per key, in order, each once.
            group: KV-cache group.
            deadline_s: seconds from now after which what is not there is a miss; `load_timeout_s` if None. Where
                the load gate lets a few chunks through to see whether a tier is still slow, it may be less.
            by_layer: copy the first layer of all chunks, then the second, and so on, in the layout's order, for
                an engine that starts on a layer while later ones arrive; see `wait_for_layer`.

        Returns:
            The job's id.

        Raises:
            LayoutError, ValueError, ClosedError: as for `store`.
        """
        self._check_open(group)
        job = self._planner.load(keys, block_ids, deadline_s)
        if by_layer:
            watch = self._watches[job] = LayerWatch(len(keys))
            self._worker.watch_layers(job, watch)
        self._send()
        return job

    def wait_for_layer(self, job_id: int, layer: str, timeout_s: float | None = None) -> bool:
        """Have the engine's stream wait for one layer of a load, and go on. For loads asked for `by_layer`.

        May block: it returns once the layer's copies are queued on the device, which is when all chunks have
        come from their tiers, at the latest at the load's deadline. That is what the caller waits for, and no
        copy. What the engine queues on its current stream after this sees the layer's blocks. They belong to
        the connector until `poll` names the job all the same: the engine may read this layer of them, not write.
        Layers may be asked for in any order, before and after `poll` has named the job.

        Args:
            job_id: of the load.
            layer: a name as the layout was given it.
            timeout_s: how long to wait; None waits as long as the load's deadline lets it.

        Returns:
            False where a chunk was a miss, or a `reset` came: what was computed from layers before is void, too.
            Which chunks are whole all the same, `poll` says.

        Raises:
            ValueError: a job that is no load by layer, or whose result was handed out long ago.
            LayoutError: a layer that the layout does not have.
            TimeoutError: the layer was not there within `timeout_s`.
            ClosedError: the connector was closed while a tier hung.
        """
        number = self._layout.last_tensor(layer)
        watch = self._watches.get(job_id)
        if watch is None:
            if job_id in self._layered:
                return self._layered[job_id]
            raise ValueError(f"job {job_id} is no load by layer, or one of more than {_LAYERED_KEPT} jobs ago")
        end_s = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._turn()
            result = self._ready.get(job_id)
            if watch.missed or (result is not None and result.failed):
                return False
            events = watch.events(number)
            if events is not None:
                self._worker.compute_wait(events)
                return True
            if end_s is not None and self._clock() >= end_s:
                raise TimeoutError(f"layer {layer!r} of job {job_id} was not there after {timeout_s} s")
            if self._left is not None:
                raise ClosedError(f"job {job_id} was not over at close")
            time.sleep(_LAYER_STEP_S)

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        """Tell how long the engine took to compute a part of a prompt. Never blocks.

        Called once per step that computed prompt tokens. It is what lookups hold against the time that
        loads take; an engine that never calls it, and is configured with no rate, uses every hit.

        Args:
            num_tokens: prompt tokens that the step computed, of all requests together; steps that only
                decode have none, and need not be told of.
            elapsed_s: seconds of the engine's time for them: from the step's start, or from the end of
                the step before where that is later, until the device was done with it. Not the time to
                launch it, and not what the engine was idle before.

        Raises:
            ValueError: a negative number, or an endless time.
        """
        self._planner.observe_prefill(num_tokens, elapsed_s)

    def poll(self) -> list[TransferResult]:
        """Jobs that are over since the last call, each once. Never blocks."""
        self._turn()
        return [self._hand_out(job) for job in list(self._ready)]

    def poll_released(self) -> list[int]:
        """Store jobs whose source blocks the engine may reuse since the last call, each once. Never blocks."""
        self._turn()
        return self._planner.take_released()

    def fence(self, block_ids: Iterable[int]) -> None:
        """Return once no transfer asked for before touches these blocks, now or later.

        Waits for the device's copies, never for a tier: a load into these blocks whose copy has not
        started becomes a miss, a store from them that waits for a slot is not made (both `fenced`).

        Raises:
            TimeoutError: the device was not done within 10 s.
        """
        blocks = frozenset(block_ids)
        self._planner.fence(blocks)
        self._send()
        self._worker.fence(blocks)

    def cancel(self, job_id: int) -> None:
        """Shed what has not started; the job still ends in `poll`. No-op for one that is over. Never blocks.

        Raises:
            ValueError: the job was never issued.
        """
        self._planner.cancel(job_id)
        self._send()

    def wait(self, jobs: Iterable[int] | None = None, timeout_s: float | None = None) -> list[TransferResult]:
        """Wait until `jobs` are over (all open ones if None) and take their results.

        Raises:
            TimeoutError: some were not over within `timeout_s`; the results there are stay for `poll`.
            ValueError: a job that was never issued.
            ClosedError: the connector was closed while a tier hung; what it was at is never over.
        """
        self._turn()
        wanted = list(self._ready) + self._planner.open_jobs() if jobs is None else list(jobs)
        end_s = None if timeout_s is None else self._clock() + timeout_s
        while still_open := [job for job in wanted if self._planner.is_open(job)]:
            if end_s is not None and self._clock() >= end_s:
                raise TimeoutError(f"jobs {still_open[:8]} ({len(still_open)} in all) are not over after {timeout_s} s")
            if self._left is not None:
                raise ClosedError(f"jobs {still_open[:8]} ({len(still_open)} in all) were not over at close")
            time.sleep(_WAIT_STEP_S)
            self._turn()
        return [self._hand_out(job) for job in wanted if job in self._ready]

    def reset(self, timeout_s: float = 30.0) -> dict[str, str]:
        """Drop everything that any tier holds in this namespace, as an engine does after new weights.

        From the first moment on nothing older is served, nor is anything that was on its way. A tier
        that could not be emptied stays out of use until a later reset empties it.

        Returns:
            The tiers that were not emptied within `timeout_s`, each with the reason; empty when all were.
        """
        self._check_open(0)
        for watch in self._watches.values():
            watch.on_missed()
        self._layered = dict.fromkeys(self._layered, False)
        self._planner.reset()
        self._ready = {
            job: result.spoiled(reasons.RESET) if result.kind == "load" else result
            for job, result in self._ready.items()
        }
        end_s = self._clock() + timeout_s
        self._send()
        while (outcome := self._planner.reset_outcome()) is None and self._clock() < end_s:
            time.sleep(_WAIT_STEP_S)
            self._turn()
        return self._planner.unreset() if outcome is None else outcome

    def stats(self) -> OffloadStats:
        """A frozen snapshot of tiers, gates and slots. Never blocks."""
        if self._left is None:
            self._turn()
        return self._planner.stats()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every slot and every open store is accounted for."""
        self._planner.check_integrity()

    def close(self, timeout_s: float = 10.0) -> list[str]:
        """Finish what is under way within `timeout_s`, shed the rest, end the threads. Idempotent.

        Returns:
            Names of threads that a tier or the device would not give back; empty when all ended.
        """
        if self._left is None:
            end_s = self._clock() + timeout_s
            # Some of the time is left for the threads to end in.
            drained_s = end_s - timeout_s / 4
            while not self._planner.idle and self._clock() < drained_s:
                self._turn()
                time.sleep(_WAIT_STEP_S)
            self._planner.shed_waiting_as_closed()
            self._send()
            left = self._prober.close(max(0.0, min(0.5, end_s - self._clock())), self._clock)
            left += self._worker.close(max(0.0, end_s - self._clock()))
            self._left = tuple(left)
            while self._take_report():
                pass
        return list(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self, group: int) -> None:
        if self._left is not None:
            raise ClosedError("this connector is closed")
        if group != 0:
            raise ValueError(f"group {group}: this connector has one KV-cache group, 0")

    def _hand_out(self, job_id: int) -> TransferResult:
        result = self._ready.pop(job_id)
        if self._watches.pop(job_id, None) is not None:
            self._worker.unwatch_layers(job_id)
            self._layered[job_id] = not result.failed
            if len(self._layered) > _LAYERED_KEPT:
                del self._layered[next(iter(self._layered))]
        return result

    def _turn(self) -> None:
        """One exchange of reports and orders."""
        self._send()
        if self._left is None:
            self._take_report()
            self._send()
        for result in self._planner.take_results():
            self._ready[result.job_id] = result

    def _send(self) -> None:
        orders = self._planner.take_orders()
        if orders and self._left is None:
            self._worker.submit(self._carry_orders(orders))

    def _take_report(self) -> bool:
        report = self._carry_report(self._worker.collect())
        self._planner.apply(report)
        return report.more

    def _carry_orders(self, orders: tuple[Order, ...]) -> tuple[Order, ...]:
        """How orders reach the worker; the tests put a pickle here."""
        return orders

    def _carry_report(self, report: RankReport) -> RankReport:
        """How reports reach the planner."""
        return report
