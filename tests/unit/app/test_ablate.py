"""The app `ablate`: end to end on the CPU, and with fake processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import TimedRequest
from dovetail.core.parallel.process import order_for
from dovetail.plugins.app.ablate import app as app_module
from dovetail.plugins.app.ablate import host as host_module
from dovetail.plugins.app.ablate import worker as worker_module
from dovetail.plugins.app.ablate.children import Child, Failure, Phase
from dovetail.plugins.app.ablate.worker import _check, _load, check_replicas
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.runs import Runs

CPU = ("engine.device=cpu", "engine.max_len=64", "engine.kv_pages=32", "engine.max_seqs=4")
SMALL = ("workload.requests=3", "workload.prompt_tokens=20", "workload.output_tokens=6", "ablate.warmup=1")
QUICK = ("ablate.quality.prompts=2", "ablate.quality.tokens=6")


@pytest.mark.nightly
def test_a_ladder_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One step cannot run on this host and is skipped; the next one, which changes outputs, builds on the first."""
    out = tmp_path / "ladder.json"
    steps = 'ablate.ladder={plain:["kv_cache=paged"],on a gpu:["attention=triton"],eight bits:["quant=int8"]}'
    files = (f"ablate.out={out}", f"ablate.plot={tmp_path / 'ladder.svg'}")
    words = ["app=ablate", steps, *CPU, *SMALL, *QUICK, "ablate.rounds=1", "ablate.runs=2", "workload=latency", *files]
    assert main(words) == 0
    result = json.loads(out.read_text())
    assert result["workload"] == "latency", "the variant, not its component"
    plain, skipped, eight = result["variants"]
    assert result["schema"] == "dovetail.ablate/2" and not result["interrupted"]
    assert (
        result["versions"]["torch"] and result["machine"]["gpus"] == [] and result["config"]["engine"]["max_len"] == 64
    )
    assert "requires host with device cuda" in skipped["skipped"] and skipped["starts"] == []
    assert "attention=triton" not in eight["overrides"] and eight["baselines"] == ["plain"]
    (runs,), (others,) = ([start["loads"][0]["runs"] for start in one["starts"]] for one in (plain, eight))
    assert [run["failed"] for run in runs + others] == [0] * 4
    hashes = [run["requests_hash"] for run in runs]
    assert hashes == [run["requests_hash"] for run in others] and len(set(hashes)) == 2, "paired; rounds differ"
    (one,) = result["comparisons"]
    assert (one["variant"], one["baseline"]) == ("eight bits", "plain")
    speed = one["changes"]["output_tokens_per_s"]
    assert speed["samples"] == 2 and speed["unit"] == "runs" and speed["low"] < speed["value"] < speed["high"]
    assert one["changes"]["startup_s"]["low"] is None, "one start, no interval"
    assert [len(ids) - start for ids, start in result["quality"]["windows"]] == [6, 6]
    nll = plain["quality"]["nll"]
    assert len(nll) == 2 and all(len(row) == 6 and min(row) >= 0 for row in nll)
    assert 0 < abs(one["quality"]["nll_change"]["value"]) < 1, "int8 is not the same model, and nearly"
    assert 0.5 < one["quality"]["top1_agreement"] <= 1
    assert "<svg" in (tmp_path / "ladder.svg").read_text()
    printed = capfd.readouterr().out
    assert (
        "on a gpu was skipped" in printed
        and "one round: intervals are over its runs" in printed
        and "NLL change" in printed
    )


@cache
def kv_cache_of(overrides: tuple[str, ...]) -> str:
    return compose(overrides).part("kv_cache").name


