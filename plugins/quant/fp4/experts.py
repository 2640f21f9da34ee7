"""Routed experts in MXFP4: E2M1 with an exponent for each block of 32 inputs. Shapes: E experts, C hidden channels, F
channels of an expert, O outputs, I inputs, G blocks of a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError
from dovetail.core.interfaces import (
    SWIGLU,
    ActFormat,
    Activation,
    ExpertBias,
    ExpertMethod,
    ExpertPart,
    ExpertShape,
    GatedActivation,
    Routing,
)
from dovetail.core.interfaces.tensor_record import OUTPUTS, Axis, TensorRecord
from dovetail.core.layers.plain_experts import place_of
from dovetail.core.layouts.words import unpack_nibbles
from dovetail.core.ops import PackedExperts, packed_gated_experts
from dovetail.core.ops.expert_tiles import specialized_packed
from dovetail.core.ops.packed_experts import BIAS, BLOCK, EACH, MOST_EXPONENT, pack_exponents, pack_row_spans, spans
from dovetail.core.ops.weight_formats import E2M1
from dovetail.plugins.quant.fp4.checkpoint import Stored
from dovetail.plugins.quant.fp4.rounding import round_to_fp4

WHOLE = 64
"""Channels of which specialized_packed takes multiples."""
MOST_ADDED = 8
"""At most one channel is added to so many: with all rows of a step from 1 to 1024, that kernel took at most 0.88 of the
other's time (benchmarks/NOTES.md, Experts)."""


class MXFP4Experts(ExpertMethod):
    """Plain weights, rounded to nearest as they load."""

    stacked = True

    def __init__(self, activations: ActFormat) -> None:
        """`activations`: input format of both products, PLAIN or with a scale per row."""
        self.input = activations

    def channels(self, shape: ExpertShape) -> int:
        """Add channels to the last block, and if few are missing to those that Hopper's kernel multiplies, as with
        gpt-oss on 2, 4 or 8 ranks."""
        least = ceil_div(self.before(shape) + shape.intermediate, BLOCK) * BLOCK
        wide = ceil_div(least, WHOLE) * WHOLE
        few = MOST_ADDED * (wide - least) <= least
        return wide if few and specialized_packed(shape.hidden, wide) else least

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.shape = shape
        experts, hidden, channels = shape.experts, shape.hidden, self.channels(shape)
        # Channels that are added have codes of zero, and any exponent.
        make = torch.empty if channels == shape.intermediate else torch.zeros

        def count(inputs: int) -> int:
            return len(list(spans(inputs)))

        return {
            "up": make(experts, 2 * channels, hidden // EACH, dtype=torch.int32, device=device),
            "down": make(experts, hidden, channels // EACH, dtype=torch.int32, device=device),
            "up_exponents": make(experts, count(hidden), 2 * channels, dtype=torch.int64, device=device),
            "down_exponents": make(experts, count(channels), hidden, dtype=torch.int64, device=device),
        }

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        weight_OI = tensors["weight"].to(params["up"].device).float()
        weight_OI = F.pad(weight_OI, (0, -weight_OI.shape[1] % BLOCK))
        codes_OI, scale_OG, *_ = round_to_fp4(weight_OI, BLOCK, nvfp4=False)
        exponents_OG = (scale_OG.log2() + BIAS).to(torch.uint8)
        _check_exponents("weight", exponents_OG)
        self.store(params, expert, part, codes_OI, exponents_OG)

    def store(
        self,
        params: dict[str, torch.Tensor],
        expert: int,
        part: ExpertPart,
        codes_OI: torch.Tensor,
        exponents_OG: torch.Tensor,
    ) -> None:
        """Store whole blocks, of which a part may be other ranks' channels."""
        name, rows = place_of(part, self.channels(self.shape))
        inputs, before = EACH * params[name].shape[2], self.before(self.shape)
        codes_OI = F.pad(codes_OI, (0, inputs - codes_OI.shape[1]))
        exponents_OG = F.pad(exponents_OG, (0, inputs // BLOCK - exponents_OG.shape[1]))
        own = slice(None)
        if part == "down":
            codes_OI[:, :before] = codes_OI[:, before + self.shape.intermediate :] = 0
        else:
            own = slice(rows.start + before, rows.start + before + len(codes_OI))
        params[name][expert, own] = pack_row_spans(codes_OI)
        params[f"{name}_exponents"][expert, :, own] = pack_exponents(exponents_OG)

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        weights = PackedExperts(E2M1, params["up"], params["down"], params["up_exponents"], params["down_exponents"])
        return packed_gated_experts(x, routing, weights, activation, bias, between=self.input, dtype=self.shape.dtype)


class StoredMXFP4Experts(MXFP4Experts):
    """Codes and exponents of the checkpoint, unchanged."""

    def __init__(self, stored: Stored, activations: ActFormat) -> None:
        super().__init__(activations)
        names = stored.names
        self.codes, self.scale = names.codes, names.scale
        # Bytes of a block, whose codes are separated on the device.
        blocks = Axis("inputs", BLOCK, entries=BLOCK // 2)
        self.records = (
            TensorRecord(names.codes, (OUTPUTS, blocks), (torch.uint8,)),
            TensorRecord(names.scale, (OUTPUTS, Axis("inputs", BLOCK)), (torch.uint8,)),
            TensorRecord(names.input, (Axis("nothing"),), optional=True),
        )

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        return self.records

    def before(self, shape: ExpertShape) -> int:
        return shape.first_channel % BLOCK

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        device, exponents_OG = params["up"].device, tensors[self.scale]
        if (exponents_OG == 255).any():
            raise TensorError(self.scale, "has values that are not numbers")
        _check_exponents(self.scale, exponents_OG)
        codes_OI = unpack_nibbles(tensors[self.codes].to(device))
        self.store(params, expert, part, codes_OI, exponents_OG.to(device))


def _check_exponents(name: str, exponents_OG: torch.Tensor) -> None:
    if (exponents_OG > MOST_EXPONENT).any():
        raise TensorError(name, f"has scales above 2^{MOST_EXPONENT - BIAS}, and kernels apply scales up to it")


def fits(shape: ExpertShape) -> bool:
    """Whether rows of the first product have whole blocks."""
    return shape.hidden % BLOCK == 0
