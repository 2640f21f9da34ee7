"""Acceptance by a coin (spec_decode.simulate_acceptance)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.compose import cli, compose
from dovetail.core.engine.counters import Counters
from dovetail.core.errors import ConfigError
from dovetail.core.startup_notes import SIMULATED
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.simulated_acceptance import simulate
from dovetail.plugins.app.ablate.report import sentences
from dovetail.plugins.app.bench import report
from dovetail.plugins.app.generate.app import _settings
from dovetail.plugins.app.serve.app import ServeApp
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.spec_decode.config import NgramConfig, rates_of


@pytest.mark.parametrize(("mean", "drafts"), [(3.3, 4), (1.0, 4), (5.0, 4), (1.5, 7)])
def test_equal_rates_bring_the_mean(mean: float, drafts: int) -> None:
    (rate,) = set(rates_of(mean, drafts))
    assert sum(rate**k for k in range(drafts + 1)) == pytest.approx(mean, abs=1e-6)


def test_coins_accept_at_the_rates() -> None:
    """Accepted drafts stay, refused ones differ; the coin depends on sequence and position alone."""
    rows, rates = 6000, (0.9, 0.5)
    state = DeviceState(
        slots=rows, max_len=8, lookahead=2, groups=(), device=torch.device("cpu"), seed=0, simulated_rates=rates
    )
    state.key_S.random_(1 << 60, generator=torch.Generator().manual_seed(1))
    state.tokens_SL.fill_(7)
    slots_R, base_R = torch.arange(rows), torch.full((rows,), 3)
    drawn_RW = torch.randint(0, 9, (rows, 3), generator=torch.Generator().manual_seed(2))
    found_RW = simulate(drawn_RW, slots_R, base_R, state, 9)
    agreed_RK = found_RW[:, :2] == 7
    assert agreed_RK.float().mean(0).tolist() == pytest.approx(rates, abs=0.02)
    assert torch.equal(found_RW[:, 2], drawn_RW[:, 2]) and int(found_RW.max()) < 9
    again_RW = simulate(drawn_RW.flip(0), slots_R.flip(0), base_R, state, 9).flip(0)
    assert torch.equal(again_RW[:, :2] == 7, agreed_RK)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"simulate_acceptance": 5.5}, "brings 1 to 5 tokens"),
        ({"simulate_acceptance": 0.5}, "brings 1 to 5 tokens"),
        ({"simulate_acceptance": [0.5, 0.5]}, "give 4 probabilities"),
        ({"simulate_acceptance": [0.5, 0.5, 0.5, 1.5]}, "give 4 probabilities"),
    ],
)
def test_rates_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NgramConfig(**options)


def test_a_server_refuses_it() -> None:
    composition = compose(["app=serve", "spec_decode=ngram", "spec_decode.simulate_acceptance=2"])
    with pytest.raises(ConfigError, match="app=serve refuses it.*app=bench"):
        ServeApp(ServeConfig()).run(composition, ())


def test_an_engine_accepts_by_coin_and_says_so() -> None:
    overrides = ["spec_decode=eagle", "spec_decode.lookahead=3", "spec_decode.load=dummy", "engine.kv_pages=64"]
    rates = "spec_decode.simulate_acceptance=[0.9,0.5,0.9]"
    with LLM("tiny", overrides=[*overrides, rates, "engine.device=cpu"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        llm.generate(["def f(x):", "class A:", "import", "return"], params)
        counters: Counters = llm.counters
        notes = llm.engine.info.notes
    found = [taken / reached for taken, reached in zip(counters.accepted_at, counters.reached_at, strict=True)]
    assert found == pytest.approx([0.9, 0.5, 0.9], abs=0.16)
    assert sum(counters.accepted_at) == counters.accepted
    assert any(re.match(f"{SIMULATED}: .*0.9, 0.5, 0.9", note) for note in notes)
    assert report.simulated({"startup": {"slower_paths": list(notes)}}) == f"{SIMULATED}: "


def test_files_of_results_say_so(tmp_path: Path) -> None:
    words = ["spec_decode=ngram", "spec_decode.simulate_acceptance=2", "engine.device=cpu", "engine.max_len=64"]
    assert cli.main([*words, f"generate.output={tmp_path}/out.jsonl", "generate.max_tokens=2", "--", "a", "b"]) == 0
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        assert json.loads(line)["note"].startswith(SIMULATED)


def test_reports_of_ablations_say_so() -> None:
    startup = {"slower_paths": [f"{SIMULATED}: by a coin"]}
    result = {
        "config": {"ablate": {"primary": "ttft_ms.median", "rounds": 1}},
        "variants": [{"starts": [{"startup": startup}]}],
        "void_rounds": {},
        "comparisons": [],
    }
    assert [line.startswith(f"{SIMULATED}: ") for line in sentences(result)] == [True]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["spec_decode=ngram", "spec_decode.simulate_acceptance=2"], "spec_decode.simulate_acceptance"),
        (["spec_decode=draft_model", "spec_decode.verify=typical"], "spec_decode.verify"),
        (["spec_decode=draft_model"], None),
    ],
)
def test_only_drafts_that_change_the_text_are_settings_of_a_file(words: list[str], option: str | None) -> None:
    """A run into a file continues with another drafter, unless its outputs would be others."""
    found = _settings(compose(["engine.device=cpu", *words]))
    drafter = [name for name in found if name.startswith("spec_decode.")]
    assert (option in drafter) if option else not drafter


def test_counters_of_several_engines_are_added_up() -> None:
    one = Counters(steps=2, reached_at=[4, 2], accepted_at=[2, 1], device_seconds=0.5)
    other = Counters(steps=1, reached_at=[1], accepted_at=[1])
    total = Counters.total([one, other])
    assert (total.steps, total.reached_at, total.accepted_at, total.device_seconds) == (3, [5, 2], [3, 1], 0.5)


def test_a_benchmark_tells_acceptance_by_position_and_the_parts_of_a_step() -> None:
    figures = {
        "acceptance_length": 2.5,
        "draft_acceptance": 0.5,
        "acceptance_by_position": [0.75, None],
        "speculation_ms_per_step": {"draft": 1.0, "draw": 0.5},
        "device_ms_per_step": 4.0,
    }
    loads = [{"rate": None, "runs": [figures]}]
    note = f"{SIMULATED}: drafts are accepted by a coin"
    table = report._speculation(
        {"startup": {"slower_paths": [note]}, "results": [{"workload": "fixed", "loads": loads}]}
    )
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert str(table.title).startswith(f"{SIMULATED}: ")
    assert (cells["draft 1"], cells["draft 2"], cells["verify ms"]) == (["75.0%"], ["n/a"], ["2.500"])


def test_a_simulated_device_refuses_it() -> None:
    words = ["executor=simulated", "executor.acceptance=0.5", "spec_decode=ngram", "spec_decode.simulate_acceptance=2"]
    with pytest.raises(ConfigError, match="executor.acceptance: set spec_decode.simulate_acceptance=null"):
        LLM("tiny", overrides=[*words, "engine.device=cpu"])
