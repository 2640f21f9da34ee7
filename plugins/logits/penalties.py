"""Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties (OpenAI's).

Counts are computed from the token table on the device in each step, so drafts, preemption and forks need no updates.
N logits rows, V vocabulary, L history.
"""

from __future__ import annotations

import torch

from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request


class Penalties(LogitsProcessor):
    serves = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    graph_safe = True

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.repetition_S = torch.ones(slots, device=device)
        self.presence_S = torch.zeros(slots, device=device)
        self.frequency_S = torch.zeros(slots, device=device)
        if device.type == "cuda":
            from dovetail.plugins.logits.kernels import PROGRAMS

            self._counts = torch.zeros(PROGRAMS, vocab, dtype=torch.int32, device=device)

    def wants(self, request: Request) -> bool:
        p = request.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def join(self, slot: int, request: Request) -> None:
        # So that logits stay finite.
        self.repetition_S[slot] = max(request.params.repetition_penalty, 1e-30)
        self.presence_S[slot] = request.params.presence_penalty
        self.frequency_S[slot] = request.params.frequency_penalty

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        if not logits_NV.is_cuda or not ctx.max_length:
            return self.apply_reference(logits_NV, ctx)
        from dovetail.plugins.logits.kernels import penalise_triton

        logits_NV = logits_NV.contiguous()
        penalise_triton(logits_NV, ctx, self.repetition_S, self.presence_S, self.frequency_S, self._counts)
        return logits_NV

    def apply_reference(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        history_NL = ctx.tokens_SL[ctx.slots_N, : ctx.max_length].long()
        place_L = torch.arange(history_NL.shape[1], device=history_NL.device)
        known_NL = place_L < ctx.lengths_N[:, None]
        output_NL = known_NL & (place_L >= ctx.prompt_len_S[ctx.slots_N][:, None])
        seen_NV = torch.zeros_like(logits_NV).scatter_add_(1, history_NL, known_NL.to(logits_NV.dtype))
        count_NV = torch.zeros_like(logits_NV).scatter_add_(1, history_NL, output_NL.to(logits_NV.dtype))

        repetition_N1 = self.repetition_S[ctx.slots_N][:, None]
        penalised_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        logits_NV = torch.where(seen_NV > 0, penalised_NV, logits_NV)
        logits_NV = logits_NV - self.frequency_S[ctx.slots_N][:, None] * count_NV
        return logits_NV - self.presence_S[ctx.slots_N][:, None] * (count_NV > 0)
