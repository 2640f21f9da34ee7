"""Drafts by a smaller model (Leviathan et al. 2023, Chen et al. 2023), which has KV pages of its own.

Prompts are fed to both models in the same steps. After that, the first pass of a proposal feeds the tokens that the
draft model has not seen: those that the target accepted or drew since. K - 1 passes over one token per row follow.
Shapes: B rows, T tokens, C channels, V vocabulary, K drafts, J joining sequences.
"""

from __future__ import annotations

import torch

from dovetail.core.checkpoint import located
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces import (
    Draft,
    DraftContext,
    FedTokens,
    Hidden,
    KVGroup,
    Model,
    ModelSource,
    ModelSpec,
    TargetView,
    Verify,
)
from dovetail.core.tokenizer import FILE, Tokenizer
from dovetail.core.worker.fill import fill, read_headers
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import DraftModelConfig
from dovetail.plugins.spec_decode.own_pages import OwnPages, last_states
from dovetail.plugins.spec_decode.tree import Passes, Siblings, Tree, as_draft, children, grower


class DraftModel(BuiltinDrafter):
    config: DraftModelConfig
    autoregressive = True
    model: Model

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

    def check_files(self, target: TargetView) -> None:
        with self.config.naming_its_model():
            model, source = self._build(target)
            if source.weights is not None:
                with located(source.weights):
                    model.check_checkpoint(source.weights)

    def _build(self, target: TargetView) -> tuple[Model, ModelSource]:
        """Return the draft model without weights, and its files."""
        part = self.config.model
        model_class = part.target()
        spec, source = model_class.spec(part.config), model_class.source(part.config)
        check_fit(f"model@spec_decode.model={part.name}", spec, source, target)
        quantizer = self.config.quant.build()
        read_headers(quantizer, source)
        return model_class(part.config, target.build_context(spec, quantizer, self.config.tp)), source

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.model, source = self._build(target)
        fill(self.model, source)
        spec = self.model.build.spec
        self.pages = OwnPages(target, self.window)
        self._tree = grower(self.config, target.build.device)
        self._last_id = spec.vocab - 1
        self._more_ids = target.build.spec.vocab - spec.vocab

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.model.kv_groups

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        self.pages.join(slots_J, computed_J)

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        # Proposals feed the tokens of other steps, as far as they are accepted.
        if fed.follow:
            self._feed(fed)

    def catch_up(self, fed: FedTokens, lengths_B: torch.Tensor) -> None:
        self._feed(fed, lengths_B)

    def _feed(self, fed: FedTokens, lengths_B: torch.Tensor | None = None) -> None:
        self.model.forward(self._embed(fed.ids_T), fed.ctx)
        self.pages.fed(fed, lengths_B)

    def propose(self, ctx: DraftContext) -> Draft:
        ids_T, forward, index_B = self.pages.catch_up(ctx)
        states_BC = last_states(self.model.forward(self._embed(ids_T), forward).states, index_B)
        count_B = (index_B < self.pages.window) * ctx.k
        if self.config.tree:
            return as_draft(self._grow(ctx, states_BC), count_B, ctx.k)
        drafts = [ctx.draw_from(self.model, self._logits, states_BC, 0)]
        for w in range(1, ctx.k):
            states_BC = self.model.forward(self._embed(drafts[-1]), self.pages.after(ctx, w)).states
            drafts.append(ctx.draw_from(self.model, self._logits, states_BC, w))
        return Draft(torch.stack(drafts, 1), count_B)

    def _grow(self, ctx: DraftContext, states_BC: torch.Tensor) -> Tree:
        passes = Passes(ctx, self.pages)

        def expand(level: int, tokens_BN: torch.Tensor, before_BN: torch.Tensor, count: int) -> Siblings:
            found = self.model.forward(self._embed(tokens_BN.flatten()), passes.lay_out(before_BN))
            return children(ctx, self._logits(found.states), level, count)

        return self._tree(lambda count: ctx.best(self._logits(states_BC), 0, count), expand)

    def _embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        # An id may be -1, where logits were NaN, or one that only the target has.
        return self.model.embed(ids_T.clamp(0, self._last_id))

    def _logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary."""
        logits_BV = self.model.logits(states_BC)
        if self._more_ids == 0:
            return logits_BV
        return torch.nn.functional.pad(logits_BV, (0, self._more_ids), value=float("-inf"))


def check_fit(name: str, spec: ModelSpec, source: ModelSource, target: TargetView) -> None:
    """Raise ConfigError for a draft model whose tokens or context are not the target's."""
    vocab = target.build.spec.vocab
    files = [one.checkpoint for one in (source, target.source)]
    texts = [None if one is None else one.text(FILE) for one in files]
    if None in texts:
        if spec.vocab != vocab:
            raise ConfigError(
                f"{name} has a vocabulary of {spec.vocab} tokens, and the model one of {vocab}: choose a draft model "
                f"of the same family (without a {FILE} of both, only equal sizes are accepted)"
            )
    elif texts[0] != texts[1]:
        ids, target_ids = (Tokenizer(one).ids() for one in files if one is not None)
        unlike = next((token for token, id in ids.items() if target_ids.get(token) != id), None)
        if unlike is not None or len(ids) < len(target_ids):
            token = unlike or next(token for token in target_ids if token not in ids)
            raise ConfigError(
                f"{name} has another tokenizer than the model: token {shown(token)} is id {ids.get(token)} in one and "
                f"{target_ids.get(token)} in the other; choose a draft model of the same family"
            )
    if spec.max_len < target.max_len:
        raise ConfigError(
            f"{name} has a context of {spec.max_len} tokens, and sequences may have {target.max_len}: set "
            f"engine.max_len={spec.max_len}, or choose another draft model"
        )
