"""Fits the host time of launches. It delays a step if the device waits for it, as for a request's first step.

seconds = a + b rows + c prompts

`prompts` are rows that feed a prompt: a join writes the state of its slot. A GPU runs a step without a CUDA graph while
its kernels are launched, so the time of such a launch delays nothing, and it is not fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from dovetail.core.calibration.steps import Step
    from dovetail.core.interfaces import RowWork

LEAST_STEPS = 32
"""Steps below which nothing is fitted."""
OUTLIER = 0.5
"""Relative error from which on a launch counts less than by its square."""


class Launches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host time of a launch, from the start of the decision, microseconds."""

    step_us: float
    row_us: float
    """More for each row."""
    prompt_us: float
    """More for each row that feeds a prompt."""
    most_tokens: int
    """Tokens of the largest step with a prompt whose launch was fitted. Larger ones had no CUDA graph."""
    steps: int
    """Number of fitted launches."""
    median_us: float
    """Median of the measured times."""

    def seconds(self, rows: int, prompts: int) -> float:
        return (self.step_us + self.row_us * rows + self.prompt_us * prompts) * 1e-6


def fit_launches(steps: Sequence[Step], most_tokens: int, least_squares: Callable[..., Any]) -> Launches | None:
    """Return the fit; None = too few launches were measured. `most_tokens`: tokens of the largest step with a prompt
    that has a CUDA graph, or that runs on a CPU. `least_squares`: SciPy's solver."""
    counted = [(*counts(step.works), step.launch_seconds) for step in steps if step.launch_seconds]
    graphed = [(1, rows, prompts, s) for rows, prompts, tokens, s in counted if not prompts or tokens <= most_tokens]
    if len(graphed) < LEAST_STEPS:
        return None
    kept = np.array(graphed)
    features, measured = kept[:, :3], kept[:, 3] * 1e6

    def residuals(factors: Any) -> Any:
        return (features @ factors - measured) / measured

    start = np.array([float(np.median(measured)), 0.1, 0.1])
    found = least_squares(residuals, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=OUTLIER).x
    step_us, row_us, prompt_us = (round(float(value), 3) for value in found)
    return Launches(step_us, row_us, prompt_us, most_tokens, len(kept), round(float(np.median(measured)), 3))


def counts(works: Iterable[RowWork]) -> tuple[int, int, int]:
    """Return (rows, rows that feed a prompt, tokens) of a step. A row that samples at every token is a decode row."""
    rows = prompts = tokens = 0
    for work in works:
        rows += work.times
        prompts += work.times if work.sampled != work.tokens else 0
        tokens += work.tokens * work.times
    return rows, prompts, tokens
