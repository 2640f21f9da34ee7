"""Drafts by a layer that predicts the target's next hidden states: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025).

Slot p of its pages holds what follows from token p and the feature of p - 1: the target's hidden state, or in later
passes of a proposal the one that the layer predicted. Shapes: B rows, T tokens, F channels of a feature, K drafts.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    AcceptedPath,
    Draft,
    DraftContext,
    FedTokens,
    Hidden,
    KVGroup,
    ModelSource,
    TargetView,
    Verify,
)
from dovetail.core.startup_notes import note
from dovetail.core.worker.features import FeatureStore
from dovetail.core.worker.fill import fill, read_headers
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import Eagle3Config, EagleConfig, ParallelConfig
from dovetail.plugins.spec_decode.eagle_files import EagleShape, read_eagle, read_eagle3
from dovetail.plugins.spec_decode.eagle_layer import Eagle1Layer, Eagle3Layer, EagleLayer
from dovetail.plugins.spec_decode.head import check_head, check_tensors
from dovetail.plugins.spec_decode.head_files import source_of
from dovetail.plugins.spec_decode.own_pages import OwnPages, last_states
from dovetail.plugins.spec_decode.tree import Passes, Siblings, Tree, as_draft, children, grower


class Eagle(BuiltinDrafter):
    """EAGLE and EAGLE-2: the feature is the state after the target's final norm."""

    config: EagleConfig | Eagle3Config | ParallelConfig
    autoregressive = True
    follows_features = True
    resumes = False
    name: ClassVar[str] = "eagle"
    layer_class: ClassVar[type[EagleLayer]] = Eagle1Layer

    @property
    def lookahead(self) -> int:
        return self.config.drafts

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def window(self) -> int:  # type: ignore[override]
        # As many tokens as a step with drafts can add.
        return self.depth + 1

    @property
    def verify(self) -> Verify:  # type: ignore[override]
        return self.config.verify

    def shape(self) -> EagleShape:
        return read_eagle(self.config)

    def check_files(self, target: TargetView) -> None:
        layer, source = self._build(target, self.shape())
        check_tensors(layer, source)
        layer.check_values(source)

    def _build(self, target: TargetView, shape: EagleShape) -> tuple[EagleLayer, ModelSource]:
        """Return the layer without weights, and its files."""
        source = source_of(self.config)
        check_head(self.name, shape.spec.hidden, shape.target_vocab, target)
        shape.tapped(target.build.spec.layers)
        check_target(self.name, shape, target)
        quantizer = self.config.quant.build()
        read_headers(quantizer, source)
        headers = {} if source.weights is None else source.weights.tensors()
        build = target.build_context(shape.spec, quantizer, self.config.tp)
        return self.layer_class(build, shape, headers.__contains__), source

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        shape, spec = self.shape(), target.build.spec
        self.layer, source = self._build(target, shape)
        fill(self.layer, source)
        if not self.config.tree:  # Levels of trees have more rows than there are slots.
            self.layer.reserve(target.max_seqs)
        self.taps = shape.tapped(spec.layers)
        self._allocate(target, shape.fused * spec.hidden)

    def _allocate(self, target: TargetView, channels: int) -> None:
        """Allocate the state of slots. `channels`: those of a feature."""
        self.pages = OwnPages(target, self.window, resumes=False)
        self.features = FeatureStore(target, self.lookahead + 1, channels)
        self._last_id = target.build.spec.vocab - 1
        self._tree = grower(self.config, target.build.device)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.layer.groups

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        self.pages.join(slots_J, computed_J)

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        parts_TC = self.features_of(hidden)
        if fed.follow:
            before_TF = self.features.before(fed, parts_TC[0] if len(parts_TC) == 1 else torch.cat(parts_TC, -1))
            self.layer.forward(self._embed(fed.ids_T), self.layer.fuse(before_TF), fed.ctx)
            self.pages.fed(fed)
        self.features.keep(fed, *parts_TC)

    def features_of(self, hidden: Hidden) -> tuple[torch.Tensor, ...]:
        """Return the target's features of a step, in tensors whose channels are next to each other in a feature."""
        return (hidden.states,)

    def propose(self, ctx: DraftContext) -> Draft:
        ids_T, forward, index_B = self.pages.catch_up(ctx)
        slots_T = ctx.slots_B.repeat_interleave(self.pages.window)
        feature_TF = self.features.at(slots_T, forward.positions_T - 1)
        predicted_TC, states_TC = self.layer.forward(self._embed(ids_T), self.layer.fuse(feature_TF), forward)
        predicted_BC, states_BC = last_states(predicted_TC, index_B), last_states(states_TC, index_B)
        count_B = (index_B < self.pages.window) * ctx.k
        if self.config.tree:
            return as_draft(self._grow(ctx, predicted_BC, states_BC), count_B, ctx.k)
        drafts = [self._draw(ctx, states_BC, 0)]
        for w in range(1, ctx.k):
            embeds_BC = self._embed(drafts[-1])
            predicted_BC, states_BC = self.layer.forward(embeds_BC, predicted_BC, self.pages.after(ctx, w))
            drafts.append(self._draw(ctx, states_BC, w))
        return Draft(torch.stack(drafts, 1), count_B)

    def keep(self, path: AcceptedPath) -> None:
        self.features.move(path)

    def _grow(self, ctx: DraftContext, predicted_BC: torch.Tensor, states_BC: torch.Tensor) -> Tree:
        passes = Passes(ctx, self.pages)
        # Features that the layer predicted, of the drafts that got children in the level before.
        predicted_BNC = predicted_BC[:, None]

        def expand(level: int, tokens_BN: torch.Tensor, before_BN: torch.Tensor, count: int) -> Siblings:
            nonlocal predicted_BNC
            rows, drafts = tokens_BN.shape
            if level == 1:
                predicted_BNC = predicted_BNC.expand(-1, drafts, -1)
            else:
                predicted_BNC = predicted_BNC.gather(1, before_BN[:, :, None].expand(-1, -1, predicted_BC.shape[1]))
            embeds_MC, layout = self._embed(tokens_BN.flatten()), passes.lay_out(before_BN)
            predicted_MC, states_MC = self.layer.forward(embeds_MC, predicted_BNC.flatten(0, 1), layout)
            predicted_BNC = predicted_MC.view(rows, drafts, -1)
            return children(ctx, self._logits(states_MC), level, count)

        return self._tree(lambda count: ctx.best(self._logits(states_BC), 0, count), expand)

    def _embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.target.embed(ids_T.clamp(0, self._last_id))  # -1 = logits were NaN.

    def _draw(self, ctx: DraftContext, states_BC: torch.Tensor, w: int) -> torch.Tensor:
        own = self.layer.logits(states_BC)
        return ctx.draw_from(self.target, self.target.logits, states_BC, w) if own is None else ctx.draw(own, w)

    def _logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        own = self.layer.logits(states_BC)
        return self.target.logits(states_BC) if own is None else own


