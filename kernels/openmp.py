"""Keeping torch's operators on the thread that calls them.

torch spreads an operator over OpenMP threads, and OpenMP gives every calling thread a team of its
own: a copy on a background thread would fight the engine's compute threads for the cores.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

__all__ = ["one_openmp_thread"]


@cache
def _openmp_limit() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the runtime that torch uses; None where torch does not obey it.

    It sets the calling thread's own limit, where `torch.set_num_threads` would change the limit of
    every thread started later. The process' global scope is asked first, as the loader does for
    torch itself: a preloaded runtime takes the bundled one's place.
    """
    before = torch.get_num_threads()
    for library in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            limit = ctypes.CDLL(None if library is None else str(library)).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        limit.argtypes, limit.restype = [ctypes.c_int], None
        limit(before + 1)
        obeyed = torch.get_num_threads() == before + 1
        limit(before)
        if obeyed:
            return limit
    return None


@contextlib.contextmanager
def one_openmp_thread() -> Iterator[bool]:
    """Keep torch's operators on the calling thread; yields whether that can be done here.

    Other threads are not affected, and the thread's own limit is restored at the end.
    """
    limit = _openmp_limit()
    if limit is None:
        yield False
        return
    before = torch.get_num_threads()
    limit(1)
    try:
        yield True
    finally:
        limit(before)
