"""Runs of a workload on engines: sends requests at their arrival times and notes when tokens arrive."""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.core.interfaces import Clock, FinishReason, ReplicaLoad, RequestOptions, SamplingParams, TimedRequest
from dovetail.plugins.app.bench.target import OnDone
from dovetail.plugins.app.bench.turns import Turns

if TYPE_CHECKING:
    from dovetail.core.engine.counters import Counters
    from dovetail.core.engine.engine import Engine
    from dovetail.core.engine.results import SequenceEvent
    from dovetail.core.frontend.engines import Engines
    from dovetail.core.frontend.messages import EngineStats
    from dovetail.core.frontend.replicas import CheckedRouter
    from dovetail.core.frontend.request_table import Delivery, OpenRequest
    from dovetail.core.parallel.lockstep import Lockstep

KV_EVERY = 16
"""Steps between samples of KV cache usage, whose cost grows with the number of sequences."""
POLL_SECONDS = 0.1
"""Seconds between checks whether the run was stopped."""
ROUNDING = 1e-9
"""Seconds; more than rounding errors of a clock, and too short to matter."""
SPIN_SECONDS = 1e-3
"""Last part of a wait for a request, which a sleep might overrun."""


class KVSample(NamedTuple):
    """One sample of KV cache usage."""

    used: float
    """Share of pages."""
    owned_tokens: int
    used_tokens: int


@dataclass(slots=True)
class ReplicaRun:
    """Measurements of one replica in a run."""

    before: tuple[Counters, int]
    """Counters and preemptions when the run began."""
    kv: list[KVSample] = field(default_factory=list)
    requests: int = 0
    output_tokens: int = 0


