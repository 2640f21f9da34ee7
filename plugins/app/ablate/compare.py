"""The change that each variant made, computed from the records of all runs. Pure functions on plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import median
from typing import Any

from dovetail.plugins.app.ablate.stats import mean, paired
from dovetail.plugins.app.bench.metrics import at


@dataclass(frozen=True, slots=True)
class Metric:
    path: str
    """Dotted path of the value in a run's record."""
    title: str
    more_is_better: bool
    ratio: bool = True
    """True: compared as a ratio. False: the value is a share and is compared as a difference."""
    of_start: bool = False
    """True: one value per start, not per run."""


METRICS = (
    Metric("output_tokens_per_s", "output/s", True),
    Metric("ttft_ms.median", "TTFT p50", False),
    Metric("ttft_ms.p95", "TTFT p95", False),
    Metric("tpot_ms.median", "TPOT p50", False),
    Metric("itl_ms.p99", "ITL p99", False),
    Metric("goodput.requests_per_s", "goodput", True),
    Metric("prefix_hit_rate", "hits", True, ratio=False),
    Metric("kv_waste", "KV waste", False, ratio=False),
    Metric("startup_s", "start-up s", False, of_start=True),
)


def samples(variant: Mapping[str, Any], rate: float | None, metric: Metric) -> dict[int, list[float]]:
    """Return round -> the values of its runs. A round in which a run lacks the value is left out."""
    found = {}
    for start in variant["starts"]:
        runs = [start["startup"]] if metric.of_start else _runs(start, rate)
        values = [at(run, metric.path) for run in runs]
        if values and None not in values:
            found[start["round"]] = [value for value in values if value is not None]
    return found


def _runs(start: Mapping[str, Any], rate: float | None) -> list[dict[str, Any]]:
    return [run for load in start["loads"] if load["rate"] == rate for run in load["runs"]]


def summary(variant: Mapping[str, Any], rate: float | None) -> dict[str, float]:
    """Return the median of each metric over all runs."""
    found = {metric.path: samples(variant, rate, metric) for metric in METRICS}
    return {path: median(v for runs in by.values() for v in runs) for path, by in found.items() if by}


def comparisons(variants: Sequence[Mapping[str, Any]], rates: Sequence[float | None]) -> list[dict[str, Any]]:
    """Compare each variant with its baselines. One without figures is replaced by its own nearest that has some."""
    by_name = {variant["name"]: variant for variant in variants}
    found = []
    for variant in variants:
        if not variant["starts"]:
            continue
        for baseline in _measured(variant["baselines"], by_name):
            other = by_name[baseline]
            for rate in rates:
                values = {m: (samples(variant, rate, m), samples(other, rate, m)) for m in METRICS}
                changes = {m.path: paired(*both, ratio=m.ratio) for m, both in values.items()}
                found.append(
                    {
                        "variant": variant["name"],
                        "baseline": baseline,
                        "rate": rate,
                        "changes": {path: asdict(change) for path, change in changes.items() if change is not None},
                        "quality": quality(variant["quality"], other["quality"]),
                    }
                )
    return found


def _measured(names: Sequence[str], by_name: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    for name in names:
        while not by_name[name]["starts"] and by_name[name]["baselines"]:
            name = by_name[name]["baselines"][0]
        if by_name[name]["starts"]:
            found.append(name)
    return list(dict.fromkeys(found))


def quality(mine: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return how far the answers of two variants agree, or None if one of them has no answers."""
    if mine is None or theirs is None:
        return None
    outputs = list(zip(mine["greedy"], theirs["greedy"], strict=True))
    same = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))) for a, b in outputs]
    tops = [a == b for x, y in zip(mine["top"], theirs["top"], strict=True) for a, b in zip(x, y, strict=True)]
    likelihoods = zip(mine["nll"], theirs["nll"], strict=True)
    change = mean([sum(a) / len(a) - sum(b) / len(b) for a, b in likelihoods], "windows")
    return {
        "greedy_tokens_equal": sum(same) / sum(len(b) for _, b in outputs),
        "outputs_equal": sum(a == b for a, b in outputs) / len(outputs),
        "top1_agreement": sum(tops) / len(tops),
        "nll_change": asdict(change),
    }
