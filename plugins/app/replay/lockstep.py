"""Repeats the recorded calls of a scheduler, in their order, and compares its answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.engine.pooling import clear_sample_flags
from dovetail.core.engine.tracked import Tracked
from dovetail.core.interfaces import (
    CatchUp,
    FinishReason,
    Join,
    PageDelta,
    PageOp,
    PageOpKind,
    Request,
    Row,
    RowResult,
    SchedulerContext,
    Sequence,
    StepPlan,
    StepResult,
)
from dovetail.core.interfaces.plan import LATE
from dovetail.core.recording.events import Added, AnyEvent, Arrived, Emptied, Ended, Idled, Planned, Resulted
from dovetail.core.recording.recording import Recording
from dovetail.plugins.app.replay.parts import Parts

SECTIONS = ("rows", "joins", "leaves", "pages", "ops", "catch_up")
MOST_ENTRIES = 3
"""Entries of a plan that are shown on each side."""


@dataclass(slots=True)
class Divergence:
    """The first decision that differs from the recording."""

    step: int
    clock: float
    """Seconds since the start of the recording."""
    differences: list[str]
    recorded: dict[str, Any] = field(default_factory=dict)
    """State after the recorded decision."""
    replayed: dict[str, Any] = field(default_factory=dict)


class Lockstep:
    def __init__(self, recording: Recording, parts: Parts) -> None:
        self._recording, self.parts = recording, parts
        self._request: Request | None = None
        self._tracked: dict[int, Tracked] = {}
        self._launched: deque[StepPlan] = deque()
        self._rejected: set[int] = set()

    def run(self, until: int | None = None) -> Divergence | None:
        """Repeat the calls and return the first difference, after which nothing is called any more. `until`: also stop
        after the decision of this step."""
        for event in self._recording.events:
            if (differences := self._repeat(event)) or (isinstance(event, Planned) and event.step == until):
                assert isinstance(event, Planned | Idled)
                clock = event.clock - self._recording.header.clock
                return Divergence(event.step, clock, differences, {}, self.state())
        return None

    @property
    def evictions(self) -> int:
        return self.parts.kv.stats().evictions

    def state(self) -> dict[str, Any]:
        """Return the queues and the pages after the last call."""
        queue, kv = self.parts.scheduler.stats(), self.parts.kv.stats()
        sequences = [one.seq for one in self._tracked.values()]
        return {
            "waiting": queue.waiting,
            "running": queue.running,
            "preemptions": queue.preemptions,
            "free pages": kv.free,
            "cached pages": kv.cached,
            "owned pages": kv.owned,
            "evictions": kv.evictions,
            "running sequences": [seq.uid for seq in sequences if seq.slot >= 0],
        }

    def _repeat(self, event: AnyEvent) -> list[str]:
        scheduler = self.parts.scheduler
        if isinstance(event, Planned | Idled):
            return self._decide(event)
        if isinstance(event, Arrived):
            self._request = self._recording.request(event)
        elif isinstance(event, Added):
            scheduler.add(self._sequence(event))
        elif isinstance(event, Resulted):
            self._update(event)
        elif isinstance(event, Ended):
            self._rejected.discard(event.uid)
            if self._tracked.pop(event.uid, None) is not None:
                if event.reason == FinishReason.ABORT.value:
                    scheduler.abort(event.uid)
                else:
                    scheduler.finish(event.uid, event.keep_len, FinishReason(event.reason))
        elif isinstance(event, Emptied):
            self.parts.kv.reset()
        return []

    def _sequence(self, event: Added) -> Sequence:
        assert self._request is not None
        parent = None if event.parent is None else self._tracked.get(event.parent)
        seq = Sequence(
            event.uid, self._request, event.sample, None if parent is None else parent.seq, limit=event.limit
        )
        self._tracked[event.uid] = Tracked(seq)
        return seq

    def _decide(self, event: Planned | Idled) -> list[str]:
        if self._rejected:
            return [f"the replay rejects sequence {uid}, which the recording keeps" for uid in sorted(self._rejected)]
        parts = self.parts
        ctx = SchedulerContext(event.step, event.clock, parts.seed, parts.limits.depth, parts.kv, parts.cost)
        plan = parts.scheduler.schedule(ctx)
        self._rejected = {uid for uid, _ in parts.scheduler.take_rejected()}
        if plan is None or isinstance(event, Idled):
            if plan is None and isinstance(event, Idled):
                return []
            none, some = ("the replay", "the recording") if plan is None else ("the recording", "the replay")
            return [f"{none} launches nothing, and {some} a plan"]
        clear_sample_flags(plan, self._tracked)
        self._launched.append(plan)
        return differences(event, plan)

    def _update(self, event: Resulted) -> None:
        plan = self._launched.popleft()
        rows = []
        for i, (tokens, drafted) in enumerate(self._recording.rows(event, len(plan.rows))):
            row = plan.rows[i]
            rows.append(RowResult(i, row.uid, row.epoch, tokens, drafted=drafted))
            tracked = self._tracked.get(row.uid)
            if tracked is not None and tokens and tokens[-1] >= 0:
                tracked.seq.tokens += tokens
        self.parts.scheduler.update(StepResult(event.step, tuple(rows), event.device_seconds, event.idle_seconds))


def recorded_queue(recording: Recording, step: int) -> dict[str, Any]:
    """Return what the recording itself states of the state after a decision; {} if nothing was launched."""
    plan = next((plan for plan in recording.plans if plan.step == step), None)
    return {} if plan is None else {name: getattr(plan, name) for name in ("waiting", "running", "preemptions")}


def differences(recorded: Planned, plan: StepPlan) -> list[str]:
    """Return how two plans differ, a sentence for each part of a plan."""
    # The engine sets LATE after the decision, where a grammar's mask is computed.
    rows = [row if row.flags < LATE else row._replace(flags=row.flags & ~LATE) for row in recorded.rows]
    before = {name: getattr(recorded, name) for name in SECTIONS} | {"rows": rows}
    found = []
    for name in SECTIONS:
        old, new = before[name], getattr(plan, name)
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            found.append(f"{name} from {at} on: recorded {_entries(old, at)}, replayed {_entries(new, at)}")
    if recorded.follows not in (None, plan.follows):
        found.append(f"the drafter follows prompts: recorded {recorded.follows}, replayed {plan.follows}")
    return found


def _entries(entries: list[Any], at: int) -> str:
    shown = [_entry(entry) for entry in entries[at : at + MOST_ENTRIES]]
    more = len(entries) - at - len(shown)
    return ("; ".join(shown) or "no more") + (f" and {more} more" if more > 0 else "")


def _entry(entry: Any) -> str:
    if isinstance(entry, Row):
        return f"sequence {entry.uid} feeds {entry.count} tokens to {entry.bound}"
    if isinstance(entry, Join):
        return f"sequence {entry.uid} in slot {entry.slot} with {entry.computed} cached tokens"
    if isinstance(entry, PageDelta):
        return f"page {entry.page} in slot {entry.slot}[{entry.index}] of group {entry.group}"
    if isinstance(entry, CatchUp):
        return f"the drafter catches up with {entry.count} tokens from {entry.first} on in slot {entry.slot}"
    if isinstance(entry, PageOp):
        return f"{PageOpKind(entry.kind).name} {entry.src} to {entry.dst} of group {entry.group}"
    return f"slot {entry}"
