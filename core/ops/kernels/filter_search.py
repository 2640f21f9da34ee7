"""Last pass of core.ops.kernels.filters: the search for the smallest logit to keep, among a row's candidates or in the
row itself.

Floats are searched as integers of the same order, and masses of candidates are added as integers, so the result does
not depend on the order of the candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)
"""`ordered` of minus infinity."""
FIXED = tl.constexpr(1 << 40)
"""Integer that stands for the mass of the largest logit."""


@triton.jit
def ordered(x):
    """Map float32 to int32 of the same order. On the bits, this function is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Map logits to int64 of the same order. SHIFT drops the bits that are the same in every logit of a 16-bit type."""
    return (ordered(x) >> SHIFT).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Inverse of `key_of`."""
    key = key.to(tl.int32)
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, column, end):
    """Load logits. NaN and columns past the end become -inf, +inf the largest finite number."""
    x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), 3.4028234663852886e38)


@triton.jit
def load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V):
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


@triton.jit
def least_by_min_p(largest, temperature, min_p):
    """Return the smallest logit that min-p keeps."""
    least = largest + temperature * tl.log(tl.maximum(min_p, 1e-37))
    return tl.where(min_p > 0, least, float("-inf"))


@triton.jit
def highest_key(key, weight, wanted, low, high, DIGIT: tl.constexpr):
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
def lowest_bound(x, weight, most, low, high, BITS: tl.constexpr):
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


@triton.jit
def search_candidates(
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
    key = key_of(x, SHIFT)
    if by_k:
        missing = tl.maximum(top_k - above.to(tl.int64), 1)
        low = highest_key(key, inside.to(tl.int32), missing, low, high, DIGIT)
    if by_p:
        mass = tl.where(inside & (key >= low), tl.exp((x - largest) / temperature), 0.0)
        mass = (mass * FIXED).to(tl.int64)
        needed = ((wanted - above) * FIXED).to(tl.int64)
        if by_k:
            needed = (top_p.to(tl.float64) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        low = highest_key(key, mass, tl.maximum(needed, 1), low, high, DIGIT)
    return low


@triton.jit
def search_row(
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
            x = load_logits(row_ptr, column, V)
            weight = tl.where(by_count, 1.0, tl.exp((x - largest) / temperature))
            weight = tl.where(column < V, weight, 0.0)
            sums += tl.where(key_of(x, SHIFT)[None, :] >= bounds[:, None], weight[None, :], 0.0)
        low += tl.max(tl.where(tl.sum(sums, axis=1) >= wanted, way, 0), axis=0) * step
        step = step >> DIGIT
    return low


@triton.jit
def mass_from(row_ptr, V, low, largest, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of a row's logits whose keys are at least `low`."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        x = load_logits(row_ptr, i + tl.arange(0, BLOCK), V)
        mass += tl.where(key_of(x, SHIFT) >= low, tl.exp((x - largest) / temperature), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def finish(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    fact_ptr,
    found_ptr,
    value_ptr,
    least_ptr,
    drawn_ptr,
    V,
    FACTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEWEST: tl.constexpr,
    LISTS: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program row: the smallest logit that it keeps, unless its token has been drawn."""
    row = tl.program_id(0).to(tl.int64)
    if drawn_ptr is not None:
        if tl.load(drawn_ptr + row) >= 0:
            return
    temperature, top_k, top_p, min_p, by_k, by_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V
    )
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
                low = key_of(tl.load(fact_ptr + row * FACTS), SHIFT)
            for tier in tl.static_range(3):
                # Fewer candidates take less time. A tier has eight times as many as the one before it.
                if (longest > ((FEWEST << (3 * tier)) >> 3) // LISTS * (tier > 0)) & (
                    longest <= (FEWEST << (3 * tier)) // LISTS
                ):
                    low = search_candidates(
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
                        FEWEST << (3 * tier),
                        SHIFT,
                        DIGIT,
                    )
            if longest > LENGTH:
                low = search_row(row_ptr, V, low, high, largest, temperature, wanted, by_k, SHIFT, DIGIT, BLOCK)
                apart = by_k & by_p
            if apart:
                wanted = top_p * mass_from(row_ptr, V, low, largest, temperature, SHIFT, BLOCK)
                top = key_of(largest, SHIFT)
                low = search_row(row_ptr, V, low, top, largest, temperature, wanted, by_k == 2, SHIFT, DIGIT, BLOCK)
            least = value_of(tl.maximum(low, LOWEST >> SHIFT), SHIFT)
        least = tl.maximum(least, least_by_min_p(largest, temperature, min_p))
    tl.store(least_ptr + row, least)
