"""How long an engine's steps take to prefill, seen from its scheduler.

A scheduler knows when it has made a step and when the step's output is in. It may make the next one
before that, so that two steps overlap; the engine computes them one after the other all the same:

    made     1   2        3              4
    output           1        2     3              4
    counted  |-- 1 --|-- 2 ---|- 3 -|    |--- 4 ---|     idle between 3 and 4: nobody's time
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["PrefillMeter"]

MAX_STEPS: Final = 64
"""Steps whose output may be out; engines have as many as they have pipeline stages, or two."""


class PrefillMeter:
    """Not thread-safe: the scheduler's alone.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._out: deque[tuple[int, float, int]] = deque(maxlen=MAX_STEPS)
        self._ended_s = clock()

    def made(self, step: int, num_tokens: int) -> None:
        """A step was made that computes `num_tokens` tokens of prompts; steps are numbered upwards."""
        self._out.append((step, self._clock(), num_tokens))

    def output(self, step: int) -> tuple[int, float] | None:
        """A step's output is in.

        Returns:
            Its prompt tokens and the seconds of the engine's time that they took; None where it had
            none, or where the output of a step before it never came, so that nobody knows.
        """
        now_s = self._clock()
        before_s, self._ended_s = self._ended_s, now_s
        alone = True
        while self._out and self._out[0][0] <= step:
            number, made_s, num_tokens = self._out.popleft()
            if number == step:
                return (num_tokens, now_s - max(made_s, before_s)) if alone and num_tokens else None
            alone = False
        return None
