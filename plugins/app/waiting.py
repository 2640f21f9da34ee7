"""Progress bars on a terminal, and lines in place of them for a long start without one: a log file, nohup, a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dovetail.core.interfaces import Progress
from dovetail.plugins.app.tables import console as wide_console

SECONDS = 30.0
"""Interval between two lines. A start that takes less prints nothing."""


def line_console() -> Console:
    """Return a console on stderr. Where that is not a terminal, each message is one line, however long."""
    return wide_console(1 << 20, stderr=True, highlight=False)


def in_words(phase: str, share: float | None) -> str:
    return phase if share is None else f"{phase}, {share:.0%}"


def long_phases(seconds: Mapping[str, float]) -> str:
    """Return the phases of a start that took at least 50 ms, in brackets after a space; "" if there are none."""
    long = [f"{name} {took:.1f} s" for name, took in seconds.items() if took >= 0.05]
    return f" ({', '.join(long)})" if long else ""


@contextmanager
def bar(
    console: Console, title: str, total: int | None = None, *, left: bool = False, **options: Any
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal. Yields `update` of its task; `left` adds the time left, and `options` are
    those of rich's Progress."""
    counter = [MofNCompleteColumn()] if total else []
    times = [TimeElapsedColumn(), *([TextColumn("left"), TimeRemainingColumn()] if left else [])]
    columns = (TextColumn("{task.description}"), BarColumn(), *counter, *times)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal, **options) as bars:
        yield partial(bars.update, bars.add_task(title, total=total))


@contextmanager
def phases(console: Console) -> Iterator[Progress]:
    """Yield a callback to be called with each phase of a start, which shows it in a bar or in lines."""
    with bar(console, "start") as update, phases_in_lines(console) as print_phase:

        def progress(name: str, share: float | None) -> None:
            print_phase(name, share)
            update(description=name, total=None if share is None else 1.0, completed=share or 0.0)

        yield progress


@contextmanager
def phases_in_lines(console: Console, what: str = "starting") -> Iterator[Progress]:
    """Yield a callback for each phase of `what`. On a terminal, which shows a progress bar, nothing is printed."""
    began, phase, finished = time.monotonic(), "start", threading.Event()

    def progress(name: str, share: float | None) -> None:
        nonlocal phase
        phase = in_words(name, share)

    def print_lines() -> None:
        while not finished.wait(SECONDS):
            console.print(f"{what} for {time.monotonic() - began:.0f} s: {phase}", markup=False)

    thread = threading.Thread(target=print_lines, name="dovetail-phases", daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield progress
    finally:
        finished.set()
        if thread.ident is not None:
            thread.join()
