"""quant=int8: W8A8, from int8 checkpoints or from weights quantized at load time.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import Activation, Checkpoint, ExpertMethod, ExpertShape, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import Axis, TensorRecord
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.looped_experts import linear_shapes
from dovetail.core.ops.matmul import INT8_MULTIPLE, int8_matmul
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.matmul import matmul_tunables
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.checkpoint import Stored, read_stored
from dovetail.plugins.quant.int8.checkpoint import stored as measure
from dovetail.plugins.quant.int8.experts import Int8Experts
from dovetail.plugins.quant.int8.format import INT8_TOKEN, quantize_rows


class Int8(StoredOrRounded[Stored]):
    config: Int8Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        return read_stored(checkpoint.config())

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        shape.check_multiple(INT8_MULTIPLE, "quant=int8", path, self.config.skip)
        return Int8Linear()

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        shape.check_multiple(INT8_MULTIPLE, "quant=int8", path, None)
        return StoredInt8Linear(stored)

    def quantized_experts(self, path: str, shape: ExpertShape) -> ExpertMethod:
        for linear in linear_shapes(shape, 0):
            linear.check_multiple(INT8_MULTIPLE, "quant=int8", path, self.config.skip if self.stored is None else None)
        return Int8Experts(None if self.stored is None else records_of(self.stored))


class Int8Linear(LinearMethod):
    input = INT8_TOKEN

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=torch.int8, device=device),
            "scale": torch.empty(shape.out, dtype=torch.float32, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        values_OI, scale_O1 = quantize_rows(tensors["weight"].to(params["weight"].device).float())
        params["weight"][part] = values_OI
        params["scale"][part] = scale_O1.squeeze(-1)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int8_matmul(x.values, params["weight"], x.scale, params["scale"], bias, self.dtype, params["counts"])

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        return matmul_tunables(params["weight"], rows, self.dtype)

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        return (params["weight"][ids_T] * params["scale"][ids_T, None]).to(self.dtype)


class StoredInt8Linear(Int8Linear):
    """Int8 weights of the checkpoint. Its scales and zero points of inputs are not used: a dynamic scale per token is
    at least as precise."""

    def __init__(self, stored: Stored) -> None:
        self.tensors = records_of(stored)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_O = tensors["weight_scale"].float()
        if not (scale_O.isfinite() & (scale_O > 0)).all():
            raise TensorError("weight_scale", f"must be positive; the least is {scale_O.min():g}")
        params["weight"][part] = tensors["weight"]
        params["scale"][part] = scale_O


def records_of(stored: Stored) -> tuple[TensorRecord, ...]:
    """Return the tensors of a matrix. Those of static inputs are ignored."""
    records = [
        TensorRecord("weight", dtypes=(torch.int8,)),
        TensorRecord("weight_scale", (Axis("outputs", 1 if stored.row_scales else 0),)),
    ]
    if stored.static:
        records.append(TensorRecord("input_scale", (Axis("nothing"),)))
    if stored.static and stored.zero_points:
        records.append(TensorRecord("input_zero_point", (Axis("nothing"),), (torch.int8, torch.int32)))
    return tuple(records)
