"""Notes of an engine's start-up: slower paths that were selected, and options that give less than requested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SIMULATED = "SIMULATED acceptance"
"""Begins the note of an engine whose drafts are accepted by a coin. Tables and files of its measurements have it."""

_notes: ContextVar[dict[str, None] | None] = ContextVar("startup_notes", default=None)


@contextmanager
def collect_notes() -> Iterator[dict[str, None]]:
    """Collect the notes of one rank's start-up. The keys of the result are the notes, oldest first."""
    found: dict[str, None] = {}
    token = _notes.set(found)
    try:
        yield found
    finally:
        _notes.reset(token)


def note(text: str) -> None:
    """Record a note once. Outside `collect_notes`, when no engine is starting, it is dropped."""
    if (found := _notes.get()) is not None:
        found[text] = None
