"""Lanes as processes: their tokens, and their end when one of them dies or stops in any phase. All of it is nightly; in
CI, lanes are threads (test_lanes.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.errors import DovetailError
from dovetail.core.frontend.engines import EngineProcesses
from dovetail.core.frontend.lanes import LaneGroup

pytestmark = pytest.mark.nightly
BASE = ("model=small_moe", "engine.device=cpu", "engine.max_len=256", "engine.kv_pages=64", "engine.token_budget=32")
LANES = (*BASE, "engine.dp=2", "engine.ep=2", "experts=gather", "router=round_robin")
FOUR = (*LANES, "engine.tp=2", "engine.ep=4", "executor=multiproc")
PROMPTS = [[7, 300, 21, 4], [9] * 40, [500, 2, 77]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, n=2),
]
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def tokens(*overrides: str) -> list[list[list[int]]]:
    """Return the tokens of requests, and of the same ones after the lanes have slept."""
    with LLM(overrides=overrides) as llm:
        found = []
        for pause in (0.0, 0.2):
            time.sleep(pause)
            found.append([[c.token_ids for c in g.completions] for g in llm.generate(PROMPTS, PARAMS)])
        assert found[0] == found[1]
        return found[0]


@pytest.mark.parametrize(
    "overrides",
    [
        (*LANES, "experts=all_to_all", "engine.depth=2"),
        FOUR,
        (*FOUR, "experts=all_to_all", "engine.ep=4", "spec_decode=ngram"),
        (*FOUR, "experts=all_to_all", "spec_decode=draft_model", "model@spec_decode.model=small_moe"),
        (*LANES, "engine.dp=4", "engine.ep=4"),
        (*LANES, "engine.dp=4", "engine.ep=2"),
    ],
    ids=[
        "two",
        "two of two ranks",
        "two of two ranks, drafts",
        "two of two ranks, a drafter with experts",
        "four",
        "four, two parts of experts",
    ],
)
def test_processes_equal_one(overrides: tuple[str, ...]) -> None:
    assert tokens(*overrides) == tokens(*BASE)


@contextmanager
def serving(*overrides: str) -> Iterator[tuple[LLM, list[int]]]:
    with LLM(overrides=overrides) as llm:
        assert isinstance(llm._engines, EngineProcesses)
        yield llm, [process.pid or 0 for process in llm._engines.processes]


def child_of(pid: int) -> int:
    """Return the process of the lane's rank 1."""
    tasks = os.listdir(f"/proc/{pid}/task")
    (child,) = [int(one) for task in tasks for one in open(f"/proc/{pid}/task/{task}/children").read().split()]
    return child


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "asleep"])
def test_a_lane_that_is_killed_ends_all(busy: bool, gone) -> None:
    with serving(*LANES) as (llm, pids):
        stream = llm.stream(PROMPTS[0], LONG)
        for _ in range(2):
            next(stream)
        if not busy:
            list(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DovetailError, match="replica 1 was killed by SIGKILL"):
            list(stream)
            while True:
                llm.generate(PROMPTS, PARAMS)
    assert all(map(gone, pids))


def test_a_rank_of_a_lane_that_is_killed_ends_all(gone) -> None:
    with serving(*FOUR) as (llm, pids):
        rank, stream = child_of(pids[1]), llm.stream(PROMPTS[0], LONG)
        next(stream)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(DovetailError, match=r"replica 1 failed: rank 1 was killed by SIGKILL"):
            list(stream)
            while True:
                llm.generate(PROMPTS, PARAMS)
    assert all(map(gone, [*pids, rank]))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "hangs")])
def test_a_lane_that_ends_or_stops_while_it_loads(number: signal.Signals, how: str, monkeypatch) -> None:
    """The other lane waits for the connection. The message names the lane at fault."""
    started = EngineProcesses._start

    def start(engines: EngineProcesses, progress) -> None:
        def end() -> None:
            while len(engines.processes) < 2 or (pid := engines.processes[1].pid) is None:
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(pid, number)

        threading.Thread(target=end, daemon=True).start()
        started(engines, progress)

    monkeypatch.setattr(EngineProcesses, "_start", start)
    with pytest.raises(DovetailError, match=f"replica 1 {how}"):
        LLM(overrides=[*LANES, "engine.start_timeout=30"])


def test_the_first_cause_is_that_of_the_lane_at_fault() -> None:
    """Its death may be detected after those that it causes."""
    group = LaneGroup(3)
    late = threading.Timer(0.2, group.death, (2, "failed: no memory"))
    late.start()
    assert group.death(0, "failed: lost the connection to the other lanes: RuntimeError: closed").replica == 2
    late.join()
    assert group.death(1, "was killed by SIGKILL").cause == "failed: no memory"
    group.close()
