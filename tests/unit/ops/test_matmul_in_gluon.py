"""Hopper's kernels for dense matmuls in the interpreter of Gluon, against float64: formats, tiles and split inputs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, whose interpreter replaces functions of these kernels", allow_module_level=True)

import torch

from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.testing.gluon_interpreter import interpreted_gluon

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
BLOCK = 128


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8, exact", "blocks", "int8"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "tile"),
    [
        (100, 192, 320, MatmulTile(128, 128, 128, stages=3, specialized=True)),
        (70, 200, 1024, MatmulTile(64, 64, 256, stages=4, specialized=True, split=2)),
        (200, 256, 512, MatmulTile(128, 256, 128, stages=3, specialized=True)),
        (150, 80, 640, MatmulTile(192, 64, 128, stages=3, specialized=True)),
        (1, 192, 512, MatmulTile(16, 64, 256, stages=3, prefetch=2)),
        (9, 208, 1024, MatmulTile(16, 64, 256, stages=3, prefetch=3, split=2)),
    ],
)
def test_matmuls_equal_float64(tokens, outputs, inputs, tile, kind):
    """Tokens, outputs and inputs that tiles do not divide; programs that share a tile's inputs."""
    kind, exact = kind.removesuffix(", exact"), kind.endswith("exact") or kind == "blocks"
    dtype = {"bf16": BF16, "fp16": FP16, "int8": torch.int8}.get(kind, E4M3)
    x_TI, weight_OI = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    if dtype.itemsize == 1:
        x_TI, weight_OI = ((x * 30).round().clamp(-127, 127) for x in (x_TI, weight_OI))
    x_TI, weight_OI = x_TI.to(dtype), weight_OI.to(dtype)
    x_scale = weight_scale = None
    wide_OI = weight_OI.double()
    if dtype.itemsize == 1:
        x_scale, weight_scale = torch.rand(tokens, 1) + 0.5, torch.rand(outputs) + 0.5
        if kind == "blocks":
            weight_scale = torch.rand(-(-outputs // BLOCK), -(-inputs // BLOCK)) + 0.5
            scale_OI = weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:outputs, :inputs]
        else:
            scale_OI = weight_scale[:, None]
        wide_OI = wide_OI * scale_OI
    else:
        # Blocks have as many bytes.
        tile = replace(tile, inputs=tile.inputs // 2)
    bias_O = torch.randn(outputs).to(BF16)
    want = x_TI.double() @ wide_OI.T * (1.0 if x_scale is None else x_scale) + bias_O.double()
    counts = torch.zeros(64, dtype=torch.int32)
    with interpreted_gluon():
        got = matmul_triton(
            *(x_TI, weight_OI, tile, counts, x_scale, weight_scale, bias_O),
            dtype=dtype if dtype.itemsize == 2 else BF16,
            imprecise=BLOCK if exact else None,
            block=(BLOCK, BLOCK) if kind == "blocks" else None,
        )
    assert not counts.any(), "counters are zero for the next launch"
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < (1e-3 if dtype is FP16 else 4e-3)
