"""Run test_triton_attention.py in Triton's interpreter, in a separate process: Triton reads its flag on import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this platform")
@pytest.mark.timeout(900)
def test_triton_attention_in_interpreter():
    suite = Path(__file__).with_name("test_triton_attention.py")
    # The contract takes as long as the rest in the interpreter, so it runs nightly, like on a GPU.
    some = [] if os.environ.get("DOVETAIL_KERNELS") == "all" else ["-k", "not TestContract"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *some, str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
