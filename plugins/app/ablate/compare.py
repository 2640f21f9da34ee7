"""The change that each variant made, computed from the records of all runs. Pure functions on plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

from dovetail.plugins.app.ablate.significance import detectable, holm, is_exact, sign_flip_p, t_p
from dovetail.plugins.app.ablate.stats import CONFIDENCE, by_round, mean, paired
from dovetail.plugins.app.bench.metrics import at


@dataclass(frozen=True, slots=True)
class Metric:
    path: str
    """Dotted path of the value in a run's record."""
    title: str
    words: str
    """Name in a sentence."""
    more_is_better: bool
    ratio: bool = True
    """True: compared as a ratio. False: the value is a share and is compared as a difference."""
    of_start: bool = False
    """True: one value per start, not per run."""
    absent: float | None = None
    """Value of runs that lack it, if the other variant has it; None = they cannot be compared."""


METRICS = (
    Metric("output_tokens_per_s", "output/s", "output tokens/s", True),
    Metric("ttft_ms.median", "TTFT p50", "the median TTFT", False),
    Metric("ttft_ms.p95", "TTFT p95", "the 95th percentile of TTFT", False),
    Metric("tpot_ms.median", "TPOT p50", "the median TPOT", False),
    Metric("itl_ms.p99", "ITL p99", "the 99th percentile of ITL", False),
    Metric("goodput.requests_per_s", "goodput", "goodput", True),
    Metric("prefix_hit_rate", "hits", "the share of prefix hits", True, ratio=False),
    # Without drafts, a row yields one token.
    Metric("acceptance_length", "tokens/row", "tokens per decode row", True, absent=1.0),
    Metric("kv_waste", "KV waste", "KV waste", False, ratio=False),
    Metric("startup_s", "start-up s", "the time to start", False, of_start=True),
)
BY_PATH = {metric.path: metric for metric in METRICS}


OPEN = 50.0
"""Percent, or percentage points: an interval that includes both no change and such an effect is no useful bound."""
BEYOND = 1000.0
"""Percent: greater edges of an open interval are not stated."""
EXACT = 1e-9
"""Percent, or percentage points: smaller changes are rounding of equal values, as in virtual time."""


class Load(NamedTuple):
    """Runs that are compared with each other."""

    block: str
    """Values of `across`; "" = there are none."""
    rate: float | None

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f"{self.rate:g} requests/s"
        return ", ".join(filter(None, (self.block, rate)))

    def name(self, variant: str) -> str:
        """Return the name of one of its variants without that of the block."""
        return variant.removeprefix(f"{self.block}: ")


def loads(result: Mapping[str, Any]) -> list[Load]:
    """Return each block at each rate that it was measured at."""
    blocks = dict.fromkeys(variant["block"] for variant in result["variants"])
    known = {Load(one["block"], rate) for one in result["variants"] for rate in _rates(one)}
    return [load for block in blocks for rate in result["rates"] if (load := Load(block, rate)) in known]


def of_load(result: Mapping[str, Any], load: Load) -> list[Mapping[str, Any]]:
    """Return the variants of a load."""
    return [variant for variant in result["variants"] if variant["block"] == load.block]


def compared(result: Mapping[str, Any], load: Load) -> list[dict[str, Any]]:
    """Return the comparisons of a load."""
    return [one for one in result["comparisons"] if (one["block"], one["rate"]) == load]


def _rates(variant: Mapping[str, Any]) -> list[float | None]:
    return list(dict.fromkeys(load["rate"] for start in variant["starts"] for load in start["loads"]))


def samples(
    variant: Mapping[str, Any], rate: float | None, metric: Metric, absent: float | None = None
) -> dict[int, list[float]]:
    """Return round -> the values of its runs. A void round, and one in which a run lacks the value, is left out.
    `absent`: value of runs that lack it."""
    found = {}
    for start in variant["starts"]:
        if start.get("void"):
            continue
        runs = [start["startup"]] if metric.of_start else _runs(start, rate)
        values = [absent if (value := at(run, metric.path)) is None else value for run in runs]
        if values and None not in values:
            found[start["round"]] = [value for value in values if value is not None]
    return found


