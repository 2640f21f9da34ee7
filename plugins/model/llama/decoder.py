"""Decoder of Llama and related models (Touvron et al. 2023): pre-norm blocks of attention and an MLP (block.py).
families.py has the differences between model families.

Shapes: T tokens, B sampled rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.interfaces import (
    PLAIN,
    BuildContext,
    Checkpoint,
    ForwardContext,
    Hidden,
    KVGroup,
    Layers,
    Model,
    ModelSource,
    ModelSpec,
    MTPLayer,
    Partial,
    Plane,
)
from dovetail.core.layers import (
    Linear,
    LMHead,
    Taker,
    VocabParallelEmbedding,
    VocabTable,
    build_rope,
    check_headers,
    check_tied,
    dummy_weights,
    kind_of,
    load_weights,
    local_heads,
    one_of_each,
    run_layers,
    unstacked,
    unstacked_headers,
    without,
)
from dovetail.core.memory.sizing import group_layers
from dovetail.core.ops.latents import latent_planes
from dovetail.core.ops.rehearsal import rehearsing
from dovetail.core.startup_notes import note
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.block import Block, norm_of
from dovetail.plugins.model.llama.experts import SparseMLP, SparseOptions, stacks_of, with_router
from dovetail.plugins.model.llama.families import mtp_layers, read_model, spec_of
from dovetail.plugins.model.llama.family import Layout, Names
from dovetail.plugins.model.llama.mtp import LlamaMTPLayer

Tensor = TypeVar("Tensor")
"""Opener or header of a checkpoint tensor."""


class Llama(Model):
    """Decoder for all families in `families.FAMILIES`."""

    def __init__(self, config: LlamaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        spec = build.spec
        self.layout = layout = read_model(spec.hf, "config.json")[1]
        if layout.left_out:
            note(f"model=llama: {layout.architecture} runs without its part for images: requests have text only")
        self._kv_groups = _kv_groups(build)
        group_of = {layer: group for group in self._kv_groups for layer in group.layers}
        # Beside the longest sequence, tables have positions of drafts.
        longest = min(build.max_len, build.spec.max_len)
        full = local = self._rope = build_rope(layout.rope, build.max_len, build.device, longest)
        if layout.window_rope != layout.rope:
            local = build_rope(layout.window_rope, build.max_len, build.device, longest)
        embeddings = VocabTable(layout.names.embedding, build, spec.vocab, spec.hidden, logits=spec.tied and spec.head)
        self.tables = [embeddings]
        # Rounded as the model's training did.
        scale = float(torch.tensor(layout.embed_scale, dtype=build.dtype, device="cpu")) * layout.factors.embedding
        self.embedding = VocabParallelEmbedding(embeddings, scale)
        self.head: LMHead | None = None
        if spec.head:
            if not spec.tied:
                self.tables.append(
                    VocabTable(layout.names.head, build, spec.vocab, spec.hidden, lookup=False, logits=True)
                )
            bias = f"{layout.names.head}.bias" if layout.head_bias else None
            self.head = LMHead(self.tables[-1], build, bias, layout.logit_cap, layout.factors.logits)
        self._sparse_options = SparseOptions(config.routing == "uniform", config.shared_experts == "apart")
        self.blocks: list[Block] = []
        for index in range(spec.layers):
            group, before = group_of[index], self.blocks[-1].after if self.blocks else None
            rope = local if group.window else full if layout.rotates_full else None
            self.blocks.append(Block(index, build, layout, group, rope, before, self._sparse_options))
        self.norm = norm_of(layout.names.norm, build, layout)

    @cached_property
    def _kinds(self) -> list[Hashable]:
        """The kind of each block. Parameters have their final types once they are loaded."""
        return [
            kind_of(attention.layer, (*attention.products, *mlp.linears), getattr(mlp, "experts", None))
            for attention, mlp in ((block.attention, block.mlp) for block in self.blocks)
        ]

    @classmethod
    def spec(cls, config: LlamaConfig) -> ModelSpec:
        return spec_of(config)

    @classmethod
    def source(cls, config: LlamaConfig) -> ModelSource:
        return ModelSource(None if config.path is None else open_checkpoint(config.path), config.load == "dummy")

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        headers = dict(self._named(checkpoint.tensors().items()))
        if (experts := self.layout.experts) is not None:
            headers = with_router(headers.items(), experts.names)
            found = unstacked_headers(headers.items(), stacks_of(experts.names), experts.rule.experts)
            headers = dict(without(found, self._elsewhere))
        check_headers(self._weights(), headers, checkpoint, self._ignored, self._ignored_parts)

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        named = dict(self._named(weights))
        if self.build.spec.tied:
            check_tied(named, *(f"{name}.weight" for name in (self.layout.names.embedding, self.layout.names.head)))
        weights = named.items()
        if (experts := self.layout.experts) is not None:
            weights = with_router(weights, experts.names).items()
            weights = unstacked(weights, stacks_of(experts.names), experts.rule.experts)
            weights = without(weights, self._elsewhere)
        load_weights(self._weights(), weights, self._ignored, self._ignored_parts)
        for linear in self._linears():
            linear.finish()
        for sparse in self._sparse():
            sparse.finish()

    def init_dummy(self, seed: int) -> None:
        self.load(dummy_weights(self._weights(), seed, self.build.dtype, self.build.device))

    def embed(
        self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        embeds_TC = self.embedding(tokens_T)
        return embeds_TC if mask_T is None else torch.where(mask_T.unsqueeze(-1), extra_TC, embeds_TC)

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        return run_layers(self.layers(embeds_TC, ctx, taps))

    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        collective, factor = self.build.collective, self.layout.factors.block
        # Residuals are divided by the factor of what blocks add, which thus needs no product. Norms undo the division.
        x: torch.Tensor | Partial = embeds_TC if factor == 1.0 else embeds_TC / factor
        residual, tapped = None, {}
        indices = one_of_each(self._kinds, taps) if rehearsing() else range(len(self.blocks))
        for index in indices:
            if index in ctx.skip:
                continue
            x, residual = yield from self.blocks[index](x, residual, ctx)
            if index in taps:
                # The next boundary would add these anyway; a tap costs one separate reduction.
                x_TC = yield partial(collective.reduce, x)
                whole_TC = yield partial(collective.whole, residual)
                after = self.blocks[index].after
                added_TC = x_TC if after is None else after(x_TC)[0][PLAIN].values
                states_TC = added_TC + whole_TC
                x, tapped[index] = x_TC, states_TC if factor == 1.0 else states_TC * factor
        after = self.blocks[-1].after
        states, _ = yield lambda: collective.boundary(x, residual, self.norm, (PLAIN,), after)
        return Hidden(states[PLAIN].values, tapped)

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return self.head(states_BC)

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.head.local(states_BC)

    def mtp_layer(self, build: BuildContext) -> MTPLayer:
        index = self.build.spec.layers
        groups = tuple(replace(group, layers=(index,)) for group in _kv_groups(build))
        block = Block(index, build, self.layout, groups[0], self._rope, None, self._sparse_options)
        return LlamaMTPLayer(build, self.build.spec, self.layout, index, groups, block)

    @property
    def _ignored(self) -> tuple[str, ...]:
        """Ends of names of checkpoint tensors that have no use."""
        spec, head = self.build.spec, self.layout.names.head
        unused = () if spec.head and not spec.tied else (f"{head}.weight", f"{head}.bias")
        return (*self.layout.ignored, *unused)

    @property
    def _ignored_parts(self) -> tuple[str, ...]:
        """Beginnings of names of checkpoint tensors that have no use: layers for multi-token prediction, which follow
        the last one, and parts other than the decoder."""
        count, layers = mtp_layers(self.build.spec.hf), self.build.spec.layers
        predictors = (f"{self.layout.names.layer.format(layers + index)}." for index in range(count))
        return (*predictors, *self.layout.left_out)

    @property
    def _elsewhere(self) -> frozenset[str]:
        """Prefixes of the matrices of experts that other ranks load."""
        return frozenset[str]().union(*(sparse.experts.elsewhere for sparse in self._sparse()))

    def _named(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return (name that layers use, tensor)."""
        tensors = _renamed(tensors, self.layout)
        return tensors if self.build.spec.head else _with_prefix(tensors, self.layout.names)

    def _linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from (*block.attention.linears, *block.mlp.linears)

    def _sparse(self) -> list[SparseMLP]:
        return [block.mlp for block in self.blocks if isinstance(block.mlp, SparseMLP)]

    def _weights(self) -> Iterator[Taker]:
        norms = (norm for block in self.blocks for norm in block.norms)
        attentions = (block.attention for block in self.blocks)
        head = () if self.head is None else (self.head,)
        for layer in (*self.tables, *head, *norms, self.norm, *attentions, *self._linears(), *self._sparse()):
            yield from layer.weights()


