"""One copy to the device for everything that a step tells it."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Section = Seq[int] | NDArray[np.int64]


_FLOAT64, _INT64 = struct.Struct("=d"), struct.Struct("=q")


class Upload:
    """Sections of 64-bit integers, gathered in pinned memory and sent together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, sections: Seq[Section]) -> list[torch.Tensor]:
        """Each section as an int64 tensor on the device; views of one tensor."""
        sizes = [len(section) for section in sections]
        host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        values, at = host.numpy(), 0
        for section, size in zip(sections, sizes, strict=True):
            values[at : at + size] = section
            at += size
        return list(host.to(self.device, non_blocking=True).split(sizes))


def float_bits(value: float) -> int:
    """A float64's bits, to travel among integers."""
    bits: int = _INT64.unpack(_FLOAT64.pack(value))[0]
    return bits


def floats(bits: torch.Tensor) -> torch.Tensor:
    """float32 of what float_bits made."""
    return bits.contiguous().view(torch.float64).float()
