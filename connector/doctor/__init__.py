"""What stands in the way of offloading on this machine: sections of findings, each with what to do about it.

`device_path` is the way between a GPU and host memory.
"""

from __future__ import annotations

from kvsluice.connector.doctor.device_path import DevicePath, examine_device_path
from kvsluice.connector.doctor.machine import Machine
from kvsluice.connector.doctor.pages import Pages
from kvsluice.connector.doctor.report import Finding, Level, Report, Section
from kvsluice.connector.doctor.seen import Wanted

__all__ = ["DevicePath", "Finding", "Level", "Machine", "Pages", "Report", "Section", "Wanted", "examine_device_path"]
