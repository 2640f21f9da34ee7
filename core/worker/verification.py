"""Verification by the target's draws: of chains, and of trees, whose draws and processors depend on each draft's path.

R rows that sample, W sampled positions of a row, N rows of logits, K = W - 1 drafts, D longest path of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from dovetail.core.interfaces import AcceptedPath, LogitsContext
from dovetail.core.ops.step import Accepted, accept
from dovetail.core.ops.trees import accept_tree, paths
from dovetail.core.worker.device_state import DeviceState

Keep = Callable[[AcceptedPath], None]
"""Drafts.keep"""
Apply = Callable[[torch.Tensor, LogitsContext], torch.Tensor]
"""Applies logits processors to float32 logits, which they may overwrite."""


class SampledPositions(Protocol):
    """The fields of SamplePositions and SampleInputs that verification reads."""

    @property
    def slots_R(self) -> torch.Tensor: ...
    @property
    def base_R(self) -> torch.Tensor: ...
    @property
    def limit_R(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class VerifiedDraws:
    tokens_RW: torch.Tensor
    """int64: accepted drafts and one more token of each row, then meaningless ones; [R, 1 + D] for trees."""
    accepted: Accepted
    path: AcceptedPath | None
    """None = the drafts are chains."""

    def along(self, values_RW: torch.Tensor) -> torch.Tensor:
        """Return values by sampled position, [R, W, ...], in the order of `tokens_RW`."""
        if self.path is None:
            return values_RW
        return values_RW[torch.arange(len(values_RW), device=values_RW.device)[:, None], self.path.index_RD]


def verify_draws(tokens_RW: torch.Tensor, at: SampledPositions, state: DeviceState, keep: Keep) -> VerifiedDraws:
    """Verify drafts by the draws after each of them, and write the result to the device state."""
    rows = at.slots_R, at.base_R, at.limit_R
    lengths = state.tokens_SL, state.computed_S, state.drafts_S
    if state.trees is None or tokens_RW.shape[1] == 1:
        return VerifiedDraws(tokens_RW, accept(tokens_RW, *rows, *lengths), None)
    accepted, tokens_RD, path = accept_tree(tokens_RW, *rows, *lengths, state.trees)
    keep(path)
    return VerifiedDraws(tokens_RD, accepted, path)


def process_trees(
    logits_NV: torch.Tensor,
    token_RW: torch.Tensor,
    position_N: torch.Tensor,
    at: SampledPositions,
    state: DeviceState,
    max_length: int,
    apply: Apply,
) -> torch.Tensor:
    """Return what logits processors make of the logits after drafts of trees, in float32. Processors read a row's
    history from the token table, where a tree has no order: the path of one draft of every row at a time is written
    there. `token_RW`: row of the logits for each sampled position; positions past a row's drafts repeat the last."""
    out_NV = logits_NV.to(torch.float32, copy=True)
    for rows_R in _histories(token_RW, at, state):
        ctx = LogitsContext(at.slots_R, position_N[rows_R], state.tokens_SL, state.prompt_len_S, max_length)
        out_NV[rows_R] = apply(logits_NV[rows_R].float(), ctx)
    return out_NV


def _histories(token_RW: torch.Tensor, at: SampledPositions, state: DeviceState) -> Iterator[torch.Tensor]:
    """Yield the rows of logits of each sampled position, while the token table holds the path to it."""
    assert state.trees is not None
    drafts, depth = token_RW.shape[1] - 1, state.trees.depth
    # A path may be longer than the number of drafts that this step's rows have.
    place_RK = at.base_R[:, None] + torch.arange(max(drafts, depth), device=token_RW.device)
    slots_R1, place_RD = at.slots_R[:, None], place_RK[:, :depth]
    drafts_RK = state.tokens_SL[slots_R1, place_RK]
    index_RKD, exists_RKD = paths(state.trees.bits_SK[at.slots_R][:, :drafts], depth)
    each_R = torch.arange(len(token_RW), device=token_RW.device)
    for w in range(1 + drafts):
        if w:
            draft_R = (at.limit_R.clamp(1, w)) - 1
            path_RD = drafts_RK.gather(1, index_RKD[each_R, draft_R])
            state.tokens_SL[slots_R1, place_RD] = torch.where(exists_RKD[each_R, draft_R], path_RD, 0)
        yield token_RW[:, w]
    state.tokens_SL[slots_R1, place_RK] = drafts_RK
