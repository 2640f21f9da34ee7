"""Measured steps of a recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.core.interfaces import CostModel, Row, RowWork
from dovetail.core.interfaces.plan import DECODE
from dovetail.core.recording.events import Added, Ended, Planned, Resulted
from dovetail.core.recording.recording import Recording


@dataclass(frozen=True, slots=True)
class Step:
    clock: float
    """Engine clock when the step was planned, seconds."""
    works: tuple[RowWork, ...]
    seconds: float
    """Device time, and the time before it in which the device waited for the host although the engine had work."""
    drafts: tuple[int, int, int]
    """Rows that draft, the longest context of a row with drafts, and the most drafts of a row; (0, 0, 0) = no row
    verifies drafts."""
    launch_seconds: float = 0.0
    """Host time of the decision and the launch; 0 = the recording has none. A CPU runs the step in its launch, and the
    time of the step is not counted twice."""


def measured_steps(recording: Recording) -> Iterator[Step]:
    """Yield all steps but those in which the drafter caught up with rows, which no model of a step includes."""
    on_host = recording.header.device == "cpu"
    launched: deque[tuple[Planned, bool]] = deque()
    live: set[int] = set()
    had_work = False
    """Whether sequences ran or waited ever since the previous launch."""
    free = recording.header.clock
    for event in recording.events:
        if isinstance(event, Added):
            live.add(event.uid)
        elif isinstance(event, Ended):
            live.discard(event.uid)
            had_work &= bool(live)
        elif isinstance(event, Planned):
            launched.append((event, had_work))
            had_work = True
        elif isinstance(event, Resulted):
            plan, follows = launched.popleft()
            seconds = event.device_seconds + (event.idle_seconds if follows else 0.0)
            if not event.device_seconds:
                seconds = event.clock - max(free, plan.clock)
            free = event.clock
            if plan.catch_up:
                continue
            works = tuple(map(RowWork.of, plan.rows))
            yield Step(plan.clock, works, seconds, _drafts(plan.rows), _launch_seconds(plan, event, on_host))


def _launch_seconds(plan: Planned, result: Resulted, on_host: bool) -> float:
    if not plan.launch_seconds:
        return 0.0
    step = result.device_seconds if on_host else 0.0
    return plan.seconds + max(plan.launch_seconds - step, 0.0)


def _drafts(rows: list[Row]) -> tuple[int, int, int]:
    longest = max((row.bound for row in rows if row.draft), default=0)
    if not longest:
        return 0, 0, 0
    return sum(row.flags & DECODE != 0 for row in rows), longest, max(row.draft for row in rows)


def draft_seconds(step: Step, cost: CostModel, passes: Callable[[int], int]) -> float:
    """Return the time of the drafter's model as the cost model predicts it. `passes`: Drafter.passes."""
    rows, longest, most = step.drafts
    return cost.draft_seconds(rows, passes(most), longest) if rows else 0.0
