"""Experts by the linear methods of a quantizer, one expert after another. Shapes: T tokens, K experts of a token, C
hidden channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    Activation,
    Bundle,
    ExpertBias,
    ExpertMethod,
    ExpertPart,
    ExpertShape,
    GatedActivation,
    LinearMethod,
    LinearShape,
    Routing,
)
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.ops import encode
from dovetail.core.startup_notes import note

if TYPE_CHECKING:
    from dovetail.core.interfaces import Quantizer


class LoopedExperts(ExpertMethod):
    """Each expert has two methods of `Quantizer.linear`: for gate and up together, and for down.

    Every token is multiplied by every expert, so that all shapes are static, and the weights of a routing are zero for
    experts that a token does not have.
    """

    def __init__(self, quantizer: Quantizer, path: str, shape: ExpertShape) -> None:
        self.path, self.shape = path, shape
        self.shapes = [linear_shapes(shape, expert) for expert in range(shape.experts)]
        self.methods: list[tuple[LinearMethod, LinearMethod]] = [
            (quantizer.linear(f"{own}.gate_up", up), quantizer.linear(f"{own}.down", down))
            for own, (up, down) in zip((shape.path_of(path, i) for i in range(shape.experts)), self.shapes, strict=True)
        ]
        self._of = {
            name: method
            for (up, down), names in zip(self.methods, shape.names, strict=False)
            for name, method in zip(names, (up, up, down), strict=True)
        }

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        return self._of[name].tensors_of(name)

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        if device.type == "cuda":
            note(
                f"{type(self.methods[0][0]).__name__} has no products of experts{self.reason()}: {self.path} and "
                f"layers like it multiply every token by all {shape.experts} experts"
            )
        params: dict[str, torch.Tensor] = {}
        self._keys: list[dict[str, str]] = []
        """Name of each of a method's tensors -> name in `params`, by expert and side."""
        for expert, (methods, shapes) in enumerate(zip(self.methods, self.shapes, strict=True)):
            for side, method, linear in zip(("up", "down"), methods, shapes, strict=True):
                made = method.create(linear, device)
                self._keys.append({name: f"{expert}.{side}.{name}" for name in made})
                params |= {f"{expert}.{side}.{name}": value for name, value in made.items()}
        formats = {up.input for up, _ in self.methods}
        self.input = formats.pop() if len(formats) == 1 else PLAIN
        return params

    def reason(self) -> str:
        """Return the reason for the loop, for a note: "" or words in parentheses."""
        return ""

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        up, down = self.methods[expert]
        if part == "down":
            down.load(self._params(params, expert, 1), slice(0, self.shape.hidden), tensors)
            return
        start = 0 if part == "gate" else self.shape.intermediate
        up.load(self._params(params, expert, 0), slice(start, start + self.shape.intermediate), tensors)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        for expert, methods in enumerate(self.methods):
            for side, method in enumerate(methods):
                method.finish(self._params(params, expert, side))

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        total_TC: torch.Tensor | None = None
        for expert, (up, down) in enumerate(self.methods):
            given = x if x.format is up.input else encode(x.values, (up.input,))[up.input]
            up_T2F = up.apply(self._params(params, expert, 0), given, None if bias is None else bias.up[expert])
            inner_TF = activation.reference(*up_T2F.chunk(2, dim=1))
            inner: Bundle = encode(inner_TF.contiguous(), (down.input,))
            down_bias = None if bias is None else bias.down[expert]
            y_TC = down.apply(self._params(params, expert, 1), inner[down.input], down_bias)
            has_TK = routing.experts_TK == expert
            weight_T1 = torch.where(has_TK, routing.weights_TK, 0.0).sum(1, keepdim=True)
            # Not a product alone: the result of a token without this expert may be NaN.
            weighted_TC = torch.where(has_TK.any(1, keepdim=True), y_TC.float() * weight_T1, 0.0)
            total_TC = weighted_TC if total_TC is None else total_TC + weighted_TC
        assert total_TC is not None
        return total_TC.to(self.shape.dtype)

    def _params(self, params: Mapping[str, torch.Tensor], expert: int, side: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one method."""
        return {name: params[key] for name, key in self._keys[2 * expert + side].items()}


def linear_shapes(shape: ExpertShape, expert: int) -> tuple[LinearShape, LinearShape]:
    """Return the shapes of an expert's gate|up and of its down as linear layers."""
    gate, up, down = shape.names[expert] if shape.names else ("", "", "")
    channels = shape.intermediate
    return (
        LinearShape(
            shape.hidden,
            2 * channels,
            (channels, channels),
            "column",
            shape.dtype,
            (gate, up),
            shape.shares,
            shape.hidden,
        ),
        LinearShape(
            channels,
            shape.hidden,
            (shape.hidden,),
            "row",
            shape.dtype,
            (down,),
            shape.shares,
            shape.whole_intermediate,
            shape.first_channel,
        ),
    )
