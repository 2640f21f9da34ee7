"""Verification of drafts without an engine, for tests. Shapes: R rows, S slots, L tokens, K drafts, D levels of a tree,
V vocabulary, W = 1 + K."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.ops.step import accept
from dovetail.core.ops.trees import TreeState, accept_tree
from dovetail.core.testing.draft_bench import Guesses
from dovetail.core.worker.sampler import VerifiedDrafts, verify_rejection, verify_rejection_tree


def verify_by_rejection(p_WV: torch.Tensor, guesses: Seq[Guesses], key_R: torch.Tensor) -> VerifiedDrafts:
    """Verify by rejection, as the engine does. `p_WV`: the target's distribution by position."""
    rows, vocab = len(guesses), p_WV.shape[1]
    drafts = max(len(g.tokens) for g in guesses)
    draft_RK = torch.tensor([[*g.tokens, *[0] * (drafts - len(g.tokens))] for g in guesses])
    count_R = torch.tensor([len(g.tokens) for g in guesses])
    q_RKV = torch.zeros(rows, drafts, vocab)
    for row, g in enumerate(guesses):
        q_RKV[row, : len(g.tokens)] = g.probs_KV
    parents = [list(g.parents or ()) for g in guesses]
    if not any(parents):
        position_RW = torch.arange(1 + drafts).expand(rows, 1 + drafts)
        p_RWV = p_WV[: 1 + drafts].expand(rows, 1 + drafts, vocab)
        return verify_rejection(p_RWV, q_RKV, draft_RK, count_R, key_R, position_RW)
    parent_RK = torch.tensor([[*row, *[-1] * (drafts - len(row))] for row in parents])
    position_RW = torch.zeros(rows, 1 + drafts, dtype=torch.int64)
    for k in range(drafts):
        position_RW[:, 1 + k] = 1 + position_RW.gather(1, 1 + parent_RK[:, k : k + 1])[:, 0]
    drawn_RK = torch.arange(drafts).expand(rows, drafts)
    p_RWV = p_WV[position_RW]
    noise = gumbel(key_R.repeat_interleave(1 + drafts), position_RW.flatten(), Purpose.SAMPLE, vocab)
    own_RW = (p_RWV.log() + noise.view_as(p_RWV)).argmax(-1)
    trees = draft_RK, parent_RK
    draws_RW = verify_rejection_tree(p_RWV, q_RKV, own_RW, *trees, drawn_RK, count_R, key_R, position_RW)
    return walk(draws_RW, *trees, count_R, len(p_WV) - 1)


def walk(
    draws_RW: torch.Tensor, draft_RK: torch.Tensor, parent_RK: torch.Tensor, count_R: torch.Tensor, depth: int
) -> VerifiedDrafts:
    """Verify trees of at most `depth` levels with the engine's `accept_tree`, by the draws after the root and after
    each draft, over a device state that holds only the drafts."""
    rows, drafts = draft_RK.shape
    tokens_SL = torch.zeros(rows, drafts + depth + 1, dtype=torch.int32)
    tokens_SL[:, :drafts] = draft_RK
    trees = TreeState.empty(rows, drafts, depth, draft_RK.device)
    trees.parents_SK.copy_(parent_RK)
    at = torch.arange(rows), torch.zeros(rows, dtype=torch.int64), count_R
    accepted, tokens_RD, _ = accept_tree(draws_RW, *at, tokens_SL, at[1].clone(), count_R.clone(), trees)
    return VerifiedDrafts(tokens_RD, accepted.accepted_R)


def verify_match(target_RW: torch.Tensor, draft_RK: torch.Tensor, count_R: torch.Tensor) -> VerifiedDrafts:
    """Verify with the engine's `accept` over a device state that holds only the drafts."""
    rows, width = target_RW.shape
    tokens_SL = torch.zeros(rows + 1, width, dtype=torch.int32)
    tokens_SL[:rows, : width - 1] = draft_RK
    computed_S = torch.zeros(rows + 1, dtype=torch.int64)
    drafts_S = torch.nn.functional.pad(count_R, (0, 1))
    slots_R, base_R = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    accepted = accept(target_RW, slots_R, base_R, count_R, tokens_SL, computed_S, drafts_S)
    return VerifiedDrafts(target_RW, accepted.accepted_R)
