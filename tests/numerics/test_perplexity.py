"""Perplexity cost of number formats on a GPU, on the bundled model; test_quality.py has the limits on a CPU."""

from __future__ import annotations

import pytest
import torch

from .perplexity import perplexity

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CPU = ("engine.device=cpu", "engine.dtype=float32")
GPU = ("engine.device=cuda", "engine.dtype=bfloat16", "attention=triton", "engine.page_size=64", "engine.kv_pages=200")


@pytest.fixture(scope="module")
def exact() -> float:
    return perplexity(*CPU)


@pytest.mark.parametrize("options", [(), ("quant=fp8",), ("quant=fp8", "engine.kv_dtype=fp8_e4m3")], ids=str)
def test_eight_bits_cost_less_than_a_percent(exact: float, options: tuple[str, ...]) -> None:
    assert 1.5 < exact < 50
    assert 0.99 * exact < perplexity(*GPU, *options) < 1.01 * exact
