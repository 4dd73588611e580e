"""A layout describes any engine's tensors so that a chunk holds exactly the named blocks' bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from kvsluice.connector.layout import DTYPE_CODES, KVLayout
from kvsluice.kernels import CopyPlan, HostCopy
from kvsluice.tiers.chunk_file import DTYPE_BYTES
from kvsluice.tiers.errors import LayoutError, SluiceError

ENGINE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.uint8,
    torch.int8,
)


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes, whatever number they mean."""
    flat = tensor.view(torch.uint8).flatten()
    flat.copy_(torch.randint(256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass(frozen=True)
class Family:
    """Layers that lie in one storage: physical order, padding, interleaving; and the engine's logical order."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    padding: tuple[int, ...]
    block_place: int
    rows_per_block: int
    layer_place: int
    layers: int
    logical: tuple[int, ...]

    def storage(self, seed: int) -> torch.Tensor:
        padded = [size + more for size, more in zip(self.sizes, self.padding, strict=True)]
        padded.insert(self.layer_place, self.layers)
        storage = torch.empty(padded, dtype=self.dtype)
        fill(storage, seed)
        return storage

    def views(self, storage: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for layer in range(self.layers):
            view = storage.select(self.layer_place, layer)
            for dim, size in enumerate(self.sizes):
                view = view.narrow(dim, 0, size)
            views.append(view.permute(self.logical))
        return views

    @property
    def block_dim(self) -> int:
        return self.logical.index(self.block_place)

    def blocks(self, tensor: torch.Tensor, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """The rows of the blocks, by plain indexing of the engine's own tensor."""
        rows = [block * self.rows_per_block + row for block in block_ids for row in range(self.rows_per_block)]
        return [as_integers(tensor).select(self.block_dim, row) for row in rows]


@st.composite
def families(draw: st.DrawFn, num_blocks: int) -> Family:
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    block_place, rows_per_block = draw(st.integers(0, len(sizes))), draw(st.integers(1, 3))
    sizes.insert(block_place, num_blocks * rows_per_block)
    return Family(
        dtype=draw(st.sampled_from(ENGINE_DTYPES)),
        sizes=tuple(sizes),
        padding=tuple(draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in sizes),
        block_place=block_place,
        rows_per_block=rows_per_block,
        layer_place=draw(st.integers(0, len(sizes))),
        layers=draw(st.integers(1, 4)),
        logical=tuple(draw(st.permutations(range(len(sizes))))),
    )


def read_layout(built: Sequence[tuple[Family, torch.Tensor]], num_blocks: int, negative: bool) -> KVLayout:
    """Families in turn as one layer of several tensors (a pair, a list) and as layers of one tensor each."""
    caches: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
    block_dims: dict[str, int] = {}
    for number, (family, storage) in enumerate(built):
        views = family.views(storage)
        named = {f"{number}.{layer}": view for layer, view in enumerate(views)} if number % 2 else {str(number): views}
        caches.update(named)
        block_dims.update(dict.fromkeys(named, family.block_dim - (len(family.sizes) if negative else 0)))
    return KVLayout.from_tensors(caches, 16, block_dims, num_blocks)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_chunk_holds_the_blocks_as_logical_indexing_finds_them_and_scatters_into_others(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 6), "num_blocks")
    drawn = data.draw(st.lists(families(num_blocks), min_size=1, max_size=3), "families")
    negative = data.draw(st.booleans(), "negative")
    block = st.integers(0, num_blocks - 1)
    target_ids = data.draw(st.lists(block, min_size=1, unique=True), "target_ids")
    source_ids = data.draw(st.lists(block, min_size=len(target_ids), max_size=len(target_ids)), "source_ids")

    sources = [family.storage(seed) for seed, family in enumerate(drawn)]
    targets = [family.storage(seed + 50) for seed, family in enumerate(drawn)]
    layout = read_layout(list(zip(drawn, sources, strict=True)), num_blocks, negative)
    target_layout = read_layout(list(zip(drawn, targets, strict=True)), num_blocks, negative)
    assert layout.facts() == target_layout.facts()
    assert layout.num_blocks == num_blocks

    specs = layout.chunk_tensors(len(source_ids))
    out = torch.empty(layout.block_bytes * len(source_ids), dtype=torch.uint8)
    assert sum(spec.num_bytes for spec in specs) == out.numel()
    HostCopy(CopyPlan(layout.paged, len(source_ids))).gather(source_ids, out)
    layers = [(family, view) for family, storage in zip(drawn, sources, strict=True) for view in family.views(storage)]
    offset = 0
    for spec, (family, view) in zip(specs, layers, strict=True):
        chosen = torch.stack(family.blocks(view, source_ids), family.block_dim).permute(layout.dim_orders[spec.name])
        assert (tuple(chosen.shape), spec.dtype) == (spec.shape, DTYPE_CODES[family.dtype])
        expected = chosen.contiguous().flatten().view(torch.uint8)
        assert torch.equal(out[offset : offset + spec.num_bytes], expected)
        offset += spec.num_bytes

    wanted = [storage.clone() for storage in targets]
    for family, source, target in zip(drawn, sources, wanted, strict=True):
        for here, there in zip(family.views(source), family.views(target), strict=True):
            for read, written in zip(family.blocks(here, source_ids), family.blocks(there, target_ids), strict=True):
                written.copy_(read)
    HostCopy(CopyPlan(target_layout.paged, len(target_ids))).scatter(target_ids, out)
    for target, want in zip(targets, wanted, strict=True):
        assert torch.equal(as_integers(target), as_integers(want))


def test_a_row_major_tensor_keeps_its_logical_shape_with_the_chunks_blocks() -> None:
    layout = KVLayout.from_tensors({"a": torch.zeros(2, 10, 16, 4, 8)}, 16, block_dim=1)
    (spec,) = layout.chunk_tensors(3)
    assert (spec.name, spec.dtype, spec.shape) == ("a", "F32", (2, 3, 16, 4, 8))
    assert layout.dim_orders == {"a": (0, 1, 2, 3, 4)}
    assert layout.block_bytes == 2 * 16 * 4 * 8 * 4
    assert layout.device == torch.device("cpu")


def test_padded_pages_keep_their_shape_and_dims_of_size_1_stay_in_place() -> None:
    padded = torch.zeros(10, 20, 1, 8)[:, :16]
    odd = torch.zeros(1000).as_strided((10, 1, 16, 1), (100, 3, 2, 999))
    layout = KVLayout.from_tensors({"padded": padded, "odd": odd}, 16)
    assert layout.dim_orders == {"padded": (0, 1, 2, 3), "odd": (0, 1, 2, 3)}
    assert [spec.shape for spec in layout.chunk_tensors(2)] == [(2, 16, 1, 8), (2, 1, 16, 1)]


def test_a_permuted_tensor_is_kept_in_memory_order_and_says_which() -> None:
    heads_first = torch.zeros(10, 2, 4, 16, 8).permute(1, 0, 3, 2, 4)
    layout = KVLayout.from_tensors({"a": heads_first}, 16, block_dim=-4)
    assert layout.dim_orders == {"a": (1, 0, 3, 2, 4)}
    assert layout.chunk_tensors(3)[0].shape == (3, 2, 4, 16, 8)
    assert layout.paged[0].contiguous


def test_a_chunk_opens_as_safetensors_with_the_engines_values() -> None:
    cache = torch.randn(6, 4, 8).to(torch.bfloat16)
    layout = KVLayout.from_tensors({"a": cache}, 4)
    out = torch.empty(layout.block_bytes * 2, dtype=torch.uint8)
    HostCopy(CopyPlan(layout.paged, 2)).gather([5, 1], out)
    (spec,) = layout.chunk_tensors(2)
    header = {spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [0, spec.num_bytes]}}
    text = json.dumps(header).encode()
    image = len(text).to_bytes(8, "little") + text + bytes(out.tolist())
    assert torch.equal(load(image)["a"], cache[[5, 1]])


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
def test_every_code_is_the_one_that_safetensors_writes(dtype: torch.dtype) -> None:
    image = save({"a": torch.zeros(3, dtype=dtype)})
    header = json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])
    assert header["a"]["dtype"] == DTYPE_CODES[dtype]
    assert DTYPE_BYTES[DTYPE_CODES[dtype]] == dtype.itemsize


