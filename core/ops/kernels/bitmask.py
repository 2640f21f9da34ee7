"""Write -inf where a bit is 0. A program processes a block of one row's columns and writes only banned tokens. Shapes:
N rows of logits, V vocabulary, M rows that have a mask, W words of 32 tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2

_BLOCK = 4096


@triton.jit
def _apply_bitmask(logits_ptr, bits_ptr, rows_ptr, V, logits_stride, bits_stride, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + m)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    word = tl.load(bits_ptr + m * bits_stride + cols // 32, mask=inside, other=-1)
    banned = ((word >> (cols % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + cols, float("-inf"), mask=inside & banned)


def apply_bitmask_triton(logits_NV: torch.Tensor, bits_MW: torch.Tensor, rows_M: torch.Tensor) -> None:
    vocab = logits_NV.shape[1]
    block = min(_BLOCK, power_of_2(vocab))
    grid = (len(rows_M), ceil_div(vocab, block))
    strides = logits_NV.stride(0), bits_MW.stride(0)
    _apply_bitmask[grid](logits_NV, bits_MW, rows_M, vocab, *strides, BLOCK=block, num_warps=8)
