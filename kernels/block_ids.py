"""Block ids on their way to the device, in buffers that come back when the device has read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BlockIds", "BlockIdsPool"]


class BlockIds:
    """The ids of some chunks, in pinned memory and on the device.

    Attributes:
        on_device: int64 (chunks, num_blocks); holds the ids behind `fetch` on the same stream.
    """

    def __init__(self, pool: BlockIdsPool, host: torch.Tensor, device: torch.Tensor) -> None:
        self._pool = pool
        self.capacity = len(host)
        self._host = host
        self._device = device
        self._count = 0

    @property
    def on_device(self) -> torch.Tensor:
        return self._device[: self._count]

    def fill(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Write ids to pinned memory; the device must have read what stood there."""
        self._count = len(block_ids)
        self._host[: self._count] = torch.tensor(block_ids, dtype=torch.int64)

    def fetch(self) -> None:
        """Queue the way to the device on the current stream."""
        self._device[: self._count].copy_(self._host[: self._count], non_blocking=True)

    def release(self) -> None:
        """The device has read them: the buffer may be used again."""
        self._pool.put_back(self)


class BlockIdsPool:
    """Buffers for the ids of a submission each. As many as submissions are under way; used by one thread.

    Args:
        num_blocks: ids of one chunk.
        device: where the kernels read them.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self._device = device
        self._free: list[BlockIds] = []
        # torch hands memory that was freed on a stream out to that stream again while work that uses it is still
        # queued there. Of a stream of its own, nobody else's work is left in it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """A buffer that holds these ids; it belongs to the caller until `BlockIds.release`."""
        for at, ids in enumerate(self._free):
            if ids.capacity >= len(block_ids):
                del self._free[at]
                break
        else:
            shape = (max(16, len(block_ids)), self._num_blocks)
            host = torch.empty(shape, dtype=torch.int64, pin_memory=self._stream is not None)
            with torch.cuda.stream(self._stream):
                ids = BlockIds(self, host, torch.empty(shape, dtype=torch.int64, device=self._device))
        ids.fill(block_ids)
        return ids

    def put_back(self, ids: BlockIds) -> None:
        """Take a buffer back."""
        self._free.append(ids)
