"""Router and routed experts under tensor parallelism: each rank has some channels of every expert. Shapes: T tokens, E
experts, C hidden channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    ActFormat,
    BuildContext,
    Bundle,
    ExpertBias,
    ExpertPart,
    ExpertShape,
    GatedActivation,
    Partial,
    Routing,
    RoutingRule,
)
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.layers.linear import split_channels
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.share import Wanted, below, check_records, shares_of, stored_of
from dovetail.core.layers.weights import Taker, Weight, WeightSet
from dovetail.core.ops import route, router_logits
from dovetail.core.ops.tiles import MOST_SHARED_TILES


class ExpertRouter:
    """Selects the experts of each token. Every rank has the whole matrix, in the model's dtype, and selects alike."""

    input = PLAIN

    def __init__(
        self,
        name: str,
        build: BuildContext,
        hidden: int,
        rule: RoutingRule,
        selection_bias: str | None = None,
        bias: bool = False,
    ) -> None:
        """`selection_bias`: checkpoint name of a bias of the scores by which experts are selected, None = there is
        none. `bias`: whether the logits have one."""
        self.name, self.rule, self.bias_name = name, rule, selection_bias
        self.logit_bias_E = torch.zeros(rule.experts, dtype=torch.float32, device=build.device) if bias else None
        self.weight = torch.empty(rule.experts, hidden, dtype=build.dtype, device=build.device)
        self.bias_E = None
        if selection_bias is not None:
            self.bias_E = torch.zeros(rule.experts, dtype=torch.float32, device=build.device)
        self.counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=build.device)

    def __call__(self, x: Bundle, live_T: torch.Tensor | None) -> Routing:
        """`live_T`: ForwardContext.live_T."""
        logits_TE = router_logits(x[PLAIN].values, self.weight, self.counts, self.logit_bias_E)
        return route(logits_TE, self.rule, self.bias_E, live_T)

    def weights(self) -> Iterator[Taker]:
        yield Weight(f"{self.name}.weight", lambda lazy: self.weight.copy_(lazy[:]), tuple(self.weight.shape))
        if (logit_bias_E := self.logit_bias_E) is not None:
            take = partial(_copy_whole, logit_bias_E)
            yield Weight(f"{self.name}.bias", take, (self.rule.experts,), "zeros")
        if self.bias_name is not None:
            yield Weight(self.bias_name, lambda lazy: self.bias_E.copy_(lazy[:]), (self.rule.experts,), "zeros")


def _copy_whole(to: torch.Tensor, lazy: LazyTensor) -> None:
    to.copy_(lazy[:])


class Experts:
    """Gated experts of a layer, stored and multiplied by the quantizer's ExpertMethod. The output is a Partial.

    Each matrix is a tensor of its own in the checkpoint; `unstacked` separates those of other layouts.
    """

    def __init__(
        self,
        path: str,
        names: Sequence[tuple[str, str, str]],
        build: BuildContext,
        hidden: int,
        intermediate: int,
        activation: GatedActivation = SWIGLU,
        bias: bool = False,
    ) -> None:
        """`names`: checkpoint prefixes of each expert's gate, up, down. `intermediate`: channels of whole experts."""
        start, stop = split_channels(names[0][0], intermediate, build)
        self.channels, self.activation = slice(start, stop), activation
        self.shape = ExpertShape(
            experts=len(names),
            hidden=hidden,
            intermediate=stop - start,
            dtype=build.dtype,
            names=tuple(names),
            shares=build.spec.shares(),
            whole_intermediate=intermediate,
            first_channel=start,
        )
        self.method = build.quantizer.experts(path, self.shape) or LoopedExperts(build.quantizer, path, self.shape)
        self.params = self.method.create(self.shape, build.device)
        self.bias: ExpertBias | None = None
        self.loads_down_bias = build.collective.rank == 0  # The sum over ranks would count it once per rank.
        if bias:
            sides = (2 * self.shape.intermediate, hidden)
            up, down = (torch.zeros(len(names), side, dtype=build.dtype, device=build.device) for side in sides)
            self.bias = ExpertBias(up, down)

    @property
    def input(self) -> ActFormat:
        """Input format of the first product."""
        return self.method.input

    def __call__(self, x: Bundle, routing: Routing) -> Partial:
        return Partial(self.method.apply(self.params, x[self.input], routing, self.activation, self.bias))

    def weights(self) -> Iterator[Taker]:
        for expert, names in enumerate(self.shape.names):
            for part, name in zip(PARTS, names, strict=True):
                outputs, inputs = self._sides(part)
                records = self._records(name)
                yield WeightSet(
                    stored_of(name, records, outputs.total, inputs.total),
                    partial(check_records, records, name, outputs=outputs.total, inputs=inputs.total),
                    partial(self._take, expert, part, name),
                )
                if self.bias is not None:
                    take = partial(self._take_bias, self.bias, expert, part)
                    yield Weight(f"{name}.bias", take, (outputs.total,), "zeros")

    def finish(self) -> None:
        self.method.finish(self.params)

    def _records(self, name: str) -> list[TensorRecord]:
        records = self.method.tensors_of(name)
        return [record for record in records if self.bias is None or record.name != "bias"]

    def _sides(self, part: ExpertPart) -> tuple[Wanted, Wanted]:
        """Return this rank's outputs and inputs of a matrix."""
        hidden = Wanted(self.shape.hidden, 0, self.shape.hidden)
        channels = Wanted(self.shape.whole_intermediate, self.channels.start, self.channels.stop)
        return (hidden, channels) if part == "down" else (channels, hidden)

    def _take(self, expert: int, part: ExpertPart, name: str, tensors: Mapping[str, LazyTensor]) -> None:
        with below(name):
            share = shares_of(name, self._records(name), tensors, *self._sides(part))
            self.method.load(self.params, expert, part, share)

    def _take_bias(self, bias: ExpertBias, expert: int, part: ExpertPart, lazy: LazyTensor) -> None:
        if part != "down":
            gate, up = bias.up[expert].chunk(2)
            (gate if part == "gate" else up).copy_(lazy[self.channels])
        elif self.loads_down_bias:
            bias.down[expert].copy_(lazy[:])
