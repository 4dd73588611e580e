"""The examples are scripts beside each other: their folder has to be on the path, as when one is run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only lose by being shared out, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
