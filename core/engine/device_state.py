"""Persistent state of every slot on the device. Plans change it by diffs; steps read lengths, tokens and drafts from
it, so the host need not know them. S slots (one more as scratch for padding), L token capacity, P pages per table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from dovetail.core.engine.random import sequence_key
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Draft, DraftContext, JoinBlob, KVGroup, PageDelta, SamplingParams


@dataclass(slots=True)
class SlotInfo:
    """What this rank's host side knows of a slot's sequence. Written at join."""

    uid: int
    epoch: int
    blob: JoinBlob
    processors: tuple[str, ...]
    """Logits processors it wants."""

    @property
    def params(self) -> SamplingParams:
        return self.blob.request.params


class DeviceState:
    def __init__(
        self, *, slots: int, max_len: int, lookahead: int, groups: Seq[KVGroup], device: torch.device, seed: int
    ) -> None:
        self.device, self.seed, self.scratch = device, seed, slots
        rows = slots + 1
        # Drafts stand behind the known tokens, and padded draft positions may reach one lookahead past them.
        self.tokens_SL = torch.zeros(rows, max_len + 2 * lookahead + 1, dtype=torch.int32, device=device)
        self.computed_S = torch.zeros(rows, dtype=torch.int64, device=device)
        """Tokens whose KV is in the cache, exactly; a step of the slot starts here."""
        self.drafts_S = torch.zeros(rows, dtype=torch.int64, device=device)
        """Drafts standing in tokens_SL behind the last sampled token."""
        self.prompt_len_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.key_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature_S = torch.zeros(rows, device=device)
        self.top_k_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p_S = torch.ones(rows, device=device)
        self.min_p_S = torch.zeros(rows, device=device)
        self.tables: dict[int, torch.Tensor] = {}
        """group -> int32 [S + 1, P]; unset entries point at the scratch page 0."""
        for group in groups:
            pages = -(-(max_len + 2 * lookahead + 1) // group.page_tokens)
            self.tables[group.id] = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.draft_probs_SKV: torch.Tensor | None = None
        """Set by the first drafter output that carries probabilities."""
        self.slots: dict[int, SlotInfo] = {}

    def upload(self, data: Seq[int] | Seq[float], dtype: torch.dtype) -> torch.Tensor:
        host = torch.tensor(data, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def join(self, slot: int, info: SlotInfo, computed: int) -> None:
        blob, params = info.blob, info.params
        self.slots[slot] = info
        self.tokens_SL[slot, : len(blob.tokens)] = self.upload(blob.tokens, torch.int32)
        self.computed_S[slot] = computed
        self.drafts_S[slot] = 0
        self.prompt_len_S[slot] = len(blob.request.prompt_ids)
        self.key_S[slot] = sequence_key(self.seed, blob.request, blob.sample)
        self.temperature_S[slot] = params.temperature
        self.top_k_S[slot] = params.top_k
        self.top_p_S[slot] = params.top_p
        self.min_p_S[slot] = params.min_p
        for table in self.tables.values():
            table[slot].zero_()

    def leave(self, slot: int) -> None:
        del self.slots[slot]

    def set_pages(self, deltas: Seq[PageDelta]) -> None:
        for group, table in self.tables.items():
            mine = [d for d in deltas if d.group == group]
            if mine:
                packed = self.upload([(d.slot, d.index, d.page) for d in mine], torch.int64)  # type: ignore[arg-type]
                table[packed[:, 0], packed[:, 1]] = packed[:, 2].int()

    def set_drafts(self, slot: int, tokens: Seq[int]) -> None:
        """Drafts found on the host. Only with one plan in flight is the length known here."""
        place = self.computed_S[slot] + 1 + torch.arange(len(tokens), device=self.device)
        self.tokens_SL[slot, place] = self.upload(tokens, torch.int32)
        self.drafts_S[slot] = len(tokens)

    def take_draft(self, ctx: DraftContext, draft: Draft) -> None:
        """Stand a drafter's guesses behind each row's last token. What it left behind them is fed too: any valid token
        will do there."""
        if draft.parents_BK is not None:
            raise CapabilityError(["the drafter gave a tree of guesses, and this version verifies chains alone"])
        step_K = torch.arange(ctx.k, device=self.device)
        place = ctx.lengths_B[:, None] + step_K
        guesses = torch.where(step_K < draft.count_B[:, None], draft.tokens_BK, 0)
        self.tokens_SL[ctx.slots_B[:, None], place] = guesses.int()
        self.drafts_S[ctx.slots_B] = draft.count_B.long()
        if draft.probs_BKV is not None:
            if self.draft_probs_SKV is None:
                shape = (self.tokens_SL.shape[0], *draft.probs_BKV.shape[1:])
                self.draft_probs_SKV = torch.zeros(shape, device=self.device)
            self.draft_probs_SKV[ctx.slots_B] = draft.probs_BKV
