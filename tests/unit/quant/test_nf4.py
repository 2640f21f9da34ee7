"""Tensors that the library bitsandbytes makes, and their values."""

from __future__ import annotations

import json

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import PLAIN, LinearShape
from dovetail.core.layers.share import Wanted, shares_of
from dovetail.core.ops.packing import dequantize
from dovetail.core.testing.model_driver import Lazy
from dovetail.plugins.quant.nf4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.nf4.quantizer import STATE, StoredNF4

from ...layouts import bitsandbytes

OUT, INP = 48, 192


def values(tensors: dict[str, torch.Tensor], nested: bool, first: int = 0, columns: int = INP) -> torch.Tensor:
    """Load a matrix, or some columns of it, and return its values."""
    shape = LinearShape(columns, OUT, (OUT,), dtype=torch.float32, whole_inp=INP, first_inp=first)
    method = StoredNF4(Stored(nested), PLAIN)
    params = method.create(shape, torch.device("cpu"))
    lazy = {f"down.{name}": Lazy(tensor) for name, tensor in tensors.items()}
    share = shares_of("down", method.tensors, lazy, Wanted(OUT, 0, OUT), Wanted(INP, first, first + columns))
    method.load(params, slice(0, OUT), share)
    return dequantize(method.packed(params))


def state_with(**changed: object) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [OUT, INP], "nested_blocksize": 256, "nested_offset": 0.1}
    return torch.tensor(list(json.dumps({**state, **changed}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("nested", [False, True])
def test_values_are_those_of_the_library(nested):
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(OUT, INP)
    packed, state = library.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    tensors = {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    expected = library.dequantize_4bit(packed, state)
    whole = values(tensors, nested)
    assert torch.equal(whole, expected) or (whole - expected).abs().max() < 1e-6
    for first, columns in ((0, 96), (96, 96)):
        assert torch.equal(values(tensors, nested, first, columns), whole[:, first : first + columns])


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("weight", lambda t: t[:-1], r"'weight' has 4607 entries of torch\.uint8; 48 x 192 weights"),
        ("weight.quant_map", lambda t: t + 1, "quant_map' has other values than NF4"),
        ("weight.absmax", lambda t: t[:-1], "absmax' has 143 entries, not one per 64"),
        ("weight.nested_absmax", lambda t: t[:0], "has 0 entries, not one per 256"),
        ("weight.nested_absmax", lambda t: t * float("nan"), "not finite"),
        ("weight.nested_absmax", lambda t: t.repeat(9), "has 9 entries"),
        ("weight.nested_quant_map", lambda t: t[:200], "nested_quant_map' has 200 entries, not 256"),
        (STATE, lambda t: t[:-5], "is not JSON"),
        (STATE, lambda t: t.repeat(1000), "must be at most 65536 bytes"),
        (STATE, lambda t: state_with(nested_blocksize=0), "nested_blocksize 0"),
        (STATE, lambda t: state_with(nested_offset="x"), "nested_offset 'x'"),
        (STATE, lambda t: torch.tensor(list(b'{"quant_type": "fp4"}'), dtype=torch.uint8), "quant_type 'fp4'"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(name, wrong, says):
    tensors = bitsandbytes(torch.randn(OUT, INP), nested=True)
    with pytest.raises(ConfigError, match=says):
        values({**tensors, name: wrong(tensors[name])}, True)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4': there is nf4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
        ({"load_in_4bit": False}, "quant=nf4 reads bitsandbytes with load_in_4bit"),
        ({"bnb_4bit_use_double_quant": 1}, "must be true or false"),
    ],
)
def test_what_is_not_supported_is_an_error(changed, says):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **changed}
    with pytest.raises(ConfigError, match=says):
        read_stored({"quantization_config": config})
