"""Any decoder of transformers (Wolf et al. 2020): the library's forward pass, with this engine's attention, linear
layers, embeddings and RMSNorms in place of the library's modules.

Shapes: T tokens, B sampled rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    AttentionLayer,
    BuildContext,
    Checkpoint,
    ForwardContext,
    Hidden,
    KVGroup,
    Model,
    ModelSource,
    ModelSpec,
    Plane,
)
from dovetail.core.layers import KVScales, Taker, check_headers, check_tied, dummy_weights, load_weights
from dovetail.core.memory.sizing import group_layers
from dovetail.core.startup_notes import note
from dovetail.plugins.model.config import TransformersConfig
from dovetail.plugins.model.transformers.attention import PAGED, PagedAttention, Step
from dovetail.plugins.model.transformers.materialize import make_buffers, make_parameters
from dovetail.plugins.model.transformers.modules import StatesModule
from dovetail.plugins.model.transformers.plan import shrink, sum_experts
from dovetail.plugins.model.transformers.replace import Replacement, matrix_shapes
from dovetail.plugins.model.transformers.rope import fix_rope
from dovetail.plugins.model.transformers.spec import decoder_of, spec_of
from dovetail.plugins.model.transformers.trial import TRIAL, AttentionCall, trial
from dovetail.plugins.model.transformers.watch import RopeTables, Rotation, Watch, replace_rotation
from dovetail.plugins.model.transformers.weights import Source, headers_of, renamed, unread


class TransformersDecoder(Model):
    """Decoder of any class of transformers that lets attention be replaced."""

    capturable = False

    def __init__(self, config: TransformersConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        decoder = decoder_of(config)
        library, calls = decoder.library, decoder.calls
        self.library = library
        self.model = model = library.build(TRIAL, build.dtype)
        shapes = matrix_shapes(model)
        # On the meta device some operations, such as grouped matmuls, have no other dtype. It is converted afterwards,
        # because the library builds with the process's default dtype, which other threads may use.
        watched = library.build(TRIAL, build.dtype).to(torch.bfloat16)
        if build.collective.size > 1:
            for each in (model, watched):
                shrink(each, build.collective.size)
        with Watch(watched, frozenset(shapes), frozenset(call.module for call in calls)) as watch:
            calls = trial(library, watched, watch)
        model.config._attn_implementation = PAGED
        try:
            make_buffers(model, build.device)
        except ValueError as error:
            raise library.refused(str(error)) from error
        fix_rope(model)
        self.blocks = model.get_submodule(decoder.blocks)
        self.layers_of_engine = Replacement(model, build, decoder.blocks)
        self.layers_of_engine.replace_tables()
        self.layers_of_engine.merge_linears(shapes, watch.siblings())
        self.layers_of_engine.replace_linears(shapes)
        self.layers_of_engine.replace_norms()
        self.embedding = model.get_input_embeddings()
        self.step = Step()
        self.sinks: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        """Sinks as backends read them, and what returns the library's parameter."""
        self._kv_groups = _kv_groups(build, calls)
        tables = RopeTables(model, build.max_len, build.device)
        self.scales = [self._place_attention(call, watch.rotations.get(call.module), tables) for call in calls]
        self.own = list(make_parameters(model, build.device, build.collective))
        if build.collective.size > 1:
            sum_experts(model, build.collective)
        # The class applies scales and caps of logits in its forward, which thus runs without the body.
        prefix = model.base_model_prefix
        self.body = getattr(model, prefix)
        setattr(model, prefix, StatesModule())
        note(f"model=transformers runs {build.spec.architecture} with {self.layers_of_engine.words()}")

    @classmethod
    def spec(cls, config: TransformersConfig) -> ModelSpec:
        return spec_of(config)

    @classmethod
    def source(cls, config: TransformersConfig) -> ModelSource:
        return ModelSource(None if config.path is None else open_checkpoint(config.path), config.load == "dummy")

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        takers, headers = self._takers(), checkpoint.tensors()
        try:
            found = headers_of(self._named(takers, unread(headers)))
        except ConfigError:  # The library converts tensors, and may need their values: `load` has them.
            return
        check_headers(takers, found, checkpoint)

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        takers, openers = self._takers(), dict(weights)
        for head, embedding in self.model.all_tied_weights_keys.items():
            check_tied(openers, embedding, head)
        self._fill(takers, self._named(takers, openers.items()))

    def init_dummy(self, seed: int) -> None:
        takers = self._takers()
        self._fill(takers, dummy_weights(takers, seed, self.build.dtype, self.build.device))

    def embed(
        self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        embeds_TC = self.embedding(tokens_T)
        return embeds_TC if mask_T is None else torch.where(mask_T.unsqueeze(-1), extra_TC, embeds_TC)

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        tapped: dict[int, torch.Tensor] = {}
        # Padding may be past the last position, for which tables of learned positions have no row.
        positions_1T = ctx.positions_T.clamp(max=self.build.spec.max_len - 1).unsqueeze(0)
        with ExitStack() as hooks:
            for index in taps:
                hooks.enter_context(self.blocks[index].register_forward_hook(partial(_tap, tapped, index)))
            self.step.ctx = ctx
            hooks.callback(self.step.clear)
            (states_1TC, *_) = self.body(
                inputs_embeds=embeds_TC.unsqueeze(0), position_ids=positions_1T, use_cache=False, return_dict=False
            )
        return Hidden(states_1TC[0], tapped)

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=states_BC.unsqueeze(0), use_cache=False, return_dict=True).logits[0]

    def _place_attention(self, call: AttentionCall, rotation: Rotation | None, tables: RopeTables) -> KVScales:
        """`rotation`: what gives the layer's q and k. If the engine's kernels rotate the same way, they do."""
        build = self.build
        group = next(group for group in self._kv_groups if call.layer in group.layers)
        scales = KVScales(call.module, call.layer, build, build.spec.kv_heads, call.kv_heads)
        layer = AttentionLayer(
            index=call.layer,
            group=group.id,
            local=group.layers.index(call.layer),
            heads=call.heads,
            kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            scale=call.scale,
            window=call.window,
            k_scale=scales.k,
            v_scale=scales.v,
            soft_cap=call.soft_cap,
            sinks=self._sinks_of(call),
        )
        build.tune_attention(layer)
        module = self.model.get_submodule(call.module)
        rope = None if rotation is None else tables.of(rotation, call.head_dim)
        if rope is not None:
            replace_rotation(module, lambda function: lambda q, k, cos, sin: (q, k))
        module.paged = PagedAttention(build.attention, layer, self.step, rope)
        return scales

    def _sinks_of(self, call: AttentionCall) -> torch.Tensor | None:
        if not call.sinks:
            return None
        owner, _, name = call.sinks.rpartition(".")
        sinks_H = torch.empty(call.heads, dtype=torch.float32, device=self.build.device)
        self.sinks.append((sinks_H, partial(getattr, self.model.get_submodule(owner), name)))
        return sinks_H

    def _named(self, takers: list[Taker], source: Source) -> Source:
        """Yield tensors of a checkpoint under the names that this model takes."""
        wanted = {stored.name for taker in takers for stored in taker.stored}
        build = cache(partial(self.library.build, TRIAL, self.build.dtype))
        return renamed(self.model, source, wanted, self.layers_of_engine.transposed, build)

    def _takers(self) -> list[Taker]:
        scales = (weight for scales in self.scales for weight in scales.weights())
        layers = list(self.layers_of_engine.takers())
        # A bias of logits may be tied to a parameter (BERT).
        taken = {stored.name for taker in layers for stored in taker.stored}
        own = (taker for taker in self.own if taken.isdisjoint(stored.name for stored in taker.stored))
        return [*layers, *scales, *own]

    def _fill(self, takers: list[Taker], weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        load_weights(takers, weights)
        for linear in self.layers_of_engine.linears:
            linear.finish()
        for sinks_H, loaded in self.sinks:
            sinks_H.copy_(loaded())


def _tap(tapped: dict[int, torch.Tensor], index: int, block: nn.Module, inputs: Any, output: Any) -> None:
    states_1TC = output[0] if isinstance(output, tuple) else output
    tapped[index] = states_1TC[0]


def _kv_groups(build: BuildContext, calls: tuple[AttentionCall, ...]) -> tuple[KVGroup, ...]:
    shape = (calls[0].kv_heads, calls[0].head_dim)
    planes = tuple(Plane(name, shape, build.kv_dtype) for name in ("k", "v"))
    return group_layers([call.window for call in calls], planes, build.page_tokens, build.first_group)
