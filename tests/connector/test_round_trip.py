"""What was stored comes back bit for bit, whatever the layout, the dtype, the sizes and the tiers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import boto3
import pytest
import safetensors
import torch
from bench import make_key, sluice_threads
from doubles import MemoryTier, PickledConnector, until
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from kvsluice.connector import KVLayout, OffloadConfig, ladder

WAIT_S = 20.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
TIERS = tuple(chain.from_iterable(combinations(("host", "fs", "obj"), count) for count in (1, 2, 3)))
NUM_BLOCKS = 12

Caches = dict[str, torch.Tensor | list[torch.Tensor]]


def random_bytes(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs with their payloads, infinities, negative zeros."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass(frozen=True)
class Pool:
    """One engine's tensors, the storages they lie in, and how to read one block's bits."""

    caches: Caches
    storages: list[torch.Tensor]
    block_dim: int
    num_blocks: int | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for value in self.caches.values() for tensor in (value if isinstance(value, list) else [value])]

    def blocks(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        found = []
        for tensor in self.tensors():
            rows = tensor.shape[self.block_dim] // NUM_BLOCKS
            index = torch.tensor([block * rows + row for block in block_ids for row in range(rows)])
            found.append(bits(tensor).index_select(self.block_dim, index))
        return found

    def layout(self) -> KVLayout:
        return KVLayout.from_tensors(self.caches, 4, block_dim=self.block_dim, num_blocks=self.num_blocks)


def per_layer(dtype: torch.dtype, seed: int) -> Pool:
    storages = [random_bytes((NUM_BLOCKS, 2, 4, 6), dtype, seed + at) for at in range(3)]
    return Pool({f"layer.{at}": storage for at, storage in enumerate(storages)}, storages, 0)


def key_and_value_apart(dtype: torch.dtype, seed: int) -> Pool:
    storages = [random_bytes((NUM_BLOCKS, 4, 5), dtype, seed + at) for at in range(4)]
    return Pool({"a": storages[:2], "b": storages[2:]}, storages, 0)


def permuted(dtype: torch.dtype, seed: int) -> Pool:
    storage = random_bytes((NUM_BLOCKS, 3, 4, 8), dtype, seed)
    return Pool({"layer": storage.permute(0, 2, 1, 3)}, [storage], 0)


def padded(dtype: torch.dtype, seed: int) -> Pool:
    storage = random_bytes((NUM_BLOCKS, 5, 9), dtype, seed)
    return Pool({"layer": storage[:, :4, 1:8]}, [storage], 0)


def block_dim_second(dtype: torch.dtype, seed: int) -> Pool:
    storages = [random_bytes((2, NUM_BLOCKS, 4, 4), dtype, seed + at) for at in range(2)]
    return Pool({f"layer.{at}": storage for at, storage in enumerate(storages)}, storages, 1)


def interleaved(dtype: torch.dtype, seed: int) -> Pool:
    storage = random_bytes((NUM_BLOCKS, 3, 4, 4), dtype, seed)
    return Pool({f"layer.{at}": storage[:, at] for at in range(3)}, [storage], 0)


def aliased(dtype: torch.dtype, seed: int) -> Pool:
    storage = random_bytes((NUM_BLOCKS, 4, 7), dtype, seed)
    return Pool({"own": storage, "shared": storage.view_as(storage)}, [storage], 0)


def small_kernel_blocks(dtype: torch.dtype, seed: int) -> Pool:
    storages = [random_bytes((rows * NUM_BLOCKS, 3, 5), dtype, seed + rows) for rows in (1, 3)]
    return Pool({"one": storages[0], "three": storages[1]}, storages, 0, NUM_BLOCKS)


POOLS: tuple[Callable[[torch.dtype, int], Pool], ...] = (
    per_layer,
    key_and_value_apart,
    permuted,
    padded,
    block_dim_second,
    interleaved,
    aliased,
    small_kernel_blocks,
)


def connector_for(
    pool: Pool, tiers: Sequence[str], root: str, images: dict[bytes, bytes], blocks_per_chunk: int, **options: object
) -> PickledConnector:
    """A connector whose fs tier is real and whose obj tier keeps its objects in `images`."""
    written: dict[str, Mapping[str, object]] = {
        "host": {"type": "host", "capacity": "256KiB"},
        "fs": {"type": "fs", "root_dir": root, "capacity": "64MiB"},
        "obj": {"type": "obj", "bucket": "kv"},
    }
    config = {
        "blocks_per_chunk": blocks_per_chunk,
        "staging_bytes": "256KiB",
        "backpressure": None,
        "tiers": [written[tier] for tier in tiers],
        **options,
    }
    with pytest.MonkeyPatch.context() as patch:
        build = ladder.open_tier  # the one seam through which a tier of the test's own gets in
        patch.setattr(
            ladder,
            "open_tier",
            lambda tier, *rest: MemoryTier("obj", images) if tier.type == "obj" else build(tier, *rest),
        )
        return PickledConnector(OffloadConfig.from_dict(config), pool.layout())


def finish(connector: PickledConnector) -> None:
    connector.check_integrity()
    assert connector.close(WAIT_S) == []
    connector.check_integrity()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    make=st.sampled_from(POOLS),
    dtype=st.sampled_from(DTYPES),
    tiers=st.sampled_from(TIERS),
    blocks_per_chunk=st.integers(1, 3),
    jobs=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    reopen=st.booleans(),
    verify=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_every_chunk_comes_back_bit_for_bit_and_no_other_byte_moves(
    make, dtype, tiers, blocks_per_chunk, jobs, reopen, verify, seed, data
):
    before = sluice_threads()
    pool = make(dtype, seed)
    chunks = min(sum(jobs), NUM_BLOCKS // blocks_per_chunk)
    places = st.permutations(range(NUM_BLOCKS))
    sources = data.draw(places)[: chunks * blocks_per_chunk]
    targets = data.draw(places)[: chunks * blocks_per_chunk]
    keys = [make_key(at) for at in range(chunks)]
    cuts = [(sum(jobs[:at]), sum(jobs[: at + 1])) for at in range(len(jobs))]

    def each_job(ids: Sequence[int]) -> list[tuple[list[bytes], list[int]]]:
        parts = [(keys[a:b], list(ids[a * blocks_per_chunk : b * blocks_per_chunk])) for a, b in cuts]
        return [part for part in parts if part[0]]

    with tempfile.TemporaryDirectory() as root:
        images: dict[bytes, bytes] = {}
        connector = connector_for(pool, tiers, root, images, blocks_per_chunk, verify=verify)
        stored = connector.wait([connector.store(*job) for job in each_job(sources)], WAIT_S)
        assert not any(result.failed for result in stored)
        wanted = [tensor.clone() for tensor in pool.blocks(sources)]
        if reopen and tiers != ("host",):
            finish(connector)
            connector = connector_for(pool, tiers, root, images, blocks_per_chunk, verify=verify)
            until(lambda: None, lambda: not connector.lookup(keys).pending)
        assert connector.lookup(keys).held == len(keys)
        for storage in pool.storages:
            bits(storage).copy_(bits(random_bytes(storage.shape, dtype, seed + 77)))
        untouched = [storage.clone() for storage in pool.storages]
        loaded = connector.wait([connector.load(*job) for job in each_job(targets)], WAIT_S)
        assert not any(result.failed for result in loaded)
        for got, want in zip(pool.blocks(targets), wanted, strict=True):
            assert torch.equal(got, want)
        # Put what was there before into the targets again: if any other byte moved, it shows.
        now = [storage.clone() for storage in pool.storages]
        for storage, old in zip(pool.storages, untouched, strict=True):
            bits(storage).copy_(bits(old))
        for tensor, want in zip(pool.tensors(), wanted, strict=True):
            rows = tensor.shape[pool.block_dim] // NUM_BLOCKS
            index = torch.tensor([block * rows + row for block in targets for row in range(rows)])
            bits(tensor).index_copy_(pool.block_dim, index, want)
        for storage, got in zip(pool.storages, now, strict=True):
            assert torch.equal(bits(storage), bits(got))
        finish(connector)
    assert sluice_threads() <= before


def shown(image: bytes, pool: Pool, block_ids: Sequence[int]) -> None:
    """Prove that an image is a safetensors file that shows the layers of these blocks."""
    layers = load_safetensors(image)
    assert {name: tensor.dtype for name, tensor in layers.items()} == {
        name: tensor.dtype for name, tensor in pool.caches.items()
    }
    for (name, tensor), want in zip(pool.caches.items(), pool.blocks(block_ids), strict=True):
        assert tensor.shape[1:] == layers[name].shape[1:]
        assert torch.equal(bits(layers[name]), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_of_the_fs_tier_opens_as_safetensors_and_shows_the_layers(tmp_path, dtype):
    pool = per_layer(dtype, 5)
    connector = connector_for(pool, ("host", "fs"), str(tmp_path), {}, 2)
    connector.wait([connector.store([make_key(1)], [7, 3])], WAIT_S)
    finish(connector)
    [path] = tmp_path.rglob("*.safetensors")
    shown(path.read_bytes(), pool, [7, 3])
    with safetensors.safe_open(str(path), "pt") as chunk:
        assert sorted(chunk.keys()) == ["layer.0", "layer.1", "layer.2"]
        assert torch.equal(bits(chunk.get_tensor("layer.1")), pool.blocks([7, 3])[1])
        metadata = chunk.metadata()
    assert metadata["key"] == make_key(1).hex()
    assert metadata["tokens"] == "8"
    assert metadata["namespace"] == connector.namespace
    assert len(bytes.fromhex(metadata["checksum"])) == 16
    payload_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pool.blocks([7, 3]))
    assert (path.stat().st_size - payload_bytes) % 4096 == 0, "the payload starts on a page and nothing follows it"


def test_a_permuted_layer_is_kept_in_memory_order_and_says_so(tmp_path):
    pool = permuted(torch.float16, 5)
    connector = connector_for(pool, ("fs",), str(tmp_path), {}, 2)
    connector.wait([connector.store([make_key(1)], [7, 3])], WAIT_S)
    finish(connector)
    [path] = tmp_path.rglob("*.safetensors")
    with safetensors.safe_open(str(path), "pt") as chunk:
        order = json.loads(chunk.metadata()["dim_orders"])["layer"]
        kept = chunk.get_tensor("layer")
    inverse = [order.index(dim) for dim in range(len(order))]
    assert torch.equal(bits(kept.permute(inverse)), pool.blocks([7, 3])[0])


@pytest.mark.parametrize("tiers", [("obj",), ("host", "obj"), ("host", "fs", "obj")], ids="+".join)
def test_a_chunk_goes_through_a_real_object_store_and_its_object_opens_as_safetensors(tmp_path, s3_endpoint, tiers):
    client = boto3.client(
        "s3", endpoint_url=s3_endpoint, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    bucket = "kv-" + "-".join(tiers)
    client.create_bucket(Bucket=bucket)
    written: dict[str, Mapping[str, object]] = {
        "host": {"type": "host", "capacity": "256KiB"},
        "fs": {"type": "fs", "root_dir": str(tmp_path), "capacity": "64MiB"},
        "obj": {
            "type": "obj",
            "bucket": bucket,
            "endpoint_url": s3_endpoint,
            "access_key": "a",
            "secret_key": "b",
            "region": "us-east-1",
            "n_read_threads": 2,
            "n_write_threads": 2,
        },
    }
    config = OffloadConfig.from_dict(
        {
            "blocks_per_chunk": 2,
            "staging_bytes": "256KiB",
            "backpressure": None,
            "tiers": [written[tier] for tier in tiers],
            "lookup_timeout_s": 20.0,
        }
    )
    pool = per_layer(torch.bfloat16, 9)
    keys = [make_key(at) for at in range(3)]
    connector = PickledConnector(config, pool.layout())
    connector.wait([connector.store(keys, range(6))], WAIT_S)
    wanted = [tensor.clone() for tensor in pool.blocks(range(6))]
    finish(connector)
    listed = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    [name] = [name for name in listed if keys[1].hex() in name]
    shown(client.get_object(Bucket=bucket, Key=name)["Body"].read(), pool, [2, 3])
    client.close()
    # Another engine, whose faster tiers are empty: only the bucket has the chunks.
    again = PickledConnector(
        config.model_copy(update={"tiers": tuple(tier for tier in config.tiers if tier.type != "fs")}), pool.layout()
    )
    until(lambda: None, lambda: not again.lookup(keys).pending)
    assert again.lookup(keys).held == 3
    for storage in pool.storages:
        bits(storage).fill_(0)
    again.wait([again.load(keys, range(6, 12))], WAIT_S)
    for got, want in zip(pool.blocks(range(6, 12)), wanted, strict=True):
        assert torch.equal(got, want)
    finish(again)


def test_a_bucket_that_is_not_there_is_named_and_nothing_is_left_running(s3_endpoint):
    before = sluice_threads()
    obj = {
        "type": "obj",
        "bucket": "nobody-made-this",
        "endpoint_url": s3_endpoint,
        "access_key": "a",
        "secret_key": "b",
    }
    config = OffloadConfig.from_dict({"blocks_per_chunk": 1, "staging_bytes": "256KiB", "tiers": [obj]})
    with pytest.raises(ladder.ConfigError, match="nobody-made-this"):
        PickledConnector(config, per_layer(torch.float32, 1).layout())
    assert sluice_threads() == before
