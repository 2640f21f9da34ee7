"""Ranks are real processes in these tests; workers import their runners from this folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from processes import runs  # noqa: E402


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """gone(pid): whether the process ends within a short time."""

    def ends(pid: int) -> bool:
        deadline = time.monotonic() + 60
        while runs(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    return ends
