"""Two replicas in separate processes give the tokens of one engine, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail import LLM, RequestError, SamplingParams
from dovetail.core.compose.cli import main
from dovetail.core.frontend.engines import EngineProcesses
from dovetail.core.interfaces import Grammar

ROOT = Path(__file__).parents[2]
BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=256", "router=round_robin"]
PROMPTS = ["def fib(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    print(i)\nfor ", "x = 1\n"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=24, n=3),
    SamplingParams(temperature=0.8, seed=3, max_tokens=16, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=80, stop=("\n\n",)),
    SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(359,)),
    SamplingParams(temperature=0.9, max_tokens=20, grammar=Grammar(kind="choice", value=("yes", "no", "perhaps"))),
]


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("tiny", overrides=[*BASE, "engine.dp=2", "adapter=lora"]) as llm:
        yield llm


def replicas(llm: LLM) -> EngineProcesses:
    assert isinstance(llm._engines, EngineProcesses)
    return llm._engines


def everything(llm: LLM) -> tuple[list[object], list[float]]:
    """Return the results that are equal in any batch, and the log-probabilities, whose last bits may differ."""
    params = [PARAMS[i % len(PARAMS)] for i in range(3 * len(PARAMS))]
    found = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params)
    outputs = [[(c.text, c.token_ids, c.finish_reason) for c in g.completions] for g in found]
    entries = [
        entry
        for g in found
        for logprobs in (g.prompt_logprobs, *(c.logprobs for c in g.completions))
        for entry in logprobs or ()
        if entry is not None
    ]
    assert len(entries) > 3 * 16
    return list(outputs), [value for entry in entries for value in (entry.logprob, *(top for _, top in entry.top))]


def assert_same(llm: LLM, expected: tuple[list[object], list[float]]) -> None:
    outputs, numbers = everything(llm)
    assert outputs == expected[0]
    assert numbers == pytest.approx(expected[1], abs=1e-4)


def test_they_equal_one(two: LLM) -> None:
    """Includes draws without a seed: requests are numbered over both replicas."""
    with LLM("tiny", overrides=BASE) as one:
        expected, vectors = everything(one), one.embed(PROMPTS, pooling="mean")
        counted = one.counters
    assert_same(two, expected)
    np.testing.assert_allclose(two.embed(PROMPTS, pooling="mean"), vectors, atol=1e-5)
    both = two.counters
    assert (both.prompt_tokens, both.entered_tokens) == (counted.prompt_tokens, counted.entered_tokens)
    assert both.output_tokens >= counted.output_tokens > 400, "of a stop string a replica learns a step later"
    assert replicas(two).reset_cache() is True
    each = replicas(two).check()
    assert all(one["steps"] > 20 and one["pages_owned"] == one["pages_cached"] == 0 for one in each)


@pytest.mark.nightly
def test_two_replicas_of_two_ranks_equal_one() -> None:
    ranks = [*BASE, "executor=multiproc", "engine.tp=2"]
    with LLM("tiny", overrides=ranks) as one:
        expected = everything(one)
    with LLM("tiny", overrides=[*ranks, "engine.dp=2"]) as llm:
        assert_same(llm, expected)


def test_a_wrong_request_is_refused_and_none_runs(two: LLM) -> None:
    with pytest.raises(RequestError, match="not in the model's vocabulary"):
        two.generate([[1, 2], [99999]], PARAMS[0])
    with pytest.raises(RequestError, match="UTF-8"):
        two.generate([[1, 2]], PARAMS[0], user="\ud800")
    for call in (lambda: two.generate("x", adapter="mine"), lambda: two.load_adapter("mine", "/nowhere")):
        with pytest.raises(RequestError, match="adapter"):
            call()
    assert not replicas(two).table.busy and two.adapters == {}


@pytest.mark.nightly
def test_an_adapter_is_on_both_or_on_none(two: LLM, save_lora: Callable[..., str]) -> None:
    folder = save_lora("mine", seed=1)
    two.load_adapter("mine", folder)
    assert two.adapters == {"mine": folder}
    # Round robin: each prompt runs on both replicas.
    base, *adapted = (
        [g.token_ids for g in two.generate([PROMPTS[0]] * 2, PARAMS[0], adapter=name)] for name in ("", "mine", "mine")
    )
    assert adapted[0] == adapted[1] and adapted[0][0] == adapted[0][1] != base[0] == base[1]
    with pytest.raises(RequestError, match="'mine' is loaded"):
        two.load_adapter("mine", folder)
    two.unload_adapter("mine")
    with pytest.raises(RequestError, match="'mine' is not loaded"):
        two.generate("x", adapter="mine")
    with pytest.raises(RequestError, match="'mine' is not loaded"):
        two.unload_adapter("mine")


@pytest.mark.nightly
def test_who_leaves_is_dropped_where_it_runs(two: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    streams = [two.stream(prompt, long) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    engines = replicas(two)
    deadline = time.monotonic() + 60
    while any(one["pages_owned"] for one in engines.check()):
        assert time.monotonic() < deadline
    loads = [engines.table.load(replica) for replica in range(2)]
    assert not engines.table.busy and [(load.samples, load.prompt_tokens) for load in loads] == [(0, 0), (0, 0)]


@pytest.mark.nightly
def test_a_death_ends_all_with_its_name(two: LLM) -> None:
    """Must be the last test that uses this engine."""
    pids = [process.pid for process in replicas(two).processes]
    stream = two.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    next(stream)
    os.kill(pids[1] or 0, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="replica 1 was killed by SIGKILL"):
        list(stream)
        two.generate(PROMPTS, PARAMS[0])
    two.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.nightly
def test_ctrl_c_while_they_load_ends_everything_soon() -> None:
    with subprocess.Popen(
        [sys.executable, "run.py", "+preset=tiny_cpu", "engine.dp=2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    ) as process:
        tasks, pids = Path(f"/proc/{process.pid}/task"), []
        while len(pids) < 2:
            assert process.poll() is None
            time.sleep(0.02)
            pids = [int(pid) for file in tasks.glob("*/children") for pid in file.read_text().split()]
        os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.nightly
def test_a_replica_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["+preset=tiny_cpu", "engine.dp=2", "attention=triton"]) == 2
    message = capfd.readouterr().err.partition("dovetail: ")[2]
    assert message.startswith("replica ") and "attention=triton requires host with device" in message
    assert "Traceback" not in message
