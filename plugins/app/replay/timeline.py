"""Timeline of a recording in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.core.interfaces import Row
from dovetail.core.interfaces.plan import DECODE
from dovetail.core.recording.recording import Life, Recording

ENGINE, REQUESTS = 1, 2
"""Process numbers: groups of rows."""
HOST, DEVICE = 1, 2
"""Thread numbers: rows of the engine's group."""

Event = dict[str, Any]


def write_timeline(path: str, recording: Recording) -> None:
    events = [*_names(recording), *_steps(recording), *_requests(recording)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text + "\n", encoding="utf-8")


def _names(recording: Recording) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for tid, name in ((HOST, "host"), (DEVICE, "device")):
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": tid, "args": {"name": name}}
    for uid, life in recording.lives.items():
        sample = f" sample {life.added.sample}" if life.added.sample else ""
        adapter = f" [{life.request.adapter}]" if life.request.adapter else ""
        name = f"request {life.request.uid}{sample}{adapter}"
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": uid, "args": {"name": name}}


class _Clock:
    def __init__(self, recording: Recording) -> None:
        self._zero = min(recording.header.clock, *(life.request.arrival for life in recording.lives.values()))

    def bar(self, name: str, pid: int, tid: int, start: float, end: float, **args: Any) -> Event:
        ts = round((start - self._zero) * 1e6, 1)
        took = round(max(end - start, 0.0) * 1e6, 1)
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": took, "args": args}

    def mark(self, name: str, tid: int, at: float, **args: Any) -> Event:
        ts = round((at - self._zero) * 1e6, 1)
        return {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": tid, "ts": ts, "args": args}


def _steps(recording: Recording) -> Iterator[Event]:
    clock = _Clock(recording)
    for plan in recording.plans:
        counts = {"waiting": plan.waiting, "running": plan.running}
        yield clock.bar(f"schedule {plan.step}", ENGINE, HOST, plan.clock, plan.clock + plan.seconds, **counts)
    for plan, _, start, end in recording.spans():
        facts = {"rows": len(plan.rows), "tokens": sum(row.count for row in plan.rows), "page copies": len(plan.ops)}
        yield clock.bar(f"step {plan.step}", ENGINE, DEVICE, start, end, **facts)


def _requests(recording: Recording) -> Iterator[Event]:
    """Yield a bar for each wait, each prompt chunk, and each unbroken sequence of decode steps."""
    clock = _Clock(recording)
    decoding: dict[int, tuple[float, float, int]] = {}
    """uid -> (start, end, tokens) of the bar that is growing."""

    def flush(uid: int) -> Iterator[Event]:
        if uid in decoding:
            start, end, tokens = decoding.pop(uid)
            yield clock.bar(f"decode {tokens}", REQUESTS, uid, start, end, tokens=tokens)

    for uid, life in recording.lives.items():
        yield from _waiting(clock, uid, life)
    for plan, result, start, end in recording.spans():
        for join in plan.joins:
            yield from flush(join.uid)
            if join.epoch:
                yield clock.mark("preempted before", join.uid, start, preemptions=join.epoch)
            if join.computed:
                yield clock.mark(f"prefix hit {join.computed}", join.uid, start, tokens=join.computed)
        for row, (tokens, _) in zip(plan.rows, recording.rows(result, len(plan.rows)), strict=True):
            if row.flags & DECODE:
                first, _, before = decoding.get(row.uid, (start, end, 0))
                decoding[row.uid] = first, end, before + len(tokens)
            else:
                yield from flush(row.uid)
                yield _chunk(clock, row, start, end)
    for uid in list(decoding):
        yield from flush(uid)


def _waiting(clock: _Clock, uid: int, life: Life) -> Iterator[Event]:
    request = life.request
    end = life.scheduled if life.scheduled is not None else life.ended.clock if life.ended else request.arrival
    facts = {"prompt": len(request.prompt) // 4, "adapter": request.adapter, "user": request.user}
    yield clock.bar("waiting", REQUESTS, uid, request.arrival, end, **{k: v for k, v in facts.items() if v})
    if life.ended is not None:
        yield clock.mark(life.ended.reason, uid, life.ended.clock)


def _chunk(clock: _Clock, row: Row, start: float, end: float) -> Event:
    return clock.bar(f"prefill {row.count}", REQUESTS, row.uid, start, end, tokens=row.count, upto=row.bound)
