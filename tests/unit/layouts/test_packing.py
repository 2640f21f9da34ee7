"""Packed codes bit for bit: the library of compressed-tensors, and sums over nibbles for AutoAWQ and GPTQ."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.layouts import awq, compressed_tensors, gptq


def draw(outputs: int, inputs: int, groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(1, 2**bits, (outputs, groups), dtype=torch.uint8)
    return codes, torch.rand(outputs, groups).half(), zeros


def word(codes: list[int], bits: int) -> int:
    """The int32 with these codes from its lowest bits up."""
    value = sum(code << bits * at for at, code in enumerate(codes))
    return value - (1 << 32 if value >> 31 else 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [96, 83])
def test_compressed_tensors_equals_its_library(bits: int, inputs: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, scale, zero = draw(21, inputs, 3, bits)
    packed = compressed_tensors.pack(codes, scale, zero, bits)
    signed = [(each.int() - 2 ** (bits - 1)).to(torch.int8) for each in (codes, zero)]
    assert torch.equal(packed["weight_packed"], helpers.pack_to_int32(signed[0], bits))
    assert torch.equal(packed["weight_zero_point"], helpers.pack_to_int32(signed[1], bits, packed_dim=0))
    assert packed["weight_shape"].tolist() == [21, inputs]
    for got, expected in zip(compressed_tensors.unpack(packed, bits), (codes, scale, zero), strict=True):
        assert torch.equal(got, expected)


def test_awq_interleaves_eight_outputs() -> None:
    codes, scale, zero = draw(16, 6, 2, 4)
    packed = awq.pack(codes, scale, zero)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for name, values in (("qweight", codes), ("qzeros", zero)):
        expected = [
            [word([int(values[8 * w + at, row]) for at in order], 4) for w in range(2)]
            for row in range(values.shape[1])
        ]
        assert packed[name].dtype is torch.int32 and packed[name].tolist() == expected
    for got, expected_tensor in zip(awq.unpack(packed), (codes, scale, zero), strict=True):
        assert torch.equal(got, expected_tensor)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_packs_inputs_and_stores_zeros_less_one(bits: int) -> None:
    each, groups = 32 // bits, torch.tensor([0, 1] * 8)
    codes, scale, zero = draw(8, 16, 2, bits)
    packed = gptq.pack(codes, scale, zero, groups, bits)
    expected = [
        [word(codes[out, each * w : each * (w + 1)].tolist(), bits) for out in range(8)] for w in range(16 // each)
    ]
    assert packed["qweight"].tolist() == expected
    zeros = [
        [word((zero[each * w : each * (w + 1), g].int() - 1).tolist(), bits) for w in range(8 // each)]
        for g in range(2)
    ]
    assert packed["qzeros"].tolist() == zeros
    for got, want in zip(gptq.unpack(packed, bits), (codes, scale, zero, groups), strict=True):
        assert torch.equal(got, want.to(got.dtype))
