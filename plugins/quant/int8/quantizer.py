"""quant=int8: W8A8 with the library's int8 matmul, from int8 checkpoints or from weights quantized at load time.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError
from dovetail.core.interfaces import Activation, Checkpoint, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import Axis, TensorRecord
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.checkpoint import Stored, read_stored
from dovetail.plugins.quant.int8.checkpoint import stored as measure
from dovetail.plugins.quant.int8.format import INT8_TOKEN, quantize_rows

MULTIPLE = 8
"""cuBLAS needs int8 matrices whose dimensions are multiples of this, and more than 16 rows."""
LEAST_ROWS = 24


class Int8(StoredOrRounded[Stored]):
    config: Int8Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        return read_stored(checkpoint.config())

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        shape.check_multiple(MULTIPLE, "quant=int8", path, self.config.skip)
        return Int8Linear()

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        shape.check_multiple(MULTIPLE, "quant=int8", path, None)
        return StoredInt8Linear(stored)


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

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        return (params["weight"][ids_T] * params["scale"][ids_T, None]).to(self.dtype)


class StoredInt8Linear(Int8Linear):
    """Int8 weights of the checkpoint. Its scales and zero points of inputs are not used: a dynamic scale per token is
    at least as precise."""

    def __init__(self, stored: Stored) -> None:
        records = [
            TensorRecord("weight", dtypes=(torch.int8,)),
            TensorRecord("weight_scale", (Axis("outputs", 1 if stored.row_scales else 0),)),
        ]
        if stored.static:
            records.append(TensorRecord("input_scale", (Axis("nothing"),)))
        if stored.static and stored.zero_points:
            records.append(TensorRecord("input_zero_point", (Axis("nothing"),), (torch.int8, torch.int32)))
        self.tensors = tuple(records)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_O = tensors["weight_scale"].float()
        if not (scale_O.isfinite() & (scale_O > 0)).all():
            raise TensorError("weight_scale", f"must be positive; the least is {scale_O.min():g}")
        params["weight"][part] = tensors["weight"]
        params["scale"][part] = scale_O


def _int8_matmul(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return int32 [T, O]."""
    tokens = x_TI.shape[0]
    if not x_TI.is_cuda:
        return torch._int_mm(x_TI, weight_OI.t())
    rows = max(LEAST_ROWS, ceil_div(tokens, MULTIPLE) * MULTIPLE)
    return torch._int_mm(F.pad(x_TI, (0, 0, 0, rows - tokens)), weight_OI.t())[:tokens]
