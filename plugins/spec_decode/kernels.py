"""Triton kernel of `ngram` and `suffix`. A program searches the text of one row from its end, so recent matches end it
early.

B rows, L token capacity of a slot, K drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"])
def _look_up(slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, drafts_ptr, count_ptr, K: tl.constexpr,
             MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, GROWTH: tl.constexpr, BLOCK: tl.constexpr,
             DRAFTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    text_ptr = tokens_ptr + tl.load(slots_ptr + row) * tokens_stride
    length = tl.load(lengths_ptr + row).to(tl.int32)
    # Length of a match in the high half, its last position in the low one: longer matches win, then later ones.
    best = tl.full((), -1, tl.int64)
    begin = (length - 1) // BLOCK * BLOCK
    while (begin >= 0) & ((best >> 32) < MAX_MATCH):
        place = begin + tl.arange(0, BLOCK)
        alive = place < length - 1
        matched = tl.zeros((BLOCK,), tl.int64)
        back = 0
        longest = 1
        # Few places match more than a token or two, so most blocks end early.
        while (back < MAX_MATCH) & (longest > 0):
            alive = alive & (place >= back)
            last = tl.load(text_ptr + tl.maximum(length - 1 - back, 0))
            alive = alive & (tl.load(text_ptr + place - back, mask=alive, other=-1) == last)
            matched += alive.to(tl.int64)
            longest = tl.max(alive.to(tl.int32), axis=0)
            back += 1
        best = tl.maximum(best, tl.max(tl.where(matched >= MIN_MATCH, (matched << 32) + place, -1), axis=0))
        begin -= BLOCK
    found = best >= 0
    end = (best & 0xFFFFFFFF).to(tl.int32)
    # A copy that would run past the end wraps around: the text between match and end is taken as a period.
    period = tl.where(found, length - 1 - end, 1)
    k = tl.arange(0, DRAFTS)
    drafts = tl.load(text_ptr + end + 1 + k % period, mask=found & (k < K), other=0)
    tl.store(drafts_ptr + row * K + k, drafts, mask=k < K)
    grown = ((best >> 32).to(tl.float32) * GROWTH).to(tl.int32)
    tl.store(count_ptr + row, tl.where(found, tl.minimum(grown, K), 0))


def look_up_triton(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    growth: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `lookup.look_up_reference` does."""
    rows = len(slots_B)
    drafts_BK = torch.empty(rows, k, dtype=torch.int32, device=tokens_SL.device)
    count_B = torch.empty(rows, dtype=torch.int32, device=tokens_SL.device)
    _look_up[(rows,)](
        slots_B,
        lengths_B,
        tokens_SL,
        tokens_SL.stride(0),
        drafts_BK,
        count_B,
        K=k,
        MIN_MATCH=min_match,
        MAX_MATCH=max_match,
        GROWTH=growth,
        BLOCK=BLOCK,
        DRAFTS=triton.next_power_of_2(k),
        num_warps=4,
    )
    return drafts_BK, count_B
