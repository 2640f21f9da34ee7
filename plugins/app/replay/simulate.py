"""Runs recorded arrivals through schedulers and allocators, on devices that exist as step times only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Literal

from dovetail.core.engine.pooling import clear_sample_flags
from dovetail.core.engine.tracked import Tracked
from dovetail.core.errors import DovetailError
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.interfaces import (
    FinishReason,
    ReplicaLoad,
    RequestOptions,
    RowResult,
    SchedulerContext,
    Sequence,
    StepPlan,
    StepResult,
)
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


@dataclass(frozen=True, slots=True)
class _Timed:
    clock: float
    what: Literal["add", "abort", "reset"]
    life: Life | None = None
    """None for "reset"."""


class Replica:
    """One engine: a scheduler, an allocator, and a device that exists as step times only."""

    def __init__(self, recording: Recording, parts: Parts, times: StepTimes, outcome: Outcome) -> None:
        self._recording, self._parts, self._times, self._outcome = recording, parts, times, outcome
        self._acceptance = _acceptance(recording)
        self._runs: dict[int, _Run] = {}
        self._tracked: dict[int, Tracked] = {}
        self._flights: deque[_Flight] = deque()
        self._now = self._free = 0.0
        self._steps = 0

    @property
    def now(self) -> float:
        """Time of the last result or event, seconds of the recorded engine's clock."""
        return self._now

    def load(self, number: int) -> ReplicaLoad:
        """Return what a router sees of this replica."""
        stats = self._parts.kv.stats()
        unread = (one.seq.prompt_len for uid, one in self._tracked.items() if self._runs[uid].life.first_token is None)
        return ReplicaLoad(number, len(self._tracked), sum(unread), stats.owned / stats.pages if stats.pages else 0.0)

    def advance(self, until: float) -> None:
        """Take all results until then."""
        while self._flights and self._flights[0].end <= until:
            self._take(self._flights.popleft())
            self._launch()
        if until != math.inf:
            self._now = max(self._now, until)
        elif self._tracked:
            raise RuntimeError(f"{len(self._tracked)} sequences wait, and nothing is launched")

    def launch(self) -> None:
        """Launch after an event. An engine with plans in flight waits for a result first."""
        if not self._flights:
            self._launch()

    def _launch(self) -> None:
        parts = self._parts
        while len(self._flights) < parts.limits.depth:
            ctx = SchedulerContext(self._steps, self._now, parts.seed, parts.limits.depth, parts.kv, parts.cost)
            plan = parts.scheduler.schedule(ctx)
            if plan is not None:
                clear_sample_flags(plan, self._tracked)
                self._enqueue(plan)
            for uid, _ in parts.scheduler.take_rejected():
                self._outcome.rejected += 1
                self.end(uid, 0, FinishReason.REJECTED)
            if plan is None:
                return

    def add(self, recorded: Life) -> None:
        """Take a sequence, whose number becomes its uid."""
        uid, added = recorded.number, recorded.added
        parent = None if recorded.parent is None else self._runs.get(recorded.parent.number)
        seq = Sequence(
            uid,
            self._recording.request(recorded.request) if parent is None else parent.seq.request,
            added.sample,
            None if parent is None else parent.seq,
            limit=added.limit,
        )
        life = Life(uid, recorded.request, added)
        self._outcome.lives.append(life)
        self._runs[uid] = _Run(life, recorded, seq)
        self._tracked[uid] = Tracked(seq)
        self._parts.scheduler.add(seq)

    def reset(self) -> None:
        """Empty the prefix cache."""
        if self._parts.kv.stats().cached:
            self._parts.kv.reset()

    def end(self, uid: int, keep: int, reason: FinishReason) -> None:
        """End a sequence; unknown and ended ones are ignored."""
        if self._tracked.pop(uid, None) is None:
            return
        run = self._runs[uid]
        run.life.ended = Ended(uid, self._now, keep, reason.value)
        if reason is FinishReason.ABORT:
            self._parts.scheduler.abort(uid)
        else:
            self._parts.scheduler.finish(uid, keep, reason)

    @property
    def evictions(self) -> int:
        return self._parts.kv.stats().evictions

    def _enqueue(self, plan: StepPlan) -> None:
        seconds = self._times.seconds(plan.rows)
        self._free = max(self._now, self._free) + seconds
        self._flights.append(_Flight(plan, seconds, self._free))
        self._outcome.steps += 1
        self._steps += 1
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
            self.end(uid, keep, FinishReason.LENGTH)

    def _tokens(self, run: _Run, draft: int) -> tuple[int, ...]:
        run.credit += draft * self._acceptance
        accepted = min(int(run.credit), self._parts.limits.gain(draft) - 1)
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


class Simulation:
    """Arrivals and aborts come at the recorded times, outputs have the recorded tokens and lengths, and drafts are
    accepted at the recorded rate. Requests that the recording rejected are left out: their outputs are unknown. With
    several replicas, a router distributes the requests."""

    def __init__(
        self, recording: Recording, parts: Seq[Parts], times: StepTimes, router: CheckedRouter | None = None
    ) -> None:
        """`parts`: of each replica. `router`: required for several."""
        self._recording, self._router = recording, router
        self._outcome = Outcome([])
        self._replicas = [Replica(recording, one, times, self._outcome) for one in parts]
        self._placed: dict[int, Replica] = {}
        """Replica of each sequence, by number."""

    def _timed_events(self) -> list[_Timed]:
        """Return arrivals, aborts and resets of the cache, by time."""
        kept = [life for life in self._recording.lives if not _unknown(life)]
        found = [_Timed(life.request.arrival, "add", life) for life in kept]
        found += [
            _Timed(life.ended.clock, "abort", life)
            for life in kept
            if life.ended is not None and life.ended.reason == "abort"
        ]
        found += [_Timed(event.clock, "reset") for event in self._recording.events if isinstance(event, Emptied)]
        return sorted(found, key=lambda one: one.clock)

    def run(self) -> Outcome:
        events = self._timed_events()
        began = next((event.clock for event in events if event.what == "add"), None)
        if began is None:
            raise DovetailError(f"replay.path={self._recording.path}: every recorded request was rejected")
        for clock, at_once in groupby(events, key=lambda one: one.clock):
            for replica in self._replicas:
                replica.advance(clock)
            for event in at_once:
                self._deliver(event)
            for replica in self._replicas:
                replica.launch()
        for replica in self._replicas:
            replica.advance(math.inf)
        self._outcome.seconds = max(replica.now for replica in self._replicas) - began
        self._outcome.evictions = sum(replica.evictions for replica in self._replicas)
        return self._outcome

    def _deliver(self, event: _Timed) -> None:
        life = event.life
        if life is None:
            for replica in self._replicas:
                replica.reset()
        elif event.what == "abort":
            self._placed[life.number].end(life.number, 0, FinishReason.ABORT)
        else:
            with_parent = None if life.parent is None else self._placed.get(life.parent.number)
            replica = self._placed[life.number] = with_parent or self._choose(life)
            replica.add(life)

    def _choose(self, life: Life) -> Replica:
        if self._router is None:
            return self._replicas[0]
        request = self._recording.request(life.request)
        loads = [replica.load(number) for number, replica in enumerate(self._replicas)]
        options = RequestOptions(**{field.name: getattr(request, field.name) for field in fields(RequestOptions)})
        return self._replicas[self._router.choose(request.prompt_ids, request.params.n, options, loads)]


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
    lives = recording.lives
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
