"""Common wording of values, lists and did-you-mean hints in messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from dovetail.core.errors import ConfigError


def program() -> str:
    """The command that the user typed."""
    names = {"dovetail": "dovetail", "__main__": "python -m dovetail"}
    return names.get(Path(sys.argv[0]).stem, "python run.py")


def words(overrides: Sequence[str]) -> list[str]:
    """Return overrides as a list. Raises ConfigError for a single string, which would be split into letters."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of words: [{overrides!r}], not {overrides!r}")
    return list(overrides)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return ' Did you mean `x`?' or "". An option that begins with the word, or the word with an option, is close."""
    options = sorted(options)
    close = get_close_matches(word, options, n=1, cutoff=0.6)
    if not close and len(word) > 1:
        close = [o for o in options if o.startswith(word) or (len(o) > 1 and word.startswith(o))]
    return f" Did you mean `{close[0]}`?" if close else ""


def in_place(message: str, kind: str, place: str, options: Iterable[str]) -> str:
    """Return a message about a component inside another one, with its options at their place: spec_decode.model.path
    for model.path. `options`: those of the component."""
    names = "|".join(map(re.escape, options))
    message = re.sub(rf"(?<![\w.@]){kind}\.({names})\b", rf"{place}.\1", message)
    return re.sub(rf"(?<![\w.@]){kind}=", f"{kind}@{place}=", message)


@contextmanager
def naming_place(kind: str, place: str, options: Iterable[str]) -> Iterator[None]:
    """Let ConfigErrors of the block name the options of a component inside another one as `in_place` does."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_place(str(error), kind, place, options)) from None


def listing(options: Iterable[str]) -> str:
    return ", ".join(options) or "none"


def show(value: object) -> str:
    """Return the value as a user would type it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
