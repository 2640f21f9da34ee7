"""Router and routed experts of a layer. The placement decides which experts a rank has, and which of their channels.
Shapes: T tokens, R rows that a rank multiplies, E experts, C hidden channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    ActFormat,
    BuildContext,
    Bundle,
    Dispatched,
    ExpertBias,
    ExpertMethod,
    ExpertPart,
    ExpertShape,
    GatedActivation,
    Partial,
    Routing,
    RoutingRule,
)
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.interfaces.rows import padded, padded_activation
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.expert_slots import layouts_of, moved, slots_of
from dovetail.core.layers.linear import share_of_channels
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.packed_linear_experts import PackedLinearExperts
from dovetail.core.layers.share import Wanted, below, check_records, fewer_ranks, shares_of, stored_of
from dovetail.core.layers.weights import Taker, Weight, WeightSet
from dovetail.core.ops import route, router_logits
from dovetail.core.ops.expert_copies import count_experts
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


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that every token has. The checkpoint has one matrix for the channels of all of them."""

    count: int
    names: tuple[str, str, str]
    """Checkpoint prefixes of gate, up, down."""
    path: str
    """Path of a layer of theirs."""


class Experts:
    """Gated experts of a layer: some on this rank, stored and multiplied by the quantizer's ExpertMethod. Rows get to
    their experts by the placement: dispatch, multiply, combine.

    Each matrix is a tensor of its own in the checkpoint; `unstacked` separates those of other layouts. Shared experts
    are further slots behind the routed ones, so that the same launches multiply them, unless something forbids it:
    then `always` is 0, and they need a layer of their own. Placements and quantizers may support routed ones alone,
    biases and counters of loads are for those, and adapters add to the products of single matrices.
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
        shared: SharedExperts | None = None,
    ) -> None:
        """`names`: checkpoint prefixes of each expert's gate, up, down. `intermediate`: channels of whole experts."""
        self.placement = build.placement
        ranks = build.collective if self.placement is None else self.placement.ranks
        rank, size = ranks.rank, ranks.size
        groups = 1 if self.placement is None else self.placement.size
        parts = size // groups
        ids: Sequence[int] = range(len(names))
        if self.placement is not None:
            self.placement.layers += 1
            layouts = layouts_of(self.placement, len(names), groups)
            moves = self.placement.rebalance > 0
            self.slots = slots_of(layouts, len(names), rank, parts, build.device, most=groups if moves else 1)
            ids = layouts[rank // parts]
        each = share_of_channels(names[0][0], intermediate, build, parts, size)
        start, stop = rank % parts * each, (rank % parts + 1) * each
        self.channels, self.activation = slice(start, stop), activation
        self.elsewhere = frozenset(name for expert in set(range(len(names))).difference(ids) for name in names[expert])
        """Checkpoint prefixes of the matrices that this rank does not load."""
        self.shape = ExpertShape(
            experts=len(ids),
            hidden=hidden,
            intermediate=each,
            dtype=build.dtype,
            names=tuple(names[expert] for expert in ids),
            shares=fewer_ranks(build),
            whole_intermediate=intermediate,
            first_channel=start,
            ids=tuple(ids),
        )
        self.always = 0
        """Number of experts that every token has, the last slots."""
        method = None
        if shared is not None and not bias and _takes_shared(build):
            both = _with_shared(self.shape, path, shared)
            method = build.quantizer.experts(path, both) or _packed(build, path, both)
            if method is not None and shared.count > 1 and not _divides(method, shared.names, intermediate):
                method = None
            if method is not None:
                self.shape, self.always = both, shared.count
        method = method or build.quantizer.experts(path, self.shape)
        self.method = method or PackedLinearExperts(build.quantizer, path, self.shape)
        if size > build.collective.size:
            _check_own_scales(self.method.input, path)
        self.params = self.method.create(self.shape, build.device)
        self.loads_E: torch.Tensor | None = None
        """int64: number of tokens of each expert since it was last set to zero; None = they are not counted."""
        if self.placement is not None and self.placement.rebalance:
            _check_stacked(self.method, path)
            self.loads_E = torch.zeros(len(names), dtype=torch.int64, device=build.device)
            build.placed.append(self)
        self.bias: ExpertBias | None = None
        self.loads_down_bias = rank % parts == 0  # The sum over the parts of an expert would count it once per part.
        if bias:
            sides = (2 * self.method.channels(self.shape), hidden)
            up, down = (torch.zeros(len(ids), side, dtype=build.dtype, device=build.device) for side in sides)
            self.bias = ExpertBias(up, down)

    def tunables(self, rows: int, *, active: int) -> Sequence[Tunable]:
        """`active`: routed experts of a token. Where rows go to other ranks, their number is not that of the step, and
        nothing is measured."""
        if self.placement is not None and self.placement.size > 1:
            return ()
        return self.method.tunables(self.params, rows, active + self.always, self.always)

    @property
    def input(self) -> ActFormat:
        """Input format of the first product."""
        return self.method.input

    def dispatch(self, x: Bundle, routing: Routing) -> Dispatched:
        """Return the rows that this rank multiplies: all, or those of `routing` that the placement sends here."""
        given = x[self.input]
        if self.loads_E is not None:
            count_experts(routing.experts_TK, self.loads_E)
        if self.placement is None:
            return Dispatched(given, routing)
        if (rows := self.placement.lane_rows) is not None:
            given, routing = padded_activation(given, rows), _padded_routing(routing, rows)
        return self.placement.dispatch(given, routing, self.slots)

    def multiply(self, sent: Dispatched) -> torch.Tensor:
        """Return [R, C]: the weighted sum of each row's experts on this rank."""
        return self.method.apply(self.params, sent.x, sent.routing, self.activation, self.bias)

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> Partial | torch.Tensor:
        """Return the sums for the rows that `dispatch` got. With lanes, rows of padding may follow them."""
        return Partial(y_RC) if self.placement is None else self.placement.combine(y_RC, sent)

    def stored(self, slot: int) -> list[torch.Tensor]:
        """Return views of all values of the expert in a slot, which moves copy (ExpertMethod.stacked)."""
        tensors = list(self.params.values())
        if self.bias is not None:
            tensors += [self.bias.up, self.bias.down]
        return [tensor[slot] for tensor in tensors]

    def place(self, layouts: tuple[tuple[int, ...], ...]) -> None:
        """Route tokens by other layouts from now on. The experts are in their new slots already."""
        self.slots = moved(self.slots, layouts)

    def weights(self) -> Iterator[Taker]:
        # Several slots may have one expert, whose tensors they take together, and shared ones parts of a matrix.
        slots: dict[tuple[str, str, str], list[int]] = {}
        for slot, names in enumerate(self.shape.names):
            slots.setdefault(names, []).append(slot)
        for names, copies in slots.items():
            for part, name in zip(PARTS, names, strict=True):
                outputs, inputs = self._sides(part, copies[0])
                records = self._records(name)
                yield WeightSet(
                    stored_of(name, records, outputs.total, inputs.total),
                    partial(check_records, records, name, outputs=outputs.total, inputs=inputs.total),
                    partial(self._take, copies, part, name),
                )
                if self.bias is not None:
                    take = partial(self._take_bias, self.bias, copies, part)
                    yield Weight(f"{name}.bias", take, (outputs.total,), "zeros")

    def finish(self) -> None:
        self.method.finish(self.params)

    def _records(self, name: str) -> list[TensorRecord]:
        records = self.method.tensors_of(name)
        return [record for record in records if self.bias is None or record.name != "bias"]

    def _sides(self, part: ExpertPart, slot: int) -> tuple[Wanted, Wanted]:
        """Return this rank's outputs and inputs of the matrix of a slot."""
        hidden, whole = Wanted(self.shape.hidden, 0, self.shape.hidden), self.shape.whole_intermediate
        channels = Wanted(whole, self.channels.start, self.channels.stop)
        if (index := slot - (self.shape.experts - self.always)) >= 0:
            first = index * whole
            channels = Wanted(self.always * whole, first + self.channels.start, first + self.channels.stop)
        return (hidden, channels) if part == "down" else (channels, hidden)

    def _take(self, slots: list[int], part: ExpertPart, name: str, tensors: Mapping[str, LazyTensor]) -> None:
        with below(name):
            for slot in slots:
                share = shares_of(name, self._records(name), tensors, *self._sides(part, slot))
                self.method.load(self.params, slot, part, share)

    def _take_bias(self, bias: ExpertBias, slots: list[int], part: ExpertPart, lazy: LazyTensor) -> None:
        for slot in slots:
            if part != "down":
                gate, up = bias.up[slot].chunk(2)
                first = self.method.before(self.shape)
                own = (gate if part == "gate" else up)[first : first + self.shape.intermediate]
                own.copy_(lazy[self.channels])
            elif self.loads_down_bias:
                bias.down[slot].copy_(lazy[:])


def _packed(build: BuildContext, path: str, shape: ExpertShape) -> ExpertMethod | None:
    """Return the method for experts of one packed format; None = they have several."""
    method = PackedLinearExperts(build.quantizer, path, shape)
    return method if method.stacks(build.device) else None


def _takes_shared(build: BuildContext) -> bool:
    """Whether shared experts can be further slots."""
    placement = build.placement
    passed = placement is None or (placement.passes_shared and not placement.rebalance)
    return passed and build.quantizer.slot_paths and build.adapters is None


def _divides(method: ExpertMethod, names: tuple[str, str, str], channels: int) -> bool:
    """Whether parts of so many channels begin with a group that shares a value, in every tensor of these matrices."""
    if isinstance(method, PackedLinearExperts) and method.scatters:
        return False
    axes = (axis for name in names for record in method.tensors_of(name) for axis in record.axes)
    return all(channels % max(1, axis.group * axis.packed) == 0 for axis in axes if axis.counts != "nothing")


def _with_shared(shape: ExpertShape, path: str, shared: SharedExperts) -> ExpertShape:
    """Append slots for shared experts."""
    count = shape.experts + shared.count
    paths = tuple(shape.path_of(path, slot) for slot in range(shape.experts)) + (shared.path,) * shared.count
    names = shape.names + (shared.names,) * shared.count
    return replace(shape, experts=count, names=names, ids=tuple(range(count)), paths=paths)


def _padded_routing(routing: Routing, rows: int) -> Routing:
    """Append rows without experts."""
    return Routing(padded(routing.experts_TK, rows, value=-1), padded(routing.weights_TK, rows))


def _check_stacked(method: ExpertMethod, path: str) -> None:
    """Raise ConfigError for a weight format whose experts cannot be copied to other slots."""
    if not method.stacked:
        reason = method.reason() if isinstance(method, LoopedExperts) else ""
        raise ConfigError(
            f"{path}: experts.rebalance moves experts between ranks, and the weight format of these ones has no "
            f"products of stacked experts: {type(method).__name__}{reason}. Set experts.rebalance=0, or quant=none, "
            "fp8, int8, fp4 or int4 (one format for all experts)"
        )


def _check_own_scales(fmt: ActFormat, path: str) -> None:
    """Raise ConfigError for an input format with one scale for all rows of a step, since lanes have different ones."""
    if fmt.group == "tensor" and fmt.static_scale is None:
        raise ConfigError(
            f"{path}: its input has one scale for all rows of a step ({fmt.name}), and lanes have rows of their "
            "own. Set engine.ep to at most engine.tp, or choose a quantizer with scales per token"
        )
