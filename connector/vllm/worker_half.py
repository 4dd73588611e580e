"""The adapter in a worker process: the rank worker behind vLLM's worker-side calls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.ladder import build_tiers, chunk_format, geometry_for, namespace_for, worker_tiers
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.region import PinnedRegion
from kvsluice.connector.vllm.identity import model_identity
from kvsluice.connector.vllm.wire import Handshake, StepOrders, StepReports
from kvsluice.connector.worker import RankWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["WorkerHalf"]

_log = logging.getLogger(__name__)

SHUTDOWN_S = 2.5
"""vLLM's front end kills the engine core 5 s after it asked for shutdown, and takes about 2 s itself."""


class WorkerHalf:
    """One rank. All calls come on vLLM's worker thread."""

    def __init__(self, config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._worker: RankWorker | None = None
        self._handshake: Handshake | None = None
        self._finished = KVConnectorTransferResults()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout off the tensors and bring up tiers, region and threads."""
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        layout = KVLayout.from_tensors(
            kv_caches, tokens_per_block=spec.block_size, num_blocks=self._kv_cache_config.num_blocks
        )
        config = self._config
        namespace = namespace_for(config, layout, model_identity(config, self._vllm_config))
        fmt = chunk_format(config, layout, namespace)
        geometry = geometry_for(config, layout, namespace, fmt)
        tiers = build_tiers(config, namespace.digest, namespace.facts)
        region = PinnedRegion(geometry.num_slots, geometry.slot_bytes, device=layout.device, pin=config.pin_memory)
        self._worker = RankWorker(
            layout,
            fmt,
            region,
            worker_tiers(config, tiers),
            blocks_per_chunk=geometry.blocks_per_chunk,
            verify=config.verify,
        )
        self._handshake = Handshake(geometry)
        _log.info(
            "kvsluice worker: namespace %s, %d KV tensors on %s, chunks of %d blocks (%d bytes), %d slots, %s",
            namespace.digest,
            len(layout.paged),
            layout.device,
            geometry.blocks_per_chunk,
            fmt.file_bytes,
            geometry.num_slots,
            "pinned" if region.pinned else "pageable",
        )

    @property
    def handshake(self) -> Handshake | None:
        return self._handshake

    def take_orders(self, step: StepOrders) -> None:
        """Start the step's orders; called after the step's forward was launched, on its stream."""
        assert self._worker is not None
        self._worker.submit(step.orders)
        for load in step.finished_loads:
            self._finished.finished_recving.add(load.request_id)
            self._failed_blocks.update(load.failed_blocks)

    def take_finished(self) -> KVConnectorTransferResults:
        """The requests whose loads are decided, each once."""
        finished, self._finished = self._finished, KVConnectorTransferResults()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """The blocks of those that hold nothing."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> StepReports | None:
        """What happened since the last step."""
        if self._worker is None:
            return None
        return StepReports((self._worker.collect(),))

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(SHUTDOWN_S)
