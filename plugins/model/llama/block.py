"""Blocks of the decoder: attention and an MLP, each behind a norm.

A block ends in a Partial. The next one begins with `boundary`, which sums it over ranks, adds the residual, normalizes,
and writes the input format of the next matmul. families.py has the differences between model families.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from dovetail.core.interfaces import ActFormat, BuildContext, Bundle, ForwardContext, KVGroup, Partial, Residual, Rope
from dovetail.core.layers import ColumnParallel, LayerNorm, Linear, NoNorm, RMSNorm, RowParallel
from dovetail.core.ops import gelu, gelu_and_mul, silu_and_mul
from dovetail.plugins.model.llama.attention import Attention, defers
from dovetail.plugins.model.llama.experts import SparseMLP, SparseOptions
from dovetail.plugins.model.llama.family import Layout
from dovetail.plugins.model.llama.latent import LatentAttention

ACTIVATIONS: dict[str, Callable[..., Bundle]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, tanh=True),
}


class MLP:
    def __init__(
        self,
        index: int,
        build: BuildContext,
        layout: Layout,
        matrices: tuple[str, ...],
        channels: int,
        defers: bool,
        path: str = "mlp",
    ) -> None:
        """`matrices`: names within the layer, of down last. `defers`: as in RowParallel."""
        spec, bias = build.spec, layout.mlp_bias
        prefix, path = layout.names.layer.format(index), f"layers.{index}.{path}"
        *ups, down = (f"{prefix}.{name}" for name in matrices)
        self.up = ColumnParallel(
            f"{path}.gate_up" if len(ups) == 2 else f"{path}.up",
            tuple(ups),
            build,
            spec.hidden,
            (channels,) * len(ups),
            bias=bias,
        )
        self.down = RowParallel(
            f"{path}.down",
            down,
            build,
            channels,
            spec.hidden,
            bias=bias,
            defers=defers,
        )
        self.activation = ACTIVATIONS[layout.activation]

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """Input formats, for the producer's `emit`."""
        return self.up.inputs

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.up, self.down)

    def __call__(self, x: Bundle, ctx: ForwardContext) -> Partial:
        return self.down(self.activation(self.up(x), emit=self.down.inputs))


BlockCalls = Generator[Callable[[], Any], Any, tuple[Any, Residual]]
"""Type of a block's calls within `Layers`."""


class Block:
    def __init__(
        self,
        index: int,
        build: BuildContext,
        layout: Layout,
        group: KVGroup,
        rope: Rope | None,
        before: RMSNorm | LayerNorm | None,
        sparse: SparseOptions,
    ) -> None:
        """`before`: norm of the previous block's output before it is added to the residual."""
        prefix = layout.names.layer.format(index)
        self.before = before
        self.boundary, self.parallel = build.collective.boundary, layout.block.parallel
        self.mlp_boundary = self.boundary
        # LayerNorm adds the two outputs of a parallel block, except before a sum over ranks.
        self.adds_later = layout.norm == "layer" and build.collective.size == 1
        own = [norm_of(f"{prefix}.{name}", build, layout) for name in layout.block.norms]
        after = [norm_of(f"{prefix}.{name}", build, layout) for name in layout.block.after]
        self.norms = [*own, *after]
        before_both: tuple[Any, Any] = (own[0], own[-1]) if own else (NoNorm(), NoNorm())
        after_both: tuple[Any, Any] = (after[0], after[1]) if after else (None, None)
        self.before_attention, self.before_mlp = before_both
        self.after_attention, self.after = after_both
        self.attention: Attention | LatentAttention
        if build.spec.mla is None:
            self.attention = Attention(index, build, layout, group, rope)
        else:
            self.attention = LatentAttention(index, build, layout, group, rope, defers(layout))
        self.mlp: MLP | SparseMLP
        if build.spec.moe is None or index < build.spec.moe.dense_layers:
            matrices = (*layout.names.up, layout.names.down)
            self.mlp = MLP(index, build, layout, matrices, build.spec.intermediate, defers(layout))
        else:
            shared = partial(_shared_mlp, index, layout)
            self.mlp = SparseMLP(index, build, layout, sparse, shared)
            if self.mlp.own_rows:
                self.mlp_boundary = build.collective.own_boundary

    def __call__(self, x: torch.Tensor | Partial, residual: Residual | None, ctx: ForwardContext) -> BlockCalls:
        return (self._parallel if self.parallel else self._sequential)(x, residual, ctx)

    def _sequential(self, x: torch.Tensor | Partial, residual: Residual | None, ctx: ForwardContext) -> BlockCalls:
        normed, residual = yield lambda: self.boundary(
            x, residual, self.before_attention, self.attention.inputs, self.before
        )
        x = yield from self.attention.calls(normed, ctx)
        normed, residual = yield lambda: self.mlp_boundary(
            x, residual, self.before_mlp, self.mlp.inputs, self.after_attention
        )
        if isinstance(self.mlp, SparseMLP):
            return (yield from self.mlp.calls(normed, ctx)), residual
        return self.mlp(normed, ctx), residual

    def _parallel(self, x: torch.Tensor | Partial, residual: Residual | None, ctx: ForwardContext) -> BlockCalls:
        """Run attention and MLP on the same input: one sum over ranks per layer in place of two."""
        one_norm = self.before_mlp is self.before_attention
        wanted = tuple(dict.fromkeys(self.attention.inputs + self.mlp.inputs * one_norm))
        normed, residual = yield lambda: self.boundary(x, residual, self.before_attention, wanted)
        x = yield from self.attention.calls(normed, ctx)
        if not one_norm:
            normed, _ = yield lambda: self.boundary(residual, None, self.before_mlp, self.mlp.inputs)
        assert isinstance(self.mlp, MLP), "no family has experts in parallel blocks"
        y = self.mlp(normed, ctx)
        return Partial(x.values, plus=y.values) if self.adds_later else Partial(x.values + y.values), residual


def _shared_mlp(index: int, layout: Layout, build: BuildContext, matrices: tuple[str, ...], channels: int) -> MLP:
    """Build the MLP of experts that process every token."""
    return MLP(index, build, layout, matrices, channels, False, "mlp.shared")


def norm_of(name: str, build: BuildContext, layout: Layout) -> RMSNorm | LayerNorm:
    """Build the norm whose weight has this name."""
    # Residuals are divided by the factor: see Llama.layers.
    eps = layout.eps / layout.factors.block**2
    if layout.norm == "layer":
        return LayerNorm(name, build, build.spec.hidden, eps, layout.norm_bias)
    return RMSNorm(name, build, build.spec.hidden, eps, layout.norm_offset, layout.norm_fp32)
