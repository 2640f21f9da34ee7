"""LaneGroup: replicas whose engines share routed experts. They start, run and end together."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.core.compose.composition import Lane
from dovetail.core.parallel.address import free_address
from dovetail.core.parallel.lanes import LOST, LaneBoard

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_GATHER_SECONDS = 3.0
"""How long the end of a lane that lost its connection waits for the death that caused this."""
_CONNECTING = "'connect ranks'"


class Death(NamedTuple):
    """End of one lane's engine process."""

    replica: int
    cause: str
    """End of a sentence whose subject is the replica."""
    traceback: str

    @property
    def follows(self) -> bool:
        """Whether another lane may be the cause: the connection to it was lost, or was never made."""
        return LOST in self.cause or _CONNECTING in self.cause


class LaneGroup:
    """Made by the process that starts the lanes. `death` may be called from any thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._open = ExitStack()
        self._address = self._open.enter_context(free_address())
        self.board = LaneBoard(count)
        self._deaths: list[Death] = []
        self._died = threading.Condition()

    def place(self, composition: Composition, number: int) -> Composition:
        """Return the composition of one lane."""
        return replace(composition, lane=Lane(number, self.count, self._address))

    def access(self, composition: Composition) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the descriptors that a lane's process inherits, and the arguments of its Lanes."""
        assert composition.lane is not None
        number = composition.lane.number
        return self.board.descriptors(number), self.board.order(number)

    def waits_for(self, composition: Composition) -> list[int]:
        """Return the lanes for which this composition's lane waits."""
        assert composition.lane is not None
        late = self.board.late()
        return [] if composition.lane.number in late else late

    def death(self, replica: int, cause: str, traceback: str = "") -> Death:
        """Note that a lane has ended, and end the others. Return the first cause: the earliest death that no other one
        explains. Waits a moment for it."""
        own = Death(replica, cause, traceback)
        with self._died:
            self._deaths.append(own)
            self._died.notify_all()
            self._died.wait_for(lambda: self._first() is not None, _GATHER_SECONDS)
            found = self._first() or self._deaths[0]
        self.board.end()
        return found

    def _first(self) -> Death | None:
        return next((death for death in self._deaths if not death.follows), None)

    def end(self) -> None:
        """End all waits of lanes for each other."""
        self.board.end()

    def close(self) -> None:
        """Release address and memory, once all lanes have ended."""
        self.board.close()
        self._open.close()
