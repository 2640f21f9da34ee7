"""Values, lists and did-you-mean, worded alike in every message."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from dovetail.core.errors import ConfigError


def program() -> str:
    """What the user typed before the words."""
    names = {"dovetail": "dovetail", "__main__": "python -m dovetail"}
    return names.get(Path(sys.argv[0]).stem, "python run.py")


def words(overrides: Sequence[str]) -> list[str]:
    """As a list; a text alone would be taken apart into its letters."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of words: [{overrides!r}], not {overrides!r}")
    return list(overrides)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """' Did you mean `x`?' or nothing."""
    close = get_close_matches(word, sorted(options), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def listing(options: Iterable[str]) -> str:
    return ", ".join(options) or "none"


def show(value: object) -> str:
    """As a user would type it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
