"""Rounds of conversations: the requests of a run that wait for the answer to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from dovetail.core.interfaces import TimedRequest
from dovetail.plugins.app.bench.metrics import Timeline

P = TypeVar("P", tuple[int, ...], str)
"""Form of prompts and answers: token ids or text."""
BROKEN_OFF = "the request that it continues failed"


class Turns(Generic[P]):
    """Prompts and timelines of a run. A request that continues another gets its prompt and its arrival when the other
    one ends."""

    def __init__(self, requests: Sequence[TimedRequest], messages: Sequence[P]) -> None:
        """`messages`: what each request adds to the request that it continues, in the form in which it is sent."""
        self.requests = requests
        self.prompts: list[P] = list(messages)
        self.timelines = [Timeline(r.arrival, len(r.prompt_ids), r.slo) for r in requests]
        self.first = [index for index, request in enumerate(requests) if request.continues is None]
        """Requests that begin a conversation, in order of arrival."""
        self._next: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.continues is not None:
                self._next.setdefault(request.continues, []).append(index)

    def continued(self, index: int) -> bool:
        """Whether a request needs the answer to this one."""
        return index in self._next

    def ended(self, index: int, clock: float, answer: P) -> list[int]:
        """Return the requests that continue this one, which has ended at `clock`. They may be sent at their arrival."""
        before = self.timelines[index]
        for one in self._next.get(index, ()):
            line, request = self.timelines[one], self.requests[one]
            self.prompts[one] = self.prompts[index] + answer + self.prompts[one]
            line.prompt_tokens = before.prompt_tokens + before.tokens + len(request.prompt_ids)
            line.arrival = clock + request.arrival
        return self._next.get(index, [])

    def broken_off(self, index: int) -> int:
        """Mark all further rounds of a failed request as failed. Returns their number."""
        found = 0
        for one in self._next.get(index, ()):
            self.timelines[one].failure = BROKEN_OFF
            found += 1 + self.broken_off(one)
        return found
