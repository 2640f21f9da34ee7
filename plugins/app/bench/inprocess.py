"""Runs a workload on engines without text. One replica is stepped directly, in one thread, so that no other thread
takes the interpreter's lock. Several replicas run in processes, under a request table.

The calling thread only waits for Ctrl-C, which a thread that waits for a rank in C code would not receive."""

from __future__ import annotations

import gc
import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import FinishReason, Progress, RequestOptions, SamplingParams, TimedRequest, TokenLogprobs
from dovetail.core.parallel.failure import for_user
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.target import OnDone, Target
from dovetail.plugins.app.bench.turns import Turns

if TYPE_CHECKING:
    from dovetail.core.engine.counters import Counters
    from dovetail.core.engine.engine import Engine
    from dovetail.core.engine.results import SequenceEvent
    from dovetail.core.frontend.engines import Engines
    from dovetail.core.frontend.messages import EngineStats
    from dovetail.core.frontend.request_table import Delivery, OpenRequest

KV_EVERY = 16
"""Steps between samples of KV cache usage, whose cost grows with the number of sequences."""
POLL_SECONDS = 0.1
"""Seconds between checks whether the run was stopped."""

Answer = tuple[list[int], list[TokenLogprobs]]
"""Output tokens and prompt log-probabilities of one prompt."""


