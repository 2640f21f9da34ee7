"""quant=int8 against the unquantized matmul.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import pytest
import torch

from dovetail.core.interfaces import LinearShape
from dovetail.core.ops import encode
from dovetail.plugins.quant.config import Int8Config
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.quantizer import Int8

from .driver import CPU


@pytest.mark.parametrize(("tokens", "inp", "out"), [(1, 64, 24), (5, 256, 96), (33, 1024, 256)])
def test_error_within_its_bound(tokens, inp, out):
    torch.seed()
    x_TI, weight_OI, bias_O = torch.randn(tokens, inp), torch.randn(out, inp), torch.randn(out)
    half = out // 2 - out // 2 % 8
    shape = LinearShape(inp, out, (half, out - half), dtype=torch.float32)
    method = Int8(Int8Config()).linear("layers.0.mlp.gate_up", shape)
    params = method.create(shape, CPU)
    for part in (slice(half, out), slice(0, half)):
        method.load(params, part, {"weight": weight_OI[part]})
    method.finish(params)

    x = encode(x_TI, (INT8_TOKEN,))[INT8_TOKEN]
    got = method.apply(params, x, bias_O)

    expected = x_TI @ weight_OI.t() + bias_O
    # Rounding changes an entry of x by at most half its row's step, and an entry of the weight by half its channel's.
    step_x, step_w = x.scale / 2, params["scale"] / 2
    bound = step_x * weight_OI.abs().sum(1) + x_TI.abs().sum(1, keepdim=True) * step_w + inp * step_x * step_w
    assert ((got - expected).abs() <= bound + 1e-4).all()
    assert (got - expected).norm() / expected.norm() < 0.015