class FakeChild(Child):
    """Fake process with scripted results, chosen by the variant's KV cache and the start."""

    asked: list[tuple[str, int]] = []
    tricks: dict[tuple[str, int], Any] = {}
    """(KV cache, round) -> exception that the start raises, or figures that replace those of a run."""
    tuning: dict[str, str] = {}
    """KV cache -> hash of the tuning table, if it is another one."""
    closed = 0

    def __init__(self, entry: str) -> None:
        self.entry = entry

    def ask(self, order: Mapping[str, Any], phase: Phase = lambda name, share: None) -> dict[str, Any]:
        if order.get("machine"):
            return {"gpus": [], "cpu": "fake", "cores": 2, "cuda": None}
        kv = kv_cache_of(tuple(order["overrides"]))
        if self.entry == "check":
            return {"requests": ["same"], "quality": None, **self.tricks.get((kv, -1), {})}
        number = order["first"] // 2
        self.asked.append((kv, number))
        phase("load weights", 0.5)
        trick = self.tricks.get((kv, number), {})
        if isinstance(trick, BaseException):
            raise trick
        speed = {"prefix_hash": 10.0, "paged": 20.0, "radix": 40.0}[kv] * (1 + number)
        runs = [
            {"output_tokens_per_s": speed, "requests": 3, "failed": 0, "requests_hash": f"{order['first'] + i}"} | trick
            for i in range(2)
        ]
        startup = {"startup_s": 1.0, "device": "fake", "tuning": FakeChild.tuning.get(kv, "0123")}
        return {"startup": startup, "loads": [{"rate": None, "runs": runs}], "quality": None}

    def close(self) -> None:
        FakeChild.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeChild]:
    monkeypatch.setattr(app_module, "Child", FakeChild)
    monkeypatch.setattr(host_module, "Child", FakeChild)
    FakeChild.asked, FakeChild.tricks, FakeChild.closed, FakeChild.tuning = [], {}, 0, {}
    return FakeChild


VARY = ("app=ablate", "ablate.vary={kv_cache:[paged,radix]}", "ablate.rounds=3", "ablate.runs=2")


