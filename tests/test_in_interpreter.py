"""Kernel tests in Triton's interpreter, in subprocesses: Triton reads its flag when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTENTION = "numerics/test_triton_attention.py"
SUITES = ("unit/ops/test_kernels.py", "unit/ops/test_step_kernels.py", "unit/adapter/test_kernel.py", ATTENTION)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this platform")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES)
def test_kernels_in_interpreter(suite):
    # The contract takes the interpreter as long as the rest: a nightly job's, as on a GPU.
    all_of_it = suite != ATTENTION or os.environ.get("DOVETAIL_KERNELS") == "all"
    some = [str(Path(__file__).parent / suite), *([] if all_of_it else ["-k", "not TestContract"])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *some],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and (" skipped" not in done.stdout or suite == ATTENTION)