def _runs(start: Mapping[str, Any], rate: float | None) -> list[dict[str, Any]]:
    return [run for load in start["loads"] if load["rate"] == rate for run in load["runs"]]


def summary(variant: Mapping[str, Any], rate: float | None) -> dict[str, float]:
    """Return the median of each metric over all runs."""
    found = {metric.path: samples(variant, rate, metric) for metric in METRICS}
    return {path: median(v for runs in by.values() for v in runs) for path, by in found.items() if by}


def comparisons(
    variants: Sequence[Mapping[str, Any]],
    primary: str = METRICS[0].path,
    gate: Mapping[str, float | None] | None = None,
) -> list[dict[str, Any]]:
    """Compare each variant with its baselines. One without figures is replaced by its own nearest that has some.
    `primary`: path of the metric whose p values are corrected. `gate`: limits of `quality`, see `faults`."""
    by_name = {variant["name"]: variant for variant in variants}
    repeated = {variant["block"]: variant for variant in variants if variant.get("repeats")}
    found = []
    for variant in variants:
        if not variant["starts"]:
            continue
        for baseline in _measured(variant["baselines"], by_name):
            other = by_name[baseline]
            answers = quality(variant["quality"], other["quality"])
            for rate in _rates(variant):
                noise = _noise(repeated.get(variant["block"]), by_name, rate)
                found.append(
                    {
                        "variant": variant["name"],
                        "baseline": baseline,
                        "block": variant["block"],
                        "rate": rate,
                        "repeats": bool(variant.get("repeats")),
                        "changes": _changes(variant, other, rate, noise),
                        "quality": answers,
                        "gate": faults(answers, gate or {}) if not variant.get("repeats") else [],
                    }
                )
    _correct([one for one in found if not one["repeats"]], primary)
    return found


Noise = Mapping[str, Sequence[float]]
"""Path of a metric -> changes between the two runs of the baseline, by round."""


def _noise(again: Mapping[str, Any] | None, by_name: Mapping[str, Mapping[str, Any]], rate: float | None) -> Noise:
    if again is None:
        return {}
    first = by_name[again["baselines"][0]]
    return {m.path: by_round(samples(again, rate, m), samples(first, rate, m), ratio=m.ratio) for m in METRICS}


def _changes(
    variant: Mapping[str, Any], other: Mapping[str, Any], rate: float | None, noise: Noise
) -> dict[str, dict[str, Any]]:
    """Return path -> estimate, with the p values of "no change" and the least change that could have been seen."""
    found = {}
    for metric in METRICS:
        both = samples(variant, rate, metric), samples(other, rate, metric)
        if any(both) and metric.absent is not None:
            both = samples(variant, rate, metric, metric.absent), samples(other, rate, metric, metric.absent)
        if (estimate := paired(*both, ratio=metric.ratio)) is None:
            continue
        rounds = by_round(*both, ratio=metric.ratio)
        least = detectable(noise.get(metric.path, ()), len(rounds))
        found[metric.path] = asdict(estimate) | {
            "p": t_p(rounds),
            "exact_p": sign_flip_p(rounds) if len(rounds) > 1 else None,
            "detectable": math.expm1(least) if least is not None and metric.ratio else least,
        }
    return found


def _correct(family: Sequence[dict[str, Any]], primary: str) -> None:
    """Add the corrected p value of the primary metric to each comparison that has one."""
    tested = [one for one in family if one["changes"].get(primary, {}).get("p") is not None]
    rounds = min((one["changes"][primary]["samples"] for one in tested), default=0)
    exact = is_exact(rounds, len(tested))
    ps = [one["changes"][primary]["exact_p" if exact else "p"] for one in tested]
    for one, p in zip(tested, holm(ps), strict=True):
        one["primary"] = {"metric": primary, "p": p, "comparisons": len(tested), "exact": exact}


