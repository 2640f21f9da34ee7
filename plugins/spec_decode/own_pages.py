"""Pages of a drafter with layers of its own: how far they follow the target's. Shapes: B rows, S slots, T tokens."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import DraftContext, FedTokens, ForwardContext, TargetView


class OwnPages:
    """Number of tokens of each slot whose KV is in the drafter's pages, and the passes of a proposal. The first one
    feeds the tokens that the target accepted or drew since the last proposal; the others one token per row."""

    def __init__(self, target: TargetView, window: int, *, resumes: bool = True) -> None:
        """`window`: tokens of each row that the first pass feeds. `resumes`: rows that are further behind catch up in
        several proposals. False = they never do, since features of so many tokens are not kept."""
        self.window, self.resumes = window, resumes
        self._known_S = torch.zeros(target.max_seqs + 1, dtype=torch.int64, device=target.build.device)
        self._at_S = torch.zeros_like(self._known_S)
        """Position of the next pass."""

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        """Drafter.join."""
        self._known_S[slots_J] = computed_J

    def fed(self, fed: FedTokens, lengths_B: torch.Tensor | None = None) -> None:
        """Note that the drafter's layers ran over all tokens of a step, or of chunks (`lengths_B`: as in
        Drafter.catch_up)."""
        rows = len(fed.slots_B)
        count_B = fed.row_start_B1.diff()
        first_B = fed.kv_len_B - count_B
        # Of a decode row only the first token is certain to be accepted.
        decodes_B = torch.arange(rows, device=count_B.device) < fed.decodes
        certain_B = first_B + torch.where(decodes_B, count_B.clamp_max(1), count_B)
        if lengths_B is not None:
            certain_B = torch.minimum(certain_B, lengths_B)
        known_B = self._known_S[fed.slots_B]
        # The KV after a gap is wrong.
        self._known_S[fed.slots_B] = torch.where(known_B >= first_B, torch.maximum(known_B, certain_B), known_B)

    def catch_up(self, ctx: DraftContext, more: int = 0) -> tuple[torch.Tensor, ForwardContext, torch.Tensor]:
        """Begin a proposal: return ids [B * (window + more)] and layout of the first pass, and the index of each row's
        last known token in it, int64 [B]. `more`: tokens behind the window, which do not count as fed. Rows with an
        index of `window` or more are not caught up and have no drafts."""
        slots_B = ctx.slots_B
        last_B = ctx.lengths_B - 1
        first_B = torch.minimum(self._known_S[slots_B], last_B)
        self._at_S[slots_B] = first_B
        ids_T, forward = ctx.lay_out(self._at_S, self.window + more)
        reached_B = torch.minimum(first_B + self.window, ctx.lengths_B)
        if not self.resumes:
            reached_B = torch.where(last_B - first_B < self.window, reached_B, first_B)
        self._known_S[slots_B] = reached_B
        return ids_T, forward, last_B - first_B

    def after(self, ctx: DraftContext, w: int) -> ForwardContext:
        """Return the layout of the pass that feeds draft w - 1 of each row."""
        self._at_S[ctx.slots_B] = ctx.lengths_B - 1 + w
        return ctx.lay_out(self._at_S, 1)[1]

    def of_tree(self, ctx: DraftContext, first: int, bits_BN: torch.Tensor) -> ForwardContext:
        """Return the layout of a pass over drafts of a tree, the first of which is bit `first`."""
        self._at_S[ctx.slots_B] = ctx.lengths_B + first
        return ctx.lay_out(self._at_S, bits_BN.shape[1], bits_BN)[1]


def last_states(states_TC: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """Return the state at each row's index, [B, C]. `states_TC`: equally many tokens of every row."""
    rows = len(index_B)
    states_BWC = states_TC.view(rows, -1, states_TC.shape[-1])
    at_B = index_B.clamp_max(states_BWC.shape[1] - 1)
    return states_BWC[torch.arange(rows, device=index_B.device), at_B]
