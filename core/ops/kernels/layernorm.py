"""Residual addition, LayerNorm and encoding in one pass, with one program per row. Shapes: T tokens, C channels."""

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
def _layer_norm(
    x_ptr,
    plus_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    summed_ptr,
    plain_ptr,
    C,
    eps,
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
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    if plus_ptr is not None:
        x += tl.load(plus_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        if residual_ptr is None:
            tl.store(summed_ptr + row * C + cols, x.to(dtype), mask=inside)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(summed_ptr + row * C + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / C, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / C + eps)
    y = (scaled * weight + bias).to(dtype)
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


def layer_norm_triton(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    bias_C: torch.Tensor,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    plus_TC: torch.Tensor | None = None,
) -> tuple[Bundle, torch.Tensor]:
    x_TC = x_TC.contiguous()
    tokens, columns = x_TC.shape
    plan = plan_emit(emit)
    plain = empty_rows(tokens, columns, x_TC.dtype, x_TC.device) if plan.plain else None
    summed = x_TC if residual_TC is None and plus_TC is None else torch.empty_like(x_TC)
    target = EncodeTarget.allocate(plan.fused, tokens, columns, x_TC.dtype, x_TC.device)
    if tokens:
        block = target.block(whole_row=True)
        plus, residual = (None if x is None else x.contiguous() for x in (plus_TC, residual_TC))
        _layer_norm[(tokens,)](
            x_TC,
            plus,
            residual,
            weight_C,
            bias_C,
            summed,
            plain,
            columns,
            eps,
            **target.arguments(block),
            BLOCK=block,
            num_warps=warps(block, tokens),
            **dependent(x_TC),
        )
    return collect(emit, plan.rest, plain, target), summed
