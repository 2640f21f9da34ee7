"""Mask out the logits of tokens that are not allowed next. Shapes: N rows of logits, V vocabulary, M rows that have a
mask, W words of 32 tokens."""

from __future__ import annotations

import torch


def apply_bitmask(logits_NV: torch.Tensor, bits_MW: torch.Tensor, rows_M: torch.Tensor) -> None:
    """Write -inf, in place, to row rows_M[m] for every token v whose bit v % 32 of bits_MW[m, v // 32] is 0. bits_MW is
    int32 with W >= V / 32. rows_M is int64 and names each row at most once."""
    if not len(rows_M):
        return
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.bitmask import apply_bitmask_triton

        apply_bitmask_triton(logits_NV, bits_MW, rows_M)
    else:
        apply_bitmask_reference(logits_NV, bits_MW, rows_M)


def apply_bitmask_reference(logits_NV: torch.Tensor, bits_MW: torch.Tensor, rows_M: torch.Tensor) -> None:
    shift = torch.arange(32, dtype=torch.int32, device=bits_MW.device)
    banned_MV = ((bits_MW[:, :, None] >> shift) & 1 == 0).flatten(1)[:, : logits_NV.shape[1]]
    logits_NV[rows_M] = logits_NV[rows_M].masked_fill(banned_MV, float("-inf"))
