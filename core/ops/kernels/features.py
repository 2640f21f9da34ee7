"""Features of a step's last tokens, kept for the drafter. Shapes as in core.ops.features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "row_start_ptr", "kv_len_ptr"])
def _keep_features(
    part_ptr,
    stride,
    slots_ptr,
    row_start_ptr,
    kv_len_ptr,
    kept_ptr,
    first,
    C,
    F,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, how many tokens before its last one, part of the columns). A decode step without drafts has one
    token in a row, so most programs end at once."""
    row, back = tl.program_id(0), tl.program_id(1)
    end = tl.load(row_start_ptr + row + 1).to(tl.int64)
    if back >= end - tl.load(row_start_ptr + row):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    entry = slot * W + (tl.load(kv_len_ptr + row).to(tl.int64) - 1 - back) % W
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ok = column < C
    values = tl.load(part_ptr + (end - 1 - back) * stride + column, mask=ok)
    tl.store(kept_ptr + entry * F + first + column, values, mask=ok)


def keep_features_triton(
    parts_TC: Sequence[torch.Tensor],
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    kv_len_B: torch.Tensor,
    kept_SWF: torch.Tensor,
) -> None:
    _, width, features = kept_SWF.shape
    first = 0
    for part_TC in parts_TC:
        channels = part_TC.shape[1]
        block = min(2048, power_of_2(channels))
        _keep_features[len(slots_B), width, ceil_div(channels, block)](
            part_TC,
            part_TC.stride(0),
            slots_B,
            row_start_B1,
            kv_len_B,
            kept_SWF,
            first,
            channels,
            features,
            W=width,
            BLOCK=block,
            num_warps=4,
        )
        first += channels
