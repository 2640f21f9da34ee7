"""Kernels compiled before the first step are ready for launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from dovetail.core.ops import silu_and_mul
from dovetail.core.ops.compile_ahead import compile_ahead
from dovetail.core.ops.kernels.gated import _silu_and_mul


def test_kernels_compiled_ahead_are_loaded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    _silu_and_mul.device_caches.clear()
    x = torch.randn(5, 2 * 88, dtype=torch.bfloat16, device="cuda")
    with compile_ahead(2):
        silu_and_mul(x)
    (kernel,) = _silu_and_mul.device_caches[torch.cuda.current_device()][0].values()
    assert kernel.module is not None
    files = sorted(tmp_path.rglob("*"))
    silu_and_mul(x)
    torch.cuda.synchronize()
    assert sorted(tmp_path.rglob("*")) == files, "the launch compiled nothing"
