"""Timeline of a recording in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.core.interfaces.plan import DECODE
from dovetail.core.recording.recording import Life, Recording

ENGINE, REQUESTS = 1, 2
"""Process numbers: groups of rows."""
HOST, DEVICE = 1, 2
"""Thread numbers: rows of the engine's group."""

Event = dict[str, Any]


def trace_events(recording: Recording) -> Iterator[Event]:
    yield from _names(recording)
    yield from _steps(recording)
    yield from _requests(recording)


def write_timeline(path: str, recording: Recording) -> None:
    text = json.dumps({"traceEvents": list(trace_events(recording)), "displayTimeUnit": "ms"})
    Path(path).write_text(text + "\n", encoding="utf-8")


def _names(recording: Recording) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for tid, name in ((HOST, "host"), (DEVICE, "device")):
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": tid, "args": {"name": name}}
    for life in recording.lives:
        sample = f" sample {life.added.sample}" if life.added.sample else ""
        adapter = f" [{life.request.adapter}]" if life.request.adapter else ""
        name = f"request {life.request.uid}{sample}{adapter}"
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": life.number, "args": {"name": name}}


class _Clock:
    def __init__(self, recording: Recording) -> None:
        self._zero = min(recording.header.clock, *(life.request.arrival for life in recording.lives))

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
    for _, plan, _, start, end in recording.spans():
        facts = {"rows": len(plan.rows), "tokens": sum(row.count for row in plan.rows), "page copies": len(plan.ops)}
        yield clock.bar(f"step {plan.step}", ENGINE, DEVICE, start, end, **facts)


def _requests(recording: Recording) -> Iterator[Event]:
    """Yield a bar for each wait, each prompt chunk, and each unbroken sequence of decode steps."""
    clock = _Clock(recording)
    decoding: dict[int, tuple[float, float, int]] = {}
    """Number of a sequence -> (start, end, tokens) of the bar that is growing."""

    def flush(number: int) -> Iterator[Event]:
        if number in decoding:
            start, end, tokens = decoding.pop(number)
            yield clock.bar(f"decode {tokens}", REQUESTS, number, start, end, tokens=tokens)

    for life in recording.lives:
        yield from _waiting(clock, life)
    for i, plan, result, start, end in recording.spans():
        placed = recording.placed[i]
        for join in plan.joins:
            number = placed[join.uid].number
            yield from flush(number)
            if join.epoch:
                yield clock.mark("preempted before", number, start, preemptions=join.epoch)
            if join.computed:
                yield clock.mark(f"prefix hit {join.computed}", number, start, tokens=join.computed)
        for row, (tokens, _) in zip(plan.rows, recording.rows(result, len(plan.rows)), strict=True):
            number = placed[row.uid].number
            if row.flags & DECODE:
                first, _, before = decoding.get(number, (start, end, 0))
                decoding[number] = first, end, before + len(tokens)
            else:
                yield from flush(number)
                yield clock.bar(f"prefill {row.count}", REQUESTS, number, start, end, tokens=row.count, upto=row.bound)
    for number in list(decoding):
        yield from flush(number)


def _waiting(clock: _Clock, life: Life) -> Iterator[Event]:
    request = life.request
    end = life.scheduled if life.scheduled is not None else life.ended.clock if life.ended else request.arrival
    facts = {"prompt": len(request.prompt) // 4, "adapter": request.adapter, "user": request.user}
    yield clock.bar("waiting", REQUESTS, life.number, request.arrival, end, **{k: v for k, v in facts.items() if v})
    if life.ended is not None:
        yield clock.mark(life.ended.reason, life.number, life.ended.clock)
