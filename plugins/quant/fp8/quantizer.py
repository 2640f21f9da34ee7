"""quant=fp8: W8A8 in E4M3, weights quantized while they load.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from fnmatch import fnmatch

import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Activation, LinearMethod, LinearShape, Quantizer
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.ops import scaled_matmul
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, quantize_rows

MULTIPLE = 16
"""cuBLAS and CUTLASS take FP8 matrices whose sides divide by this."""


class FP8(Quantizer):
    config: FP8Config

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if any(fnmatch(path, pattern) for pattern in self.config.skip):
            return PlainLinear()
        if shape.inp % MULTIPLE or shape.out % MULTIPLE:
            raise CapabilityError(
                [
                    f"quant=fp8: {path} is {shape.inp} x {shape.out} on each rank; both must divide by {MULTIPLE}. "
                    f"Set quant.skip=['{path}'], quant=none, or another engine.tp"
                ]
            )
        return FP8Linear(self.config.fast_accum)


class FP8Linear(LinearMethod):
    input = FP8_TOKEN

    def __init__(self, fast_accum: bool) -> None:
        self.fast_accum = fast_accum

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=E4M3, device=device),
            "scale": torch.empty(shape.out, dtype=torch.float32, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], name: str, part: slice, tensor: torch.Tensor) -> None:
        values_OI, scale_O1 = quantize_rows(tensor.to(params["weight"].device).float())
        params["weight"][part] = values_OI
        params["scale"][part] = scale_O1.squeeze(-1)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return scaled_matmul(
            x.values, params["weight"], x.scale, params["scale"], bias, self.dtype, params["counts"], self.fast_accum
        )
