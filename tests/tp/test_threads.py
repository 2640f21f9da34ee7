"""Ranks on a CPU share its cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import rank_runners
import torch

from dovetail.core.compose import Composition, compose
from dovetail.core.interfaces import StepPlan
from dovetail.core.parallel.failure import RankError

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores, in a process with more threads than that."""
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def composition() -> Composition:
    return compose(["app=generate", "executor=multiproc", "engine.tp=2", "engine.device=cpu"])


def threads_of_ranks() -> tuple[int, ...]:
    executor = rank_runners.executor(rank_runners.Threads, composition())
    try:
        executor.start(lambda phase, share: None)
        executor.submit(StepPlan(0, []), {})
        return executor.collect().rows[0].tokens
    finally:
        executor.shutdown()


def test_rank_zero_takes_its_share_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_ranks() == (1, 1)
    assert torch.get_num_threads() == 4


def test_fewer_threads_than_its_share_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    torch.set_num_threads(3)
    assert threads_of_ranks()[0] == 3
    assert torch.get_num_threads() == 3


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch read the variable when it was imported and has used four threads since."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of_ranks() == (4, 1)


def test_a_start_that_fails_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = rank_runners.executor(rank_runners.RaisesInLoad, composition())
    with pytest.raises(RankError):
        executor.start(lambda phase, share: None)
    assert torch.get_num_threads() == 1
    executor.shutdown()
    assert torch.get_num_threads() == 4