def _renamed(tensors: Iterable[tuple[str, Tensor]], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a decoder within a larger model the names that they have on their own."""
    for name, tensor in tensors:
        beginning, new = next((pair for pair in layout.renames if name.startswith(pair[0])), ("", ""))
        yield new + name.removeprefix(beginning), tensor


def _with_prefix(tensors: Iterable[tuple[str, Tensor]], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Add the common prefix of weight names, which checkpoints saved without a head lack."""
    prefix = f"{names.embedding.partition('.')[0]}."
    for name, tensor in tensors:
        yield name if name.startswith((prefix, names.head)) else prefix + name, tensor


def _kv_groups(build: BuildContext) -> tuple[KVGroup, ...]:
    """Return groups whose planes have this rank's kv heads."""
    spec = build.spec
    windows = spec.windows or (0,) * spec.layers
    if spec.mla is not None:
        planes = latent_planes(spec.mla, build.kv_dtype, build.dtype)
        groups = group_layers(windows, planes, build.page_tokens, build.first_group)
        return tuple(replace(group, kind="mla") for group in groups)
    _, kv_heads = local_heads(spec.heads, spec.kv_heads, build.collective.size)
    planes = tuple(Plane(name, (kv_heads, spec.head_dim), build.kv_dtype) for name in ("k", "v"))
    return group_layers(windows, planes, build.page_tokens, build.first_group)
