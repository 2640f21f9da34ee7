"""Claims of an ablation: coverage of intervals, p values, correction, power, gates and sentences, on simulated data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats as scipy_stats

from dovetail.plugins.app.ablate.compare import BY_PATH, METRICS, comparisons, faults, sentence, verdict
from dovetail.plugins.app.ablate.conditions import Conditions, _descendants, unchecked, void
from dovetail.plugins.app.ablate.config import Primary, VoidConfig
from dovetail.plugins.app.ablate.report import seen, void_notes
from dovetail.plugins.app.ablate.significance import detectable, holm, is_exact, sign_flip_p, t_p
from dovetail.plugins.app.ablate.stats import Estimate, mean, paired

ABLATIONS, ROUNDS, RUNS, REQUESTS = 2000, 6, 2, 16


def simulated(seed: int, effect: float = 0.0) -> np.ndarray:
    """Return log times of A/A ablations, [ablation, variant, round, run, request]: rounds differ, starts differ, and
    requests of one start share its conditions."""
    rng = np.random.default_rng(seed)
    shape = (ABLATIONS, 2, ROUNDS, RUNS, REQUESTS)
    rounds, starts, runs, requests = (
        sigma * rng.standard_normal(shape[:dims] + (1,) * (5 - dims))
        for sigma, dims in ((0.1, 3), (0.03, 3), (0.01, 4), (0.05, 5))
    )
    logs = rounds[:, :1] + starts + runs + requests
    logs[:, 0] += effect
    return logs


def check_coverage(found: Sequence[Estimate | None], unchanged: float) -> None:
    """Check that as many of the 95 % intervals of ablations without an effect contain no change as they state."""
    assert len(found) == ABLATIONS
    covered = np.mean([one is not None and not one.excludes(unchanged) for one in found])
    assert 0.94 <= covered <= 0.96, f"{covered:.1%}"


def test_intervals_over_rounds_cover_no_change_as_often_as_they_say() -> None:
    values = np.exp(simulated(7)).mean(axis=-1).tolist()
    check_coverage(
        [paired(dict(enumerate(mine)), dict(enumerate(theirs)), ratio=True) for mine, theirs in values],
        1.0,
    )


def test_intervals_over_requests_do_not() -> None:
    """Requests of one start are not independent: such intervals are far too narrow."""
    found = [mean((mine - theirs).ravel().tolist(), "runs") for mine, theirs in simulated(7)]
    with pytest.raises(AssertionError, match=r"^4\d\.\d%"):
        check_coverage(found, 0.0)


def test_sign_flips_are_scipy_s_and_keep_their_level() -> None:
    values = [0.3, -0.1, 0.5, 0.2, 0.4, 0.15, 0.35]

    def total(x: Any, axis: int) -> Any:
        return np.sum(x, axis=axis)

    exact = scipy_stats.permutation_test((values,), total, permutation_type="samples", n_resamples=10_000)
    assert sign_flip_p(values) == pytest.approx(exact.pvalue)
    assert sign_flip_p([1.0] * 6) == 2 / 64 and sign_flip_p([1.0] * 5) == 2 / 32 and sign_flip_p([1.0] * 17) is None
    noise = np.random.default_rng(0).standard_normal((ABLATIONS, ROUNDS)).tolist()
    found = sum((sign_flip_p(one) or 0) <= 0.05 for one in noise) / ABLATIONS
    assert 0.02 < found < 0.045, "one of the 32 pairs of sign patterns"


def test_t_is_scipy_s() -> None:
    values = [0.3, -0.1, 0.5, 0.2]
    assert t_p(values) == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue)
    assert t_p([0.1]) is None and t_p([0.1, 0.1]) == 0.0 and t_p([0.0, 0.0]) == 1.0


def test_holm_corrects_a_family() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
    false = 0
    for one in np.random.default_rng(1).random((ABLATIONS, 4)).tolist():
        false += min(holm(one)) < 0.05
    assert 0.03 < false / ABLATIONS < 0.06, "the chance of any false finding"


def test_sign_flips_decide_once_rounds_suffice() -> None:
    assert [next(n for n in range(2, 17) if is_exact(n, m)) for m in (1, 2, 3, 4, 8)] == [6, 7, 7, 8, 9]
    assert not is_exact(17, 1)


def test_the_detectable_effect_is_found_as_often_as_stated() -> None:
    """The noise comes from A/A pairs; an effect of just that size is seen in about 80 % of ablations."""
    sigma, rng = 0.05, np.random.default_rng(3)
    least = detectable((sigma * scipy_stats.norm.ppf(np.linspace(0.01, 0.99, 99))).tolist(), ROUNDS)
    assert least is not None
    found = [
        mean(one, "rounds").excludes(0.0) for one in (least + sigma * rng.standard_normal((1000, ROUNDS))).tolist()
    ]
    assert 0.72 < np.mean(found) < 0.85
    assert detectable([0.1], ROUNDS) is None and detectable([0.1, 0.2], 1) is None


# Sentences.


def variant(name: str, speeds: Sequence[float], baseline: str | None = "base", **more: Any) -> dict[str, Any]:
    starts = [
        {"round": n, "startup": {}, "loads": [{"rate": None, "runs": [{"output_tokens_per_s": speed}]}]}
        for n, speed in enumerate(speeds)
    ]
    return {
        "name": name,
        "block": "",
        "baselines": [baseline] if baseline else [],
        "starts": starts,
        "quality": None,
        **more,
    }


BASE = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8]
AGAIN = [100.3, 100.6, 99.3, 100.1, 99.9, 99.9, 100.1]


def said(*variants: dict[str, Any]) -> list[str]:
    found = comparisons(variants)
    return [sentence(one, "output_tokens_per_s") for one in found if not one["repeats"]]


def test_sentences_state_effects_and_bounds_and_never_no_effect() -> None:
    fast = variant("fast", [131.0 * b / 100 + i / 10 for i, b in enumerate(BASE)])
    same = variant("same", [b + (0.5, -0.5)[i % 2] for i, b in enumerate(BASE)])
    again = variant("base, again", AGAIN, repeats=True)
    lines = said(variant("base", BASE, None), fast, same, again)
    assert lines[0].startswith("fast raises output tokens/s by 31.3 % [31.1, 31.5], p = 0.031 after Holm's correction")
    assert lines[1] == "same has no effect on output tokens/s larger than 0.57 %"
    assert len(lines) == 2, "the repeated baseline is no variant"


def test_what_is_claimed_passes_both_tests() -> None:
    """One large round widens the interval to no change, and its sign is that of the others."""
    speed = BY_PATH["output_tokens_per_s"]
    slight, clear = ([100.0 * factor for factor in (1.01,) * 5 + (last,)] for last in (1.2, 1.011))
    for speeds, sees in ((slight, ""), (clear, "better")):
        (one,) = comparisons([variant("base", [100.0] * 6, None), variant("x", speeds)])
        assert one["primary"]["exact"] and one["primary"]["p"] < 0.05 and verdict(one, speed) == sees
        assert ("no effect" in sentence(one, speed.path)) == (not sees)


def test_the_smallest_effect_has_the_direction_of_the_change() -> None:
    """No effect lowers a time by 300 %."""
    ttft = BY_PATH["ttft_ms.median"]
    assert seen({"value": 1.1, "detectable": 3.0}, ttft) == "sees 300 %"
    assert seen({"value": 0.6, "detectable": 3.0}, ttft) == "sees 75.0 %"
    assert seen({"value": -0.1, "detectable": 0.03}, BY_PATH["prefix_hit_rate"]) == "sees 3.0 points"


def test_an_interval_that_excludes_nothing_is_no_bound() -> None:
    lines = said(variant("base", BASE, None), variant("x", [b * (0.2, 5.0)[i % 2] for i, b in enumerate(BASE)]))
    assert lines[0].startswith("x: the effect on output tokens/s remains open, between -") and "e+" not in lines[0]
    (wide,) = said(variant("base", BASE[:2], None), variant("x", [b * (0.1, 9.0)[i] for i, b in enumerate(BASE[:2])]))
    assert wide.endswith("between -100 and more than +1000 %"), wide


def test_equal_figures_are_not_called_a_bound() -> None:
    """A simulated device repeats to the bit."""
    lines = said(variant("base", BASE, None), variant("x", BASE), variant("base, again", BASE, repeats=True))
    assert lines == ["x has the baseline's output tokens/s in every round"]


def test_without_drafts_a_row_yields_one_token() -> None:
    def drafting(name: str, lengths: Sequence[float | None], baseline: str | None) -> dict[str, Any]:
        made = variant(name, BASE[: len(lengths)], baseline)
        for start, length in zip(made["starts"], lengths, strict=True):
            start["loads"][0]["runs"][0]["acceptance_length"] = length
        return made

    base, drafted = drafting("base", [None] * 3, None), drafting("ngram", [1.5, 1.6, 1.4], "base")
    (one,) = comparisons([base, drafted], "acceptance_length")
    assert sentence(one, "acceptance_length").startswith("ngram raises tokens per decode row by 49.8 % [")
    (one,) = comparisons([base, drafting("x", [None] * 3, "base")], "acceptance_length")
    assert "was not measured" in sentence(one, "acceptance_length")


def test_few_rounds_and_slight_effects_are_called_that() -> None:
    assert said(variant("base", [100.0], None), variant("x", [120.0])) == [
        "x raises output tokens/s by 20 % in one round, which is no evidence"
    ]
    slight = [variant(f"v{i}", [b * (0.99 + 0.004 * ((j + i) % 3)) for j, b in enumerate(BASE[:5])]) for i in range(6)]
    lines = said(variant("base", BASE[:5], None), *slight)
    assert any("lowers" in line and "not significant (p = " in line for line in lines)


def test_noise_comes_from_the_repeated_baseline() -> None:
    found = comparisons([variant("base", BASE, None), variant("x", BASE), variant("a", AGAIN, repeats=True)])
    noise = [math.log(a / b) for a, b in zip(AGAIN, BASE, strict=True)]
    least = detectable(noise, 7)
    assert least is not None
    assert found[0]["changes"]["output_tokens_per_s"]["detectable"] == pytest.approx(math.expm1(least))
    assert (
        comparisons([variant("base", BASE, None), variant("x", BASE)])[0]["changes"]["output_tokens_per_s"][
            "detectable"
        ]
        is None
    )


def test_a_gate_judges_the_whole_interval() -> None:
    answers = {"nll_change": {"value": 0.01, "low": -0.01, "high": 0.03}, "top1_agreement": 0.97}
    assert faults(answers, {"nll_change": 0.04, "top1_agreement": None}) == []
    assert faults(answers, {"nll_change": 0.02}) == ["nll_change may be +0.0300 nats/token, more than 0.02"]
    assert faults(answers, {"top1_agreement": 0.98}) == ["top1_agreement is 97.0%, less than 98.0%"]
    assert faults(None, {"top1_agreement": None}) == []


def test_every_figure_can_be_the_primary_one() -> None:
    assert list(get_args(Primary)) == [metric.path for metric in METRICS]


# Conditions.


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) echo "0x0000000000000044, 1200, 1980, 97"; echo "0x0000000000000004, 1980, 1980, 0";;
  *) echo "{pid}"; echo "1";;
esac
"""