def test_pairs_and_longer_sequences_get_names_of_their_own() -> None:
    def cache() -> torch.Tensor:
        return torch.zeros(3, 2)

    layout = KVLayout.from_tensors(
        {"kv": (cache(), cache()), "many": [cache(), cache(), cache()], "one": [cache()], "plain": cache()}, 16
    )
    assert [item.name for item in layout.paged] == ["kv.k", "kv.v", "many.0", "many.1", "many.2", "one", "plain"]


def test_exact_aliases_are_kept_once_and_other_views_of_the_storage_are_not() -> None:
    cache = torch.arange(24, dtype=torch.int32).view(4, 6)
    layout = KVLayout.from_tensors(
        {"first": cache, "shared": cache.view(4, 6), "left": cache[:, :3], "other": cache.view(torch.float32)}, 16
    )
    assert layout.aliases == {"shared": "first"}
    assert [item.name for item in layout.paged] == ["first", "left", "other"]
    assert layout.block_bytes == 24 + 12 + 24
    assert layout.facts()["aliases"] == {"shared": "first"}


def test_smaller_kernel_blocks_are_consecutive_rows_of_one_block() -> None:
    cache = torch.arange(12, dtype=torch.uint8).view(12, 1)
    layout = KVLayout.from_tensors({"a": cache, "b": torch.zeros(4, 5)}, 32, num_blocks=4)
    assert layout.num_blocks == 4
    assert [spec.shape for spec in layout.chunk_tensors(2)] == [(6, 1), (2, 5)]
    out = torch.empty(layout.block_bytes * 2, dtype=torch.uint8)
    HostCopy(CopyPlan(layout.paged, 2)).gather([3, 0], out)
    assert out[:6].tolist() == [9, 10, 11, 0, 1, 2]


