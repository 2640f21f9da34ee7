"""Triton kernels of logits processors. Those of the penalties visit each row's history, not the vocabulary.

N rows of logits, V vocabulary, S slots, L tokens, M most pairs of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces import LogitsContext

BLOCK = 1024
PROGRAMS = 128
"""Rows that are counted at a time, which limits the memory for counts: 66 MB at a vocabulary of 128 256."""


@triton.jit(do_not_specialize=["rows"])
def _penalise(logits_ptr, slots_ptr, lengths_ptr, tokens_ptr, tokens_stride, prompt_ptr, repetition_ptr, presence_ptr,
              frequency_ptr, count_ptr, V, rows, BLOCK: tl.constexpr):  # fmt: skip
    """A program processes every PROGRAMS-th row, and has one row of counts."""
    count_ptr += tl.program_id(0).to(tl.int64) * V
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(slots_ptr + row)
        repetition, presence = tl.load(repetition_ptr + slot), tl.load(presence_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        none = (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
        length = tl.where(none, 0, tl.load(lengths_ptr + row)).to(tl.int32)
        prompt = tl.load(prompt_ptr + slot)
        history_ptr = tokens_ptr + slot * tokens_stride
        for begin in range(0, length, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            known, made = place < length, place >= prompt
            token = tl.load(history_ptr + place, mask=known, other=0)
            # The sign bit marks tokens of the prompt, so that one of them counts as seen however many there are.
            prompt_bit = tl.full((BLOCK,), -2147483648, tl.int32)
            tl.atomic_or(count_ptr + token, prompt_bit, mask=known & ~made, sem="relaxed")
            tl.atomic_add(count_ptr + token, tl.full((BLOCK,), 1, tl.int32), mask=known & made, sem="relaxed")
        # All threads must have counted before any takes a count.
        tl.debug_barrier()
        row_ptr = logits_ptr + (row + tl.zeros((), tl.int64)) * V
        for begin in range(0, length, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            known = place < length
            token = tl.load(history_ptr + place, mask=known, other=0)
            # Of several places with a token, one takes its count, leaves zero for the next row, and changes the logit.
            taken = tl.atomic_xchg(count_ptr + token, tl.zeros((BLOCK,), tl.int32), mask=known, sem="relaxed")
            mine = known & (taken != 0)
            count = (taken & 0x7FFFFFFF).to(tl.float32)
            x = tl.load(row_ptr + token, mask=mine, other=0.0).to(tl.float32)
            x = tl.where(x > 0, x / repetition, x * repetition)
            x = x - frequency * count
            x = x - presence * (count > 0).to(tl.float32)
            tl.store(row_ptr + token, x.to(logits_ptr.dtype.element_ty), mask=mine)
        tl.debug_barrier()


def penalise_triton(
    logits_NV: torch.Tensor,
    ctx: LogitsContext,
    repetition_S: torch.Tensor,
    presence_S: torch.Tensor,
    frequency_S: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Apply the penalties in place. `counts`: int32 [PROGRAMS, V], zeros before and after."""
    rows, vocab = logits_NV.shape
    if rows:
        history = ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.tokens_SL.stride(0), ctx.prompt_len_S
        penalties = repetition_S, presence_S, frequency_S
        programs = min(PROGRAMS, rows)
        _penalise[(programs,)](logits_NV, *history, *penalties, counts, vocab, rows, BLOCK=BLOCK, num_warps=8)


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
