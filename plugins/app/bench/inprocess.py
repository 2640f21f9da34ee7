"""Measure the engine in this process, on token ids only. With several replicas, their processes are driven from here.

One thread drives the engine and no other one competes for the GIL. The main thread only waits for Ctrl-C, which could
not interrupt a thread that waits for a rank in C code.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.core.interfaces import FinishReason, Progress, SamplingParams, TimedRequest
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.target import OnDone, Target

if TYPE_CHECKING:
    from dovetail.core.engine.counters import Counters
    from dovetail.core.engine.engine import Engine
    from dovetail.core.engine.results import SequenceEvent
    from dovetail.core.frontend.messages import EngineStats
    from dovetail.core.frontend.replicated import ReplicatedEngine

KV_EVERY = 16
"""Steps between samples of KV cache usage, whose cost grows with the number of sequences."""
MOST_WAIT = 0.02
"""Seconds to wait for replicas before checking for new arrivals."""


class EngineTarget(Target):
    @property
    def adapters(self) -> Collection[str]:
        part = self.composition.part("adapter")
        loaded: Mapping[str, str] = part.target().initial(part.config)
        return loaded

    def start(self, progress: Progress) -> dict[str, Any]:
        from dovetail.core.frontend.llm import make_engine

        began = time.perf_counter()
        self.engine = make_engine(self.composition)
        self.engine.start(progress)
        # As in a server: exclude all objects loaded so far from garbage collection.
        gc.collect()
        gc.freeze()
        info, engine = self.engine.info, self.composition.engine
        self.max_len = info.max_len
        return {
            "target": "engine",
            "layout": {"tp": engine.tp, "pp": engine.pp, "dp": engine.dp},
            "device": info.device,
            "startup_s": round(time.perf_counter() - began, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
            "kv_pages": dict(info.num_pages),
            "slower_paths": list(info.notes),
        }

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Run the requests. All that have arrived are queued before the next step, so a burst starts in one step."""
        # Otherwise a run would find the prompts of the previous one in the cache.
        reset = self.engine.reset_cache()
        gc.collect()
        drive = (Drive if self.composition.engine.dp == 1 else ReplicatedDrive)(self.engine, requests, on_done)
        self._run_in_thread(drive)
        return drive.timelines, drive.figures() | ({} if reset else {"prefix_cache_kept": True})

    def _run_in_thread(self, drive: Drive) -> None:
        from dovetail.core.frontend.llm import STEP_SECONDS

        ended: Future[None] = Future()

        def run() -> None:
            try:
                drive.run()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        # Not joined: in Python 3.11, a join interrupted by Ctrl-C marks the running thread as finished.
        threading.Thread(target=run, name="dovetail-bench", daemon=True).start()
        try:
            wait([ended])
        except BaseException:
            drive.stopped = True
            if not wait([ended], STEP_SECONDS).done:
                self.engine.interrupt()
                wait([ended])
            raise
        ended.result()

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()


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
    """Counters and number of preemptions at the start of the run."""
    kv: list[KVSample] = field(default_factory=list)
    requests: int = 0
    output_tokens: int = 0


