"""MLP of routed experts, perhaps beside an MLP that processes every token. T tokens, S rows of a rank's share, C
channels."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from dovetail.core.interfaces import PLAIN, SWIGLU, ActFormat, BuildContext, Bundle, ForwardContext, Partial, RowShard
from dovetail.core.interfaces.collective import Alone
from dovetail.core.interfaces.rows import share_of
from dovetail.core.layers import ExpertRouter, Experts, Linear, SharedExperts, Stack, Taker
from dovetail.plugins.model.llama.families import Layout
from dovetail.plugins.model.llama.moe import ExpertNames

SparseCalls = Generator[Callable[[], Any], Any, torch.Tensor | Partial | RowShard]
"""Type of a layer's calls within `Layers`."""
Tensor = TypeVar("Tensor")
"""Opener or header of a checkpoint tensor."""


class SharedMLP(Protocol):
    """An MLP of whole channels."""

    @property
    def inputs(self) -> tuple[ActFormat, ...]: ...
    @property
    def linears(self) -> tuple[Linear, ...]: ...
    def __call__(self, x: Bundle, ctx: ForwardContext) -> Partial: ...


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """Options of layers with experts."""

    uniform: bool
    """RoutingRule.uniform"""
    apart: bool
    """Whether shared experts are an MLP of their own."""


class SparseMLP:
    def __init__(
        self,
        index: int,
        build: BuildContext,
        layout: Layout,
        options: SparseOptions,
        shared: Callable[[BuildContext, tuple[str, str, str], int], SharedMLP],
    ) -> None:
        """`shared` builds an MLP of shared experts from names and channels."""
        spec, experts = build.spec, layout.experts
        assert spec.moe is not None and experts is not None
        prefix, names = layout.names.layer.format(index), experts.names
        bias = None if names.selection_bias is None else f"{prefix}.{names.selection_bias}"
        gate, up, down = (f"{prefix}.{name}" for name in names.matrices)
        matrices = [(gate.format(e), up.format(e), down.format(e)) for e in range(spec.moe.experts)]
        sizes, path = (spec.hidden, spec.moe.intermediate), f"layers.{index}.mlp.experts"
        together = None
        alike = (
            layout.activation == "silu_and_mul"
            and experts.activation == SWIGLU
            and not (layout.mlp_bias or experts.bias)
        )
        if spec.moe.shared and alike and not options.apart:
            gate, up, down = (f"{prefix}.{name}" for name in names.shared)
            together = SharedExperts(spec.moe.shared, (gate, up, down), f"layers.{index}.mlp.shared")
        self.experts = Experts(path, matrices, build, *sizes, experts.activation, experts.bias, together)
        rule = replace(experts.rule, uniform=options.uniform, always=self.experts.always)
        self.router = ExpertRouter(f"{prefix}.{names.router}", build, spec.hidden, rule, bias, experts.bias)
        build.tuned.append(partial(self.experts.tunables, active=rule.active))
        self.collective = build.collective
        self.own_rows = build.placement is not None and build.placement.rows == "own"
        # Layers that get a rank's own rows have all channels.
        within = replace(build, collective=Alone(None)) if self.own_rows else build
        channels = spec.moe.shared * spec.moe.intermediate
        apart = spec.moe.shared > self.experts.always
        self.shared = shared(within, names.shared, channels) if apart else None

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """Input formats, for the producer's `emit`. The router reads the plain one."""
        more = () if self.shared is None else self.shared.inputs
        return tuple(dict.fromkeys((self.experts.input, PLAIN, *more)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return () if self.shared is None else self.shared.linears

    def calls(self, x: Bundle, ctx: ForwardContext) -> SparseCalls:
        """Run the layer, yielding collective calls as `Model.layers` does. `x` has this rank's rows if the placement
        wants those, else all rows."""
        if not self.own_rows:
            sent = self.experts.dispatch(x, self.router(x, ctx.live_T))
            routed = self.experts.combine(self.experts.multiply(sent), sent)
        else:
            routing = self.router(x, self._own_live(ctx))
            sent = yield partial(self.experts.dispatch, x, routing)
            y_RC = self.experts.multiply(sent)
            routed = yield partial(self.experts.combine, y_RC, sent)
        shared = None if self.shared is None else self.shared(x, ctx).completed()
        if isinstance(routed, Partial):
            return routed if shared is None else Partial(routed.values + shared)
        if self.own_rows:
            # Rows of other lanes' steps may make it longer.
            routed = routed[: len(routing.experts_TK)]
            return RowShard(routed if shared is None else routed + shared, len(ctx.positions_T))
        # Complete rows beside a sum over ranks: rank 0 has them.
        return routed if shared is None else Partial(shared if self.collective.rank else routed + shared)

    def _own_live(self, ctx: ForwardContext) -> torch.Tensor | None:
        """Return `live_T` of this rank's rows, without those past the last token."""
        ranks, tokens = self.collective, len(ctx.positions_T)
        live_T = ctx.live_T
        if live_T is None:
            if tokens % ranks.size == 0:
                return None
            live_T = torch.ones_like(ctx.positions_T, dtype=torch.bool)
        return share_of(live_T, ranks.rank, ranks.size)

    def weights(self) -> Iterator[Taker]:
        """All but those of `linears`."""
        yield from self.router.weights()
        yield from self.experts.weights()

    def finish(self) -> None:
        """Call it after the last weight is loaded; `linears` are finished by themselves."""
        self.experts.finish()


def with_router(tensors: Iterable[tuple[str, Tensor]], names: ExpertNames) -> dict[str, Tensor]:
    """Return the tensors, with the routers of files of stacked experts under `names.router`."""
    found = dict(tensors)
    if names.stacked_router is None:
        return found
    suffix = f".{names.stacked_router}.weight"
    for name in [name for name in found if name.endswith(suffix)]:
        new = f"{name.removesuffix(suffix)}.{names.router}.weight"
        if new not in found:
            found[new] = found.pop(name)
    return found


def stacks_of(names: ExpertNames) -> dict[str, Stack]:
    """Return the layouts of the tensors that hold a matrix, or its bias, codes or scales, of all experts of a layer."""
    gate_up, down = names.matrices[:2], names.matrices[2:]

    def stack(matrices: tuple[str, ...], tensor: str, sides: int, transposed: bool = False) -> Stack:
        parts = tuple(f"{matrix}.{tensor}" for matrix in matrices)
        return Stack(parts, names.alternate and len(parts) > 1, transposed, sides)

    stacks = {}
    for stem, matrices in (("mlp.experts.gate_up_proj", gate_up), ("mlp.experts.down_proj", down)):
        stacks[stem] = stack(matrices, "weight", 2, names.alternate)
        if names.alternate:
            for tensor, sides in (("bias", 1), ("blocks", 3), ("scales", 2)):
                stacks[f"{stem}_{tensor}"] = stack(matrices, tensor, sides)
    return stacks
