"""Growth of draft trees by joint confidence, as in EAGLE-2 (Li et al. 2024). B rows, N drafts that get children,
n siblings, K drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dovetail.core.interfaces import Draft, DraftContext, ForwardContext
from dovetail.plugins.spec_decode.own_pages import OwnPages

LEAST_LOSS = 1e-3
"""Least loss of confidence from a parent to its child, so that parents come first."""

Siblings = tuple[torch.Tensor, torch.Tensor]
"""Tokens and the logarithms of their confidence, as DraftContext.best returns them."""
Expand = Callable[[int, torch.Tensor, torch.Tensor], Siblings]
"""expand(level, tokens_BN, before_BN): n siblings behind each of N drafts of this level, 1 = the first, [B, N, n] each.
`before_BN`: index of the draft's parent among those that got children in the level before; meaningless in the first."""


class Tree(NamedTuple):
    """int64"""

    tokens_BK: torch.Tensor
    parents_BK: torch.Tensor
    count_B: torch.Tensor


def grow(first: Siblings, expand: Expand, *, depth: int, width: int, most: int) -> Tree:
    """Return the `most` drafts with the highest joint confidence, highest first. In each level the best `width` drafts
    get `width` children. `first`: children of the row's last token, [B, n]."""
    tokens, joint = first
    found = [(tokens, joint, torch.full_like(tokens, -1))]
    offset = 0
    for level in range(1, depth):
        best_BN, index_BN = joint.topk(width)
        children = expand(level, tokens.gather(1, index_BN), index_BN // width)
        parents = (offset + index_BN).repeat_interleave(width, 1)
        offset += joint.shape[1]
        tokens = children[0].flatten(1)
        joint = (best_BN[:, :, None] + children[1].clamp_max(-LEAST_LOSS)).flatten(1)
        found.append((tokens, joint, parents))
    tokens, joint, parents = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    confidence_BK, kept_BK = joint.topk(most)
    place_BK = torch.arange(most, device=kept_BK.device).expand_as(kept_BK)
    rank = torch.full_like(tokens, -1).scatter(1, kept_BK, place_BK)
    parents_BK = parents.gather(1, kept_BK)
    parents_BK = torch.where(parents_BK < 0, -1, rank.gather(1, parents_BK.clamp_min(0)))
    return Tree(tokens.gather(1, kept_BK), parents_BK, (confidence_BK > float("-inf")).sum(1))


class Passes:
    """Passes of a drafter's own layers over the drafts of a tree. Drafts of level 1 begin at index length of the
    drafter's pages, and those of each level follow those of the level before."""

    def __init__(self, ctx: DraftContext, pages: OwnPages, width: int) -> None:
        self._ctx, self._pages, self._width = ctx, pages, width
        self._bits_BN: torch.Tensor | None = None

    def lay_out(self, level: int, before_BN: torch.Tensor) -> ForwardContext:
        """Return the layout of the pass over the drafts of a level, as in Expand."""
        at = (level - 1) * self._width
        own_N = torch.ones_like(before_BN[0]) << torch.arange(at, at + self._width, device=before_BN.device)
        if self._bits_BN is None:
            self._bits_BN = own_N.expand_as(before_BN)
        else:
            self._bits_BN = self._bits_BN.gather(1, before_BN) | own_N
        return self._pages.of_tree(self._ctx, at, self._bits_BN)


def children(ctx: DraftContext, logits_MV: torch.Tensor, level: int, width: int) -> Siblings:
    """Return the siblings behind each draft of a level, [B, N, n]; `logits_MV`: those of B * N drafts."""
    rows = len(ctx.slots_B)
    tokens, confidence = (found.view(rows, -1, width) for found in ctx.best(logits_MV, level, width))
    return tokens, confidence


def as_draft(tree: Tree, most_B: torch.Tensor, k: int) -> Draft:
    """Return the first k drafts of a tree, at most `most_B` of each row."""
    return Draft(tree.tokens_BK[:, :k], torch.minimum(tree.count_B, most_B), tree.parents_BK[:, :k])
