"""profile_step.py: kernels that run at once are time at work once."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "profile_step.py"


def test_what_runs_at_once_counts_once() -> None:
    at_work = runpy.run_path(str(SCRIPT))["at_work"]
    assert at_work([]) == 0
    long, within, across, after = ("long", 0.0, 10.0), ("within", 2.0, 3.0), ("across", 8.0, 4.0), ("after", 15.0, 1.0)
    assert at_work([long, within, across, after]) == 13
