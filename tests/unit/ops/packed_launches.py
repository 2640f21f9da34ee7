"""Launches of the kernels for packed weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.ops import weight_formats
from dovetail.core.ops.kernels import decoders
from dovetail.core.ops.kernels.packed_matmul import packed_matmul_triton
from dovetail.core.ops.packed_matmul import multiplies_e4m3, packed_matmul, packed_rows
from dovetail.core.ops.packing import SCALES, empty_by_group, words_of_row
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile

from .emulated import BF16, E4M3, EVERYTHING, FP16, FP32, INT32, INT64, cuda, has_fp8


def packed_weight(fmt: WeightFormat, outputs: int, inputs: int, group: int, scale: torch.dtype) -> PackedWeight:
    """With scales and zeros in the order in which PackedLinear keeps them. `scale`: int32 for words of E4M3."""
    groups = -(-inputs // group) if group else 1
    columns = -(-groups // SCALES) if scale is INT32 else groups
    return PackedWeight(
        fmt,
        inputs,
        group,
        cuda(outputs, words_of_row(inputs, fmt.stored_bits), dtype=INT32),
        empty_by_group(outputs, columns, dtype=scale, device=torch.device("cuda")),
        empty_by_group(outputs, groups, dtype=torch.uint8, device=torch.device("cuda")) if fmt.zero else None,
    )


PACKED = (
    (weight_formats.UINT4, 4096, 128, BF16),
    (weight_formats.E2M1, 4096, 16, FP32),
    (weight_formats.INT4, 8192, 128, FP32),
    (weight_formats.NF4, 4096, 64, FP32),
    (weight_formats.UINT8, 4096, 32, FP16),
    (weight_formats.INT8, 688, 0, BF16),
    (weight_formats.INT6, 4096, 16, FP16),
    (weight_formats.E4M3, 4096, 0, FP32),
    (weight_formats.BITSANDBYTES_FP4, 4096, 64, FP32),
)
"""Format, inputs, group and dtype of scales."""


@triton.jit
def decode_everything(words_ptr, out_ptr):
    at = tl.arange(0, 512)
    words = tl.load(words_ptr + at)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    total = decoders.decode_uint4(words, DTYPE) + decoders.decode_int4(words, DTYPE)
    total += decoders.decode_int6(words, DTYPE)
    total += decoders.decode_uint8(words, DTYPE) + decoders.decode_int8(words, DTYPE)
    total += decoders.decode_e2m1(words, DTYPE) + decoders.decode_nf4(words, DTYPE)
    total += decoders.decode_e4m3_code(words, DTYPE) + decoders.decode_bitsandbytes_fp4(words, DTYPE)
    for half in tl.static_range(2):
        total += decoders.decode_uint4_words(words, half * 16, DTYPE) + decoders.decode_int4_words(words, 4, DTYPE)
        total += decoders.decode_e2m1_words(words, half * 16 + 8, DTYPE) + decoders.decode_nf4_words(words, 12, DTYPE)
        total += decoders.decode_uint8_words(words, half * 16, DTYPE) + decoders.decode_int8_words(words, 8, DTYPE)
        total += decoders.decode_large_uint4_words(words, 4, DTYPE)
        total += decoders.decode_int6_words(words, 8, DTYPE) + decoders.decode_e4m3_code_words(words, half * 16, DTYPE)
    tl.store(out_ptr + at, total)


def hopper_operands() -> None:
    """Scales in E4M3, and codes that are multiplied as they are in E4M3, by the kernel for Hopper."""
    counts = cuda(MOST_SHARED_TILES, dtype=INT32)
    for fmt, group, scale in OPERANDS:
        packed_matmul(cuda(1, 4096), packed_weight(fmt, 4096, 4096, group, scale), None, BF16, counts=counts)
    uint4 = packed_weight(weight_formats.UINT4, 4096, 4096, 128, BF16)
    packed_matmul(cuda(1, 4096, dtype=E4M3), uint4, None, BF16, cuda(1, 1, dtype=FP32), counts)
    # Zeros that are no integers, subtracted from sums and from weights, and scales with more bits than x.
    k_quant = replace(
        packed_weight(weight_formats.UINT4, 4096, 4096, 32, FP16),
        zero=empty_by_group(4096, 128, dtype=FP16, device=torch.device("cuda")),
    )
    for rows, weight in ((1, k_quant), (64, k_quant), (64, packed_weight(weight_formats.INT6, 4096, 4096, 16, FP16))):
        packed_matmul(cuda(rows, 4096), weight, None, BF16, counts=counts)
    packed_matmul(cuda(64, 4096), packed_weight(weight_formats.NF4, 4096, 4096, 64, FP32), None, BF16, counts=counts)
    # Sums of x in memory.
    packed_matmul(cuda(64, 4096, dtype=E4M3), uint4, None, BF16, cuda(64, 1, dtype=FP32), counts, cuda(64, 256))
    # Rounded as it is decoded, in whole tiles and in parts.
    for rows, outputs, fmt, group, scale in ((300, 8192, weight_formats.UINT4, 32, FP32), (256, 8192, *OPERANDS[1])):
        weight = packed_weight(fmt, outputs, 8192, group, scale)
        weight = replace(weight, rounded_scale=cuda(outputs, dtype=FP32), row_scale=cuda(outputs, dtype=FP32))
        x = cuda(rows, 8192, dtype=E4M3), cuda(rows, 1, dtype=FP32)
        packed_matmul(x[0], weight, cuda(outputs), BF16, x[1], counts)


OPERANDS = (
    # Words of scales that are decoded together, or one by one, and scales that are in no words.
    (weight_formats.E2M1, 16, INT32),
    (weight_formats.INT4, 64, INT32),
    (weight_formats.E2M1, 16, E4M3),
)
"""Format, group and dtype of scales."""


def packed_products() -> None:
    """Few rows, an embedding's lookup and E4M3; all formats and numbers of rows if EVERYTHING."""
    counts = cuda(MOST_SHARED_TILES, dtype=INT32)
    weights = [packed_weight(fmt, 4096, *how) for fmt, *how in PACKED]
    packed_matmul(cuda(1, 4096), weights[0], cuda(4096), BF16, counts=counts)
    # Where Hopper's kernel runs, too.
    packed_matmul_triton(cuda(1, 4096), weights[0], MatmulTile(16, 64, 256, split=2), counts, cuda(4096), None, BF16)
    packed_rows(weights[0], cuda(16, dtype=INT64), BF16)
    decode_everything[(1,)](cuda(512, dtype=INT32), cuda(512))
    # NVFP4, and FP8 with scales of blocks.
    nvfp4 = packed_weight(weight_formats.E2M1, 4096, 4096, 16, INT32)
    packed_matmul(cuda(1, 4096), nvfp4, None, BF16, counts=counts)
    packed_rows(nvfp4, cuda(16, dtype=INT64), BF16)
    if has_fp8():
        packed_matmul(cuda(64, 4096, dtype=E4M3), weights[0], None, BF16, cuda(64, 1, dtype=FP32), counts)
        blocks = packed_weight(weight_formats.E4M3, 4096, 4096, 128, FP32)
        packed_matmul(cuda(64, 4096, dtype=E4M3), blocks, None, BF16, cuda(64, 1, dtype=FP32), counts)
    if EVERYTHING:
        packed_matmul(cuda(512, 4096), weights[0], None, BF16)
        decode_everything[(1,)](cuda(512, dtype=INT32), cuda(512, dtype=FP16))
    for weight, rows in product(weights, (1, 16, 32, 64, 128, 256)) if EVERYTHING else ():
        packed_matmul(cuda(rows, weight.inputs), weight, None, BF16, counts=counts)
        packed_rows(weight, cuda(rows, dtype=INT64), BF16)
        if has_fp8() and multiplies_e4m3(weight):
            x = cuda(rows, weight.inputs, dtype=E4M3)
            packed_matmul(x, weight, None, BF16, cuda(rows, 1, dtype=FP32), counts)
