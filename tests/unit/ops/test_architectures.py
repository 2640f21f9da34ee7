"""Compile kernels for other GPUs than Hopper, without a GPU: tiles must fit into the shared memory of each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton

from dovetail.core.compose.capabilities import FP8_HARDWARE, Host
from dovetail.core.ops import matmul
from dovetail.core.ops.kernels import launch
from dovetail.core.ops.tile_choice import choose
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.core.testing.compiling import GPUS, H200, EmulatedGpu, compiled_for
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton import backend
from dovetail.plugins.attention.triton.capabilities import capabilities

from .launches import CASES, multiply

ATTENTION = (
    "decode, scarce",
    "single tokens",
    "single tokens, narrow heads",
    "prompts, long",
    "drafts",
    "tree",
    "float32",
)
WITH_FP8 = ("decode, e4m3", "keys per warp, e4m3, window, head scales")
OTHERS = [gpu for gpu in GPUS if gpu is not H200]


@pytest.fixture
def fresh(tmp_path, monkeypatch) -> Iterator[None]:
    """Facts of the emulated GPU are cached by device."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    module = importlib.import_module(matmul.__module__)
    cached = module.device_facts, launch._capable, backend._processors, backend._shared_bytes, backend._has_hopper
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("gpu", OTHERS, ids=lambda gpu: gpu.name)
def test_kernels_compile_and_fit(gpu: EmulatedGpu, fresh) -> None:
    fp8 = gpu.capability >= FP8_HARDWARE
    with compiled_for(gpu) as compiled:
        for name in ATTENTION + (WITH_FP8 if fp8 else ()):
            CASES[f"attention: {name}"]()
        for rows in (1, 64) if fp8 else ():
            for outputs in (1280, 14336, 200064):
                multiply("fp8", rows, outputs, 4096)
    assert compiled.kernels
    assert all("matmul_prefetching" not in name and "hopper" not in name for name, _ in compiled.kernels)


def test_a_tile_that_does_not_fit_is_an_error(fresh) -> None:
    small = EmulatedGpu("a small GPU", 10, (8, 9), 8 << 10)
    with compiled_for(small), pytest.raises(ValueError, match="a block of a small GPU has at most 8192"):
        CASES["attention: single tokens"]()


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("outputs", [1280, 14336, 200064])
def test_ruled_tiles_fit(rows: int, outputs: int) -> None:
    for gpu in GPUS:
        tile = choose(rows, outputs, 4096, "fp8", "a GPU", gpu.processors, False, gpu.shared_bytes)
        assert tile.shared_bytes(itemsize=1) <= gpu.shared_bytes
        large = choose(rows, outputs, 4096, "fp8", "a GPU", gpu.processors, False, HOPPER_SHARED)
        assert tile.stages <= large.stages and (gpu.shared_bytes < HOPPER_SHARED or tile == large)


def test_eight_bit_keys_need_a_gpu_that_converts_them() -> None:
    def allowed(**facts: object) -> object:
        demands = capabilities(TritonConfig(), Host(device="cuda", **facts)).requires
        return next(one.allowed for one in demands if one.key == "kv_dtype")

    assert "fp8_e4m3" not in allowed(device_count=1, compute_capability=(8, 6))
    assert "fp8_e4m3" in allowed(device_count=1, compute_capability=(8, 9))
    assert "fp8_e4m3" in allowed(), "a plan for another machine"
