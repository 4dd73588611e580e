"""Keeping torch's operators on the thread that calls them.

torch spreads an operator over OpenMP threads, and OpenMP gives every calling thread a team of its
own: a copy on a background thread would fight the engine's compute threads for the cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

__all__ = ["one_openmp_thread", "openmp_limit"]


@cache
def openmp_limit() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the runtime that torch uses; None where torch does not obey it.

    It sets the calling thread's own limit, where `torch.set_num_threads` would change the limit of
    every thread started later. The process' global scope is asked first, as the loader does for
    torch itself: a preloaded runtime takes the bundled one's place.
    """
    before = torch.get_num_threads()
    for library in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            # It does nothing that another thread of the interpreter would have to be let in for.
            limit = ctypes.PyDLL(None if library is None else str(library)).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        limit.argtypes, limit.restype = [ctypes.c_int], None
        limit(before + 1)
        obeyed = torch.get_num_threads() == before + 1
        limit(before)
        if obeyed:
            return limit
    return None


class one_openmp_thread:  # noqa: N801 - used as a function is
    """Keep torch's operators on the calling thread; entering says whether that can be done here.

    Other threads are not affected, and the thread's own limit is restored at the end. Costs next to nothing on a
    thread that has the limit already.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> bool:
        self._before = torch.get_num_threads()
        if self._before == 1:
            return True
        limit = openmp_limit()
        if limit is None:
            return False
        limit(1)
        return True

    def __exit__(self, *_: object) -> None:
        if self._before != 1 and (limit := openmp_limit()) is not None:
            limit(self._before)