def test_facts_are_json_and_do_not_change_with_the_pool_or_its_padding() -> None:
    def facts(rows: int, padding: int = 0, rows_per_block: int = 1, tokens: int = 16, inner: int = 4):
        cache = torch.zeros(2, rows * rows_per_block, inner + padding)[:, :, :inner]
        return KVLayout.from_tensors({"a": cache}, tokens, 1, rows).facts()

    known = facts(10)
    assert json.loads(json.dumps(known)) == known
    assert facts(1) == facts(11) == facts(10, padding=3) == known
    for other in (facts(10, rows_per_block=2), facts(10, tokens=32), facts(10, inner=5)):
        assert other != known


def test_facts_tell_dtypes_names_and_orders_apart() -> None:
    base = torch.zeros(4, 2, 2)
    known = KVLayout.from_tensors({"a": base}, 16).facts()
    for name, tensor in (("b", base), ("a", base.to(torch.int32)), ("a", base.transpose(1, 2))):
        assert KVLayout.from_tensors({name: tensor}, 16).facts() != known


def test_a_layout_does_not_change_from_outside() -> None:
    layout = KVLayout.from_tensors({"a": torch.zeros(4, 2, requires_grad=True)}, 16)
    with pytest.raises(FrozenInstanceError):
        layout.num_blocks = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        layout.aliases["b"] = "a"  # type: ignore[index]
    layout.facts().clear()
    assert layout.facts()["tokens_per_block"] == 16


def test_block_ids_are_checked_by_count_and_range() -> None:
    layout = KVLayout.from_tensors({"a": torch.zeros(4, 2)}, 16)
    layout.check_block_ids([0, 3, 3], 3)
    layout.check_block_ids([], 0)
    with pytest.raises(LayoutError, match="expected 2 block ids, got 3"):
        layout.check_block_ids([0, 1, 2], 2)
    with pytest.raises(LayoutError, match="block id 4 is outside the pool: 0 to 3"):
        layout.check_block_ids([0, 4], 2)
    with pytest.raises(LayoutError, match="block id -1"):
        layout.check_block_ids([0, -1], 2)
    with pytest.raises(LayoutError, match="blocks_per_chunk must be at least 1, got 0"):
        layout.chunk_tensors(0)


