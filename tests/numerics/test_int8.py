"""quant=int8 against the unquantized matmul.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import LinearShape
from dovetail.core.layers import PlainLinear
from dovetail.core.ops import encode
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.quantizer import Int8

from .checkpoints import random_tokens, save_random
from .driver import CPU, Driver, load_model


@pytest.mark.parametrize(("tokens", "inp", "out"), [(1, 64, 24), (5, 256, 96), (33, 1024, 256)])
def test_error_within_its_bound(tokens, inp, out):
    torch.seed()
    x_TI, weight_OI, bias_O = torch.randn(tokens, inp), torch.randn(out, inp), torch.randn(out)
    half = out // 2 - out // 2 % 8
    shape = LinearShape(inp, out, (half, out - half), dtype=torch.float32)
    method = Int8(Int8Config()).linear("layers.0.mlp.gate_up", shape)
    params = method.create(shape, CPU)
    for part in (slice(half, out), slice(0, half)):
        method.load(params, "weight", part, weight_OI[part])
    method.finish(params)

    x = encode(x_TI, (INT8_TOKEN,))[INT8_TOKEN]
    got = method.apply(params, x, bias_O)

    expected = x_TI @ weight_OI.t() + bias_O
    # Rounding changes an entry of x by at most half its row's step, and an entry of the weight by half its channel's.
    step_x, step_w = x.scale / 2, params["scale"] / 2
    bound = step_x * weight_OI.abs().sum(1) + x_TI.abs().sum(1, keepdim=True) * step_w + inp * step_x * step_w
    assert ((got - expected).abs() <= bound + 1e-4).all()
    assert (got - expected).norm() / expected.norm() < 0.015


def test_a_row_of_zeros_stays_zero():
    x = encode(torch.zeros(2, 16), (INT8_TOKEN,))[INT8_TOKEN]
    assert not (x.values * x.scale).any()


def test_model_stays_near_the_unquantized_one(tmp_path):
    save_random(tmp_path, "biases", hidden_size=128, intermediate_size=256, head_dim=16)
    tokens = random_tokens(80, seed=4)
    options = ({}, {"quantizer": Int8(Int8Config())}, {"dtype": torch.bfloat16})
    plain, int8, bfloat16 = (Driver(load_model(tmp_path, **each)).step([("a", tokens)])[0] for each in options)
    int8_error, bfloat16_error = ((got - plain).norm() / plain.norm() for got in (int8, bfloat16))
    # Random weights amplify any rounding, so compare with another format's rounding of the same model.
    assert 0 < int8_error < 4 * bfloat16_error < 0.3


def test_skipped_layers_are_plain():
    quantizer = Int8(Int8Config(skip=("layers.*.mlp.down", "layers.0.*")))
    shape = LinearShape(64, 64, (64,), dtype=torch.float32)
    assert isinstance(quantizer.linear("layers.3.mlp.down", shape), PlainLinear)
    assert isinstance(quantizer.linear("layers.0.attn.qkv", shape), PlainLinear)
    assert quantizer.linear("layers.1.attn.qkv", shape).input is INT8_TOKEN


def test_shapes_that_no_int8_product_takes_are_refused():
    with pytest.raises(CapabilityError, match=r"layers\.0\.attn\.o is 60 x 64.*quant\.skip"):
        Int8(Int8Config()).linear("layers.0.attn.o", LinearShape(60, 64, (64,), dtype=torch.float32))
