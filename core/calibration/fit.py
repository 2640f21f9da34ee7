"""Fits the factors of a cost model's terms to measured steps.

seconds = |a weights, b products| + c prefill + d decode + e collectives + f launches + g sampling + h drafting

|x, y| is the norm with exponent OVERLAP, nearly the longer of the two.

The terms are those that the cost model predicts, so the factors are measured over predicted time, and what no step
shows keeps the prediction. Factors are at least 0. The fit is least squares of the logarithms of predicted over
measured time with a robust loss, since steps that compile a kernel or are disturbed are slow without limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.calibration.file import Errors, Term
from dovetail.core.calibration.steps import Step, draft_seconds
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, StepTerms
from dovetail.core.interfaces.cost import OVERLAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES = (*StepTerms._fields, "drafting")
LEAST_STEPS = 32
"""Steps below which nothing is fitted."""
LEAST_SHARE, SHOWN_IN = 0.02, 8
"""A term is fitted if it is at least this part of the predicted time of so many steps."""
OUTLIER = 0.1
"""Error of the logarithm from which on a step counts less than by its square."""
LEAST_SECONDS = 1e-7
WIDE = 4
"""Ratio of two numbers of tokens from which on a fit between them is a guess: small prompts are like neither decode
steps nor steps of a full budget."""
PRIOR = 0.002
"""Root mean square of errors that a factor must save for each unit of its distance from 1."""


@dataclass(frozen=True, slots=True)
class Fit:
    terms: dict[str, Term]
    """Keys: the names of StepTerms, and "drafting"."""
    ranges: dict[str, tuple[int, int]]
    gap: tuple[int, int] | None
    """Numbers of tokens between which no step was fitted, if the second is more than WIDE times the first."""
    steps: int
    errors: Errors
    uncalibrated: Errors


def fit(steps: Sequence[Step], cost: CostModel, passes: Callable[[int], int]) -> Fit:
    """Fit to all steps. `passes`: Drafter.passes. Raises ConfigError if they are too few, or the cost model has no
    terms."""
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{len(steps)} measured steps are too few to fit: at least {LEAST_STEPS} are needed. Raise the workload's "
            "requests or output tokens, or bench.runs"
        )
    predicted = np.array([_predicted(step, cost, passes) for step in steps])
    measured = np.maximum([step.seconds for step in steps], LEAST_SECONDS)
    ones = np.ones(len(NAMES))
    shares = _taken(predicted) / total(predicted, ones)[:, None]
    fitted = (shares >= LEAST_SHARE).sum(axis=0) >= SHOWN_IN
    factors = ones.copy()
    factors[fitted] = _solve(predicted, measured, fitted)
    scaled = predicted * factors
    terms = {
        name: Term(
            factor=round(float(factors[i]), 5),
            fitted=bool(fitted[i]),
            share=round(float(_taken(scaled)[:, i].sum() / total(predicted, factors).sum()), 5),
            least_us=round(float(predicted[:, i].min() * 1e6), 3),
            most_us=round(float(predicted[:, i].max() * 1e6), 3),
        )
        for i, name in enumerate(NAMES)
    }
    errors = [_errors(total(predicted, used), measured) for used in (factors, ones)]
    return Fit(terms, _ranges(steps), _gap(steps), len(steps), *errors)


def _predicted(step: Step, cost: CostModel, passes: Callable[[int], int]) -> list[float]:
    terms = cost.terms(step.works)
    if terms is None:
        raise ConfigError(f"{type(cost).__name__} has no terms, so it cannot be calibrated: choose cost=roofline")
    return [*terms, draft_seconds(step, cost, passes)]


def total(predicted: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of each step."""
    scaled = predicted * factors
    found: NDArray[np.float64] = _overlapped(scaled) + scaled[:, 2:].sum(axis=1)
    return found


def _overlapped(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
    powers: NDArray[np.float64] = (scaled[:, :2] ** OVERLAP).sum(axis=1)
    return powers ** (1 / OVERLAP)


def _taken(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the terms, with their parts of the time in which weights and products overlap."""
    taken = scaled.copy()
    powers = scaled[:, :2] ** OVERLAP
    both = np.maximum(powers.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    taken[:, :2] = powers / both * _overlapped(scaled)[:, None]
    return taken


def _solve(
    predicted: NDArray[np.float64], measured: NDArray[np.float64], fitted: NDArray[np.bool_]
) -> NDArray[np.float64]:
    weight = PRIOR * len(measured) ** 0.5

    def residuals(found: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = np.ones(len(NAMES))
        factors[fitted] = found
        logs = np.log(np.maximum(total(predicted, factors), LEAST_SECONDS) / measured)
        return np.concatenate([logs, weight * (found - 1)])

    start = np.ones(int(fitted.sum()))
    solved = least_squares()(residuals, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=OUTLIER)
    found: NDArray[np.float64] = solved.x
    return found


def least_squares() -> Callable[..., Any]:
    """Return SciPy's solver. Raises ConfigError if SciPy is not installed."""
    try:
        from scipy.optimize import least_squares as solver
    except ImportError:
        raise ConfigError("a calibration needs SciPy: pip install 'dovetail[bench]'") from None
    return solver


def _errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> Errors:
    median, p90 = np.quantile(np.abs(predicted / measured - 1), [0.5, 0.9])
    return Errors(round(float(median), 5), round(float(p90), 5))


def _ranges(steps: Sequence[Step]) -> dict[str, tuple[int, int]]:
    counts = {
        "rows": [sum(work.times for work in step.works) for step in steps],
        "tokens": [sum(work.tokens * work.times for work in step.works) for step in steps],
        "kv_tokens": [sum(work.bound * work.times for work in step.works) for step in steps],
    }
    return {name: (min(values), max(values)) for name, values in counts.items()}


def _gap(steps: Sequence[Step]) -> tuple[int, int] | None:
    tokens = sorted({sum(work.tokens * work.times for work in step.works) for step in steps})
    least, most = max(pairwise(tokens), key=lambda pair: pair[1] / max(pair[0], 1), default=(1, 1))
    return (least, most) if most > WIDE * least else None
