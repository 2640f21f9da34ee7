"""x @ weight^T for few rows of a 16- or 32-bit x and an 8-bit weight, which is decoded in registers before the product.

The work is divided as in matmul.py (Stream-K): each program processes an equal range of the (tile, input block) units,
and the last program to arrive at a split tile sums it.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.kernels.matmul import _reduce_split, _write
from dovetail.core.ops.tiles import MatmulTile


@triton.jit
def _range_of_tile(x_ptr, codes_ptr, first, last, row_o, row_t, size, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
                   BLOCK_I: tl.constexpr, EVEN: tl.constexpr, DECODE: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Return weight @ x^T of input blocks [first, last), float32 [BLOCK_O, BLOCK_T]."""
    tokens, outputs, inputs = size
    o = row_o + tl.arange(0, BLOCK_O)
    t = row_t + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    code_at = codes_ptr + o.to(tl.int64)[:, None] * inputs + i[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * inputs + i[:, None]
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for block in range(first, last):
        column = block * BLOCK_I
        weight_mask, x_mask = (o < outputs)[:, None], (t < tokens)[None, :]
        if not EVEN:
            weight_mask = weight_mask & (column + i < inputs)[None, :]
            x_mask = x_mask & (column + i < inputs)[:, None]
        codes_OI = tl.load(code_at + column, mask=weight_mask, other=0, eviction_policy="evict_first")
        x_IT = tl.load(x_at + column, mask=x_mask, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(DECODE(codes_OI, x_ptr.dtype.element_ty), x_IT, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["tokens", "t_tiles", "blocks", "units", "programs"])
def _decoded_matmul(
    x_ptr,
    codes_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    inputs,
    t_tiles,
    blocks,
    units,
    programs,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EVEN: tl.constexpr,
    DECODE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """EVEN: the block width divides the number of inputs. DECODE(codes, dtype) returns numbers of that dtype."""
    epilogue = (None, 0, weight_scale_ptr, 1, bias_ptr, out_ptr)
    size = (tokens, outputs, inputs)
    cut = (t_tiles, blocks, units, programs)
    mine = tl.program_id(0)
    lo = mine * units // programs
    hi = (mine + 1) * units // programs
    wait(PDL)
    for tile in range(lo // blocks, tl.cdiv(hi, blocks)):
        first = tl.maximum(lo - tile * blocks, 0)
        last = tl.minimum(hi - tile * blocks, blocks)
        row_o = tile // t_tiles * BLOCK_O
        row_t = tile % t_tiles * BLOCK_T
        total = _range_of_tile(x_ptr, codes_ptr, first, last, row_o, row_t, size, BLOCK_T, BLOCK_O, BLOCK_I, EVEN,
                               DECODE, PRECISION)  # fmt: skip
        if part_ptr is None:
            _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
        elif last - first == blocks:
            _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
        else:
            _reduce_split(total, tile, last - first, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O)
    announce(PDL)


def decoded_matmul_triton(
    x_TI: torch.Tensor,
    codes_OI: torch.Tensor,
    tile: MatmulTile,
    decode: Any,
    counts: torch.Tensor,
    weight_scale_O: torch.Tensor,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel. `decode`: a @triton.jit function, as decode_e4m3. Other arguments as in core.ops.decoded."""
    tokens, inputs = x_TI.shape
    outputs = len(codes_OI)
    out_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    parts = None
    if tile.splits_tiles(tokens, outputs, inputs):
        if counts.numel() < tiles:
            raise ValueError(f"{tiles} split tiles need one counter each; `counts` has {counts.numel()}")
        parts = torch.empty(2 * programs * tile.tokens * tile.outputs, dtype=torch.float32, device=x_TI.device)
    _decoded_matmul[(programs,)](
        x_TI,
        codes_OI,
        weight_scale_O,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        inputs,
        t_tiles,
        blocks,
        tiles * blocks,
        programs,
        BLOCK_T=tile.tokens,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        EVEN=inputs % tile.inputs == 0,
        DECODE=decode,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x_TI),
    )
    return out_TO


@triton.jit
def _dequantize(codes_ptr, scale_ptr, out_ptr, inputs, BLOCK: tl.constexpr, DECODE: tl.constexpr, PDL: tl.constexpr):
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    codes = tl.load(codes_ptr + row * inputs + columns, mask=columns < inputs, other=0)
    values = DECODE(codes, dtype).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * inputs + columns, values.to(dtype), mask=columns < inputs)


def dequantize_triton(
    codes_OI: torch.Tensor, weight_scale_O: torch.Tensor, decode: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Return the scaled weight in `dtype`."""
    outputs, inputs = codes_OI.shape
    out_OI = torch.empty(outputs, inputs, dtype=dtype, device=codes_OI.device)
    block = min(4096, power_of_2(inputs))
    _dequantize[(outputs, ceil_div(inputs, block))](
        codes_OI, weight_scale_O, out_OI, inputs, BLOCK=block, DECODE=decode, num_warps=4, **dependent(codes_OI)
    )
    return out_OI
