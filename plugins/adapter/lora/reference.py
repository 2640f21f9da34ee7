"""y += (x A^T) B^T in torch, each row with the factors of its slot. Reference of the kernel, and the CPU path.

Shapes: T tokens, I input, O output, S slots, P parts of a merged layer, R rank.
"""

from __future__ import annotations

import torch


def lora_reference(
    x_TI: torch.Tensor,
    y_TO: torch.Tensor,
    a_SPRI: torch.Tensor,
    b_SOR: torch.Tensor,
    slots_T: torch.Tensor,
    parts: tuple[int, ...],
) -> None:
    """Update y_TO in place. `parts`: outputs of each part. Sums are float32; x A^T is rounded to the factors' dtype."""
    for slot, (a_PRI, b_OR) in enumerate(zip(a_SPRI, b_SOR, strict=True)):
        inner_TPR = torch.einsum("ti,pri->tpr", x_TI.float(), a_PRI.float()).to(b_OR.dtype).float()
        added = [inner_TPR[:, part] @ b_oR.float().t() for part, b_oR in enumerate(b_OR.split(parts))]
        changed_TO = (y_TO.float() + torch.cat(added, 1)).to(y_TO.dtype)
        y_TO.copy_(torch.where((slots_T == slot)[:, None], changed_TO, y_TO))
