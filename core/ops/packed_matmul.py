"""Matmul with a packed weight, which is decoded to the input's dtype.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.packing import dequantize


def packed_matmul(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    x_scale_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T (* x_scale) + bias in `dtype`. With `x_scale`, x is in E4M3."""
    return packed_matmul_reference(x_TI, packed, bias_O, dtype, x_scale_T1)


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


def packed_rows(packed: PackedWeight, ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of the matrix, for an embedding."""
    return dequantize(packed, ids_T).to(dtype)
