"""app=replay and workload=recording: other parts on recorded arrivals, timelines, and errors of the command line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.interfaces import CatchUp, SchedulerStats, StepPlan, Workload, WorkloadContext
from dovetail.core.recording.events import AnyEvent
from dovetail.core.recording.recorder import Entries
from dovetail.core.recording.recording import Recording
from dovetail.core.testing.app import AppContract
from dovetail.core.testing.workload import WorkloadContract
from dovetail.plugins.app.bench.app import check_writable
from dovetail.plugins.app.replay.lockstep import Lockstep, differences
from dovetail.plugins.app.replay.parts import build, compose_pair
from dovetail.plugins.app.replay.simulate import Simulation
from dovetail.plugins.app.replay.times import StepTimes
from dovetail.plugins.workload.config import RecordingConfig
from dovetail.plugins.workload.recorded import Recorded

from ..recording.record import run, small_engine

STORED = Path(__file__).parents[1] / "recording" / "stored"
FCFS = str(STORED / "fcfs-prefix_hash.rec")


class TestReplay(AppContract):
    def make(self) -> Any:
        return compose([f"replay.path={FCFS}"], app="replay")


class TestRecorded(WorkloadContract):
    def make(self) -> Workload:
        return Recorded(RecordingConfig(path=FCFS))


def replay(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = main(["app=replay", f"replay.path={FCFS}", f"replay.out={out}", *words])
    return code, json.loads(out.read_text())


def test_other_parts_are_compared_on_the_same_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replay(tmp_path, "scheduler=priority", "kv_cache=paged", "engine.max_seqs=2")
    assert code == 0 and found["changed"] == ["scheduler=priority", "kv_cache=paged", "engine.max_seqs=2"]
    divergence, sides = found["divergence"], found["figures"]
    assert divergence["differences"] and divergence["recorded"]["cached pages"] > 0
    assert divergence["replayed"]["cached pages"] == 0
    assert list(sides) == ["recorded", "recorded parts", "these parts"]
    assert sides["these parts"]["hit_rate"] < sides["recorded parts"]["hit_rate"]
    assert sides["these parts"]["wait_ms_p95"] > sides["recorded parts"]["wait_ms_p95"], "it has half the slots"
    assert "first difference at step" in capsys.readouterr().out


def test_every_request_of_a_simulation_has_its_recorded_output() -> None:
    recording = Recording(FCFS, "replay.path")
    pair = compose_pair(recording, compose([f"replay.path={FCFS}", "kv_cache=radix"], app="replay"))
    outcome = Simulation(recording, [build(recording, pair.given, pair.recorded)], StepTimes(recording)).run()
    lives = {life.number: life for life in outcome.lives}
    whole = [life for life in recording.lives if life.ended and life.ended.reason == "length"]
    assert len(whole) > 8 and all(lives[life.number].tokens == life.tokens for life in whole)


def test_a_run_with_drafts_is_replayed(tmp_path: Path) -> None:
    """Two steps are in flight. The drafter has layers and pages of its own, and follows some of the prompts."""
    path = tmp_path / "run.rec"
    drafts = ("executor.acceptance=0.7", "spec_decode=draft_model", "model@spec_decode.model=tiny_draft")
    run(small_engine(f"engine.record={path}", "executor.clock=virtual", "cost=h200", *drafts), requests=24)
    recording = Recording(str(path), "replay.path")
    assert {plan.follows for plan in recording.plans} == {True, False}
    assert any(row.draft for plan in recording.plans for row in plan.rows)
    assert any(join.lacking for plan in recording.plans for join in plan.joins)
    pair = compose_pair(recording, compose([f"replay.path={path}"], app="replay"))
    assert Lockstep(recording, build(recording, pair.given, pair.recorded)).run() is None
    unlike = next(plan for plan in recording.plans if not plan.follows)
    recording.events[recording.events.index(unlike)] = msgspec.structs.replace(unlike, follows=True)
    found = Lockstep(recording, build(recording, pair.given, pair.recorded)).run()
    assert found is not None and found.step == unlike.step
    assert found.differences == ["the drafter follows prompts: recorded True, replayed False"]


def test_rows_that_the_drafter_catches_up_with_are_recorded_and_compared() -> None:
    plan = StepPlan(3, [], catch_up=[CatchUp(2, 64, 17), CatchUp(0, 0, 9)])
    entry = Entries(None, drafts=True).planned(plan, 1.0, 0.1, 0.1, SchedulerStats(0, 0, 0))
    recorded = msgspec.msgpack.Decoder(AnyEvent).decode(entry)
    assert differences(recorded, plan) == []
    plan.catch_up = plan.catch_up[:1]
    expected = "catch_up from 1 on: recorded the drafter catches up with 9 tokens from 0 on in slot 0, replayed no more"
    assert differences(recorded, plan) == [expected]


def test_a_router_distributes_the_recorded_requests(tmp_path: Path) -> None:
    words = ("engine.dp=2", "engine.max_seqs=2")
    sides = {router: replay(tmp_path, f"router={router}", *words)[1] for router in ("round_robin", "prefix_aware")}
    for found in sides.values():
        assert found["divergence"] is None and found["replicas"] == 2
        assert found["figures"]["these parts"]["requests"] == found["figures"]["recorded"]["requests"]
    rates = {router: found["figures"]["these parts"]["hit_rate"] for router, found in sides.items()}
    assert rates["prefix_aware"] >= rates["round_robin"] > 0, "requests with a common prefix go to one cache"
    alone = replay(tmp_path, "engine.max_seqs=2")[1]["figures"]["these parts"]
    assert sides["round_robin"]["figures"]["these parts"]["wait_ms_p95"] < alone["wait_ms_p95"]


def test_a_policy_that_is_not_deterministic_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.plugins.scheduler.fcfs import FCFSScheduler

    monkeypatch.setattr(FCFSScheduler, "order", lambda self, waiting, ctx: reversed(list(waiting)))
    code, found = replay(tmp_path)
    assert code == 1 and list(found["figures"]) == ["recorded", "recorded parts"]
    recorded, replayed = found["divergence"]["recorded"], found["divergence"]["replayed"]
    assert recorded.keys() == {"waiting", "running", "preemptions"} < replayed.keys()
    assert "n/a" in capsys.readouterr().out, "the recording does not state the pages"
    monkeypatch.undo()
    evictions = replay(tmp_path)[1]["figures"]["recorded"]["evictions"]
    assert evictions > 0, "equal plans show the allocator of the recorded run"


def test_the_timeline_has_a_row_for_each_request_and_bars_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert replay(tmp_path, f"replay.trace={path}")[0] == 0
    check_writable(str(path), "replay.trace")  # a timeline may be written anew
    events = json.loads(path.read_text())["traceEvents"]
    recording = Recording(FCFS, "replay.path")
    named = [event for event in events if event["ph"] == "M"]
    names = {event["args"]["name"] for event in named if event["name"] != "thread_sort_index"}
    assert {"engine", "requests", "host", "device"} < names and len(names) == 4 + len(recording.lives)
    assert all(event["tid"] not in (0, event["pid"]) for event in events if "tid" in event), (
        "Perfetto treats them apart"
    )
    order = [event["args"]["sort_index"] for event in named if event["name"] == "thread_sort_index"]
    assert order == sorted(order) and len(order) == len(names) - 2
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(rows) == 2 + len(recording.lives)
    for (pid, _), bars in rows.items():
        bars.sort(key=lambda bar: bar["ts"])
        if pid == 1:
            assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(bars)), "a lane runs one step at a time"
    fed = sum(bar["args"]["tokens"] for bars in rows.values() for bar in bars if bar["name"].startswith("prefill"))
    assert fed > 0 and any(event["name"].startswith("prefix hit") for event in events)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=llama3_8b"], "another model was recorded: vocab"),
        (["quant=int8"], "quant=int8: a replay takes this from the recording; it can change scheduler"),
        (["engine.max_len=64"], "engine.max_len=64: a replay takes this"),
        (["engine.record=again.rec"], "engine.record=again.rec: a replay has no engine that could be recorded"),
        (["replay.path=nothing.rec"], "replay.path=nothing.rec: cannot be read"),
    ],
)
def test_mistakes_end_in_one_message(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"replay.path={FCFS}"] if not words[0].startswith("replay") else []
    assert main(["app=replay", *given, *words]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


# The workload.


def test_a_recording_is_a_workload_with_the_same_prefixes() -> None:
    recording = Recording(FCFS, "replay.path")
    found = Recorded(RecordingConfig(path=FCFS, speed=2.0)).requests(WorkloadContext(vocab=400, max_len=128, seed=0))
    lives = [life for life in recording.lives if life.output]
    assert len(found) == len(lives) and [r.output_tokens for r in found] == [life.output for life in lives]
    assert found[-1].arrival == pytest.approx((lives[-1].request.arrival - lives[0].request.arrival) / 2)
    assert {r.user for r in found} == {"a", "b"} and all(r.deadline is not None for r in found)
    # Thirty-seven tokens are the second of the lengths that prompts share in record.py.
    assert len({r.prompt_ids[:16] for r in found if len(r.prompt_ids) > 40}) < len(found)


def test_the_seconds_of_a_recording_can_be_chosen() -> None:
    ctx = WorkloadContext(vocab=400, max_len=128, seed=0)
    whole = Recorded(RecordingConfig(path=FCFS)).requests(ctx)
    lives = Recording(FCFS, "replay.path").lives
    start = lives[3].request.arrival - Recording(FCFS, "replay.path").header.clock
    later = Recorded(RecordingConfig(path=FCFS, start=start)).requests(ctx)
    assert 0 < len(later) < len(whole) and later[0].arrival == 0.0
    with pytest.raises(ValueError, match="no request with an output arrives in the chosen seconds"):
        Recorded(RecordingConfig(path=FCFS, start=1e6)).requests(ctx)
    with pytest.raises(ValueError, match="do not fit into a context of 8"):
        Recorded(RecordingConfig(path=FCFS)).requests(WorkloadContext(vocab=400, max_len=8, seed=0))
