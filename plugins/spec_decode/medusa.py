"""Drafts by heads that each predict one of the next tokens from the target's last hidden state (Medusa, Cai et al.
2024), with the tensor names of FasterDecoding/Medusa. Shapes: B rows, C hidden channels, V vocabulary, K drafts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    AcceptedPath,
    BuildContext,
    Draft,
    DraftContext,
    FedTokens,
    Hidden,
    ModelSource,
    TargetView,
    Verify,
)
from dovetail.core.layers import Linear, LMHead, Taker, VocabTable
from dovetail.core.worker.features import FeatureStore
from dovetail.core.worker.fill import fill, read_headers
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import MedusaConfig
from dovetail.plugins.spec_decode.head import Head, apply, check_head, check_tensors, replicated
from dovetail.plugins.spec_decode.medusa_files import MedusaShape, medusa_source, read_medusa
from dovetail.plugins.spec_decode.tree import Siblings, Tree, as_draft, grower


class MedusaHeads(Head):
    """Residual blocks of each head, then logits of its own or none."""

    ignored = ()

    def __init__(self, build: BuildContext, shape: MedusaShape) -> None:
        super().__init__(build)
        hidden, vocab = build.spec.hidden, build.spec.vocab
        self.blocks = [
            [replicated(f"{head}.{block}.linear", build, hidden, hidden, bias=True) for block in range(shape.layers)]
            for head in range(shape.heads)
        ]
        names = [f"{head}.{shape.layers}" for head in range(shape.heads)] if shape.own else []
        self.tables = [VocabTable(name, build, vocab, hidden, lookup=False, logits=True) for name in names]
        self.heads = [LMHead(table, build) for table in self.tables]

    def linears(self) -> Iterator[Linear]:
        for blocks in self.blocks:
            yield from blocks

    def others(self) -> Iterator[Taker]:
        for table in self.tables:
            yield from table.weights()

    def states(self, head: int, states_BC: torch.Tensor) -> torch.Tensor:
        """Return the states from which logits of this head are made."""
        for linear in self.blocks[head]:
            states_BC = states_BC + F.silu(apply(linear, states_BC))
        return states_BC


class Medusa(BuiltinDrafter):
    config: MedusaConfig

    @property
    def lookahead(self) -> int:
        return self.config.drafts

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def verify(self) -> Verify:  # type: ignore[override]
        return self.config.verify

    def check_files(self, target: TargetView) -> None:
        check_tensors(*self._build(target))

    def _build(self, target: TargetView) -> tuple[MedusaHeads, ModelSource]:
        """Return the heads without weights, and their files."""
        shape, source, spec = read_medusa(self.config), medusa_source(self.config), target.build.spec
        check_head("medusa", shape.hidden or spec.hidden, shape.vocab or spec.vocab, target)
        if self.depth > shape.heads:
            raise ConfigError(
                f"spec_decode.lookahead={self.depth}, and there are {shape.heads} heads, one for each draft: set "
                f"spec_decode.lookahead={shape.heads}"
            )
        quantizer = self.config.quant.build()
        read_headers(quantizer, source)
        return MedusaHeads(target.build_context(spec, quantizer, self.config.tp), shape), source

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self.layer, source = self._build(target)
        fill(self.layer, source)
        self.features = FeatureStore(target, self.lookahead + 1, target.build.spec.hidden)
        self._tree = grower(self.config, target.build.device, shared=True)

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        self.features.keep(fed, hidden.states)

    def propose(self, ctx: DraftContext) -> Draft:
        # The last token is sampled, and not fed yet.
        feature_BC = self.features.at(ctx.slots_B, ctx.lengths_B - 2)
        count_B = (ctx.lengths_B > 1) * ctx.k
        if self.config.tree:
            return as_draft(self._grow(ctx, feature_BC), count_B, ctx.k)
        drafts = [self._draw(ctx, feature_BC, w) for w in range(ctx.k)]
        return Draft(torch.stack(drafts, 1), count_B)

    def keep(self, path: AcceptedPath) -> None:
        self.features.move(path)

    def _grow(self, ctx: DraftContext, feature_BC: torch.Tensor) -> Tree:
        """A head knows no other draft, so all drafts of a level have the same children."""

        def best(level: int, count: int) -> Siblings:
            return ctx.best(self._logits(level, feature_BC), level, count)

        def expand(level: int, tokens_BN: torch.Tensor, before_BN: torch.Tensor, count: int) -> Siblings:
            tokens, confidence = (found[:, None].expand(-1, tokens_BN.shape[1], -1) for found in best(level, count))
            return tokens, confidence

        return self._tree(lambda count: best(0, count), expand)

    def _draw(self, ctx: DraftContext, feature_BC: torch.Tensor, w: int) -> torch.Tensor:
        states_BC = self.layer.states(w, feature_BC)
        if self.layer.heads:
            return ctx.draw(self.layer.heads[w](states_BC), w)
        return ctx.draw_from(self.target, self.target.logits, states_BC, w)

    def _logits(self, head: int, feature_BC: torch.Tensor) -> torch.Tensor:
        states_BC = self.layer.states(head, feature_BC)
        return self.layer.heads[head](states_BC) if self.layer.heads else self.target.logits(states_BC)
