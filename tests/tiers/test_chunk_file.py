"""The chunk file: valid safetensors, aligned, sealed for one key, and nothing else passes for it."""

from __future__ import annotations

import json
import struct
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from kvsluice.tiers import ChunkDamagedError, reasons
from kvsluice.tiers.chunk_file import (
    DTYPE_BYTES,
    MAX_KEY_BYTES,
    ChunkFormat,
    TensorSpec,
    check_key,
    engine_key,
    stored_key,
)

TENSORS = (TensorSpec("model.layers.0", "BF16", (2, 4, 3)), TensorSpec('odd "name" \u00e9\n', "F8_E4M3", (5,)))
KEY = bytes(range(32))


def make(**changes: object) -> ChunkFormat:
    given_ = {"namespace": "ab" * 16, "num_tokens": 64, **changes}
    return ChunkFormat(given_.pop("tensors", TENSORS), **given_)


def image(fmt: ChunkFormat, key: bytes = KEY, fill: int = 7) -> bytearray:
    buffer = bytearray(bytes([fill]) * fmt.slot_bytes)
    for at in range(fmt.header_bytes, fmt.file_bytes):
        buffer[at] = (at * fill) % 251
    fmt.seal(memoryview(buffer), key)
    return buffer


def reason_of(fmt: ChunkFormat, buffer: bytes | bytearray, num_bytes: int, key: bytes = KEY) -> str | None:
    try:
        fmt.verify(memoryview(buffer), num_bytes, key)
    except ChunkDamagedError as error:
        return error.reason if key.hex() in str(error) else f"a message without the key: {error}"
    return None


def test_an_image_is_a_safetensors_file_of_its_layers():
    fmt = make()
    buffer = image(fmt)
    shown = load(bytes(buffer[: fmt.file_bytes]))
    assert set(shown) == {spec.name for spec in TENSORS}
    layers = [shown[spec.name] for spec in TENSORS]
    assert [tensor.dtype for tensor in layers] == [torch.bfloat16, torch.float8_e4m3fn]
    assert [tuple(tensor.shape) for tensor in layers] == [spec.shape for spec in TENSORS]
    payload = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in layers)
    assert payload == bytes(buffer[fmt.header_bytes : fmt.file_bytes])


def test_the_payload_is_aligned_and_the_file_as_long_as_its_data():
    fmt = make()
    assert fmt.header_bytes % 4096 == fmt.slot_bytes % 4096 == 0
    assert fmt.payload_bytes == 2 * 4 * 3 * 2 + 5
    assert fmt.file_bytes == fmt.header_bytes + fmt.payload_bytes
    assert fmt.file_bytes <= fmt.slot_bytes < fmt.file_bytes + 4096


def test_the_metadata_says_what_the_chunk_is():
    fmt = make(group=3, rank=1, num_ranks=2, extra={"dim_orders": "{}"})
    buffer = image(fmt)
    (length,) = struct.unpack("<Q", buffer[:8])
    metadata = json.loads(buffer[8 : 8 + length])["__metadata__"]
    checksum = metadata.pop("checksum")
    assert metadata == {
        "format": "kvsluice-1",
        "key": KEY.hex(),
        "namespace": "ab" * 16,
        "group": "3",
        "rank": "1",
        "ranks": "2",
        "tokens": "64",
        "dim_orders": "{}",
    }
    assert len(checksum) * 4 >= 64
    assert set(checksum) != {"0"}


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, MAX_KEY_BYTES])
def test_keys_of_every_size_share_one_geometry(size):
    fmt = make()
    key = b"\xff" * size
    buffer = image(fmt, key)
    assert reason_of(fmt, buffer, fmt.file_bytes, key) is None
    assert load(bytes(buffer[: fmt.file_bytes]))


@pytest.mark.parametrize("key", [b"\0" * 32, b"0" * 32, b"#" * 32, b"\x23" * 64])
def test_keys_that_look_like_the_marks_of_the_template_are_sealed_right(key):
    fmt = make()
    assert reason_of(fmt, image(fmt, key), fmt.file_bytes, key) is None
    assert reason_of(fmt, image(fmt, key), fmt.file_bytes, KEY) in (reasons.FOREIGN, reasons.HEADER)


def test_sealing_twice_gives_the_same_bytes():
    fmt = make()
    buffer = image(fmt)
    again = bytearray(buffer)
    fmt.seal(memoryview(again), KEY)
    assert again == buffer


