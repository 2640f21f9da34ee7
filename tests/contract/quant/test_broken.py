"""Quantizers with one fault each; the suite must reject them.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    ActFormat,
    Activation,
    LinearMethod,
    LinearShape,
    Partial,
    Quantizer,
)
from dovetail.core.testing.quant import QuantizerContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant
from .scan import Scan

Params = dict[str, torch.Tensor]
INTERPRETED = "test_triton_encode_agrees_with_the_reference"


def to_int8(x_TC: torch.Tensor, amax_T1: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    amax_T1 = x_TC.abs().amax(-1, keepdim=True) if amax_T1 is None else amax_T1
    scale_T1 = amax_T1.clamp(min=1e-10) / 127
    return (x_TC / scale_T1).round().to(torch.int8), scale_T1


ROWS = ActFormat("rows", dtype=torch.int8, group="token", scale_layout="row", reference=to_int8)


class Sound(LinearMethod):
    """Correct: 8-bit weights and inputs with one scale per row of each; the matmul is in float32."""

    input = ROWS

    def create(self, shape: LinearShape, device: torch.device) -> Params:
        self.shape = shape
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=torch.int8, device=device),
            "scale": torch.empty(shape.out, 1, device=device),
        }

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        params["weight"][part], params["scale"][part] = to_int8(tensors["weight"].float())

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = (x.values.float() * x.scale) @ (params["weight"].float() * params["scale"]).t()
        return (y_TO if bias is None else y_TO + bias).to(self.shape.dtype)


class Chooses(Quantizer):
    method: type[LinearMethod] = Sound

    def __init__(self) -> None:
        super().__init__(None)

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return self.method()


fault = partial(variant, Sound)


def choosing(method: type[LinearMethod]) -> type[Quantizer]:
    """Quantizer that has this method for every layer."""
    return variant(Chooses, method.__name__, method=method)


class AppendsParts(Sound):
    """Appends parts, which is right only if they are loaded in order."""

    def create(self, shape: LinearShape, device: torch.device) -> Params:
        self.at = 0
        return super().create(shape, device)

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        size = part.stop - part.start
        super().load(params, slice(self.at, self.at + size), tensors)
        self.at += size


class ScalesWithTheLastPart(Sound):
    """Uses one scale per layer, set by the last part that is loaded."""

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].float()
        params["weight"][part], scale = to_int8(weight_OI, weight_OI.abs().max())
        params["scale"][:] = scale


class KeepsTheParts(Sound):
    """Converts parts in finish, when their memory may have been reused."""

    def create(self, shape: LinearShape, device: torch.device) -> Params:
        self.parts: list[tuple[slice, Mapping[str, torch.Tensor]]] = []
        return super().create(shape, device)

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        self.parts.append((part, tensors))

    def finish(self, params: Params) -> None:
        for part, tensors in self.parts:
            super().load(params, part, tensors)


class SplitsPartsEvenly(Sound):
    """Assumes that all parts have equal size."""

    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        size = self.shape.out // len(self.shape.parts)
        starts = [sum(self.shape.parts[:i]) for i in range(len(self.shape.parts))]
        at = starts.index(part.start) * size
        weight_OI = tensors["weight"][:size]
        super().load(params, slice(at, at + len(weight_OI)), {"weight": weight_OI})


class HidesItsWeight(Sound):
    """Keeps its parameters in itself and ignores those passed to apply."""

    def finish(self, params: Params) -> None:
        self.packed = params

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(self.packed, x, bias)


class SharesBuffers(Sound):
    buffers: Params = {}

    def create(self, shape: LinearShape, device: torch.device) -> Params:
        made = super().create(shape, device)
        for name, value in made.items():
            if name not in self.buffers or self.buffers[name].shape != value.shape:
                self.buffers[name] = value
        return dict(self.buffers)


class ReadsFourBits(Sound):
    def load(self, params: Params, part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(params, part, tensors)
        params["weight"][part] = params["weight"][part] // 16 * 16


class AnswersInFloat32(Sound):
    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.shape = replace(self.shape, dtype=torch.float32)
        return super().apply(params, x, bias)


class LeavesOneScaleForAll(Sound):
    """Returns one scale, although kernels read one per row."""

    def partial(self, params: Params, x: Activation) -> Partial:
        y_TO = self.apply(params, x)
        return Partial(y_TO / 2, (torch.tensor(2.0), torch.ones(y_TO.shape[1])))


class DecodesInPlace(Sound):
    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = super().apply(params, x, bias)
        x.scale.mul_(2)
        return y_TO


class ScalesWeightsInPlace(Sound):
    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        params["scale"] *= 1.0001
        return super().apply(params, x, bias)


class SumsIn16Bits(Sound):
    """Overflows for long rows."""

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        sums = x.values.int() @ params["weight"].int().t()
        y_TO = sums.to(torch.int16).float() * x.scale * params["scale"].t()
        return (y_TO if bias is None else y_TO + bias).to(self.shape.dtype)


class DropsOddColumns(Sound):
    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        whole = x.values.shape[1] // 8 * 8
        cut = {**params, "weight": params["weight"][:, :whole]}
        return super().apply(cut, replace(x, values=x.values[:, :whole]), bias)


def fed(name: str, change: Callable[[Activation], Activation]) -> type[Sound]:
    """Method that multiplies another activation than the one that it is given."""
    return fault(name, apply=lambda self, params, x, bias=None: Sound.apply(self, params, change(x), bias))


def zero_divided(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_T1 = x_TC.abs().amax(-1, keepdim=True) / 127
    return (x_TC / scale_T1).round().nan_to_num().to(torch.int8), scale_T1 / (scale_T1 > 0)


class KeepsItsParams(Sound):
    def finish(self, params: Params) -> None:
        self.params = params

    def apply(self, params: Params, x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(self.params if self.params.keys() == params.keys() else params, x, bias)


class KeepsEachShapesWeight(Chooses):
    """Returns one method for layers of equal shape, and the method keeps its matmul operand."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, LinearMethod] = {}

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return self.made.setdefault((shape.inp, shape.parts), KeepsItsParams())


