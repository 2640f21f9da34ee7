"""Residual addition, RMSNorm and encoding in one pass, with one program per row. Shapes: T tokens, C channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.ops.formats import plan_emit
from dovetail.core.ops.kernels.formats import EncodeTarget, collect, encode_row, warps
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.padding import empty_rows


@triton.jit
def weigh(x, weight, dtype: tl.constexpr, weight_dtype: tl.constexpr):
    """Multiply normalized values by the norm's weight, both as float32, and round to `dtype`. Unless the weight is
    stored in float32, the values are rounded first."""
    if weight_dtype != tl.float32:
        x = x.to(dtype).to(tl.float32)
    return (weight * x).to(dtype)


@triton.jit
def normed(x, weight, C, eps, dtype: tl.constexpr, weight_dtype: tl.constexpr):
    """RMSNorm of a row of C float32 values. Values past C are 0."""
    return weigh(x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps), weight, dtype, weight_dtype)


@triton.jit
def _rms_norm(
    x_ptr,
    x_stride,
    row_scale_ptr,
    column_scale_ptr,
    residual_ptr,
    after_ptr,
    weight_ptr,
    summed_ptr,
    plain_ptr,
    C,
    eps,
    after_eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    dtype = x_ptr.dtype.element_ty
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if row_scale_ptr is not None:
        column_scale = tl.load(column_scale_ptr + cols, mask=inside, other=0.0)
    if after_ptr is not None:
        after = tl.load(after_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if row_scale_ptr is not None:
        x = x * tl.load(row_scale_ptr + row) * column_scale
        x = x.to(dtype).to(tl.float32)
    if after_ptr is not None:
        x = normed(x, after, C, after_eps, dtype, after_ptr.dtype.element_ty).to(tl.float32)
    if residual_ptr is None and (row_scale_ptr is not None or after_ptr is not None):
        tl.store(summed_ptr + row * C + cols, x.to(dtype), mask=inside)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(summed_ptr + row * C + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)
    y = x.to(dtype)
    if weight_ptr is not None:
        y = normed(x, weight, C, eps, dtype, weight_ptr.dtype.element_ty)
    if plain_ptr is not None:
        tl.store(plain_ptr + row * C + cols, y, mask=inside)
    if ENCODE is not None:
        y_fp32 = y.to(tl.float32)
        encode_row(
            y_fp32,
            row,
            0,
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


def rms_norm_triton(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    after: tuple[torch.Tensor, float] | None = None,
) -> tuple[Bundle, torch.Tensor]:
    if x_TC.stride(1) != 1 or weight_C is None:
        x_TC = x_TC.contiguous()
    tokens, columns = x_TC.shape
    plan = plan_emit(emit)
    # Without a norm the plain output is the sum.
    plain = empty_rows(tokens, columns, x_TC.dtype, x_TC.device) if plan.plain and weight_C is not None else None
    summed = x_TC
    if residual_TC is not None or scale is not None or after is not None:
        summed = empty_rows(tokens, columns, x_TC.dtype, x_TC.device)
    row_T1, column_C = scale or (None, None)
    after_C, after_eps = after or (None, None)
    target = EncodeTarget.allocate(plan.fused, tokens, columns, x_TC.dtype, x_TC.device)
    if tokens:
        block = target.block(whole_row=True)
        residual = None if residual_TC is None else residual_TC.contiguous()
        _rms_norm[(tokens,)](
            x_TC,
            x_TC.stride(0),
            row_T1,
            column_C,
            residual,
            after_C,
            weight_C,
            summed,
            plain,
            columns,
            eps,
            after_eps,
            **target.arguments(block),
            BLOCK=block,
            num_warps=warps(block, tokens),
            **dependent(x_TC),
        )
    return collect(emit, plan.rest, summed if weight_C is None else plain, target), summed
