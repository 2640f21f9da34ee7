"""RMSNorm (Zhang and Sennrich 2019) with the preceding residual addition. Shapes: T tokens, C channels."""

from __future__ import annotations

import torch

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle, Partial
from dovetail.core.ops.formats import encode


def rms_norm(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    after: tuple[torch.Tensor, float] | None = None,
) -> tuple[Bundle, torch.Tensor]:
    """Return (norm(x + residual) in the requested formats, x + residual). Inputs are not modified.

    `scale`: factors per row [T, 1] and per column [C]. x is first multiplied by them and rounded. `after`: weight [C]
    and epsilon of an RMSNorm of x before the residual is added (Gemma 2, 2024). `weight_C`: None = the sum is not
    normalized, and its plain format may be the returned sum (OLMo 2, 2025).

    A weight of x's dtype multiplies the rounded normalized values, as in Llama. A float32 weight multiplies them before
    they are rounded, as in Gemma.
    """
    if x_TC.is_cuda:
        from dovetail.core.ops.kernels.norm import rms_norm_triton

        return rms_norm_triton(x_TC, residual_TC, weight_C, eps, emit, scale, after)
    return rms_norm_reference(x_TC, residual_TC, weight_C, eps, emit, scale, after)


def rms_norm_reference(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    after: tuple[torch.Tensor, float] | None = None,
) -> tuple[Bundle, torch.Tensor]:
    x_TC = Partial(x_TC, scale).completed()
    if after is not None:
        x_TC = normalize(x_TC, *after)
    summed = x_TC if residual_TC is None else x_TC + residual_TC
    return encode(summed if weight_C is None else normalize(summed, weight_C, eps), emit), summed


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension. It rounds as the model's training did: see `rms_norm` for the weight's dtype."""
    x_fp32 = x.float()
    return weigh(x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps), weight, x.dtype)


def weigh(scaled_fp32: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply normalized values by the norm's weight and round to `dtype`. Unless the weight is stored in float32, the
    values are rounded first."""
    return (weight * scaled_fp32.to(weight.dtype)).to(dtype)
