"""Every page kernel moves exactly the bytes of the named blocks, whatever the pages' shape."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from paged_cases import DEVICE, Case, MakeKernel, Strided, cases, check, random_bytes

from kvsluice.connector import KVLayout
from kvsluice.connector.layout import DTYPE_CODES
from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.errors import DeviceCopyError
from kvsluice.kernels.pieces import cut
from kvsluice.kernels.torch_pages import TorchPages
from kvsluice.kernels.triton_pages import TritonPages

KERNELS: tuple[MakeKernel, ...] = (TorchPages, TritonPages)
KERNEL_FILE = Path(__file__).parents[2] / "kernels" / "triton_kernel.py"
IN_FLIGHT = "kvsluice.kernels.triton_pages._ITEMS_IN_FLIGHT"
LEAST_IN_FLIGHT = 512
interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="reads what Triton's interpreter computes")


def check_triton(case: Case, rounds: int) -> None:
    """On the CPU with about so many rounds of the kernel's loop: the interpreter takes milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:

        def make(plan: CopyPlan) -> TritonPages:
            if DEVICE.type == "cpu":
                items = len(case.read_ids) * sum(items_of(plan, number) for number in range(len(plan.planes)))
                patch.setattr(IN_FLIGHT, max(LEAST_IN_FLIGHT, 1 << (items // rounds).bit_length()))
            return TritonPages(plan, programs=case.programs)

        check(case, make)


def items_of(plan: CopyPlan, number: int) -> int:
    """About so many items of the kernel has a plane, idle ones included."""
    plane = plan.planes[number]
    item_bytes = math.gcd(8, plane.address, plane.offset, plane.run_bytes, plane.block_stride)
    return plan.num_blocks * len(plane.run_offsets) * max(8, plane.run_bytes // item_bytes)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_torch_pages_equal_the_oracle_bit_for_bit_and_touch_nothing_else(case: Case) -> None:
    check(case, TorchPages)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([1, 2, 4, 8]))
def test_triton_pages_equal_the_oracle_bit_for_bit_and_touch_nothing_else(case: Case, rounds: int) -> None:
    check_triton(case, rounds)


def load_kernel(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)["copy_pages"]


def changed_kernel(tmp_path: Path, changes: Sequence[tuple[str, str]], end: str = "") -> object:
    """The kernel with passages of its text replaced."""
    text = KERNEL_FILE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "changed_kernel.py"
    path.write_text(text + end)
    return load_kernel(path)


@interpreted
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("tile = at + tl.arange(0, TILES)", "tile = at + tl.arange(0, TILES) + 1", id="the first tile"),
        pytest.param("live = tile < num_tiles", "live = tile <= num_tiles", id="a tile too many"),
        pytest.param("whole if EVEN", "whole if not EVEN", id="no mask at the end of a run"),
        pytest.param("run_vectors * ALIGNED_ITEMS", "run_vectors * ALIGNED_ITEMS + 1", id="an item too many"),
        pytest.param("target + step * STEP_ITEMS", "target + step", id="steps over each other"),
        pytest.param("values[step]", "values[0]", id="the first step's bytes"),
        pytest.param("mask=masks[step])", "mask=masks[0])", id="the first step's mask"),
        pytest.param("tile % tiles_per_run) * TILE_ITEMS", "tile % tiles_per_run) * 8", id="tiles over each other"),
        pytest.param("place = first_block + run", "place = run", id="blocks that are left out"),
        pytest.param("(first_row + run", "(run", id="planes of another piece"),
        pytest.param("chunk * blocks_per_chunk + place", "place", id="ids of another chunk"),
        pytest.param("chunk * blocks_per_chunk", "chunk * num_blocks", id="ids of a trimmed chunk"),
        pytest.param("chunk.to(tl.int64) * chunk_items + ", "", id="chunks over each other"),
        pytest.param("* chunk_items + shift_items", "* chunk_items", id="a piece as if it were the first"),
        pytest.param("block * tl.load(row + 1", "block * tl.load(row + 3", id="pages without padding"),
        pytest.param("place * tl.load(row + 3", "place * tl.load(row + 1", id="staging with padding"),
        pytest.param("tl.num_programs(0) * TILES", "tl.num_programs(0) * TILES * 2", id="every other round"),
        pytest.param("tl.program_id(0) * TILES", "0", id="all programs alike"),
        pytest.param("page if INTO_PAGES", "slot if INTO_PAGES", id="into staging in both directions"),
    ],
)
def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str) -> None:
    kernel = changed_kernel(tmp_path, [(right, wrong)])
    monkeypatch.setattr("kvsluice.kernels.triton_pages._kernel", lambda _device: kernel)

    @settings(max_examples=150, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(cases().filter(lambda case: case.pool_bytes < 1 << 15), st.sampled_from([1, 2, 5, 12]))
    def holds(case: Case, rounds: int) -> None:
        check_triton(case, rounds)

    with pytest.raises(AssertionError, match=r"wrong bytes|wrote"):
        holds()


@interpreted
@settings(max_examples=20, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([1, 3]))
def test_what_the_kernel_tells_the_compiler_of_addresses_is_true(case: Case, rounds: int) -> None:
    # The interpreter takes no notice of it; on a GPU an access at an address that is not aligned fails.
    check_text = (
        "\n\ndef true_multiple_of(value, items):\n"
        '    assert not (value.handle.data % items).any(), f"not a multiple of {items}"\n'
        "    return value\n"
    )
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        kernel = changed_kernel(Path(folder), [("tl.multiple_of(", "true_multiple_of(")], check_text)
        patch.setattr("kvsluice.kernels.triton_pages._kernel", lambda _device: kernel)
        check_triton(case, rounds)


@pytest.mark.parametrize("programs", range(1, 9))
def test_any_number_of_programs_moves_every_tile_once(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    # 5 blocks of 3 tiles, 2 tiles in flight: 8 programs have one round each, the last with one tile.
    monkeypatch.setattr(IN_FLIGHT, 2 * 512)
    laid = Strided(8, (7, 3 * 512 - 10), 0, 1, (0, 1), (0, 0), 0)
    ids = ((6, 0, 3, 2, 5),)
    case = Case((laid,), 1, 7, ids, ids, 0, 1 << 17, False, 0, programs, 1)
    check(case, lambda plan: TritonPages(plan, programs=programs))


def engine_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor | Sequence[torch.Tensor]]:
    """Layers as engines lay them out; half of the bytes are patterns with NaNs that signal, half are random."""
    signals = torch.tensor([0x7FF0000000000001, 0x7F8000017F800001, 0x7C017C017F817F81, -1], dtype=torch.int64)

    def full(*shape: int) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        noise = random_bytes(num_bytes, num_bytes)
        noise[: num_bytes // 2] = signals.view(torch.uint8).repeat(num_bytes // 32 + 1)[: num_bytes // 2]
        return noise.to(DEVICE).view(dtype).view(*shape)

    return {
        "heads before tokens": full(2, 9, 2, 16, 8).permute(0, 1, 3, 2, 4),
        "blocks first": full(9, 2, 16, 24).transpose(0, 1),
        "a pair": [full(9, 16, 12), full(9, 16, 20)[:, :, 4:16]],
        "odd": full(2, 9, 5)[:, :, :3],
    }


@pytest.mark.parametrize("make", KERNELS)
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype_of_a_cache_keeps_all_its_bits(make: MakeKernel, dtype: torch.dtype) -> None:
    blocks = {"heads before tokens": 1, "blocks first": 1, "a pair": 0, "odd": 1}
    layout = KVLayout.from_tensors(engine_tensors(dtype), tokens_per_block=16, block_dim=blocks)
    plan = CopyPlan(layout.paged, 3)
    kernel = make(plan)
    (piece,) = cut(plan, 1 << 20)
    gathered, scattered = [8, 0, 8], [1, 5, 7]
    staged = torch.zeros(piece.stride_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.gather(piece, torch.tensor([gathered], device=DEVICE), staged, piece.stride_bytes)
    chosen = [bits(item, gathered) for item in layout.paged]
    assert torch.equal(staged[: plan.num_bytes], torch.cat([part.flatten() for part in chosen]))

    before = [bits(item, range(9)) for item in layout.paged]
    kernel.scatter(piece, torch.tensor([scattered], device=DEVICE), staged, piece.stride_bytes)
    for item, part, kept in zip(layout.paged, chosen, before, strict=True):
        kept.movedim(item.block_axis, 0)[scattered] = part.movedim(item.block_axis, 0)
        assert torch.equal(bits(item, range(9)), kept)


def bits(item: PagedTensor, block_ids: Sequence[int]) -> torch.Tensor:
    """The bytes of some blocks, row-major; those of an item on an axis of their own."""
    chosen = torch.stack([item.tensor.select(item.block_axis, block) for block in block_ids], dim=item.block_axis)
    return chosen.contiguous().unsqueeze(-1).view(torch.uint8)


@pytest.mark.parametrize("make", KERNELS)
def test_a_kernel_that_was_made_in_inference_mode_is_used_outside_it(make: MakeKernel) -> None:
    with torch.inference_mode():
        pages = random_bytes(6 * 40, 1).to(DEVICE).view(6, 40).clone()
        plan = CopyPlan([PagedTensor(pages, 0)], 2)
        kernel = make(plan)
    (piece,) = cut(plan, 4096)
    staged = random_bytes(piece.stride_bytes, 2).to(DEVICE)
    kernel.scatter(piece, torch.tensor([[4, 1]], device=DEVICE), staged, piece.stride_bytes)
    assert torch.equal(pages[[4, 1]].flatten(), staged[:80])
    staged.zero_()
    kernel.gather(piece, torch.tensor([[4, 1]], device=DEVICE), staged, piece.stride_bytes)
    assert torch.equal(pages[[4, 1]].flatten(), staged[:80])


def test_at_least_one_program_is_asked_for() -> None:
    plan = CopyPlan([PagedTensor(random_bytes(40, 1).to(DEVICE).view(4, 10), 0)], 1)
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"):
        TritonPages(plan, programs=0)


def test_without_triton_its_kernel_says_so_and_the_twin_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvsluice.kernels.triton_kernel", raising=False)
    plan = CopyPlan([PagedTensor(random_bytes(40, 1).to(DEVICE).view(4, 10), 0)], 1)
    with pytest.raises(DeviceCopyError, match="needs Triton, which cannot be imported"):
        TritonPages(plan)
    TorchPages(plan)