class Eagle3(Eagle):
    """EAGLE-3: the feature is made of the outputs of three layers of the target."""

    config: Eagle3Config | ParallelConfig
    name = "eagle3"
    layer_class = Eagle3Layer

    def shape(self) -> EagleShape:
        return read_eagle3(self.config)

    def features_of(self, hidden: Hidden) -> tuple[torch.Tensor, ...]:
        return tuple(hidden.taps[layer] for layer in self.taps)


def check_target(name: str, shape: EagleShape, target: TargetView) -> None:
    """Raise ConfigError for a target that no EAGLE head can follow; note one for which this head was not trained."""
    check_windows(name, target)
    if shape.spec.max_len < target.max_len:
        note(
            f"spec_decode={name}: the head was made for {shape.spec.max_len} positions, and sequences may have "
            f"{target.max_len}: fewer drafts may be accepted past that. engine.max_len={shape.spec.max_len} avoids it"
        )


def check_windows(name: str, target: TargetView) -> None:
    """Raise ConfigError for a target with attention windows."""
    if any(target.build.spec.windows):
        raise ConfigError(
            f"spec_decode={name} follows a model without attention windows, and this one has some: a cached prefix may "
            "lack the pages of the last token, which is fed again for its hidden state. Set spec_decode=draft_model or "
            "spec_decode=ngram"
        )
