"""Drafts by a smaller model (Leviathan et al. 2023, Chen et al. 2023), which has KV pages of its own.

Prompts are fed to both models in the same steps. After that, the first pass of a proposal feeds the tokens that the
draft model has not seen: those that the target accepted or drew since. K - 1 passes over one token per row follow.
Shapes: B rows, S slots, K drafts, J joining sequences.
"""

from __future__ import annotations

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Draft, DraftContext, Drafter, FedTokens, Hidden, KVGroup, Model, TargetView, Verify
from dovetail.core.worker.fill import fill, read_headers
from dovetail.plugins.spec_decode.config import DraftModelConfig


class DraftModel(Drafter):
    config: DraftModelConfig
    model: Model

    @property
    def lookahead(self) -> int:
        return self.config.lookahead

    @property
    def verify(self) -> Verify:  # type: ignore[override]
        return self.config.verify

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        part = self.config.model
        model_class = part.target()
        spec, source = model_class.spec(part.config), model_class.source(part.config)
        if spec.max_len < target.max_len:
            raise ConfigError(
                f"model@spec_decode.model={part.name} has a context of {spec.max_len} tokens, and sequences may have "
                f"{target.max_len}: set engine.max_len={spec.max_len}, or choose another draft model"
            )
        quantizer = self.config.quant.build()
        read_headers(quantizer, source)
        self.model = model_class(part.config, target.build_context(spec, quantizer))
        fill(self.model, source)
        self.known_S = torch.zeros(target.max_seqs + 1, dtype=torch.int64, device=target.build.device)
        """Number of tokens whose KV is in the draft model's pages."""
        self._at_S = torch.zeros_like(self.known_S)
        """Position of the next pass."""

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.model.kv_groups

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        self.known_S[slots_J] = computed_J

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        rows = len(fed.slots_B)
        if fed.decodes == rows:
            return  # The next proposal feeds these tokens, as far as they are accepted.
        self.model.forward(self.model.embed(fed.ids_T), fed.ctx)
        count_B = fed.row_start_B1.diff()
        first_B = fed.kv_len_B - count_B
        # Of a decode row only the first token is certain to be accepted.
        decodes_B = torch.arange(rows, device=count_B.device) < fed.decodes
        certain_B = first_B + torch.where(decodes_B, count_B.clamp_max(1), count_B)
        known_B = self.known_S[fed.slots_B]
        # The KV after a gap is wrong.
        self.known_S[fed.slots_B] = torch.where(known_B >= first_B, torch.maximum(known_B, certain_B), known_B)

    def propose(self, ctx: DraftContext) -> Draft:
        slots_B, rows, model = ctx.slots_B, len(ctx.slots_B), self.model
        # As many as a step with drafts can add. After steps without drafts several proposals catch up.
        window = self.lookahead + 1
        last_B = ctx.lengths_B - 1
        first_B = torch.minimum(self.known_S[slots_B], last_B)
        self._at_S[slots_B] = first_B
        ids_T, forward = ctx.lay_out(self._at_S, window)
        states_BWC = model.forward(model.embed(ids_T), forward).states.view(rows, window, -1)
        self.known_S[slots_B] = torch.minimum(first_B + window, ctx.lengths_B)
        index_B = last_B - first_B
        states_BC = states_BWC[torch.arange(rows, device=slots_B.device), index_B.clamp_max(window - 1)]
        drafts = [ctx.draw(model.logits(states_BC), 0)]
        for w in range(1, ctx.k):
            self._at_S[slots_B] = last_B + w
            _, forward = ctx.lay_out(self._at_S, 1)
            states_BC = model.forward(model.embed(drafts[-1].clamp_min(0)), forward).states
            drafts.append(ctx.draw(model.logits(states_BC), w))
        return Draft(torch.stack(drafts, 1), (index_B < window) * ctx.k)
