"""Matmul with a packed weight, whose codes are decoded to the input's dtype before they are multiplied.

With few rows, where reading the weight takes most of the time, our kernel decodes it in registers. With many rows the
whole weight is first decoded to a workspace in memory, and the library multiplies. For inputs in E4M3 it is rounded to
E4M3 with one scale per output, unless `PackedWeight.rounded_scale` is None: no library applies scales of groups there.
With some hundreds of rows Hopper's rounded_packed does that in registers, too. Neither is needed if the rounded weight
is kept (`PackedWeight.rounded`).

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import Sums
from dovetail.core.interfaces.tuning import Key
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.matmul import KINDS, device_facts, matmul_kernel, matmul_reference, scaled_matmul
from dovetail.core.ops.packed_tiles import (
    MOST_EXACT_ROWS,
    MOST_SUBTRACTED,
    OP,
    ROUNDED_TOKENS,
    SUMMED,
    choose_packed,
    packed_key,
)
from dovetail.core.ops.packing import LANES, dequantize, maps_groups, rounded
from dovetail.core.ops.rehearsal import rehearsing, report_kernel
from dovetail.core.ops.tiles import kernel_of
from dovetail.core.startup_notes import note

E4M3 = torch.float8_e4m3fn


def packed_matmul(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    x_scale_T1: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    sums_TS: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T (* x_scale) + bias in `dtype`. With `x_scale`, x is in E4M3.

    `sums`: those of Activation, as `sums_for` says; None = Hopper's kernel subtracts zeros as it decodes codes.
    `counts`: as in scaled_matmul; None = neither split tiles over programs nor round the weight. x in E4M3 is converted
    to bfloat16, which is exact, if products in E4M3 are not (`multiplies_e4m3`)."""
    rounds = x_TI.dtype is E4M3 and packed.rounded_scale is not None and counts is not None
    kept_OI = packed.rounded if rounds and len(x_TI) > MOST_EXACT_ROWS else None
    if not x_TI.is_cuda:
        if rounds and len(x_TI) > MOST_EXACT_ROWS:
            weight_OI = rounded(packed) if kept_OI is None else kept_OI
            return matmul_reference(x_TI, weight_OI, x_scale_T1, packed.rounded_scale, bias_O, dtype)
        return packed_matmul_reference(x_TI, packed, bias_O, dtype, x_scale_T1)
    from dovetail.core.ops.kernels.packed_matmul import packed_matmul_triton

    tile, multiplied = None, multiplied_dtype(x_TI.dtype, packed)
    if multiplied is not torch.float32:
        name, processors, hopper, shared = device_facts(x_TI.device)
        key = key_of(packed, multiplied.itemsize)
        special = hopper and specializes(packed, multiplied)
        if hopper and not special and not maps_groups(packed):
            note(
                f"weights in {packed.format.name} whose scales have the strides {packed.scale.stride()} run by the "
                "kernel for all GPUs: Hopper's, which is faster, reads scales as "
                "dovetail.core.ops.packing.empty_by_group allocates them"
            )
        how = key, name, processors, shared, special, rounds, rounds and hopper and rounds_by_kernel(packed)
        shape = len(packed.codes), packed.inputs
        if rehearsing():
            sums, device = sums_for(packed) if special and multiplied is E4M3 else None, x_TI.device
            keeps = packed.rounded is not None

            def kernels(rows: int) -> Hashable:
                chosen = None if keeps and rows > MOST_EXACT_ROWS else choose_packed(rows, *how)
                of_rounded = matmul_kernel(*shape, KINDS[E4M3], device, rows) if rounds and chosen is None else None
                return kernel_of(chosen, rows, *shape), sums is not None and sums.of(rows), of_rounded

            report_kernel((OP, *how, keeps), len(x_TI), kernels)
        tile = choose_packed(len(x_TI), *how) if kept_OI is None else None
    if tile is not None:
        if counts is None and tile.splits_tiles(len(x_TI), len(packed.codes), packed.inputs):
            tile = replace(tile, programs=0, split=1)
        if tile.tokens != ROUNDED_TOKENS:
            x_TI = x_TI.to(multiplied)
        return packed_matmul_triton(x_TI.contiguous(), packed, tile, counts, bias_O, x_scale_T1, dtype, sums_TS)
    if rounds:
        assert packed.rounded_scale is not None and x_scale_T1 is not None and counts is not None
        weight_OI = decoded(packed, E4M3) if kept_OI is None else kept_OI
        return scaled_matmul(x_TI, weight_OI, x_scale_T1, packed.rounded_scale, bias_O, dtype, counts, reports=False)
    if x_TI.dtype is E4M3:
        x_TI = x_TI.bfloat16()
    if x_scale_T1 is None:
        return F.linear(x_TI, decoded(packed, x_TI.dtype), bias_O).to(dtype)
    y_TO = F.linear(x_TI, decoded(packed, x_TI.dtype)).float() * x_scale_T1
    return (y_TO if bias_O is None else y_TO + bias_O).to(dtype)


