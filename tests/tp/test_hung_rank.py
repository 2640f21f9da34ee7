"""A rank that neither responds nor dies: ending the run does not wait for it, and the error names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.errors import EngineStopped
from dovetail.core.frontend.local_engine import STEP_SECONDS

ROOT = Path(__file__).parents[2]
RANKS = ("executor=multiproc", "engine.tp=2", "engine.device=cpu", "engine.kv_pages=512")
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, int]]:
    """An engine with a long request in progress, and the process id of its second rank, which is stopped."""
    llm = LLM("tiny", overrides=[*RANKS, *getattr(request, "param", ())])
    (pid,) = llm.engine.executor.worker_pids  # type: ignore[union-attr]
    try:
        yield llm, pid
    finally:
        llm.close()


@pytest.mark.nightly
def test_closing_does_not_wait_for_it(engine: tuple[LLM, int], gone: Callable[[int], bool]) -> None:
    llm, pid = engine
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    llm.close()
    assert STEP_SECONDS <= time.monotonic() - began < 5
    assert gone(pid)
    with pytest.raises(EngineStopped, match="rank 1 had not ended its step when it was interrupted, stopped by a sig"):
        list(stream)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [("collective.timeout=8",)], indirect=True)
def test_a_step_that_ends_by_itself_names_it(engine: tuple[LLM, int]) -> None:
    llm, pid = engine
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineStopped, match="rank 1 does not answer, stopped by a signal, while serving"):
        list(stream)


BENCHMARK = """
from dovetail import compose
from dovetail.core.interfaces import TimedRequest
from dovetail.plugins.app.bench.inprocess import EngineTarget

target = EngineTarget(compose(["workload=fixed", "model=tiny", *{ranks}], app="bench"))
target.start(lambda phase, share: None)
try:
    requests = [TimedRequest((1, 2, 3), 4), TimedRequest((4, 5, 6), 1500)]
    target.run(requests, lambda done: print(*target.engine.executor.worker_pids, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    target.close()
"""


@pytest.mark.nightly
def test_ctrl_c_while_a_benchmark_waits_for_it(gone: Callable[[int], bool]) -> None:
    argv = [sys.executable, "-c", BENCHMARK.format(ranks=RANKS)]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        # By then the other rank waits for it, in C code.
        time.sleep(0.5)
        os.killpg(program.pid, signal.SIGINT)
        began = time.monotonic()
        output, errors = program.communicate(timeout=60)
        assert time.monotonic() - began < 5
    assert (output, program.returncode) == ("interrupted\n", 0) and gone(pid)
    assert "rank 1 had not ended its step when it was interrupted, stopped by a signal" in errors
