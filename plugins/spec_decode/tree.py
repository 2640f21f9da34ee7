"""Growth of draft trees: by joint confidence as in EAGLE-2 (Li et al. 2024), or of a fixed shape as in Sequoia (Chen et
al. 2024). B rows, N drafts that get children, n siblings, K drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dovetail.core.interfaces import Draft, DraftContext, ForwardContext
from dovetail.plugins.spec_decode.config import Trees
from dovetail.plugins.spec_decode.own_pages import OwnPages
from dovetail.plugins.spec_decode.shape import Shape

LEAST_LOSS = 1e-3
"""Least loss of confidence from a parent to its child, so that parents come first."""

Siblings = tuple[torch.Tensor, torch.Tensor]
"""Tokens and the logarithms of their confidence, as DraftContext.best returns them."""
First = Callable[[int], Siblings]
"""first(n): children of the row's last token, [B, n]."""
Expand = Callable[[int, torch.Tensor, torch.Tensor, int], Siblings]
"""expand(level, tokens_BN, before_BN, n): n siblings behind each of N drafts of this level, 1 = the first, [B, N, n]
each. `before_BN`: index of the draft's parent among those that got children in the level before; meaningless in the
first."""


class Tree(NamedTuple):
    """int64"""

    tokens_BK: torch.Tensor
    parents_BK: torch.Tensor
    count_B: torch.Tensor
    drawn_BK: torch.Tensor | None = None
    """Draft.drawn_BK"""


Grow = Callable[[First, Expand], Tree]
"""Grows a tree."""


def grower(config: Trees, device: torch.device, *, shared: bool = False) -> Grow:
    """Return the growth that the options select. `shared`: all drafts of a level have the same children, whose logits
    the drafter computes once."""
    if config.shape is not None:
        return FixedTree(config.shape, device, shared=shared).grow
    return lambda first, expand: grow(first, expand, depth=config.depth, width=config.branches, most=config.tree)


def grow(first: First, expand: Expand, *, depth: int, width: int, most: int) -> Tree:
    """Return the `most` drafts with the highest joint confidence, highest first. In each level the best `width` drafts
    get `width` children."""
    tokens, joint = first(width)
    found = [(tokens, joint, torch.full_like(tokens, -1))]
    offset = 0
    for level in range(1, depth):
        best_BN, index_BN = joint.topk(width)
        children = expand(level, tokens.gather(1, index_BN), index_BN // width, width)
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


@dataclass(frozen=True, slots=True)
class _Level:
    """Drafts of one level of a fixed tree, C of them, and the N that get children."""

    siblings: int
    """n: most children of a parent in the level before."""
    from_C: torch.Tensor
    """Index of each draft in the siblings of all parents, [N, n] flattened."""
    eldest_C: torch.Tensor
    """The same of its first sibling."""
    inner_N: torch.Tensor
    """Index in this level of the drafts that get children."""
    before_N: torch.Tensor
    """Index of each one's parent among the drafts that got children in the level before."""


class FixedTree:
    """A tree of a fixed shape. Which drafts exist does not depend on their tokens, so rejection verifies it without
    loss. The tensors are on the device, so that graphs can be captured."""

    def __init__(self, shape: Shape, device: torch.device, *, shared: bool = False) -> None:
        def indices(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        levels, count = shape.levels, len(shape.parents)
        parents = set(shape.parents)
        inner, given = [-1], 0
        """Drafts that get children in the level before, and number of rows of logits before theirs."""
        order, drawn = [], [0] * count
        self._levels: list[_Level] = []
        for level in range(1, max(levels) + 1):
            here = [draft for draft in range(count) if levels[draft] == level]
            above = {draft: i for i, draft in enumerate(inner)}
            most = 1 + max(shape.ranks[draft] for draft in here)
            first = [above[shape.parents[draft]] * most for draft in here]
            for draft in here:
                drawn[draft] = given if shared else given + above[shape.parents[draft]]
            given += 1 if shared else len(inner)
            inner = [draft for draft in here if draft in parents]
            self._levels.append(
                _Level(
                    most,
                    indices([begin + shape.ranks[draft] for begin, draft in zip(first, here, strict=True)]),
                    indices(first),
                    indices([here.index(draft) for draft in inner]),
                    indices([above[shape.parents[draft]] for draft in inner]),
                )
            )
            order += here
        self._place_K = indices([order.index(draft) for draft in range(count)])
        self._parents_K, self._drawn_K = indices(list(shape.parents)), indices(drawn)

    def grow(self, first: First, expand: Expand) -> Tree:
        """Return the tree with its tokens."""
        found: list[torch.Tensor] = []
        inner_BN = before_BN = torch.empty(0)
        for depth, level in enumerate(self._levels):
            siblings = first(level.siblings) if not depth else expand(depth, inner_BN, before_BN, level.siblings)
            flat_BX = siblings[0].flatten(1)
            tokens_BC, eldest_BC = flat_BX[:, level.from_C], flat_BX[:, level.eldest_C]
            # Where filters leave fewer tokens, a copy of the first sibling is never accepted after it.
            tokens_BC = torch.where(tokens_BC < 0, eldest_BC, tokens_BC)
            found.append(tokens_BC)
            inner_BN = tokens_BC[:, level.inner_N]
            before_BN = level.before_N.expand_as(inner_BN)
        tokens_BK = torch.cat(found, 1)[:, self._place_K]
        count_B = torch.full_like(tokens_BK[:, 0], tokens_BK.shape[1])
        parents_BK, drawn_BK = (each_K.expand_as(tokens_BK) for each_K in (self._parents_K, self._drawn_K))
        return Tree(tokens_BK, parents_BK, count_B, drawn_BK)


class Passes:
    """Passes of a drafter's own layers over the drafts of a tree. Drafts of level 1 begin at index length of the
    drafter's pages, and those of each level follow those of the level before."""

    def __init__(self, ctx: DraftContext, pages: OwnPages) -> None:
        self._ctx, self._pages, self._fed = ctx, pages, 0
        self._bits_BN: torch.Tensor | None = None

    def lay_out(self, before_BN: torch.Tensor) -> ForwardContext:
        """Return the layout of the pass over the drafts of the next level that get children. `before_BN`: as in
        Expand."""
        at, count = self._fed, before_BN.shape[1]
        own_N = torch.ones_like(before_BN[0]) << torch.arange(at, at + count, device=before_BN.device)
        if self._bits_BN is None:
            self._bits_BN = own_N.expand_as(before_BN)
        else:
            self._bits_BN = self._bits_BN.gather(1, before_BN) | own_N
        self._fed += count
        return self._pages.of_tree(self._ctx, at, self._bits_BN)


def children(ctx: DraftContext, logits_MV: torch.Tensor, level: int, count: int) -> Siblings:
    """Return the siblings behind each draft of a level, [B, N, n]; `logits_MV`: those of B * N drafts."""
    rows = len(ctx.slots_B)
    tokens, confidence = (found.view(rows, -1, count) for found in ctx.best(logits_MV, level, count))
    return tokens, confidence


def as_draft(tree: Tree, most_B: torch.Tensor, k: int) -> Draft:
    """Return the first k drafts of a tree, at most `most_B` of each row."""
    drawn_BK = None if tree.drawn_BK is None else tree.drawn_BK[:, :k]
    return Draft(tree.tokens_BK[:, :k], torch.minimum(tree.count_B, most_B), tree.parents_BK[:, :k], drawn_BK)
