"""Tests of paired changes: exact sign flips, Student's t, Holm's correction, and the smallest effect that rounds can
show. Pure functions on numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dovetail.plugins.app.ablate.stats import CONFIDENCE, deviation, t_quantile, t_within

MOST_EXACT = 16
"""Rounds whose sign patterns are enumerated; Student's t is as good for more."""
POWER = 0.8
"""Probability with which an effect of the detectable size is found."""


def sign_flip_p(changes: Sequence[float]) -> float | None:
    """Two-sided p of "no change" by exact sign flips (Fisher 1935; Pitman 1937): without an effect, each round's change
    is as likely to have the other sign. The least p of n rounds is 2 / 2^n. None = too many rounds to enumerate."""
    n = len(changes)
    if n > MOST_EXACT:
        return None
    signs = 1 - 2 * (np.arange(1 << n)[:, None] >> np.arange(n) & 1)
    sums = np.abs(signs @ np.asarray(changes))
    return float(np.mean(sums >= abs(math.fsum(changes)) * (1 - 1e-12)))


def t_p(changes: Sequence[float]) -> float | None:
    """Two-sided p of "no change" by Student's t. None = one round."""
    n = len(changes)
    if n < 2:
        return None
    center, spread = math.fsum(changes) / n, deviation(changes)
    if spread == 0:
        return 1.0 if center == 0 else 0.0
    return max(1 - t_within(abs(center) / spread * math.sqrt(n), n - 1), 0.0)


def is_exact(rounds: int, comparisons: int) -> bool:
    """Whether sign flips of so many rounds can reach 1 - CONFIDENCE after Holm's correction: from six rounds on for one
    comparison, from seven for two or three. It depends on the design alone, never on the data."""
    return rounds <= MOST_EXACT and 2**rounds * (1 - CONFIDENCE) >= 2 * comparisons


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust the p values of a family (Holm 1979). The chance of any false finding stays below the level."""
    adjusted, greatest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        greatest = max(greatest, min((len(ps) - rank) * ps[i], 1.0))
        adjusted[i] = greatest
    return adjusted


def detectable(noise: Sequence[float], rounds: int) -> float | None:
    """Return the least true change that so many rounds would have shown with probability POWER. `noise`: changes
    between two runs of the same variant, by round. None = fewer than two of them, or all are 0: a simulated device
    repeats to the bit in virtual time, and rounds differ only by their requests."""
    if len(noise) < 2 or rounds < 2 or not any(noise):
        return None
    # Power is one-sided: P(T <= t) = POWER is P(|T| <= t) = 2 POWER - 1.
    quantiles = t_quantile(rounds - 1) + t_quantile(rounds - 1, 2 * POWER - 1)
    return quantiles * deviation(noise) / math.sqrt(rounds)
