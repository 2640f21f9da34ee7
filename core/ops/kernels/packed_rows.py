"""Rows of a packed matrix, decoded to memory.

Shapes: T rows of the result, O rows of the matrix, I inputs of a strip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.kernels.packed_matmul import WHOLE, of_strip
from dovetail.core.ops.packing import LANES


@triton.jit(do_not_specialize=["rows", "outputs"])
def _packed_rows(
    ids_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    row_scale_ptr,
    divisor_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    words,
    groups,
    scale_so,
    scale_sg,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIP: tl.constexpr,
    DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without `ids_ptr`, decode all rows in order. `divisor_ptr`: what the numbers of a row are divided by."""
    announce(PDL)
    wait(PDL)
    EACH: tl.constexpr = 32 // BITS
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = t if ids_ptr is None else tl.load(ids_ptr + t, mask=t < rows, other=0)
    i = tl.arange(0, STRIP)
    start = tl.program_id(1) * (EACH * STRIP)
    ok_T = (t < rows)[:, None]
    code_at = codes_ptr + o.to(tl.int64)[:, None] * words + (start // EACH + i)[None, :]
    word = tl.load(code_at, mask=ok_T, other=0)
    row_scale = 1.0
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + o, mask=t < rows, other=0.0)[:, None]
    # Not a factor of the row's scale: their product may be infinite where no number is.
    inverse = 1.0
    if divisor_ptr is not None:
        inverse = 1.0 / tl.load(divisor_ptr + o, mask=t < rows, other=1.0)[:, None]
    for strip in tl.static_range(EACH):
        first = start + strip * STRIP
        value = DECODE((word >> (strip * BITS)) & ((1 << BITS) - 1), tl.float32)
        if zero_ptr is not None:
            value -= of_strip(zero_ptr, o, outputs, groups, (scale_so, scale_sg), first, GROUP, STRIP, tl.float32)
        value *= of_strip(scale_ptr, o, outputs, groups, (scale_so, scale_sg), first, GROUP, STRIP, tl.float32)
        at = out_ptr + t.to(tl.int64)[:, None] * inputs + (first + i)[None, :]
        ok = ok_T & (first + i < inputs)[None, :]
        tl.store(at, (value * row_scale * inverse).to(out_ptr.dtype.element_ty), mask=ok)


BLOCK = 16
"""Rows of a program."""


def packed_rows_triton(packed: PackedWeight, ids_T: torch.Tensor | None, out_TI: torch.Tensor) -> torch.Tensor:
    """Write the rows `ids_T`, or all, to `out_TI`, which is contiguous: in E4M3 as `rounded` returns them."""
    rows, inputs = out_TI.shape
    outputs, words = packed.codes.shape
    if rows:
        _packed_rows[(ceil_div(rows, BLOCK), words // LANES)](
            ids_T,
            packed.codes,
            packed.scale,
            packed.zero,
            packed.row_scale,
            packed.rounded_scale if out_TI.dtype is torch.float8_e4m3fn else None,
            out_TI,
            rows,
            outputs,
            inputs,
            words,
            packed.scale.shape[1],
            *packed.steps,
            BLOCK=BLOCK,
            BITS=packed.format.stored_bits,
            GROUP=packed.group or WHOLE,
            STRIP=LANES,
            DECODE=packed.format.decode,
            num_warps=4,
            **dependent(out_TI),
        )
    return out_TI
