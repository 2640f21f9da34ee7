"""LayerNorm (Ba et al. 2016) with the preceding residual addition. Shapes: T tokens, C channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle, Partial
from dovetail.core.ops.formats import encode


def layer_norm(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    bias_C: torch.Tensor,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    plus_TC: torch.Tensor | None = None,
) -> tuple[Bundle, torch.Tensor]:
    """Return (norm(x + residual) in the requested formats, x + residual). Inputs are not modified. `plus`: tensor that
    is first added to x; the sum is rounded."""
    if x_TC.is_cuda:
        from dovetail.core.ops.kernels.layernorm import layer_norm_triton

        return layer_norm_triton(x_TC, residual_TC, weight_C, bias_C, eps, emit, plus_TC)
    return layer_norm_reference(x_TC, residual_TC, weight_C, bias_C, eps, emit, plus_TC)


def layer_norm_reference(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    bias_C: torch.Tensor,
    eps: float,
    emit: tuple[ActFormat, ...] = (PLAIN,),
    plus_TC: torch.Tensor | None = None,
) -> tuple[Bundle, torch.Tensor]:
    x_TC = Partial(x_TC, plus=plus_TC).completed()
    summed = x_TC if residual_TC is None else x_TC + residual_TC
    return encode(F.layer_norm(summed, weight_C.shape, weight_C, bias_C, eps), emit), summed
