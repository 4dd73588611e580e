"""The pinned region is exactly as large as asked for, lies where it should, and is registered whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsluice.connector import region as region_module
from kvsluice.connector.region import PIECE_BYTES, LinuxNuma, PinnedRegion, node_mask, registration_pieces
from kvsluice.kernels.driver import NO_DRIVER, CudaDriver, DriverError
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.tiers.errors import ConfigError

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
SLOT = 5 * 4096
HUGE = 2 << 20
PIECE = 3 * SLOT
"""Three slots to a piece, so that ten slots make three whole pieces and a rest."""

MINCORE = {"x86_64": 27, "aarch64": 232}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


class Machine:
    """Driver and NUMA nodes of a fake machine: what is registered now, and all that happened, in order."""

    def __init__(self, nodes: frozenset[int] = frozenset({0, 1})) -> None:
        self.online = nodes
        self.calls: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}
        self.refuse_at: int | None = None
        self.keep: set[int] = set()
        self.refuse_context = False
        self.refuse_placing: OSError | None = None
        self.inside = False
        self.num_registers = 0

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        assert ordinal == 1
        if self.refuse_context:
            raise DriverError("no context", code=2, name="CUDA_ERROR_OUT_OF_MEMORY")
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def register(self, address: int, num_bytes: int) -> None:
        assert self.inside, "registered without a context"
        number, self.num_registers = self.num_registers, self.num_registers + 1
        self.calls.append(("register", address, num_bytes))
        if number == self.refuse_at:
            raise DriverError("register failed: CUDA_ERROR_OUT_OF_MEMORY", code=2, name="CUDA_ERROR_OUT_OF_MEMORY")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        assert self.inside, "unregistered without a context"
        self.calls.append(("unregister", address))
        if address in self.keep:
            raise DriverError(f"unregister of {address} failed", code=1, name="CUDA_ERROR_INVALID_VALUE")
        del self.registered[address]

    def nodes(self) -> frozenset[int]:
        return self.online

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        self.calls.append(("prefer", address, num_bytes, node, touched_pages(address, num_bytes)))
        if self.refuse_placing is not None:
            raise self.refuse_placing

    def named(self, name: str) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def touched_pages(address: int, num_bytes: int) -> int:
    """How many pages of the range are in memory, by the kernel."""
    pages = -(-num_bytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    number = MINCORE[platform.machine()]
    failed = libc().syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.byref(found)
    )
    assert not failed, ctypes.get_errno()
    return sum(page & 1 for page in found)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """All mappings that were made during the test."""
    made: list[mmap.mmap] = []

    class Recorded(mmap.mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            made.append(self)

    monkeypatch.setattr(region_module.mmap, "mmap", Recorded)
    return made


def gpu_region(machine: Machine, num_slots: int = 10, *, pin: str = "auto", node: int | None = 1) -> PinnedRegion:
    return PinnedRegion(
        num_slots,
        SLOT,
        device=GPU,
        pin=pin,  # type: ignore[arg-type]
        piece_bytes=PIECE,
        driver=machine,
        facts=GpuFacts(numa_node=node),
        numa=machine,
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_slots", [1, 3, 1000])
def test_the_region_is_exactly_as_large_as_asked_for(num_slots: int, mappings: list[mmap.mmap]) -> None:
    region = PinnedRegion(num_slots, SLOT, device=CPU)
    (mapping,) = mappings
    assert len(mapping) == num_slots * SLOT
    assert all(len(region.view(slot)) == region.tensor(slot).numel() == SLOT for slot in range(num_slots))
    assert len(region.view(num_slots)) == 0


def test_slots_lie_one_after_another_on_page_boundaries_and_share_no_byte() -> None:
    region = PinnedRegion(4, SLOT, device=CPU)
    starts = [region.tensor(slot).data_ptr() for slot in range(4)]
    assert [start - starts[0] for start in starts] == [0, SLOT, 2 * SLOT, 3 * SLOT]
    assert starts[0] % 4096 == 0
    for slot in range(4):
        region.tensor(slot).fill_(slot + 1)
    assert [set(region.view(slot)) for slot in range(4)] == [{1}, {2}, {3}, {4}]


def test_memory_that_cannot_be_had_is_a_config_error_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"cannot map 1048576 slots of 1099511627776 bytes"):
        PinnedRegion(1 << 20, 1 << 40, device=CPU)


def test_slots_of_broken_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="slot_bytes 5000 is not a multiple of 4096"):
        PinnedRegion(1, 5000, device=CPU)


@given(
    num_slots=st.integers(1, 300),
    pages_per_slot=st.integers(1, 1500),
    piece_bytes=st.sampled_from([1, 4096, 7 * 4096, HUGE, 3 * HUGE + 4096, 64 << 20]),
)
def test_pieces_cover_the_region_once_and_cut_no_slot(num_slots: int, pages_per_slot: int, piece_bytes: int) -> None:
    slot_bytes = pages_per_slot * 4096
    end = 0
    for offset, length in registration_pieces(num_slots, slot_bytes, piece_bytes):
        assert offset == end
        assert length > 0
        assert offset % slot_bytes == length % slot_bytes == 0
        assert offset % mmap.PAGESIZE == 0
        assert length <= max(piece_bytes, slot_bytes, mmap.PAGESIZE * slot_bytes // 4096)
        end = offset + length
    assert end == num_slots * slot_bytes


def test_pieces_are_as_large_as_allowed_and_whole_huge_pages_where_slots_allow_it() -> None:
    pieces = list(registration_pieces(10_000, 256 << 10))
    assert [length for _, length in pieces[:-1]] == [PIECE_BYTES] * 2
    odd = list(registration_pieces(10_000, 260 << 10))
    assert all(PIECE_BYTES - 65 * HUGE < length <= PIECE_BYTES for _, length in odd[:-1])
    assert all(offset % HUGE == 0 for offset, _ in odd)
    # The fewest slots that end with a huge page are longer than a piece: pages will do.
    uneven = list(registration_pieces(1500, HUGE + 4096))
    assert [length // (HUGE + 4096) for _, length in uneven] == [511, 511, 478]


def test_a_page_larger_than_the_slots_alignment_is_not_registered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module.mmap, "PAGESIZE", 64 << 10)
    pieces = list(registration_pieces(100, 5 * 4096, 200 << 10))
    assert len(pieces) == 7
    assert all(offset % (64 << 10) == offset % (5 * 4096) == 0 for offset, _ in pieces)


def test_on_a_gpu_every_piece_is_registered_in_order_and_none_is_left_after_close(machine: Machine) -> None:
    region = gpu_region(machine)
    base = region.tensor(0).data_ptr()
    assert (region.pinned, region.refused) == (True, None)
    assert machine.named("register") == [
        (base, PIECE),
        (base + PIECE, PIECE),
        (base + 2 * PIECE, PIECE),
        (base + 3 * PIECE, SLOT),
    ]
    region.close()
    assert not region.pinned
    assert machine.registered == {}
    assert machine.named("unregister") == [(base + piece * PIECE,) for piece in (3, 2, 1, 0)]
    region.close()
    assert len(machine.named("unregister")) == 4
    region.tensor(9).fill_(1)  # the memory outlives the registration


def test_a_pinned_slot_is_not_touched_again(machine: Machine) -> None:
    region = gpu_region(machine)
    region.tensor(2).fill_(7)
    region.touch(2)
    assert set(region.view(2)) == {7}
    region.close()


def test_a_pageable_slot_is_touched_once() -> None:
    region = PinnedRegion(3, SLOT, device=CPU)
    assert touched_pages(region.tensor(0).data_ptr(), 3 * SLOT) == 0
    region.touch(1)
    assert touched_pages(region.tensor(1).data_ptr(), SLOT) == SLOT // mmap.PAGESIZE
    region.tensor(1).fill_(7)
    region.touch(1)
    assert set(region.view(1)) == {7}


@pytest.mark.parametrize("piece", range(4))
def test_a_piece_that_is_refused_leaves_nothing_registered_and_one_warning(
    machine: Machine, piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine.refuse_at = piece
    region = gpu_region(machine)
    base = region.tensor(0).data_ptr()
    assert not region.pinned
    assert region.refused == f"CUDA_ERROR_OUT_OF_MEMORY after {piece * PIECE} of {10 * SLOT} bytes"
    assert machine.registered == {}
    assert machine.named("unregister") == [(base + done * PIECE,) for done in reversed(range(piece))]
    (warning,) = warnings_of(caplog)
    for part in (f"pinning {10 * SLOT} bytes", f"after {piece * PIECE} of them", "CUDA_ERROR_OUT_OF_MEMORY"):
        assert part in warning
    region.touch(0)
    assert set(region.view(0)) == {0}
    calls = len(machine.calls)
    region.close()
    assert len(machine.calls) == calls, "nothing was left to give back"


@pytest.mark.parametrize(
    ("limits", "words"),
    [((65536, 131072), "is 65536 (hard limit 131072)"), ((resource.RLIM_INFINITY,) * 2, "is unlimited")],
)
def test_the_warning_names_the_memlock_limit_as_it_is_and_what_to_do(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: tuple[int, int],
    words: str,
) -> None:
    asked: list[int] = []

    def getrlimit(which: int) -> tuple[int, int]:
        asked.append(which)
        return limits

    monkeypatch.setattr(region_module.resource, "getrlimit", getrlimit)
    machine.refuse_at = 1
    gpu_region(machine)
    assert asked == [resource.RLIMIT_MEMLOCK]
    (warning,) = warnings_of(caplog)
    for part in (f"RLIMIT_MEMLOCK {words}", "ulimit -l", "--ulimit memlock=-1", "staging_bytes", "pin_memory"):
        assert part in warning


def test_a_roll_back_goes_on_past_a_piece_that_cuda_keeps(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.refuse_at = 3
    register = machine.register

    def keep_the_second(address: int, num_bytes: int) -> None:
        if len(machine.registered) == 1:
            machine.keep.add(address)
        register(address, num_bytes)

    monkeypatch.setattr(machine, "register", keep_the_second)
    region = gpu_region(machine)
    assert not region.pinned
    assert set(machine.registered) == machine.keep
    assert len(machine.named("unregister")) == 3
    unpinning, pageable = warnings_of(caplog)
    assert "3 pieces: 1 calls failed: unregister of" in unpinning
    assert "pageable" in pageable
    calls = len(machine.calls)
    region.close()
    assert len(machine.calls) == calls


def test_close_gives_back_what_it_can_and_does_not_raise(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    region = gpu_region(machine)
    base = region.tensor(0).data_ptr()
    machine.keep = {base + PIECE}
    region.close()
    assert machine.registered == {base + PIECE: PIECE}
    assert len(warnings_of(caplog)) == 1
    region.close()
    assert len(machine.named("unregister")) == 4
    assert len(warnings_of(caplog)) == 1


def test_close_without_a_context_does_not_raise(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    region = gpu_region(machine)
    machine.refuse_context = True
    region.close()
    region.close()
    assert not region.pinned
    (warning,) = warnings_of(caplog)
    assert "no context" in warning


def test_a_device_without_a_context_leaves_pageable_memory(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.refuse_context = True
    region = gpu_region(machine)
    assert (region.pinned, machine.registered) == (False, {})
    (warning,) = warnings_of(caplog)
    assert "no context" in warning


@pytest.mark.parametrize("piece", range(4))
def test_pin_on_raises_at_any_refused_piece_with_nothing_registered_or_mapped(
    machine: Machine, piece: int, mappings: list[mmap.mmap], caplog: pytest.LogCaptureFixture
) -> None:
    machine.refuse_at = piece
    with pytest.raises(ConfigError, match=rf"after {piece * PIECE} of them.*CUDA_ERROR_OUT_OF_MEMORY") as caught:
        gpu_region(machine, pin="on")
    assert isinstance(caught.value.__cause__, DriverError)
    assert "RLIMIT_MEMLOCK" in str(caught.value)
    assert machine.registered == {}
    (mapping,) = mappings
    assert mapping.closed
    assert warnings_of(caplog) == []


def test_pin_on_without_a_gpu_maps_nothing(mappings: list[mmap.mmap]) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device, the KV cache is on cpu"):
        PinnedRegion(3, SLOT, device=CPU, pin="on")
    assert mappings == []


def test_pin_on_that_is_granted_is_pinned(machine: Machine) -> None:
    region = gpu_region(machine, pin="on")
    assert region.pinned
    region.close()


def test_an_interrupted_start_leaves_nothing_registered_or_mapped(
    machine: Machine, mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = machine.register

    def interrupted(address: int, num_bytes: int) -> None:
        if len(machine.registered) == 2:
            raise KeyboardInterrupt
        register(address, num_bytes)

    monkeypatch.setattr(machine, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_region(machine)
    assert machine.registered == {}
    assert mappings[0].closed


def test_pin_off_registers_nothing_and_still_places_the_pages(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    region = gpu_region(machine, pin="off")
    assert (region.pinned, region.refused, region.numa_node) == (False, "pin_memory is 'off'", 1)
    assert [call[0] for call in machine.calls] == ["prefer"]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("pin", ["auto", "off"])
def test_on_the_cpu_nothing_is_asked_of_driver_or_nodes(machine: Machine, pin: str) -> None:
    region = PinnedRegion(
        3,
        SLOT,
        device=CPU,
        pin=pin,  # type: ignore[arg-type]
        driver=machine,
        numa=machine,
    )
    assert (region.pinned, region.refused, region.numa_node) == (False, "the KV cache is on cpu", None)
    region.close()
    assert machine.calls == []


def test_on_the_cpu_nothing_of_cuda_is_imported() -> None:
    script = """
