"""What goes wrong on the way between pages and host memory."""

from __future__ import annotations

__all__ = ["DeviceCopyError"]


class DeviceCopyError(RuntimeError):
    """A way of copying that was asked for cannot be had, or the device refused it; the message says which and why."""
