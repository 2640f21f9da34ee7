"""Run kernel tests in Triton's interpreter. Triton reads its flag on import, so this needs a separate process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this platform")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["test_kernels.py", "test_step_kernels.py"])
def test_kernels_in_interpreter(name):
    suite = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and " skipped" not in done.stdout
