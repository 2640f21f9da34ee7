"""Top-k, top-p and min-p without a sort: the smallest logit that a row keeps, in three passes over the logits.

1. `summarize` finds the maximum of every group of some logits and, for top-p, the row's probability mass.
2. `measure` sums, for top-p and for large k, what is above each of PIVOTS bounds. `choose_pivots` takes half of them
   from a sample of the row, where a flat distribution has its bound, and spreads the other half evenly, for a peaked
   distribution, whose mass a sample misses. (Selection by sampled pivots: Floyd and Rivest, 1975.) A small k needs no
   pivots: the k-th largest of the groups' maxima is a lower bound that few logits exceed.
3. `gather` collects the logits between the two closest bounds, and `finish` searches these few for the exact value.

Draws with a top-p that keeps most of the probability need only the first two passes and a few tries
(core.ops.kernels.filter_tries). If more than CANDIDATES logits are left and they are not all equal, `finish` searches
the row itself, which is slower and as exact. The launches do not depend on device data; programs of rows without
filters return immediately.

Shapes: N rows, V vocabulary, P parts of it, G groups, B = PIVOTS bounds.
"""

from __future__ import annotations

import torch

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.ops.kernels.draw import best_triton, has_fast_logarithm, split_rows
from dovetail.core.ops.kernels.filter_passes import choose_pivots, gather, measure, summarize
from dovetail.core.ops.kernels.filter_search import finish
from dovetail.core.ops.kernels.filter_tries import LISTED, TRIES
from dovetail.core.ops.random import Purpose
from dovetail.core.ops.sampling_programs import FILTER, PART_COLUMNS

BLOCK = 1024
DIGIT = 3
"""Bits of a bound that one pass over a row's sample, candidates or logits finds."""
GROUPS_OF_PART = 64
GROUPS = 1024
"""Maxima that are searched for a bound of top-k; if there are more, each is that of several groups."""
PIVOTS = TRIES
SAMPLE = 2048
RUN = 16
"""Consecutive logits in the sample, which share a memory transaction."""
CANDIDATES = 8192
LISTS = 8
"""Lists that a row's candidates are kept in, so that programs that append to them wait less for each other."""
FEW = 512
"""Number of candidates up to which `finish` takes a fraction of the time."""

FACTS = 6
"""float32 facts of a row, in the order of `choose_pivots`."""


def least_kept_triton(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    return _search(logits_NV.contiguous(), [temperature_N, top_k_N, top_p_N, min_p_N], None)[0]


def draw_filtered_triton(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    key_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    logits_NV = logits_NV.contiguous()
    noise_of = position_N.contiguous(), key_N.contiguous()
    least_N, drawn_N = _search(logits_NV, [temperature_N, top_k_N, top_p_N, min_p_N], noise_of)
    return best_triton(logits_NV, position_N, temperature_N, key_N, True, least_N, 0, drawn_N)[1]


def _search(
    logits_NV: torch.Tensor, filters: list[torch.Tensor], noise_of: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the smallest logit that each row keeps. With `noise_of` (positions, keys) rows may try, and the second
    result has their tokens, -1 = not drawn."""
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    least_N = torch.empty(rows, dtype=torch.float32, device=device)
    drawn_N = None if noise_of is None else torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return least_N, drawn_N
    filters = [filter_N.contiguous() for filter_N in filters]
    most = ceil_div(vocab, PART_COLUMNS)
    parts = split_rows(FILTER, logits_NV, most)
    part_columns = ceil_div(ceil_div(vocab, parts), BLOCK) * BLOCK
    parts = ceil_div(vocab, part_columns)
    groups = parts * GROUPS_OF_PART
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits_NV.dtype, 0)
    maxima_NG, value_NC = (torch.empty(rows, columns, device=device) for columns in (groups, CANDIDATES))
    peak_NP, mass_NP = (torch.empty(rows, parts, device=device) for _ in range(2))
    fact_N, pivot_NB = torch.empty(rows, FACTS, device=device), torch.empty(rows, PIVOTS, device=device)
    sums_NPB = torch.empty(rows, parts, PIVOTS, device=device)
    found_N = torch.empty(rows, 2 + LISTS, dtype=torch.int32, device=device)
    position_N = key_N = score_N = token_N = bound_NP = try_N = None
    if noise_of is not None:
        position_N, key_N = noise_of
        score_N = torch.empty(rows, parts, LISTED, device=device)
        token_N = torch.empty(rows, parts, LISTED, dtype=torch.int32, device=device)
        bound_NP = torch.empty(rows, parts, device=device)
        try_N = torch.empty(rows, PIVOTS, dtype=torch.int32, device=device)
    listed = score_N, token_N, bound_NP
    few_parts = power_of_2(most)
    summarize[rows, parts](
        logits_NV,
        *filters,
        maxima_NG,
        peak_NP,
        mass_NP,
        position_N,
        key_N,
        *listed,
        vocab,
        part_columns,
        PURPOSE=int(Purpose.SAMPLE),
        LISTED=LISTED,
        APPROX=has_fast_logarithm(),
        EACH=GROUPS_OF_PART,
        BLOCK=BLOCK,
        num_warps=4,
    )
    choose_pivots[(rows,)](
        logits_NV,
        *filters,
        maxima_NG,
        peak_NP,
        mass_NP,
        *listed,
        try_N,
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
        GROUPS=GROUPS,
        PARTS=few_parts,
        LISTS=LISTS,
        LISTED=LISTED,
        SHIFT=shift,
        DIGIT=DIGIT,
        num_warps=8,
    )
    measure[rows, parts](
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
    gather[rows, parts](
        logits_NV,
        *filters,
        fact_N,
        pivot_NB,
        sums_NPB,
        found_N,
        value_NC,
        try_N,
        drawn_N,
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
        drawn_N,
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
    return least_N, drawn_N
