"""Top-k, top-p and min-p without a sort: the smallest logit that a row keeps, in three passes over the logits.

1. `_summarize` finds the maximum of every group of some logits and, for top-p, the row's probability mass.
2. `_measure` sums, for top-p and for large k, what is above each of PIVOTS bounds. `_choose_pivots` takes half of them
   from a sample of the row, where a flat distribution has its bound, and spreads the other half evenly, for a peaked
   distribution, whose mass a sample misses. (Selection by sampled pivots: Floyd and Rivest, 1975.) A small k needs no
   pivots: the k-th largest of the groups' maxima is a lower bound that few logits exceed.
3. `_gather` collects the logits between the two closest bounds, and `finish` searches these few for the exact value.

If more than CANDIDATES logits are left and they are not all equal, `finish` searches the row itself, which is slower
and as exact. The launches do not depend on device data; programs of rows without filters return immediately.

Shapes: N rows, V vocabulary, P parts of it, G groups, B = PIVOTS bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.ops.kernels.filter_search import (
    finish,
    highest_key,
    key_of,
    load_filters,
    load_logits,
    lowest_bound,
    ordered,
    value_of,
)

BLOCK = 1024
DIGIT = 3
"""Bits of a bound that one pass over a row's sample, candidates or logits finds."""
GROUPS_OF_PART = 64
PIVOTS = 8
SAMPLE = 2048
RUN = 16
"""Consecutive logits in the sample, which share a memory transaction."""
CANDIDATES = 8192
LISTS = 8
"""Lists that a row's candidates are kept in, so that programs that append to them wait less for each other."""
FEW = 1024
"""Number of candidates up to which `finish` takes a quarter of the time."""
PART_COLUMNS = 2048
"""Minimum number of logits per part."""
PROGRAMS = 2048
"""Target number of programs for all rows together."""

FACTS = 6
"""float32 facts of a row, in the order of `_choose_pivots`."""


