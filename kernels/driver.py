"""The few calls of CUDA's driver that are made here, typed, with errors that say what failed on what.

The driver's API and not torch's view of the runtime (`torch.cuda.cudart()`): a refused
`cudaHostRegister` stays behind as the runtime's last error, and the next kernel that torch launches
would raise it although nothing is wrong with that kernel. The driver keeps no such error.

`cuda.bindings` is imported by `open_driver` and nowhere else.
"""

# ruff: noqa: N802, N803 - the protocols have the names that CUDA gave

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Final, Protocol, SupportsInt, cast

import torch

from kvsluice.kernels.errors import DeviceCopyError

__all__ = [
    "NO_DRIVER",
    "CudaDriver",
    "DriverError",
    "DriverModule",
    "MemcpyAttributes",
    "open_driver",
    "relax_stream_capture",
]

NO_DRIVER: Final = -1
"""`DriverError.code` where there is no driver to ask: CUDA's own codes are not negative."""

_SUCCESS: Final = 0
_NOT_SUPPORTED: Final = 801

_REGISTER_FLAGS: Final = 0x01 | 0x02
"""PORTABLE: pinned for every context of the process, so that it does not matter which one registered it.
DEVICEMAP: kernels may address it. Both are what `cudaHostRegisterDefault` means where host and device
share one address space; the driver's API implies neither."""

_HOST_POINTER_ATTRIBUTE: Final = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""

_BATCH_ABI: Final = 12080
"""The ABI of cuMemcpyBatchAsync that is asked for, with `failIdx`. CUDA 13's headers name another one
(v13000, without it), but a driver gives out every older ABI to those who ask for its version."""

_LEGACY_STREAM: Final = 1
"""As a flag of cuGetProcAddress: no per-thread variant. As a stream: the explicit name of the NULL stream."""

_ORDER_STREAM: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM. ANY (3) would let the device read a page before the work that writes
it is done: events and stream waits then order only the writing side of the copy."""

_CAPTURE_MODE_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

_PREFER_OVERLAP: Final = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class DriverError(DeviceCopyError):
    """A call of the driver that failed, or no driver at all.

    Attributes:
        code: CUDA's number of the error, `NO_DRIVER` where there is no driver.
        name: CUDA's name of it, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    """

    def __init__(self, message: str, *, code: int, name: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class DriverModule(Protocol):
    """What is used of the module `cuda.bindings.driver`: each call gives its CUresult first, then its results.

    The parameters are named as cuda-bindings names them; all are passed by position.
    """

    def CUresult(self, value: int, /) -> SupportsInt: ...

    def CUdevice_attribute(self, value: int, /) -> SupportsInt: ...

    def cuInit(self, Flags: int, /) -> tuple[SupportsInt]: ...

    def cuDriverGetVersion(self) -> tuple[SupportsInt, int]: ...

    def cuDeviceGet(self, ordinal: int, /) -> tuple[SupportsInt, SupportsInt]: ...

    def cuDeviceGetAttribute(self, attrib: SupportsInt, dev: SupportsInt, /) -> tuple[SupportsInt, int]: ...

    def cuDevicePrimaryCtxRetain(self, dev: SupportsInt, /) -> tuple[SupportsInt, SupportsInt]: ...

    def cuCtxGetCurrent(self) -> tuple[SupportsInt, SupportsInt]: ...

    def cuCtxGetDevice(self) -> tuple[SupportsInt, SupportsInt]: ...

    def cuCtxSetCurrent(self, ctx: SupportsInt, /) -> tuple[SupportsInt]: ...

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int, /) -> tuple[SupportsInt]: ...

    def cuMemHostUnregister(self, p: int, /) -> tuple[SupportsInt]: ...

    def cuGetProcAddress(
        self, symbol: bytes, cudaVersion: int, flags: int, /
    ) -> tuple[SupportsInt, int | None, SupportsInt | None]: ...

    def cuGetErrorName(self, error: SupportsInt, /) -> tuple[SupportsInt, bytes | None]: ...

    def cuGetErrorString(self, error: SupportsInt, /) -> tuple[SupportsInt, bytes | None]: ...


