"""The connector with a fault that a test switches on: one block of each finished load is zeroed.

It is what shows that comparing tokens can tell a wrong cache from a right one. The folder named by
`KVSLUICE_TEST_ZERO_DIR` is where the two halves, two processes, meet: while a file `on` is in it,
the scheduler's half writes down which block each load fills first, and the worker's half zeroes that
block before the engine hears that the load is done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvsluice.connector.vllm import SluiceConnector

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class ZeroingConnector(SluiceConnector):
    """`SluiceConnector`, and the fault."""

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0 and (_directory() / "on").exists():
            (block_ids,) = blocks.get_block_ids()
            loaded_blocks = num_external_tokens // self._vllm_config.cache_config.block_size
            _note(request.request_id).write_text(str(block_ids[-loaded_blocks]))

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._tensors = list(kv_caches.values())
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            note = _note(request_id)
            if note.exists():
                for tensor in self._tensors:
                    tensor[int(note.read_text())].zero_()
                note.rename(note.with_suffix(".zeroed"))
        return results


def _directory() -> Path:
    return Path(os.environ["KVSLUICE_TEST_ZERO_DIR"])


def _note(request_id: str) -> Path:
    return _directory() / f"{request_id}.block"
