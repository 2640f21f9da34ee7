"""Drives the engine in one thread, without text, while no other takes turns of the interpreter's lock: the calling one
waits for Ctrl-C, which a thread that waits for a rank in C code would not hear. With several replicas it drives their
processes."""

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
"""Steps between two looks at the KV cache, which costs time by the number of sequences."""
MOST_WAIT = 0.02
"""Seconds that replicas are listened to before it is seen whether a request has arrived."""


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
        # As in a server: what was loaded stays, and the collector need not walk it again and again.
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
        """All that have arrived are queued before the next step: a burst waits for nobody's first step."""
        # Or the next run would find the prompts of the last.
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

        # Not joined: a join that Ctrl-C breaks off takes the thread for one that has ended (Python 3.11).
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


class Look(NamedTuple):
    """At a KV cache that is in use."""

    used: float
    """Share of pages."""
    owned_tokens: int
    used_tokens: int


@dataclass(slots=True)
class Seen:
    """What is known of one replica in a run."""

    before: tuple[Counters, int]
    """Counters and preemptions when the run began."""
    kv: list[Look] = field(default_factory=list)
    requests: int = 0
    output_tokens: int = 0


class Drive:
    """One run."""

    def __init__(self, engine: Any, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.engine, self.requests, self._on_done = engine, requests, on_done
        self.timelines = [Timeline(r.arrival, len(r.prompt_ids), r.slo) for r in requests]
        self._running: dict[int, tuple[Timeline, Seen]] = {}
        self._added = self._done = self._steps = 0
        self.stopped = False
        """Set from another thread: `run` returns after the step that it is in."""
        self.seen = [Seen(before) for before in self._counted()]

    # The one replica in this process.

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
                self.seen[0].kv.append(Look(stats.owned / stats.pages, stats.owned_tokens, stats.used_tokens))
        return events

    def _replica_of(self, uid: int) -> int:
        return 0

    def _spare(self) -> float:
        """Seconds for which the next step can wait for whoever comes, as it does in a server."""
        engine: Engine = self.engine
        return engine.launch_delay()

    # Any.

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
                line, seen = self._running[event.uid]
                if event.tokens:
                    line.came(clock, len(event.tokens))
                    seen.output_tokens += len(event.tokens)
                if event.reason is not None:
                    self._finish(event.uid, event.reason, event.detail)

    def _add(self) -> None:
        request = self.requests[self._added]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        given = {"priority": request.priority, "user": request.user, "cache_salt": request.cache_salt}
        (seq,) = self.engine.add(request.prompt_ids, params, adapter=request.adapter, **given)
        seen = self.seen[self._replica_of(seq.uid)]
        self._running[seq.uid] = self.timelines[self._added], seen
        self._added += 1
        seen.requests += 1

    def _finish(self, uid: int, reason: FinishReason, detail: str) -> None:
        line, _ = self._running.pop(uid)
        if reason is FinishReason.REJECTED:
            line.failure = detail
        self._done += 1
        self._on_done(self._done)

    def figures(self) -> dict[str, Any]:
        """What the engine can tell of the run; None = it cannot."""
        return _figures(self.seen, self._counted())


class ReplicatedDrive(Drive):
    """All replicas together, and each beside it."""

    engine: ReplicatedEngine

    def __init__(self, engine: Any, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        super().__init__(engine, requests, on_done)
        engine.on_stats = self._look
        self._cpu = self._wall = 0.0

    def _counted(self) -> list[tuple[Counters, int]]:
        return [(figures.counters, figures.stats.preemptions) for figures in self.engine.figures()]

    def _step(self, wait: float) -> list[SequenceEvent]:
        return self.engine.step(min(max(wait, 0.0), MOST_WAIT))

    def _replica_of(self, uid: int) -> int:
        return self.engine.replica_of(uid)

    def _spare(self) -> float:
        return 0.0  # Each replica's own loop waits.

    def _look(self, replica: int, stats: EngineStats) -> None:
        if stats.running and stats.pages:
            self.seen[replica].kv.append(Look(stats.kv_usage, stats.tokens_owned, stats.tokens_used))

    def run(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        super().run()
        self._cpu, self._wall = time.process_time() - cpu, time.perf_counter() - wall

    def figures(self) -> dict[str, Any]:
        now = self._counted()
        each = [
            {"requests": one.requests, "output_tokens": one.output_tokens} | _figures([one], [after])
            for one, after in zip(self.seen, now, strict=True)
        ]
        # Where this process is the bottleneck, replicas wait for it.
        return _figures(self.seen, now) | {"client_busy": round(self._cpu / self._wall, 4), "replicas": each}


def _figures(seen: Sequence[Seen], now: Sequence[tuple[Counters, int]]) -> dict[str, Any]:
    """Of some replicas together: sums, and means over what they did."""

    def gained(name: str) -> float:
        pairs = zip(now, seen, strict=True)
        return sum(getattr(after, name) - getattr(one.before[0], name) for (after, _), one in pairs)

    def per_step(name: str) -> float:
        return round(gained(name) / max(steps, 1) * 1e3, 4)

    steps, idle, worked = int(gained("steps")), gained("idle_seconds"), gained("device_seconds")
    rows, entered, drafted, accepted = map(gained, ("decode_rows", "entered_tokens", "drafted", "accepted"))
    looks = [look for one in seen for look in one.kv]
    used, slots = [look.used for look in looks], sum(look.owned_tokens for look in looks)
    return {
        "steps": steps,
        "host_ms_per_step": {part: per_step(f"{part}_seconds") for part in ("schedule", "submit", "wait", "update")},
        "device_ms_per_step": per_step("device_seconds"),
        "device_idle": round(idle / (idle + worked), 4) if worked else None,
        "kv_used_mean": round(sum(used) / len(used), 4) if used else None,
        "kv_used_max": round(max(used), 4) if used else None,
        "kv_waste": round(1 - sum(look.used_tokens for look in looks) / slots, 4) if slots else None,
        "prefix_hit_rate": round(gained("cached_tokens") / entered, 4) if entered else None,
        "preemptions": sum(after - one.before[1] for (_, after), one in zip(now, seen, strict=True)),
        "draft_acceptance": round(accepted / drafted, 4) if drafted else None,
        "acceptance_length": round(1 + accepted / rows, 4) if drafted and rows else None,
    }


def _sleep_until(moment: float) -> None:
    """The last millisecond is waited for awake: a sleep may last longer than asked for."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 1e-3:
            time.sleep(left - 1e-3)
