"""Attention over compressed latents (DeepSeek-V2, 2024) in a decoder. Queries may be compressed, too.

Heads are split over ranks; every rank computes and caches the whole latents, which all heads share.

Shapes: T tokens, H heads of this rank, L kv rank, O nope + v rows of a head's up-projection.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import torch

from dovetail.core.interfaces import (
    ActFormat,
    AttentionLayer,
    BuildContext,
    Bundle,
    ForwardContext,
    KVGroup,
    LatentNorm,
    Partial,
    Rope,
)
from dovetail.core.layers import Linear, RMSNorm, RowParallel, Taker, local_heads
from dovetail.core.layers.linear import Part
from dovetail.core.ops import encode
from dovetail.plugins.model.llama.family import Layout

NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents, which config.json does not state."""


class UpProjection(Linear):
    """The matrix that makes keys and values from latents. Attention may multiply queries and outputs by it in place of
    the latents, for which there are no quantized products, so that it is kept in the model's dtype."""

    def finish(self) -> None:
        super().finish()
        identity = torch.eye(self.shape.inp, dtype=self.shape.dtype, device=next(iter(self.params.values())).device)
        columns_LO = self.method.apply(self.params, encode(identity, (self.method.input,))[self.method.input])
        self.rows_OL = columns_LO.t().contiguous()
        self.params = {}


class LatentAttention:
    def __init__(
        self, index: int, build: BuildContext, layout: Layout, group: KVGroup, rope: Rope | None, defers: bool
    ) -> None:
        """`defers`: as in RowParallel."""
        spec = build.spec
        mla = spec.mla
        assert mla is not None
        prefix, path = f"{layout.names.layer.format(index)}.self_attn", f"layers.{index}.attn"
        heads, _ = local_heads(spec.heads, spec.heads, build.collective.size)
        own_H = torch.arange(heads) + build.collective.rank * heads
        rotary_R = torch.arange(mla.rope_dim)
        if layout.interleaved:
            # Pairs become halves, the only layout that kernels support. This changes no q.k.
            rotary_R = torch.cat((rotary_R[0::2], rotary_R[1::2]))
        query_D = torch.cat((torch.arange(mla.nope_dim), mla.nope_dim + rotary_R))
        latent = torch.cat((torch.arange(mla.kv_rank), mla.kv_rank + rotary_R))
        query_rows = (own_H[:, None] * len(query_D) + query_D).flatten()
        compressed = Part.of(f"{prefix}.kv_a_proj_with_mqa", len(latent), latent)
        self.widths = (mla.q_rank or len(query_rows), len(latent))
        self.q: Linear | None = None
        self.norms = [RMSNorm(f"{prefix}.kv_a_layernorm", build, mla.kv_rank, NORM_EPS)]
        if mla.q_rank:
            first, shard = Part(f"{prefix}.q_a_proj", mla.q_rank, 0, mla.q_rank), "none"
            own = Part.of(f"{prefix}.q_b_proj", spec.heads * len(query_D), query_rows)
            self.q = Linear(f"{path}.q_b", build, (own,), mla.q_rank, shard="column")
            self.norms.append(RMSNorm(f"{prefix}.q_a_layernorm", build, mla.q_rank, NORM_EPS))
        else:
            first, shard = Part.of(f"{prefix}.q_proj", spec.heads * len(query_D), query_rows), "column"
        self.down = Linear(f"{path}.qkv_a", build, (first, compressed), spec.hidden, shard=shard)  # type: ignore[arg-type]
        each = mla.nope_dim + mla.v_dim
        up_rows = (own_H[:, None] * each + torch.arange(each)).flatten()
        up = Part.of(f"{prefix}.kv_b_proj", spec.heads * each, up_rows)
        # Its product never runs in a step, so that there is nothing to adapt or to tune.
        alone = replace(build, adapters=None, tuned=[])
        self.up = UpProjection(f"{path}.kv_b", alone, (up,), mla.kv_rank, shard="column")
        inner = spec.heads * mla.v_dim
        self.o = RowParallel(f"{path}.o", f"{prefix}.o_proj", build, inner, spec.hidden, defers=defers)
        self.backend, self.rope = build.attention, rope
        self.latent_norm = LatentNorm(self.norms[0].weight, NORM_EPS)
        self.layer = AttentionLayer(
            index=index,
            group=group.id,
            local=group.layers.index(index),
            heads=heads,
            kv_heads=heads,
            head_dim=spec.head_dim,
            scale=layout.score_scale,
            mla=mla,
        )
        build.tune_attention(self.layer)

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """Input formats, for the producer's `emit`."""
        return self.down.inputs

    @property
    def products(self) -> tuple[Linear, ...]:
        """The linear layers that run in a step."""
        return (self.down, self.o) if self.q is None else (self.down, self.q, self.o)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.products, self.up)

    def weights(self) -> Iterator[Taker]:
        """All but those of `linears`."""
        for norm in self.norms:
            yield from norm.weights()

    def calls(self, x: Bundle, ctx: ForwardContext) -> Generator[Callable[[], Any], Any, Partial]:
        """Run the layer. It makes no collective call."""
        yield from ()
        attn = ctx.attn[self.layer.group]
        q, latents = self.down(x).split(self.widths, dim=1)
        if self.q is not None:
            q = self.q(self.norms[1](q, emit=self.q.inputs)[0])
        q_THD = self.backend.write_mla(self.layer, attn, q, latents, self.rope, self.latent_norm)
        up_HOL = self.up.rows_OL.view(self.layer.heads, -1, self.up.shape.inp)
        return self.o(self.backend.attend_mla(self.layer, attn, q_THD, up_HOL, self.o.inputs))
