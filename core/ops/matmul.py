"""Matmul of a linear layer, x @ weight^T, for plain and scaled 8-bit numbers.

On a GPU, a matmul with few rows runs in our kernel if `choose` has a tile for it. All others go to the library, which
multiplies more rows than there are where that was measured to be faster.

Shapes: T tokens, L rows that the library multiplies, at least T, I input, O output.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import cache, partial

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.host import shared_bytes
from dovetail.core.ops.padding import more_rows
from dovetail.core.ops.rehearsal import rehearsing, report_kernel
from dovetail.core.ops.tile_choice import BLOCK, MOST_ROWS, OP, choose, library_rows
from dovetail.core.ops.tiles import MatmulTile, kernel_of

log = logging.getLogger(__name__)

HOPPER = (9, 0)
KINDS = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""Weight dtypes for which the kernel has tiles."""
LEAST_INT8_ROWS, INT8_MULTIPLE = 24, 8
"""The library multiplies int8 matrices of at least so many rows, and of a multiple."""
IMPRECISE = 128
"""Number of 8-bit products that the tensor core sums in its accumulator of fewer bits before adding to float32."""
MOST_UNSCALED = 256
"""Number of rows up to which the library's matmul is faster without scales."""


def matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias in their dtype. `counts`: as in scaled_matmul; None = do not split tiles over programs."""
    tile = _tile(x_TI, weight_OI)
    if tile is None or (counts is None and tile.splits_tiles(len(x_TI), *weight_OI.shape)):
        y_LO = F.linear(more_rows(x_TI, _library_rows(x_TI, weight_OI)), weight_OI, bias_O)
        return _first_rows(y_LO, len(x_TI))
    from dovetail.core.ops.kernels.matmul import matmul_triton

    return matmul_triton(x_TI.contiguous(), weight_OI, tile, counts, bias_O=bias_O)


def scaled_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_scale_O: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    counts: torch.Tensor,
    fast_accum: bool = True,
    *,
    reports: bool = True,
) -> torch.Tensor:
    """(x @ weight^T) * x_scale * weight_scale + bias of FP8 x and weight, in `dtype`.

    `counts`: MOST_SHARED_TILES int32 zeros, which are zero again afterwards. Matmuls that may run concurrently need
    separate ones. `fast_accum`: whether many rows may use the tensor core's reduced-precision accumulator throughout.
    `reports`: whether start-up shall rehearse all numbers of rows; otherwise the caller reports those that it has.
    """
    if not x_TI.is_cuda:
        return matmul_reference(x_TI, weight_OI, x_scale_T1, weight_scale_O, bias_O, dtype)
    tile = _tile(x_TI, weight_OI, reports)
    # With many rows, sums for each IMPRECISE products would need too many registers, so only fast ones are computed.
    fast = tile is not None and tile.specialized and len(x_TI) > MOST_ROWS
    if tile is not None and (fast_accum or not fast):
        from dovetail.core.ops.kernels.matmul import matmul_triton

        imprecise = None if fast else min(IMPRECISE, tile.inputs)
        return matmul_triton(x_TI, weight_OI, tile, counts, x_scale_T1, weight_scale_O, bias_O, dtype, imprecise)
    rows = _library_rows(x_TI, weight_OI)
    # The library's matmul with per-row scales writes only bfloat16.
    fused = bias_O if dtype is torch.bfloat16 else None
    y_LO = torch._scaled_mm(
        more_rows(x_TI, rows),
        weight_OI.t(),
        more_rows(x_scale_T1, rows),
        weight_scale_O[None, :],
        bias=fused,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    y_TO = _first_rows(y_LO, len(x_TI)).to(dtype)
    return y_TO if bias_O is None or fused is not None else y_TO + bias_O


def int8_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_scale_O: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    counts: torch.Tensor,
) -> torch.Tensor:
    """(x @ weight^T) * x_scale * weight_scale + bias of int8 x and weight, in `dtype`. `counts`: as in
    scaled_matmul."""
    if not x_TI.is_cuda:
        y_TO = torch._int_mm(x_TI, weight_OI.t()) * x_scale_T1 * weight_scale_O
        return (y_TO if bias_O is None else y_TO + bias_O).to(dtype)
    from dovetail.core.ops.kernels.matmul import matmul_triton, rescale_triton

    if (tile := _tile(x_TI, weight_OI)) is not None:
        return matmul_triton(x_TI, weight_OI, tile, counts, x_scale_T1, weight_scale_O, bias_O, dtype)
    rows = max(LEAST_INT8_ROWS, ceil_div(len(x_TI), INT8_MULTIPLE) * INT8_MULTIPLE)
    sums_TO = torch._int_mm(F.pad(x_TI, (0, 0, 0, rows - len(x_TI))), weight_OI.t())[: len(x_TI)]
    return rescale_triton(sums_TO, x_scale_T1, weight_scale_O, bias_O, dtype)


def block_scaled_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    counts: torch.Tensor,
) -> torch.Tensor:
    """(x @ (weight * scale)^T) * x_scale + bias of FP8 x and weight, in `dtype`, with a scale for each BLOCK x BLOCK
    weights (DeepSeek-V3, 2024): float32 [outputs / BLOCK, inputs / BLOCK], rounded up. Products are summed in float32
    after each block. `counts`: as in scaled_matmul."""
    if not x_TI.is_cuda:
        return block_scaled_reference(x_TI, weight_OI, x_scale_T1, weight_scale, bias_O, dtype)
    outputs, inputs = weight_OI.shape
    if not len(x_TI):
        return torch.empty(0, outputs, dtype=dtype, device=x_TI.device)
    from dovetail.core.ops.kernels.matmul import matmul_triton

    tile = _choose(len(x_TI), outputs, inputs, "fp8_block", x_TI.device)
    if tile is None:
        raise ValueError(f"no tile multiplies {len(x_TI)} rows with blocks of a weight {tuple(weight_OI.shape)}")
    return matmul_triton(
        x_TI, weight_OI, tile, counts, x_scale_T1, weight_scale, bias_O, dtype, IMPRECISE, (BLOCK, BLOCK)
    )


def unscaled_matmul(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, one: torch.Tensor, fast_accum: bool = True
) -> torch.Tensor | None:
    """x @ weight^T of FP8 x and weight in bfloat16, computed by the library without scales; `one` is float32 1.

    Return None where this is not faster, and where the kernel has a tile. With per-row scales, the library spends a
    quarter of the time of a hundred-row matmul on them.
    """
    if not x_TI.is_cuda or not MOST_ROWS < len(x_TI) <= MOST_UNSCALED or _tile(x_TI, weight_OI) is not None:
        return None
    x_LI = more_rows(x_TI, _library_rows(x_TI, weight_OI))
    y_LO = torch._scaled_mm(x_LI, weight_OI.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast_accum)
    return _first_rows(y_LO, len(x_TI))


def _tile(x_TI: torch.Tensor, weight_OI: torch.Tensor, reports: bool = True) -> MatmulTile | None:
    kind = KINDS.get(weight_OI.dtype)
    if kind is None or not x_TI.is_cuda or not len(x_TI):
        return None
    outputs, inputs = weight_OI.shape
    return _choose(len(x_TI), outputs, inputs, kind, x_TI.device, reports)


def _library_rows(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> int:
    """Return how many rows the library should multiply. Rows are independent of each other, so those that are not x's
    may have any values."""
    kind = KINDS.get(weight_OI.dtype)
    if kind is None or not x_TI.is_cuda or not len(x_TI):
        return len(x_TI)
    outputs, inputs = weight_OI.shape
    return library_rows(len(x_TI), outputs, inputs, kind, _gpu_name(x_TI.device))


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).name


def _first_rows(y_LO: torch.Tensor, rows: int) -> torch.Tensor:
    return y_LO if len(y_LO) == rows else y_LO[:rows]


def _choose(
    rows: int, outputs: int, inputs: int, kind: str, device: torch.device, reports: bool = True
) -> MatmulTile | None:
    if reports and rehearsing():
        report_kernel((OP, kind, outputs, inputs), rows, partial(matmul_kernel, outputs, inputs, kind, device))
    return choose(rows, outputs, inputs, kind, *device_facts(device))


def matmul_kernel(outputs: int, inputs: int, kind: str, device: torch.device, rows: int) -> Hashable:
    """Return what identifies the kernel that multiplies so many rows of x."""
    tile = choose(rows, outputs, inputs, kind, *device_facts(device))
    return kernel_of(tile, rows, outputs, inputs), rows <= MOST_UNSCALED


@cache
def device_facts(device: torch.device) -> tuple[str, int, bool, int]:
    """Return name, number of SMs, whether the prefetching kernel runs, and shared memory of a program in bytes."""
    properties = torch.cuda.get_device_properties(device)
    prefetch = _has_prefetch_kernel(properties.major, properties.minor)
    return properties.name, properties.multi_processor_count, prefetch, shared_bytes(device)


def _has_prefetch_kernel(*capability: int) -> bool:
    if capability != HOPPER:
        return False
    try:
        from dovetail.core.ops.kernels import prefetch_matmul  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning(
            "matmuls with few rows use the library or the kernel for all GPUs, and a step takes up to a seventh "
            "longer: the kernel for Hopper does not support the Gluon version of this Triton (%s)",
            error,
        )
        return False
    return True


def matmul_reference(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x @ weight^T) * x_scale * weight_scale + bias, summed in float32 and rounded once, to `dtype` (None = x's).
    x_scale is [T, 1] and weight_scale [O]; either may be a single number."""
    y_TO = x_TI.float() @ weight_OI.float().t()
    for scale in (x_scale, weight_scale):
        if scale is not None:
            y_TO = y_TO * scale
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(dtype or x_TI.dtype)


def block_scaled_reference(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Scale the whole weight and multiply in float32."""
    scale_OI = weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    weight_OI = weight_OI.float() * scale_OI[: len(weight_OI), : weight_OI.shape[1]]
    return matmul_reference(x_TI, weight_OI, x_scale_T1, None, bias_O, dtype)
