"""Top-k, top-p and min-p without a sort: the smallest logit that a row keeps, in three passes over the logits.

1. `_summarize` finds the maximum of every group of some logits and, for top-p, the row's probability mass.
2. `_measure` sums, for top-p and for large k, what is above each of PIVOTS bounds. `_choose_pivots` takes half of them
   from a sample of the row, where a flat distribution has its bound, and spreads the other half evenly, for a peaked
   distribution, whose mass a sample misses. (Selection by sampled pivots: Floyd and Rivest, 1975.) A small k needs no
   pivots: the k-th largest of the groups' maxima is a lower bound that few logits exceed.
3. `_gather` collects the logits between the two closest bounds, and `_finish` searches these few for the exact value.

If more than CANDIDATES logits are left and they are not all equal, `_finish` searches the row itself, which is slower
and as exact. Floats are searched as integers of the same order, and masses of candidates are added as integers, so the
result does not depend on the order in which programs store them. The launches do not depend on device data; programs of
rows without filters return immediately.

Shapes: N rows, V vocabulary, P parts of it, G groups, B = PIVOTS bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
"""Number of candidates up to which `_finish` takes a quarter of the time."""
PART_COLUMNS = 2048
"""Minimum number of logits per part."""
PROGRAMS = 2048
"""Target number of programs for all rows together."""

FACTS = 6
"""float32 facts of a row, in the order of `_choose_pivots`."""
LOWEST = tl.constexpr(-2139095041)
"""`_ordered` of minus infinity."""
FIXED = tl.constexpr(1 << 40)
"""Integer that stands for the mass of the largest logit."""


@triton.jit
def _ordered(x):
    """Map float32 to int32 of the same order. On the bits, this function is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Map logits to int64 of the same order. SHIFT drops the bits that are the same in every logit of a 16-bit type."""
    return (_ordered(x) >> SHIFT).to(tl.int64)


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Inverse of `_key`."""
    key = key.to(tl.int32)
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, column, end):
    """Load logits. NaN and columns past the end become -inf, +inf the largest finite number."""
    x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), 3.4028234663852886e38)