class _MemLocation(ctypes.Structure):
    """CUmemLocation_v1; all zero is "no location"."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes_v1: 24 bytes in the headers of CUDA 12.8 to 13.5."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _MemLocation),
        ("dstLocHint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


# PFN_cuMemcpyBatchAsync_v12080. Calls through CFUNCTYPE let go of the GIL.
_MemcpyBatch = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # CUdeviceptr *dsts
    ctypes.c_void_p,  # CUdeviceptr *srcs
    ctypes.c_void_p,  # size_t *sizes
    ctypes.c_size_t,  # size_t count
    ctypes.POINTER(MemcpyAttributes),  # CUmemcpyAttributes *attrs
    ctypes.POINTER(ctypes.c_size_t),  # size_t *attrsIdxs
    ctypes.c_size_t,  # size_t numAttrs
    ctypes.POINTER(ctypes.c_size_t),  # size_t *failIdx
    ctypes.c_void_p,  # CUstream hStream
)


class CudaDriver:
    """CUDA's driver in this process. Thread-safe; one for each process, see `open_driver`.

    Args:
        module: `cuda.bindings.driver`, or what stands in for it.

    Attributes:
        version: of CUDA that the driver was made for, 12080 for 12.8.
        has_memcpy_batch: whether `memcpy_batch` can be called.
        memcpy_batch_reason: why not; None where it can.

    Raises:
        DriverError: the driver's library is missing or finds no device.
    """

    def __init__(self, module: DriverModule) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._retained: dict[int, SupportsInt] = {}
        try:
            self._check("cuInit", *module.cuInit(0))
        except DriverError:
            raise
        except RuntimeError as error:
            # cuda-bindings looks for libcuda at the first call, and raises this where it is not found.
            raise DriverError(
                f"CUDA's driver library cannot be loaded: {error}; install NVIDIA's display driver on this machine",
                code=NO_DRIVER,
                name="no driver library",
            ) from error
        status, self.version = module.cuDriverGetVersion()
        self._check("cuDriverGetVersion", status)
        # Nothing writes to these three, so all calls share them.
        self._attributes = {
            overlap: MemcpyAttributes(srcAccessOrder=_ORDER_STREAM, flags=_PREFER_OVERLAP if overlap else 0)
            for overlap in (False, True)
        }
        self._first_index = ctypes.c_size_t(0)
        address, self.memcpy_batch_reason = self._find_memcpy_batch()
        self._memcpy_batch = _MemcpyBatch(address) if address else None
        self.has_memcpy_batch = self._memcpy_batch is not None

    def make_current(self, ordinal: int) -> None:
        """Have a context of this device current on the calling thread from here on: the primary one if there is none.

        A context of the device that is current already stays. The primary context is retained once
        for each device and never released: it lives as long as the process, like torch's own use of it.

        Args:
            ordinal: the device's number as torch counts, after CUDA_VISIBLE_DEVICES.

        Raises:
            DriverError: no such device, or no room for its context.
        """
        self._switch(ordinal)

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """The same for the length of a block: an engine's thread gets back what it had.

        torch takes its current device from the current context, so a change that stays would move
        the engine to another device.

        Raises:
            DriverError: as `make_current`.
        """
        previous = self._switch(ordinal)
        try:
            yield
        finally:
            if previous is not None:
                self._check("cuCtxSetCurrent", *self._module.cuCtxSetCurrent(previous))

    def register(self, address: int, num_bytes: int) -> None:
        """Pin `num_bytes` of host memory from `address` on for every device. Needs a current context.

        Raises:
            DriverError: it was refused; nothing of it is pinned.
        """
        status = self._module.cuMemHostRegister(address, num_bytes, _REGISTER_FLAGS)
        self._check(f"cuMemHostRegister of {num_bytes} bytes at {address:#x}", *status)

    def unregister(self, address: int) -> None:
        """Undo the `register` that began at `address`. Needs a current context.

        Raises:
            DriverError: it was refused.
        """
        self._check(f"cuMemHostUnregister at {address:#x}", *self._module.cuMemHostUnregister(address))

    def uses_host_addresses(self, ordinal: int) -> bool:
        """Whether kernels and batches on this device may be given registered memory's host address.

        Where they may not (WSL 2), a batch that is given one fails later and for good, with an illegal address.

        Raises:
            DriverError: no such device.
        """
        attribute = self._module.CUdevice_attribute(_HOST_POINTER_ATTRIBUTE)
        status, value = self._module.cuDeviceGetAttribute(attribute, self._device(ordinal))
        self._check("cuDeviceGetAttribute", status)
        return bool(value)

    def memcpy_batch(
        self,
        destinations: torch.Tensor,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        stream: int,
        *,
        overlap: bool = True,
    ) -> None:
        """Queue many copies, between host and device or within one, with one call; they run in any order.

        The three tensors are read before this returns. Needs a current context, and memory that is
        registered where the copies shall not hold the caller. No copy may cross the end of a
        registration, read what another of the batch writes, or write what another writes.

        Args:
            destinations, sources: addresses, int64 (n,), contiguous, in host memory.
            sizes: bytes, likewise, each at least 1.
            stream: the handle of a stream other than the NULL stream, which the driver does not take.
            overlap: ask for the copy engines and leave the multiprocessors to the model. A hint: since CUDA
                13.1 the driver may else copy with kernels, which is faster where the link is faster than
                one copy engine (NVLink-C2C), not over PCIe.

        Raises:
            TypeError: a dtype other than int64.
            ValueError: unlike lengths, a tensor that is not flat in host memory, a size below 1, the NULL stream.
            DriverError: the driver refused, with the copy's number and addresses where it says which; or it
                is older than CUDA 12.8. May also be the error of work that was queued before.
        """
        count = _check_batch(destinations, sources, sizes, stream)
        if self._memcpy_batch is None:
            raise DriverError(f"{self.memcpy_batch_reason}", code=_NOT_SUPPORTED, name="CUDA_ERROR_NOT_SUPPORTED")
        if not count:
            return  # the driver wants at least as many copies as attributes
        fail_index = ctypes.c_size_t(-1)
        code: int = self._memcpy_batch(
            destinations.data_ptr(),
            sources.data_ptr(),
            sizes.data_ptr(),
            count,
            ctypes.byref(self._attributes[overlap]),
            ctypes.byref(self._first_index),
            1,
            ctypes.byref(fail_index),
            stream,
        )
        if code == _SUCCESS:
            return
        where = f"cuMemcpyBatchAsync of {count} copies"
        if fail_index.value < count:
            at = fail_index.value
            where += f", at copy {at}: {int(sizes[at])} bytes from {int(sources[at]):#x} to {int(destinations[at]):#x}"
        raise self._error(where, code)

    def _switch(self, ordinal: int) -> SupportsInt | None:
        """Make a context of the device current; the one that was current before, None where it still is."""
        device = self._device(ordinal)
        status, previous = self._module.cuCtxGetCurrent()
        self._check("cuCtxGetCurrent", status)
        if int(previous):
            status, current_device = self._module.cuCtxGetDevice()
            self._check("cuCtxGetDevice", status)
            if int(current_device) == int(device):
                return None
        with self._lock:
            context = self._retained.get(ordinal)
            if context is None:
                status, context = self._module.cuDevicePrimaryCtxRetain(device)
                self._check(f"cuDevicePrimaryCtxRetain of device {ordinal}", status)
                self._retained[ordinal] = context
        self._check("cuCtxSetCurrent", *self._module.cuCtxSetCurrent(context))
        return previous

    def _device(self, ordinal: int) -> SupportsInt:
        status, device = self._module.cuDeviceGet(ordinal)
        self._check(f"cuDeviceGet of device {ordinal}", status)
        return device

    def _find_memcpy_batch(self) -> tuple[int, str | None]:
        """The function's address, or 0 and why there is none."""
        version = f"{self.version // 1000}.{self.version % 1000 // 10}"
        if self.version < _BATCH_ABI:
            return 0, f"the driver is of CUDA {version}, cuMemcpyBatchAsync needs 12.8 or newer"
        status, address, _ = self._module.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_ABI, _LEGACY_STREAM)
        if int(status) != _SUCCESS:
            return (
                0,
                f"the driver, of CUDA {version}, does not give cuMemcpyBatchAsync: {self._describe(int(status))[1]}",
            )
        if not address:
            return 0, f"no cuMemcpyBatchAsync of 12.8 from the driver, of CUDA {version}"
        return address, None

    def _check(self, what: str, status: SupportsInt) -> None:
        if int(status) != _SUCCESS:
            raise self._error(what, int(status))

    def _error(self, what: str, code: int) -> DriverError:
        name, text = self._describe(code)
        return DriverError(f"{what} failed: {text}", code=code, name=name)

    def _describe(self, code: int) -> tuple[str, str]:
        """CUDA's name of an error, and the name with its explanation."""
        try:
            result = self._module.CUresult(code)
        except ValueError:
            # An error that is younger than the installed cuda-bindings.
            name = f"CUDA_ERROR_{code}"
            return name, name
        name = (self._module.cuGetErrorName(result)[1] or b"CUDA_ERROR_UNKNOWN").decode()
        text = self._module.cuGetErrorString(result)[1]
        return name, f"{name} ({text.decode()})" if text else name


