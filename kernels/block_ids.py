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
        self._host[: self._count] = torch.tensor(block_ids, dtype=torch.int64, device="cpu")

    def fetch(self) -> None:
        """Queue the way to the device on the current stream."""
        self._device[: self._count].copy_(self._host[: self._count], non_blocking=True)

    def release(self) -> None:
        """The device has read them: the buffer may be used again."""
        self._pool.put_back(self)


class BlockIdsPool:
    """Buffers for the ids of a submission each. As many as submissions are under way; used by one thread at a time.

    Those that are made at first are allocated on the engine's thread and used behind its events. Those that it
    takes later on are allocated on the current stream of the thread that takes them, which must be nobody
    else's (see `Device.bind_thread`): torch hands memory that was freed on a stream out to that stream again
    while work that uses it is still queued there.

    Args:
        num_blocks: ids of one chunk.
        device: where the kernels read them.
        num_chunks: chunks that a buffer holds at least.
        num_buffers: how many are made at first.
    """

    def __init__(self, num_blocks: int, device: torch.device, *, num_chunks: int = 16, num_buffers: int = 0) -> None:
        self._num_blocks = num_blocks
        self._device = device
        self._num_chunks = num_chunks
        self._free = [self._new(num_chunks) for _ in range(num_buffers)]

    def take(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """A buffer that holds these ids; it belongs to the caller until `BlockIds.release`."""
        fitting = [ids for ids in self._free if ids.capacity >= len(block_ids)]
        if fitting:
            ids = min(reversed(fitting), key=lambda ids: ids.capacity)
            self._free.remove(ids)
        else:
            if self._free:
                # In place of one that is too small: there are never more of them than were out at once.
                self._free.remove(min(self._free, key=lambda ids: ids.capacity))
            ids = self._new(max(self._num_chunks, len(block_ids)))
        ids.fill(block_ids)
        return ids

    def _new(self, num_chunks: int) -> BlockIds:
        shape = (num_chunks, self._num_blocks)
        with torch.inference_mode(False):  # what is made in inference mode cannot be written outside it
            host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
            return BlockIds(self, host, torch.empty(shape, dtype=torch.int64, device=self._device))

    def put_back(self, ids: BlockIds) -> None:
        """Take a buffer back."""
        self._free.append(ids)
