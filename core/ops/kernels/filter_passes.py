"""Passes over the logits of core.ops.kernels.filters. Programs of rows without filters return immediately.

Shapes: N rows, V vocabulary, P parts of it, G groups, B = PIVOTS bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.filter_search import (
    highest_key,
    key_of,
    least_by_min_p,
    load_filters,
    load_logits,
    lowest_bound,
    ordered,
    value_of,
)
from dovetail.core.ops.kernels.filter_tries import choose_tries, draw_and_summarize, first_kept, tries


@triton.jit(do_not_specialize=["part_columns"])
def summarize(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    peak_ptr,
    mass_ptr,
    position_ptr,
    key_ptr,
    score_ptr,
    token_ptr,
    bound_ptr,
    V,
    part_columns,
    PURPOSE: tl.constexpr,
    LISTED: tl.constexpr,
    APPROX: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): maxima [N, P, EACH]; mass is the part's sum of exp((logit - peak) / temperature). Rows that
    try (core.ops.kernels.filter_tries) have no maxima."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = row * tl.num_programs(1) + part
    temperature, _, top_p, min_p, by_k, by_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    end = tl.minimum(part * part_columns + part_columns, V)
    if key_ptr is not None:
        if tries(by_k, by_p, top_p):
            score_ptr += at * LISTED
            token_ptr += at * LISTED
            bound, peak, mass = draw_and_summarize(logits_ptr + row * V, position_ptr, key_ptr, row, temperature,
                                                   part * part_columns, end, score_ptr, token_ptr, PURPOSE, LISTED,
                                                   APPROX, BLOCK)  # fmt: skip
            tl.store(bound_ptr + at, bound)
            tl.store(peak_ptr + at, peak)
            tl.store(mass_ptr + at, mass)
            return
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
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
        tl.store(maxima_ptr + at * EACH + tl.arange(0, EACH), maxima)
        peak = tl.max(peaks, axis=0)
        mass = tl.sum(masses * tl.exp((peaks - peak) * scale), axis=0)
        tl.store(peak_ptr + at, peak)
        tl.store(mass_ptr + at, mass)


@triton.jit(do_not_specialize=["groups", "parts", "stride"])
def choose_pivots(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    peak_ptr,
    mass_ptr,
    score_ptr,
    token_ptr,
    bound_ptr,
    try_ptr,
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
    LISTED: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """Program row. Facts [N, FACTS]: lower bound, largest logit, count or mass to reach, whether the pivots are used,
    then (by `gather`) upper bound and what is above it. found [N, 2 + LISTS]: keys of the
    least and the greatest candidate, lengths of the lists."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, by_k, by_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V
    )
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        part = tl.arange(0, PARTS)
        peak = tl.load(peak_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        largest = tl.max(peak, axis=0)
        low = tl.full((), float("-inf"), tl.float32)
        wanted = top_k.to(tl.float32)
        pivots = tl.zeros((), tl.float32)
        if by_k & (top_k <= tl.minimum(groups, GROUPS) // 2):
            group = tl.arange(0, GROUPS)
            maxima = tl.full((GROUPS,), float("-inf"), tl.float32)
            for i in range(0, groups, GROUPS):
                more = tl.load(maxima_ptr + row * groups + i + group, mask=i + group < groups, other=float("-inf"))
                maxima = tl.maximum(maxima, more)
            key = key_of(maxima, SHIFT)
            inside = (group < groups).to(tl.int32)
            low = value_of(highest_key(key, inside, top_k, tl.min(key, axis=0), tl.max(key, axis=0), DIGIT), SHIFT)
        elif by_k | by_p:
            pivots += 1.0
            dropped = V - wanted
            if by_k == 0:
                mass = tl.load(mass_ptr + row * parts + part, mask=part < parts, other=0.0)
                total = tl.sum(mass * tl.exp((peak - largest) / temperature), axis=0)
                wanted = top_p * total
                dropped = tl.maximum(1 - top_p, 1e-9) * total
                # All logits below this bound together have less than 1 - top_p of the mass.
                low = largest + temperature * (tl.log(dropped / V) - 0.01) - tl.abs(largest) * 1e-6
            trying = by_p & (by_p == 0)
            if try_ptr is not None:
                trying = tries(by_k, by_p, top_p)
                if trying:
                    listed = row * parts * LISTED
                    least = least_by_min_p(largest, temperature, min_p)
                    choose_tries(logits_ptr + row * V, score_ptr + listed, token_ptr + listed, bound_ptr + row * parts,
                                 try_ptr + row * PIVOTS, pivot_ptr + row * PIVOTS, parts, least, PIVOTS, LISTED,
                                 PARTS)  # fmt: skip
            if trying == 0:
                index = tl.arange(0, SAMPLE)
                column = index // RUN * stride + index % RUN
                x = load_logits(logits_ptr + row * V, column, V)
                weight = tl.where(column < V, 1.0, 0.0)
                times = V / tl.sum(weight, axis=0)  # logits for each one in the sample
                floor = tl.min(tl.where(x > float("-inf"), x, largest), axis=0)
                if by_k == 0:
                    weight *= tl.exp((x - largest) / temperature)
                    floor = low
                # What is dropped is estimated from the sample, since it has no single large terms that a sample may
                # miss.
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
                even = floor + (largest - floor) * ((each + 0.5) / HALF)
                tl.store(pivot_ptr + row * PIVOTS + HALF + each, even)
        tl.store(fact_ptr + row * FACTS, low)
        tl.store(fact_ptr + row * FACTS + 1, largest)
        tl.store(fact_ptr + row * FACTS + 2, wanted)
        tl.store(fact_ptr + row * FACTS + 3, pivots)
        tl.store(found_ptr + row * (2 + LISTS), 2147483647)
        tl.store(found_ptr + row * (2 + LISTS) + 1, -2147483648)
        tl.store(found_ptr + row * (2 + LISTS) + 2 + tl.arange(0, LISTS), tl.zeros((LISTS,), tl.int32))


@triton.jit(do_not_specialize=["part_columns"])
def measure(
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
def gather(
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
    try_ptr,
    drawn_ptr,
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
    _, _, top_p, _, by_k, by_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    drawn = tl.full((), -1, tl.int32)
    low = tl.full((), float("-inf"), tl.float32)
    high = tl.full((), float("inf"), tl.float32)
    above = tl.zeros((), tl.float32)
    if by_k | by_p:
        low = tl.load(fact_ptr + row * FACTS)
        if tl.load(fact_ptr + row * FACTS + 3) > 0:
            each = tl.arange(0, PIVOTS)
            pivot = tl.load(pivot_ptr + row * PIVOTS + each)
            place = tl.arange(0, PARTS)[:, None]
            sums = tl.load(sums_ptr + (row * parts + place) * PIVOTS + each[None, :], mask=place < parts, other=0.0)
            reached = tl.sum(sums, axis=0)
            wanted = tl.load(fact_ptr + row * FACTS + 2)
            enough = reached >= wanted
            low = tl.maximum(low, tl.max(tl.where(enough, pivot, float("-inf")), axis=0))
            high = tl.min(tl.where(enough, float("inf"), pivot), axis=0)
            above = tl.max(tl.where(enough, 0.0, reached), axis=0)
            if try_ptr is not None:
                if tries(by_k, by_p, top_p):
                    drawn = first_kept(try_ptr + row * PIVOTS, reached, wanted, PIVOTS)
    if drawn_ptr is not None:
        if part == 0:
            tl.store(drawn_ptr + row, drawn)
    if (by_k | by_p) & (drawn < 0):
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
