"""Features of a step's last tokens, kept for the drafter.

Shapes: T tokens, B rows, S slots, W kept positions, C channels of a part, F of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keep_features(
    parts_TC: Sequence[torch.Tensor],
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    kv_len_B: torch.Tensor,
    kept_SWF: torch.Tensor,
) -> None:
    """Write the features of the last W tokens of each row: position p of slot s to entry p % W of `kept_SWF[s]`.

    `parts_TC`: features, of which channels are next to each other in `kept_SWF`. `row_start_B1`: index of each row's
    first token, then the number of tokens. `kv_len_B`: position after each row's last token. The last slot is padding:
    its features are any."""
    if kept_SWF.is_cuda:
        from dovetail.core.ops.kernels.features import keep_features_triton

        keep_features_triton(parts_TC, slots_B, row_start_B1, kv_len_B, kept_SWF)
    else:
        keep_features_reference(parts_TC, slots_B, row_start_B1, kv_len_B, kept_SWF)


def keep_features_reference(
    parts_TC: Sequence[torch.Tensor],
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    kv_len_B: torch.Tensor,
    kept_SWF: torch.Tensor,
) -> None:
    slots, width, _ = kept_SWF.shape
    features_TF = torch.cat([*parts_TC], -1)
    back_W = torch.arange(width, device=kept_SWF.device)
    index_BW = (row_start_B1[1:, None] - 1 - back_W).clamp(0, len(features_TF) - 1)
    entry_BW = (kv_len_B[:, None].long() - 1 - back_W) % width
    # A device that is waited for would count them.
    slots_BW = torch.where(back_W < row_start_B1.diff()[:, None], slots_B[:, None], slots - 1)
    kept_SWF[slots_BW, entry_BW] = features_TF[index_BW]
