"""torch's operators stay on the thread that calls them, and no other thread notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvsluice.kernels import openmp
from kvsluice.kernels.openmp import one_openmp_thread


def on_a_thread_of_two(act: Callable[[], object]) -> object:
    """What `act` gives on a new thread for which torch would use two, whatever the machine has."""

    def prepared() -> object:
        limit = openmp.openmp_limit()
        assert limit is not None
        limit(2)
        assert torch.get_num_threads() == 2
        return act()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(prepared).result()


def test_limiting_touches_the_calling_thread_only_and_is_undone() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def act() -> None:
        with one_openmp_thread() as limited:
            assert limited
            assert torch.get_num_threads() == 1
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert torch.get_num_threads() == 2

    on_a_thread_of_two(act)
    assert seen == [before]
    assert torch.get_num_threads() == before


def test_the_limit_is_undone_when_the_body_raises() -> None:
    def act() -> int:
        with pytest.raises(ZeroDivisionError), one_openmp_thread():
            raise ZeroDivisionError
        return torch.get_num_threads()

    assert on_a_thread_of_two(act) == 2


def test_a_limit_within_a_limit_leaves_the_outer_one() -> None:
    def act() -> list[int]:
        with one_openmp_thread():
            with one_openmp_thread() as limited:
                assert limited
            inside = torch.get_num_threads()
        return [inside, torch.get_num_threads()]

    assert on_a_thread_of_two(act) == [1, 2]


def test_a_runtime_that_cannot_be_limited_is_told_unless_it_uses_one_thread_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act() -> list[bool]:
        with one_openmp_thread(), monkeypatch.context() as patch:
            patch.setattr(openmp, "openmp_limit", lambda: None)
            with one_openmp_thread() as alone:
                pass
        with monkeypatch.context() as patch:
            patch.setattr(openmp, "openmp_limit", lambda: None)
            with one_openmp_thread() as among_others:
                assert torch.get_num_threads() == 2
        return [alone, among_others]

    assert on_a_thread_of_two(act) == [True, False]
