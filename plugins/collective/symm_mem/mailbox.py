"""Memory through which the kernels of all ranks exchange data, in 32-bit words: a box (see kernels.py) per program of
one_shot, then per program of two_shot, then optionally per program of sharded for gathered rows."""

from __future__ import annotations

import torch

from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS, EMPTY
from dovetail.plugins.collective.symm_mem.memory import SharedMemory

TWO_SHOT_PROGRAMS = 2
"""Programs of two_shot per SM: each waits twice per row, and another one uses the SM in that time."""


class Mailbox:
    """Boxes of this rank, written by kernels of all ranks, and the addresses of the other ranks' boxes."""

    def __init__(self, memory: SharedMemory, size: int, device: torch.device, gathers: bool = False) -> None:
        self.boxes: int = torch.cuda.get_device_properties(device).multi_processor_count
        """Programs of a launch that are certain to be resident: one per SM; for two_shot, TWO_SHOT_PROGRAMS per SM."""
        programs = TWO_SHOT_PROGRAMS * self.boxes
        one_shot, two_shot = self.boxes * 2 * size * BOX_WORDS, programs * 2 * 2 * BOX_WORDS
        gather = one_shot if gathers else 0
        self._block = memory.allocate(one_shot + two_shot + gather, EMPTY)
        boxes = self._block.words
        self.one_shot, self.two_shot = boxes[:one_shot], boxes[one_shot : one_shot + two_shot]
        self.gather = boxes[one_shot + two_shot :] if gathers else None
        addresses = torch.tensor(self._block.addresses, dtype=torch.int64)
        self.one_shot_peers = addresses.to(device)
        self.two_shot_peers = (addresses + 4 * one_shot).to(device)
        self.gather_peers = (addresses + 4 * (one_shot + two_shot)).to(device)
        self.one_shot_halves = torch.zeros(self.boxes, dtype=torch.int32, device=device)
        self.two_shot_halves = torch.zeros(programs, dtype=torch.int32, device=device)
        """Half of each program's box that the next call uses; written by this rank's kernels."""
        self._stop_word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.stopped = torch.tensor([0, self._stop_word.data_ptr()], device=device).view(torch.int32)
        """Input of the kernels' `keep_waiting`: a flag written by this rank's kernels, and the host flag's address."""
        torch.cuda.synchronize(device)

    @torch.inference_mode()
    def stop(self) -> None:
        """End the waiting of all kernels, now and later. May be called from any thread. Makes no driver call: that
        could block behind a thread that waits for one of the kernels."""
        self._stop_word.fill_(1)
