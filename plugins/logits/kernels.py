"""Triton kernels of logits processors. Those of the penalties visit each row's history, not the vocabulary.

N rows of logits, V vocabulary, S slots, L tokens, M most pairs of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces import LogitsContext

BLOCK = 512
ROWS = 64
"""Rows that share one pass, which limits the memory for counts: 33 MB at a vocabulary of 128 256."""
PARTS = 16
"""Maximum number of programs for a row's history. A captured step is launched for the longest history."""


@triton.jit
def _penalties(row, slots_ptr, lengths_ptr, repetition_ptr, presence_ptr, frequency_ptr):
    """Return the row's slot, length and penalties. Rows without penalties have length 0."""
    slot = tl.load(slots_ptr + row)
    repetition, presence = tl.load(repetition_ptr + slot), tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    none = (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
    return slot, tl.where(none, 0, tl.load(lengths_ptr + row)), repetition, presence, frequency


@triton.jit(do_not_specialize=["first"])
def _count_tokens(slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, prompt_ptr, repetition_ptr, presence_ptr,
                  frequency_ptr, count_ptr, V, first, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot, length, _, _, _ = _penalties(first + row, slots_ptr, lengths_ptr, repetition_ptr, presence_ptr, frequency_ptr)
    prompt = tl.load(prompt_ptr + slot)
    for begin in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        known, made = place < length, place >= prompt
        token = tl.load(tokens_ptr + slot * tokens_stride + place, mask=known, other=0)
        # The sign bit marks tokens of the prompt, so that one of them counts as seen however many there are.
        count_at = count_ptr + row.to(tl.int64) * V + token
        tl.atomic_or(count_at, tl.full((BLOCK,), -2147483648, tl.int32), mask=known & ~made, sem="relaxed")
        tl.atomic_add(count_at, tl.full((BLOCK,), 1, tl.int32), mask=known & made, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _penalise(logits_ptr, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, repetition_ptr, presence_ptr,
              frequency_ptr, count_ptr, V, first, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot, length, repetition, presence, frequency = _penalties(
        first + row, slots_ptr, lengths_ptr, repetition_ptr, presence_ptr, frequency_ptr
    )
    for begin in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        known = place < length
        token = tl.load(tokens_ptr + slot * tokens_stride + place, mask=known, other=0)
        # Of several places with a token, one takes its count, leaves zero for the next call, and changes the logit.
        count_at = count_ptr + row.to(tl.int64) * V + token
        taken = tl.atomic_xchg(count_at, tl.zeros((BLOCK,), tl.int32), mask=known, sem="relaxed")
        mine = known & (taken != 0)
        count = (taken & 0x7FFFFFFF).to(tl.float32)
        at = logits_ptr + (first + row).to(tl.int64) * V + token
        x = tl.load(at, mask=mine, other=0.0).to(tl.float32)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x = x - frequency * count
        x = x - presence * (count > 0).to(tl.float32)
        tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=mine)


def penalise_triton(
    logits_NV: torch.Tensor,
    ctx: LogitsContext,
    repetition_S: torch.Tensor,
    presence_S: torch.Tensor,
    frequency_S: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Apply the penalties in place. `counts`: int32 [ROWS, V], zeros before and after."""
    rows, vocab = logits_NV.shape
    history = ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.tokens_SL.stride(0)
    penalties = repetition_S, presence_S, frequency_S
    parts = min(PARTS, triton.cdiv(ctx.max_length, BLOCK))
    for first in range(0, rows, ROWS):
        grid = min(ROWS, rows - first), parts
        _count_tokens[grid](*history, ctx.prompt_len_S, *penalties, counts, vocab, first, BLOCK=BLOCK, num_warps=4)
        _penalise[grid](logits_NV, *history, *penalties, counts, vocab, first, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["most"])
def _add_pairs(logits_ptr, slots_ptr, lengths_ptr, ids_ptr, values_ptr, counts_ptr, until_ptr, V, most,
               BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    count = tl.where(tl.load(lengths_ptr + row) < tl.load(until_ptr + slot), tl.load(counts_ptr + slot), 0)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(ids_ptr + slot * most + place, mask=place < count, other=0)
        value = tl.load(values_ptr + slot * most + place, mask=place < count, other=0.0)
        at = logits_ptr + row * V + token
        x = tl.load(at, mask=place < count, other=0.0).to(tl.float32)
        tl.store(at, (x + value).to(logits_ptr.dtype.element_ty), mask=place < count)


def add_pairs_triton(
    logits_NV: torch.Tensor,
    ctx: LogitsContext,
    ids_SM: torch.Tensor,
    values_SM: torch.Tensor,
    counts_S: torch.Tensor,
    until_S: torch.Tensor,
) -> None:
    """Add the first counts_S values of each row's slot in place, to rows whose history is shorter than until_S. The ids
    of a slot differ."""
    rows, vocab = logits_NV.shape
    if rows:
        pairs = ids_SM, values_SM, counts_S, until_S
        _add_pairs[(rows,)](
            logits_NV, ctx.slots_N, ctx.lengths_N, *pairs, vocab, ids_SM.shape[1], BLOCK=128, num_warps=4
        )
