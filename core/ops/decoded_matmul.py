"""Matmul of a plain input with an E4M3 weight, which is decoded to the input's dtype before it is multiplied.

The weight takes half the memory of 16 bits. With few rows, where reading it takes most of the time, our kernel decodes
it in registers. With many rows the whole weight is first decoded and scaled to memory, and the library multiplies.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from dovetail.core.host import shared_bytes
from dovetail.core.ops.matmul import matmul_reference
from dovetail.core.ops.rehearsal import report_kernel
from dovetail.core.ops.tiles import MOST_SHARED_TILES, RESERVED, MatmulTile, kernel_of

MOST_ROWS = 128
"""Number of rows up to which our kernel runs. They fit into one tile: with more, each weight would be decoded twice."""
PROGRAMS = 2
"""Programs per SM."""


def decoded_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    weight_scale_O: torch.Tensor,
    bias_O: torch.Tensor | None,
    counts: torch.Tensor,
) -> torch.Tensor:
    """(x @ weight^T) * weight_scale + bias in x's dtype, with an E4M3 weight. `counts`: as in scaled_matmul."""
    if not x_TI.is_cuda:
        return matmul_reference(x_TI, weight_OI, None, weight_scale_O, bias_O)
    from dovetail.core.ops.kernels.decoded_matmul import decoded_matmul_triton, dequantize_triton
    from dovetail.core.ops.kernels.e4m3 import decode_e4m3, decode_e4m3_words

    codes_OI = weight_OI.view(torch.uint8)
    if x_TI.dtype is torch.float32:
        return F.linear(x_TI, dequantize_triton(codes_OI, weight_scale_O, decode_e4m3, x_TI.dtype), bias_O)
    outputs, inputs = weight_OI.shape
    device = _device(x_TI.device)
    report_kernel(
        ("decoded_matmul", outputs, inputs, x_TI.dtype),
        len(x_TI),
        lambda rows: kernel_of(decoding_tile(rows, outputs, inputs, *device), rows, outputs, inputs),
    )
    tile = decoding_tile(len(x_TI), outputs, inputs, *device)
    if tile is None:
        return F.linear(x_TI, dequantize_triton(codes_OI, weight_scale_O, decode_e4m3_words, x_TI.dtype), bias_O)
    return decoded_matmul_triton(x_TI.contiguous(), codes_OI, tile, decode_e4m3_words, counts, weight_scale_O, bias_O)


def decoding_tile(rows: int, outputs: int, inputs: int, processors: int, shared: int) -> MatmulTile | None:
    """Return the kernel's tile for x [rows, inputs] of 16 bits and weight [outputs, inputs]; None = use the library.

    Units are distributed equally over the programs, unless there are too many tiles for the counters. `shared`: shared
    memory of a program in bytes."""
    if not 0 < rows <= MOST_ROWS:
        return None
    tokens = max(16, 1 << (rows - 1).bit_length())
    tile = MatmulTile(tokens, 64, 128 if tokens <= 64 else 64, stages=3 if tokens == 64 else 4)
    while shared_of(tile) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    _, tiles, _, _ = tile.launch(rows, outputs, inputs)
    if tiles <= MOST_SHARED_TILES:
        tile = replace(tile, programs=PROGRAMS * processors)
    return tile if tile.fits_32_bits(rows, outputs, inputs) else None


def shared_of(tile: MatmulTile) -> int:
    """Upper estimate of a program's shared memory in bytes: blocks of 16-bit inputs and 8-bit weights."""
    return (2 * tile.tokens + tile.outputs) * tile.inputs * tile.stages + RESERVED


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Number of SMs, and shared memory of a program in bytes."""
    return torch.cuda.get_device_properties(device).multi_processor_count, shared_bytes(device)
