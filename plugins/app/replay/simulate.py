"""Runs recorded arrivals through a scheduler and an allocator, on a device that exists as step times only."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Any

from dovetail.core.engine.pooling import clear_sample_flags
from dovetail.core.engine.tracked import Tracked
from dovetail.core.errors import DovetailError
from dovetail.core.interfaces import FinishReason, RowResult, SchedulerContext, Sequence, StepPlan, StepResult
from dovetail.core.interfaces.plan import SAMPLE
from dovetail.core.recording.events import Emptied, Ended
from dovetail.core.recording.recording import Life, Recording
from dovetail.plugins.app.replay.parts import Parts
from dovetail.plugins.app.replay.times import StepTimes

FILLER = 1
"""Token of an output that is longer than the recorded one, because it was aborted later."""


@dataclass(slots=True)
class Outcome:
    lives: list[Life]
    steps: int = 0
    fed: int = 0
    """Tokens."""
    seconds: float = 0.0
    """From the first arrival to the last result."""
    evictions: int | None = None
    """None = not recorded."""
    rejected: int = 0


@dataclass(slots=True)
class _Run:
    life: Life
    recorded: Life
    seq: Sequence
    credit: float = 0.0
    """Drafts that are due to be accepted."""


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    seconds: float
    end: float


class Simulation:
    """Arrivals and aborts come at the recorded times, outputs have the recorded tokens and lengths, and drafts are
    accepted at the recorded rate. Requests that the recording rejected are left out: their outputs are unknown."""

    def __init__(self, recording: Recording, parts: Parts, times: StepTimes) -> None:
        self._recording, self._parts, self._times = recording, parts, times
        self._outcome = Outcome([])
        self._runs: dict[int, _Run] = {}
        self._tracked: dict[int, Tracked] = {}
        self._flights: deque[_Flight] = deque()
        self._now = self._free = 0.0
        self._acceptance = _acceptance(recording)
        self._events = self._timed_events()

    def _timed_events(self) -> list[tuple[float, int, Any]]:
        """Return arrivals, aborts and resets of the cache by time."""
        found: list[tuple[float, int, Any]] = []
        kept = {uid: life for uid, life in self._recording.lives.items() if not _unknown(life)}
        found += [(life.request.arrival, i, life) for i, life in enumerate(kept.values())]
        for i, event in enumerate(self._recording.events, len(found)):
            if isinstance(event, Emptied) or (isinstance(event, Ended) and event.reason == "abort"):
                found.append((event.clock, i, event))
        heapq.heapify(found)
        return found

    def run(self) -> Outcome:
        if not self._events:
            raise DovetailError(f"replay.path={self._recording.path}: every recorded request was rejected")
        began = self._now = self._events[0][0]
        while self._events or self._flights or self._tracked:
            self._deliver()
            while len(self._flights) < self._parts.limits.depth and self._launch():
                pass
            if self._flights:
                self._take(self._flights.popleft())
            elif self._events:
                self._now = max(self._now, self._events[0][0])
            elif self._tracked:
                raise RuntimeError(f"{len(self._tracked)} sequences wait, and nothing is launched")
        self._outcome.seconds = self._now - began
        self._outcome.evictions = self._parts.kv.stats().evictions
        return self._outcome

    def _deliver(self) -> None:
        while self._events and self._events[0][0] <= self._now:
            _, _, event = heapq.heappop(self._events)
            if isinstance(event, Life):
                self._add(event)
            elif isinstance(event, Ended):
                self._end(event.uid, 0, FinishReason.ABORT)
            elif self._parts.kv.stats().cached:
                self._parts.kv.reset()

    def _add(self, recorded: Life) -> None:
        added = recorded.added
        parent = None if added.parent is None else self._runs.get(added.parent)
        seq = Sequence(
            added.uid,
            self._recording.request(recorded.request) if parent is None else parent.seq.request,
            added.sample,
            None if parent is None else parent.seq,
            limit=added.limit,
        )
        life = Life(recorded.request, added)
        self._outcome.lives.append(life)
        self._runs[added.uid] = _Run(life, recorded, seq)
        self._tracked[added.uid] = Tracked(seq)
        self._parts.scheduler.add(seq)

    def _launch(self) -> bool:
        parts, step = self._parts, self._outcome.steps
        ctx = SchedulerContext(step, self._now, parts.seed, parts.limits.depth, parts.kv, parts.cost)
        plan = parts.scheduler.schedule(ctx)
        if plan is not None:
            clear_sample_flags(plan, self._tracked)
            self._enqueue(plan)
        for uid, _ in parts.scheduler.take_rejected():
            self._outcome.rejected += 1
            self._end(uid, 0, FinishReason.REJECTED)
        return plan is not None

    def _enqueue(self, plan: StepPlan) -> None:
        seconds = self._times.seconds(plan.rows)
        self._free = max(self._now, self._free) + seconds
        self._flights.append(_Flight(plan, seconds, self._free))
        self._outcome.steps += 1
        self._outcome.fed += plan.num_tokens
        for join in plan.joins:
            life = self._runs[join.uid].life
            if life.scheduled is None:
                life.scheduled, life.cached = self._now, join.computed
            life.preemptions = join.epoch

    def _take(self, flight: _Flight) -> None:
        self._now = max(self._now, flight.end)
        rows, ended = [], []
        for i, row in enumerate(flight.plan.rows):
            run = self._runs[row.uid]
            tokens: tuple[int, ...] = ()
            drafted = 0
            if row.flags & SAMPLE:
                tokens, drafted = self._tokens(run, row.draft), row.draft
                if row.uid in self._tracked:
                    run.seq.tokens += tokens
                    run.life.tokens += tokens
                    if run.life.first_token is None:
                        run.life.first_token = self._now
                    if (keep := self._keeps(run)) is not None:
                        ended.append((row.uid, keep))
            elif run.seq.request.pooling is not None and row.bound >= run.seq.prompt_len:
                run.life.first_token = self._now
                ended.append((row.uid, run.seq.prompt_len))
            rows.append(RowResult(i, row.uid, row.epoch, tokens, drafted=drafted))
        self._parts.scheduler.update(StepResult(flight.plan.step, tuple(rows), flight.seconds))
        for uid, keep in ended:
            self._end(uid, keep, FinishReason.LENGTH)

    def _tokens(self, run: _Run, draft: int) -> tuple[int, ...]:
        run.credit += draft * self._acceptance
        accepted = min(int(run.credit), draft)
        run.credit -= accepted
        at = run.seq.known_len - run.seq.prompt_len
        known = run.recorded.tokens[at : at + 1 + accepted]
        return (*known, *[FILLER] * (1 + accepted - len(known)))

    def _keeps(self, run: _Run) -> int | None:
        """Return the length at which a sequence ends, or None if it goes on."""
        ended, seq = run.recorded.ended, run.seq
        aborted = ended is not None and ended.reason == "abort"
        last = seq.limit if aborted else max(seq.prompt_len + run.recorded.output, seq.prompt_len + 1)
        last = min(last, seq.limit)
        return last if run.seq.known_len >= last else None

    def _end(self, uid: int, keep: int, reason: FinishReason) -> None:
        if self._tracked.pop(uid, None) is None:
            return
        run = self._runs[uid]
        run.life.ended = Ended(uid, self._now, keep, reason.value)
        if reason is FinishReason.ABORT:
            self._parts.scheduler.abort(uid)
        else:
            self._parts.scheduler.finish(uid, keep, reason)


def _unknown(life: Life) -> bool:
    return life.ended is not None and life.ended.reason == "rejected"


def _acceptance(recording: Recording) -> float:
    """Return the recorded share of drafts that were accepted."""
    drafted = sum(sum(result.drafted or ()) for result in recording.results)
    accepted = sum(
        sum(max(count - 1, 0) for count in result.counts or ()) for result in recording.results if result.drafted
    )
    return accepted / drafted if drafted else 0.0


def recorded_outcome(recording: Recording) -> Outcome:
    """Return what was measured."""
    lives = list(recording.lives.values())
    ends = [result.clock for result in recording.results]
    first = min(life.request.arrival for life in lives)
    return Outcome(
        lives,
        len(recording.plans),
        sum(row.count for plan in recording.plans for row in plan.rows),
        (ends[-1] - first) if ends else 0.0,
        None,
        sum(_unknown(life) for life in lives),
    )
