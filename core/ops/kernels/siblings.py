"""Kernel of core.ops.siblings: candidates of each part of the vocabulary, of which torch chooses the best.

Shapes: N rows of logits, V vocabulary, P parts of it, n candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.kernels.draw import LOG2_E, VOCAB_BLOCK, better, has_fast_logarithm, noise, noise_keys
from dovetail.core.ops.random import Purpose


@triton.jit
def _candidates(
    logits_ptr,
    position_ptr,
    temperature_ptr,
    key_ptr,
    least_ptr,
    value_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    V,
    COUNT: tl.constexpr,
    PURPOSE: tl.constexpr,
    RANDOM: tl.constexpr,
    APPROX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the best COUNT scores of a part, their maximum, and the sum of exp(score - maximum)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + row * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    invalid = tl.max(tl.where(score < float("inf"), 0, 1), axis=0)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            a, b = noise_keys(position_ptr, key_ptr, row, PURPOSE)
            drawn = (
                score * (LOG2_E / tl.maximum(temperature, 1e-30)) + noise(a, b, token, APPROX)
            ) * 0.6931471805599453
            if least_ptr is not None:
                drawn = tl.where(score >= tl.load(least_ptr + row), drawn, float("-inf"))
            score = tl.where(token < V, drawn, float("-inf"))
    top = tl.max(score, axis=0)
    total = tl.sum(tl.where(score > float("-inf"), tl.exp(score - top), 0.0), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(top_ptr + at, tl.where(invalid > 0, float("inf"), top))
    tl.store(sum_ptr + at, total)
    for i in range(COUNT):
        value, index = tl.reduce((score, token), 0, better)
        tl.store(value_ptr + at * COUNT + i, value)
        tl.store(token_ptr + at * COUNT + i, index)
        score = tl.where(token == index, float("-inf"), score)


def best_tokens_triton(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    count: int,
    least_N: torch.Tensor | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    parts = ceil_div(vocab, VOCAB_BLOCK)
    value_NPn = torch.empty(rows, parts, count, device=logits_NV.device)
    token_NPn = torch.empty(rows, parts, count, dtype=torch.int32, device=logits_NV.device)
    top_NP, sum_NP = torch.empty(2, rows, parts, device=logits_NV.device).unbind(0)
    if rows:
        _candidates[rows, parts](
            logits_NV,
            position_N.contiguous(),
            temperature_N.contiguous(),
            key_N.contiguous(),
            least_N,
            value_NPn,
            token_NPn,
            top_NP,
            sum_NP,
            vocab,
            COUNT=count,
            PURPOSE=int(purpose),
            RANDOM=random,
            APPROX=has_fast_logarithm(),
            BLOCK=VOCAB_BLOCK,
            num_warps=4,
        )
    best_Nn, place_Nn = value_NPn.flatten(1).topk(count)
    tokens_Nn = token_NPn.flatten(1).gather(1, place_Nn).long()
    top_N1 = top_NP.amax(1, keepdim=True)
    total_N1 = (sum_NP * (top_NP - top_N1).exp()).sum(1, keepdim=True)
    share_Nn = torch.where(top_N1 < float("inf"), best_Nn - top_N1 - total_N1.log(), float("-inf"))
    return torch.where(share_Nn > float("-inf"), tokens_Nn, -1), share_Nn
