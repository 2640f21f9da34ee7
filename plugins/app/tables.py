"""Tables on the terminal, common to several apps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dovetail.core.startup_notes import SIMULATED

NONE = "n/a"


def console(width: int, **options: Any) -> Console:
    """Return a console on stdout; `width` applies if that is not a terminal."""
    found = Console(**options)
    if not found.is_terminal:
        found.width = width
    return found


def figures_table(title: str, first: str, heads: Iterable[str], **options: Any) -> Table:
    """Return a table of figures. `first` is the head of the column of names, which takes `options`."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, **options)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def simulated_title(startups: Iterable[Mapping[str, Any] | None]) -> str:
    """Return what begins the title of a table if drafts of some engine were accepted by a coin. None = not started."""
    notes = (note for startup in startups for note in (startup or {}).get("slower_paths", ()))
    return f"{SIMULATED}: " if any(SIMULATED in note for note in notes) else ""


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
