"""quant=int8: W8A8 with the library's int8 matmul; weights are quantized at load time.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import Activation, LinearMethod, LinearShape, Quantizer
from dovetail.core.layers.plain import PlainLinear
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.format import INT8_TOKEN, quantize_rows

MULTIPLE = 8
"""cuBLAS needs int8 matrices whose dimensions are multiples of this, and more than 16 rows."""
LEAST_ROWS = 24


class Int8(Quantizer):
    config: Int8Config

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if any(fnmatch(path, pattern) for pattern in self.config.skip):
            return PlainLinear()
        shape.check_multiple(MULTIPLE, "quant=int8", path, self.config.skip)
        return Int8Linear()


class Int8Linear(LinearMethod):
    input = INT8_TOKEN

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=torch.int8, device=device),
            "scale": torch.empty(shape.out, dtype=torch.float32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        values_OI, scale_O1 = quantize_rows(tensors["weight"].to(params["weight"].device).float())
        params["weight"][part] = values_OI
        params["scale"][part] = scale_O1.squeeze(-1)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        sums_TO = _int8_matmul(x.values, params["weight"])
        y_TO = sums_TO * x.scale * params["scale"]
        if bias is not None:
            y_TO = y_TO + bias
        return y_TO.to(self.dtype)


def _int8_matmul(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return int32 [T, O]."""
    tokens = x_TI.shape[0]
    if not x_TI.is_cuda:
        return torch._int_mm(x_TI, weight_OI.t())
    rows = max(LEAST_ROWS, ceil_div(tokens, MULTIPLE) * MULTIPLE)
    return torch._int_mm(F.pad(x_TI, (0, 0, 0, rows - tokens)), weight_OI.t())[:tokens]
