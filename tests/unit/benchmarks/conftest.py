"""compare.py and what the docs show of its results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TINY = ("engine.device=cpu", "engine.max_len=128", "engine.max_seqs=4", "engine.kv_pages=100")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("compare")
    for name in set(sys.modules) - before:
        if name == "compare" or name.partition(".")[0] == "peers":
            del sys.modules[name]


def results_page(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Text and table that the docs show for a result."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "docs"))
    return importlib.import_module("result_tables").comparison(result)
