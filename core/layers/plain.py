"""The unquantized linear layer, used by quant=none for every layer and by other quantizers for layers they skip.
Shapes: T tokens, I input, O output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from dovetail.core.interfaces import Activation, LinearMethod, LinearShape, Quantizer
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.ops import matmul
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.matmul import matmul_tunables


class PlainLinear(LinearMethod):
    """Weight and matmul in the model's dtype."""

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=shape.dtype, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        params["weight"][part].copy_(tensors["weight"])

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(x.values, params["weight"], bias, params.get("counts"))

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, params["weight"])

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        return matmul_tunables(params["weight"], rows)


class Given(Quantizer):
    """Quantizer that returns a method that is made already."""

    def __init__(self, method: LinearMethod) -> None:
        super().__init__(None)
        self.method = method

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return self.method
