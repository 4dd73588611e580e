"""What Triton makes of the page kernel for an H100, told as JSON; needs no GPU.

Run as a program, because Triton's interpreter and its compiler do not go together in one process:

    python machine_code.py page_bytes ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypedDict
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvsluice.kernels import CopyPlan, PagedTensor
from kvsluice.kernels.pieces import cut, cut_by_tensor
from kvsluice.kernels.triton_kernel import copy_pages
from kvsluice.kernels.triton_pages import TritonPages

__all__ = ["MachineCode", "Report"]

_H100 = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SLOT_BYTES = 16 << 20


class MachineCode(TypedDict):
    """One page size in one direction.

    Attributes:
        ptx: Triton's own output.
        sass: the instructions, in their order.
        registers: of a thread.
        spilled_bytes: of a thread's memory that takes what did not fit into registers.
        shared_bytes: of a program.
    """

    page_bytes: int
    into_pages: bool
    ptx: str
    sass: list[str]
    registers: int
    spilled_bytes: int
    shared_bytes: int


class Report(TypedDict):
    """Machine code, and how often the compiler ran.

    Attributes:
        compiled: kernels after `TritonPages.compile`, for all page sizes and both directions.
        compiled_after_launches: the same after launches of all kinds.
        compiled_for_any_int: kernels of one page size and direction, whatever the numbers that it is launched with.
    """

    codes: list[MachineCode]
    compiled: int
    compiled_after_launches: int
    compiled_for_any_int: int


class _Driver:
    """What Triton asks the device for before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return _H100

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiler:
    """Stands in for the kernel: compiles what a launch would run, by Triton's own rules, and remembers it."""

    def __init__(self) -> None:
        self.compiled: list[object] = []
        self.arguments: tuple[tuple[object, ...], dict[str, object]] = ((), {})

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> object:
        self.arguments = args, constants
        kernel = copy_pages.warmup(*args, grid=grid, **constants)
        if not any(kernel is known for known in self.compiled):
            self.compiled.append(kernel)
        return kernel

    def __getitem__(self, grid: tuple[int, ...]) -> partial[object]:
        return partial(self.warmup, grid=grid)


@contextmanager
def _compiling() -> Iterator[_Compiler]:
    compiler = _Compiler()
    with mock.patch("kvsluice.kernels.triton_pages._kernel", return_value=compiler):
        yield compiler


def _plan(page_bytes: int, layers: int, num_blocks: int) -> CopyPlan:
    """Layers of keys and values in bfloat16."""
    shape = (2, num_blocks + 1, page_bytes // 2)
    return CopyPlan(
        [
            PagedTensor(torch.empty(shape, dtype=torch.bfloat16).view(torch.int16), 1, name=f"layer {layer}")
            for layer in range(layers)
        ],
        num_blocks,
    )


def _code(page_bytes: int, *, into_pages: bool) -> MachineCode:
    with _compiling() as compiler:
        TritonPages(_plan(page_bytes, 1, 2)).compile(torch.empty(_SLOT_BYTES, dtype=torch.uint8), into_pages=into_pages)
        (kernel,) = compiler.compiled
    asm: dict[str, object] = kernel.asm  # type: ignore[attr-defined] # Triton has no types
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        cubin, ptx = asm["cubin"], asm["ptx"]
        assert isinstance(cubin, bytes)
        assert isinstance(ptx, str)
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    instructions = [found[1].strip() for found in re.finditer(r"/\*[0-9a-f]{4}\*/\s+([^;/]*)", sass)]
    return {
        "page_bytes": page_bytes,
        "into_pages": into_pages,
        "ptx": ptx,
        "sass": instructions,
        "registers": numbers["REG"],
        "spilled_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": numbers["SHARED"],
    }


def _tool(name: str, *args: str) -> str:
    return subprocess.run([_TOOLS / name, *args], check=True, capture_output=True, text=True).stdout


def _launch_all_kinds(page_bytes: int, staged: torch.Tensor) -> None:
    """Many kinds of pieces, chunks, blocks and staging memory, in both directions."""
    for layers, num_blocks in ((1, 1), (1, 16), (17, 3), (9, 17)):
        if 2 * layers * (num_blocks + 1) * page_bytes > _SLOT_BYTES:
            continue
        plan = _plan(page_bytes, layers, num_blocks)
        pages = TritonPages(plan)
        pieces = [*cut(plan, 17 * page_bytes + 512), *(piece for own in cut_by_tensor(plan, 1 << 30) for piece in own)]
        # Rows of a longer table: their address is a multiple of 8 alone.
        tables = [torch.zeros((chunks + 1, num_blocks), dtype=torch.int64)[1:] for chunks in (1, 2, 16)]
        for piece, ids, spare_bytes in product(pieces, tables, (0, 16)):
            stride_bytes = piece.stride_bytes + spare_bytes
            if len(ids) * stride_bytes <= len(staged):
                pages.gather(piece, ids, staged, stride_bytes)
                pages.scatter(piece.without_blocks(1) or piece, ids, staged, stride_bytes)


def _count_kernels(sizes: Sequence[int]) -> tuple[int, int]:
    """How many `TritonPages.compile` makes, and how many there are after launches."""
    staged = torch.empty(_SLOT_BYTES + 16, dtype=torch.uint8)[16:]
    with _compiling() as compiler:
        for page_bytes, into_pages in product(sizes, (False, True)):
            TritonPages(_plan(page_bytes, 1, 2)).compile(staged, into_pages=into_pages)
        first = len(compiler.compiled)
        for page_bytes in sizes:
            _launch_all_kinds(page_bytes, staged)
        return first, len(compiler.compiled)


def _count_for_any_int(page_bytes: int) -> int:
    """Kernels when each number by itself, and all together, are such as Triton likes to compile for."""
    with _compiling() as compiler:
        staged = torch.empty(_SLOT_BYTES, dtype=torch.uint8)
        TritonPages(_plan(page_bytes, 1, 2)).compile(staged, into_pages=False)
        args, constants = compiler.arguments
        pointers = sum(isinstance(value, torch.Tensor) for value in args)
        for number in (0, 1, 16, 17, -16, 2**31 - 1):
            for place in range(pointers, len(args)):
                compiler.warmup(*args[:place], number, *args[place + 1 :], grid=(1,), **constants)
            compiler.warmup(*args[:pointers], *[number] * (len(args) - pointers), grid=(1,), **constants)
        return len(compiler.compiled)


def main(sizes: Sequence[int]) -> None:
    """Print a `Report`."""
    driver.set_active(_Driver())
    codes = [_code(page_bytes, into_pages=into_pages) for page_bytes, into_pages in product(sizes, (False, True))]
    compiled, after = _count_kernels(sizes)
    report: Report = {
        "codes": codes,
        "compiled": compiled,
        "compiled_after_launches": after,
        "compiled_for_any_int": _count_for_any_int(sizes[0]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
