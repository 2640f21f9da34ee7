"""Triton kernel of `ngram` and `suffix`. A program searches the text of one row from its end, so recent matches end it
early, then what its corpus has.

B rows, L token capacity of a slot, K drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import power_of_2
from dovetail.plugins.spec_decode.corpus import Corpus

BLOCK = 1024


@triton.jit
def _matched(text_ptr, place, alive, row_ptr, length, RING: tl.constexpr, MAX_MATCH: tl.constexpr):
    """Return how many of the row's last tokens equal those that end at `place` of a text, which is a ring of RING
    tokens unless that is 0."""
    matched = place.to(tl.int64) * 0
    back = 0
    longest = 1
    # Few places match more than a token or two, so most blocks end early.
    while (back < MAX_MATCH) & (longest > 0):
        at = place - back
        if RING:
            at = tl.where(at < 0, at + RING, at)
        alive = alive & (at >= 0) & (back < length)
        last = tl.load(row_ptr + tl.maximum(length - 1 - back, 0))
        alive = alive & (tl.load(text_ptr + at, mask=alive, other=-1) == last)
        matched += alive.to(tl.int64)
        longest = tl.max(alive.to(tl.int32), axis=0)
        back += 1
    return matched


@triton.jit
def _better(best, matched, place, MIN_MATCH: tl.constexpr):
    """Return the best of a block and of those before: length of a match in the high half, its last position in the low
    one, so that longer matches win, then later ones."""
    return tl.maximum(best, tl.max(tl.where(matched >= MIN_MATCH, (matched << 32) + place, -1), axis=0))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"])
def _look_up(slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, predicted_ptr, ring_ptr, owner_ptr, owners_ptr,
             drafts_ptr, count_ptr, K: tl.constexpr, MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr,
             GROWTH: tl.constexpr, PREDICTED: tl.constexpr, LEAD: tl.constexpr, RING: tl.constexpr,
             BLOCK: tl.constexpr, DRAFTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    text_ptr = tokens_ptr + slot * tokens_stride
    length = tl.load(lengths_ptr + row).to(tl.int32)
    best = tl.full((), -1, tl.int64)
    begin = (length - 1) // BLOCK * BLOCK
    while (begin >= 0) & ((best >> 32) < MAX_MATCH):
        place = begin + tl.arange(0, BLOCK)
        best = _better(best, _matched(text_ptr, place, place < length - 1, text_ptr, length, 0, MAX_MATCH), place,
                       MIN_MATCH)  # fmt: skip
        begin -= BLOCK
    k = tl.arange(0, DRAFTS)
    found = best >= 0
    end = (best & 0xFFFFFFFF).to(tl.int32)
    # A copy that would run past the end wraps around: the text between match and end is taken as a period.
    period = tl.where(found, length - 1 - end, 1)
    drafts = tl.load(text_ptr + end + 1 + k % period, mask=found & (k < K), other=0)
    matched = best >> 32
    if PREDICTED:
        other_ptr = predicted_ptr + slot * PREDICTED
        best = tl.full((), -1, tl.int64)
        begin = (PREDICTED - 1) // BLOCK * BLOCK
        while (begin >= 0) & ((best >> 32) < MAX_MATCH):
            place = begin + tl.arange(0, BLOCK)
            # A match that ends before the prompt does would draft the prompt.
            alive = (place >= LEAD - 1) & (place < PREDICTED)
            best = _better(best, _matched(other_ptr, place, alive, text_ptr, length, 0, MAX_MATCH), place, MIN_MATCH)
            begin -= BLOCK
        better = (best >= 0) & ((best >> 32) >= matched)
        at = (best & 0xFFFFFFFF).to(tl.int32) + 1 + k
        follow = tl.load(other_ptr + at, mask=better & (at < PREDICTED), other=-1)
        drafts = tl.where(better, follow, drafts)
        matched = tl.where(better, best >> 32, matched)
    if RING:
        owner = tl.load(owners_ptr + slot)
        best = tl.full((), -1, tl.int64)
        begin = (RING - 1) // BLOCK * BLOCK
        # Only longer matches than those before are of use.
        while (begin >= 0) & (tl.maximum(best >> 32, matched) < MAX_MATCH):
            place = begin + tl.arange(0, BLOCK)
            alive = (place < RING) & (tl.load(owner_ptr + place, mask=place < RING, other=-1) == owner)
            best = _better(best, _matched(ring_ptr, place, alive, text_ptr, length, RING, MAX_MATCH), place, MIN_MATCH)
            begin -= BLOCK
        better = (best >= 0) & ((best >> 32) > matched)
        at = ((best & 0xFFFFFFFF).to(tl.int32) + 1 + k) % RING
        drafts = tl.where(better, tl.load(ring_ptr + at, mask=better & (k < K), other=-1), drafts)
        matched = tl.where(better, best >> 32, matched)
    tl.store(drafts_ptr + row * K + k, drafts, mask=k < K)
    grown = (tl.maximum(matched, 0).to(tl.float32) * GROWTH).to(tl.int32)
    tl.store(count_ptr + row, tl.minimum(grown, K))


def look_up_triton(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    growth: float,
    corpus: Corpus | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `lookup.look_up_reference` does."""
    rows = len(slots_B)
    drafts_BK = torch.empty(rows, k, dtype=torch.int32, device=tokens_SL.device)
    count_B = torch.empty(rows, dtype=torch.int32, device=tokens_SL.device)
    # Without a corpus these are not read.
    other, owners = (tokens_SL,) * 2, (slots_B,) * 2
    if corpus is not None:
        other, owners = (corpus.predicted_SP, corpus.ring_N), (corpus.owner_N, corpus.owner_S)
    _look_up[(rows,)](
        slots_B,
        lengths_B,
        tokens_SL,
        tokens_SL.stride(0),
        *other,
        *owners,
        drafts_BK,
        count_B,
        K=k,
        MIN_MATCH=min_match,
        MAX_MATCH=max_match,
        GROWTH=growth,
        PREDICTED=0 if corpus is None else corpus.predicted_SP.shape[1],
        LEAD=0 if corpus is None else corpus.lead,
        RING=0 if corpus is None else len(corpus.ring_N),
        BLOCK=BLOCK,
        DRAFTS=power_of_2(k),
        # Three texts take more values than threads of four warps have registers for.
        num_warps=4 if corpus is None else 8,
    )
    return drafts_BK, count_B
