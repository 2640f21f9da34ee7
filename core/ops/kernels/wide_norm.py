"""RMSNorm over all heads of q and over those of k, in place. One program processes q or k of a row. Shapes: T tokens, O
columns of q|k|v, C columns of q|k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import power_of_2
from dovetail.core.ops.kernels.formats import warps
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.kernels.norm import weigh


@triton.jit
def _wide_qk_norm(
    qkv_ptr,
    weight_ptr,
    squares_ptr,
    stride,
    q_columns,
    k_columns,
    q_whole,
    k_whole,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    count = tl.where(part == 0, q_columns, k_columns)
    whole = tl.where(part == 0, q_whole, k_whole)
    at = tl.arange(0, BLOCK)
    cols = part * q_columns + at
    inside = at < count
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    place = qkv_ptr + row * stride + cols
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if squares_ptr is not None:
        square = tl.load(squares_ptr + row * 2 + part)
    else:
        square = tl.sum(x * x, axis=0)
    scaled = x * tl.rsqrt(square / whole + eps)
    tl.store(place, weigh(scaled, weight, qkv_ptr.dtype.element_ty, weight_ptr.dtype.element_ty), mask=inside)


def wide_qk_norm_triton(
    qkv_TO: torch.Tensor,
    weight_C: torch.Tensor,
    columns: tuple[int, int],
    eps: float,
    squares_T2: torch.Tensor | None = None,
    whole: tuple[int, int] | None = None,
) -> torch.Tensor:
    tokens = len(qkv_TO)
    if tokens:
        block = power_of_2(max(columns))
        squares = None if squares_T2 is None else squares_T2.contiguous()
        _wide_qk_norm[(tokens, 2)](
            qkv_TO,
            weight_C,
            squares,
            qkv_TO.stride(0),
            *columns,
            *(whole or columns),
            eps,
            BLOCK=block,
            num_warps=warps(block, tokens),
            **dependent(qkv_TO),
        )
    return qkv_TO
