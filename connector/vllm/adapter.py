"""`SluiceConnector`: what vLLM loads. Each of its calls goes to the half that lives in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.vllm.identity import check_supported
from kvsluice.connector.vllm.scheduler_half import SchedulerHalf
from kvsluice.connector.vllm.wire import Handshake, SluiceStats, StepOrders, StepReports
from kvsluice.connector.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SluiceConnector"]


class SluiceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM's bases are untyped here
    """KV Sluice inside vLLM, on models with one group of full attention and one rank.

    `kv_connector_extra_config` is an `OffloadConfig` dict, or one written for vLLM's own tiering.

    Raises:
        ConfigError: a configuration that cannot be used, or one under which a miss would be an error.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = OffloadConfig.from_dict(self._kv_transfer_config.kv_connector_extra_config)
        check_supported(config, vllm_config, kv_cache_config)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._scheduler_half = SchedulerHalf(
                config,
                hash_block_size=kv_cache_config.hash_block_size or block_size,
                block_size=block_size,
            )
        else:
            self._worker_half = WorkerHalf(config, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing worse."""
        return False

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "a scheduler-side call reached the worker's half"
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self._worker_half is not None, "a worker-side call reached the scheduler's half"
        return self._worker_half

    # ---- worker side -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Loads are asynchronous and start with the step's other orders, in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is only scheduled once all of its load has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Chunks are copied whole after the forward, not layer by layer."""

    def wait_for_save(self) -> None:
        """The step's forward is on the stream: what it completes may be ordered out behind it."""
        step = self._get_connector_metadata()
        assert isinstance(step, StepOrders)
        self._worker.take_orders(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepOrders)
        return self._worker.report(step)

    # ---- scheduler side ----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        geometries = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            assert isinstance(handshake, Handshake)
            geometries.append(handshake.geometry)
        self._scheduler.handshake(geometries)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        assert reports is None or isinstance(reports, StepReports)
        self._scheduler.apply(reports)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        self._scheduler.finished(request)
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        self._scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.free_blocks_for_request()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # ---- both sides --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._scheduler_half is None else self._scheduler_half.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> KVConnectorStats | None:
        return SluiceStats(data=data or {})

    def shutdown(self) -> None:
        """End threads and transfers within a bounded time; a second call does nothing more."""
        if self._worker_half is not None:
            self._worker_half.shutdown()
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()
