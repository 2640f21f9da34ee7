"""Draft trees: their state on the device, their verification, and the moves that make an accepted path contiguous.

A draft's bits are its ancestors and itself, so that a tree of 64 drafts fits into int64. Shapes: T tokens, B rows,
R rows that sample, S slots, K drafts of a row, D longest path, W = 1 + K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dovetail.core.interfaces.attention import KVPool, TreeMask
from dovetail.core.interfaces.spec_decode import AcceptedPath
from dovetail.core.ops.step import Accepted, TokenLayout, commit, leading

_PAIRS, _NIBBLES, _BYTES, _ONES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, 0x0101010101010101


def count_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the number of bits that are set in each int64, which is the depth of a draft."""
    bits = bits - ((bits >> 1) & _PAIRS)
    bits = (bits & _NIBBLES) + ((bits >> 2) & _NIBBLES)
    return (((bits + (bits >> 4)) & _BYTES) * _ONES) >> 56


def within_window(tree: TreeMask, window: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index of the first key up to the root that each token sees, its bits), int64 [T], for a layer with this
    window; 0 = none. `most`: most drafts of a row."""
    if not window:
        return torch.zeros_like(tree.root_T), tree.ancestors_T
    depth_T, bits_T = count_bits(tree.ancestors_T), tree.ancestors_T
    first_T = (tree.root_T + depth_T - window + 1).clamp_min(0)
    # A parent has a lower bit than its children: the lowest bits are the farthest ancestors.
    for above in range(most - window):
        bits_T = torch.where(depth_T - above > window, bits_T & (bits_T - 1), bits_T)
    return first_T, bits_T


@dataclass(frozen=True, slots=True)
class TreeState:
    """Draft trees of all slots, which `write_tree` fills and later kernels of the step read. int64 [S + 1, K]."""

    depth: int
    """D."""
    parents_SK: torch.Tensor
    """Index of each draft's parent; -1 = the root, the row's last token."""
    bits_SK: torch.Tensor
    """TreeMask.ancestors_T of each draft; 0 = there is no such draft."""

    @classmethod
    def empty(cls, rows: int, drafts: int, depth: int, device: torch.device) -> TreeState:
        return cls(depth, *torch.zeros(2, rows, drafts, dtype=torch.int64, device=device))


def write_tree(
    drafts_BK: torch.Tensor,
    parents_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
    vocab: int,
) -> None:
    """Write each row's first drafts as `write_drafts` does, and their tree. Drafts end before the first one whose id is
    not in the vocabulary, whose parent does not precede it, or that is more than D levels below the root."""
    given = drafts_BK, parents_BK, count_B, slots_B, lengths_B, most_B, tokens_SL, drafts_S, trees, vocab
    if drafts_BK.is_cuda:
        from dovetail.core.ops.kernels.trees import write_tree_triton

        write_tree_triton(*given)
    else:
        write_tree_reference(*given)


def write_tree_reference(
    drafts_BK: torch.Tensor,
    parents_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
    vocab: int,
) -> None:
    step_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
    parents_BK = parents_BK.long()
    known_BK = (drafts_BK >= 0) & (drafts_BK < vocab) & (parents_BK >= -1) & (parents_BK < step_K)
    parents_BK = torch.where(known_BK, parents_BK, -1)
    up_BK, bits_BK = parents_BK, torch.ones_like(parents_BK) << step_K
    for _ in range(trees.depth - 1):
        bits_BK = bits_BK | torch.where(up_BK >= 0, torch.ones_like(up_BK) << up_BK.clamp_min(0), 0)
        up_BK = torch.where(up_BK >= 0, parents_BK.gather(1, up_BK.clamp_min(0)), -1)
    kept_B = leading(known_BK & (up_BK < 0), torch.minimum(count_B, most_B))
    kept_BK = step_K < kept_B[:, None]
    tokens_SL[slots_B[:, None], lengths_B[:, None] + step_K] = torch.where(kept_BK, drafts_BK, 0).int()
    slots_B1 = slots_B[:, None]
    trees.parents_SK[slots_B1, step_K], trees.bits_SK[slots_B1, step_K] = parents_BK, torch.where(kept_BK, bits_BK, 0)
    drafts_S[slots_B] = kept_B


def place_tree(tokens: TokenLayout, computed_S: torch.Tensor, trees: TreeState, decodes: int) -> TokenLayout:
    """Return the layout of rows whose first `decodes` ones feed trees. `tokens`: the layout of chains, whose positions
    are the indices in the cache."""
    if tokens.ids_T.is_cuda:
        from dovetail.core.ops.kernels.trees import place_tree_triton

        return place_tree_triton(tokens, computed_S, trees, decodes)
    return place_tree_reference(tokens, computed_S, trees, decodes)


def place_tree_reference(tokens: TokenLayout, computed_S: torch.Tensor, trees: TreeState, decodes: int) -> TokenLayout:
    index_T, root_T = tokens.positions_T, computed_S[tokens.slots_T]
    draft_T = index_T - root_T - 1
    fed_T = (tokens.rows_T < decodes) & (draft_T >= 0) & (draft_T < trees.bits_SK.shape[1])
    bits_T = torch.where(fed_T, trees.bits_SK[tokens.slots_T, torch.where(fed_T, draft_T, 0)], 0)
    positions_T = torch.where(fed_T, root_T + count_bits(bits_T), index_T)
    return replace(tokens, positions_T=positions_T, index_T=index_T, tree=TreeMask(root_T, bits_T))


def accept_tree(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
) -> tuple[Accepted, torch.Tensor, AcceptedPath]:
    """Accept the path from the root on which each draft equals the target's draw after its parent, then write the
    result to the device state as `accept` does: tokens of the path are contiguous then. Return also the new tokens,
    int64 [R, 1 + D], and the path.

    tokens_RW has the draws after the root and after each draft. Of equal siblings the first is taken.
    """
    given = tokens_RW, slots_R, base_R, limit_R, tokens_SL, computed_S, drafts_S, trees
    if tokens_RW.is_cuda:
        from dovetail.core.ops.kernels.trees import accept_tree_triton

        return accept_tree_triton(*given)
    return accept_tree_reference(*given)


def accept_tree_reference(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
) -> tuple[Accepted, torch.Tensor, AcceptedPath]:
    width = tokens_RW.shape[1]
    step_K = torch.arange(width - 1, device=tokens_RW.device)
    draft_RK = tokens_SL[slots_R[:, None], base_R[:, None] + step_K]
    parent_RK, count_R = trees.parents_SK[slots_R][:, : width - 1], torch.minimum(drafts_S[slots_R], limit_R)
    at_R = torch.zeros_like(slots_R)
    path, accepted_R = [at_R], torch.zeros_like(slots_R)
    for depth in range(trees.depth):
        drawn_R1 = tokens_RW.gather(1, at_R[:, None])
        agrees_RK = (parent_RK == at_R[:, None] - 1) & (draft_RK == drawn_R1) & (step_K < count_R[:, None])
        next_R = torch.where(agrees_RK, step_K, width).amin(1)
        # The walk has ended before if it accepted fewer than `depth` drafts.
        found_R = (next_R < width) & (accepted_R == depth)
        at_R = torch.where(found_R, next_R + 1, at_R)
        accepted_R = accepted_R + found_R
        path.append(at_R)
    path_RD = torch.stack(path, 1)
    tokens_RD = tokens_RW.gather(1, path_RD)
    commit(tokens_RD, accepted_R, slots_R, base_R, tokens_SL, computed_S, drafts_S)
    accepted = Accepted(accepted_R, base_R + accepted_R + 1, count_R)
    return accepted, tokens_RD, AcceptedPath(slots_R, base_R - 1, path_RD, accepted_R)


def keep_path(pool: KVPool, table_SP: torch.Tensor, path: AcceptedPath) -> None:
    """Move the keys and values of accepted drafts to the indices behind their root, in order."""
    if table_SP.is_cuda:
        from dovetail.core.ops.kernels.trees import keep_path_triton

        keep_path_triton(pool, table_SP, path)
    else:
        keep_path_reference(pool, table_SP, path)


def keep_path_reference(pool: KVPool, table_SP: torch.Tensor, path: AcceptedPath) -> None:
    size, depth_D = pool.group.page_tokens, torch.arange(1, path.index_RD.shape[1], device=table_SP.device)
    moved_RD = depth_D <= path.accepted_R[:, None]
    slots_R1, root_R1 = path.slots_R[:, None], path.root_R[:, None]
    places = []
    for index_RD in (root_R1 + path.index_RD[:, 1:], root_R1 + depth_D):
        flat_RD = table_SP[slots_R1, index_RD // size].long() * size + index_RD % size
        places.append(torch.where(moved_RD, flat_RD, 0))
    for plane in pool.planes.values():
        # torch cannot index 8-bit floats, so their bytes are indexed instead.
        tokens = (plane.view(torch.uint8) if plane.itemsize == 1 else plane).flatten(1, 2)
        tokens[:, places[1]] = tokens[:, places[0]]


def paths(bits_RK: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index of each draft's ancestor at each depth, [R, K, D]; whether it has one). The last one is itself."""
    step_K = torch.arange(bits_RK.shape[1], device=bits_RK.device)
    above_RKK = ((bits_RK[:, :, None] >> step_K) & 1) != 0
    level_RKK = torch.where(above_RKK, above_RKK.long().cumsum(2) - 1, depth)
    found_RKD = torch.full((*bits_RK.shape, depth + 1), -1, device=bits_RK.device)
    found_RKD.scatter_(2, level_RKK, step_K.expand_as(level_RKK))
    found_RKD = found_RKD[:, :, :depth]
    return found_RKD.clamp_min(0), found_RKD >= 0