class RefusesWithoutAName(Chooses):
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if shape.inp % 8:
            raise CapabilityError(["this shape does not divide by 8"])
        return super().linear(path, shape)


class FailsOnOddShapes(Chooses):
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        assert shape.inp % 8 == 0
        return super().linear(path, shape)


BROKEN: dict[str, list[type]] = {
    "test_parts_go_where_they_belong": [
        fault(
            "LoadsEveryPartFirst",
            load=lambda self, params, part, tensors: Sound.load(self, params, slice(part.stop - part.start), tensors),
        ),
        SplitsPartsEvenly,
    ],
    "test_parts_load_in_any_order": [AppendsParts, ScalesWithTheLastPart],
    "test_load_keeps_no_part": [KeepsTheParts],
    "test_checkpoint_may_have_another_dtype": [
        fault(
            "TakesOneDtype",
            load=lambda self, params, part, tensors: Sound.load(
                self, params, part, {"weight": tensors["weight"].view(torch.float32)}
            ),
        )
    ],
    "test_the_layer_owns_the_tensors": [HidesItsWeight],
    "test_layers_do_not_share_state": [SharesBuffers, KeepsEachShapesWeight],
    "test_create_gives_tensors_on_the_device": [
        fault("CreatesElsewhere", create=lambda self, shape, device: Sound.create(self, shape, torch.device("meta")))
    ],
    "test_product_is_near_the_exact_one": [
        ReadsFourBits,
        SumsIn16Bits,
        fed("ForgetsTheScaleOfItsInput", lambda x: replace(x, scale=torch.full_like(x.scale, 2 / 127))),
    ],
    "test_bias_is_added_once": [
        fault("DropsTheBias", apply=lambda self, params, x, bias=None: Sound.apply(self, params, x)),
        fault(
            "ScalesTheBias",
            apply=lambda self, params, x, bias=None: Sound.apply(
                self, params, x, None if bias is None else bias * x.scale
            ),
        ),
    ],
    "test_output_has_the_models_dtype": [AnswersInFloat32],
    "test_scales_may_be_left_to_the_consumer": [LeavesOneScaleForAll],
    "test_apply_changes_nothing": [DecodesInPlace, ScalesWeightsInPlace],
    "test_rows_are_independent": [
        fed("TakesTheFirstRowsScale", lambda x: replace(x, scale=x.scale[:1].expand_as(x.scale))),
        fault(
            "ScalesWithTheWholeBatch",
            input=replace(ROWS, reference=lambda x: to_int8(x, x.abs().max().expand(len(x), 1))),
        ),
    ],
    "test_odd_shapes_are_held_or_refused": [DropsOddColumns, RefusesWithoutAName, FailsOnOddShapes],
    "test_a_row_of_zeros_gives_the_bias": [fault("DividesByZero", input=replace(ROWS, reference=zero_divided))],
    "test_input_is_what_encode_gives": [
        # The core's kernels would write the declared dtype; this apply accepts any.
        fault("DeclaresAnotherDtype", input=replace(ROWS, dtype=None)),
        fault("DeclaresNoScales", input=replace(ROWS, group="none", scale_layout="none")),
        # Its reference returns one scale per row.
        fault("DeclaresGroups", input=replace(ROWS, group=32)),
    ],
    "test_tunables_depend_on_shapes_only": [
        fault(
            "TunesByValues", tunables=lambda self, params, rows, defers=False: [Scan(rows, float(params["scale"][0]))]
        ),
        fault("TunesTwice", tunables=lambda self, params, rows, defers=False: [Scan(rows, 1)] * 2),
        fault("TunesOtherRows", tunables=lambda self, params, rows, defers=False: [Scan(16, 1)]),
    ],
    "test_layers_of_other_shapes_are_tuned_apart": [
        fault("ForgetsItsInputs", tunables=lambda self, params, rows, defers=False: [Scan(rows, self.shape.out)]),
    ],
    "test_kv_scales_are_positive": [variant(Chooses, "HasNoKVScale", kv_scales=lambda self, layer: (1.0, 0.0))],
}


def suite_of(component: type) -> QuantizerContract:
    quantizer = component if issubclass(component, Quantizer) else choosing(component)
    return suite(QuantizerContract, error=0.02, make=lambda self: quantizer())


@each(BROKEN)
def test_the_suite_rejects(broken: type, test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_sound_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}


class CutsInItsKernel(QuantizerContract):
    """Defined at module level, so that the process that interprets kernels can import it."""

    error = 0.02

    def make(self) -> Quantizer:
        from .kernels import encode_cut

        return choosing(fault("Method", input=replace(ROWS, encode=encode_cut)))()


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this platform")
def test_the_suite_rejects_a_kernel_unlike_its_reference() -> None:
    with pytest.raises(AssertionError, match="of bytes differ from `reference`"):
        getattr(CutsInItsKernel(), INTERPRETED)()
    assert failures(CutsInItsKernel(), skip=(INTERPRETED,)) == {}