import sys, torch
before = set(sys.modules)
from kvsluice.connector.region import PinnedRegion
PinnedRegion(3, 4096, device=torch.device("cpu")).close()
print([name for name in set(sys.modules) - before if name.split(".")[0] in ("cuda", "pynvml", "triton")])
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_pages_are_placed_before_the_first_touch_and_before_registering(machine: Machine) -> None:
    region = gpu_region(machine)
    assert region.numa_node == 1
    assert [call[0] for call in machine.calls] == ["prefer"] + ["register"] * 4
    assert machine.named("prefer") == [(region.tensor(0).data_ptr(), 10 * SLOT, 1, 0)]
    region.close()


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EPERM, "seccomp"), OSError(errno.EINVAL, "no such node"), OSError("no number for mbind")],
)
def test_pages_that_cannot_be_placed_are_pinned_all_the_same(
    machine: Machine, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    machine.refuse_placing = error
    with caplog.at_level(logging.INFO):
        region = gpu_region(machine)
    assert (region.pinned, region.numa_node) == (True, None)
    assert warnings_of(caplog) == []
    assert str(error) in caplog.text
    region.close()


@pytest.mark.parametrize(
    ("nodes", "node"),
    [(frozenset({0}), 0), (frozenset(), 0), (frozenset({0, 1}), None), (frozenset({0, 1}), 5)],
    ids=["one node", "the system does not say", "the GPU's node is unknown", "the GPU's node has no memory"],
)
def test_pages_are_not_placed_where_there_is_no_choice_or_no_knowing(
    machine: Machine, nodes: frozenset[int], node: int | None
) -> None:
    machine.online = nodes
    region = gpu_region(machine, node=node)
    assert (region.pinned, region.numa_node) == (True, None)
    assert machine.named("prefer") == []
    region.close()


def test_a_machine_without_a_driver_gets_pageable_memory_and_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: Machine
) -> None:
    def missing() -> CudaDriver:
        raise DriverError("pip install kvsluice[gpu]", code=NO_DRIVER, name="no cuda-bindings")

    monkeypatch.setattr(region_module, "open_driver", missing)
    region = PinnedRegion(3, SLOT, device=GPU, facts=GpuFacts(), numa=machine)
    assert region.refused == f"no cuda-bindings after 0 of {3 * SLOT} bytes"
    (warning,) = warnings_of(caplog)
    assert "pip install kvsluice[gpu]" in warning
    assert "MEMLOCK" not in warning
    region.close()


