"""The driver facade calls what CUDA has, with CUDA's own types, and says what failed."""

# ruff: noqa: N802 - the fake has the names that CUDA gave

from __future__ import annotations

import ctypes
import enum
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as real

from kvsluice.kernels.driver import NO_DRIVER, CudaDriver, DriverError, DriverModule, MemcpyAttributes, open_driver

STREAM = 0xABC0


class Result(enum.IntEnum):
    """The few results that the fake gives."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_FOUND = 500


OK = Result.CUDA_SUCCESS


class Location(ctypes.Structure):
    """As cuda.h of 12.8 has it: `typedef struct CUmemLocation_st {CUmemLocationType type; int id;}`."""

    _fields_ = (("type", ctypes.c_uint32), ("id", ctypes.c_int32))


class Attributes(ctypes.Structure):
    """As cuda.h of 12.8 has it, written down apart from the facade's."""

    _fields_ = (
        ("order", ctypes.c_uint32),
        ("source_hint", Location),
        ("destination_hint", Location),
        ("flags", ctypes.c_uint32),
    )


Addresses = ctypes.POINTER(ctypes.c_uint64)
Sizes = ctypes.POINTER(ctypes.c_size_t)

# `CUresult (*PFN_cuMemcpyBatchAsync_v12080)(CUdeviceptr_v2 *dsts, CUdeviceptr_v2 *srcs, size_t *sizes, size_t count,
#  CUmemcpyAttributes_v1 *attrs, size_t *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)`
BatchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    Addresses,
    Addresses,
    Sizes,
    ctypes.c_size_t,
    ctypes.POINTER(Attributes),
    Sizes,
    ctypes.c_size_t,
    Sizes,
    ctypes.c_void_p,
)


class FakeModule:
    """Stands in for `cuda.bindings.driver`: contexts by thread, registrations, and a batch that really copies."""

    CUresult = Result
    CUdevice_attribute = int

    def __init__(self, version: int = 13000, num_devices: int = 2) -> None:
        self.version = version
        self.num_devices = num_devices
        self.calls: list[tuple[str, ...]] = []
        self.retained: list[int] = []
        self.registered: dict[int, tuple[int, int]] = {}
        self.batches: list[SimpleNamespace] = []
        self.fail: tuple[int, int | None] | None = None
        self.thread = threading.local()
        self.function = BatchFunction(self._batch)

    def cuInit(self, flags: int) -> tuple[Result]:
        assert flags == 0
        return (OK,)

    def cuDriverGetVersion(self) -> tuple[Result, int]:
        return OK, self.version

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int | None]:
        return (OK, ordinal + 70) if ordinal < self.num_devices else (Result.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Result, int]:
        assert attribute == real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        return OK, int(device == 70)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, int]:
        self.retained.append(device - 70)
        return OK, 0x1000 + device

    def cuCtxGetCurrent(self) -> tuple[Result, int]:
        return OK, getattr(self.thread, "context", 0)

    def cuCtxGetDevice(self) -> tuple[Result, int]:
        return OK, self.thread.context & 0xFFF

    def cuCtxSetCurrent(self, context: int) -> tuple[Result]:
        self.thread.context = context
        return (OK,)

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Result]:
        if not getattr(self.thread, "context", 0):
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        if num_bytes > 1 << 20:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        self.registered[address] = (num_bytes, flags)
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Result]:
        if self.registered.pop(address, None) is None:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return (OK,)

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[Result, int | None, int | None]:
        assert symbol == b"cuMemcpyBatchAsync"
        assert flags == real.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        # What a driver of 13 gives for 13000 has one parameter less.
        assert version == 12080
        address = ctypes.cast(self.function, ctypes.c_void_p).value
        return OK, address, 0

    def cuGetErrorName(self, error: Result) -> tuple[Result, bytes]:
        assert isinstance(error, Result)
        return OK, error.name.encode()

    def cuGetErrorString(self, error: Result) -> tuple[Result, bytes]:
        assert isinstance(error, Result)
        return OK, error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    def _batch(self, destinations, sources, sizes, count, attributes, indices, num_attributes, fail_index, stream):
        """Called through C: a wrong order or a wrong layout reads something else here."""
        given = attributes[0]
        self.batches.append(
            SimpleNamespace(
                count=count,
                order=given.order,
                flags=given.flags,
                hints=[
                    given.source_hint.type,
                    given.source_hint.id,
                    given.destination_hint.type,
                    given.destination_hint.id,
                ],
                indices=[indices[place] for place in range(num_attributes)],
                stream=stream,
                fail_index=fail_index[0],
                thread=threading.current_thread(),
            )
        )
        for place in range(count):
            if self.fail is not None and place == (self.fail[1] or 0):
                code, at = self.fail
                if at is not None:
                    fail_index[0] = at
                return code
            ctypes.memmove(destinations[place], sources[place], sizes[place])
        return 0


