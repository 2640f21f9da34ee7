"""Checks of the values in a request. Components compute with them during steps, where an error ends the engine, so a
wrong value is refused on arrival. Importing this module loads no torch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from pydantic import ValidationError

from dovetail.core.errors import RequestError


def token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """Return a prompt's token ids as plain ints; a list, an array or a tensor of integers is accepted. Raises
    RequestError for anything else, bools and floats included. Does not check the range."""
    given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        ids = tuple(given)
    except TypeError:
        raise RequestError(f"the prompt is {reprlib.repr(given)}, not text or a sequence of token ids") from None
    # For 100 000 ids this takes 2 ms; a generator over them would take twice as long.
    if set(map(type, ids)) <= {int}:
        return ids
    for token in ids:
        if not _is_integer(token):
            raise RequestError(f"prompt: {reprlib.repr(token)} ({type(token).__name__}) is not a token id, an integer")
    return tuple(map(int, ids))


def text(name: str, value: object) -> str:
    """Return the value. Raises RequestError for one that is not text, or not encodable as UTF-8."""
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(name, value, "text that UTF-8 can encode (it has a lone surrogate)") from None
    return value


def integer(name: str, value: object) -> int:
    """Return the value as an int. Raises RequestError for one that is not an integer of 64 bits; a bool is none."""
    if not _is_integer(value) or not -(2**63) <= int(value) < 2**63:  # type: ignore[call-overload]
        raise _wrong(name, value, "an integer of 64 bits")
    return int(value)  # type: ignore[call-overload, no-any-return]


def number(name: str, value: object) -> float:
    """Return the value as a float. Raises RequestError for one that is not a finite number; a bool is none."""
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(found := float(value)):
            return found
    except OverflowError:
        pass
    raise _wrong(name, value, "a finite number")


def numbers_by_name(name: str, value: object) -> dict[str, float]:
    """Return the mapping as a dict. Raises RequestError if it is not a mapping of names to finite numbers."""
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping of names to numbers")
    return {text(f"{name}: a name", key): number(f"{name}: {key!r}", item) for key, item in value.items()}


def faults(error: ValidationError) -> str:
    """Return the mistakes that pydantic found in a record, on one line and without its links."""
    found = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(map(str, fault["loc"]))
        found.append(f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name}={reprlib.repr(value)} is not {wanted}")
