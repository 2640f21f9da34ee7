"""Drafts of a step: asks the drafter at the start of a step that verifies drafts, and writes what it proposes to the
device state, where the step's layout and verification read it. B rows, K most drafts of a row, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    AcceptedPath,
    Adapters,
    AttentionBackend,
    AttnCtx,
    CatchUp,
    Collective,
    Draft,
    DraftContext,
    Drafter,
    FedTokens,
    ForwardContext,
    Hidden,
    HostBounds,
    KVGroup,
    LogitsHead,
    TreeMask,
)
from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.ops.step import TokenLayout, write_drafts
from dovetail.core.ops.trees import keep_path, write_tree
from dovetail.core.worker.batch import adapting, lay_out
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.sampler import (
    SampleParams,
    drawn_siblings,
    probabilities,
    sample,
    sample_over_ranks,
    siblings,
)


class Drafts:
    """A drafter with the state of the rows that it drafts for. All work is on the device and can be captured."""

    def __init__(
        self,
        drafter: Drafter,
        state: DeviceState,
        attention: AttentionBackend,
        vocab: int,
        target_groups: Seq[KVGroup] = (),
        adapters: Adapters | None = None,
        collective: Collective | None = None,
    ) -> None:
        """`target_groups`, `adapters`: the target's, for drafters that run its layers. `collective`: that of the ranks
        that must have the same drafts; None = this is the only one."""
        self.drafter, self.state, self.attention, self.vocab = drafter, state, attention, vocab
        self.groups = drafter.kv_groups() if drafter.lookahead else ()
        self._passes = target_groups if drafter.on_target_pages else self.groups
        """KV groups of the drafter's passes."""
        self._adapters = adapters if drafter.on_target_pages else None
        # A pass that catches up writes the pages of a cached prefix that lack the drafter's KV. Rows that share them
        # have the same tokens there, and so write the same values.
        resumes = bool(self.groups) and drafter.resumes
        self._given_S = torch.zeros_like(state.given_S) if resumes else state.given_S
        self._first_S = torch.zeros_like(state.computed_S)
        """Index of the first token of each slot in a pass that catches up."""
        self._collective = collective if collective is not None and collective.size > 1 else None
        self.lookahead, self.taps, self.counts = drafter.lookahead, drafter.taps, drafter.draft_counts
        self.on_device = self.lookahead > 0 and not drafter.needs_host_tokens
        """Whether `propose` drafts; otherwise nothing does, or the host."""
        self.makes_fewer = makes_fewer(drafter)
        self.takes_leave = self.on_device and type(drafter).leave is not Drafter.leave
        """Whether the drafter does something when a sequence leaves; its arguments cost a launch per slot."""

    def groups_to_lay_out(self, groups: Seq[KVGroup], *, follow: bool) -> Seq[KVGroup]:
        """Return those of all KV groups that a step lays out. `follow`: FedTokens.follow. Without it these are the
        target's: the drafter feeds sampled tokens in its next proposal, so steps without drafts do not pay for it."""
        own = {group.id for group in self.groups}
        return groups if follow else [group for group in groups if group.id not in own]

    def count(self, most: int) -> int:
        """Return the number of drafts to propose where a row verifies at most `most`."""
        return next(count for count in self.counts if count >= most)

    def propose(
        self,
        slots_B: torch.Tensor,
        most_B: torch.Tensor,
        k: int,
        *,
        bound: int,
        random: bool = True,
        filtered: bool = True,
        adapted: bool = True,
    ) -> None:
        """Draft for decode rows. `most_B` (int64): drafts that each row verifies at most, 0 .. k. `bound`: upper bound
        of the rows' lengths. `random`, `filtered`, `adapted`: whether some row is not greedy, is filtered, has an
        adapter."""
        state = self.state
        lengths_B = state.computed_S[slots_B] + 1
        gathered: list[SampleParams] = []
        given = 0

        def params_of_rows() -> SampleParams:
            if not gathered:  # Many drafters draw nothing.
                gathered.append(SampleParams.of(state, slots_B, random=random, filtered=filtered))
            return gathered[0]

        def draw_from(
            head: LogitsHead, logits: Callable[[torch.Tensor], torch.Tensor], states_BC: torch.Tensor, w: int
        ) -> torch.Tensor:
            if head.build.collective.size == 1 or filtered or (state.draft_probs_SKV is not None and random):
                return draw(logits(states_BC), w)
            return sample_over_ranks(head, states_BC, lengths_B + w, params_of_rows())

        def draw(logits_BV: torch.Tensor, w: int) -> torch.Tensor:
            params = params_of_rows()
            if state.draft_probs_SKV is None or not random:
                return sample(logits_BV, lengths_B + w, params)
            q_BV = probabilities(logits_BV, params)
            state.draft_probs_SKV[slots_B, w] = q_BV
            best_B, token_B = (q_BV.log() + gumbel(params.key_N, lengths_B + w, Purpose.DRAFT, self.vocab)).max(-1)
            return token_B.masked_fill(best_B.isnan(), -1)

        def best(logits_MV: torch.Tensor, w: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            each = len(logits_MV) // len(slots_B)
            slots_M, position_M = slots_B.repeat_interleave(each), (lengths_B + w).repeat_interleave(each)
            params = SampleParams.of(state, slots_M, random=random, filtered=filtered)
            if state.draft_probs_SKV is None or not random:
                return siblings(logits_MV, position_M, params, count)
            nonlocal given
            if given + each > self.lookahead:
                raise CapabilityError([_too_many_distributions(given + each, self.lookahead)])
            tokens_Mn, confidence_Mn, q_MV = drawn_siblings(logits_MV, position_M, params, count)
            state.draft_probs_SKV[slots_B, given : given + each] = q_MV.view(len(slots_B), each, -1)
            given += each
            return tokens_Mn, confidence_Mn

        def lay_out_rows(
            first_S: torch.Tensor, count: int, bits_BN: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ForwardContext]:
            # Kernels that lay out rows run only after all earlier ones have ended, so the KV of the pass before is
            # complete when kernels with PDL read it early.
            rows = len(slots_B)
            row_start_B1 = torch.arange(rows + 1, dtype=torch.int32, device=state.device) * count
            host = HostBounds((count,) * rows, (bound + self.lookahead,) * rows, rows)
            tree = None
            if bits_BN is not None:
                tree = TreeMask((lengths_B - 1).repeat_interleave(count), bits_BN.reshape(-1))
            tokens, attn = lay_out(
                slots_B,
                row_start_B1,
                rows * count,
                host,
                state,
                self._passes,
                self.attention,
                first_S,
                tree,
                self._given_S,
            )
            return tokens.ids_T, ForwardContext(tokens.positions_T, attn, tokens.live_T)

        ctx = DraftContext(
            slots_B, state.tokens_SL, lengths_B, k, most_B, state.key_S, draw, best, lay_out_rows, draw_from
        )
        # Passes over the target's layers feed one token per row.
        with adapting(self._adapters if adapted else None, state.adapter_S, slots_B):
            draft = self.drafter.propose(ctx)
        if not isinstance(draft, Draft):
            kind = type(self.drafter)
            raise TypeError(f"{kind.__module__}.{kind.__name__}.propose returned {draft!r:.80}, not a Draft")
        self._write(self._agreed(draft), slots_B, lengths_B, most_B)

    def _agreed(self, draft: Draft) -> Draft:
        """Return rank 0's draft. Ranks compute drafts alike, but a bit that differs between their devices, or NaN on
        one of them, would let them accept different drafts, and then wait for each other for ever."""
        if self._collective is None:
            return draft
        parts = [draft.tokens_BK, draft.count_B[:, None]]
        parts += [extra for extra in (draft.parents_BK, draft.drawn_BK) if extra is not None]
        widths = [part.shape[1] for part in parts]
        sent = self._collective.broadcast(torch.cat([part.long() for part in parts], 1))
        tokens_BK, count_B1, *extras = sent.split(widths, 1)
        trees = dict(zip(("parents_BK", "drawn_BK"), extras, strict=False))
        return Draft(tokens_BK, count_B1[:, 0], **trees)

    def _write(self, draft: Draft, slots_B: torch.Tensor, lengths_B: torch.Tensor, most_B: torch.Tensor) -> None:
        state, rows = self.state, (slots_B, lengths_B, most_B)
        into = state.tokens_SL, state.drafts_S
        if (draft.parents_BK is None) is not (state.trees is None):
            found = "a chain" if draft.parents_BK is None else "a tree (Draft.parents_BK)"
            raise CapabilityError(
                [
                    f"the drafter returned {found}, and its depth is {self.drafter.depth} of {self.lookahead} drafts. "
                    "Would work: parents_BK if and only if depth is less than lookahead"
                ]
            )
        if state.trees is None:
            write_drafts(draft.tokens_BK, draft.count_B, *rows, *into, self.vocab)
        else:
            write_tree(draft.tokens_BK, draft.parents_BK, draft.count_B, *rows, *into, state.trees, self.vocab)
            self._write_drawn(draft, slots_B)

    def _write_drawn(self, draft: Draft, slots_B: torch.Tensor) -> None:
        state = self.state
        if state.drawn_SK is None:
            return
        if draft.drawn_BK is None:
            raise CapabilityError(
                [
                    "the drafter returned a tree that is verified by rejection, without the distributions of its "
                    "drafts. Would work: Draft.drawn_BK, or verify = draws"
                ]
            )
        drawn_BK = draft.drawn_BK.clamp(0, self.lookahead - 1).long()
        state.drawn_SK[slots_B, : drawn_BK.shape[1]] = drawn_BK

    def keep(self, path: AcceptedPath) -> None:
        """Make the accepted path of each row's tree contiguous in the target's pages, and show it to the drafter."""
        own = {group.id for group in self.groups}
        for id, pool in self.attention.pools.items():
            if id not in own:
                keep_path(pool, self.state.tables[id], path)
        self.drafter.keep(path)

    def join(self, joins_N: torch.Tensor) -> None:
        """Announce sequences (`row_sections.pack_joins`)."""
        self.drafter.join(*joins_N.view(2, -1).unbind(0))

    def catch_up(self, chunks: Seq[CatchUp], chunks_N: torch.Tensor) -> None:
        """Let the drafter feed earlier tokens of decode rows. `chunks_N`: as row_sections.pack_catch_up packs them."""
        state = self.state
        slots_B, first_B, count_B = chunks_N.view(3, -1).unbind(0)
        self._first_S[slots_B] = first_B
        row_start_B1 = torch.nn.functional.pad(count_B.cumsum(0), (1, 0)).int()
        counts = tuple(chunk.count for chunk in chunks)
        host = HostBounds(counts, tuple(chunk.first + chunk.count for chunk in chunks), 0)
        passes = self._passes, self.attention, self._first_S, None, self._given_S
        tokens, attn = lay_out(slots_B, row_start_B1, sum(counts), host, state, *passes)
        ctx = ForwardContext(tokens.positions_T, attn, tokens.live_T)
        fed = FedTokens(tokens.ids_T, tokens.slots_T, ctx, slots_B, row_start_B1, tokens.kv_len_B, 0)
        self.drafter.catch_up(fed, state.computed_S[slots_B] + 1)

    def take_host(self, drafts_N: torch.Tensor) -> None:
        """Write drafts that the host found (`row_sections.pack_host_drafts`)."""
        slots_B, count_B, tokens_BK = drafts_N.view(-1, 2 + self.lookahead).split((1, 1, self.lookahead), 1)
        slots_B, count_B = slots_B[:, 0], count_B[:, 0]
        if self.state.draft_probs_SKV is not None:
            # These drafts were not drawn: each has the whole probability.
            self.state.draft_probs_SKV[slots_B] = torch.nn.functional.one_hot(
                tokens_BK.clamp(0, self.vocab - 1), self.vocab
            ).float()
        self._write(Draft(tokens_BK, count_B), slots_B, self.state.computed_S[slots_B] + 1, count_B)

    def observe(
        self,
        slots_B: torch.Tensor,
        row_start_B1: torch.Tensor,
        decodes: int,
        tokens: TokenLayout,
        attn: Mapping[int, AttnCtx],
        hidden: Hidden,
        *,
        follow: bool,
    ) -> None:
        """Show the drafter what a step fed and its layers computed. `follow`: FedTokens.follow."""
        if not self.lookahead:
            return
        ctx = ForwardContext(tokens.positions_T, attn, tokens.live_T)
        self.drafter.observe(
            FedTokens(tokens.ids_T, tokens.slots_T, ctx, slots_B, row_start_B1, tokens.kv_len_B, decodes, follow),
            hidden,
        )


def makes_fewer(drafter: Drafter) -> bool:
    """Return whether a step that verifies few drafts takes less work on the device than one with all."""
    return len(drafter.draft_counts) > 1 and not drafter.needs_host_tokens


def _too_many_distributions(found: int, most: int) -> str:
    return (
        f"the drafter drew from {found} distributions for a tree of {most} drafts that is verified by rejection, and "
        f"the limit is {most}. Would work: one row of logits for each draft with children, or verify = draws"
    )
