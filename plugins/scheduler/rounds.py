"""State of the fair scheduler per user."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from dovetail.core.interfaces import Sequence

Turn = tuple[int, int, str]
"""(round, number of the user for ties, name)"""


@dataclass(slots=True)
class User:
    """A user with unfinished sequences."""

    name: str
    number: int
    quantum: float
    queue: deque[Sequence] = field(default_factory=deque)
    """Waiting sequences by arrival. Those that have left are dropped lazily."""
    spent: float = 0.0
    """Tokens charged. Each quantum uses up one round."""
    here: int = 0
    """Unfinished sequences."""
    turn: Turn | None = None
    """The user's valid heap entry; other entries are outdated."""

    @property
    def round(self) -> int:
        return int(self.spent // self.quantum)

    def charge(self, tokens: float, turns: list[Turn]) -> None:
        """Charge tokens, or refund a negative amount. A change of round pushes a heap entry."""
        self.spent += tokens
        turn = (self.round, self.number, self.name)
        if self.turn != turn:
            self.turn = turn
            heapq.heappush(turns, turn)