def relax_stream_capture() -> None:
    """Let the calling thread query events and allocate while another thread captures a CUDA graph.

    In the mode that a thread starts with (global) such a call of any thread ends a capture of torch's default kind
    (global, too), in an error for both. This thread's own work is part of no capture. Needs a current context.

    Raises:
        DriverError: the driver refused, or there is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        exchange = library.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        raise DriverError(
            f"cuThreadExchangeStreamCaptureMode cannot be called: {error}", code=NO_DRIVER, name="no driver library"
        ) from error
    exchange.argtypes, exchange.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    code = exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
    if code != _SUCCESS:
        raise DriverError(
            f"cuThreadExchangeStreamCaptureMode failed: CUDA error {code}", code=code, name=f"error {code}"
        )


def _check_batch(destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, stream: int) -> int:
    """The door of `memcpy_batch`; the number of copies."""
    for name, tensor in (("destinations", destinations), ("sources", sources), ("sizes", sizes)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} must be in host memory, got a tensor on {tensor.device}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be flat and contiguous, got {tuple(tensor.shape)} {tensor.stride()}")
    count = sizes.shape[0]
    if destinations.shape[0] != count or sources.shape[0] != count:
        raise ValueError(
            f"unlike lengths: {destinations.shape[0]} destinations, {sources.shape[0]} sources, {count} sizes"
        )
    if stream in (0, _LEGACY_STREAM):
        raise ValueError(f"stream {stream} is the NULL stream, which cuMemcpyBatchAsync does not take")
    if count and int(sizes.min()) < 1:
        at = int(sizes.argmin())
        raise ValueError(f"sizes[{at}] is {int(sizes[at])}, a copy has at least 1 byte")
    return count


_opening = threading.Lock()


@functools.cache
def _open() -> CudaDriver:
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"cuda-bindings cannot be imported ({error}): pip install kvsluice[gpu]",
            code=NO_DRIVER,
            name="no cuda-bindings",
        ) from error
    return CudaDriver(cast("DriverModule", module))


def open_driver() -> CudaDriver:
    """The process's one `CudaDriver`. Thread-safe. A failure is not kept: the next call tries again.

    Raises:
        DriverError: cuda-bindings is not installed, the driver's library is missing, or no device is found.
    """
    # The cache alone would let two first callers make two, and retain each context twice.
    with _opening:
        return _open()
