"""The adapter in a worker process: the rank worker behind vLLM's worker-side calls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvsluice.connector.config import OffloadConfig
from kvsluice.connector.ladder import open_rank
from kvsluice.connector.layout import KVLayout
from kvsluice.connector.orders import Loaded, RankReport
from kvsluice.connector.vllm.identity import model_identity
from kvsluice.connector.vllm.wire import Handshake, StartedLoad, StepOrders, StepReports
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
        # Loads that vLLM has not been told about: told once, an id that it no longer knows ends the engine.
        self._loads: dict[int, StartedLoad] = {}
        self._parts_left: dict[int, int] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report: RankReport | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout off the tensors and bring up tiers, region and threads."""
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        layout = KVLayout.from_tensors(
            kv_caches, tokens_per_block=spec.block_size, num_blocks=self._kv_cache_config.num_blocks
        )
        rank = open_rank(self._config, layout, model_identity(self._vllm_config))
        geometry = rank.geometry
        self._worker = rank.worker
        self._handshake = Handshake(geometry)
        _log.info(
            "kvsluice worker: namespace %s, %d KV tensors on %s, chunks of %d blocks (slots of %d bytes), %d slots, %s",
            geometry.namespace,
            len(layout.paged),
            layout.device,
            geometry.blocks_per_chunk,
            geometry.slot_bytes,
            geometry.num_slots,
            "pinned" if rank.worker.region.pinned else "pageable",
        )

    @property
    def handshake(self) -> Handshake | None:
        return self._handshake

    def take_orders(self, step: StepOrders) -> None:
        """Start the step's orders; called after the step's forward was launched, on its stream."""
        assert self._worker is not None
        for started in step.started_loads:
            self._loads[started.job_id] = started
            self._parts_left[started.job_id] = started.num_parts
        self._worker.submit(step.orders)
        for failed in step.failed_loads:
            # One that all arrived for, and that a reset then made worthless, has been told already.
            if failed.job_id in self._loads:
                self._failed_blocks.update(failed.failed_blocks)
                self._tell(failed.job_id)

    def take_finished(self) -> KVConnectorTransferResults:
        """The requests whose loads are over, each once.

        A load whose every part has arrived needs no word from the scheduler, which would take a step.
        """
        if self._worker is None:
            return KVConnectorTransferResults()
        self._report = self._worker.collect()
        for event in self._report.events:
            if isinstance(event, Loaded) and event.reason is None and event.job_id in self._loads:
                self._parts_left[event.job_id] -= 1
                if self._parts_left[event.job_id] == 0:
                    self._tell(event.job_id)
        finished, self._finished = self._finished, set()
        return KVConnectorTransferResults(finished_recving=finished)

    def _tell(self, job_id: int) -> None:
        del self._parts_left[job_id]
        self._finished.add(self._loads.pop(job_id).request_id)

    def take_failed_blocks(self) -> set[int]:
        """The blocks of those that hold nothing."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self, step: StepOrders) -> StepReports | None:
        """What happened since the last step; told with the output of this one."""
        report, self._report = self._report, None
        return None if report is None else StepReports((report,), step.step)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(SHUTDOWN_S)
