"""One copy to the device for everything that a step sends."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.core.arithmetic import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Section = Seq[int] | NDArray[np.int64]


_FLOAT64, _INT64 = struct.Struct("=d"), struct.Struct("=q")


class Upload:
    """Gathers sections of 64-bit integers in pinned memory and sends them together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, sections: Seq[Section]) -> list[torch.Tensor]:
        """Return each section as an int64 tensor on the device. They are views of one tensor, each aligned to 16 bytes:
        otherwise Triton would compile the kernels that read them once more for each mixture of alignments."""
        room = [ceil_div(len(section), 2) * 2 for section in sections]
        host = torch.empty(sum(room), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        values, at = host.numpy(), 0
        for section, size in zip(sections, room, strict=True):
            values[at : at + len(section)] = section
            at += size
        sent = host.to(self.device, non_blocking=True).split(room)
        return [whole[: len(section)] for whole, section in zip(sent, sections, strict=True)]


def float_bits(value: float) -> int:
    """Return the bits of a float64, which can then travel among integers."""
    bits: int = _INT64.unpack(_FLOAT64.pack(value))[0]
    return bits


def floats(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 values of what `float_bits` returned."""
    return bits.contiguous().view(torch.float64).float()