def test_threads_that_seal_the_same_bytes_at_once_never_show_a_half_written_header():
    fmt = make()
    buffer = image(fmt)
    wanted = bytes(buffer)
    stop = threading.Event()
    bad: list[bytes] = []

    def seal() -> None:
        while not stop.is_set():
            fmt.seal(memoryview(buffer), KEY)

    threads = [threading.Thread(target=seal) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        seen = bytes(buffer)
        if seen != wanted:
            bad.append(seen)
    stop.set()
    for thread in threads:
        thread.join()
    assert not bad


def test_slack_after_the_file_does_not_count():
    fmt = make()
    buffer = image(fmt)
    buffer[fmt.file_bytes :] = b"\xee" * (fmt.slot_bytes - fmt.file_bytes)
    assert reason_of(fmt, buffer, fmt.file_bytes) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(at=st.integers(0, 4096 + 52), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(at, bit):
    fmt = make()
    buffer = image(fmt)
    assert fmt.file_bytes == 4096 + 53
    buffer[at] ^= 1 << bit
    reason = reason_of(fmt, buffer, fmt.file_bytes)
    assert reason in (reasons.CHECKSUM, reasons.HEADER, reasons.FOREIGN)
    if at >= fmt.header_bytes:
        assert reason == reasons.CHECKSUM


@pytest.mark.parametrize(
    ("num_bytes", "reason"),
    [(0, reasons.SHORT), (4096, reasons.SHORT), (4096 + 52, reasons.SHORT), (4096 + 54, reasons.OVERSIZE)],
)
def test_another_length_is_told(num_bytes, reason):
    fmt = make()
    assert reason_of(fmt, image(fmt), num_bytes) == reason


@pytest.mark.parametrize(
    "other", [{"namespace": "cd" * 16}, {"group": 1}, {"rank": 1}], ids=["namespace", "group", "rank"]
)
def test_a_whole_chunk_of_somebody_else_is_foreign(other):
    fmt = make()
    assert reason_of(fmt, image(make(**other)), fmt.file_bytes) == reasons.FOREIGN


def test_a_whole_chunk_of_another_key_is_foreign():
    fmt = make()
    assert reason_of(fmt, image(fmt, b"another"), fmt.file_bytes) == reasons.FOREIGN


def test_a_chunk_of_another_geometry_is_told_by_its_header():
    fmt = make()
    tensors = (TensorSpec("model.layers.0", "F16", (2, 4, 3)), TENSORS[1])
    assert reason_of(fmt, image(make(tensors=tensors)), fmt.file_bytes) == reasons.HEADER


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8 + b"{}",
        struct.pack("<Q", 2**63) + b'{"__metadata__":{}}',
        struct.pack("<Q", 4088) + b"[" * 4000,
        struct.pack("<Q", 4088) + b'{"__metadata__":' * 250,
        struct.pack("<Q", 4088) + b'{"__metadata__":[1,2]}',
        struct.pack("<Q", 4088) + b'{"__metadata__":"text"}',
        struct.pack("<Q", 4088) + b'{"__metadata__":{"format":7}}',
        struct.pack("<Q", 4088) + b"[1]",
        struct.pack("<Q", 4088) + b'{"a":' + b"9" * 4070 + b"}",
        struct.pack("<Q", 4088) + b"\xff\xfe{\0}\0",
        struct.pack("<Q", 4088) + b"null",
    ],
    ids=range(12),
)
def test_a_crafted_header_is_rejected_without_being_believed(header):
    fmt = make()
    buffer = image(fmt)
    buffer[: fmt.header_bytes] = header.ljust(fmt.header_bytes)
    assert reason_of(fmt, buffer, fmt.file_bytes) == reasons.HEADER


def test_without_the_checksum_length_and_header_are_proven_still():
    fmt = make()
    buffer = image(fmt)
    buffer[-4096 + 10] ^= 1
    fmt.verify(memoryview(buffer), fmt.file_bytes, KEY, checksum=False)
    with pytest.raises(ChunkDamagedError):
        fmt.verify(memoryview(buffer), fmt.file_bytes - 1, KEY, checksum=False)
    with pytest.raises(ChunkDamagedError):
        fmt.verify(memoryview(buffer), fmt.file_bytes, b"other", checksum=False)


@pytest.mark.parametrize("key", [b"", b"x" * 65, "text", None, bytearray(b"x")])
def test_a_key_that_no_tier_could_keep_is_refused(key):
    with pytest.raises(ValueError, match=r"1 to 64 bytes, got"):
        check_key(key)


def test_stored_keys_of_different_chunks_differ_and_give_the_engines_key_back():
    names = {
        stored_key(key, group, rank): (key, group, rank)
        for key in (b"a", b"ab", b"a\0", b"a\0\0", b"a\0\0\0\0")
        for group in (0, 1, 256)
        for rank in (0, 1, 256)
    }
    assert len(names) == 5 * 3 * 3
    assert all(engine_key(name) == key for name, (key, _, _) in names.items())


@pytest.mark.parametrize(
    "tensors", [(), (TENSORS[0], TENSORS[0]), (TensorSpec("__metadata__", "U8", (1,)),)], ids=["none", "twice", "taken"]
)
def test_tensor_names_must_be_usable(tensors):
    with pytest.raises(ValueError, match="tensor names"):
        make(tensors=tensors)


def test_many_layers_make_a_header_of_several_pages():
    tensors = [TensorSpec(f"model.layers.{at}.self_attn.attn", "F16", (16, 8)) for at in range(200)]
    fmt = make(tensors=tensors)
    assert fmt.header_bytes > 4096
    assert reason_of(fmt, image(fmt), fmt.file_bytes) is None
    assert len(load(bytes(image(fmt)[: fmt.file_bytes]))) == 200


@pytest.mark.parametrize("code", sorted(set(DTYPE_BYTES) - {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}))
def test_every_dtype_has_its_size(code):
    fmt = make(tensors=(TensorSpec("t", code, (3, 2)),))
    [tensor] = load(bytes(image(fmt)[: fmt.file_bytes])).values()
    assert tensor.element_size() == DTYPE_BYTES[code]
    assert tensor.shape == (3, 2)
