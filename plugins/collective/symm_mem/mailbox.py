"""Where the kernels of all ranks write to each other.

Layout, in 32-bit words: a box for each program of one_shot, then one for each program of two_shot, then, where they are
asked for, one for what each program of sharded gathers. kernels.py says what a box holds.
"""

from __future__ import annotations

import torch

from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS, EMPTY
from dovetail.plugins.collective.symm_mem.memory import SharedMemory

TWO_SHOT_PROGRAMS = 2
"""On a multiprocessor: they wait twice for each row, and another one works meanwhile."""


class Mailbox:
    """Written by kernels of all ranks, except where it says otherwise."""

    def __init__(self, memory: SharedMemory, size: int, device: torch.device, gathers: bool = False) -> None:
        self.boxes: int = torch.cuda.get_device_properties(device).multi_processor_count
        """As many programs of one launch as are certain to be resident, one on each multiprocessor; of two_shot,
        TWO_SHOT_PROGRAMS times as many."""
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
        self.one_shot_turns = torch.zeros(self.boxes, dtype=torch.int32, device=device)
        self.two_shot_turns = torch.zeros(programs, dtype=torch.int32, device=device)
        """Written by this rank's kernels."""
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.stopped = torch.tensor([0, self._told.data_ptr()], device=device).view(torch.int32)
        """What the kernels' `going_on` reads: a word that this rank's kernels write, and where the host's word lies."""
        torch.cuda.synchronize(device)

    @torch.inference_mode()
    def stop(self) -> None:
        """Ends the waiting of all kernels, now and later; from any thread. No call of the driver, which might wait for
        a thread that waits for one of the kernels."""
        self._told.fill_(1)