@triton.jit(do_not_specialize=["part_columns"])
def _summarize(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    peak_ptr,
    mass_ptr,
    V,
    part_columns,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): maxima [N, P, EACH]; mass is the part's sum of exp((logit - peak) / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature, _, _, min_p, by_k, by_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        end = tl.minimum(part * part_columns + part_columns, V)
        scale = 1 / temperature
        # Each lane adds relative to its own maximum: a sum over the block in each iteration would take longer.
        peaks = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
        masses = tl.zeros((BLOCK,), tl.float32)
        for i in range(part * part_columns, end, BLOCK):
            x = load_logits(logits_ptr + row * V, i + tl.arange(0, BLOCK), end)
            higher = tl.maximum(peaks, x)
            if by_p & (by_k == 0):
                masses = masses * tl.exp((peaks - higher) * scale) + tl.exp((x - higher) * scale)
            peaks = higher
        maxima = tl.max(tl.reshape(peaks, (EACH, BLOCK // EACH)), axis=1)
        tl.store(maxima_ptr + (row * tl.num_programs(1) + part) * EACH + tl.arange(0, EACH), maxima)
        peak = tl.max(peaks, axis=0)
        mass = tl.sum(masses * tl.exp((peaks - peak) * scale), axis=0)
        tl.store(peak_ptr + row * tl.num_programs(1) + part, peak)
        tl.store(mass_ptr + row * tl.num_programs(1) + part, mass)


@triton.jit(do_not_specialize=["groups", "parts", "stride"])
def _choose_pivots(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    peak_ptr,
    mass_ptr,
    fact_ptr,
    pivot_ptr,
    found_ptr,
    V,
    groups,
    parts,
    stride,
    FACTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    LISTS: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """Program row. Facts [N, FACTS]: lower bound, largest logit, count or mass to reach, whether the pivots are used,
    then (by `_gather`) upper bound and what is above it. found [N, 2 + LISTS]: keys of the
    least and the greatest candidate, lengths of the lists."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, by_k, by_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V
    )
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        group = tl.arange(0, GROUPS)
        maxima = tl.load(maxima_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        low = tl.full((), float("-inf"), tl.float32)
        wanted = top_k.to(tl.float32)
        pivots = tl.zeros((), tl.float32)
        if by_k & (top_k <= groups // 2):
            key = key_of(maxima, SHIFT)
            inside = (group < groups).to(tl.int32)
            low = value_of(highest_key(key, inside, top_k, tl.min(key, axis=0), tl.max(key, axis=0), DIGIT), SHIFT)
        elif by_k | by_p:
            pivots += 1.0
            index = tl.arange(0, SAMPLE)
            column = index // RUN * stride + index % RUN
            x = load_logits(logits_ptr + row * V, column, V)
            weight = tl.where(column < V, 1.0, 0.0)
            times = V / tl.sum(weight, axis=0)  # logits for each one in the sample
            floor = tl.min(tl.where(x > float("-inf"), x, largest), axis=0)
            dropped = V - wanted
            if by_k == 0:
                part = tl.arange(0, PARTS)
                peak = tl.load(peak_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
                mass = tl.load(mass_ptr + row * parts + part, mask=part < parts, other=0.0)
                total = tl.sum(mass * tl.exp((peak - largest) / temperature), axis=0)
                wanted = top_p * total
                dropped = tl.maximum(1 - top_p, 1e-9) * total
                weight *= tl.exp((x - largest) / temperature)
                # All logits below this bound together have less than 1 - top_p of the mass.
                floor = largest + temperature * (tl.log(dropped / V) - 0.01) - tl.abs(largest) * 1e-6
                low = floor
            # What is dropped is estimated from the sample, since it has no single large terms that a sample may miss.
            dropped = dropped / times
            middle = lowest_bound(x, weight, tl.full((1,), 1.0, tl.float32) * dropped, floor, largest, 8)
            terms = tl.where(x < tl.max(middle, axis=0), weight, 0.0)
            spread = tl.sqrt(tl.sum(terms * terms, axis=0)) + dropped * 0.002
            if by_k:
                spread *= tl.sqrt(wanted / V)  # A count is binomial: hardly uncertain where k is small.
            HALF: tl.constexpr = PIVOTS // 2
            each = tl.arange(0, HALF)
            distance = tl.where(each < 2, 1.0, 4.0) * tl.where(each % 2 == 0, spread, -spread)
            sampled = lowest_bound(x, weight, dropped + distance, floor, largest, 12)
            tl.store(pivot_ptr + row * PIVOTS + each, sampled)
            tl.store(pivot_ptr + row * PIVOTS + HALF + each, floor + (largest - floor) * ((each + 0.5) / HALF))
        tl.store(fact_ptr + row * FACTS, low)
        tl.store(fact_ptr + row * FACTS + 1, largest)
        tl.store(fact_ptr + row * FACTS + 2, wanted)
        tl.store(fact_ptr + row * FACTS + 3, pivots)
        tl.store(found_ptr + row * (2 + LISTS), 2147483647)
        tl.store(found_ptr + row * (2 + LISTS) + 1, -2147483648)
        tl.store(found_ptr + row * (2 + LISTS) + 2 + tl.arange(0, LISTS), tl.zeros((LISTS,), tl.int32))


@triton.jit(do_not_specialize=["part_columns"])
def _measure(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    fact_ptr,
    pivot_ptr,
    sums_ptr,
    V,
    part_columns,
    FACTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): sums [N, P, B] of the counts or masses at and above each pivot."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature, _, _, _, by_k, by_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    if by_k | by_p:
        if tl.load(fact_ptr + row * FACTS + 3) > 0:
            largest = tl.load(fact_ptr + row * FACTS + 1)
            each = tl.arange(0, PIVOTS)
            pivot = tl.load(pivot_ptr + row * PIVOTS + each)
            # Pivots first, so that a thread compares its own columns with all of them.
            sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
            scale = 1 / temperature
            end = tl.minimum(part * part_columns + part_columns, V)
            for i in range(part * part_columns, end, BLOCK):
                x = load_logits(logits_ptr + row * V, i + tl.arange(0, BLOCK), end)
                weight = tl.where(by_k, 1.0, tl.exp((x - largest) * scale))
                sums += tl.where(x[None, :] >= pivot[:, None], weight[None, :], 0.0)
            tl.store(sums_ptr + (row * tl.num_programs(1) + part) * PIVOTS + each, tl.sum(sums, axis=1))


@triton.jit(do_not_specialize=["part_columns", "parts"])
def _gather(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    fact_ptr,
    pivot_ptr,
    sums_ptr,
    found_ptr,
    value_ptr,
    V,
    part_columns,
    parts,
    FACTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LISTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): append the part's logits between the bounds to the row's candidates, in any order."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    _, _, _, _, by_k, by_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    if by_k | by_p:
        low = tl.load(fact_ptr + row * FACTS)
        high = tl.full((), float("inf"), tl.float32)
        above = tl.zeros((), tl.float32)
        if tl.load(fact_ptr + row * FACTS + 3) > 0:
            each = tl.arange(0, PIVOTS)
            pivot = tl.load(pivot_ptr + row * PIVOTS + each)
            place = tl.arange(0, PARTS)[:, None]
            sums = tl.load(sums_ptr + (row * parts + place) * PIVOTS + each[None, :], mask=place < parts, other=0.0)
            reached = tl.sum(sums, axis=0)
            enough = reached >= tl.load(fact_ptr + row * FACTS + 2)
            low = tl.maximum(low, tl.max(tl.where(enough, pivot, float("-inf")), axis=0))
            high = tl.min(tl.where(enough, float("inf"), pivot), axis=0)
            above = tl.max(tl.where(enough, 0.0, reached), axis=0)
        if part == 0:
            tl.store(fact_ptr + row * FACTS + 4, high)
            tl.store(fact_ptr + row * FACTS + 5, above)
        end = tl.minimum(part * part_columns + part_columns, V)
        lowest = tl.full((BLOCK,), float("inf"), tl.float32)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        LENGTH: tl.constexpr = CANDIDATES // LISTS
        found_ptr += row * (2 + LISTS)
        value_ptr += row * CANDIDATES
        length = found_ptr + 2 + tl.zeros((BLOCK,), tl.int32)
        for i in range(part * part_columns, end, BLOCK):
            column = i + tl.arange(0, BLOCK)
            x = load_logits(logits_ptr + row * V, column, end)
            inside = (column < end) & (x >= low) & (x < high)
            # So few are inside that one addition for each is faster than sums over the block.
            list = i // BLOCK % LISTS
            place = tl.atomic_add(length + list, 1, mask=inside, sem="relaxed")
            tl.store(value_ptr + list * LENGTH + place, x, mask=inside & (place < LENGTH))
            lowest = tl.where(inside, tl.minimum(lowest, x), lowest)
            highest = tl.where(inside, tl.maximum(highest, x), highest)
        tl.atomic_min(found_ptr, ordered(tl.min(lowest, axis=0)), sem="relaxed")
        tl.atomic_max(found_ptr + 1, ordered(tl.max(highest, axis=0)), sem="relaxed")


def least_kept_triton(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    logits_NV = logits_NV.contiguous()
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    least_N = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return least_N
    filters = [filter_N.contiguous() for filter_N in (temperature_N, top_k_N, top_p_N, min_p_N)]
    most = triton.cdiv(vocab, PART_COLUMNS)
    parts = max(1, min(most, PROGRAMS // rows))
    part_columns = triton.cdiv(triton.cdiv(vocab, parts), BLOCK) * BLOCK
    parts = triton.cdiv(vocab, part_columns)
    groups = parts * GROUPS_OF_PART
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits_NV.dtype, 0)
    maxima_NG, value_NC = (torch.empty(rows, columns, device=device) for columns in (groups, CANDIDATES))
    peak_NP, mass_NP = (torch.empty(rows, parts, device=device) for _ in range(2))
    fact_N, pivot_NB = torch.empty(rows, FACTS, device=device), torch.empty(rows, PIVOTS, device=device)
    sums_NPB = torch.empty(rows, parts, PIVOTS, device=device)
    found_N = torch.empty(rows, 2 + LISTS, dtype=torch.int32, device=device)
    few_parts = triton.next_power_of_2(most)
    _summarize[rows, parts](
        logits_NV,
        *filters,
        maxima_NG,
        peak_NP,
        mass_NP,
        vocab,
        part_columns,
        EACH=GROUPS_OF_PART,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _choose_pivots[(rows,)](
        logits_NV,
        *filters,
        maxima_NG,
        peak_NP,
        mass_NP,
        fact_N,
        pivot_NB,
        found_N,
        vocab,
        groups,
        parts,
        max(RUN, vocab * RUN // SAMPLE),
        FACTS=FACTS,
        PIVOTS=PIVOTS,
        SAMPLE=SAMPLE,
        RUN=RUN,
        GROUPS=triton.next_power_of_2(most * GROUPS_OF_PART),
        PARTS=few_parts,
        LISTS=LISTS,
        SHIFT=shift,
        DIGIT=DIGIT,
        num_warps=8,
    )
    _measure[rows, parts](
        logits_NV,
        *filters,
        fact_N,
        pivot_NB,
        sums_NPB,
        vocab,
        part_columns,
        FACTS=FACTS,
        PIVOTS=PIVOTS,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _gather[rows, parts](
        logits_NV,
        *filters,
        fact_N,
        pivot_NB,
        sums_NPB,
        found_N,
        value_NC,
        vocab,
        part_columns,
        parts,
        FACTS=FACTS,
        PIVOTS=PIVOTS,
        CANDIDATES=CANDIDATES,
        LISTS=LISTS,
        PARTS=few_parts,
        BLOCK=BLOCK,
        num_warps=4,
    )
    finish[(rows,)](
        logits_NV,
        *filters,
        fact_N,
        found_N,
        value_NC,
        least_N,
        vocab,
        FACTS=FACTS,
        CANDIDATES=CANDIDATES,
        FEW=FEW,
        LISTS=LISTS,
        SHIFT=shift,
        DIGIT=DIGIT,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return least_N
