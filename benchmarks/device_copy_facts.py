"""What this machine is, as far as it bears on copies between device and host memory.

    python benchmarks/device_copy_facts.py [--device cuda|cpu]

Exits 2, with one line, where there is no CUDA device to ask about.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvsluice.connector.region import LinuxNuma
from kvsluice.kernels.driver import DriverError, open_driver
from kvsluice.kernels.gpu import gpu_facts

__all__ = ["clock_mhz", "device_named", "facts_of", "no_device_line"]

_PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-ml-py", "numpy", "safetensors", "pydantic", "xxhash")
_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET")


def no_device_line() -> str | None:
    """Why nothing can be measured on a GPU here; None where it can."""
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds none"
    return None


def device_named(name: str) -> torch.device:
    """The current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def clock_mhz(device: torch.device) -> int | None:
    """Of the multiprocessors, over the driver's last sample; None where it does not say."""
    try:
        return torch.cuda.clock_rate(device)
    except (ModuleNotFoundError, RuntimeError):  # no pynvml, or one that does not know the device
        return None


def facts_of(device: torch.device) -> dict[str, object]:
    """Facts by name, ready for JSON."""
    facts: dict[str, object] = {
        "host": f"{_cpu_name()}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} of them ours",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "NUMA nodes with memory": sorted(LinuxNuma().nodes()),
        "memory lock limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "transparent huge pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "IOMMU groups": _entries(Path("/sys/kernel/iommu_groups")),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = gpu_facts(device)
        facts |= {name: value for name, value in asdict(gpu).items() if value is not None}
        facts |= {
            "L2 bytes": getattr(properties, "L2_cache_size", None),
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA of torch": torch.version.cuda,
            "link, GB/s each way at most": None if gpu.pcie_max_bytes_per_s is None else gpu.pcie_max_bytes_per_s / 1e9,
            **_driver_facts(device),
        }
    return facts


def _driver_facts(device: torch.device) -> dict[str, object]:
    try:
        driver = open_driver()
        driver.make_current(device.index or 0)
        return {
            "driver's CUDA": driver.version,
            "batched copy": driver.memcpy_batch_reason or "yes",
            "device uses host addresses": driver.uses_host_addresses(device.index or 0),
        }
    except DriverError as error:
        return {"driver": f"{error.name}: {error}"}


def _cpu_name() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _entries(path: Path) -> int | None:
    try:
        return len(list(path.iterdir()))
    except OSError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one fact a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (line := no_device_line()) is not None:
        print(line, file=sys.stderr)
        return 2
    for name, value in facts_of(device_named(options.device)).items():
        if value not in (None, (), {}):
            print(f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
