"""Ranks as processes: they get every plan, they end together, and the error names the first that died."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import rank_runners
import torch.distributed as dist
from processes import runs, state

from dovetail.core.compose import Composition, compose
from dovetail.core.interfaces import Blobs, Join, JoinBlob, Request, Row, SamplingParams, StepPlan
from dovetail.core.parallel.address import free_address
from dovetail.core.parallel.failure import RankError, StartHung
from dovetail.plugins.executor.multiproc import MultiprocExecutor

Gone = Callable[[int], bool]
NIGHTLY = pytest.mark.nightly


def composition(tp: int, *overrides: str) -> Composition:
    return compose(["app=generate", "executor=multiproc", f"engine.tp={tp}", *overrides])


def quiet(phase: str, share: float | None) -> None: ...


@contextmanager
def running(runner: type[rank_runners.Runner], tp: int, **options: object) -> Iterator[MultiprocExecutor]:
    executor = rank_runners.executor(runner, composition(tp), **options)
    try:
        executor.start(quiet)
        yield executor
    finally:
        executor.shutdown()


@contextmanager
def five_seconds() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 5


def joining(step: int, uid: int, prompt: int) -> tuple[StepPlan, Blobs]:
    plan = StepPlan(step, [Row(uid, uid, 1, prompt, prompt, 0, 1)], joins=[Join(uid, uid, 1, 0)])
    request = Request(uid, tuple(range(prompt)), SamplingParams(temperature=0.5))
    return plan, {(uid, 1): JoinBlob(request.prompt_ids, request, 0)}


def test_every_rank_gets_every_plan_and_blob(gone: Gone) -> None:
    """The rings are so small that plans and prompts pass in pieces. bind checks that pages are the minimum over
    ranks."""
    size = 2
    with running(rank_runners.Connected, size, plan_bytes=4096, blob_bytes=4096) as executor:
        pids = executor.worker_pids
        submitted = [joining(step, step, prompt=4000) for step in range(4)]
        submitted.append((StepPlan(4, [Row(u, u, 1, 1, 4001, 0, 3) for u in range(4)]), {}))
        submitted += [(StepPlan(5 + i, []), {}) for i in range(20)]
        for plan, blobs in submitted:
            executor.submit(plan, blobs)
        assert executor.pending == len(submitted)
        for plan, blobs in submitted:
            expected = size * rank_runners.checksum(plan, blobs)
            assert executor.collect().rows[0].tokens == (expected,)
        assert executor.pending == 0
    assert all(map(gone, pids))


def test_one_rank_needs_no_workers() -> None:
    with running(rank_runners.Runner, 1) as executor:
        executor.submit(StepPlan(0, []), {})
        assert executor.collect().step == 0
        assert executor.worker_pids == ()


@pytest.mark.parametrize(
    ("runner", "tp", "rank", "cause"),
    [
        pytest.param(
            rank_runners.KilledInLoad,
            3,
            2,
            "was killed by SIGKILL .* in phase 'weights'",
            id="killed",
            marks=pytest.mark.nightly,
        ),
        pytest.param(rank_runners.RaisesInLoad, 2, 1, "(?s)failed .*FileNotFoundError: model-00002", id="raises"),
        pytest.param(rank_runners.KilledBeforeConnecting, 2, 1, "was killed by SIGKILL", id="killed before connecting"),
        pytest.param(
            rank_runners.KilledInCapture,
            2,
            1,
            "was killed by SIGKILL .* in phase 'capture graphs'",
            id="capture, killed",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            rank_runners.RaisesInCapture,
            2,
            1,
            "(?s)'capture graphs'.*MemoryError: no room",
            id="capture, raises",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_that_fails_in_start_up_ends_it(
    runner: type[rank_runners.Runner], tp: int, rank: int, cause: str, gone: Gone, caplog: pytest.LogCaptureFixture
) -> None:
    executor = rank_runners.executor(runner, composition(tp))
    died: list[float] = []

    def watch() -> None:
        while len(executor.worker_pids) < tp - 1:
            time.sleep(0.01)
        while all(map(runs, executor.worker_pids)):
            time.sleep(0.01)
        died.append(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with caplog.at_level(logging.INFO), pytest.raises(RankError, match=cause) as raised:
        executor.start(quiet)
    raised_at = time.monotonic()
    watcher.join(1)
    pids = executor.worker_pids
    executor.shutdown()
    assert raised_at - died[0] < 5
    assert raised.value.rank == rank
    assert f"rank {rank} " in caplog.text
    assert len(pids) == tp - 1 and all(map(gone, pids))


@pytest.mark.nightly
def test_a_rank_that_never_connects_is_named(gone: Gone, capfd: pytest.CaptureFixture[str]) -> None:
    """The other ranks wait for it; none of them dies."""
    executor = rank_runners.executor(rank_runners.StoppedBeforeConnecting, composition(3))

    def hurry() -> None:
        while len(executor.worker_pids) < 2 or state(executor.worker_pids[1]) != "T":
            time.sleep(0.01)
        assert executor._workers is not None
        executor._workers._start_timeout = 0.5

    watcher = threading.Thread(target=hurry, daemon=True)
    watcher.start()
    cause = r"rank 2 hangs while in phase 'weights' of loading, stopped by a signal: no rank .*: rank 0 .*rank 1 "
    with pytest.raises(StartHung, match=cause):
        executor.start(quiet)
    watcher.join()
    pids = executor.worker_pids
    executor.shutdown()
    assert len(pids) == 2 and all(map(gone, pids))
    assert "in start" in capfd.readouterr().err, "the stack of rank 0 must show where it waits"


def test_a_slow_rank_is_a_sign_of_life_of_all() -> None:
    signs: list[str] = []
    executor = rank_runners.executor(rank_runners.SlowRankOne, composition(2))
    try:
        executor.start(lambda phase, share: signs.append(phase))
    finally:
        executor.shutdown()
    assert signs.count("weights") > 1, "rank 0 itself said it once"


@pytest.mark.parametrize(
    ("runner", "ranks", "cause"),
    [
        pytest.param(
            rank_runners.KilledInStep,
            3,
            "was killed by SIGKILL .* while serving",
            id="killed",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            rank_runners.RaisesInStep, 2, "(?s)failed while serving.*ZeroDivisionError: third step", id="raises"
        ),
    ],
)
def test_a_rank_that_fails_in_a_step_is_the_one_named(
    runner: type[rank_runners.Runner], ranks: int, cause: str, gone: Gone
) -> None:
    """Other ranks fail as well, and at least one of them reports a closed connection."""
    with running(runner, ranks) as executor:
        pids = executor.worker_pids
        with five_seconds(), pytest.raises(RankError, match=cause) as raised:
            for step in range(5):
                executor.submit(StepPlan(step, []), {})
                executor.collect()
        with five_seconds(), pytest.raises(RankError, match=cause):
            executor.submit(StepPlan(9, []), {})
    assert raised.value.rank == ranks - 1
    assert all(map(gone, pids))
    # One line for the user; the traceback is the cause, which DOVETAIL_DEBUG=1 and the log of a server show.
    assert len(str(raised.value).splitlines()) == 1
    assert ("third step" in cause) == ("in execute" in str(raised.value.__cause__))


@pytest.mark.nightly
def test_an_error_of_rank_0_stays_its_own(gone: Gone) -> None:
    with pytest.raises(ZeroDivisionError, match="third step"):
        with running(rank_runners.RankZeroRaisesInStep, 2) as executor:
            pids = executor.worker_pids
            began = time.monotonic()
            for step in range(5):
                executor.submit(StepPlan(step, []), {})
    assert time.monotonic() - began < 5
    assert all(map(gone, pids))


@pytest.mark.nightly
def test_a_rank_killed_while_idle_is_named_by_the_next_call(gone: Gone) -> None:
    with running(rank_runners.Runner, 3) as executor:
        executor.submit(StepPlan(0, []), {})
        executor.collect()
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        with five_seconds():
            assert all(map(gone, executor.worker_pids))
            with pytest.raises(RankError, match="rank 1 was killed by SIGKILL .* while serving"):
                while True:
                    executor.submit(*joining(1, 1, prompt=1))


def test_the_next_call_raises_even_at_once_after_a_death() -> None:
    """The ring is full and has no reader; the writer must detect it."""
    with running(rank_runners.DeafInStep, 2, plan_bytes=4096) as executor:
        executor.submit(StepPlan(0, []), {})
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        with five_seconds(), pytest.raises(RankError, match="rank 1"):
            for step in range(1, 1000):
                executor.submit(StepPlan(step, []), {})


def test_shutdown_does_not_wait_for_a_worker_that_is_stuck(gone: Gone) -> None:
    executor = rank_runners.executor(rank_runners.DeafInStep, composition(2), stop_timeout=0.3)
    executor.start(quiet)
    pids = executor.worker_pids
    executor.submit(StepPlan(0, []), {})
    with five_seconds():
        executor.shutdown()
        executor.shutdown()
    assert all(map(gone, pids))


@pytest.mark.nightly
def test_a_worker_that_ends_first_takes_nobody_along(caplog: pytest.LogCaptureFixture) -> None:
    with running(rank_runners.SlowToClose, 3) as executor:
        workers = executor._workers
        assert workers is not None
    assert [process.popen.returncode for process in workers._processes] == [0, 0]
    assert not caplog.records


def test_rank_0_does_not_wait_for_ever_to_close() -> None:
    executor = rank_runners.executor(rank_runners.WaitsInClose, composition(2), stop_timeout=0.5)
    executor.start(quiet)
    with five_seconds():
        executor.shutdown()


def test_engines_that_start_at_once_meet_at_addresses_of_their_own() -> None:
    """Addresses are chosen long before any rank listens, and rank 0 can still bind its own."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(free_address()) for _ in range(300)]
        assert len(set(addresses)) == 300
        host, _, port = addresses[0].rpartition(":")
        store = dist.TCPStore(host, int(port), 1, True, wait_for_workers=False)
        store.set("rank", "0")
        assert store.get("rank") == b"0"


