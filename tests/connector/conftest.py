"""Machines for the doctor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_machine import CPU_BUILD, GpuMachine

from kvsluice.connector.doctor import Machine


@pytest.fixture
def there() -> GpuMachine:
    return GpuMachine()


@pytest.fixture
def no_gpu() -> Machine:
    machine = replace(Machine.this(), torch_build=lambda: CPU_BUILD, gpus_in_sight=lambda: ())
    return replace(machine, package_version=lambda name: None)
