"""Intervals compared with scipy and with simulated data; order of variants in rounds; choice of baselines."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from scipy import stats as scipy_stats

from dovetail.plugins.app.ablate.compare import comparisons, quality, summary
from dovetail.plugins.app.ablate.stats import Estimate, mean, paired, t_quantile, t_within, turns


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 10, 29, 100])
def test_student_t_is_scipy_s(df: int) -> None:
    assert t_quantile(df) == pytest.approx(scipy_stats.t.ppf(0.975, df), rel=1e-9)
    assert t_quantile(df, 0.5) == pytest.approx(scipy_stats.t.ppf(0.75, df), rel=1e-9)
    assert t_within(1.3, df) == pytest.approx(2 * scipy_stats.t.cdf(1.3, df) - 1, rel=1e-9)


def test_a_mean_has_scipy_s_interval() -> None:
    values = [0.3, -1.2, 2.5, 0.9]
    low, high = scipy_stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=scipy_stats.sem(values))
    found = mean(values, "rounds")
    assert (found.value, found.low, found.high) == pytest.approx((0.625, low, high))
    assert (found.samples, found.unit) == (4, "rounds")


def test_what_hits_both_alike_cancels() -> None:
    """Each round is slower than the previous one, and the variant is always 1.25 times as fast."""
    base = {0: [100.0, 90.0], 1: [50.0, 45.0], 2: [10.0, 12.0]}
    found = paired({n: [1.25 * v for v in runs] for n, runs in base.items()}, base, ratio=True)
    assert found is not None and (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_a_ratio_and_its_inverse_are_alike() -> None:
    mine, theirs = {0: [1.0], 1: [2.0], 2: [4.0]}, {0: [2.0], 1: [2.0], 2: [2.0]}
    found, inverse = paired(mine, theirs, ratio=True), paired(theirs, mine, ratio=True)
    assert found is not None and inverse is not None
    assert found.value == pytest.approx(1.0) and not found.excludes(1.0)
    assert (inverse.low, inverse.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_one_sample_has_no_interval_and_one_round_says_so() -> None:
    alone = paired({0: [3.0]}, {0: [2.0]}, ratio=True)
    assert alone == Estimate(pytest.approx(1.5), None, None, 1, "rounds") and not alone.excludes(1.0)
    inside = paired({0: [3.0, 3.3]}, {0: [2.0, 2.0]}, ratio=True)
    assert inside is not None and (inside.samples, inside.unit) == (2, "runs")


def test_only_rounds_that_both_have_count() -> None:
    found = paired({0: [2.0], 1: [4.0], 3: [9.0]}, {0: [1.0], 1: [2.0], 2: [1.0]}, ratio=True)
    assert found is not None and (found.value, found.samples) == (pytest.approx(2.0), 2)
    assert paired({1: [1.0]}, {0: [1.0]}, ratio=True) is None
    assert paired({0: [0.0]}, {0: [1.0]}, ratio=True) is None, "zero has no logarithm"
    assert paired({0: [0.0], 1: [0.0]}, {0: [0.7], 1: [0.7]}, ratio=False).value == pytest.approx(-0.7)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Starts differ by 5 %, runs within a start by 1 %. Of the intervals over rounds, 95 % contain the true ratio. Of
    intervals over all runs, wrongly taken as independent, far fewer do."""
    rng, held, wrongly = random.Random(7), 0, 0
    trials, true = 2000, 1.1
    for _ in range(trials):
        mine: dict[int, list[float]] = {}
        theirs: dict[int, list[float]] = {}
        for number in range(4):
            drift, own, other = rng.gauss(0, 0.3), rng.gauss(0, 0.05), rng.gauss(0, 0.05)
            mine[number] = [true * math.exp(drift + own + rng.gauss(0, 0.01)) for _ in range(3)]
            theirs[number] = [math.exp(drift + other + rng.gauss(0, 0.01)) for _ in range(3)]
        held += not paired(mine, theirs, ratio=True).excludes(true)
        flat = [math.log(a / b) for n in mine for a, b in zip(mine[n], theirs[n], strict=True)]
        wrongly += not mean(flat, "runs").excludes(math.log(true))
    assert 0.935 < held / trials < 0.965
    assert wrongly / trials < 0.85


@pytest.mark.parametrize("variants", [2, 3, 4, 5, 7])
def test_turns_are_balanced(variants: int) -> None:
    rounds = variants if variants % 2 == 0 else 2 * variants
    orders = [turns(variants, number) for number in range(rounds)]
    assert orders[0][0] == 0, "the first baseline goes first in the first round: others answer on what it sampled"
    assert all(sorted(order) == list(range(variants)) for order in orders)
    for place in range(variants):
        assert set(Counter(order[place] for order in orders).values()) == {rounds // variants}
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert len(after) == variants * (variants - 1) and len(set(after.values())) == 1


# Comparisons.


def record(name: str, speeds: list[float], *baselines: str, hits: float = 0.0, answers: Any = None) -> dict[str, Any]:
    starts = [
        {
            "round": number,
            "startup": {"startup_s": 2.0},
            "loads": [{"rate": None, "runs": [{"output_tokens_per_s": speed, "prefix_hit_rate": hits}]}],
        }
        for number, speed in enumerate(speeds)
    ]
    return {"name": name, "block": "", "baselines": list(baselines), "starts": starts, "quality": answers}


def test_a_step_is_held_against_the_last_that_has_figures() -> None:
    first, second = record("a", [10.0, 10.0]), record("b", [20.0, 20.0], "a", hits=0.5)
    dead, last = record("c", [], "b", "a"), record("d", [40.0, 40.0], "c", "a", hits=0.75)
    found = comparisons([first, second, dead, last])
    pairs = {(one["variant"], one["baseline"]): one["changes"] for one in found}
    assert list(pairs) == [("b", "a"), ("d", "b"), ("d", "a")]
    assert pairs["d", "b"]["output_tokens_per_s"]["value"] == pytest.approx(2.0)
    assert pairs["d", "a"]["output_tokens_per_s"]["value"] == pytest.approx(4.0)
    assert pairs["d", "b"]["prefix_hit_rate"]["value"] == pytest.approx(0.25), "shares are compared by difference"
    assert "ttft_ms.median" not in pairs["d", "b"], "a value that no run has is left out"
    assert summary(second, None) == {"output_tokens_per_s": 20.0, "prefix_hit_rate": 0.5, "startup_s": 2.0}


def test_answers() -> None:
    base = {"greedy": [[1, 2, 3, 4], [5, 6, 7, 8]], "top": [[1, 2], [3, 4]], "nll": [[1.0, 1.0], [2.0, 2.0]]}
    # One output differs at its third token; that the fourth is equal again does not count.
    other = {"greedy": [[1, 2, 9, 4], [5, 6, 7, 8]], "top": [[1, 2], [3, 9]], "nll": [[1.5, 1.5], [2.0, 2.2]]}
    found = quality(other, base)
    assert found is not None
    assert (found["greedy_tokens_equal"], found["outputs_equal"], found["top1_agreement"]) == (6 / 8, 0.5, 0.75)
    change = found["nll_change"]
    assert (change["value"], change["samples"], change["unit"]) == (pytest.approx(0.3), 2, "windows")
    assert quality(base, base)["nll_change"]["high"] == 0.0 and quality(None, base) is None
