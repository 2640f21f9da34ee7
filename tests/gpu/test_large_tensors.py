"""Kernels on tensors with more elements than a 32-bit index reaches: last rows equal the same rows computed alone."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dovetail.core.interfaces import PLAIN, Bundle
from dovetail.core.ops import rms_norm, step
from dovetail.core.ops.activations import gelu
from dovetail.core.ops.bitmask import apply_bitmask
from dovetail.core.ops.formats import encode
from dovetail.core.ops.gated import silu_and_mul
from dovetail.core.ops.layernorm import layer_norm
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

pytest.importorskip("triton")
VOCAB, CHANNELS, LAST = 128256, 16384, 3
EMIT = (PLAIN, FP8_TOKEN)
Op = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def tensors(bundle: Bundle) -> tuple[torch.Tensor, ...]:
    fp8 = bundle[FP8_TOKEN]
    return bundle[PLAIN].values, fp8.values.view(torch.uint8), fp8.scale


def norm(x_TC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    bundle, after = rms_norm(x_TC, x_TC, x_TC.new_ones(x_TC.shape[1]), 1e-5, EMIT)
    return (after, *tensors(bundle))


def layer(x_TC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = x_TC.new_ones(x_TC.shape[1])
    bundle, after = layer_norm(x_TC, x_TC, weight, weight, 1e-5, EMIT)
    return (after, *tensors(bundle))


def drawing(x_NV: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draw for rows that differ only in their index."""
    ones_N = torch.ones(len(x_NV), device=x_NV.device)
    many_N = ones_N.long() * 40
    # Top-k only: how sums of probabilities are split depends on the number of rows.
    least_N = step.least_kept(x_NV, ones_N, many_N, ones_N, ones_N * 0)
    drawn = [step.draw(x_NV, many_N, ones_N, many_N, random, least_N if random else None) for random in (True, False)]
    return (least_N, *drawn)


def masking(x_NV: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows_M = torch.arange(len(x_NV), device=x_NV.device)[-LAST:]
    bits_MW = torch.full((LAST, -(-x_NV.shape[1] // 32)), 0x0F0F0F0F, dtype=torch.int32, device=x_NV.device)
    apply_bitmask(x_NV, bits_MW, rows_M)
    return (x_NV,)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Each test takes up to tens of GB. Processes of pytest-xdist must neither take them at once nor keep them."""
    with (Path(tempfile.gettempdir()) / "dovetail-large-tensors.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


CASES: dict[str, tuple[int, Op]] = {
    "norm": (CHANNELS, norm),
    "layer norm": (CHANNELS, layer),
    "silu and multiply": (2 * CHANNELS, lambda x: tensors(silu_and_mul(x, EMIT))),
    "gelu": (CHANNELS, lambda x: tensors(gelu(x, True, EMIT))),
    "encode": (CHANNELS, lambda x: tuple(tensors(encode(x, EMIT)))[1:]),
    "draw": (VOCAB, drawing),
    "mask": (VOCAB, masking),
}


@pytest.mark.parametrize("name", CASES)
def test_last_rows(name: str) -> None:
    columns, op = CASES[name]
    rows = 2**31 // columns + 2 * LAST
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs five times 4 GiB")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-LAST:] = last = torch.randn(LAST, columns, device="cuda").bfloat16()
    for got, alone in zip(op(x), op(last), strict=True):
        assert torch.equal(got[-LAST:], alone), name
    torch.cuda.empty_cache()