def test_another_registry_on_a_worker_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = rank_runners.executor(rank_runners.Runner, composition(2))
    other = {"packages": {}, "components": "0", "config": "0"}
    monkeypatch.setattr("dovetail.core.parallel.process.identity", lambda composed: other)
    with pytest.raises(RankError, match="the ranks see different components"):
        executor.start(quiet)
    executor.shutdown()


def test_ranks_find_presets_and_variants_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folders are found even if the program changes its working directory after composing."""
    for name, text in {
        "preset/mine.yaml": "# @package _global_\ndefaults:\n  - override /scheduler: chunky\nengine:\n  tp: 2\n",
        "scheduler/chunky.yaml": "defaults: [fcfs, _self_]\nmax_chunk: 64\n",
    }.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ["app=generate", "+preset=mine", "executor=multiproc"]
    composed = compose(words, config_dirs=["conf"])
    assert composed.part("scheduler").config.max_chunk == 64  # type: ignore[attr-defined]
    executor = rank_runners.executor(rank_runners.Runner, composed)
    monkeypatch.chdir("/")
    try:
        executor.start(quiet)
        executor.submit(StepPlan(0, []), {})
        assert executor.collect().step == 0
    finally:
        executor.shutdown()


@pytest.fixture(params=[pytest.param("load", marks=NIGHTLY), "steps"])
def program(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program with two ranks in a separate process group, as a shell would start it. It loads for a minute, or it
    runs steps."""
    argv = [sys.executable, str(Path(__file__).with_name("interrupted.py")), request.param]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert process.stdout.readline() == "runs\n"
        yield process, pids
        process.kill()


def test_ctrl_c_ends_everything_in_order(program: tuple[subprocess.Popen[str], list[int]], gone: Gone) -> None:
    process, pids = program
    os.killpg(process.pid, signal.SIGINT)
    with five_seconds():
        output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("interrupted\nshut down\n", "", 130)
    assert len(pids) == 1 and all(map(gone, pids))


@pytest.mark.nightly
def test_workers_do_not_outlive_a_killed_parent(program: tuple[subprocess.Popen[str], list[int]], gone: Gone) -> None:
    process, pids = program
    process.kill()
    assert len(pids) == 1 and all(map(gone, pids))
