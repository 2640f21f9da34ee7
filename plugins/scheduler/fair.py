"""Deficit round robin between users (Shreedhar and Varghese 1995), counted in tokens as in VTC (Sheng et al. 2024)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import FinishReason, KVAllocator, SchedulerContext, SchedulerLimits, Sequence
from dovetail.plugins.scheduler.config import FairConfig
from dovetail.plugins.scheduler.expected import expected_output

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


class FairScheduler(PolicyScheduler):
    """Every round lets each user with waiting sequences start some until a quantum (times weight) of tokens is spent.
    Overdrawn tokens count in later rounds.

    A sequence is charged at its first admission for its prompt and expected output; the difference to its real length
    is settled when it ends. A user that was idle starts in the current round, so unused rounds do not accumulate. A
    user without unfinished sequences is forgotten. Preempted sequences come first, since they have been charged.
    """

    config: FairConfig

    def __init__(self, config: FairConfig, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self._users: dict[str, User] = {}
        self._turns: list[Turn] = []
        self._charged: dict[int, float] = {}  # Uid -> tokens, for sequences that have entered.
        self._numbers = count()

    def price(self, seq: Sequence) -> float:
        """Return the expected cost of a sequence in tokens."""
        return seq.known_len + expected_output(seq, seq.limit)

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        name = seq.request.user
        if name not in self._users:
            quantum = self.config.quantum * self.config.weights.get(name, 1.0)
            self._users[name] = User(name, next(self._numbers), quantum)
        user = self._users[name]
        user.here += 1
        if seq.uid not in self.waiting:
            return  # Rejected: it can never run.
        if not self._has_waiting(user):
            user.spent = max(user.spent, self._current_round(user) * user.quantum)
            user.turn = None
        user.queue.append(seq)
        user.charge(0, self._turns)

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        """Simulate the rounds on copies as if every sequence could enter. Those that do are charged in `entered`."""
        yield from self.resuming.values()
        self._current_round()
        turns, copies = self._turns.copy(), dict[str, User]()
        while turns:
            turn = heapq.heappop(turns)
            user = copies.get(turn[-1]) or self._users.get(turn[-1])
            if user is None or user.turn is not turn:
                continue
            if user.name not in copies:
                user = copies[user.name] = replace(user, queue=user.queue.copy())
            while user.queue and user.turn is turn:
                seq = user.queue.popleft()
                if seq.uid in self.waiting:
                    yield seq
                    user.charge(self.price(seq), turns)

    def entered(self, seq: Sequence, ctx: SchedulerContext) -> None:
        if seq.uid not in self._charged:
            self._charged[seq.uid] = price = self.price(seq)
            self._users[seq.request.user].charge(price, self._turns)

    def finish(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        if (seq := self._sequences.get(uid)) is None:
            return
        user = self._users[seq.request.user]
        if uid in self._charged:
            user.charge(seq.known_len - self._charged.pop(uid), self._turns)
        super().finish(uid, keep_len, reason)
        user.here -= 1
        if not user.here:
            del self._users[user.name]

    def _current_round(self, newcomer: User | None = None) -> int:
        """Return the earliest round of users with waiting sequences, or else of users with running ones. Drops outdated
        heap entries."""
        while self._turns:
            user = self._users.get(self._turns[0][-1])
            if user is not None and user.turn is self._turns[0] and self._has_waiting(user):
                return user.round
            heapq.heappop(self._turns)
        return min((user.round for user in self._users.values() if user is not newcomer), default=0)

    def _has_waiting(self, user: User) -> bool:
        while user.queue and user.queue[0].uid not in self.waiting:
            user.queue.popleft()
        return bool(user.queue)
