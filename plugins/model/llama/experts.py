"""MLP of routed experts, perhaps beside an MLP that processes every token. T tokens, C channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from dovetail.core.interfaces import PLAIN, ActFormat, BuildContext, Bundle, ForwardContext, Partial
from dovetail.core.layers import ExpertRouter, Experts, Linear, Stack, Taker
from dovetail.plugins.model.llama.families import Layout
from dovetail.plugins.model.llama.moe import ExpertNames


class SharedMLP(Protocol):
    """An MLP of whole channels."""

    @property
    def inputs(self) -> tuple[ActFormat, ...]: ...
    @property
    def linears(self) -> tuple[Linear, ...]: ...
    def __call__(self, x: Bundle, ctx: ForwardContext) -> Partial: ...


class SparseMLP:
    def __init__(
        self,
        index: int,
        build: BuildContext,
        layout: Layout,
        uniform: bool,
        shared: Callable[[tuple[str, str, str], int], SharedMLP],
    ) -> None:
        """`uniform`: RoutingRule.uniform. `shared` builds the MLP of shared experts from names and channels."""
        spec, experts = build.spec, layout.experts
        assert spec.moe is not None and experts is not None
        prefix, names = layout.names.layer.format(index), experts.names
        bias = None if names.selection_bias is None else f"{prefix}.{names.selection_bias}"
        rule = replace(experts.rule, uniform=uniform)
        self.router = ExpertRouter(f"{prefix}.{names.router}", build, spec.hidden, rule, bias, experts.bias)
        gate, up, down = (f"{prefix}.{name}" for name in names.matrices)
        matrices = [(gate.format(e), up.format(e), down.format(e)) for e in range(spec.moe.experts)]
        sizes, path = (spec.hidden, spec.moe.intermediate), f"layers.{index}.mlp.experts"
        self.experts = Experts(path, matrices, build, *sizes, experts.activation, experts.bias)
        self.shared = shared(names.shared, spec.moe.shared * spec.moe.intermediate) if spec.moe.shared else None

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """Input formats, for the producer's `emit`. The router reads the plain one."""
        more = () if self.shared is None else self.shared.inputs
        return tuple(dict.fromkeys((self.experts.input, PLAIN, *more)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return () if self.shared is None else self.shared.linears

    def __call__(self, x: Bundle, ctx: ForwardContext) -> Partial:
        sent = self.experts.dispatch(x, self.router(x, ctx.live_T))
        routed = self.experts.combine(self.experts.multiply(sent), sent)
        assert isinstance(routed, Partial)
        if self.shared is None:
            return routed
        return Partial(routed.values + self.shared(x, ctx).completed())

    def weights(self) -> Iterator[Taker]:
        """All but those of `linears`."""
        yield from self.router.weights()
        yield from self.experts.weights()

    def finish(self) -> None:
        """Call it after the last weight is loaded; `linears` are finished by themselves."""
        self.experts.finish()


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
