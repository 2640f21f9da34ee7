"""Search for the fastest choice of each tunable operation.

The most promising candidates are compiled in several processes, timed in CUDA graphs behind a kernel like the one that
precedes the operation in a step, and checked against the exact result. The fastest are timed again in turns. Every
timing is kept (`Found.line`), so an interrupted search continues where it was.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from dovetail.core.interfaces.tuning import Choice, Key, Tunable, make_key
from dovetail.core.ops.choices import installed
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.table import MOST_ROWS, GpuFacts, Subject, TuningTable, flat_values

log = logging.getLogger(__name__)

MOST_CANDIDATES = 64
"""Candidates that are timed."""
FINALS = 4
"""Fastest candidates that are timed again."""
NEAR = 4
"""Fastest choices of other numbers of rows that are candidates, too."""
LEAD = 0.01
"""Share by which a choice must be faster than the operation's default, since the GPU's clocks drift."""

Point = tuple[str, Key, int]
"""(operation, key, rows)"""


class Timer(Protocol):
    """Runs one tunable operation with different choices."""

    def open(self, tunable: Tunable) -> None:
        """Allocate the operands of an operation in place of those of the previous one."""

    def compile_all(self, jobs: Sequence[tuple[Tunable, Choice]], seconds: float | None) -> Sequence[bool]:
        """Compile the kernels of these choices, the first ones first, and none after `seconds`. Return for each whether
        it was tried; a choice that cannot be compiled is found when it is timed."""

    def microseconds(self, choices: Sequence[Choice | None], final: bool) -> list[float | None]:
        """Return the time of a call with each choice; None if it cannot run or was not measured. `final`: time them in
        turns, and long."""

    def fault(self, choice: Choice) -> str | None:
        """Return what is wrong with the results of a choice, None if nothing is."""


@dataclass(frozen=True, slots=True)
class Found:
    """Timings of one operation and number of rows."""

    op: str
    key: Key
    rows: int
    times: tuple[tuple[Choice | None, float], ...]
    """Choices timed in turns with their microseconds, fastest first; the default (None) is among them."""
    before: float | None
    """Microseconds of the choice that ran before the search, timed in the same turns."""
    others: tuple[tuple[Choice, float], ...] = ()
    """The other candidates and their microseconds, timed briefly."""
    way: str = ""
    """The tunable's."""

    @property
    def point(self) -> Point:
        return self.op, self.key, self.rows

    @property
    def best(self) -> tuple[Choice | None, float]:
        """The fastest choice and its time. The default stays where no choice is clearly faster."""
        default = next(((choice, us) for choice, us in self.times if choice is None), None)
        choice, us = self.times[0]
        if default is not None and us > default[1] * (1 - LEAD):
            return default
        return choice, us

    def line(self) -> str:
        """Return this record as a line of JSON."""
        facts: dict[str, Any] = {"op": self.op, "key": dict(self.key), "rows": self.rows, "before": self.before}
        for name, pairs in (("times", self.times), ("others", self.others)):
            facts[name] = [[round(us, 3), None if choice is None else dict(choice)] for choice, us in pairs]
        return json.dumps(facts | ({"way": self.way} if self.way else {}))


def read_found(lines: Iterable[str]) -> dict[Point, Found]:
    """Return the records of a file of timings; lines that are not records are skipped."""
    found, skipped = {}, 0
    for line in lines:
        try:
            record = _record(json.loads(line))
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
            skipped += 1
            continue
        if record.times:
            found[record.point] = record
    if skipped:
        log.warning("%d lines of the tuning cache's timings are skipped: they were cut off or damaged", skipped)
    return found


def _record(facts: Any) -> Found:
    """Return the record of a line, whose values are untrusted. Raises ValueError, TypeError or KeyError."""
    times = tuple(
        (None if choice is None else flat_values(choice, "a choice"), float(us)) for us, choice in facts["times"]
    )
    others = tuple((flat_values(choice, "a choice"), float(us)) for us, choice in facts["others"])
    op, rows, before, way = facts["op"], facts["rows"], facts["before"], facts.get("way", "")
    numbers = [us for _, us in (*times, *others)] + ([] if before is None else [before])
    if not isinstance(op, str) or not isinstance(way, str) or type(rows) is not int or not 1 <= rows <= MOST_ROWS:
        raise ValueError("the operation or its way has no name, or it has no number of rows")
    if not all(math.isfinite(us) for us in numbers):
        raise ValueError("a time is not a number")
    key = make_key(**flat_values(facts["key"], "key"))
    if op in CHECKS:
        # A table with a choice that cannot run would not be read again.
        for choice, _ in (*times, *others):
            if choice is not None:
                CHECKS[op](key, rows, choice)
    return Found(op, key, rows, times, before, others, way)


def table_of(found: Iterable[Found], gpu: str, facts: GpuFacts, origin: str) -> TuningTable:
    choices = {(Subject(one.op, gpu, one.key), one.rows): one.best[0] for one in found}
    return TuningTable.of(choices, origin, {gpu: facts})