class Drive(ABC):
    """One run of a workload."""

    def __init__(self, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.requests, self._on_done = requests, on_done
        self.turns: Turns[tuple[int, ...]] = Turns(requests, [request.prompt_ids for request in requests])
        self.timelines = self.turns.timelines
        self._answers: dict[int, list[int]] = {i: [] for i in range(len(requests)) if self.turns.continued(i)}
        self._due = [(self.timelines[i].arrival, i) for i in self.turns.first]
        """Heap of (arrival, index) of the requests that can be sent."""
        self._done = 0
        self.stopped = False
        """Set by another thread to make `run` return soon."""
        self.replicas = [ReplicaRun(before) for before in self._counted()]

    @abstractmethod
    def run(self) -> None:
        """Send every request at its arrival time and wait for its end."""

    @abstractmethod
    def _counted(self) -> list[tuple[Counters, int]]:
        """Return the counters and preemptions of each replica."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a hung `run` return; called by another thread."""

    def figures(self) -> dict[str, Any]:
        """Return the engines' figures of the run; a value that they cannot measure is None."""
        return _figures(self.replicas, self._counted())

    def _per_replica(self) -> list[dict[str, Any]]:
        return [
            {"requests": one.requests, "output_tokens": one.output_tokens} | _figures([one], [after])
            for one, after in zip(self.replicas, self._counted(), strict=True)
        ]

    def _take(self, now: float) -> int | None:
        """Return a request that has arrived, once; None = there is none."""
        return heapq.heappop(self._due)[1] if self._due and self._due[0][0] <= now else None

    def _prepared(self, index: int, began: float) -> tuple[Sequence[int], SamplingParams, RequestOptions]:
        request = self.requests[index]
        params = request.sampling.model_copy(update={"max_tokens": request.output_tokens, "ignore_eos": True})
        options = RequestOptions(**{option.name: getattr(request, option.name) for option in fields(RequestOptions)})
        if request.deadline is not None:
            options = replace(options, deadline=began + self.timelines[index].arrival + request.deadline)
        return self.turns.prompts[index], params, options

    def _came(self, index: int, clock: float, tokens: Sequence[int]) -> None:
        self.timelines[index].came(clock, len(tokens))
        if index in self._answers:
            self._answers[index] += tokens

    def _finished(self, index: int, clock: float) -> None:
        self._done += 1
        if self.timelines[index].failure:
            self._done += self.turns.broken_off(index)
        else:
            for one in self.turns.ended(index, clock, tuple(self._answers.pop(index, ()))):
                heapq.heappush(self._due, (self.timelines[one].arrival, one))
        self._on_done(self._done)


@dataclass(slots=True, eq=False)
class _Stepped:
    """One engine of a StepDrive."""

    number: int
    engine: Engine
    running: dict[int, int] = field(default_factory=dict)
    """Uid -> index of the request."""
    unread: dict[int, int] = field(default_factory=dict)
    """Uid -> prompt tokens of a request without output so far."""
    steps: int = 0

    @property
    def clock(self) -> Clock:
        clock: Clock = self.engine.executor.clock
        return clock

    def load(self) -> ReplicaLoad:
        """Return what a router sees."""
        stats = self.engine.kv.stats()
        used = stats.owned / stats.pages if stats.pages else 0.0
        return ReplicaLoad(self.number, len(self.running), sum(self.unread.values()), used)


class StepDrive(Drive):
    """Steps engines in this process. Several of them are simulated, with a virtual time each: the one whose time is
    earliest goes on."""

    def __init__(
        self,
        engines: Sequence[Engine],
        requests: Sequence[TimedRequest],
        on_done: OnDone,
        router: CheckedRouter | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """`router`: required for several engines. `lockstep`: given if they are lanes."""
        self._engines = [_Stepped(number, engine) for number, engine in enumerate(engines)]
        self._router, self._lockstep = router, lockstep
        super().__init__(requests, on_done)

    def _counted(self) -> list[tuple[Counters, int]]:
        return [(copy(one.engine.counters), one.engine.scheduler.stats().preemptions) for one in self._engines]

    def interrupt(self) -> None:
        for one in self._engines:
            one.engine.interrupt()

    def run(self) -> None:
        due = self._due
        began = max(one.clock.now() for one in self._engines)
        if self._lockstep is not None:
            self._lockstep.step = lambda number: self._go_on(self._engines[number], began)
        while not self.stopped and (due or any(one.engine.has_work for one in self._engines)):
            first = self._first()
            now = first.clock.now() - began
            # A virtual clock that has jumped to an arrival may be a rounding error before it.
            while (index := self._take(now + ROUNDING)) is not None:
                self._add(index, began)
            if not first.engine.has_work:
                if due:
                    first.clock.wait_until(began + due[0][0], spin=SPIN_SECONDS)
            elif due and (delay := first.engine.launch_delay()):
                # The launch waits for requests, as in a server.
                first.clock.wait_until(began + now + min(due[0][0] - now, delay), spin=SPIN_SECONDS)
            else:
                self._go_on(first, began)

    def _go_on(self, one: _Stepped, began: float) -> None:
        self._deliver(one, self._step(one), began)

    def _first(self) -> _Stepped:
        """Return the engine that goes on: the one with work whose time is earliest."""
        if len(self._engines) == 1:
            return self._engines[0]
        working = [one for one in self._engines if one.engine.has_work]
        return min(working or self._engines, key=lambda one: one.clock.now())

    def _add(self, index: int, began: float) -> None:
        prompt, params, options = self._prepared(index, began)
        chosen = self._engines[0]
        if self._router is not None:
            loads = [one.load() for one in self._engines]
            chosen = self._engines[self._router.choose(prompt, params.n, options, loads)]
            if not chosen.engine.has_work:
                chosen.clock.wait_until(began + self.timelines[index].arrival)
        (seq,) = chosen.engine.add(prompt, params, options)
        chosen.running[seq.uid] = index
        chosen.unread[seq.uid] = len(prompt)
        self.replicas[chosen.number].requests += 1

    def _deliver(self, one: _Stepped, events: Sequence[SequenceEvent], began: float) -> None:
        now, replica = one.clock.now() - began, self.replicas[one.number]
        for event in events:
            index = one.running[event.uid]
            if event.tokens:
                self._came(index, now, event.tokens)
                replica.output_tokens += len(event.tokens)
                one.unread.pop(event.uid, None)
            if event.reason is not None:
                del one.running[event.uid]
                one.unread.pop(event.uid, None)
                if event.reason is FinishReason.REJECTED:
                    self.timelines[index].failure = event.detail
                self._finished(index, now)

    def _step(self, one: _Stepped) -> list[SequenceEvent]:
        events = one.engine.step()
        one.steps += 1
        if one.steps % KV_EVERY == 0:
            stats = one.engine.kv.stats()
            if stats.pages:
                sample = KVSample(stats.owned / stats.pages, stats.owned_tokens, stats.used_tokens)
                self.replicas[one.number].kv.append(sample)
        return events

    def figures(self) -> dict[str, Any]:
        found = super().figures()
        return found | {"replicas": self._per_replica()} if len(self._engines) > 1 else found


class TableDrive(Drive):
    """Submits to the request table of all replicas, which deliver in their own threads."""

    def __init__(self, engines: Engines, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.engines = engines
        super().__init__(requests, on_done)
        engines.table.on_stats = self._sample
        self._lock = threading.Lock()
        self._ended = threading.Event()
        """A request has ended, or the run is to stop."""
        self._cpu = self._wall = 0.0

    def _counted(self) -> list[tuple[Counters, int]]:
        return [(figures.counters, figures.stats.preemptions) for figures in self.engines.figures()]

    def interrupt(self) -> None:
        self._ended.set()

    def run(self) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        while not self.stopped and self._done < len(self.requests):
            self._ended.clear()
            with self._lock:
                index = self._take(time.perf_counter() - began)
                due = self._due[0][0] if self._due else None
            if index is not None:
                self._submit(index, began)
            elif self._done < len(self.requests):
                self._wait(POLL_SECONDS if due is None else began + due - time.perf_counter())
        self._cpu, self._wall = time.process_time() - cpu, time.perf_counter() - began
        self.engines.check_alive()

    def _wait(self, seconds: float) -> None:
        """Wait until a request ends, at most so long; spin for the last millisecond, since a wait may overrun."""
        if seconds > 1e-3:
            self._ended.wait(min(seconds - 1e-3, POLL_SECONDS))

    def _submit(self, index: int, began: float) -> None:
        from dovetail.core.frontend.request_table import NewRequest

        line = self.timelines[index]

        def deliver(request: OpenRequest, delivery: Delivery) -> None:
            tokens = [token for delta in delivery.deltas for token in delta.token_ids]
            clock = time.perf_counter() - began
            with self._lock:
                if tokens:
                    self._came(index, clock, tokens)
                    self.replicas[request.replica].output_tokens += len(tokens)
                if delivery.error is not None:
                    line.failure = str(delivery.error)
                if delivery.last:
                    self._finished(index, clock)
                    self._ended.set()

        (request,) = self.engines.table.submit(NewRequest(*self._prepared(index, began), deliver))
        self.replicas[request.replica].requests += 1

    def _sample(self, replica: int, stats: EngineStats) -> None:
        if stats.running and stats.pages:
            self.replicas[replica].kv.append(KVSample(stats.kv_usage, stats.tokens_owned, stats.tokens_used))

    def figures(self) -> dict[str, Any]:
        """Figures of all replicas together, and of each."""
        # client_busy close to 1: this process is the bottleneck and replicas wait for it.
        busy = {"client_busy": round(self._cpu / self._wall, 4)}
        return super().figures() | busy | {"replicas": self._per_replica()}


def _by_position(now: Sequence[tuple[Counters, int]], replicas: Sequence[ReplicaRun]) -> list[float | None]:
    """Return the share of accepted drafts by position, among those that follow accepted ones; None = none did."""
    from dovetail.core.engine.counters import Counters

    after, before = Counters.total(each for each, _ in now), Counters.total(one.before[0] for one in replicas)
    gains = []
    for name in ("accepted_at", "reached_at"):
        pairs = zip_longest(getattr(after, name), getattr(before, name), fillvalue=0)
        gains.append([late - early for late, early in pairs])
    return [round(taken / reached, 4) if reached else None for taken, reached in zip(*gains, strict=True)]


def _figures(replicas: Sequence[ReplicaRun], now: Sequence[tuple[Counters, int]]) -> dict[str, Any]:
    """Return the figures of some replicas together: sums, and means weighted by their work."""

    def gained(name: str) -> float:
        pairs = zip(now, replicas, strict=True)
        return sum(getattr(after, name) - getattr(one.before[0], name) for (after, _), one in pairs)

    def per_step(name: str) -> float:
        return round(gained(name) / max(steps, 1) * 1e3, 4)

    steps, idle, worked = int(gained("steps")), gained("idle_seconds"), gained("device_seconds")
    rows, entered, drafted, accepted = map(gained, ("decode_rows", "entered_tokens", "drafted", "accepted"))
    samples = [sample for one in replicas for sample in one.kv]
    used, slots = [sample.used for sample in samples], sum(sample.owned_tokens for sample in samples)
    return {
        "steps": steps,
        "host_ms_per_step": {part: per_step(f"{part}_seconds") for part in ("schedule", "submit", "wait", "update")},
        "device_ms_per_step": per_step("device_seconds"),
        "device_idle": round(idle / (idle + worked), 4) if worked else None,
        "kv_used_mean": round(sum(used) / len(used), 4) if used else None,
        "kv_used_max": round(max(used), 4) if used else None,
        "kv_waste": round(1 - sum(sample.used_tokens for sample in samples) / slots, 4) if slots else None,
        "prefix_hit_rate": round(gained("cached_tokens") / entered, 4) if entered else None,
        "preemptions": sum(after - one.before[1] for (_, after), one in zip(now, replicas, strict=True)),
        "draft_acceptance": round(accepted / drafted, 4) if drafted else None,
        "acceptance_length": round(1 + accepted / rows, 4) if drafted and rows else None,
        "acceptance_by_position": _by_position(now, replicas) if drafted else None,
        "speculation_ms_per_step": {"draft": per_step("draft_seconds"), "draw": per_step("draw_seconds")},
    }
