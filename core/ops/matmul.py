"""The product of a linear layer, x @ weight^T, of plain or of scaled 8-bit numbers.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import torch


def matmul_reference(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x @ weight^T) * x_scale * weight_scale + bias, summed in float32 and rounded once, to `dtype` (None = x's).

    x_scale is [T, 1], weight_scale [O]; either may be one number for all.
    """
    y_TO = x_TI.float() @ weight_OI.float().t()
    for scale in (x_scale, weight_scale):
        if scale is not None:
            y_TO = y_TO * scale
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(dtype or x_TI.dtype)
