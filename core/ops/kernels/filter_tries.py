"""Draw first, then filter: a top-p that keeps most of the probability probably keeps a draw from all logits.

The draw is the first kept token in the order of noisy logits. So each part of a row lists its LISTED best tokens, the
row tries the TRIES best of them in order, and keeps a token if less than top_p of the mass is above its logit. This
takes two passes fewer over the logits than to find the smallest logit kept and then to draw. If no try is kept, the row
is searched (core.ops.kernels.filters) between the logits that it tried.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.draw import LOG2_E, better, noise, noise_keys
from dovetail.core.ops.kernels.filter_search import key_of, value_of

TRIES = 8
LISTED = 4
LEAST_P = tl.constexpr(0.5)
"""Smallest top_p for which rows try: all tries of a row fail with a probability of (1 - top_p) ^ TRIES."""


@triton.jit
def tries(by_k, by_p, top_p):
    """Whether a row tries."""
    return by_p & (by_k == 0) & (top_p >= LEAST_P)


@triton.jit
def draw_and_summarize(
    row_ptr,
    position_ptr,
    key_ptr,
    row,
    temperature,
    begin,
    end,
    score_ptr,
    token_ptr,
    PURPOSE: tl.constexpr,
    LISTED: tl.constexpr,
    APPROX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the noisy logits (divided by ln 2) and the tokens of a part's LISTED best. Return an upper bound of the
    other noisy logits, the part's largest logit, and its sum of exp((logit - largest) / temperature). The bound is
    infinite if some logit is NaN or +inf."""
    a, b = noise_keys(position_ptr, key_ptr, row, PURPOSE)
    scale = LOG2_E / temperature
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    peaks = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    masses = tl.zeros((BLOCK,), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32) + begin
    for i in range(begin, end, BLOCK):
        x = tl.load(row_ptr + i + lane, mask=i + lane < end, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        z = x * scale
        y = z + noise(a, b, i + lane, APPROX)
        second = tl.maximum(second, tl.minimum(best, y))
        at = tl.where(y > best, i, at)
        best = tl.maximum(best, y)
        # Each lane adds relative to its own maximum.
        higher = tl.maximum(peaks, z)
        masses = masses * tl.exp2(peaks - higher) + tl.exp2(z - higher)
        peaks = higher
    invalid = tl.max(tl.where(largest < float("inf"), 0, 1), axis=0)
    largest = tl.where(largest < float("inf"), largest, -3.4028234663852886e38)
    peak = tl.max(peaks, axis=0)
    mass = tl.sum(masses * tl.exp2(peaks - peak), axis=0)
    token = at + lane
    for k in tl.static_range(LISTED):
        score, which = tl.reduce((best, token), 0, better)
        tl.store(score_ptr + k, score)
        tl.store(token_ptr + k, which)
        best = tl.where(token == which, float("-inf"), best)
    bound = tl.max(tl.maximum(best, second), axis=0)
    return tl.where(invalid > 0, float("inf"), bound), tl.maximum(tl.max(largest, axis=0), -3.4028234663852886e38), mass


@triton.jit
def choose_tries(
    row_ptr,
    score_ptr,
    token_ptr,
    bound_ptr,
    try_ptr,
    pivot_ptr,
    parts,
    least,
    TRIES: tl.constexpr,
    LISTED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store the tokens to try in order, -1 = none, and for each the least float32 above its logit. `least` is the
    smallest logit that min-p keeps."""
    part = tl.arange(0, PARTS)
    bound = tl.max(tl.load(bound_ptr + part, mask=part < parts, other=float("-inf")), axis=0)
    place = tl.arange(0, PARTS * LISTED)
    score = tl.load(score_ptr + place, mask=place < parts * LISTED, other=float("-inf"))
    token = tl.load(token_ptr + place, mask=place < parts * LISTED, other=2147483647)
    each = tl.arange(0, TRIES)
    chosen = tl.full((TRIES,), -1, tl.int32)
    for k in tl.static_range(TRIES):
        highest = tl.max(score, axis=0)
        which = tl.min(tl.where(score == highest, token, 2147483647), axis=0)
        # A token that no part listed may be better than one below the bound.
        which = tl.where((highest >= bound) & (highest > float("-inf")), which, -1)
        chosen = tl.where(each == k, which, chosen)
        score = tl.where(token == which, float("-inf"), score)
    x = tl.load(row_ptr + tl.maximum(chosen, 0)).to(tl.float32)
    tl.store(try_ptr + each, tl.where(x >= least, chosen, -1))
    tl.store(pivot_ptr + each, value_of(key_of(x, 0) + 1, 0))


@triton.jit
def first_kept(try_ptr, reached, wanted, TRIES: tl.constexpr):
    """Return the first token whose logit has less than `wanted` of the mass above it; -1 = none has. `reached` is the
    mass above each."""
    each = tl.arange(0, TRIES)
    token = tl.load(try_ptr + each)
    first = tl.min(tl.where((token >= 0) & (reached < wanted), each, TRIES), axis=0)
    return tl.max(tl.where(each == first, token, -1), axis=0)