@triton.jit
def _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V):
    """Return (temperature, k, p, min-p, whether by k, whether by p); a filter that keeps every logit counts as none."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    random = temperature > 0
    temperature = tl.maximum(temperature, 1e-30)  # so that its reciprocal is finite
    return (
        tl.where(random, temperature, 0.0),
        top_k,
        top_p,
        min_p,
        random & (top_k > 0) & (top_k < V),
        random & (top_p < 1),
    )


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
    temperature, _, _, min_p, by_k, by_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        end = tl.minimum(part * part_columns + part_columns, V)
        scale = 1 / temperature
        # Each lane adds relative to its own maximum: a sum over the block in each iteration would take longer.
        peaks = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
        masses = tl.zeros((BLOCK,), tl.float32)
        for i in range(part * part_columns, end, BLOCK):
            x = _load(logits_ptr + row * V, i + tl.arange(0, BLOCK), end)
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


@triton.jit
def _highest(key, weight, wanted, low, high, DIGIT: tl.constexpr):
    """Return the highest integer at or above which the weights reach `wanted`, from `low` (where they do) to `high`; a
    pass over the keys finds DIGIT bits of it."""
    WAYS: tl.constexpr = 1 << DIGIT
    step = tl.full((), 1, tl.int64)
    while (step << DIGIT) <= high - low:
        step = step << DIGIT
    way = tl.arange(0, WAYS).to(tl.int64)
    while step > 0:
        bounds = low + way * step
        sums = tl.sum(tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0), axis=1)
        low += tl.max(tl.where(sums >= wanted, way, 0), axis=0) * step
        step = step >> DIGIT
    return low


@triton.jit
def _lowest_bound(x, weight, most, low, high, BITS: tl.constexpr):
    """Return for each of `most` a bound in [low, high] below which the weights reach it, to (high - low) / 2^BITS."""
    low += tl.zeros_like(most)
    width = high - low
    way = tl.arange(0, 4)
    for _ in range(BITS // 2):
        width *= 0.25
        bounds = low[:, None] + way.to(tl.float32)[None, :] * width[:, None]
        below = tl.sum(tl.where(x[None, None, :] < bounds[:, :, None], weight[None, None, :], 0.0), axis=2)
        low += tl.max(tl.where(below <= most[:, None], way.to(tl.float32)[None, :], 0.0), axis=1) * width
    return low


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
    temperature, top_k, top_p, min_p, by_k, by_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        group = tl.arange(0, GROUPS)
        maxima = tl.load(maxima_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        low = tl.full((), float("-inf"), tl.float32)
        wanted = top_k.to(tl.float32)
        pivots = tl.zeros((), tl.float32)
        if by_k & (top_k <= groups // 2):
            key = _key(maxima, SHIFT)
            inside = (group < groups).to(tl.int32)
            low = _value(_highest(key, inside, top_k, tl.min(key, axis=0), tl.max(key, axis=0), DIGIT), SHIFT)
        elif by_k | by_p:
            pivots += 1.0
            index = tl.arange(0, SAMPLE)
            column = index // RUN * stride + index % RUN
            x = _load(logits_ptr + row * V, column, V)
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
            middle = _lowest_bound(x, weight, tl.full((1,), 1.0, tl.float32) * dropped, floor, largest, 8)
            terms = tl.where(x < tl.max(middle, axis=0), weight, 0.0)
            spread = tl.sqrt(tl.sum(terms * terms, axis=0)) + dropped * 0.002
            if by_k:
                spread *= tl.sqrt(wanted / V)  # A count is binomial: hardly uncertain where k is small.
            HALF: tl.constexpr = PIVOTS // 2
            each = tl.arange(0, HALF)
            distance = tl.where(each < 2, 1.0, 4.0) * tl.where(each % 2 == 0, spread, -spread)
            sampled = _lowest_bound(x, weight, dropped + distance, floor, largest, 12)
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
    temperature, _, _, _, by_k, by_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
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
                x = _load(logits_ptr + row * V, i + tl.arange(0, BLOCK), end)
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
    _, _, _, _, by_k, by_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
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
            x = _load(logits_ptr + row * V, column, end)
            inside = (column < end) & (x >= low) & (x < high)
            # So few are inside that one addition for each is faster than sums over the block.
            list = i // BLOCK % LISTS
            place = tl.atomic_add(length + list, 1, mask=inside, sem="relaxed")
            tl.store(value_ptr + list * LENGTH + place, x, mask=inside & (place < LENGTH))
            lowest = tl.where(inside, tl.minimum(lowest, x), lowest)
            highest = tl.where(inside, tl.maximum(highest, x), highest)
        tl.atomic_min(found_ptr, _ordered(tl.min(lowest, axis=0)), sem="relaxed")
        tl.atomic_max(found_ptr + 1, _ordered(tl.max(highest, axis=0)), sem="relaxed")


@triton.jit
def _search_candidates(
    value_ptr,
    length_ptr,
    low,
    high,
    largest,
    temperature,
    top_k,
    top_p,
    wanted,
    above,
    by_k,
    by_p,
    LENGTH: tl.constexpr,
    LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """Return the least key to keep. If `by_k`, `above` and the top-p filter count candidates only."""
    index = tl.arange(0, SIZE)
    list = index % LISTS
    inside = index // LISTS < tl.load(length_ptr + list)
    x = tl.load(value_ptr + list * LENGTH + index // LISTS, mask=inside, other=float("-inf"))
    key = _key(x, SHIFT)
    if by_k:
        missing = tl.maximum(top_k - above.to(tl.int64), 1)
        low = _highest(key, inside.to(tl.int32), missing, low, high, DIGIT)
    if by_p:
        mass = tl.where(inside & (key >= low), tl.exp((x - largest) / temperature), 0.0)
        mass = (mass * FIXED).to(tl.int64)
        needed = ((wanted - above) * FIXED).to(tl.int64)
        if by_k:
            needed = (top_p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        low = _highest(key, mass, tl.maximum(needed, 1), low, high, DIGIT)
    return low


@triton.jit
def _search_row(
    row_ptr,
    V,
    low,
    high,
    largest,
    temperature,
    wanted,
    by_count,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the highest key from `low` to `high` at or above which the count or mass of the row reaches `wanted`."""
    WAYS: tl.constexpr = 1 << DIGIT
    step = tl.full((), 1, tl.int64)
    while (step << DIGIT) <= high - low:
        step = step << DIGIT
    way = tl.arange(0, WAYS).to(tl.int64)
    while step > 0:
        bounds = low + way * step
        sums = tl.zeros((WAYS, BLOCK), tl.float32)
        for i in range(0, V, BLOCK):
            column = i + tl.arange(0, BLOCK)
            x = _load(row_ptr, column, V)
            weight = tl.where(by_count, 1.0, tl.exp((x - largest) / temperature))
            weight = tl.where(column < V, weight, 0.0)
            sums += tl.where(_key(x, SHIFT)[None, :] >= bounds[:, None], weight[None, :], 0.0)
        low += tl.max(tl.where(tl.sum(sums, axis=1) >= wanted, way, 0), axis=0) * step
        step = step >> DIGIT
    return low


