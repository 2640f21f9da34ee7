"""Features: hidden states of the target that a drafter builds on, kept for the latest positions of every slot.

Shapes: T tokens of a step, B rows, S slots, W kept positions, F channels, C of a part of them.
"""

from __future__ import annotations

import torch

from dovetail.core.interfaces import AcceptedPath, FedTokens, TargetView
from dovetail.core.ops.features import keep_features


class FeatureStore:
    """The features of the last `width` positions of each slot. Position p is entry p % width. Features of rejected
    drafts need no clean-up: they are past the row's length, and the steps that reach their positions replace them."""

    def __init__(self, target: TargetView, width: int, channels: int) -> None:
        """`width`: positions that one step feeds of a decode row, so that those that it accepts can be read."""
        build = target.build
        self.width = width
        # The last slot is padding, and one more stays zero.
        kept_SWF = torch.zeros(target.max_seqs + 2, width, channels, dtype=build.dtype, device=build.device)
        self._kept_SWF, self._all_SWF = kept_SWF[:-1], kept_SWF

    def keep(self, fed: FedTokens, *parts_TC: torch.Tensor) -> None:
        """Keep the features of the last `width` tokens of each row. `parts_TC`: tensors whose channels are next to each
        other in a feature."""
        keep_features(parts_TC, fed.slots_B, fed.row_start_B1, fed.kv_len_B, self._kept_SWF)

    def move(self, path: AcceptedPath) -> None:
        """Drafter.keep: features of accepted drafts are at their positions then. `width` must hold the whole tree."""
        depth_D = torch.arange(1, path.index_RD.shape[1], device=path.index_RD.device)
        moved_RD = depth_D <= path.accepted_R[:, None]
        slots_RD = torch.where(moved_RD, path.slots_R[:, None], len(self._kept_SWF) - 1)
        root_R1 = path.root_R[:, None]
        kept_RDF = self._kept_SWF[slots_RD, (root_R1 + path.index_RD[:, 1:]) % self.width]
        self._kept_SWF[slots_RD, (root_R1 + depth_D) % self.width] = kept_RDF

    def before(self, fed: FedTokens, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the feature of the position before each token, [T, F]; zeros before position 0. The features of this
        step must not be kept yet."""
        count_B, last = fed.row_start_B1.diff(), len(features_TF)
        before_TF = torch.cat((features_TF[:1], features_TF))
        # A row without tokens begins where another row does. The entry past the last token is not used.
        first_B = torch.where(count_B > 0, fed.row_start_B1[:-1], last).long()
        before_TF[first_B] = self.at(fed.slots_B, fed.kv_len_B - count_B.long() - 1)
        return before_TF[:last]

    def at(self, slots_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Return the features of these positions, [..., F], which must be among the latest `width` of their slots;
        zeros for position -1. `positions_B` may have more dimensions than `slots_B`, which is then broadcast."""
        entry_B = slots_B * self.width + positions_B % self.width
        entry_B = torch.where(positions_B < 0, len(self._kept_SWF) * self.width, entry_B)
        # A lookup copies whole rows; indexing with several tensors copies single numbers, and takes ten times as long.
        return torch.nn.functional.embedding(entry_B, self._all_SWF.flatten(0, 1))