FINE = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("caches", "options", "message"),
    [
        ({}, {}, "kv_caches is empty"),
        ({"a": FINE}, {"tokens_per_block": 0}, "tokens_per_block .* got 0"),
        ({"a": FINE}, {"tokens_per_block": True}, "tokens_per_block .* got True"),
        ({"a": FINE}, {"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"a": FINE}, {"num_blocks": 3}, "a: dimension 0 .* 4 rows, .* no multiple of num_blocks=3"),
        ({"a": FINE}, {"num_blocks": 8}, "no multiple of num_blocks=8"),
        ({"a": FINE, "b": torch.zeros(5, 2)}, {}, "b has 5 blocks, a has 4"),
        ({"a": FINE}, {"block_dim": 2}, r"a: block_dim 2 is not a dimension of shape \(4, 2\)"),
        ({"a": FINE}, {"block_dim": -3}, "a: block_dim -3"),
        ({"a": torch.tensor(1.0)}, {}, r"a: block_dim 0 is not a dimension of shape \(\)"),
        ({"a": FINE, "b": FINE}, {"block_dim": {"a": 0}}, "b: block_dim has no entry"),
        ({"a": FINE}, {"block_dim": {"a": 0, "c": 0}}, "block_dim names 'c', which is no layer"),
        ({"a": FINE.to(torch.complex64)}, {}, "a: dtype torch.complex64"),
        ({"a": torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, {}, "a: dtype torch.float4"),
        ({"a": FINE.to_sparse()}, {}, "a: needs a strided tensor with memory, got torch.sparse_coo"),
        ({"a": FINE.to("meta")}, {}, "a: needs a strided tensor .* on meta"),
        ({"a": torch.zeros(4, 2, dtype=torch.complex64).conj().imag}, {}, "a: is a lazily negated view"),
        ({"a": torch.zeros(4, 0)}, {}, r"a: shape \(4, 0\) holds nothing"),
        ({"a": torch.zeros(1, 2).expand(4, 2)}, {}, r"a: .* overlaps itself with strides \(0, 1\)"),
        ({"a": torch.zeros(10).as_strided((4, 3), (2, 1))}, {}, "a: .* overlaps itself"),
        ({"a": []}, {}, "a: needs a tensor or a list of tensors"),
        ({"a": "tensor"}, {}, "a: needs a tensor or a list of tensors, got 'tensor'"),
        ({"a": [FINE, 7]}, {}, "a.v: needs a tensor, got int"),
        ({"a": (FINE, torch.ones(4, 2)), "a.v": torch.ones(4, 2)}, {}, "layer 'a.v': the tensor name 'a.v' is taken"),
        ({"__metadata__": FINE}, {}, "__metadata__"),
        ({3: FINE}, {}, "layer names must be strings"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name_and_value(
    caches: dict[str, torch.Tensor], options: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as raised:
        KVLayout.from_tensors(caches, **{"tokens_per_block": 16, **options})  # type: ignore[arg-type]
    assert isinstance(raised.value, SluiceError)
    assert isinstance(raised.value, ValueError)


def test_quantised_tensors_are_refused() -> None:
    class Quantised(torch.Tensor):
        is_quantized = True  # torch is giving up its own quantised dtypes, and warns when one is made

    with pytest.raises(LayoutError, match=r"a: dtype torch\.float32 cannot be kept"):
        KVLayout.from_tensors({"a": torch.zeros(4, 2).as_subclass(Quantised)}, 16)


def test_one_layout_is_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsluice.connector.layout._check_tensor", lambda _name, _tensor: "F32")
    with pytest.raises(LayoutError, match="b is on meta, a on cpu: one layout is on one device"):
        KVLayout.from_tensors({"a": FINE, "b": FINE.to("meta")}, 16)


def test_block_bytes_is_the_size_of_a_chunk_of_one_block() -> None:
    layout = KVLayout.from_tensors({"a": torch.zeros(4, 3, 5), "b": torch.zeros(4, 7, dtype=torch.uint8)}, 16)
    assert layout.block_bytes == sum(spec.num_bytes for spec in layout.chunk_tensors(1)) == 3 * 5 * 4 + 7
    assert math.prod(layout.chunk_tensors(9)[0].shape) == 9 * 15
