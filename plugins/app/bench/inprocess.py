"""Drives the engine in this thread: no second one whose turns of the interpreter's lock would be measured, no text."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces import FinishReason, Progress, SamplingParams, TimedRequest
from dovetail.plugins.app.bench.metrics import Timeline
from dovetail.plugins.app.bench.target import OnDone, Target

if TYPE_CHECKING:
    from dovetail.core.engine.engine import Counters, Engine
    from dovetail.core.interfaces import KVStats

KV_EVERY = 16
"""Steps between two looks at the KV cache, which costs time by the number of sequences."""


class EngineTarget(Target):
    def start(self, progress: Progress) -> dict[str, Any]:
        from dovetail.core.engine.engine import Engine

        began = time.perf_counter()
        self.engine = Engine(self.composition)
        self.engine.start(progress)
        # As in a server: what was loaded stays, and the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        info = self.engine.info
        self.max_len = info.max_len
        return {
            "target": "engine",
            "device": info.device,
            "startup_s": round(time.perf_counter() - began, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
            "kv_pages": dict(info.num_pages),
            "slower_paths": list(info.notes),
        }

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """All that have arrived are queued before the next step: a burst waits for nobody's first step."""
        reset = forget_prefixes(self.engine)
        gc.collect()
        drive = Drive(self.engine, requests, on_done)
        drive.run()
        return drive.timelines, drive.figures() | ({} if reset else {"prefix_cache_kept": True})

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()


def forget_prefixes(engine: Engine) -> bool:
    """Between runs, or the next one would find the prompts of the last. False = this allocator cannot."""
    if not engine.kv.stats().cached:
        return True
    try:
        engine.kv.reset()
    except NotImplementedError:
        return False
    return True


class Drive:
    """One run."""

    def __init__(self, engine: Engine, requests: Sequence[TimedRequest], on_done: OnDone) -> None:
        self.engine, self.requests, self._on_done = engine, requests, on_done
        self.timelines = [Timeline(r.arrival, len(r.prompt_ids), r.slo) for r in requests]
        self._running: dict[int, Timeline] = {}
        self._added = self._done = 0
        self._kv: list[KVStats] = []
        self._before = self._state()

    def _state(self) -> tuple[Counters, int]:
        return copy(self.engine.counters), self.engine.scheduler.stats().preemptions

    def run(self) -> None:
        engine, requests = self.engine, self.requests
        began = time.perf_counter()
        steps = 0
        while self._added < len(requests) or engine.has_work:
            now = time.perf_counter() - began
            while self._added < len(requests) and requests[self._added].arrival <= now:
                self._add()
            if not engine.has_work:
                _sleep_until(began + requests[self._added].arrival)
                continue
            events = engine.step()
            clock = time.perf_counter() - began
            for event in events:
                line = self._running[event.uid]
                if event.tokens:
                    line.came(clock, len(event.tokens))
                if event.reason is not None:
                    self._finish(event.uid, event.reason, event.detail)
            steps += 1
            if steps % KV_EVERY == 0:
                self._kv.append(engine.kv.stats())

    def _add(self) -> None:
        request = self.requests[self._added]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        given = {"priority": request.priority, "user": request.user, "cache_salt": request.cache_salt}
        (seq,) = self.engine.add(request.prompt_ids, params, **given)  # type: ignore[arg-type]
        self._running[seq.uid] = self.timelines[self._added]
        self._added += 1

    def _finish(self, uid: int, reason: FinishReason, detail: str) -> None:
        if reason is FinishReason.REJECTED:
            self._running[uid].failure = detail
        del self._running[uid]
        self._done += 1
        self._on_done(self._done)

    def figures(self) -> dict[str, Any]:
        """What the engine can tell of the run; None = it cannot."""
        (before, preempted), (now, preemptions) = self._before, self._state()
        steps = now.steps - before.steps

        def per_step(name: str) -> float:
            return round((getattr(now, name) - getattr(before, name)) / max(steps, 1) * 1e3, 4)

        idle, worked = now.idle_seconds - before.idle_seconds, now.device_seconds - before.device_seconds
        rows, entered = now.decode_rows - before.decode_rows, now.entered_tokens - before.entered_tokens
        drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
        used = [stats.owned / stats.pages for stats in self._kv if stats.pages]
        slots = sum(stats.owned_tokens for stats in self._kv)
        return {
            "steps": steps,
            "host_ms_per_step": {
                part: per_step(f"{part}_seconds") for part in ("schedule", "submit", "wait", "update")
            },
            "device_ms_per_step": per_step("device_seconds"),
            "device_idle": round(idle / (idle + worked), 4) if worked else None,
            "kv_used_mean": round(sum(used) / len(used), 4) if used else None,
            "kv_used_max": round(max(used), 4) if used else None,
            "kv_waste": round(1 - sum(stats.used_tokens for stats in self._kv) / slots, 4) if slots else None,
            "prefix_hit_rate": round((now.cached_tokens - before.cached_tokens) / entered, 4) if entered else None,
            "preemptions": preemptions - preempted,
            "draft_acceptance": round(accepted / drafted, 4) if drafted else None,
            "acceptance_length": round(1 + accepted / rows, 4) if drafted and rows else None,
        }


def _sleep_until(moment: float) -> None:
    """The last millisecond is waited for awake: a sleep may last longer than asked for."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 1e-3:
            time.sleep(left - 1e-3)
