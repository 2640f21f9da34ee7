"""Triton kernels of the penalties. They visit the tokens of each row's history, not the vocabulary.

N rows of logits, V vocabulary, S slots, L tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces import LogitsContext

BLOCK = 512
ROWS = 64
"""Rows that share one pass, which limits the memory for counts: 33 MB at a vocabulary of 128 256."""


@triton.jit
def _history(row, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, repetition_ptr, presence_ptr, frequency_ptr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Return slot, places and tokens of a block of a row's history, which of them exist, and the row's penalties. Rows
    without penalties have no history."""
    slot = tl.load(slots_ptr + row)
    repetition, presence = tl.load(repetition_ptr + slot), tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    none = (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
    length = tl.where(none, 0, tl.load(lengths_ptr + row))
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = place < length
    token = tl.load(tokens_ptr + slot * tokens_stride + place, mask=known, other=0)
    return slot, place, token, known, repetition, presence, frequency


@triton.jit(do_not_specialize=["first"])
def _count_tokens(slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, prompt_ptr, repetition_ptr, presence_ptr,
                  frequency_ptr, count_ptr, V, first, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot, place, token, known, _, _, _ = _history(
        first + row, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, repetition_ptr, presence_ptr, frequency_ptr,
        BLOCK)  # fmt: skip
    made = place >= tl.load(prompt_ptr + slot)
    # The sign bit marks tokens of the prompt, so that one of them counts as seen however many there are.
    count_at = count_ptr + row.to(tl.int64) * V + token
    tl.atomic_or(count_at, tl.full((BLOCK,), -2147483648, tl.int32), mask=known & ~made, sem="relaxed")
    tl.atomic_add(count_at, tl.full((BLOCK,), 1, tl.int32), mask=known & made, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _penalise(logits_ptr, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, repetition_ptr, presence_ptr,
              frequency_ptr, count_ptr, V, first, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    _, _, token, known, repetition, presence, frequency = _history(
        first + row, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, repetition_ptr, presence_ptr, frequency_ptr,
        BLOCK)  # fmt: skip
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
    blocks = triton.cdiv(ctx.max_length, BLOCK)
    for first in range(0, rows, ROWS):
        grid = min(ROWS, rows - first), blocks
        _count_tokens[grid](*history, ctx.prompt_len_S, *penalties, counts, vocab, first, BLOCK=BLOCK, num_warps=4)
        _penalise[grid](logits_NV, *history, *penalties, counts, vocab, first, BLOCK=BLOCK, num_warps=4)