class Drive:
    """One run on an engine in this process."""

    def __init__(self, engine: Any, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.engine, self.requests, self._on_done = engine, requests, on_done
        self.timelines = [Timeline(r.arrival, len(r.prompt_ids), r.slo) for r in requests]
        self._running: dict[int, tuple[Timeline, ReplicaRun]] = {}
        self._added = self._done = self._steps = 0
        self.stopped = False
        """Set by another thread: `run` then returns after its current step."""
        self.replicas = [ReplicaRun(before) for before in self._counted()]

    # Overridden for several replicas.

    def _counted(self) -> list[tuple[Counters, int]]:
        engine: Engine = self.engine
        return [(copy(engine.counters), engine.scheduler.stats().preemptions)]

    def _step(self, wait: float) -> list[SequenceEvent]:
        engine: Engine = self.engine
        events = engine.step()
        self._steps += 1
        if self._steps % KV_EVERY == 0:
            stats = engine.kv.stats()
            if stats.pages:
                self.replicas[0].kv.append(KVSample(stats.owned / stats.pages, stats.owned_tokens, stats.used_tokens))
        return events

    def _replica_of(self, uid: int) -> int:
        return 0

    def _spare(self) -> float:
        """Return the seconds by which the next step can be delayed for new arrivals, as in a server."""
        engine: Engine = self.engine
        return engine.launch_delay()

    # The same for any number of replicas.

    def run(self) -> None:
        engine, requests = self.engine, self.requests
        began = time.perf_counter()
        while not self.stopped and (self._added < len(requests) or engine.has_work):
            now = time.perf_counter() - began
            while self._added < len(requests) and requests[self._added].arrival <= now:
                self._add()
            wait = requests[self._added].arrival - now if self._added < len(requests) else MOST_WAIT
            if not engine.has_work:
                _sleep_until(began + requests[self._added].arrival)
                continue
            if self._added < len(requests) and (spare := self._spare()):
                _sleep_until(began + now + min(wait, spare))
                continue
            events = self._step(wait)
            clock = time.perf_counter() - began
            for event in events:
                line, replica = self._running[event.uid]
                if event.tokens:
                    line.came(clock, len(event.tokens))
                    replica.output_tokens += len(event.tokens)
                if event.reason is not None:
                    self._finish(event.uid, event.reason, event.detail)

    def _add(self) -> None:
        request = self.requests[self._added]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        given = {"priority": request.priority, "user": request.user, "cache_salt": request.cache_salt}
        (seq,) = self.engine.add(request.prompt_ids, params, adapter=request.adapter, **given)
        replica = self.replicas[self._replica_of(seq.uid)]
        self._running[seq.uid] = self.timelines[self._added], replica
        self._added += 1
        replica.requests += 1

    def _finish(self, uid: int, reason: FinishReason, detail: str) -> None:
        line, _ = self._running.pop(uid)
        if reason is FinishReason.REJECTED:
            line.failure = detail
        self._done += 1
        self._on_done(self._done)

    def figures(self) -> dict[str, Any]:
        """Return the engine's figures of the run; a value that it cannot measure is None."""
        return _figures(self.replicas, self._counted())


class ReplicatedDrive(Drive):
    """One run on several replicas: figures of all together and of each."""

    engine: ReplicatedEngine

    def __init__(self, engine: Any, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        super().__init__(engine, requests, on_done)
        engine.on_stats = self._sample
        self._cpu = self._wall = 0.0

    def _counted(self) -> list[tuple[Counters, int]]:
        return [(figures.counters, figures.stats.preemptions) for figures in self.engine.figures()]

    def _step(self, wait: float) -> list[SequenceEvent]:
        return self.engine.step(min(max(wait, 0.0), MOST_WAIT))

    def _replica_of(self, uid: int) -> int:
        return self.engine.replica_of(uid)

    def _spare(self) -> float:
        return 0.0  # The loop in each replica's process delays its steps itself.

    def _sample(self, replica: int, stats: EngineStats) -> None:
        if stats.running and stats.pages:
            self.replicas[replica].kv.append(KVSample(stats.kv_usage, stats.tokens_owned, stats.tokens_used))

    def run(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        super().run()
        self._cpu, self._wall = time.process_time() - cpu, time.perf_counter() - wall

    def figures(self) -> dict[str, Any]:
        now = self._counted()
        each = [
            {"requests": one.requests, "output_tokens": one.output_tokens} | _figures([one], [after])
            for one, after in zip(self.replicas, now, strict=True)
        ]
        # client_busy close to 1: this process is the bottleneck and replicas wait for it.
        return _figures(self.replicas, now) | {"client_busy": round(self._cpu / self._wall, 4), "replicas": each}


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
    }


def _sleep_until(moment: float) -> None:
    """Sleep, and spin for the last millisecond, since a sleep may overrun."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 1e-3:
            time.sleep(left - 1e-3)
