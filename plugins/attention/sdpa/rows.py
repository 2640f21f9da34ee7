"""Rows of a step that are processed in one call: their tokens, places of keys and masks, all computed on the device.

Shapes: T tokens, B rows, N tokens of a row (padded), L keys of a row (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import BatchMeta, HostBounds, TreeMask
from dovetail.core.interfaces.spec_decode import MOST_NODES
from dovetail.core.ops.trees import within_window


@dataclass(slots=True)
class RowBatch:
    """Rows of one KV group and step that are processed in one call."""

    tokens: slice
    """Range of the step's tokens."""
    gather_BN: torch.Tensor
    """int64: token of the step at each row and position. Padding repeats some token of the step."""
    scatter_T: torch.Tensor
    """int64: index of each token in the flattened [B, N]."""
    keys_BL: torch.Tensor
    """int64: flat token slot of each key. Padding points at some slot of the pool."""
    exists_BL: torch.Tensor
    """bool: whether the key is within the row's length."""
    at_BN: torch.Tensor
    """int64: index of each query's own key."""
    tree: TreeMask | None
    """Mask of each query, [B, N]; None = causal."""
    whole_prompt: bool
    """Whether this is one row that attends only to its own tokens of this step."""
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """window -> bool [B, N, L]; filled by the first layer that needs it."""

    def reached_BL(self, window: int) -> torch.Tensor:
        """bool: whether some query of the row sees the key. A page behind the window may belong to another sequence."""
        if not window:
            return self.exists_BL
        key_L = torch.arange(self.keys_BL.shape[1], device=self.keys_BL.device)
        return self.exists_BL & (key_L > self.at_BN[:, :1] - window)

    def mask_BNL(self, window: int) -> torch.Tensor:
        if window not in self.masks:
            key_L = torch.arange(self.keys_BL.shape[1], device=self.keys_BL.device)
            at_BN1 = self.at_BN[:, :, None]
            if self.tree is not None:
                seen = self._tree_BNL(self.tree, window, key_L)
            else:
                seen = key_L <= at_BN1
                if window:
                    seen = seen & (key_L > at_BN1 - window)
            self.masks[window] = seen & self.exists_BL[:, None, :]
        return self.masks[window]

    def _tree_BNL(self, tree: TreeMask, window: int, key_L: torch.Tensor) -> torch.Tensor:
        first_BN, bits_BN = within_window(tree, window, self.at_BN.shape[1] - 1)
        draft_BNL = key_L - tree.root_T[:, :, None] - 1
        bit_BNL = (bits_BN[:, :, None] >> draft_BNL.clamp(0, MOST_NODES - 1)) & 1
        behind_BNL = (bit_BNL != 0) & (draft_BNL < MOST_NODES)
        return torch.where(draft_BNL < 0, key_L >= first_BN[:, :, None], behind_BNL)


def plan_rows(meta: BatchMeta, host: HostBounds, first: int, last: int, tree: TreeMask | None) -> RowBatch:
    """Plan rows `first` to `last` of a step."""
    device, counts = meta.kv_len_B.device, host.counts[first:last]
    tokens = slice(sum(host.counts[:first]), sum(host.counts[:last]))
    longest = max(counts)
    pages = min(ceil_div(max(host.bounds[first:last]), meta.page_tokens), meta.page_table_BP.shape[1])

    start_B = meta.row_start_B1[first:last].long()
    count_B = meta.row_start_B1[first + 1 : last + 1].long() - start_B
    len_B = meta.kv_len_B[first:last].long()
    steps_N = torch.arange(longest, device=device)
    rows_T = meta.rows_T[tokens] - first
    key_L = torch.arange(pages * meta.page_tokens, device=device)
    page_BL = meta.page_table_BP[first:last, :pages].long().repeat_interleave(meta.page_tokens, dim=1)

    gather_BN = start_B[:, None] + torch.minimum(steps_N, count_B[:, None] - 1)
    at_BN = (len_B - count_B)[:, None] + steps_N
    return RowBatch(
        tokens=tokens,
        gather_BN=gather_BN,
        scatter_T=rows_T * longest + torch.arange(tokens.start, tokens.stop, device=device) - start_B[rows_T],
        keys_BL=page_BL * meta.page_tokens + key_L % meta.page_tokens,
        exists_BL=key_L < len_B[:, None],
        at_BN=at_BN,
        tree=None if tree is None else TreeMask(tree.root_T[gather_BN], tree.ancestors_T[gather_BN]),
        whole_prompt=len(counts) == 1 and host.bounds[first] == counts[0] and tree is None,
    )
