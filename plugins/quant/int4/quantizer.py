"""quant=int4: integer weights of 4 or 8 bits with a scale for each group of inputs, from published checkpoints or from
plain weights, rounded to nearest as they load.

Shapes: T tokens, I input, O output, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import PLAIN, ActFormat, Checkpoint, LinearMethod, LinearShape
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops.weight_formats import INT4, INT8, UINT4, UINT8
from dovetail.plugins.quant.base import StoredOrRounded, input_format, note_inputs
from dovetail.plugins.quant.config import Int4Config
from dovetail.plugins.quant.fp8.quantizer import fp8_head
from dovetail.plugins.quant.int4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.int4.checkpoint import stored as measure
from dovetail.plugins.quant.int4.order import GroupOrder, check_consecutive, set_order, with_order
from dovetail.plugins.quant.int4.rounding import round_to_nearest
from dovetail.plugins.quant.int4.tensors import RECORDS, codes_of

FORMATS = {(4, True): UINT4, (4, False): INT4, (8, True): UINT8, (8, False): INT8}
"""(bits, whether groups have zeros) -> format. Without zeros, codes are offset by half their range."""


class Int4(StoredOrRounded[Stored]):
    config: Int4Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        stored = read_stored(checkpoint.config())
        if stored is not None:
            note_inputs("int4", self.config.activations, stored.inputs)
        return stored

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        return RoundedLinear(self.config, self._activations)

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredLinear(path, stored, shape, self._activations)

    @property
    def _activations(self) -> ActFormat:
        stated = None if self.stored is None else self.stored.inputs
        return input_format("int4", self.config.activations, stated)

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        return fp8_head(self.config.head, path, shape)

    def table_of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredLinear(path, stored, shape, PLAIN)


class RoundedLinear(PackedLinear):
    """Weights of a plain checkpoint, rounded to nearest. Groups are smaller on ranks whose columns begin inside one."""

    def __init__(self, config: Int4Config, activations: ActFormat) -> None:
        super().__init__(FORMATS[config.bits, not config.symmetric], config.group, activations=activations)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].to(params["codes"].device).float()
        self.store(params, part, *round_to_nearest(weight_OI, self.step, self.format, params["scale"].dtype))


class StoredLinear(PackedLinear):
    """Codes of the checkpoint."""

    def __init__(self, path: str, stored: Stored, shape: LinearShape, activations: ActFormat) -> None:
        super().__init__(FORMATS[stored.bits, stored.zeros], stored.group, activations=activations)
        self.path, self.stored = path, stored
        self._loaded_order: torch.Tensor | None = None
        self.order = GroupOrder(stored.group, shape) if stored.act_order and stored.group else None
        self.tensors = RECORDS[stored.layout](stored, shape)

    def prepare(self, shape: LinearShape, device: torch.device) -> None:
        super().prepare(shape, device)
        if self.order is not None:
            self.input = with_order(self.activations, self.width, device)

    def columns(self, shape: LinearShape) -> tuple[int, int]:
        return super().columns(shape) if self.order is None else (self.order.width, self.order.step)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        codes_OI, scale_OG, zero_OG, group_I = codes_of(self.stored, tensors)
        if not scale_OG.isfinite().all():
            raise TensorError(self.stored.scale_name, "has values that are not finite")
        if self.order is None:
            if group_I is not None:
                check_consecutive(self.stored.order_name, group_I, self.group, self.shape)
            spread = self.shape.spread_groups
            scale_OG, zero_OG = (None if x is None else spread(x, self.group) for x in (scale_OG, zero_OG))
        else:
            order, groups = self.order.of(self.stored.order_name, group_I)
            self._set_order(order)
            codes_OI = F.pad(codes_OI, (0, 1))[:, order.to(codes_OI.device)]
            scale_OG, zero_OG = (None if x is None else x[:, groups.to(x.device)] for x in (scale_OG, zero_OG))
        self.store(params, part, codes_OI, scale_OG, zero_OG)

    def _set_order(self, order: torch.Tensor) -> None:
        if self._loaded_order is None:
            self._loaded_order = order
            set_order(self.input, order)
        elif not torch.equal(self._loaded_order, order):
            raise TensorError(
                self.stored.order_name,
                f"orders inputs unlike another matrix of {self.path}, with which this one is merged into one matmul",
            )
