"""Scales of NVFP4 that no kernel decodes are refused as they load."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import PLAIN, LinearShape
from dovetail.plugins.quant.fp4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.fp4.quantizer import StoredFP4

CONFIG = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize("bits", [0x7F, 0x80, 0xC0, 0xFF])
def test_scales_that_are_negative_or_nan_are_refused(bits: int) -> None:
    stored = read_stored(CONFIG)
    assert isinstance(stored, Stored)
    method, shape = StoredFP4(stored, PLAIN), LinearShape(32, 8, (8,), "column", torch.float32, ("w",))
    params = method.create(shape, torch.device("cpu"))
    names = method.names
    scale = torch.full((8, 2), 0x7E, dtype=torch.uint8)
    tensors = {
        names.codes: torch.zeros(8, 32, dtype=torch.uint8),
        names.scale: scale.view(torch.float8_e4m3fn),
        names.whole: torch.ones(1),
    }
    method.load(params, slice(0, 8), tensors)
    scale[3, 1] = bits
    with pytest.raises(TensorError, match="negative or not numbers"):
        method.load(params, slice(0, 8), tensors)
