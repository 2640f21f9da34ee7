"""Kernel tests in Triton's interpreter, in a process of their own: Triton reads its flag when it is imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DECODERS = (
    *("_from", "_integer", "decode_uint4", "decode_int4", "decode_e2m1", "decode_nf4"),
    *("_byte", "decode_uint8", "decode_int8", "decode_int6", "decode_e4m3_code", "decode_small_e2m1"),
    *("decode_large_uint4", "decode_large_byte", "decode_small_uint4"),
)
ELSEWHERE = {
    "dovetail.core.ops.kernels.e4m3:decode_e4m3_words": "inline assembly: unit/ops/test_kernels.py on a GPU",
    **dict.fromkeys(
        (f"dovetail.core.ops.kernels.decoders:{name}_words" for name in DECODERS),
        "inline assembly: unit/ops/test_packed_matmul.py and test_packed_experts.py on a GPU",
    ),
    "dovetail.core.ops.kernels.decoders:scaled_e2m1_words": "inline assembly: unit/ops/test_packed_experts.py on a GPU",
    "dovetail.core.ops.kernels.launch:prefetch": "inline assembly without a result",
    "dovetail.core.ops.kernels.draw:better": "runs inside a reduction, which the interpreter does not record",
    "dovetail.plugins.attention.triton.kernels:_unpair": "inline assembly: numerics/test_triton_on_gpu.py",
    "dovetail.plugins.attention.triton.per_warp:unpair": "inline assembly: numerics/test_triton_on_gpu.py",
}
"""Functions that the interpreter cannot run, with the reason."""
OVER_RANKS = "dovetail.plugins.collective.symm_mem."
"""Beginning of the names of kernels that tests/tp runs in the interpreter, in several processes."""

SUITES = (
    "unit/ops/test_kernels.py",
    "unit/ops/test_experts.py",
    "unit/ops/test_expert_pairs.py",
    "unit/ops/test_packed_experts.py",
    "unit/ops/test_packed_matmul.py",
    "unit/ops/test_stacked_experts.py",
    "unit/ops/test_sampling_kernels.py",
    "unit/ops/test_step_kernels.py",
    "unit/ops/test_tree_kernels.py",
    "unit/adapter/test_kernel.py",
    "numerics/test_triton_attention.py",
    "numerics/test_triton_latents.py",
    "numerics/test_triton_plan.py",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this platform")
@pytest.mark.timeout(1800)
def test_kernels_in_interpreter(tmp_path):
    """Every kernel for all GPUs runs; those for one architecture are compared with these on a GPU."""
    here = Path(__file__).parent
    # The contract takes the interpreter as long as the rest: a nightly job's, as on a GPU.
    all_of_it = os.environ.get("DOVETAIL_KERNELS") == "all"
    # Tests that are marked here run compiled kernels alone.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    options += [] if all_of_it else ["-k", "not TestContract"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(here / suite) for suite in SUITES)],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "DOVETAIL_INTERPRETED": str(tmp_path / "ran"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    # Only a class of the attention suite skips tests, whose reason it states.
    skipped = [line for line in done.stdout.splitlines() if re.match("SKIPPED(?!.*core/testing/attention)", line)]
    assert not skipped, skipped
    from .unit.ops.launches import jit_functions

    ran = set((tmp_path / "ran").read_text().split())
    general = {name for name in jit_functions(everywhere=True) if not name.startswith(OVER_RANKS)}
    missing = sorted(general - ran - set(ELSEWHERE))
    assert not missing, f"no suite of {', '.join(SUITES)} runs {', '.join(missing)} in the interpreter"
