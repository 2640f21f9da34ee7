"""One copy to the device for everything that a step tells it."""

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
    """Sections of 64-bit integers, gathered in pinned memory and sent together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, sections: Seq[Section]) -> list[torch.Tensor]:
        """Each section as an int64 tensor on the device; views of one tensor, that each begin where kernels may read 16
        bytes at a time: else Triton would compile them once more for each mixture of even and odd places."""
        room = [ceil_div(len(section), 2) * 2 for section in sections]
        host = torch.empty(sum(room), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        values, at = host.numpy(), 0
        for section, size in zip(sections, room, strict=True):
            values[at : at + len(section)] = section
            at += size
        sent = host.to(self.device, non_blocking=True).split(room)
        return [whole[: len(section)] for whole, section in zip(sent, sections, strict=True)]


def float_bits(value: float) -> int:
    """A float64's bits, to travel among integers."""
    bits: int = _INT64.unpack(_FLOAT64.pack(value))[0]
    return bits


def floats(bits: torch.Tensor) -> torch.Tensor:
    """float32 of what float_bits made."""
    return bits.contiguous().view(torch.float64).float()
