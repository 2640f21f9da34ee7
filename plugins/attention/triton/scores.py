"""Changes of scores, in base 2: a soft cap (Gemma 2, 2024) and sinks (gpt-oss, 2025). Both also run in Gluon.

Shapes: M rows (queries x heads), D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOW = tl.constexpr(-1.0e30)
"""Initial running maximum, used instead of minus infinity: the difference of two of them is 0, not NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor for scores, since exponentials are computed in base 2."""


@triton.jit
def cap_scores(s, CAP: tl.constexpr):
    """Return CAP * tanh(s / CAP), where CAP is in units of natural scores and s and the result are in base 2."""
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), and the base-2 score s is log2(e) times the natural one.
    TWICE: tl.constexpr = 2.0 / CAP
    MOST: tl.constexpr = CAP * LOG2_E
    return MOST - 2.0 * MOST / (1.0 + tl.exp2(s * TWICE))


@triton.jit
def add_sink(acc, total, m, sink):
    """Join a sink [M], a score without a value, with the weighted sum of values [M, D], the sum of weights [M] and the
    maximum [M] of some keys. A range that does not count the sink passes minus infinity."""
    sink = sink * LOG2_E
    new_m = tl.maximum(m, sink)
    alpha = tl.exp2(m - new_m)
    return acc * alpha[:, None], total * alpha + tl.exp2(sink - new_m), new_m
