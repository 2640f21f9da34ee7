"""Triton kernels of core.ops.logprobs, which read the logits once. The n largest logits are within the n groups of
consecutive logits that have the largest maxima, so only these groups are searched, by one program per row.

Shapes: N rows of logits, V vocabulary, n best tokens, P parts of a row, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.records import MOST_LOGPROBS
from dovetail.core.ops.kernels.filter_search import ordered
from dovetail.core.ops.logprobs import BestLogprobs

BLOCK = 4096
"""Logits of a part; a program holds them in registers."""
GROUP = 64
NONE = tl.constexpr(-(1 << 63))
"""Less than the rank of every logit."""


@triton.jit
def _rank(value, index):
    """Return int64 that order logits by value, then by index, the lower one first."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value_of(rank):
    high = (rank >> 32).to(tl.int32)
    return tl.where(high >= 0, high, high ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _wanted(wanted_ptr, row, count):
    """Return the number of tokens that the row needs; -1 = it needs nothing."""
    return tl.minimum(tl.load(wanted_ptr + row), count).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def _summarize(logits_ptr, wanted_ptr, peak_ptr, sum_ptr, maxima_ptr, V, count, GROUP: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Program (row, part): maximum, sum of exp(logit - maximum), and the maximum of each group."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _wanted(wanted_ptr, row, count) >= 0:
        at = row * tl.num_programs(1) + part
        column = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32)
        EACH: tl.constexpr = BLOCK // GROUP
        maxima_G = tl.max(tl.reshape(x, (EACH, GROUP)), axis=1)
        tl.store(maxima_ptr + at * EACH + tl.arange(0, EACH), maxima_G)
        peak = tl.max(maxima_G, axis=0)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peak_ptr + at, peak)
        tl.store(sum_ptr + at, tl.sum(tl.exp(x - peak), axis=0))


@triton.jit(do_not_specialize=["count", "parts", "groups"])
def _find(logits_ptr, wanted_ptr, peak_ptr, sum_ptr, maxima_ptr, total_ptr, best_ptr, id_ptr, parts, groups, V, count,
          PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Program (row): join its parts and find the best tokens."""
    row = tl.program_id(0).to(tl.int64)
    wanted = _wanted(wanted_ptr, row, count)
    if wanted >= 0:
        part = tl.arange(0, PARTS)
        peak_P = tl.load(peak_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        sum_P = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0.0)
        peak = tl.max(peak_P, axis=0)
        total = peak + tl.log(tl.sum(sum_P * tl.exp(peak_P - peak), axis=0))
        tl.store(total_ptr + row, total)

        group = tl.arange(0, GROUPS)
        maxima_G = tl.load(maxima_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
        rank_G = tl.where(group < groups, _rank(maxima_G, group), NONE)
        place = tl.arange(0, MOST)
        chosen = tl.full((MOST,), -1, tl.int32)
        for k in range(tl.minimum(wanted, groups)):
            best = tl.max(rank_G, axis=0)
            chosen = tl.where(place == k, _index_of(best), chosen)
            rank_G = tl.where(rank_G == best, NONE, rank_G)

        column = tl.reshape(chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (MOST * GROUP,))
        inside = (column >= 0) & (column < V)
        x = tl.load(logits_ptr + row * V + column, mask=inside, other=float("-inf")).to(tl.float32)
        rank = tl.where(inside, _rank(x, column), NONE)
        for k in range(wanted):
            best = tl.max(rank, axis=0)
            tl.store(best_ptr + row * count + k, _value_of(best) - total)
            tl.store(id_ptr + row * count + k, _index_of(best).to(tl.int64))
            rank = tl.where(rank == best, NONE, rank)


def best_logprobs_triton(logits_NV: torch.Tensor, count: int, wanted_N: torch.Tensor | None = None) -> BestLogprobs:
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    device = logits_NV.device
    if wanted_N is None:
        wanted_N = torch.full((rows,), count, device=device)
    total_N = torch.empty(rows, device=device)
    values_Nn = torch.empty(rows, count, device=device)
    ids_Nn = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        parts = ceil_div(vocab, BLOCK)
        groups = parts * (BLOCK // GROUP)
        peak_NP, sum_NP = (torch.empty(rows, parts, device=device) for _ in range(2))
        maxima_NG = torch.empty(rows, groups, device=device)
        parts_of = peak_NP, sum_NP, maxima_NG
        _summarize[rows, parts](logits_NV, wanted_N, *parts_of, vocab, count, GROUP=GROUP, BLOCK=BLOCK, num_warps=8)
        _find[(rows,)](
            logits_NV,
            wanted_N,
            *parts_of,
            total_N,
            values_Nn,
            ids_Nn,
            parts,
            groups,
            vocab,
            count,
            PARTS=power_of_2(parts),
            GROUPS=power_of_2(groups),
            GROUP=GROUP,
            MOST=power_of_2(max(count, MOST_LOGPROBS)),
            num_warps=8,
        )
    return BestLogprobs(total_N, values_Nn, ids_Nn)


@triton.jit
def _logprobs_of(logits_ptr, tokens_ptr, total_ptr, out_ptr, V):
    row = tl.program_id(0).to(tl.int64)
    token = tl.maximum(tl.load(tokens_ptr + row), 0)
    tl.store(out_ptr + row, tl.load(logits_ptr + row * V + token).to(tl.float32) - tl.load(total_ptr + row))


def logprobs_of_triton(logits_NV: torch.Tensor, tokens_N: torch.Tensor, total_N: torch.Tensor) -> torch.Tensor:
    logits_NV = logits_NV.contiguous()
    out_N = torch.empty_like(total_N)
    if len(out_N):
        _logprobs_of[(len(out_N),)](logits_NV, tokens_N.contiguous(), total_N, out_N, logits_NV.shape[1], num_warps=1)
    return out_N