class EngineTarget(Target):
    @property
    def adapters(self) -> Collection[str]:
        part = self.composition.part("adapter")
        loaded: Mapping[str, str] = part.target().initial(part.config)
        return loaded

    def check_grammars(self) -> None:
        if self.composition.choices["grammar"] == "none":
            raise ConfigError("the workload has requests with a grammar, which grammar=none refuses: choose another")
        _ = self.tokenizer

    def start(self, progress: Progress) -> dict[str, Any]:
        from dovetail.core.engine.engine import start_engine
        from dovetail.core.frontend.engines import start_engines

        began = time.perf_counter()
        engine = self.composition.engine
        self.engine: Any = (start_engine if engine.dp == 1 else start_engines)(self.composition, progress)
        """An Engine, or Engines if there are replicas."""
        # As in a server: what was loaded stays, so the collector need not traverse it again and again.
        gc.collect()
        gc.freeze()
        info = self.engine.info
        self.max_len = info.max_len
        return {
            "target": "engine",
            "layout": {"tp": engine.tp, "pp": engine.pp, "dp": engine.dp},
            "device": info.device,
            "startup_s": round(time.perf_counter() - began, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
            "kv_pages": dict(info.num_pages),
            "slower_paths": list(info.notes),
            "tuning": info.tuning,
        }

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Run requests at their arrival times. All that have arrived are queued before the next step."""
        # Otherwise this run would find the prompts of the last one in the cache.
        reset = self.engine.reset_cache()
        gc.collect()
        drive = (StepDrive if self.composition.engine.dp == 1 else TableDrive)(self.engine, requests, on_done)
        self._run_in_thread(drive)
        return drive.timelines, drive.figures() | ({} if reset else {"prefix_cache_kept": True})

    def complete(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Run all prompts at once, without cached prefixes. Raises RequestError for a prompt that cannot run."""
        self.engine.reset_cache()
        complete = _step_to_the_end if self.composition.engine.dp == 1 else _submit_and_wait
        return complete(self.engine, prompts, params)

    def _run_in_thread(self, drive: Drive) -> None:
        from dovetail.core.frontend.local_engine import STEP_SECONDS

        ended: Future[None] = Future()

        def run() -> None:
            try:
                drive.run()
            except Exception as error:
                ended.set_exception(for_user(error, self.composition))
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        # Not joined: a join that Ctrl-C breaks off marks the thread as ended (Python 3.11).
        threading.Thread(target=run, name="dovetail-bench", daemon=True).start()
        try:
            wait([ended])
        except BaseException:
            drive.stopped = True
            if not wait([ended], STEP_SECONDS).done:
                drive.interrupt()
                wait([ended])
            raise
        ended.result()

    def close(self) -> None:
        if (engine := getattr(self, "engine", None)) is not None:
            (engine.shutdown if self.composition.engine.dp == 1 else engine.close)()


def _step_to_the_end(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    found: dict[int, Answer] = {}
    for ids, one in zip(prompts, params, strict=True):
        (seq,) = engine.add(ids, one)
        found[seq.uid] = ([], [])
    while engine.has_work:
        for event in engine.step():
            if event.reason is FinishReason.REJECTED:
                raise RequestError(event.detail)
            tokens, logprobs = found[event.uid]
            tokens += event.tokens
            logprobs += event.prompt_logprobs
    return list(found.values())


def _submit_and_wait(
    engines: Engines, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    from dovetail.core.frontend.request_table import NewRequest

    found: list[Answer] = [([], []) for _ in prompts]
    done: list[Future[None]] = [Future() for _ in prompts]

    def deliver(number: int, request: OpenRequest, delivery: Delivery) -> None:
        for delta in delivery.deltas:
            found[number][0].extend(delta.token_ids)
            found[number][1].extend(delta.prompt_logprobs)
        if delivery.error is not None:
            done[number].set_exception(delivery.error)
        elif delivery.last:
            done[number].set_result(None)

    pairs = enumerate(zip(prompts, params, strict=True))
    engines.table.submit(*(NewRequest(ids, one, RequestOptions(), partial(deliver, i)) for i, (ids, one) in pairs))
    for one in done:
        one.result()
    return found


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


class StepDrive(Drive):
    """Steps the engine in this process."""

    def __init__(self, engine: Engine, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.engine = engine
        super().__init__(requests, on_done)
        self._running: dict[int, int] = {}
        """Uid -> index of the request."""
        self._steps = 0

    def _counted(self) -> list[tuple[Counters, int]]:
        return [(copy(self.engine.counters), self.engine.scheduler.stats().preemptions)]

    def interrupt(self) -> None:
        self.engine.interrupt()

    def run(self) -> None:
        engine, due = self.engine, self._due
        began = time.perf_counter()
        while not self.stopped and (due or engine.has_work):
            now = time.perf_counter() - began
            while (index := self._take(now)) is not None:
                self._add(index, began)
            if not engine.has_work:
                _sleep_until(began + due[0][0])
                continue
            if due and (delay := engine.launch_delay()):
                # The launch waits for requests, as in a server.
                _sleep_until(began + now + min(due[0][0] - now, delay))
                continue
            events = self._step()
            clock = time.perf_counter() - began
            for event in events:
                index = self._running[event.uid]
                if event.tokens:
                    self._came(index, clock, event.tokens)
                    self.replicas[0].output_tokens += len(event.tokens)
                if event.reason is not None:
                    del self._running[event.uid]
                    if event.reason is FinishReason.REJECTED:
                        self.timelines[index].failure = event.detail
                    self._finished(index, clock)

    def _add(self, index: int, began: float) -> None:
        (seq,) = self.engine.add(*self._prepared(index, began))
        self._running[seq.uid] = index
        self.replicas[0].requests += 1

    def _step(self) -> list[SequenceEvent]:
        events = self.engine.step()
        self._steps += 1
        if self._steps % KV_EVERY == 0:
            stats = self.engine.kv.stats()
            if stats.pages:
                self.replicas[0].kv.append(KVSample(stats.owned / stats.pages, stats.owned_tokens, stats.used_tokens))
        return events


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
        now = self._counted()
        each = [
            {"requests": one.requests, "output_tokens": one.output_tokens} | _figures([one], [after])
            for one, after in zip(self.replicas, now, strict=True)
        ]
        # client_busy close to 1: this process is the bottleneck and replicas wait for it.
        return _figures(self.replicas, now) | {"client_busy": round(self._cpu / self._wall, 4), "replicas": each}


def _by_position(now: Sequence[tuple[Counters, int]], replicas: Sequence[ReplicaRun]) -> list[float | None]:
    """Return the share of accepted drafts by position, among those that follow accepted ones; None = none did."""
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


def _sleep_until(moment: float) -> None:
    """Sleep, and spin for the last millisecond, since a sleep may overrun."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 1e-3:
            time.sleep(left - 1e-3)
