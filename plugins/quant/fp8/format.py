"""Activations in E4M3 (Micikevicius et al. 2022) with one scale per token, or one for all: the greatest magnitude maps
to 448.

Shapes: T tokens, C columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.interfaces import ActFormat

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-10
"""Lower bound of a row's magnitude: a row of zeros must not divide by zero."""


def quantize_rows(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 rows to (E4M3 values, float32 scale_T1)."""
    amax_T1 = x_TC.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return (x_TC * (LARGEST / amax_T1)).to(E4M3), amax_T1 / LARGEST


def quantize_tensor(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with one scale for all rows, repeated for each row."""
    if not x_TC.numel():
        return quantize_rows(x_TC)
    amax_T1 = x_TC.abs().amax().clamp(min=SMALLEST).expand(len(x_TC), 1)
    return (x_TC * (LARGEST / amax_T1)).to(E4M3), (amax_T1 / LARGEST).contiguous()


def _triton_encode() -> object | None:
    """Return the Triton version of quantize_rows; None without Triton, so without CUDA."""
    try:
        from dovetail.plugins.quant.fp8.kernel import encode_fp8
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return encode_fp8


FP8_TOKEN = ActFormat(
    "fp8_token",
    dtype=E4M3,
    group="token",
    scale_layout="row",
    encode=_triton_encode(),
    reference=quantize_rows,
)
FP8_TENSOR = replace(FP8_TOKEN, name="fp8_tensor", group="tensor", reference=quantize_tensor)
