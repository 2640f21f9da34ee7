"""startup_kernels.py: the least time of compilations in threads and in processes."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("startup_kernels")
    sys.modules.pop("startup_kernels", None)


def test_threads_generate_code_one_at_a_time(script):
    jobs = [Counter(python=2, llir=1), Counter(python=1, llir=3), Counter(python=1)]
    assert script.in_processes(jobs, 1) == script.in_threads(jobs, 1) == 8
    assert script.in_processes(jobs, 2) == 4
    assert script.in_processes(jobs, 3) == 4
    assert script.in_threads(jobs, 2) == 6, "the second ends its code at 3 and its compilation at 6"
    assert script.in_threads([Counter(python=1)] * 5, 5) == 5