def packed_matmul_reference(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    x_scale_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode the whole weight and multiply in float32."""
    y_TO = F.linear(x_TI.float(), dequantize(packed))
    if x_scale_T1 is not None:
        y_TO = y_TO * x_scale_T1
    return (y_TO if bias_O is None else y_TO + bias_O).to(dtype)


def round_weight(packed: PackedWeight, out_OI: torch.Tensor) -> None:
    """Write the weight divided by its `rounded_scale` to `out`, in E4M3."""
    if not out_OI.is_cuda:
        out_OI.copy_(rounded(packed))
        return
    from dovetail.core.ops.kernels.packed_rows import packed_rows_triton

    packed_rows_triton(packed, None, out_OI)


def packed_rows(packed: PackedWeight, ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of the matrix, for an embedding."""
    if not ids_T.is_cuda:
        return dequantize(packed, ids_T).to(dtype)
    from dovetail.core.ops.kernels.packed_rows import packed_rows_triton

    return packed_rows_triton(packed, ids_T, ids_T.new_empty(len(ids_T), packed.inputs, dtype=dtype))


def multiplies_e4m3(packed: PackedWeight) -> bool:
    """Return whether the kernel can multiply the weight in E4M3: decoded codes less their zeros are exact in it, and
    strips of LANES inputs share a scale."""
    whole_zeros = packed.zero is None or packed.zero.dtype is torch.uint8
    return packed.format.e4m3 and whole_zeros and packed.group % LANES == 0


def specializes(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether Hopper's kernel can multiply x of this dtype: words that can be decoded, strips of LANES inputs
    that share a scale, in 16 bits also half as many, in E4M3 whole zeros, and x, scales and zeros that tensor maps can
    read."""
    if dtype is E4M3:
        whole = (packed.zero is None or packed.zero.dtype is torch.uint8) and packed.group % LANES == 0
    else:
        whole = packed.group % LANES == 0 or packed.group == LANES // 2
    mapped = packed.inputs * dtype.itemsize % 16 == 0 and maps_groups(packed)
    return whole and packed.format.decode_words is not None and dtype is not torch.float32 and mapped


def rounds_by_kernel(packed: PackedWeight) -> bool:
    """Return whether Hopper's kernel for many rows can round this weight as it decodes it."""
    return packed.rounded_scale is not None and packed.format.stored_bits == 4 and specializes(packed, E4M3)


def sums_for(packed: PackedWeight) -> Sums | None:
    """Return the sums of x in E4M3 from which Hopper's kernel subtracts shifts and zeros. None: it does not multiply
    this weight in E4M3, codes have no decoder without shift and zero, or SUMMED columns have several scales."""
    shifted = E4M3 in packed.format.shifted and multiplies_e4m3(packed) and specializes(packed, E4M3)
    if not shifted or packed.group % SUMMED:
        return None
    # More rows multiply the rounded weight.
    most = sys.maxsize if packed.rounded_scale is None else MOST_EXACT_ROWS
    return Sums(SUMMED, MOST_SUBTRACTED + 1, most)


def multiplied_dtype(dtype: torch.dtype, packed: PackedWeight) -> torch.dtype:
    """Return the dtype in which the kernel multiplies x of this dtype."""
    return torch.bfloat16 if dtype is E4M3 and not multiplies_e4m3(packed) else dtype


def key_of(packed: PackedWeight, itemsize: int) -> Key:
    """Return the product's key in tuning tables. `itemsize`: bytes of a number of x as it is multiplied."""
    fmt = packed.format
    return packed_key(fmt.name, fmt.stored_bits, packed.group, len(packed.codes), packed.inputs, itemsize)


_WORKSPACES: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()


def reserve(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bytes in which weights of a device are decoded, at least those of this one. A layer calls this when it
    is built, so that the memory is allocated before the KV cache takes what is left, and keeps the result, since CUDA
    graphs that write to it do not. Products that use it run one after the other, on one stream."""
    nbytes = outputs * inputs * dtype.itemsize
    space = _WORKSPACES.get(device)
    if space is None or space.numel() < nbytes:
        _WORKSPACES[device] = space = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return space


def decoded(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole matrix in the workspace, where the next call overwrites it."""
    from dovetail.core.ops.kernels.packed_rows import packed_rows_triton

    shape = len(packed.codes), packed.inputs
    space = reserve(*shape, dtype, packed.codes.device)
    weight_OI = space[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
    return packed_rows_triton(packed, None, weight_OI)
