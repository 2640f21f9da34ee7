"""Helpers for contract suites: run a suite without pytest to check that it rejects broken plugins, and count work."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import pytest

OUTCOMES = (Exception, pytest.fail.Exception)


def failures(suite: object, *, skip: tuple[str, ...] = ()) -> dict[str, BaseException]:
    """Return the failing tests of a suite object with their exceptions. Supports parametrize marks but no fixtures."""
    found: dict[str, BaseException] = {}
    for name in sorted(dir(suite)):
        if not name.startswith("test_") or name in skip:
            continue
        test = getattr(suite, name)
        for arguments in _parameters(test):
            try:
                test(**arguments)
            except pytest.skip.Exception:
                continue
            except OUTCOMES as failure:
                found.setdefault(name, failure)
    return found


def _parameters(test: Callable[..., object]) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    axes = [[_values(mark.args[0], value) for value in mark.args[1]] for mark in marks]
    for choice in itertools.product(*axes):
        yield {name: value for part in choice for name, value in part.items()}


def _values(names: str | tuple[str, ...], value: Any) -> dict[str, Any]:
    return {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


@cache
def assert_torch_free(module: str) -> None:
    """Assert that importing a module does not import torch."""
    code = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"importing {module} must not import torch"


def lines_run(call: Callable[[], object]) -> int:
    """Return the number of Python lines that the call executes: a machine-independent measure of work."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # Garbage collection would run unrelated Python finalizers.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines
