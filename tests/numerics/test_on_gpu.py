"""The same models compiled on a GPU: Triton kernels, bf16, int8 products of few rows."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.interfaces import LinearShape
from dovetail.core.ops import encode
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.quantizer import Int8

from .checkpoints import VARIANTS, random_tokens, reference_logits, save_random
from .driver import CPU, Driver, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda")
TOKENS = random_tokens(150, seed=5)


def logits_of(model) -> torch.Tensor:
    """A whole chunk, a chunk behind it, three decode rows' worth of single tokens beside a second prompt."""
    driver = Driver(model)
    found = [*driver.step([("a", TOKENS[:90])]), *driver.step([("a", TOKENS[90:140])])]
    for at in range(140, len(TOKENS)):
        found.append(driver.step([("a", TOKENS[at : at + 1]), (f"beside {at}", TOKENS[:7])], 1, slack=5, padding=3)[0])
    return torch.cat(found).cpu()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_transformers(variant, tmp_path):
    reference = save_random(tmp_path, variant)
    expected = reference_logits(reference, TOKENS)
    torch.testing.assert_close(logits_of(load_model(tmp_path, device=GPU)), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("variant", ["gqa", "mistral_window", "tied"])
def test_bfloat16_is_as_near_as_bfloat16_gets(variant, tmp_path):
    """Teacher-forced, so one rounding does not lead to another text; the bound is the same on the CPU."""
    reference = save_random(tmp_path, variant)
    expected = reference_logits(reference, TOKENS)
    on_gpu, on_cpu = (logits_of(load_model(tmp_path, device=d, dtype=torch.bfloat16)) for d in (GPU, CPU))
    gpu_error, cpu_error = ((got - expected).norm() / expected.norm() for got in (on_gpu, on_cpu))
    assert gpu_error < 1.5 * cpu_error + 1e-3


@pytest.mark.parametrize("tokens", [1, 16, 17, 33])
def test_int8_product_equals_the_cpu(tokens):
    torch.seed()
    x_TI, weight_OI = torch.randn(tokens, 256), torch.randn(96, 256)
    shape = LinearShape(256, 96, (96,), dtype=torch.float32)
    outcomes = []
    for device in (CPU, GPU):
        method = Int8(Int8Config()).linear("layers.0.mlp.down", shape)
        params = method.create(shape, device)
        method.load(params, "weight", slice(0, 96), weight_OI)
        x = encode(x_TI.to(device), (INT8_TOKEN,))[INT8_TOKEN]
        outcomes.append(method.apply(params, x).cpu())
    assert (outcomes[0] - outcomes[1]).norm() / outcomes[0].norm() < 1e-3


def test_int8_model(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, intermediate_size=256, head_dim=16)
    on_cpu, on_gpu = (logits_of(load_model(tmp_path, quantizer=Int8(Int8Config()), device=d)) for d in (CPU, GPU))
    assert (on_gpu - on_cpu).norm() / on_cpu.norm() < 0.02
