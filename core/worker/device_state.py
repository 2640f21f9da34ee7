"""Persistent state of every slot on the device. Plans change it by diffs; steps read lengths, tokens and drafts from
it, so the host does not need them. S slots (plus a scratch slot for padding), L token capacity, P pages per table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import KVGroup, StepPlan
from dovetail.core.ops.random import sequence_key
from dovetail.core.ops.trees import TreeState
from dovetail.core.worker.slots import SlotInfo
from dovetail.core.worker.upload import Upload, float_bits, floats

if TYPE_CHECKING:
    from dovetail.core.worker.upload import Section


ALIGNED = 64
"""Slot columns begin at multiples of this many numbers, so that kernels need not be compiled for other alignments."""


class DeviceState:
    def __init__(
        self,
        *,
        slots: int,
        max_len: int,
        lookahead: int,
        groups: Seq[KVGroup],
        device: torch.device,
        seed: int,
        draft_probs: int = 0,
        draft_depth: int | None = None,
        simulated_rates: Seq[float] = (),
    ) -> None:
        """`draft_depth`: Drafter.depth; None = the lookahead. `draft_probs`: vocabulary size if drafts are verified by
        rejection, which needs the probabilities from which they were drawn; otherwise 0. `simulated_rates`:
        Drafter.simulated_rates."""
        self.device, self.seed, self.scratch = device, seed, slots
        self._upload = Upload(device)
        rows = slots + 1
        # Drafts follow the known tokens, and padded draft positions may reach one lookahead past them.
        self.tokens_SL = torch.zeros(rows, max_len + 2 * lookahead + 1, dtype=torch.int32, device=device)
        # Columns that joins write are rows of one tensor, so that one launch writes them all.
        aligned = ceil_div(rows, ALIGNED) * ALIGNED
        self._whole_NS = torch.zeros(7, aligned, dtype=torch.int64, device=device)[:, :rows]
        self.computed_S, self.given_S, self.drafts_S, self.prompt_len_S, *columns = self._whole_NS
        self.key_S, self.top_k_S, self.logprobs_S = columns
        """computed_S: exact number of tokens whose KV is in the cache; a step of the slot starts here. given_S: number
        of tokens whose KV was in the pages when the sequence joined; it may feed the last one again, and does not write
        there. drafts_S: number of drafts in tokens_SL after the last sampled token. logprobs_S: number of most likely
        tokens to report; -1 = no log-probabilities."""
        self.logprobs_S.fill_(-1)
        self._real_NS = torch.tensor([[0.0], [1.0], [0.0]], device=device).repeat(1, aligned)[:, :rows]
        self.temperature_S, self.top_p_S, self.min_p_S = self._real_NS
        self.adapter_S = torch.full((rows,), -1, dtype=torch.int32, device=device)
        """Slot of the sequence's adapter; -1 = none."""
        self.tables: dict[int, torch.Tensor] = {}
        """KV group -> int32 [S + 1, P]; unset entries are the scratch page 0."""
        for group in groups:
            pages = ceil_div(max_len + 2 * lookahead + 1, group.page_tokens)
            self.tables[group.id] = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.draft_probs_SKV: torch.Tensor | None = None
        """float32: probabilities from which each slot's drafts were drawn, of a chain one for each draft, of a tree in
        the order of the calls of DraftContext.best; None = no draft is verified by rejection."""
        self.drawn_SK: torch.Tensor | None = None
        """int64: for each draft of a tree, the index of its distribution in these probabilities."""
        self.simulated_K: torch.Tensor | None = None
        """float32: acceptance rates by position, if acceptance is simulated."""
        if simulated_rates:
            self.simulated_K = torch.tensor(simulated_rates, dtype=torch.float32, device=device)
        self.trees: TreeState | None = None
        """Draft tree of each slot; None = drafts are chains."""
        if draft_depth is not None and draft_depth < lookahead:
            self.trees = TreeState.empty(rows, lookahead, draft_depth, device)
        if draft_probs and lookahead:
            self.draft_probs_SKV = torch.zeros(rows, lookahead, draft_probs, device=device)
            if self.trees is not None:
                self.drawn_SK = torch.zeros(rows, lookahead, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan, joined: Seq[SlotInfo], extra: Seq[Section] = ()) -> list[torch.Tensor]:
        """Apply joins (`joined`: their records) and page tables. Return `extra`, sent along, as int64 tensors."""
        scalars: list[int] = []
        for join, info in zip(plan.joins, joined, strict=True):
            request, params = info.blob.request, info.params
            scalars += (join.slot, join.computed - join.again, join.computed, 0, len(request.prompt_ids))
            scalars += (sequence_key(self.seed, request, info.blob.sample), params.top_k)
            scalars.append(-1 if params.logprobs is None else params.logprobs)
            scalars += (float_bits(params.temperature), float_bits(params.top_p), float_bits(params.min_p))
            scalars.append(info.adapter)
        # Only the last entry of a table position is sent. A plan may replace a cached page by its copy, and a GPU would
        # write both entries in any order.
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
