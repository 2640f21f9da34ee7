"""GELU and encoding in one pass. A program processes a block of columns, or a whole row if the scale needs it. Shapes:
T tokens, F intermediate columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.ops.formats import plan_emit
from dovetail.core.ops.kernels.formats import EncodeTarget, collect, encode_row, warps
from dovetail.core.ops.kernels.gated import WHOLE, gelu_tanh
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.padding import empty_rows


@triton.jit
def _gelu(
    x_ptr,
    plain_ptr,
    C,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    TANH: tl.constexpr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL and BLOCK < WHOLE)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    inside = cols < C
    x = tl.load(x_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    announce(PDL and BLOCK >= WHOLE)
    if TANH:
        y = gelu_tanh(x)
    else:
        y = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    y = y.to(x_ptr.dtype.element_ty)
    if plain_ptr is not None:
        tl.store(plain_ptr + row * C + cols, y, mask=inside)
    if ENCODE is not None:
        y_fp32 = y.to(tl.float32)
        encode_row(
            y_fp32,
            row,
            start,
            C,
            values_ptr,
            scale_ptr,
            static_ptr,
            pre_ptr,
            place_ptr,
            width,
            scale_st,
            scale_sg,
            sums_ptr,
            ENCODE,
            GROUP,
            SUMS,
            BLOCK,
        )


def gelu_triton(x_TF: torch.Tensor, tanh: bool = False, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    x_TF = x_TF.contiguous()
    tokens, columns = x_TF.shape
    plan = plan_emit(emit)
    plain = empty_rows(tokens, columns, x_TF.dtype, x_TF.device) if plan.plain else None
    target = EncodeTarget.allocate(plan.fused, tokens, columns, x_TF.dtype, x_TF.device)
    if tokens:
        block = target.block()
        grid = (tokens, ceil_div(target.width, block))
        arguments = target.arguments(block)
        _gelu[grid](
            x_TF, plain, columns, **arguments, TANH=tanh, BLOCK=block, num_warps=warps(block), **dependent(x_TF)
        )
    return collect(emit, plan.rest, plain, target)
