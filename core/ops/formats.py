"""Activation formats: which of them a kernel can fuse, and how to encode an activation afterwards. Shapes: T
tokens, C columns, G scale groups of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation, Bundle, Sums
from dovetail.core.startup_notes import note

SUM_COLUMNS = 8
"""Numbers in bfloat16 of a sum in Activation.sums."""


@dataclass(frozen=True, slots=True)
class EmitPlan:
    """Division of `emit` between a fused kernel, which writes plain and one encoded format, and later encoding."""

    plain: bool
    fused: ActFormat | None
    rest: tuple[ActFormat, ...]


def why_unfused(fmt: ActFormat) -> str | None:
    """Reason why a Triton kernel cannot encode this format in its own pass; None = it can."""
    if fmt.encode is None:
        return "it has no Triton `encode`"
    if fmt.perm is not None and fmt.places is None:
        return "its column order (`perm`) has no inverse (`places`)"
    if fmt.perm is not None and isinstance(fmt.group, int):
        return "its scales are those of groups in another column order (`perm`)"
    if fmt.perm is not None and fmt.sums:
        return "its sums are those of columns in another order (`perm`)"
    if fmt.group == "tensor" and fmt.static_scale is None:
        return "one scale for the whole tensor is known only after the last row"
    if isinstance(fmt.group, int) and fmt.group & (fmt.group - 1):
        return f"its group of {fmt.group} columns is no power of two"
    if fmt.sums and fmt.sums.columns & (fmt.sums.columns - 1):
        return f"its sums of {fmt.sums.columns} columns are of no power of two"
    return None


def triton_encode(reference: str) -> Any:
    """Return the @triton.jit function at "package.module:name"; None without Triton, so without CUDA."""
    try:
        return resolve_name(reference)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None


def scales_of_row(fmt: ActFormat, columns: int) -> int:
    """Number of scales that encoding computes for one row; 0 for unscaled formats and known scales."""
    return ceil_div(columns, fmt.group) if isinstance(fmt.group, int) else int(fmt.group == "token")


def with_sums(fmt: ActFormat, sums: Sums | None) -> ActFormat:
    """Return the format with these sums, one for all layers: `fmt` itself for None, PLAIN, and formats whose tensors
    are those of one layer."""
    if sums is None or fmt is PLAIN:
        return fmt
    own = any(one is not None for one in (fmt.perm, fmt.pre_scale, fmt.static_scale))
    return fmt if own else _with_sums(fmt, sums)


@cache
def _with_sums(fmt: ActFormat, sums: Sums) -> ActFormat:
    return replace(fmt, sums=sums, base=fmt)


def distinct(emit: tuple[ActFormat, ...]) -> tuple[ActFormat, ...]:
    """Return the formats without those that others with sums serve."""
    bases = {fmt.base for fmt in emit}
    return tuple(fmt for fmt in emit if fmt not in bases)


def plan_emit(emit: tuple[ActFormat, ...]) -> EmitPlan:
    fused, rest = None, []
    for fmt in distinct(emit):
        if fmt is PLAIN:
            continue
        if fused is None and why_unfused(fmt) is None:
            fused = fmt
        else:
            rest.append(fmt)
    return EmitPlan(plain=fused is None or bool(rest) or PLAIN in emit, fused=fused, rest=tuple(rest))


def encode(x_TC: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    """Encode a plain activation in every requested format, for producers without fused encoding."""
    return Bundle(tuple(Activation(PLAIN, x_TC) if fmt is PLAIN else _encode_one(x_TC, fmt) for fmt in distinct(emit)))


def encode_reference(x_TC: torch.Tensor, fmt: ActFormat) -> Activation:
    """Pre-scale and permute in float32, then apply the format's reference encoder."""
    x = x_TC.float()
    if fmt.pre_scale is not None:
        x = x * fmt.pre_scale
    if fmt.perm is not None:
        # Entries equal to the number of columns select a column of zeros.
        x = (x if len(fmt.perm) == x.shape[1] else F.pad(x, (0, 1)))[:, fmt.perm]
    if fmt.reference is None:
        raise ValueError(f"activation format {fmt.name!r} has neither a Triton `encode` that fits nor a `reference`")
    values, scale = fmt.reference(x)
    if fmt.group == "tensor" and fmt.static_scale is not None:
        scale = fmt.static_scale
    values = values.to(fmt.dtype or x_TC.dtype)
    if scale is not None and fmt.scale_layout == "column":
        scale = scale.t().contiguous().t()
    added = fmt.sums is not None and fmt.sums.of(len(values))
    return Activation(fmt, values, scale, sums_of(values, fmt.sums.columns) if fmt.sums and added else None)


def sums_of(values_TC: torch.Tensor, width: int) -> torch.Tensor:
    """Return Activation.sums of runs of `width` columns."""
    runs = ceil_div(values_TC.shape[1], width)
    padded_TC = F.pad(values_TC.float(), (0, runs * width - values_TC.shape[1]))
    rest_TR = padded_TC.view(len(padded_TC), runs, width).sum(2)
    sums_TRN = torch.zeros(*rest_TR.shape, SUM_COLUMNS, dtype=torch.bfloat16, device=rest_TR.device)
    for part in range(3):
        piece_TR = rest_TR.bfloat16()
        sums_TRN[:, :, 2 * part] = sums_TRN[:, :, 2 * part + 1] = piece_TR
        rest_TR = rest_TR - piece_TR.float()
    return sums_TRN.flatten(1)


def _encode_one(x_TC: torch.Tensor, fmt: ActFormat) -> Activation:
    if not x_TC.is_cuda:
        return encode_reference(x_TC, fmt)
    if (reason := why_unfused(fmt)) is not None:
        note(f"activation format {fmt.name!r} runs unfused: {reason}")
        return encode_reference(x_TC, fmt)
    from dovetail.core.ops.kernels.formats import encode_triton

    return encode_triton(x_TC, fmt)
