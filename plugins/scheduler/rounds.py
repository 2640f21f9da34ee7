"""What the fair scheduler knows of one user."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from dovetail.core.interfaces import Sequence

Turn = tuple[int, int, str]
"""(round, who came first, user)"""


@dataclass(slots=True)
class User:
    """Somebody with sequences here."""

    name: str
    number: int
    quantum: float
    queue: deque[Sequence] = field(default_factory=deque)
    """In order of arrival; who has left it is dropped when met."""
    spent: float = 0.0
    """Tokens. Each quantum of them uses up one round."""
    here: int = 0
    """Sequences not finished."""
    turn: Turn | None = None
    """The entry of the heap that counts; others are old."""

    @property
    def round(self) -> int:
        return int(self.spent // self.quantum)

    def charge(self, tokens: float, turns: list[Turn]) -> None:
        """Spend tokens, or get them back; a change of round goes to the heap."""
        self.spent += tokens
        turn = (self.round, self.number, self.name)
        if self.turn != turn:
            self.turn = turn
            heapq.heappush(turns, turn)
