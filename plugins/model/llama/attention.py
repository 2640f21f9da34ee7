"""Attention of a decoder layer whose cache holds keys and values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from dovetail.core.interfaces import (
    ActFormat,
    AttentionLayer,
    BuildContext,
    Bundle,
    ForwardContext,
    KVGroup,
    Partial,
    QKNorm,
    Rope,
)
from dovetail.core.layers import KVScales, Linear, QKVParallel, RMSNorm, RowParallel, Sinks, Taker, WideQKNorm
from dovetail.plugins.model.llama.family import Layout


class Attention:
    def __init__(self, index: int, build: BuildContext, layout: Layout, group: KVGroup, rope: Rope | None) -> None:
        spec, names = build.spec, layout.names
        prefix, path = names.layer.format(index), f"layers.{index}.attn"
        self.qkv = QKVParallel(
            f"{path}.qkv",
            tuple(f"{prefix}.{name}" for name in names.qkv),
            build,
            spec.hidden,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            bias=layout.qkv_bias,
            interleaved=layout.rope.dim if layout.interleaved else 0,
        )
        inner = spec.heads * spec.head_dim
        self.o = RowParallel(
            f"{path}.o", f"{prefix}.{names.o}", build, inner, spec.hidden, bias=layout.o_bias, defers=defers(layout)
        )
        self.norms = [
            RMSNorm(f"{prefix}.{name}", build, spec.head_dim, layout.eps, layout.norm_offset)
            for name in names.qk_norm
            if layout.qk_norm
        ]
        self.qk_norm = QKNorm(self.norms[0].weight, self.norms[1].weight, layout.eps) if self.norms else None
        self.collective = build.collective
        self.wide_norm: WideQKNorm | None = None
        if layout.wide_qk_norm:
            q_norm, k_norm = (f"{prefix}.{name}" for name in names.qk_norm)
            self.wide_norm = WideQKNorm((q_norm, k_norm), build, self.qkv, layout.eps)
        self.backend, self.rope = build.attention, rope
        attention = f"{prefix}.{names.o.rpartition('.')[0]}"
        self.kv_scales = KVScales(attention, index, build, spec.kv_heads, self.qkv.kv_heads)
        self.sinks = Sinks(f"{attention}.sinks", build, self.qkv.heads) if layout.sinks else None
        self.layer = AttentionLayer(
            index=index,
            group=group.id,
            local=group.layers.index(index),
            heads=self.qkv.heads,
            kv_heads=self.qkv.kv_heads,
            head_dim=spec.head_dim,
            scale=layout.score_scale,
            soft_cap=layout.soft_cap,
            window=group.window,
            k_scale=self.kv_scales.k,
            v_scale=self.kv_scales.v,
            sinks=None if self.sinks is None else self.sinks.values_H,
        )
        build.tune_attention(self.layer)

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """Input formats, for the producer's `emit`."""
        return self.qkv.inputs

    @property
    def products(self) -> tuple[Linear, ...]:
        """The linear layers that run in a step."""
        return self.linears

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o)

    def weights(self) -> Iterator[Taker]:
        """All but those of `linears`."""
        for norm in self.norms:
            yield from norm.weights()
        if self.wide_norm is not None:
            yield from self.wide_norm.weights()
        yield from self.kv_scales.weights()
        if self.sinks is not None:
            yield from self.sinks.weights()

    def calls(self, x: Bundle, ctx: ForwardContext) -> Generator[Callable[[], Any], Any, Partial]:
        """Run the layer, yielding collective calls as `Model.layers` does."""
        attn = ctx.attn[self.layer.group]
        qkv = self.qkv(x)
        if self.wide_norm is not None:
            squares_T2 = None
            if self.collective.size > 1:
                squares_T2 = yield partial(self.collective.all_reduce, self.wide_norm.squares(qkv))
            qkv = self.wide_norm(qkv, squares_T2)
        return self.o(self.backend.write_and_attend(self.layer, attn, qkv, self.rope, self.qk_norm, self.o.inputs))


def defers(layout: Layout) -> bool:
    """Whether an RMSNorm reads the block's matmul outputs directly. Parallel blocks add two of them first."""
    return layout.norm == "rms" and not layout.block.parallel
