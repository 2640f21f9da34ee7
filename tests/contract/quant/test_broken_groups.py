"""Quantizers whose fault shows only in some rows, groups or layers; each case states what the failure must say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import ActFormat, Activation, LinearMethod, LinearShape
from dovetail.core.testing.suite import failures

from ..faults import rejection
from .test_broken import Params, Sound, fault, suite_of

GROUP = 32


def grouped(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to int8 with a scale per 32 channels; the last group may be shorter."""
    groups = x_TC.split(GROUP, dim=1)
    scale_TG = torch.cat([g.abs().amax(-1, keepdim=True) for g in groups], dim=1).clamp(min=1e-10) / 127
    return (x_TC / spread(scale_TG, x_TC.shape[1])).round().to(torch.int8), scale_TG


def spread(scale_TG: torch.Tensor, channels: int) -> torch.Tensor:
    return scale_TG.repeat_interleave(GROUP, dim=1)[:, :channels]


class Grouped(LinearMethod):
    """Correct: int8 weights and inputs with a scale per 32 channels."""

    input = ActFormat("groups", dtype=torch.int8, group=GROUP, scale_layout="row", reference=grouped)

    def create(self, shape: LinearShape, device: torch.device) -> Params:
        self.shape = shape
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=torch.int8, device=device),
            "scale": torch.empty(shape.out, -(-shape.inp // GROUP), device=device),
        }

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        params["weight"][part], params["scale"][part] = grouped(tensors["weight"].float())

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        inp = self.shape.inp
        weight_OI = params["weight"].float() * spread(params["scale"], inp)
        y_TO = (x.values.float() * spread(x.scale, inp)) @ weight_OI.t()
        return (y_TO if bias is None else y_TO + bias).to(self.shape.dtype)


class DividesByZeroGroups(Grouped):
    """Skips rows of zeros but divides by the scale of a group of zeros."""

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(params, part, tensors)
        zero_OG = (params["scale"][part] <= 1e-12) & (tensors["weight"] != 0).any(-1, keepdim=True)
        params["scale"][part] = params["scale"][part].masked_fill(zero_OG, float("nan"))


class TakesTheScaleBeforeTheLast(Grouped):
    """Reads the scale of a partial last group from the group before it."""

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.shape.inp % GROUP and self.shape.inp > GROUP:
            x = replace(x, scale=torch.cat((x.scale[:, :-1], x.scale[:, -2:-1]), dim=1))
        return super().apply(params, x, bias)


class KeepsAPlainCopy(Sound):
    """Converts its weight once and keeps the result on itself."""

    def finish(self, params: Params) -> None:
        self.plain_OI = params["weight"].float() * params["scale"]

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = (x.values.float() * x.scale) @ self.plain_OI.t()
        return (y_TO if bias is None else y_TO + bias).to(self.shape.dtype)


def asks_for_the_scale(self: Sound, params: Params, x: Activation, bias: Any = None) -> torch.Tensor:
    if x.scale.amax().item() == 0:
        return torch.zeros(len(x.values), self.shape.out)
    return Sound.apply(self, params, x, bias)


def drops_the_bias_of_one_token(self: Sound, params: Params, x: Activation, bias: Any = None) -> torch.Tensor:
    return Sound.apply(self, params, x, None if len(x.values) == 1 else bias)


CASES = [
    (fault("DropsTheBiasOfOneToken", apply=drops_the_bias_of_one_token), "bias_is_added_once", "matmul of 1 tokens"),
    (DividesByZeroGroups, "groups_of_zeros_and_rows_of_zeros_in_the_weight", "a group of zeros made the output"),
    (TakesTheScaleBeforeTheLast, "the_last_group_of_channels_may_be_partial", "relative error of the matmul"),
    (KeepsAPlainCopy, "the_layer_owns_the_tensors", "it read a weight kept on the method"),
    (fault("AsksForTheScale", apply=asks_for_the_scale), "apply_does_not_wait_for_the_device", "apply calls item"),
]


@pytest.mark.parametrize(("broken", "test", "says"), CASES, ids=[broken.__name__ for broken, _, _ in CASES])
def test_the_suite_rejects(broken: type[LinearMethod], test: str, says: str) -> None:
    assert says in rejection(suite_of(broken), f"test_{test}")


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Grouped)) == {}


def test_a_format_with_groups_checks_its_input_alone() -> None:
    shape = LinearShape(48, 20, (20,))
    shape.check_multiple(16, "quant=mine", "layers.0.mlp.up", None, sides=("inp",))
    with pytest.raises(CapabilityError, match="48 x 20 on each rank; both must divide by 16"):
        shape.check_multiple(16, "quant=mine", "layers.0.mlp.up", None)
    with pytest.raises(CapabilityError, match="its input must divide by 32"):
        shape.check_multiple(32, "quant=mine", "layers.0.mlp.up", None, sides=("inp",))
