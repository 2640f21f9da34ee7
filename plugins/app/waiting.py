"""A start that takes long says what it is doing, where no bar shows it: in a log, under nohup, in a batch job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from dovetail.core.interfaces import Progress

SECONDS = 30.0
"""Between two lines. A start that is quicker says nothing."""


@contextmanager
def phases_in_lines(console: Console, what: str = "starting") -> Iterator[Progress]:
    """Within, call it with each phase of `what`. On a terminal it prints nothing: there is a bar."""
    began, phase, over = time.monotonic(), "start", threading.Event()

    def told(name: str, share: float | None) -> None:
        nonlocal phase
        phase = name if share is None else f"{name}, {share:.0%}"

    def tell() -> None:
        while not over.wait(SECONDS):
            console.print(f"{what} for {time.monotonic() - began:.0f} s: {phase}")

    thread = threading.Thread(target=tell, name="dovetail-phases", daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield told
    finally:
        over.set()
