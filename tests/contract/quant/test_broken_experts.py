"""Quantizers whose experts have one fault each; the suite must reject them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from dovetail.core.interfaces import SWIGLU, ExpertBias, Quantizer, Routing
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.plain_experts import PlainExperts

from ..faults import each, rejects, variant
from .scan import Scan
from .test_broken import Chooses, Params, suite_of


def with_experts(name: str, apply: Callable[..., torch.Tensor]) -> type[Quantizer]:
    """Quantizer whose experts have this apply. It is called with the sound one first."""
    method = variant(LoopedExperts, name, apply=lambda self, *args: apply(partial(LoopedExperts.apply, self), *args))
    return variant(Chooses, f"Chooses{name}", experts=lambda self, path, shape: method(self, path, shape))


def last_for_none(apply, params, x, routing, activation=SWIGLU, bias=None):
    """Takes expert -1 as Python does."""
    count = 1 + max(int(name.split(".")[0]) for name in params)
    return apply(params, x, replace(routing, experts_TK=routing.experts_TK % count), activation, bias)


def first_alone(apply, params, x, routing, activation=SWIGLU, bias=None):
    return apply(params, x, Routing(routing.experts_TK[:, :1], routing.weights_TK[:, :1]), activation, bias)


def unlimited(apply, params, x, routing, activation=SWIGLU, bias=None):
    return apply(params, x, routing, replace(activation, limit=None), bias)


def unbiased(apply, params, x, routing, activation=SWIGLU, bias=None):
    return apply(params, x, routing, activation)


def waiting(apply, params, x, routing, activation=SWIGLU, bias=None):
    assert len(routing.experts_TK.unique()) > 0
    return apply(params, x, routing, activation, bias)


def in_float32(apply, *args):
    return apply(*args).float()


def tuning(name: str, tunables: Callable[..., list[Tunable]]) -> type[Quantizer]:
    method = variant(PlainExperts, name, tunables=lambda self, *args: tunables(*args))
    return variant(Chooses, name, experts=lambda self, path, shape: method())


class LosesChannels(LoopedExperts):
    """Has no down of the second rank's channels."""

    def load(self, params: Params, expert: int, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        lost = part == "down" and self.shape.first_channel
        super().load(params, expert, part, {"weight": 0 * tensors["weight"]} if lost else tensors)


class AddsNoChannels(PlainExperts):
    """States channels that it does not store, so that it takes zeros for biases of up."""

    def channels(self, shape):
        return shape.intermediate + 8

    def apply(self, params, x, routing, activation=SWIGLU, bias=None):
        if bias is not None:
            bias = ExpertBias(bias.up[:, : 2 * self.shape.intermediate], bias.down)
        return super().apply(params, x, routing, activation, bias)


class KeepsMatrices(PlainExperts):
    """Multiplies by copies of the experts."""

    stacked = True

    def finish(self, params: Params) -> None:
        self.kept = {name: tensor.clone() for name, tensor in params.items()}

    def apply(self, params, x, routing, activation=SWIGLU, bias=None):
        return super().apply(self.kept, x, routing, activation, bias)


class LoadsInOrder(PlainExperts):
    """Clears an expert when its gate arrives, which comes first in most files."""

    def load(self, params: Params, expert: int, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if part == "gate":
            for tensor in params.values():
                tensor[expert] = 0
        super().load(params, expert, part, tensors)


def as_the_largest(apply, params, x, routing, activation=SWIGLU, bias=None):
    """Rounds the sums to eight bits with one scale for all rows."""
    y_TC = apply(params, x, routing, activation, bias)
    scale = y_TC.abs().amax().clamp_min(1e-9) / 127
    return (y_TC / scale).round() * scale


BROKEN: dict[str, list[type]] = {
    "test_experts_load_in_any_order": [
        variant(Chooses, "ChoosesLoadsInOrder", experts=lambda self, path, shape: LoadsInOrder())
    ],
    "test_rows_of_experts_are_independent": [with_experts("SharesAScale", as_the_largest)],
    "test_experts_give_the_weighted_sum": [
        with_experts("TakesTheFirstExpert", first_alone),
        with_experts("AnswersInFloat32", in_float32),
    ],
    "test_padding_has_no_experts": [with_experts("TakesTheLastForNone", last_for_none)],
    "test_experts_have_biases_and_other_activations": [
        with_experts("DropsTheLimit", unlimited),
        with_experts("DropsBiases", unbiased),
        variant(Chooses, "ChoosesAddsNoChannels", experts=lambda self, path, shape: AddsNoChannels()),
    ],
    "test_experts_of_two_ranks_add_up": [
        variant(Chooses, "ChoosesLosesChannels", experts=lambda self, path, shape: LosesChannels(self, path, shape))
    ],
    "test_stacked_experts_can_be_copied": [
        variant(Chooses, "ChoosesKeepsMatrices", experts=lambda self, path, shape: KeepsMatrices()),
        variant(
            Chooses,
            "ChoosesLoopsOverStacked",
            experts=lambda self, path, shape: variant(LoopedExperts, "Loops", stacked=True)(self, path, shape),
        ),
    ],
    "test_experts_do_not_wait_for_the_device": [with_experts("CountsExperts", waiting)],
    "test_tunables_of_experts_depend_on_shapes_only": [
        tuning("TunesExpertsByValues", lambda params, rows, active: [Scan(rows, float(params["up"].sum()))]),
        tuning("TunesExpertsTwice", lambda params, rows, active: [Scan(rows, active)] * 2),
    ],
}


@each(BROKEN)
def test_the_suite_rejects(broken: type, test: str) -> None:
    assert rejects(suite_of(broken), test)
