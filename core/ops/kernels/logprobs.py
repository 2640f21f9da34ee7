"""Triton kernels of core.ops.logprobs. Shapes: N rows of logits, V vocabulary, n best tokens, P parts of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.ops.logprobs import BestLogprobs

BLOCK = 4096
"""Logits of a part; a program holds them in registers."""
MOST = 64
"""Tokens per row that SamplingParams allow: up to here one kernel serves any number."""
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _best_of(value, index):
    """Return the largest value and its index; ties go to the lower index."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, index, 2147483647), 0)


@triton.jit(do_not_specialize=["count"])
def _best_parts(logits_ptr, peak_ptr, sum_ptr, value_ptr, index_ptr, V, count, BLOCK: tl.constexpr):
    """Program (row, part): maximum, sum of exp(logit - maximum), and the `count` largest logits of the part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + part
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peak_ptr + at, shift)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - shift), 0))
    index = tl.where(column < V, column, NOWHERE)
    for k in range(count):
        best, where = _best_of(x, index)
        tl.store(value_ptr + at * count + k, best)
        tl.store(index_ptr + at * count + k, where)
        x = tl.where(index == where, float("-inf"), x)
        index = tl.where(index == where, NOWHERE, index)


@triton.jit(do_not_specialize=["count"])
def _best_join(peak_ptr, sum_ptr, value_ptr, index_ptr, total_ptr, best_ptr, id_ptr, parts, V, count,
               PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (row): join its parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peak_P = tl.load(peak_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    sum_P = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0.0)
    peak = tl.max(peak_P, 0)
    total = peak + tl.log(tl.sum(sum_P * tl.exp(peak_P - peak), 0))
    tl.store(total_ptr + row, total)
    place = tl.arange(0, BLOCK)
    inside = place < parts * count
    first = row * parts * count
    value = tl.load(value_ptr + first + place, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + first + place, mask=inside, other=NOWHERE)
    for k in range(count):
        best, where = _best_of(value, index)
        tl.store(best_ptr + row * count + k, best - total)
        # Only where logits are NaN is there none.
        tl.store(id_ptr + row * count + k, tl.where(where < V, where, 0).to(tl.int64))
        value = tl.where(index == where, float("-inf"), value)
        index = tl.where(index == where, NOWHERE, index)


def best_logprobs_triton(logits_NV: torch.Tensor, count: int) -> BestLogprobs:
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    device = logits_NV.device
    total_N = torch.empty(rows, device=device)
    values_Nn = torch.empty(rows, count, device=device)
    ids_Nn = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        parts = triton.cdiv(vocab, BLOCK)
        of_parts = torch.empty(2, rows, parts, device=device)
        value = torch.empty(rows, parts, count, device=device)
        index = torch.empty(rows, parts, count, dtype=torch.int32, device=device)
        _best_parts[rows, parts](logits_NV, *of_parts, value, index, vocab, count, BLOCK=BLOCK, num_warps=8)
        _best_join[(rows,)](
            *of_parts,
            value,
            index,
            total_N,
            values_Nn,
            ids_Nn,
            parts,
            vocab,
            count,
            PARTS=triton.next_power_of_2(parts),
            BLOCK=triton.next_power_of_2(parts * max(count, MOST)),
            num_warps=8,
        )
    return BestLogprobs(total_N, values_Nn, ids_Nn)
