"""Tools for authors of allocators: a suite to subclass, and fixtures from the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.plugins.kv_cache.config import PagedConfig
from dovetail.plugins.kv_cache.paged import PagedAllocator


class Mine(PagedAllocator):
    def release(self, seq):
        self._states.pop(seq.uid, None)


class TestMine(KVAllocatorContract):
    reuses = False

    def make(self, groups, num_pages):
        return Mine(PagedConfig(), groups, num_pages)


def test_my_own_idea(kv_groups, kv_sequence):
    kv = Mine(PagedConfig(), kv_groups.groups, kv_groups.num_pages)
    assert kv.reserve(kv_sequence([1, 2, 3]), 3).entries
"""


@pytest.mark.nightly
def test_a_downstream_run_reports_the_broken_allocator(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:dovetail", "-p", "dovetail.core.testing.pytest_plugin", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout
    assert "FAILED test_mine.py::TestMine::test_a_fork_outlives_its_parent" in run.stdout
    assert "test_my_own_idea" not in run.stdout, "the three layouts pass"
