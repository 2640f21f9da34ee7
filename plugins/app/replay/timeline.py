"""Timeline of a recording in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.core.interfaces.plan import DECODE
from dovetail.core.recording.recording import Life, Recording

SCHEMA = "dovetail.trace/1"
"""Format version of the timeline; it is in the first event, where viewers ignore it."""
ENGINE, REQUESTS = 1, 2
"""Process numbers: groups of rows."""
HOST, DEVICE, FIRST = 11, 12, 20
"""Thread numbers: rows of the engine's group, and the row of the first sequence. Perfetto takes a thread with its
process's number for the main thread, and versions before August 2025 merge thread 0 with another one."""

Event = dict[str, Any]


def trace_events(recording: Recording) -> Iterator[Event]:
    yield from _names(recording)
    yield from _steps(recording)
    yield from _requests(recording)


def write_timeline(path: str, recording: Recording) -> None:
    text = json.dumps({"traceEvents": list(trace_events(recording)), "displayTimeUnit": "ms"})
    Path(path).write_text(text + "\n", encoding="utf-8")


def _names(recording: Recording) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": ENGINE, "args": {"name": "engine", "schema": SCHEMA}}
    yield {"ph": "M", "name": "process_name", "pid": REQUESTS, "args": {"name": "requests"}}
    yield from _row(ENGINE, HOST, "host")
    yield from _row(ENGINE, DEVICE, "device")
    for life in recording.lives:
        sample = f" sample {life.added.sample}" if life.added.sample else ""
        adapter = f" [{life.request.adapter}]" if life.request.adapter else ""
        name = f"request {life.request.uid}{sample}{adapter}"
        yield from _row(REQUESTS, FIRST + life.number, name)


def _row(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    # Viewers sort rows by their names otherwise: request 1024 before request 256.
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


class _Clock:
    def __init__(self, recording: Recording) -> None:
        self._zero = min(recording.header.clock, *(life.request.arrival for life in recording.lives))

    def bar(self, name: str, pid: int, tid: int, start: float, end: float, **args: Any) -> Event:
        ts = round((start - self._zero) * 1e6, 1)
        took = round(max(end - start, 0.0) * 1e6, 1)
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": took, "args": args}

    def phase(self, name: str, number: int, start: float, end: float, **args: Any) -> Event:
        """Return a bar in the row of a sequence."""
        return self.bar(name, REQUESTS, FIRST + number, start, end, **args)

    def mark(self, name: str, number: int, at: float, **args: Any) -> Event:
        ts = round((at - self._zero) * 1e6, 1)
        return {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": FIRST + number, "ts": ts, "args": args}


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
            yield clock.phase(f"decode {tokens}", number, start, end, tokens=tokens)

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
                yield clock.phase(f"prefill {row.count}", number, start, end, tokens=row.count, upto=row.bound)
    for number in list(decoding):
        yield from flush(number)


def _waiting(clock: _Clock, life: Life) -> Iterator[Event]:
    request = life.request
    end = life.scheduled if life.scheduled is not None else life.ended.clock if life.ended else request.arrival
    facts = {"prompt": len(request.prompt) // 4, "adapter": request.adapter, "user": request.user}
    yield clock.phase("waiting", life.number, request.arrival, end, **{k: v for k, v in facts.items() if v})
    if life.ended is not None:
        yield clock.mark(life.ended.reason, life.number, life.ended.clock)
