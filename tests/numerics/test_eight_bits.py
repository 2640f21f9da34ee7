"""quant=int8 and quant=fp8: a whole model, layers that stay plain, and shapes that are refused."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import LinearShape
from dovetail.core.layers import PlainLinear
from dovetail.plugins.quant.config import FP8Config, Int8Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.quantizer import Int8

from .checkpoints import random_tokens, save_random
from .driver import Driver, load_model

KINDS = {"int8": (Int8, Int8Config, INT8_TOKEN), "fp8": (FP8, FP8Config, FP8_TOKEN)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_model_stays_near_the_unquantized_one(kind, tmp_path):
    quantizer, config, _ = kind
    save_random(tmp_path, "biases", hidden_size=128, intermediate_size=256, head_dim=16)
    tokens = random_tokens(80, seed=4)
    options = ({}, {"quantizer": quantizer(config())}, {"dtype": torch.bfloat16})
    plain, quantized, bfloat16 = (Driver(load_model(tmp_path, **each)).step([("a", tokens)])[0] for each in options)
    error, bfloat16_error = ((got - plain).norm() / plain.norm() for got in (quantized, bfloat16))
    # Random weights amplify any rounding, so compare with the error of bfloat16, which has four more bits than FP8.
    assert 0 < error < (4 if quantizer is Int8 else 16) * bfloat16_error
    assert bfloat16_error < 0.3 / 4


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_skipped_layers_are_plain(kind):
    made, config, fmt = kind
    quantizer = made(config(skip=("layers.*.mlp.down", "layers.0.*")))
    shape = LinearShape(64, 64, (64,), dtype=torch.float32)
    for path in ("layers.3.mlp.down", "layers.0.attn.qkv"):
        assert isinstance(quantizer.linear(path, shape), PlainLinear)
    assert quantizer.linear("layers.1.attn.qkv", shape).input is fmt


@pytest.mark.parametrize(("name", "inputs"), [("int8", 60), ("fp8", 72)])
def test_shapes_that_no_matmul_takes_are_refused(name, inputs):
    made, config, _ = KINDS[name]
    with pytest.raises(CapabilityError, match=rf"layers\.0\.attn\.o is {inputs} x 64.*quant\.skip"):
        made(config()).linear("layers.0.attn.o", LinearShape(inputs, 64, (64,), dtype=torch.float32))
