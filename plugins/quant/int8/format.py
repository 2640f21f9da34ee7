"""Symmetric int8 activations with one scale per token (LLM.int8(), Dettmers et al. 2022, without its outliers).

Shapes: T tokens, C columns, G scale groups.
"""

from __future__ import annotations

import torch

from dovetail.core.interfaces import ActFormat
from dovetail.core.ops.formats import triton_encode

SMALLEST = 1e-10
"""Lower bound of a row's magnitude: a row of zeros must not divide by zero."""


def quantize_rows(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 rows to (int8 values, float32 scale_T1)."""
    amax_T1 = x_TC.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return torch.floor(x_TC * (127.0 / amax_T1) + 0.5).to(torch.int8), amax_T1 / 127.0


INT8_TOKEN = ActFormat(
    "int8_token",
    dtype=torch.int8,
    group="token",
    scale_layout="row",
    encode=triton_encode("dovetail.plugins.quant.int8.kernel:encode_int8"),
    reference=quantize_rows,
)
