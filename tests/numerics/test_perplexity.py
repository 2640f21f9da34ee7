"""Perplexity cost of number formats, on the bundled model."""

from __future__ import annotations

import pytest
import torch

from .perplexity import perplexity

CPU = ("engine.device=cpu", "engine.dtype=float32")
GPU = ("engine.device=cuda", "engine.dtype=bfloat16", "attention=triton", "engine.page_size=64", "engine.kv_pages=200")


@pytest.fixture(scope="module")
def exact() -> float:
    return perplexity(*CPU)


@pytest.mark.parametrize(
    "options",
    [("quant=int8",), ("quant=fp8", "engine.kv_dtype=fp8_e4m3"), ("quant=fp8", "quant.scales=tensor")],
    ids=str,
)
def test_eight_bits_cost_less_than_a_percent(exact: float, options: tuple[str, ...]) -> None:
    assert 0.99 * exact < perplexity(*CPU, *options) < 1.01 * exact
    assert 1.5 < exact < 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [(), ("quant=fp8",), ("quant=fp8", "engine.kv_dtype=fp8_e4m3")], ids=str)
def test_on_a_gpu(exact: float, options: tuple[str, ...]) -> None:
    assert 0.99 * exact < perplexity(*GPU, *options) < 1.01 * exact
