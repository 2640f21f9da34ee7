"""Progress lines for a long start when there is no terminal for a progress bar: a log file, nohup, a batch job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from dovetail.core.interfaces import Progress

SECONDS = 30.0
"""Interval between two lines. A start that takes less prints nothing."""


@contextmanager
def phases_in_lines(console: Console, what: str = "starting") -> Iterator[Progress]:
    """Yield a callback to be called with each phase of `what`. It prints nothing on a terminal, which shows a progress
    bar."""
    began, phase, finished = time.monotonic(), "start", threading.Event()

    def progress(name: str, share: float | None) -> None:
        nonlocal phase
        phase = name if share is None else f"{name}, {share:.0%}"

    def print_lines() -> None:
        while not finished.wait(SECONDS):
            console.print(f"{what} for {time.monotonic() - began:.0f} s: {phase}")

    thread = threading.Thread(target=print_lines, name="dovetail-phases", daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield progress
    finally:
        finished.set()