def test_conditions_of_a_gpu_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import time

    script = tmp_path / "nvidia-smi"
    script.write_text(SMI.replace("{pid}", str(os.getpid())))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("dovetail.plugins.app.ablate.conditions.SAMPLE_SECONDS", 0.001)
    conditions = Conditions(VoidConfig(), gpu=True)
    with conditions:
        deadline = time.monotonic() + 60
        while "gpu_processes" not in conditions.found and time.monotonic() < deadline:
            time.sleep(0.005)
    assert conditions.found["throttled"] == 0x40 and conditions.found["gpu_processes"] == 1
    assert conditions.found["clock"] == pytest.approx(1200 / 1980, abs=1e-3) and 0 <= conditions.found["foreign_cpu"]
    assert os.getpid() in _descendants(os.getppid())


def test_rules_that_could_not_be_applied_are_named() -> None:
    rule = VoidConfig(clock=0.9)
    assert unchecked(rule, {"clock": 1.0}, gpu=True) == ["throttled", "gpu_processes"]
    assert unchecked(rule, {}, gpu=False) == [] and unchecked(VoidConfig(foreign_cpu=0.1), {}, gpu=False) == [
        "foreign_cpu"
    ]
    runs = [{"round": n, "startup": {}, "loads": [], "conditions": {"throttled": 0} if n else {}} for n in (0, 1)]
    result = {"variants": [{"starts": runs}], "void_rounds": {}, "machine": {"gpus": ["an H200"]}}
    rule = VoidConfig(gpu_processes=False)
    lines = list(void_notes(result | {"config": {"ablate": {"void": rule.model_dump()}}}))
    assert lines == ["ablate.void.throttled could not be checked in 1 of 2 starts, since its value is unknown"]


@pytest.mark.parametrize(
    ("rule", "found", "says"),
    [
        ({}, {"throttled": 0x40}, "temperature or power (clock event reasons 0x40)"),
        ({"throttled": False}, {"throttled": 0x40}, None),
        ({}, {"gpu_processes": 2}, "2 other process(es) used the GPU"),
        ({"clock": 0.9}, {"clock": 0.6}, "fell to 0.6 of its maximum, below 0.9"),
        ({"foreign_cpu": 0.2}, {"foreign_cpu": 0.3}, "0.3 of the processors, more than 0.2"),
        ({"foreign_cpu": 0.2, "clock": 0.9}, {}, None),
    ],
)
def test_rules_are_applied(rule: dict[str, Any], found: dict[str, Any], says: str | None) -> None:
    reason = void(VoidConfig(**rule), found)
    assert reason is None if says is None else reason is not None and says in reason
