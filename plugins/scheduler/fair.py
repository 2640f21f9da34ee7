"""Users in turn: deficit round robin (Shreedhar and Varghese 1995), counted in tokens as in VTC (Sheng et al. 2024)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import FinishReason, KVAllocator, SchedulerContext, SchedulerLimits, Sequence
from dovetail.plugins.scheduler.config import FairConfig
from dovetail.plugins.scheduler.expected import expected_output

_Turn = tuple[int, int, str]
"""(round, who came first, user)"""


@dataclass(slots=True)
class _User:
    """Somebody with sequences here."""

    quantum: float
    number: int
    queue: deque[Sequence] = field(default_factory=deque)
    """In order of arrival; who has left it is dropped when met."""
    spent: float = 0.0
    """Tokens. Each quantum of them uses up one round."""
    here: int = 0
    """Sequences not finished."""
    turn: _Turn | None = None
    """The entry of the heap that counts; others are old."""


class FairScheduler(PolicyScheduler):
    """Each round, every user with work waiting starts sequences until a quantum (times weight) of tokens is spent; what
    was overdrawn uses up later rounds.

    A sequence is charged when it first enters, for its prompt and expected output; what it became is settled when it
    ends. Who comes from idleness starts in the current round, so saved rounds do not add up. Who has nothing left here
    is forgotten. Preempted sequences come first: they have been charged.
    """

    config: FairConfig

    def __init__(self, config: FairConfig, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self._users: dict[str, _User] = {}
        self._turns: list[_Turn] = []
        self._charged: dict[int, float] = {}
        """By uid, for sequences that have entered."""
        self._arrivals = 0

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        name = seq.request.user
        if name not in self._users:
            self._arrivals += 1
            self._users[name] = _User(self.config.quantum * self.config.weights.get(name, 1.0), self._arrivals)
        user = self._users[name]
        user.here += 1
        if seq.uid not in self.waiting:
            return  # It can never run.
        if not self._has_waiting(user):
            user.spent = max(user.spent, self._current_round() * user.quantum)
            user.turn = None
        user.queue.append(seq)
        self._charge(name, 0)

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        """What would happen if everybody could enter, step by step: nothing is charged here."""
        yield from self.resuming.values()
        self._current_round()
        turns, spent = self._turns.copy(), {}
        queues = {}
        counts: dict[str, _Turn | None] = {}
        while turns:
            turn = heapq.heappop(turns)
            name = turn[-1]
            user = self._users.get(name)
            if user is None or turn is not counts.get(name, user.turn):
                continue
            if name not in queues:
                queues[name] = (seq for seq in user.queue if seq.uid in self.waiting)
                spent[name] = user.spent
            for seq in queues[name]:
                yield seq
                spent[name] += self._price(seq)
                if (later := int(spent[name] // user.quantum)) > turn[0]:
                    counts[name] = (later, user.number, name)
                    heapq.heappush(turns, counts[name])
                    break

    def entered(self, seq: Sequence, ctx: SchedulerContext) -> None:
        if seq.uid not in self._charged:
            self._charged[seq.uid] = price = self._price(seq)
            self._charge(seq.request.user, price)

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        seq = self._sequences.get(uid)
        if seq is None:
            return
        name, length = seq.request.user, seq.known_len
        super().finish(uid, keep_len, reason)
        if uid in self._charged:
            self._charge(name, length - self._charged.pop(uid))
        self._users[name].here -= 1
        if not self._users[name].here:
            del self._users[name]

    def _price(self, seq: Sequence) -> float:
        return seq.known_len + expected_output(seq, self.length_limit(seq))

    def _charge(self, name: str, tokens: float) -> None:
        user = self._users[name]
        user.spent += tokens
        turn = (int(user.spent // user.quantum), user.number, name)
        if user.turn != turn:
            user.turn = turn
            heapq.heappush(self._turns, turn)

    def _current_round(self) -> int:
        """The earliest of those who wait; if nobody does, of those who run. Drops old heap entries on the way."""
        while self._turns:
            user = self._users.get(self._turns[0][-1])
            if user is not None and user.turn is self._turns[0] and self._has_waiting(user):
                return user.turn[0]
            heapq.heappop(self._turns)
        return min((int(user.spent // user.quantum) for user in self._users.values()), default=0)

    def _has_waiting(self, user: _User) -> bool:
        while user.queue and user.queue[0].uid not in self.waiting:
            user.queue.popleft()
        return bool(user.queue)
