"""The decoder that Llama and its relatives share (Touvron et al. 2023): pre-norm blocks of attention and a gated MLP.

A block ends in a Partial and the next one begins at `boundary`, which sums it over ranks, adds the residual, norms, and
writes the format that the next product wants.

Shapes: T tokens, B sampled rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dovetail.core.checkpoint import read_config, resolve
from dovetail.core.interfaces import (
    PLAIN,
    AttentionLayer,
    BuildContext,
    Bundle,
    ForwardContext,
    Hidden,
    KVGroup,
    Model,
    ModelSource,
    ModelSpec,
    Partial,
    Plane,
    Rope,
)
from dovetail.core.layers import (
    ColumnParallel,
    Linear,
    LMHead,
    QKVParallel,
    RMSNorm,
    RowParallel,
    VocabParallelEmbedding,
    VocabTable,
    Weight,
    build_rope,
    dummy_weights,
    load_weights,
    local_heads,
)
from dovetail.core.ops import silu_and_mul
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.families import family_of, read_spec

IGNORED = ("rotary_emb.inv_freq",)
"""Ends of tensor names that old checkpoints carry and nobody needs."""


class Attention:
    def __init__(self, index: int, build: BuildContext, group: KVGroup, rope: Rope) -> None:
        spec, hf = build.spec, build.spec.hf
        family, name = family_of(hf, "config.json"), f"model.layers.{index}.self_attn"
        self.qkv = QKVParallel(
            f"layers.{index}.attn.qkv",
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            build,
            spec.hidden,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            bias=family.qkv_bias(hf),
        )
        self.o = RowParallel(
            f"layers.{index}.attn.o",
            f"{name}.o_proj",
            build,
            spec.heads * spec.head_dim,
            spec.hidden,
            bias=family.o_bias(hf),
        )
        self.backend, self.rope = build.attention, rope
        self.layer = AttentionLayer(
            index=index,
            group=group.id,
            local=group.layers.index(index),
            heads=self.qkv.heads,
            kv_heads=self.qkv.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=group.window,
        )

    def __call__(self, x: Bundle, ctx: ForwardContext) -> Partial:
        attn = ctx.attn[self.layer.group]
        q_THD = self.backend.write(self.layer, attn, self.qkv(x), self.rope)
        return self.o(self.backend.attend(self.layer, attn, q_THD, emit=(self.o.input,)))


class MLP:
    def __init__(self, index: int, build: BuildContext) -> None:
        spec, name = build.spec, f"model.layers.{index}.mlp"
        bias = family_of(spec.hf, "config.json").mlp_bias(spec.hf)
        self.gate_up = ColumnParallel(
            f"layers.{index}.mlp.gate_up",
            (f"{name}.gate_proj", f"{name}.up_proj"),
            build,
            spec.hidden,
            (spec.intermediate, spec.intermediate),
            bias=bias,
        )
        self.down = RowParallel(
            f"layers.{index}.mlp.down", f"{name}.down_proj", build, spec.intermediate, spec.hidden, bias=bias
        )

    def __call__(self, x: Bundle) -> Partial:
        return self.down(silu_and_mul(self.gate_up(x), emit=(self.down.input,)))


class Block:
    def __init__(self, index: int, build: BuildContext, group: KVGroup, rope: Rope) -> None:
        spec, name = build.spec, f"model.layers.{index}"
        eps = spec.hf.get("rms_norm_eps", 1e-6)
        self.boundary = build.collective.boundary
        self.input_norm = RMSNorm(f"{name}.input_layernorm", build, spec.hidden, eps)
        self.attention = Attention(index, build, group, rope)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", build, spec.hidden, eps)
        self.mlp = MLP(index, build)

    def __call__(
        self, x: torch.Tensor | Partial, residual_TC: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[Partial, torch.Tensor]:
        normed, residual_TC = self.boundary(x, residual_TC, self.input_norm, (self.attention.qkv.input,))
        x = self.attention(normed, ctx)
        normed, residual_TC = self.boundary(x, residual_TC, self.mlp_norm, (self.mlp.gate_up.input,))
        return self.mlp(normed), residual_TC


class Llama(Model):
    """Every family of `families.FAMILIES`."""

    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        spec = build.spec
        self._kv_groups = _group_layers(build)
        group_of = {layer: group for group in self._kv_groups for layer in group.layers}
        rope = build_rope(spec.hf, spec.head_dim, build.max_len, build.device)
        embeddings = VocabTable("model.embed_tokens", build, spec.vocab, spec.hidden)
        head = embeddings if spec.tied else VocabTable("lm_head", build, spec.vocab, spec.hidden)
        self.tables = [embeddings] if spec.tied else [embeddings, head]
        self.embedding, self.head = VocabParallelEmbedding(embeddings), LMHead(head)
        self.blocks = [Block(index, build, group_of[index], rope) for index in range(spec.layers)]
        self.norm = RMSNorm("model.norm", build, spec.hidden, spec.hf.get("rms_norm_eps", 1e-6))

    @classmethod
    def spec(cls, config: LlamaConfig) -> ModelSpec:
        if config.hf is not None:
            return read_spec(config.hf, "model.hf")
        return read_spec(read_config(config.path), f"model.path={config.path}: config.json")

    @classmethod
    def source(cls, config: LlamaConfig) -> ModelSource:
        return ModelSource(None if config.path is None else resolve(config.path), config.load == "dummy")

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        ignore = (*IGNORED, "lm_head.weight") if self.build.spec.tied else IGNORED
        load_weights(self._weights(), weights, ignore)
        for linear in self._linears():
            linear.finish()

    def init_dummy(self, seed: int) -> None:
        self.load(dummy_weights(self._weights(), seed, self.build.dtype, self.build.device))

    def embed(
        self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        embeds_TC = self.embedding(tokens_T)
        return embeds_TC if mask_T is None else torch.where(mask_T.unsqueeze(-1), extra_TC, embeds_TC)

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        boundary = self.build.collective.boundary
        x: torch.Tensor | Partial = embeds_TC
        residual_TC, tapped = None, {}
        for index, block in enumerate(self.blocks):
            x, residual_TC = block(x, residual_TC, ctx)
            if index in taps:
                # The next norm would add these anyway; a tap pays for one reduction of its own.
                x = self.build.collective.reduce(x)
                tapped[index] = x + residual_TC
        states, _ = boundary(x, residual_TC, self.norm)
        return Hidden(states[PLAIN].values, tapped)

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return self.head(states_BC)

    def _linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down)

    def _weights(self) -> Iterator[Weight]:
        for table in self.tables:
            yield from table.weights()
        for norm in (*(norm for block in self.blocks for norm in (block.input_norm, block.mlp_norm)), self.norm):
            yield from norm.weights()
        for linear in self._linears():
            yield from linear.weights()


def _group_layers(build: BuildContext) -> tuple[KVGroup, ...]:
    """Layers of one attention window share pages, on this rank's kv heads."""
    spec = build.spec
    _, kv_heads = local_heads(spec.heads, spec.kv_heads, build.collective.size)
    planes = tuple(Plane(name, (kv_heads, spec.head_dim), build.kv_dtype) for name in ("k", "v"))
    layers_of: dict[int, list[int]] = {}
    for index, window in enumerate(spec.windows or (0,) * spec.layers):
        layers_of.setdefault(window, []).append(index)
    return tuple(
        KVGroup(
            id=id,
            layers=tuple(layers),
            planes=planes,
            kind="window" if window else "full",
            window=window,
            page_tokens=build.page_tokens,
        )
        for id, (window, layers) in enumerate(layers_of.items())
    )