@triton.jit
def _mass_from(row_ptr, V, low, largest, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of a row's logits whose keys are at least `low`."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        x = _load(row_ptr, i + tl.arange(0, BLOCK), V)
        mass += tl.where(_key(x, SHIFT) >= low, tl.exp((x - largest) / temperature), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _finish(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    fact_ptr,
    found_ptr,
    value_ptr,
    least_ptr,
    V,
    FACTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    LISTS: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program row: the smallest logit that it keeps."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, by_k, by_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    least = tl.full((), float("-inf"), tl.float32)
    if (by_k | by_p | (min_p > 0)) & (temperature > 0):
        largest = tl.load(fact_ptr + row * FACTS + 1)
        if by_k | by_p:
            row_ptr = logits_ptr + row * V
            mine_ptr = value_ptr + row * CANDIDATES
            wanted = tl.load(fact_ptr + row * FACTS + 2)
            above = tl.load(fact_ptr + row * FACTS + 5)
            LENGTH: tl.constexpr = CANDIDATES // LISTS
            length_ptr = found_ptr + row * (2 + LISTS) + 2
            longest = tl.max(tl.load(length_ptr + tl.arange(0, LISTS)), axis=0)
            low = (tl.load(found_ptr + row * (2 + LISTS)) >> SHIFT).to(tl.int64)
            high = (tl.load(found_ptr + row * (2 + LISTS) + 1) >> SHIFT).to(tl.int64)
            # top-p after a top-k that used pivots also needs the mass above the candidates.
            apart = by_k & by_p & (tl.load(fact_ptr + row * FACTS + 4) < float("inf"))
            together = by_p & (apart == 0)
            if longest == 0:
                low = _key(tl.load(fact_ptr + row * FACTS), SHIFT)
            elif longest <= FEW // LISTS:
                low = _search_candidates(
                    mine_ptr,
                    length_ptr,
                    low,
                    high,
                    largest,
                    temperature,
                    top_k,
                    top_p,
                    wanted,
                    above,
                    by_k,
                    together,
                    LENGTH,
                    LISTS,
                    FEW,
                    SHIFT,
                    DIGIT,
                )
            elif longest <= LENGTH:
                low = _search_candidates(
                    mine_ptr,
                    length_ptr,
                    low,
                    high,
                    largest,
                    temperature,
                    top_k,
                    top_p,
                    wanted,
                    above,
                    by_k,
                    together,
                    LENGTH,
                    LISTS,
                    CANDIDATES,
                    SHIFT,
                    DIGIT,
                )
            else:
                low = _search_row(row_ptr, V, low, high, largest, temperature, wanted, by_k, SHIFT, DIGIT, BLOCK)
                apart = by_k & by_p
            if apart:
                wanted = top_p * _mass_from(row_ptr, V, low, largest, temperature, SHIFT, BLOCK)
                top = _key(largest, SHIFT)
                low = _search_row(row_ptr, V, low, top, largest, temperature, wanted, by_k == 2, SHIFT, DIGIT, BLOCK)
            least = _value(tl.maximum(low, LOWEST >> SHIFT), SHIFT)
        least = tl.where(min_p > 0, tl.maximum(least, largest + temperature * tl.log(tl.maximum(min_p, 1e-37))), least)
    tl.store(least_ptr + row, least)


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
    _finish[(rows,)](
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
