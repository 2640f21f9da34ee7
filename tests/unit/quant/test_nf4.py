"""Tensors that the library bitsandbytes makes, and their values."""

from __future__ import annotations

import base64
import json
from typing import Literal

import pytest
import torch

from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces import LinearShape
from dovetail.core.layers.share import Wanted, shares_of
from dovetail.core.ops.packing import dequantize
from dovetail.core.ops.weight_formats import BITSANDBYTES_FP4_VALUES
from dovetail.core.testing.model_driver import Lazy
from dovetail.plugins.quant.config import NF4Config
from dovetail.plugins.quant.nf4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.nf4.quantizer import NF4Quantizer

from ...layouts import STATE, bitsandbytes

OUT, INP = 48, 192


def values(
    tensors: dict[str, torch.Tensor],
    nested: bool,
    first: int = 0,
    columns: int = INP,
    kind: Literal["nf4", "fp4"] = "nf4",
    whole: tuple[int, int] = (OUT, INP),
) -> torch.Tensor:
    """Load a matrix, or some columns of it, and return its values."""
    out, inp = whole
    shape = LinearShape(columns, out, (out,), dtype=torch.float32, whole_inp=inp, first_inp=first)
    method = NF4Quantizer(NF4Config()).of_checkpoint("down", shape, Stored(kind, nested))
    params = method.create(shape, torch.device("cpu"))
    lazy = {f"down.{name}": Lazy(tensor) for name, tensor in tensors.items()}
    share = shares_of("down", method.tensors, lazy, Wanted(out, 0, out), Wanted(inp, first, first + columns))
    method.load(params, slice(0, out), share)
    return dequantize(method.packed(params))


def state_with(**changed: object) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [OUT, INP], "nested_blocksize": 256, "nested_offset": 0.1}
    return torch.tensor(list(json.dumps({**state, **changed}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_values_are_those_of_the_library(nested, kind):
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(OUT, INP)
    packed, state = library.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    tensors = {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    expected = library.dequantize_4bit(packed, state)
    whole = values(tensors, nested, kind=kind)
    assert torch.equal(whole, expected) or (whole - expected).abs().max() < 1e-6
    for first, columns in ((0, 96), (96, 96)):
        assert torch.equal(values(tensors, nested, first, columns, kind), whole[:, first : first + columns])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("out", "inp"), [(6, 80), (5, 688), (7, 96)])
def test_blocks_may_span_rows(nested, out, inp):
    """The scale of a block is that of every step of 16 or 32 inputs in it. The last block may be shorter."""
    tensors = bitsandbytes(torch.randn(out, inp), nested)
    codes = torch.stack((tensors["weight"] >> 4, tensors["weight"] & 15), -1).flatten().long()
    scales = tensors["weight.absmax"]
    if nested:
        state = json.loads(bytes(tensors[STATE].tolist()))
        each = tensors["weight.nested_absmax"].repeat_interleave(256)[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales.long()] * each + state["nested_offset"]
    expected = (tensors["weight.quant_map"][codes] * scales.repeat_interleave(64)[: out * inp]).view(out, inp)
    whole = values(tensors, nested, 0, inp, whole=(out, inp))
    torch.testing.assert_close(whole, expected)
    for first, columns in ((0, 48), (48, inp - 48)):
        assert torch.equal(values(tensors, nested, first, columns, whole=(out, inp)), whole[:, first : first + columns])


def test_rows_that_blocks_cut_too_often_are_refused():
    with pytest.raises(
        CapabilityError, match="down has 72 inputs, of which blocks of 64 weights cut rows into pieces of 8"
    ):
        values({}, False, 0, 72, whole=(2, 72))


FP4_CODES = "lsF+Kp5uQXZk+leRcy1GOe7mGWzhF8F04+l7Xk2kz1WebqXFad78yhmfJtlmbFn+7+5k4eJH1dzmeT774RYTwQ=="
FP4_VALUES = (
    "f6J/Nn+6fyLfOH+2fz5/vn+if7Z/Nn+2fzp/It84fzZ/Nn8637h/vt883zh/on8i3zjfQH8+37x/On8230B/on+2f7Z/tn82fyJ/"
    "on82f7p/tn8ifyLfOH+6fyLfOH86f7bfQH+2f6LfON/A3zx/tn8637x/vn86f7rfuN883zwCowK3AjcCtwK/QT0Cu0E9AjcCo0G9"
    "ArdBuQK7ArsCvwIjAqMCo0G5Aj8CN0G9AqMCNwI3AjcCu0E9AqNBuQK3ArdBuQK3ArcCNwI7ArcCIwK3Aj8CO0E5Qb1BPUG9ArsC"
    "twI3QTkCo0FBArdBuUHBArcCIwIjAjcCI0FBArsCIw=="
)
"""A matrix of 2 x 64 that bitsandbytes 0.50 quantized, and its values in float16."""
FP4_SCALES = {
    False: {"weight.absmax": torch.tensor([2.436397075653076, 2.627337694168091])},
    True: {
        "weight.absmax": torch.tensor([0, 255], dtype=torch.uint8),
        "weight.nested_absmax": torch.tensor([0.09547042846679688]),
        # Of 256 values, these scales need the first and the last.
        "weight.nested_quant_map": torch.linspace(-0.992968738079071, 1.0, 256),
    },
}
FP4_OFFSET = 2.531867504119873


@pytest.mark.parametrize("nested", [False, True])
def test_recorded_fp4(nested):
    state = {"quant_type": "fp4", "blocksize": 64, "dtype": "float32", "shape": [2, 64]}
    state |= {"nested_blocksize": 256, "nested_offset": FP4_OFFSET} if nested else {}
    tensors = {
        "weight": torch.tensor(list(base64.b64decode(FP4_CODES)), dtype=torch.uint8)[:, None],
        "weight.quant_map": torch.tensor(BITSANDBYTES_FP4_VALUES) / 12,
        STATE.replace("nf4", "fp4"): torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        **FP4_SCALES[nested],
    }
    got = values(tensors, nested, 0, 64, "fp4", (2, 64))
    expected = torch.frombuffer(bytearray(base64.b64decode(FP4_VALUES)), dtype=torch.float16).view(2, 64)
    torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-6)
    with pytest.raises(ConfigError, match="quant_map' has other values than FP4"):
        values({**tensors, "weight.quant_map": tensors["weight.quant_map"].flip(0)}, nested, 0, 64, "fp4", (2, 64))


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
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4': there are nf4, fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
        ({"load_in_4bit": False}, "quant=nf4 reads bitsandbytes with load_in_4bit"),
        ({"bnb_4bit_use_double_quant": 1}, "must be true or false"),
    ],
)
def test_what_is_not_supported_is_an_error(changed, says):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **changed}
    with pytest.raises(ConfigError, match=says):
        read_stored({"quantization_config": config})
