"""The KV cache of one group on one rank, as the engine laid it out, and as a chunk keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from kvsluice.kernels import PagedTensor, may_overlap_itself
from kvsluice.kernels.paged import INTEGER_DTYPES
from kvsluice.tiers.chunk_file import TensorSpec
from kvsluice.tiers.errors import LayoutError

__all__ = ["DTYPE_CODES", "KVLayout"]

_CODES_BY_NAME: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
DTYPE_CODES: Final[Mapping[torch.dtype, str]] = {
    dtype: code for name, code in _CODES_BY_NAME.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""safetensors' word for each dtype that a KV cache may have; complex ones and half-byte floats are refused."""


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """Which tensors make a block, and how a chunk keeps them. Immutable and thread-safe.

    Made by `from_tensors`. A chunk keeps every tensor in *memory order*: its dimensions sorted by
    descending stride, so that a copy moves whole pages whatever the engine's logical order is.
    Dimensions of size 1 stay at their places, the block dimension always takes part. A tensor that
    is row-major already, padded or not, keeps its logical shape. In either case the block
    dimension counts the chunk's blocks only, times the tensor's rows per block.

    Attributes:
        paged: the tensors as the copy kernels take them, in the order in which a chunk keeps them.
        tokens_per_block: tokens that one block covers.
        num_blocks: blocks in the pool; ids run from 0 to `num_blocks - 1`.
        device: where all tensors live.
        dtypes: safetensors dtype code of each tensor, by name.
        dim_orders: by name, the logical dimension that stands at each place in a chunk.
        aliases: by name, the tensor whose memory it shares exactly; kept once, under that name.
        layers: by layer name, the places in `paged` of the tensors that hold it.
    """

    paged: tuple[PagedTensor, ...]
    tokens_per_block: int
    num_blocks: int
    device: torch.device
    dtypes: Mapping[str, str]
    dim_orders: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    layers: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_tensors(
        cls,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        tokens_per_block: int,
        block_dim: int | Mapping[str, int] = 0,
        num_blocks: int | None = None,
    ) -> KVLayout:
        """Read a layout off an engine's tensors.

        Args:
            kv_caches: by layer name one tensor, or several: a pair becomes `<layer>.k` and
                `<layer>.v`, a longer sequence `<layer>.0`, `<layer>.1` and so on. Any strides, any
                dtype that safetensors has a code for. Layers may share a storage; those that are
                exactly the same memory are kept once.
            tokens_per_block: tokens in one block, at least 1.
            block_dim: the dimension that counts blocks, for all layers or by layer name; negative
                ones count from the end.
            num_blocks: blocks in the pool; None takes the block dimension's size. A tensor whose
                block dimension is r times as long has r consecutive rows for each block (kernel
                blocks smaller than the engine's blocks).

        Raises:
            LayoutError: no tensors; a tensor that is not strided, is complex, quantised, empty, of
                a dtype without a code, overlaps itself, or lives on another device than the first;
                a block dimension out of range or not a multiple of `num_blocks`; layers that
                disagree about the number of blocks; two tensors of one name. The message names
                the layer and the value.
        """
        if isinstance(tokens_per_block, bool) or not isinstance(tokens_per_block, int) or tokens_per_block < 1:
            raise LayoutError(f"tokens_per_block must be an integer of at least 1, got {tokens_per_block!r}")
        if num_blocks is not None and num_blocks < 1:
            raise LayoutError(f"num_blocks must be at least 1, got {num_blocks}")
        if not isinstance(kv_caches, Mapping):
            raise LayoutError(f"kv_caches must map layer names to tensors, got {type(kv_caches).__name__}")
        if not kv_caches:
            raise LayoutError("kv_caches is empty: there is nothing to copy")
        if isinstance(block_dim, Mapping) and (unknown := sorted(set(block_dim) - set(kv_caches))):
            raise LayoutError(f"block_dim names {unknown[0]!r}, which is no layer of kv_caches")

        paged: dict[str, PagedTensor] = {}
        dtypes: dict[str, str] = {}
        dim_orders: dict[str, tuple[int, ...]] = {}
        aliases: dict[str, str] = {}
        layers: dict[str, tuple[int, ...]] = {}
        seen: dict[tuple[object, ...], str] = {}
        places: dict[str, int] = {}
        for layer, value in kv_caches.items():
            for name, tensor in _named_tensors(layer, value):
                if name in paged or name in aliases or name == "__metadata__":
                    raise LayoutError(f"layer {layer!r}: the tensor name {name!r} is taken")
                code = _check_tensor(name, tensor)
                axis = _block_axis(layer, name, tensor, block_dim)
                identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, axis)
                if (first_name := seen.setdefault(identity, name)) != name:
                    aliases[name] = first_name
                    layers[layer] = (*layers.get(layer, ()), places[first_name])
                    continue
                order = _memory_order(tensor, axis)
                rows = tensor.shape[axis]
                if num_blocks is not None and rows % num_blocks:
                    raise LayoutError(
                        f"{name}: dimension {axis} of shape {tuple(tensor.shape)} has {rows} rows, "
                        f"which is no multiple of num_blocks={num_blocks}"
                    )
                view = tensor.detach().permute(order).view(INTEGER_DTYPES[tensor.element_size()])
                places[name] = len(paged)
                layers[layer] = (*layers.get(layer, ()), places[name])
                paged[name] = PagedTensor(view, order.index(axis), rows // (num_blocks or rows), name)
                dtypes[name], dim_orders[name] = code, order
        _check_together(tuple(paged.values()))
        first = next(iter(paged.values()))
        return cls(
            paged=tuple(paged.values()),
            tokens_per_block=tokens_per_block,
            num_blocks=first.num_blocks,
            device=first.tensor.device,
            dtypes=MappingProxyType(dtypes),
            dim_orders=MappingProxyType(dim_orders),
            aliases=MappingProxyType(aliases),
            layers=MappingProxyType(layers),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(item.page_bytes for item in self.paged)

    def last_tensor(self, layer: str) -> int:
        """Place in `paged` of the layer's last tensor: behind it, in payload order, the layer is whole.

        Raises:
            LayoutError: no such layer.
        """
        if layer not in self.layers:
            raise LayoutError(f"no layer {layer!r}; the layout has {len(self.layers)}: {', '.join(self.layers)}")
        return max(self.layers[layer])

    def chunk_tensors(self, blocks_per_chunk: int) -> tuple[TensorSpec, ...]:
        """Name, dtype code and shape of every tensor of a chunk, in payload order.

        Raises:
            LayoutError: `blocks_per_chunk` is below 1.
        """
        if blocks_per_chunk < 1:
            raise LayoutError(f"blocks_per_chunk must be at least 1, got {blocks_per_chunk}")
        return tuple(
            TensorSpec(item.name, self.dtypes[item.name], item.chunk_shape(blocks_per_chunk)) for item in self.paged
        )

    def facts(self) -> dict[str, object]:
        """Everything here that changes the bytes under a key, ready for JSON.

        The pool's size and the padding of its pages are not among them: they change from start to
        start and leave the chunk as it is. -1 stands in a shape where the blocks are counted.
        """
        tensors: list[dict[str, object]] = []
        for item in self.paged:
            shape = list(item.tensor.shape)
            shape[item.block_axis] = -1
            tensors.append(
                {
                    "name": item.name,
                    "dtype": self.dtypes[item.name],
                    "shape": shape,
                    "dim_order": list(self.dim_orders[item.name]),
                    "rows_per_block": item.rows_per_block,
                }
            )
        return {"tokens_per_block": self.tokens_per_block, "tensors": tensors, "aliases": dict(self.aliases)}

    def metadata(self) -> dict[str, str]:
        """What a reader of a chunk file needs besides names, dtypes and shapes: JSON texts by name.

        `dim_orders` stands there where a tensor is kept in another order of dimensions than the
        engine's, `aliases` where layers share their memory.
        """
        permuted = {name: list(order) for name, order in self.dim_orders.items() if list(order) != sorted(order)}
        texts = {"dim_orders": permuted, "aliases": dict(self.aliases)}
        return {name: json.dumps(value, sort_keys=True) for name, value in texts.items() if value}

    def check_block_ids(self, block_ids: Sequence[int], expected: int) -> None:
        """Refuse ids that are not `expected` many, or do not lie in the pool.

        Raises:
            LayoutError: the message names the count, or the id and the pool's range.
        """
        if len(block_ids) != expected:
            raise LayoutError(f"expected {expected} block ids, got {len(block_ids)}")
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= self.num_blocks):
            bad = next(block for block in block_ids if not 0 <= block < self.num_blocks)
            raise LayoutError(f"block id {bad} is outside the pool: 0 to {self.num_blocks - 1}")


def _named_tensors(layer: str, value: torch.Tensor | Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(layer, str) or not layer:
        raise LayoutError(f"layer names must be strings that are not empty, got {layer!r}")
    if isinstance(value, torch.Tensor):
        return [(layer, value)]
    if not isinstance(value, (list, tuple)) or not value:
        raise LayoutError(f"{layer}: needs a tensor or a list of tensors, got {value!r}")
    if len(value) == 1:
        return [(layer, value[0])]
    endings = ("k", "v") if len(value) == 2 else tuple(map(str, range(len(value))))
    return [(f"{layer}.{ending}", tensor) for ending, tensor in zip(endings, value, strict=True)]


def _check_tensor(name: str, tensor: torch.Tensor) -> str:
    """The tensor's safetensors code, or the reason why it cannot be copied."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name}: needs a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise LayoutError(f"{name}: needs a strided tensor with memory, got {tensor.layout} on {tensor.device}")
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None or tensor.is_quantized:
        raise LayoutError(f"{name}: dtype {tensor.dtype} cannot be kept, only {sorted(set(DTYPE_CODES.values()))}")
    if tensor.is_neg():
        raise LayoutError(f"{name}: is a lazily negated view; pass the tensor that holds the memory")
    if tensor.numel() == 0:
        raise LayoutError(f"{name}: shape {tuple(tensor.shape)} holds nothing")
    if may_overlap_itself(tensor.shape, tensor.stride()):
        raise LayoutError(f"{name}: shape {tuple(tensor.shape)} overlaps itself with strides {tensor.stride()}")
    return code


def _block_axis(layer: str, name: str, tensor: torch.Tensor, block_dim: int | Mapping[str, int]) -> int:
    dim = block_dim
    if isinstance(dim, Mapping):
        if layer not in dim:
            raise LayoutError(f"{layer}: block_dim has no entry for this layer")
        dim = dim[layer]
    if not -tensor.dim() <= dim < tensor.dim():
        raise LayoutError(f"{name}: block_dim {dim} is not a dimension of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _memory_order(tensor: torch.Tensor, axis: int) -> tuple[int, ...]:
    """Dimensions by descending stride; those of size 1, the block axis apart, stay at their places."""
    strides = tensor.stride()
    moving = [dim for dim in range(tensor.dim()) if dim == axis or tensor.shape[dim] > 1]
    by_stride = iter(sorted(moving, key=lambda dim: -strides[dim]))
    return tuple(next(by_stride) if dim in moving else dim for dim in range(tensor.dim()))


def _check_together(paged: Sequence[PagedTensor]) -> None:
    first = paged[0]
    for item in paged:
        if item.tensor.device != first.tensor.device:
            raise LayoutError(
                f"{item.name} is on {item.tensor.device}, {first.name} on {first.tensor.device}: "
                "one layout is on one device"
            )
        if item.num_blocks != first.num_blocks:
            raise LayoutError(
                f"{item.name} has {item.num_blocks} blocks, {first.name} has {first.num_blocks}; "
                "where kernel blocks are smaller than the engine's, pass num_blocks"
            )
