"""A rank's device, and its connections to other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.core.interfaces import Collective


@dataclass(frozen=True, slots=True)
class Connection:
    """A rank's device, and its connection to the other ranks."""

    rank: int
    size: int
    device: torch.device
    collective: Collective
    lane_ranks: Collective | None = None
    """Connection to the ranks of all lanes, which share experts; None = there is one lane."""

    def abort(self) -> None:
        """End calls that wait for a rank that died. May be called from another thread, and while connecting."""
        self.collective.abort()
        if self.lane_ranks is not None:
            self.lane_ranks.abort()

    def close(self) -> None:
        """Leave the collective, and return free device memory to the driver."""
        if self.lane_ranks is not None:
            self.lane_ranks.close()
        self.collective.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
