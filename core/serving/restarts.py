"""How often what dies is started again."""

from __future__ import annotations

import time
from collections import deque

_HOUR = 3600.0


class Restarts:
    def __init__(self, most: int) -> None:
        """Within an hour."""
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self) -> bool:
        """Just now; whether it may be started again."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _HOUR:
            self._deaths.popleft()
        return len(self._deaths) <= self._most
