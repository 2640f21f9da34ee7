"""silu(gate) * up or gelu(gate) * up, and encoding in one pass. A program processes a block of columns, or a whole row
for a row scale. Shapes: T tokens, F intermediate columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.ops.formats import plan_emit
from dovetail.core.ops.kernels.formats import EncodeTarget, collect, encode_row, warps
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.padding import empty_rows

WHOLE = tl.constexpr(8192)
"""Block size from which a program allows the next launch only after its own loads. One SM reads the whole row, which
takes longer than a launch, and the weight fetches of the next matmul would compete with these loads."""


@triton.jit
def gelu_tanh(x):
    """The tanh approximation of GELU: x * sigmoid(2u) is 0.5 * x * (1 + tanh(u))."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _silu_and_mul(
    gate_up_ptr,
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
    GELU: tl.constexpr,
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
    dtype = gate_up_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * C + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * C + C + cols, mask=inside, other=0.0).to(tl.float32)
    announce(PDL and BLOCK >= WHOLE)
    # Round to the model's dtype after the activation and after the product, as two separate operations would.
    if GELU:
        y = (gelu_tanh(gate).to(dtype).to(tl.float32) * up).to(dtype)
    else:
        y = ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)
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


def silu_and_mul_triton(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    return _launch(gate_up_T2F, emit, gelu=False)


def gelu_and_mul_triton(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    return _launch(gate_up_T2F, emit, gelu=True)


def _launch(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...], gelu: bool) -> Bundle:
    gate_up_T2F = gate_up_T2F.contiguous()
    tokens, columns = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    plan = plan_emit(emit)
    plain = empty_rows(tokens, columns, gate_up_T2F.dtype, gate_up_T2F.device) if plan.plain else None
    target = EncodeTarget.allocate(plan.fused, tokens, columns, gate_up_T2F.dtype, gate_up_T2F.device)
    if tokens:
        block = target.block()
        grid = (tokens, ceil_div(target.width, block))
        _silu_and_mul[grid](
            gate_up_T2F,
            plain,
            columns,
            **target.arguments(block),
            GELU=gelu,
            BLOCK=block,
            num_warps=warps(block),
            **dependent(gate_up_T2F),
        )
    return collect(emit, plan.rest, plain, target)