def ablate(tmp_path: Path, code: int, *overrides: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main([*VARY, *overrides, f"ablate.out={out}"]) == code
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_rounds_and_turns(fake: type[FakeChild], tmp_path: Path) -> None:
    result = ablate(tmp_path, 0)
    orders = [[kv for kv, number in fake.asked if number == n] for n in range(3)]
    assert all(sorted(order) == ["paged", "prefix_hash", "prefix_hash", "radix"] for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and orders[0][0] == "prefix_hash"
    paged, radix, again = (one["changes"]["output_tokens_per_s"] for one in result["comparisons"])
    assert (paged["value"], paged["low"], paged["high"]) == pytest.approx((2.0, 2.0, 2.0)), "rounds are paired"
    assert (radix["value"], radix["samples"], radix["unit"]) == (pytest.approx(4.0), 3, "rounds")
    assert (again["value"], again["detectable"]) == (1.0, None), "the repeated baseline has no noise here"
    assert fake.closed == 1 + 12, "each process is closed before the next"


def test_a_failure_is_reported_and_the_others_go_on(
    fake: type[FakeChild], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.tricks["paged", 1] = Failure("its process was killed by SIGKILL; its last output:\n[out of memory]")
    result = ablate(tmp_path, 1)
    assert [len(one["starts"]) for one in result["variants"]] == [3, 1, 3, 3]
    assert result["variants"][1]["failure"] == {"round": 1, "reason": str(fake.tricks["paged", 1])}
    assert fake.asked.count(("paged", 2)) == 0, "it is not tried again"
    printed = capsys.readouterr().out
    assert "kv_cache=paged failed in round 2" in printed and "[out of memory]" in printed


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        ({"failed": 2, "failures": ["no pages"]}, "2 of 3 requests failed: no pages"),
        ({"requests_hash": "others"}, "its requests differ from those of the other variants"),
        ({"prefix_cache_kept": True}, "prefix cache could not be emptied"),
    ],
)
def test_figures_that_cannot_be_compared_are_none(
    trick: dict[str, Any], words: str, fake: type[FakeChild], tmp_path: Path
) -> None:
    fake.tricks["radix", 0] = trick
    result = ablate(tmp_path, 1)
    assert words in result["variants"][2]["failure"]["reason"] and result["variants"][2]["starts"] == []
    assert [one["variant"] for one in result["comparisons"] if not one["repeats"]] == ["kv_cache=paged"]


@pytest.mark.nightly
def test_a_variant_with_other_tuned_choices_is_marked(
    fake: type[FakeChild], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(VARY)) == 0
    assert "tuning table" not in capsys.readouterr().out
    fake.tuning = {"radix": "4567"}
    assert main(list(VARY)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "tuning table" in line]
    assert "radix ran with tuning table 4567" in line and "first with 0123" in line


def test_ctrl_c_keeps_what_was_measured(
    fake: type[FakeChild], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.tricks["radix", 1] = KeyboardInterrupt()
    result = ablate(tmp_path, 130, f"ablate.plot={tmp_path / 'x.svg'}")
    assert result["interrupted"] and all(one["starts"] for one in result["variants"])
    assert "interrupted" in capsys.readouterr().out and (tmp_path / "x.svg").exists()
    assert fake.closed == 1 + len(fake.asked)


def test_mistakes_that_only_the_host_can_find(fake: type[FakeChild], capsys: pytest.CaptureFixture[str]) -> None:
    fake.tricks["paged", -1] = {"requests": ["others"]}
    fake.tricks["radix", -1] = {"mistake": "no such folder"}
    assert main(list(VARY)) == 2
    printed = capsys.readouterr().err
    assert "kv_cache=paged: it would get other requests than the baseline" in printed
    assert "kv_cache=radix: no such folder" in printed and fake.asked == []
    fake.tricks.update({(kv, -1): {"mistake": "no such text"} for kv in ("prefix_hash", "paged", "radix")})
    assert main(list(VARY)) == 2
    assert capsys.readouterr().err == "dovetail: no such text\n", "a mistake of all variants is reported once"
    fake.tricks.clear()
    fake.tricks["paged", -1] = fake.tricks["radix", -1] = {"unfit": "needs a GPU", "requests": None}
    assert main(list(VARY)) == 2, "with nothing to compare"
    assert "kv_cache=radix: needs a GPU" in capsys.readouterr().err


def test_goodput_decides_only_with_an_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {
        "overrides": ["app=bench", "executor=simulated", "workload.requests=2", "model=tiny", "engine.max_len=256"],
        "config": {},
        "ask": {"prompts": 0},
        "primary": "goodput.requests_per_s",
        "workload": "fixed",
    }
    monkeypatch.setattr(worker_module, "recompose", lambda order: compose(order["overrides"]))
    refused = _check(order, None)
    assert refused == {"mistake": "ablate.primary=goodput.requests_per_s needs ablate.slo.ttft or ablate.slo.tpot"}
    assert _check(order | {"config": {"slo": {"ttft": 1.0}}}, None)["requests"]
    assert _check(order | {"primary": "ttft_ms.median"}, None)["requests"]


def test_lanes_can_be_varied() -> None:
    """A lane is no replica that spreads its experts alone."""
    lanes = ("app=generate", "model=small_moe", "engine.device=cpu", "engine.dp=2", "engine.ep=2")
    check_replicas(compose([*lanes, "experts=gather"]))
    with pytest.raises(CapabilityError, match="experts=whole needs every row"):
        check_replicas(compose([*lanes, "experts=whole"]))


@pytest.mark.nightly
def test_an_ablation_is_resumed_where_it_stopped(
    fake: type[FakeChild], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ablate(tmp_path, 0)
    fake.tricks["radix", 1] = KeyboardInterrupt()
    stopped = ablate(tmp_path, 130)
    fake.tricks.clear()
    done = {(one["name"], start["round"]) for one in stopped["variants"] for start in one["starts"]}
    before = len(fake.asked)
    resumed = ablate(tmp_path, 0, "ablate.resume=true")
    assert len(fake.asked) - before == 12 - len(done) > 0 and not resumed["interrupted"]
    assert resumed["comparisons"] == whole["comparisons"]
    more = ablate(tmp_path, 0, "ablate.resume=true", "ablate.rounds=4")
    assert [len(one["starts"]) for one in more["variants"]] == [4] * 4, "rounds may be added"
    capsys.readouterr()
    words = [*VARY, f"ablate.out={tmp_path / 'out.json'}", "ablate.resume=true", "ablate.rounds=2"]
    assert main(words) == 2, "none may be left out"
    assert "ablate.rounds=2" in (printed := capsys.readouterr().err) and "starts of 4 rounds" in printed
    assert main([*VARY, f"ablate.out={tmp_path / 'out.json'}", "ablate.resume=true", "engine.seed=5"]) == 2
    assert "cannot be continued: nothing, now engine.seed=5" in capsys.readouterr().err
    for other in ("ablate.runs=3", "engine.seed=5", "ablate.primary=ttft_ms.median", "ablate.gate.top1_agreement=0.5"):
        assert main([*VARY, f"ablate.out={tmp_path / 'out.json'}", "ablate.resume=true", other]) == 2
        printed = capsys.readouterr().err
        assert "out.json has another ablation" in printed and "now" in printed and len(printed.splitlines()) == 1
    assert json.loads((tmp_path / "out.json").read_text()) == more, "nothing is overwritten"
    assert main([*VARY, "ablate.resume=true"]) == 2 and "set ablate.out" in capsys.readouterr().err
    before = fake.closed
    (tmp_path / "broken.json").write_text('{"schema": ')
    for name in ("none.json", "broken.json"):
        assert main([*VARY, f"ablate.out={tmp_path / name}", "ablate.resume=true"]) == 2
        assert name in capsys.readouterr().err and fake.closed == before, "it is read before any process starts"


def test_a_void_round_does_not_count(
    fake: type[FakeChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round would change the result; in it, another process used the machine."""
    fake.tricks["paged", 1] = {"output_tokens_per_s": 1.0}
    busy = iter([0.0] * 4 + [0.1, 0.6] + [0.0] * 6)

    def leave(self: Any, *error: object) -> None:
        self.found = {"foreign_cpu": next(busy)}

    monkeypatch.setattr(app_module.Conditions, "__exit__", leave)
    result = ablate(tmp_path, 0, "ablate.void.foreign_cpu=0.5")
    assert list(result["void_rounds"]) == ["1"]
    speed = result["comparisons"][0]["changes"]["output_tokens_per_s"]
    assert (speed["value"], speed["samples"]) == (pytest.approx(2.0), 2)
    words = "round 2 does not count: other processes used 0.6 of the processors, more than 0.5"
    assert words in capsys.readouterr().out
    busy = iter([0.6] * 12)
    report = tmp_path / "report.html"
    assert (
        ablate(tmp_path, 1, "ablate.void.foreign_cpu=0.5", f"ablate.report={report}")["comparisons"][0]["changes"] == {}
    )
    printed = capsys.readouterr().out
    assert "every round is void" in printed and "medians" not in printed and "not measured" not in printed
    assert "every round is void" in report.read_text()


def test_names_of_variants_are_not_broken_in_a_file(fake: type[FakeChild], capsys: pytest.CaptureFixture[str]) -> None:
    name = "a name that is far longer than the columns of figures beside it are together"
    figures = {"ttft_ms": {"median": 1.0, "p95": 2.0}, "tpot_ms": {"median": 1.0}, "itl_ms": {"p99": 1.0}}
    fake.tricks = {(kv, number): figures for kv in ("prefix_hash", "paged") for number in range(3)}
    words = ["app=ablate", f'ablate.arms={{{name}:["kv_cache=paged"]}}', "ablate.rounds=3", "ablate.runs=2"]
    assert main(words) == 0
    assert sum(f" {name} " in line for line in capsys.readouterr().out.splitlines()) == 2


def test_a_variant_outside_the_gate_is_wrong_however_fast(
    fake: type[FakeChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = ablate(tmp_path, 1, "ablate.gate.top1_agreement=0.99")
    assert [one["gate"] for one in result["comparisons"]] == [["it has no answers to judge"]] * 2 + [[]]
    assert "kv_cache=paged does not pass the gate: it has no answers" in capsys.readouterr().out
    assert main([*VARY, "ablate.gate.nll_change=0.1", "ablate.quality.prompts=0"]) == 2
    assert "gate judges answers" in capsys.readouterr().err


@pytest.mark.nightly
def test_blocks_are_compared_within_themselves(
    fake: type[FakeChild], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (f"ablate.report={tmp_path / 'x.html'}", f"ablate.plot={tmp_path / 'x.svg'}")
    result = ablate(tmp_path, 0, "ablate.across={engine.max_seqs:[4,8]}", "ablate.rounds=2", *files)
    names = [one["name"] for one in result["variants"]]
    assert len(names) == 8 and names[-1] == "engine.max_seqs=8: kv_cache=prefix_hash, again"
    pairs = {
        (one["block"], one["variant"].split(": ")[0], one["baseline"].split(": ")[0]) for one in result["comparisons"]
    }
    assert pairs == {(block, block, block) for block in ("engine.max_seqs=4", "engine.max_seqs=8")}
    assert len(result["comparisons"]) == 6 and result["comparisons"][0]["primary"]["comparisons"] == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "in tokens/s, engine.max_seqs=8" in printed and "engine.max_seqs=4: kv_cache=radix raises" in printed
    text = (tmp_path / "x.html").read_text()
    assert text.count("<h2>engine.max_seqs=") == 2 and "<td>kv_cache=radix</td>" in text
    assert "engine.max_seqs=8" in (tmp_path / "x.svg").read_text()


def test_the_report_is_one_file_with_every_part(fake: type[FakeChild], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    tpot = {"prefix_hash": 9.0, "paged": 6.0, "radix": 3.0}
    same = {"requests_hash": "a recording's"}
    fake.tricks = {(kv, number): {"tpot_ms": {"median": ms}} | same for kv, ms in tpot.items() for number in range(3)}
    ablate(tmp_path, 0, f"ablate.report={path}")
    text = path.read_text()
    assert "kv_cache=radix raises output tokens/s by 300 % in every round alike, so there is no noise to test" in text
    assert "all rounds had the same requests" in text
    for part in (
        "Compositions",
        "page_size",
        "seed",
        "torch",
        "no change",
        "kv_cache=prefix_hash, again",
        "logarithmic",
        "Pareto",
        "radix: 80 output tokens/s at a median TPOT of 3 ms",
    ):
        assert part in text, part
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org", "")


def test_each_round_has_requests_of_its_own() -> None:
    """Otherwise rounds would not be independent samples, and intervals would be too narrow."""

    class Target:
        vocab, max_len, adapters, remembers = 1000, 64, None, False
        composition = compose(["app=bench", *CPU])

        def run(self, requests: Sequence[TimedRequest], done: Any) -> tuple[list[Timeline], dict[str, Any]]:
            lines = [Timeline(0.0, len(request.prompt_ids), None) for request in requests]
            for line in lines:
                line.came(1.0, 1)
            return lines, {}

        def encode(self, text: str) -> list[int]:
            raise AssertionError("there is no text")

    target: Any = Target()
    runs = Runs(RunsConfig(runs=2, warmup=0), target, lambda title, count: nullcontext(lambda done: None), print)
    workload = compose(["app=bench", "workload.requests=2", *CPU]).part("workload").build()
    rounds = [_load(runs, "fixed", workload, None, first)["runs"] for first in (0, 2, 0)]
    hashes = [[run["requests_hash"] for run in one] for one in rounds]
    assert hashes[0] == hashes[2] and len({*hashes[0], *hashes[1]}) == 4


# Processes.


def test_the_failure_of_a_process_shows_its_last_output() -> None:
    child = Child("check")
    child._popen.send_signal(signal.SIGSTOP)  # it dies before it answers
    child._popen.send_signal(signal.SIGKILL)
    with pytest.raises(Failure, match="its process was killed by SIGKILL without any output"):
        child.ask({"machine": True})
    child.close()
    child = Child("nonsense")
    with pytest.raises(Failure, match=r"(?s)ended with exit status 1; its last output:.*has no attribute 'nonsense'"):
        child.ask({})
    child.close()


@pytest.mark.nightly
def test_ctrl_c_ends_a_process_that_is_at_work() -> None:
    words = ["app=bench", *CPU, "workload.requests=2000", "workload.prompt_tokens=20", "workload.output_tokens=40"]
    config = {"runs": 1, "warmup": 0}
    order = order_for(compose(words)) | {"workload": "fixed", "config": config, "first": 0, "quality": None}
    child = Child("measure")

    def phase(name: str, share: float | None) -> None:
        if "run 1" in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.ask(order, phase)
    assert child._popen.poll() is None
    child.close()
    assert child._popen.returncode == 130 and not child._reader.is_alive()
