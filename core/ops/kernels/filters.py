"""Top-k, top-p and min-p without a sort: a program a row finds the least logit kept by bisection.

Floats are compared as integers of the same order, so 33 halvings end at the exact value; the row lies in the L2 cache
after the first pass. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _ordered(x):
    """int32 in the order of float32 x. Its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load(row_ptr, i, V, divisor, BLOCK: tl.constexpr):
    """Scaled logits; NaN and what lies past V count as -inf."""
    column = i + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.div_rn(x, divisor + tl.zeros_like(x))


@triton.jit
def _count(row_ptr, V, divisor, bound, BLOCK: tl.constexpr):
    """How many are at least the bound."""
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, V, BLOCK):
        inside = i + tl.arange(0, BLOCK) < V
        found += (inside & (_ordered(_load(row_ptr, i, V, divisor, BLOCK)) >= bound)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass(row_ptr, V, divisor, largest, bound, BLOCK: tl.constexpr):
    """Sum of exp(x - largest) over those at least the bound."""
    found = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        x = _load(row_ptr, i, V, divisor, BLOCK)
        found += tl.where(_ordered(x) >= bound, tl.exp(x - largest), 0.0)
    return tl.sum(found, axis=0)


@triton.jit
def _least_kept(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, least_ptr, V, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), V).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    least = float("-inf")
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for i in range(0, V, BLOCK):
            best = tl.maximum(best, _load(row_ptr, i, V, temperature, BLOCK))
        largest = tl.max(best, axis=0)
        above = _ordered(largest).to(tl.int64) + 1
        # Kept at `low`, not any more at `high`.
        low = tl.full((), -2139095041, tl.int64)
        if top_k > 0:
            high = above
            for _ in range(33):
                middle = low + (high - low) // 2
                enough = _count(row_ptr, V, temperature, middle, BLOCK) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
        if top_p < 1:
            wanted = top_p * _mass(row_ptr, V, temperature, largest, low, BLOCK)
            high = above
            for _ in range(33):
                middle = low + (high - low) // 2
                enough = _mass(row_ptr, V, temperature, largest, middle, BLOCK) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
        key = low.to(tl.int32)
        least = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        if min_p > 0:
            least = tl.maximum(least, largest + tl.log(min_p))
    tl.store(least_ptr + row, least)


def least_kept_triton(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    least_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    filters = (filter_N.contiguous() for filter_N in (temperature_N, top_k_N, top_p_N, min_p_N))
    if rows:
        _least_kept[(rows,)](logits_NV, *filters, least_N, vocab, BLOCK=BLOCK, num_warps=8)
    return least_N
