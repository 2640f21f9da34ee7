"""The layout GEMM of AutoAWQ, 4 bits. Shapes: O outputs, I inputs, G groups of inputs.

Tensors have inputs first. A word has eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.core.layouts.words import AWQ_4, pack_words, unpack_words

OUTPUTS = 8
"""The number of outputs must be a multiple of this."""


def pack(codes_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return qweight int32 [I, O / 8], qzeros int32 [G, O / 8] and scales float16 [G, O]. Codes and zeros are uint8."""
    return {
        "qweight": pack_words(codes_OI.t(), 4, 1, AWQ_4).contiguous(),
        "qzeros": pack_words(zero_OG.t(), 4, 1, AWQ_4).contiguous(),
        "scales": scale_OG.t().to(torch.float16).contiguous(),
    }


def unpack(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G]): the inverse of `pack`."""
    codes_IO, zero_GO = (unpack_words(tensors[name], 4, 1, AWQ_4) for name in ("qweight", "qzeros"))
    return codes_IO.t(), tensors["scales"].t(), zero_GO.t()
