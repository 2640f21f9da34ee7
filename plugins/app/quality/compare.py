"""Figures of a variant against the reference, with intervals over windows. Shapes: W windows, P positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.plugins.app.ablate.stats import Estimate, mean

if TYPE_CHECKING:
    from dovetail.plugins.app.quality.measure import Answers


def answers_record(answers: Answers) -> dict[str, Any]:
    """Return what the result file keeps of a variant's answers."""
    rows = answers.rows
    return {"nll": _by_window(rows.nll_WP), "greedy": answers.greedy}


def figures(answers: Answers, reference: Answers | None) -> dict[str, Any]:
    """Return the figures of a variant; those of the reference, which is compared with nothing, are its perplexity."""
    nll_W = answers.rows.nll_WP.mean(1)
    found: dict[str, Any] = {"perplexity": math.exp(nll_W.mean())}
    if reference is None:
        return found
    rows, theirs_W = answers.rows, reference.rows.nll_WP.mean(1)
    change = _mapped(mean((nll_W - theirs_W).tolist(), "windows"), math.expm1)
    kl = mean(rows.kl_WP.mean(1).tolist(), "windows")
    top1 = mean(rows.same_top_WP.mean(1).tolist(), "windows")
    found |= {
        "perplexity_change": asdict(change),
        "kl": asdict(_mapped(kl, lambda value: max(value, 0.0))),
        "kl_p99": float(np.quantile(rows.kl_WP, 0.99)),
        "top1_agreement": asdict(_mapped(top1, lambda value: min(value, 1.0))),
        "kl_by_window": _by_window(rows.kl_WP),
        "top1_by_window": _by_window(rows.same_top_WP),
    }
    if answers.greedy:
        same = [equal_tokens(a, b) for a, b in zip(answers.greedy, reference.greedy, strict=True)]
        tokens = len(reference.greedy[0])
        equal = sum(a == b for a, b in zip(answers.greedy, reference.greedy, strict=True))
        found |= {
            "divergence_length": asdict(_mapped(mean(same, "windows"), lambda value: min(max(value, 0.0), tokens))),
            "outputs_equal": equal / len(same),
            "divergence_by_window": same,
        }
    return found


def equal_tokens(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))


def _mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """Return the estimate of an increasing function of the value. Bounds beyond what a figure can be are cut off."""
    low, high = (None if edge is None else function(edge) for edge in (estimate.low, estimate.high))
    return replace(estimate, value=function(estimate.value), low=low, high=high)


def _by_window(values_WP: np.ndarray) -> list[float]:
    return [round(float(value), 9) for value in values_WP.mean(1)]