@pytest.fixture
def module() -> FakeModule:
    return FakeModule()


@pytest.fixture
def driver(module: FakeModule) -> CudaDriver:
    return CudaDriver(module)


def addresses(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return offsets + tensor.data_ptr()


def a_batch(count: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory (kept alive by the caller), destinations in its second half, sources in its first, sizes."""
    memory = torch.arange(1, 2 * 8 * count + 1, dtype=torch.uint8)
    offsets = torch.arange(count) * 8
    return memory, addresses(memory, offsets + 8 * count), addresses(memory, offsets), torch.full((count,), 8)


def test_a_batch_moves_exactly_the_bytes_that_its_three_tensors_name(driver: CudaDriver, module: FakeModule) -> None:
    source = torch.randint(256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    destination = torch.full((4096,), 7, dtype=torch.uint8)
    sizes = torch.tensor([1, 17, 256, 1000])
    froms, tos = torch.tensor([3, 2000, 1024, 3000]), torch.tensor([4000, 0, 100, 1000])
    driver.memcpy_batch(addresses(destination, tos), addresses(source, froms), sizes, STREAM)
    expected = torch.full((4096,), 7, dtype=torch.uint8)
    for size, start, end in zip(sizes.tolist(), froms.tolist(), tos.tolist(), strict=True):
        expected[end : end + size] = source[start : start + size]
    assert torch.equal(destination, expected)
    (batch,) = module.batches
    assert (batch.count, batch.stream) == (4, STREAM)


def test_a_batch_reads_its_sources_in_stream_order_and_says_nothing_about_places(
    driver: CudaDriver, module: FakeModule
) -> None:
    memory, *batch = a_batch()
    driver.memcpy_batch(*batch, STREAM)
    (seen,) = module.batches
    assert seen.order == real.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert seen.hints == [0, 0, 0, 0]
    assert seen.indices == [0]
    assert seen.fail_index == 2**64 - 1
    assert torch.equal(memory[24:], memory[:24])


@pytest.mark.parametrize(
    ("overlap", "flag"),
    [
        (True, real.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE),
        (False, real.CUmemcpyFlags.CU_MEMCPY_FLAG_DEFAULT),
    ],
)
def test_a_batch_asks_for_the_copy_engines_unless_told_otherwise(
    driver: CudaDriver, module: FakeModule, overlap: bool, flag: int
) -> None:
    _memory, *batch = a_batch()
    driver.memcpy_batch(*batch, STREAM, overlap=overlap)
    driver.memcpy_batch(*batch, STREAM)
    assert [seen.flags for seen in module.batches] == [flag, 1]


def test_an_empty_batch_is_no_call(driver: CudaDriver, module: FakeModule) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    driver.memcpy_batch(empty, empty, empty, STREAM)
    assert module.batches == []


def test_batches_of_several_threads_do_not_disturb_each_other(driver: CudaDriver, module: FakeModule) -> None:
    results: list[bool] = []

    def copy() -> None:
        for _ in range(50):
            memory, *batch = a_batch(5)
            driver.memcpy_batch(*batch, STREAM)
            results.append(torch.equal(memory[40:], memory[:40]))

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200
    assert len({seen.thread for seen in module.batches}) == 4


def test_a_refused_batch_names_the_error_the_copy_and_its_addresses(driver: CudaDriver, module: FakeModule) -> None:
    _memory, destinations, sources, sizes = a_batch()
    module.fail = (1, 2)
    with pytest.raises(DriverError) as caught:
        driver.memcpy_batch(destinations, sources, sizes, STREAM)
    assert (caught.value.code, caught.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
    for part in ("CUDA_ERROR_INVALID_VALUE (invalid value)", "3 copies", "copy 2", "8 bytes"):
        assert part in str(caught.value)
    assert f"from {int(sources[2]):#x} to {int(destinations[2]):#x}" in str(caught.value)


def test_a_refused_batch_names_no_copy_where_the_driver_does_not(driver: CudaDriver, module: FakeModule) -> None:
    _memory, *batch = a_batch()
    module.fail = (2, None)
    with pytest.raises(DriverError, match=r"of 3 copies failed: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.memcpy_batch(*batch, STREAM)


def test_an_error_that_cuda_bindings_does_not_know_keeps_its_number(driver: CudaDriver, module: FakeModule) -> None:
    _memory, *batch = a_batch()
    module.fail = (987, None)
    with pytest.raises(DriverError, match="CUDA_ERROR_987") as caught:
        driver.memcpy_batch(*batch, STREAM)
    assert caught.value.code == 987


def change(place: int, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    def apply(batch: list[torch.Tensor]) -> None:
        batch[place] = new(batch[place])

    return apply


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (change(0, lambda t: t.to(torch.int32)), TypeError, "destinations must be int64"),
        (change(1, lambda t: t.to(torch.float64)), TypeError, "sources must be int64"),
        (change(2, lambda t: t.to("meta")), ValueError, "sizes must be in host memory"),
        (change(0, lambda t: t.repeat_interleave(2)[::2]), ValueError, "destinations must be flat and contiguous"),
        (change(1, lambda t: t.reshape(1, -1)), ValueError, "sources must be flat and contiguous"),
        (change(1, lambda t: t[:-1]), ValueError, "3 destinations, 2 sources, 3 sizes"),
        (change(2, lambda t: t[:-1]), ValueError, "3 destinations, 3 sources, 2 sizes"),
        (change(2, lambda t: t * torch.tensor([1, 0, 1])), ValueError, r"sizes\[1\] is 0"),
        (change(2, lambda t: t * torch.tensor([1, 1, -1])), ValueError, r"sizes\[2\] is -8"),
    ],
)
def test_a_batch_that_the_driver_would_misread_is_refused_at_the_door(
    driver: CudaDriver,
    module: FakeModule,
    spoil: Callable[[list[torch.Tensor]], None],
    error: type[Exception],
    message: str,
) -> None:
    _memory, *batch = a_batch()
    spoil(batch)
    with pytest.raises(error, match=message):
        driver.memcpy_batch(*batch, STREAM)
    assert module.batches == []


@pytest.mark.parametrize("stream", [0, 1])
def test_the_null_stream_is_refused_at_the_door(driver: CudaDriver, module: FakeModule, stream: int) -> None:
    _memory, *batch = a_batch()
    with pytest.raises(ValueError, match=f"stream {stream} is the NULL stream"):
        driver.memcpy_batch(*batch, stream)
    assert module.batches == []


def test_a_driver_older_than_12_8_has_no_batch_and_says_its_version() -> None:
    old = CudaDriver(FakeModule(version=12040))
    assert not old.has_memcpy_batch
    assert old.memcpy_batch_reason is not None
    assert "12.4" in old.memcpy_batch_reason
    _memory, *batch = a_batch()
    with pytest.raises(DriverError, match=r"CUDA 12\.4.*12\.8") as caught:
        old.memcpy_batch(*batch, STREAM)
    assert caught.value.code == real.CUresult.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("answer", [(Result.CUDA_ERROR_NOT_FOUND, None, None), (OK, 0, 1)])
def test_a_driver_that_does_not_give_the_function_has_no_batch_and_says_why(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, answer: tuple[Result, int | None, int | None]
) -> None:
    monkeypatch.setattr(module, "cuGetProcAddress", lambda symbol, version, flags: answer)
    driver = CudaDriver(module)
    assert not driver.has_memcpy_batch
    assert driver.memcpy_batch_reason is not None
    assert "CUDA 13.0" in driver.memcpy_batch_reason


def test_a_new_driver_has_a_batch_and_no_reason(driver: CudaDriver) -> None:
    assert driver.has_memcpy_batch
    assert driver.memcpy_batch_reason is None
    assert driver.version == 13000


def test_a_thread_without_a_context_gets_the_devices_primary_one_retained_once(
    driver: CudaDriver, module: FakeModule
) -> None:
    seen: list[int] = []

    def work() -> None:
        driver.make_current(1)
        driver.make_current(1)
        seen.append(module.thread.context)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0x1000 + 71] * 3
    assert module.retained == [1]
    assert module.cuCtxGetCurrent() == (OK, 0), "this thread asked for nothing"


def test_a_context_of_the_device_that_is_current_stays(driver: CudaDriver, module: FakeModule) -> None:
    module.thread.context = 0x5000 + 71
    driver.make_current(1)
    assert module.thread.context == 0x5000 + 71
    assert module.retained == []


def test_another_devices_context_gives_way(driver: CudaDriver, module: FakeModule) -> None:
    driver.make_current(0)
    driver.make_current(1)
    assert module.thread.context == 0x1000 + 71
    driver.make_current(0)
    assert module.thread.context == 0x1000 + 70
    assert module.retained == [0, 1]


@pytest.mark.parametrize("before", [0, 0x5000 + 70, 0x5000 + 71])
def test_after_a_block_the_thread_has_the_context_that_it_had(
    driver: CudaDriver, module: FakeModule, before: int
) -> None:
    module.thread.context = before
    with pytest.raises(KeyError), driver.current(1):  # noqa: PT012 - the block's own error passes through
        assert module.cuCtxGetDevice() == (OK, 71)
        raise KeyError
    assert module.thread.context == before


def test_a_device_that_does_not_exist_is_named(driver: CudaDriver) -> None:
    with pytest.raises(DriverError, match="device 5 failed: CUDA_ERROR_INVALID_DEVICE") as caught:
        driver.make_current(5)
    assert (caught.value.code, caught.value.name) == (101, "CUDA_ERROR_INVALID_DEVICE")


def test_memory_is_registered_for_every_context_and_for_kernels(driver: CudaDriver, module: FakeModule) -> None:
    with driver.current(0):
        driver.register(0x7000, 4096)
        assert module.registered == {
            0x7000: (4096, real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP)
        }
        driver.unregister(0x7000)
    assert module.registered == {}


def test_a_refused_registration_names_the_error_and_the_memory(driver: CudaDriver) -> None:
    driver.make_current(0)
    with pytest.raises(DriverError, match=r"2097152 bytes at 0x7000 failed: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        driver.register(0x7000, 2 << 20)
    assert (caught.value.code, caught.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match=r"at 0x7000 failed: CUDA_ERROR_INVALID_VALUE"):
        driver.unregister(0x7000)


def test_a_device_says_whether_it_takes_host_addresses(driver: CudaDriver) -> None:
    assert driver.uses_host_addresses(0)
    assert not driver.uses_host_addresses(1)


def test_a_missing_driver_library_is_a_driver_error_that_says_what_to_install(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(flags: int) -> tuple[Result]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(module, "cuInit", no_library)
    with pytest.raises(DriverError, match=r"libcuda.so.1; install NVIDIA's display driver") as caught:
        CudaDriver(module)
    assert caught.value.code == NO_DRIVER
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_driver_that_finds_no_device_keeps_cudas_own_error(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cuInit", lambda flags: (Result.CUDA_ERROR_INVALID_DEVICE,))
    with pytest.raises(DriverError, match="cuInit failed") as caught:
        CudaDriver(module)
    assert caught.value.code == 101


def test_without_cuda_bindings_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match=r"pip install kvsluice\[gpu\]") as caught:
        open_driver()
    assert caught.value.code == NO_DRIVER


def in_new_process(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


def test_importing_the_facade_imports_nothing_of_cuda() -> None:
    script = """
import sys, torch
before = set(sys.modules)
import kvsluice.kernels.driver
print([name for name in set(sys.modules) - before if name.split(".")[0] in ("cuda", "pynvml", "triton")])
"""
    assert in_new_process(script).strip() == "[]"


def test_the_driver_is_opened_once_for_a_process_and_only_success_is_kept() -> None:
    script = """
import sys
sys.modules["cuda.bindings.driver"] = None
from kvsluice.kernels import driver
try:
    driver.open_driver()
except driver.DriverError as error:
    print(error.code)
class Module:
    opened = 0
    def cuInit(self, flags):
        Module.opened += 1
        return (0,)
    def cuDriverGetVersion(self):
        return 0, 12040
sys.modules["cuda.bindings.driver"] = Module()
print(driver.open_driver() is driver.open_driver(), Module.opened)
"""
    assert in_new_process(script).split() == [str(NO_DRIVER), "True", "1"]


def test_on_this_machine_the_real_driver_opens_or_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        opened = open_driver()
        assert opened.version >= 12000
        assert opened.has_memcpy_batch == (opened.version >= 12080)
    else:
        with pytest.raises(DriverError) as caught:
            open_driver()
        assert caught.value.code == NO_DRIVER or caught.value.name.startswith("CUDA_ERROR_")


def calls_of(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if name.startswith("cu")]


@pytest.mark.parametrize("name", calls_of(DriverModule))
def test_cuda_bindings_has_each_call_with_the_parameters_that_are_passed(name: str) -> None:
    ours = inspect.signature(getattr(DriverModule, name)).parameters
    theirs = inspect.signature(getattr(real, name)).parameters
    assert list(theirs) == [parameter for parameter in ours if parameter != "self"]


def test_all_calls_of_the_fake_and_of_the_protocol_are_the_same() -> None:
    fakes = {name for name in vars(FakeModule) if name.startswith("cu")}
    assert fakes == set(calls_of(DriverModule))
    assert len(fakes) == 13


def test_cuda_bindings_turns_numbers_into_results_and_refuses_unknown_ones() -> None:
    assert real.CUresult(1) == real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ValueError, match="123456"):
        real.CUresult(123456)
    assert int(real.CUdevice_attribute(91)) == (
        real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    )
    assert int(real.CUcontext(0)) == 0


def test_the_attributes_have_the_layout_of_cudas_own_struct() -> None:
    theirs = real.CUmemcpyAttributes()
    theirs.srcAccessOrder = real.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    theirs.flags = 0x01020304
    hints: dict[str, tuple[int, int]] = {}
    for name, kind, number in (("srcLocHint", "DEVICE", 5), ("dstLocHint", "HOST_NUMA", 6)):
        location = real.CUmemLocation()
        location.type = getattr(real.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind}")
        location.id = number
        setattr(theirs, name, location)
        hints[name] = (int(location.type), number)
    ours = MemcpyAttributes(srcAccessOrder=3, flags=0x01020304, **hints)
    assert ctypes.sizeof(MemcpyAttributes) == ctypes.sizeof(Attributes) == 24
    assert bytes(ours) == ctypes.string_at(int(theirs.getPtr()), 24)
