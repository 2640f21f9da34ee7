"""Faulty variants of a correct component, and the check that a contract suite rejects them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from dovetail.core.testing.suite import failures


def variant(base: type, name: str, **members: Any) -> Any:
    """Subclass `base` with other methods or attributes."""
    return type(name, (base,), members)


def suite(contract: type, **members: Any) -> Any:
    """Instance of a contract suite with the hooks that it asks for."""
    return variant(contract, "Suite", **members)()


def each(broken: Mapping[str, Iterable[type]]) -> pytest.MarkDecorator:
    """Parametrize a test with (faulty class, name of the contract's test that must reject it)."""
    rows = [(fault, test) for test, faults in broken.items() for fault in faults]
    return pytest.mark.parametrize(("broken", "test"), rows, ids=[fault.__name__ for fault, _ in rows])


def rejection(suite: object, test: str) -> str:
    """Return the message with which the suite's test of this name fails; "" if it passes."""
    found = failures(suite, skip=tuple(name for name in dir(suite) if name != test))
    return str(found.get(test, ""))


def rejects(suite: object, test: str) -> bool:
    """Whether the suite's test of this name fails; the suite's other tests do not run."""
    return test in failures(suite, skip=tuple(name for name in dir(suite) if name != test))
