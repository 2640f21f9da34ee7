"""An activation format that no built-in component has, as a third-party plugin would define it.

Shapes: T tokens, C columns, G scale groups.
"""

from __future__ import annotations

import torch

from dovetail.core.interfaces import ActFormat
from dovetail.core.ops.formats import triton_encode


def scale_rows(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float16 values in [-1, 1], float32 scale_T1)."""
    scale_T1 = x_TC.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    return (x_TC / scale_T1).half(), scale_T1


SCALED_ROWS = ActFormat(
    "scaled_rows",
    dtype=torch.float16,
    group="token",
    scale_layout="row",
    encode=triton_encode("dovetail.core.testing.kernels:encode_scaled_rows"),
    reference=scale_rows,
)
"""Each row divided by its maximum magnitude, in float16 for every model dtype."""
