"""Kernels run on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # Triton reads this when a kernel is defined, and for its own functions when it is imported.
    if "triton" in sys.modules:
        raise RuntimeError(
            "Triton was imported before TRITON_INTERPRET=1 was set: its kernels cannot run without a GPU"
        )
    os.environ["TRITON_INTERPRET"] = "1"
