"""CI begins no test after its time, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOME = Path(__file__).parents[1] / "test_arithmetic.py"


def test_no_test_begins_after_the_time_of_ci() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SOME)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["DOVETAIL_UNTIL"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "the time of .ci/run is over" in done.stdout, done.stdout
    assert "skipped" in (last := done.stdout.splitlines()[-1]) and "passed" not in last
