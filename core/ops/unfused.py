"""Which slower paths this process took, in words, so that start-up can list them."""

from __future__ import annotations

_notes: dict[str, None] = {}


def note(text: str) -> None:
    """Record a slower path once."""
    _notes[text] = None


def notes() -> tuple[str, ...]:
    """Every note since the process started, oldest first."""
    return tuple(_notes)
