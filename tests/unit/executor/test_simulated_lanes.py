"""executor=simulated runs lanes in virtual time: they launch in lockstep, and a step takes as long as the slowest."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import Host, compose
from dovetail.core.compose.cli import main
from dovetail.core.compose.composition import Lane
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.engine.lane_checks import lane_conflicts
from dovetail.core.interfaces import RowWork, SamplingParams
from dovetail.core.parallel.lockstep import Lockstep
from dovetail.plugins.app.plan.memory import make_plan

LANES = (
    *("model=deepseek_v3", "cost=h200", "quant=fp8", "experts=gather", "engine.depth=2", "engine.max_len=4096"),
    *("executor=simulated", "executor.clock=virtual", "engine.device=cuda"),
)


@contextmanager
def started(count: int) -> Iterator[list[Engine]]:
    """Start lanes, which the caller steps in turns."""
    lockstep = Lockstep(count)
    one = compose([*LANES, "app=bench", "workload=fixed", f"engine.ep={count}"])
    engines = []
    for lane in lockstep.lanes:
        engine = start_engine(replace(one, lane=Lane(lane.number, count, "", lockstep)), lanes=lane)  # type: ignore[arg-type]
        lane.clock = engine.executor.clock
        engines.append(engine)
    lockstep.step = lambda number: engines[number].step()
    yield engines
    for engine in engines:
        engine.shutdown()


def test_lanes_begin_and_end_each_step_together() -> None:
    """One lane decodes, one feeds a prompt, and two have no request: all take the time of the prompt's step."""
    with started(4) as engines:
        submitted: list[list[int]] = [[], [], [], []]
        for rows, engine in zip(submitted, engines, strict=True):
            submit = engine.executor.submit

            def noted(plan: Any, blobs: Any, rows: list[int] = rows, submit: Any = submit) -> None:
                rows.append(len(plan.rows))
                submit(plan, blobs)

            engine.executor.submit = noted
        engines[0].add([1, 2], SamplingParams(max_tokens=6))
        engines[1].add([3] * 1000, SamplingParams(max_tokens=1))
        ends: list[set[float]] = [set(), set(), set(), set()]
        while any(engine.has_work for engine in engines):
            first = min((one for one in engines if one.has_work), key=lambda one: one.clock())
            first.step()
            for clocks, engine in zip(ends, engines, strict=True):
                clocks.add(engine.clock())
        cost = engines[0].cost
        assert cost is not None
    assert submitted[0] == [1] * 6 and submitted[1] == [1, 0, 0, 0, 0, 0] and submitted[2] == submitted[3] == [0] * 6
    assert ends[0] == ends[1] == ends[2] == ends[3] and len(ends[0]) == 7
    rows: list[list[list[RowWork]]] = [[[RowWork(2, 2)], [RowWork(1000, 1000)], [], []]]
    rows += [[[RowWork(1, 3 + i)], [], [], []] for i in range(5)]
    assert max(ends[0]) == pytest.approx(sum(map(cost.lanes_seconds, rows)), rel=1e-3)
    assert sorted(ends[0])[1] > 3 * cost.lanes_seconds(rows[1])


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "bench.json"
    options = ("bench.warmup=0", "bench.one_token_run=false", f"bench.out={out}")
    with redirect_stdout(io.StringIO()):
        assert main(["app=bench", *LANES, *options, *words]) == 0
    (load,) = json.loads(out.read_text())["results"][0]["loads"]
    (run,) = load["runs"]
    return run  # type: ignore[no-any-return]


def test_the_simulator_and_the_plan_give_one_answer(tmp_path: Path) -> None:
    """Equal requests on eight lanes have the time per token that app=plan predicts, the exchange included."""
    layout = ("engine.dp=8", "engine.ep=8", "engine.max_seqs=32", "engine.token_budget=8192")
    words = ("workload=fixed", "workload.requests=32", "workload.prompt_tokens=1000", "workload.output_tokens=16")
    found = bench(tmp_path, *layout, *words, "router=least_loaded")
    assert [replica["requests"] for replica in found["replicas"]] == [4] * 8 and not found["failed"]
    plan = make_plan(compose([*LANES, "app=plan", *layout]))
    assert found["tpot_ms"]["median"] == pytest.approx(1e3 * plan.decode_seconds(32, 1008), rel=0.01)
    alone = make_plan(compose([*LANES, "app=plan", *layout[:2], "cost.link_us=0", "cost.link=1e9"]))
    assert found["tpot_ms"]["median"] > 1.02e3 * alone.decode_seconds(32, 1008), "the exchange takes time"


@pytest.mark.nightly
def test_lanes_repeat_to_the_bit_under_arrivals(tmp_path: Path) -> None:
    words = ("engine.dp=4", "engine.ep=4", "workload=chat_online", "workload.rates=[40.0]", "workload.seconds=2")
    first, again = bench(tmp_path, *words), bench(tmp_path, *words)
    assert first == again and not first["failed"] and len(first["replicas"]) == 4


def test_lanes_in_real_time_are_refused() -> None:
    words = ("app=bench", "workload=fixed", "executor.clock=real", "engine.dp=2", "engine.ep=2")
    (found,) = lane_conflicts(compose([*LANES, *words]), Host(device="cuda"))
    assert found.startswith("executor=simulated with its options does not run lanes")
    assert found.endswith("executor=simulated with executor.clock=virtual.")