def distinct(tunables: Iterable[Tunable]) -> list[Tunable]:
    """Return one tunable of each operation, key and number of rows, in the order of first occurrence."""
    by_point: dict[Point, Tunable] = {}
    for one in tunables:
        by_point.setdefault((one.op, one.key, one.rows), one)
    return list(by_point.values())


def search(
    tunables: Sequence[Tunable],
    timer: Timer,
    gpu: str,
    known: Mapping[Point, Found],
    *,
    seconds: float | None = None,
    compile_seconds: float | None = None,
    most: int = MOST_CANDIDATES,
    finals: int = FINALS,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Iterator[tuple[Tunable, Found]]:
    """Yield the timings of each tunable, from `known` or measured. No measurement starts after `seconds`.
    What does not compile in `compile_seconds` is not timed, and a tunable without any compiled candidate is left out;
    kernels that many operations would like to use come first.
    `on_phase` receives the phases before the first measurement."""
    began = time.monotonic()
    wanted = [one for one in tunables if (one.op, one.key, one.rows) not in known]
    on_phase("order candidates")
    planned = {id(one): _ordered(one, gpu, most) for one in wanted}
    on_phase("compile kernels")
    jobs = _jobs([(one, planned[id(one)]) for one in wanted])
    done = timer.compile_all(list(jobs.values()), compile_seconds)
    ready = {kernel for kernel, compiled in zip(jobs, done, strict=True) if compiled}
    fastest: dict[tuple[str, Key], list[Choice]] = {}
    for tunable in tunables:
        found = known.get((tunable.op, tunable.key, tunable.rows))
        near = fastest.setdefault((tunable.op, tunable.key), [])
        if found is None:
            if seconds is not None and time.monotonic() - began > seconds:
                continue
            tried = _unique([*planned[id(tunable)], *filter(tunable.admits, near)])
            compiled = [one for one in tried if tunable.kernel(one) in ready]
            if tried and not compiled:
                continue  # The default is not known to be the fastest.
            found = measure(tunable, timer, gpu, compiled, finals)
        near[:] = _unique([*(choice for choice, _ in found.times[:2] if choice is not None), *near])[:NEAR]
        yield tunable, found


def _ordered(tunable: Tunable, gpu: str, most: int) -> list[Choice]:
    """Return the choice that runs now and the most promising candidates."""
    current = _current(tunable, gpu)
    return _unique([*([] if current is None else [current]), *islice(tunable.candidates(), most)])


def _jobs(planned: Iterable[tuple[Tunable, Sequence[Choice]]]) -> dict[Hashable, tuple[Tunable, Choice]]:
    """Return one choice for each kernel, in the order of the kernels' ranks among the candidates of all operations."""
    jobs: dict[Hashable, tuple[Tunable, Choice]] = {}
    votes: dict[Hashable, float] = {}
    for tunable, choices in planned:
        for rank, choice in enumerate(choices):
            kernel = tunable.kernel(choice)
            jobs.setdefault(kernel, (tunable, choice))
            votes[kernel] = votes.get(kernel, 0.0) + 1 / (1 + rank)
    return {kernel: jobs[kernel] for kernel in sorted(votes, key=lambda kernel: -votes[kernel])}


def measure(tunable: Tunable, timer: Timer, gpu: str, tried: Sequence[Choice], finals: int) -> Found:
    """Time one tunable with its default and the choices `tried`."""
    timer.open(tunable)
    current = _current(tunable, gpu)
    brief = [(us, choice) for choice, us in zip(tried, timer.microseconds(tried, False), strict=True) if us is not None]
    brief.sort(key=lambda pair: pair[0])
    kept: list[Choice | None] = [None]
    for _, choice in brief:
        if len(kept) > finals:
            break
        if (fault := timer.fault(choice)) is None:
            kept.append(choice)
        else:
            log.warning("%s %s, %s rows: %s: %s", tunable.op, dict(tunable.key), tunable.rows, dict(choice), fault)
    if current not in kept and current in tried:
        kept.append(current)
    again = [(us, choice) for choice, us in zip(kept, timer.microseconds(kept, True), strict=True) if us is not None]
    if not again:
        raise RuntimeError(f"{tunable.op} {dict(tunable.key)} with {tunable.rows} rows runs with no choice")
    again.sort(key=lambda pair: pair[0])
    before = next((us for us, choice in again if choice == current), None)
    times = tuple((choice, us) for us, choice in again)
    others = tuple((choice, us) for us, choice in brief if choice not in kept)
    return Found(tunable.op, tunable.key, tunable.rows, times, before, others, tunable.way)


def _current(tunable: Tunable, gpu: str) -> Choice | None:
    """Return the choice that runs now, None if it is the default."""
    if installed().serves(tunable.op, gpu, tunable.key, tunable.rows):
        return installed().find(tunable.op, gpu, tunable.key, tunable.rows)
    return tunable.unlisted()


def _unique(choices: Iterable[Choice]) -> list[Choice]:
    return list({json.dumps(dict(choice), sort_keys=True): choice for choice in choices}.values())