def faults(answers: Mapping[str, Any] | None, gate: Mapping[str, float | None]) -> list[str]:
    """Return why answers do not pass a gate. An interval must lie within its limit as a whole."""
    limits = {name: limit for name, limit in gate.items() if limit is not None}
    if not limits:
        return []
    if answers is None:
        return ["it has no answers to judge"]
    found = []
    for name, limit in limits.items():
        value = answers[name]
        if isinstance(value, Mapping):
            value = value["value"] if value["high"] is None else value["high"]
            if value > limit:
                found.append(f"{name} may be {value:+.4f} nats/token, more than {limit:g}")
        elif value < limit:
            found.append(f"{name} is {value:.1%}, less than {limit:.1%}")
    return found


def verdict(one: Mapping[str, Any], metric: Metric) -> str:
    """Return "better" or "worse" if a change of the primary metric is significant, else "". Both tests must agree: the
    interval is Student's t, and an exact p does not see how large the changes of single rounds are. Equal changes in
    all rounds leave nothing to test."""
    tested, change = one.get("primary"), one["changes"].get(metric.path)
    if tested is None or tested["metric"] != metric.path or tested["p"] >= 1 - CONFIDENCE or one["gate"] or not change:
        return ""
    low, high = percent(change["low"], metric), percent(change["high"], metric)
    if low <= 0 <= high or high - low < EXACT:
        return ""
    return "better" if (low > 0) == metric.more_is_better else "worse"


def sentence(one: Mapping[str, Any], primary: str) -> str:
    """Return what was found about the primary metric."""
    metric, name = BY_PATH[primary], one["variant"]
    if one["rate"] is not None:
        name += f" at {one['rate']:g} requests/s"
    if one["gate"]:
        return f"{name} does not pass the gate: {'; '.join(one['gate'])}"
    change = one["changes"].get(primary)
    if change is None:
        return f"{name}: {metric.words} was not measured"
    value = percent(change["value"], metric)
    claim = f"{name} {'raises' if value > 0 else 'lowers'} {metric.words} by {_digits(abs(value), 3)} {unit(metric)}"
    if change["low"] is None or change["unit"] != "rounds":
        return f"{claim} in one round, which is no evidence"
    low, high = percent(change["low"], metric), percent(change["high"], metric)
    if max(-low, high) < EXACT:
        return f"{name} has the baseline's {metric.words} in every round"
    if high - low < EXACT:
        return f"{claim} in every round alike, so there is no noise to test it against"
    if low <= 0 <= high and max(-low, high) >= OPEN:
        above = f"+{_digits(high, 3)}" if high < BEYOND else f"more than +{BEYOND:g}"
        edges = f"between -{_digits(-low, 3)} and {above} {unit(metric)}"
        return f"{name}: the effect on {metric.words} remains open, {edges}"
    if low <= 0 <= high:
        return f"{name} has no effect on {metric.words} larger than {_digits(max(-low, high), 2)} {unit(metric)}"
    least, most = sorted((abs(low), abs(high)))
    claim += f" [{_digits(least, 3)}, {_digits(most, 3)}]"
    if (tested := one.get("primary")) is None:
        return claim
    several = f" after Holm's correction for {tested['comparisons']} comparisons" if tested["comparisons"] > 1 else ""
    how = f"p = {tested['p']:.2g}{several}"
    return f"{claim}, {how}" if tested["p"] < 1 - CONFIDENCE else f"{claim}, which is not significant ({how})"


def _digits(value: float, digits: int) -> str:
    """Return so many significant digits, without an exponent for large numbers."""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def unit(metric: Metric) -> str:
    """Return the unit of `percent`."""
    return "%" if metric.ratio else "points"


def percent(value: float, metric: Metric) -> float:
    """Return a change in percent, or in percentage points of a share."""
    return 100 * (value - 1 if metric.ratio else value)


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
