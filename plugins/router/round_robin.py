"""Round robin over replicas."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.plugins.router.config import RoundRobinConfig


class RoundRobin(Router):
    def __init__(self, config: RoundRobinConfig, replicas: int) -> None:
        super().__init__(config, replicas)
        self._last = -1

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        """Return the next replica in `loads`. Replicas that accept no requests are not listed."""
        later = (load.replica for load in loads if load.replica > self._last)
        self._last = next(later, loads[0].replica)
        return self._last
