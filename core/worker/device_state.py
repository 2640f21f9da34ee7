"""Persistent state of every slot on the device. Plans change it by diffs; steps read lengths, tokens and drafts from
it, so the host need not know them. S slots (one more as scratch for padding), L token capacity, P pages per table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Draft, DraftContext, JoinBlob, KVGroup, SamplingParams, StepPlan
from dovetail.core.ops.random import sequence_key
from dovetail.core.worker.upload import Upload, float_bits, floats

if TYPE_CHECKING:
    from dovetail.core.worker.upload import Section


ALIGNED = 64
"""Numbers after which another column of slots may begin: what kernels are told of a pointer is as of a new tensor."""


@dataclass(slots=True)
class SlotInfo:
    """What this rank's host side knows of a slot's sequence. Written at join."""

    uid: int
    epoch: int
    blob: JoinBlob
    random: bool = field(init=False)
    """Not greedy."""
    filtered: bool = field(init=False)
    """Random, and by top-k, top-p or min-p not from the whole vocabulary."""
    plain: bool = field(init=False)
    """Drawn by its logits and what stands in the device state alone, as captured draws are."""

    def __post_init__(self) -> None:
        params = self.params
        self.random = params.temperature > 0
        self.filtered = self.random and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.plain = not self.processors and params.logprobs is None

    @property
    def params(self) -> SamplingParams:
        return self.blob.request.params

    @property
    def adapter(self) -> int:
        """Its adapter's slot; -1 = none."""
        return self.blob.adapter

    @property
    def processors(self) -> tuple[str, ...]:
        """Logits processors it wants."""
        return self.blob.request.processors


@dataclass(slots=True)
class UnusualSlots:
    """Whose sequences need more than most do, so that a step need not ask each of its rows."""

    random: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    not_plain: set[int] = field(default_factory=set)
    """All three as SlotInfo says."""
    logprobs: set[int] = field(default_factory=set)
    prompt_logprobs: set[int] = field(default_factory=set)
    pooling: set[int] = field(default_factory=set)
    """The prompt is embedded."""

    def join(self, slot: int, info: SlotInfo) -> None:
        for slots, among in (
            (self.random, info.random),
            (self.filtered, info.filtered),
            (self.not_plain, not info.plain),
            (self.logprobs, info.params.logprobs is not None),
            (self.prompt_logprobs, info.params.prompt_logprobs is not None),
            (self.pooling, info.blob.request.pooling is not None),
        ):
            (slots.add if among else slots.discard)(slot)


class DeviceState:
    def __init__(
        self, *, slots: int, max_len: int, lookahead: int, groups: Seq[KVGroup], device: torch.device, seed: int
    ) -> None:
        self.device, self.seed, self.scratch = device, seed, slots
        self._upload = Upload(device)
        rows = slots + 1
        # Drafts stand behind the known tokens, and padded draft positions may reach one lookahead past them.
        self.tokens_SL = torch.zeros(rows, max_len + 2 * lookahead + 1, dtype=torch.int32, device=device)
        # Those that joins write stand in one tensor, for one launch; each begins where one of its own would.
        aligned = ceil_div(rows, ALIGNED) * ALIGNED
        self._whole_NS = torch.zeros(5, aligned, dtype=torch.int64, device=device)[:, :rows]
        self.computed_S, self.drafts_S, self.prompt_len_S, self.key_S, self.top_k_S = self._whole_NS
        """computed_S: tokens whose KV is in the cache, exactly; a step of the slot starts here. drafts_S: drafts that
        stand in tokens_SL behind the last sampled token."""
        self._real_NS = torch.tensor([[0.0], [1.0], [0.0]], device=device).repeat(1, aligned)[:, :rows]
        self.temperature_S, self.top_p_S, self.min_p_S = self._real_NS
        self.adapter_S = torch.full((rows,), -1, dtype=torch.int32, device=device)
        """Slot of its adapter; -1 = none."""
        self.tables: dict[int, torch.Tensor] = {}
        """group -> int32 [S + 1, P]; unset entries point at the scratch page 0."""
        for group in groups:
            pages = ceil_div(max_len + 2 * lookahead + 1, group.page_tokens)
            self.tables[group.id] = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.draft_probs_SKV: torch.Tensor | None = None
        """Set by the first drafter output that carries probabilities."""
        self.slots: dict[int, SlotInfo] = {}
        self.unusual = UnusualSlots()

    def apply(self, plan: StepPlan, joined: Seq[SlotInfo], extra: Seq[Section] = ()) -> list[torch.Tensor]:
        """Change state as the plan says; `joined` belong to plan.joins. `extra` integers travel with the same copy and
        come back as int64 tensors."""
        for slot in plan.leaves:
            del self.slots[slot]
        scalars: list[int] = []
        for join, info in zip(plan.joins, joined, strict=True):
            self.slots[join.slot] = info
            self.unusual.join(join.slot, info)
            request, params = info.blob.request, info.params
            scalars += (join.slot, join.computed, 0, len(request.prompt_ids))
            scalars += (sequence_key(self.seed, request, info.blob.sample), params.top_k)
            scalars += (float_bits(params.temperature), float_bits(params.top_p), float_bits(params.min_p))
            scalars.append(info.adapter)
        # The last entry of a place stands: a hit's page may be replaced by its copy in the same plan, and a GPU writes
        # both in any order.
        entries: dict[int, dict[tuple[int, int], int]] = {}
        for group, slot, index, page in plan.pages:
            entries.setdefault(group, {})[slot, index] = page
        groups = list(entries)
        deltas = [[n for place, page in entries[group].items() for n in (*place, page)] for group in groups]
        tokens = [info.blob.tokens for info in joined]
        if not (scalars or deltas or extra):
            return []
        scalars_N, *sent = self._upload.send([scalars, *deltas, *tokens, *extra])
        if joined:
            self._join(scalars_N.view(len(joined), -1), plan, sent[len(groups) : len(groups) + len(joined)])
        for group, packed in zip(groups, sent, strict=False):
            slots, indices, pages = packed.view(-1, 3).unbind(1)
            self.tables[group][slots, indices] = pages.int()
        return sent[len(groups) + len(joined) :]

    def _join(self, scalars_JN: torch.Tensor, plan: StepPlan, tokens: Seq[torch.Tensor]) -> None:
        slots_J1, whole_JN, real_JN, adapter_J1 = scalars_JN.split((1, len(self._whole_NS), len(self._real_NS), 1), 1)
        slots_J = slots_J1[:, 0]
        self._whole_NS[:, slots_J] = whole_JN.t()
        self._real_NS[:, slots_J] = floats(real_JN).t()
        self.adapter_S[slots_J] = adapter_J1[:, 0].int()
        for table in self.tables.values():
            table.index_fill_(0, slots_J, 0)
        for join, ids in zip(plan.joins, tokens, strict=True):
            self.tokens_SL[join.slot, : len(ids)] = ids

    def set_drafts(self, slot: int, tokens: Seq[int]) -> None:
        """Drafts found on the host. Only with one plan in flight is the length known here."""
        place = self.computed_S[slot] + 1 + torch.arange(len(tokens), device=self.device)
        self.tokens_SL[slot, place] = self._upload.send([tokens])[0].int()
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