@pytest.mark.parametrize("node", [0, 1, 63, 64, 127, 1023])
def test_a_node_mask_has_one_bit_at_the_nodes_place_and_reaches_past_it(node: int) -> None:
    mask, num_bits = node_mask(node)
    assert int.from_bytes(bytes(mask), sys.byteorder) == 1 << node
    # The kernel reads one bit less than it is told.
    assert node < num_bits - 1 == 8 * ctypes.sizeof(mask)


def policy_at(address: int) -> tuple[int, int]:
    """Mode and nodes of the memory policy at an address, by the kernel."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    failed = libc().syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]),
        ctypes.byref(mode),
        ctypes.byref(nodes),
        ctypes.c_ulong(1024),
        ctypes.c_void_p(address),
        ctypes.c_ulong(2),  # MPOL_F_ADDR
    )
    assert not failed, ctypes.get_errno()
    return mode.value, int.from_bytes(bytes(nodes), sys.byteorder)


def test_the_kernel_prefers_node_0_where_it_was_asked_to_or_the_region_does_without() -> None:
    machine = Machine(nodes=frozenset({0, 1}))
    numa = LinuxNuma()
    machine.prefer = numa.prefer  # type: ignore[method-assign]
    region = gpu_region(machine, node=0)
    assert region.pinned
    if region.numa_node is None:
        # A container whose seccomp profile forbids mbind, or a kernel without it.
        with pytest.raises(OSError, match="mbind to node 0") as caught:
            numa.prefer(region.tensor(0).data_ptr(), 10 * SLOT, 0)
        assert caught.value.errno in (errno.EPERM, errno.ENOSYS)
    else:
        assert policy_at(region.tensor(0).data_ptr()) == policy_at(region.tensor(9).data_ptr()) == (1, 1)
        region.tensor(0).fill_(1)
    region.close()


def test_a_node_that_the_kernel_does_not_have_is_refused_and_harmless() -> None:
    machine = Machine(nodes=frozenset({0, 900}))
    machine.prefer = LinuxNuma().prefer  # type: ignore[method-assign]
    region = gpu_region(machine, node=900)
    assert (region.pinned, region.numa_node) == (True, None)
    region.tensor(0).fill_(1)
    region.close()


def test_a_processor_whose_system_calls_are_not_known_is_refused_before_any_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region_module.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="mbind on riscv64"):
        LinuxNuma().prefer(0, 4096, 0)


@pytest.mark.parametrize(
    ("content", "nodes"),
    [("0\n", {0}), ("0-1\n", {0, 1}), ("0,2-4,8\n", {0, 2, 3, 4, 8}), ("\n", set())],
)
def test_nodes_with_memory_are_read_from_the_kernels_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, nodes: set[int]
) -> None:
    (tmp_path / "has_memory").write_text(content)
    monkeypatch.setattr(region_module, "_SYS_NODES", tmp_path)
    assert LinuxNuma().nodes() == nodes


def test_a_kernel_without_nodes_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_SYS_NODES", tmp_path / "missing")
    assert LinuxNuma().nodes() == frozenset()
    monkeypatch.undo()
    if Path("/sys/devices/system/node").exists():
        assert 0 in LinuxNuma().nodes()


def test_a_child_process_does_not_get_the_pages() -> None:
    region = PinnedRegion(10, SLOT, device=CPU)
    region.tensor(0).fill_(1)
    start = region.tensor(0).data_ptr()
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not line.startswith("VmFlags"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= start < high
        elif inside and line.startswith("VmFlags"):
            flags = line
    assert " dc" in flags


def test_a_region_made_in_inference_mode_is_written_outside_it() -> None:
    with torch.inference_mode():
        region = PinnedRegion(2, 8192, device=torch.device("cpu"))
    region.touch(1)
    region.tensor(1).fill_(7)
    assert region.view(1)[-1] == 7
    region.close()
