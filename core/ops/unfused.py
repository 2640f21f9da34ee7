"""Where this process took a slower path or gave less than was asked for, in words, so that start-up can list it."""

from __future__ import annotations

_notes: dict[str, None] = {}


def note(text: str) -> None:
    """Record it once."""
    _notes[text] = None


def notes() -> tuple[str, ...]:
    """Every note since the process started, oldest first."""
    return tuple(_notes)
