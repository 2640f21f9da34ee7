"""Which shares of a layer keep FP8's scales by block, and what they store."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import Activation, LinearShape
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.blocks import BlockFP8Linear, SpreadBlockFP8Linear, rounded_blocks, stored_blocks
from dovetail.plugins.quant.fp8.checkpoint import MXFP8, Stored
from dovetail.plugins.quant.fp8.format import FP8_TOKEN, decode_e8m0, quantize_blocks, quantize_rows

CPU = torch.device("cpu")
WHOLE = Stored(block=(128, 128), scale="weight_scale_inv")


def share(inp: int, *parts: int, whole_inp: int = 0, first_inp: int = 0) -> LinearShape:
    return LinearShape(inp, sum(parts), parts, "none", torch.float32, whole_inp=whole_inp, first_inp=first_inp)


@pytest.mark.parametrize(
    ("stored", "shape", "kept"),
    [
        (WHOLE, share(512, 256, 128), True),
        (WHOLE, share(336, 256, 200), True),  # Last blocks are not full.
        (WHOLE, share(256, 128, whole_inp=512, first_inp=256), True),
        (WHOLE, share(512, 200, 128), False),  # The second part begins inside a block,
        (WHOLE, share(192, 128, whole_inp=384, first_inp=192), False),  # and so do this rank's columns.
        (WHOLE, share(172, 128), False),  # A tensor map cannot read rows of 172 bytes.
        (WHOLE, replace(share(512, 384), shard="column"), True),
        (WHOLE, replace(share(512, 192), shard="column"), False),  # The next rank begins inside a block.
        (Stored(block=(64, 128)), share(512, 128), False),
        (Stored(block=MXFP8), share(512, 128), False),
    ],
)
def test_whole_blocks_keep_their_scales(stored, shape, kept):
    for make in (stored_blocks, rounded_blocks):
        assert isinstance(make(stored, FP8Config(), shape), BlockFP8Linear) == kept
    assert isinstance(stored_blocks(stored, FP8Config(activations="plain"), shape), SpreadBlockFP8Linear)


def test_one_scale_for_each_block():
    """Two merged parts of a file, the second with a block that is not full."""
    shape = share(336, 256, 200)
    method = stored_blocks(WHOLE, FP8Config(), shape)
    params = method.create(shape, CPU)
    expected, start = [], 0
    for rows in shape.parts:
        values_OI, scale = quantize_blocks(torch.randn(rows, 336), 128, 128)
        spread_OG = scale.repeat_interleave(128, 0)[:rows]
        method.load(params, slice(start, start + rows), {"weight": values_OI, "weight_scale_inv": spread_OG})
        expected.append(values_OI.float() * spread_OG.repeat_interleave(128, 1)[:, :336])
        start += rows
    assert params["scale"].numel() == 4 * 3 and prod(params["weight"].shape) == 456 * 336
    x_TI, scale_T1 = quantize_rows(torch.randn(5, 336))
    got = method.apply(params, Activation(FP8_TOKEN, x_TI, scale_T1))
    torch.testing.assert_close(got, (x_TI.float() * scale_T1) @ torch.cat(expected).t(), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(method.rows(params, torch.tensor([455, 0])), torch.cat(expected)[[455, 0]])


def test_scales_that_differ_within_a_block_are_refused():
    shape = share(128, 128)
    method = stored_blocks(WHOLE, FP8Config(), shape)
    values_OI, scale = quantize_blocks(torch.randn(128, 128), 64, 128)
    with pytest.raises(TensorError, match="differs within 128 outputs"):
        tensors = {"weight": values_OI, "weight_scale_inv": scale.repeat_interleave(64, 0)}
        method.load(method.create(shape, CPU), slice(0, 128), tensors)


def test_exponents_of_8_bits_are_powers_of_two():
    """The least one is subnormal, and codes may lie in any order in memory."""
    codes = torch.arange(255, dtype=torch.uint8).view(5, 51).t()
    assert torch.equal(decode_e8m0("scale", codes).double(), torch.exp2(codes.double() - 127))
    with pytest.raises(TensorError, match="not numbers"):
        decode_e8m0("scale", torch.tensor([3, 255], dtype=torch.uint8))
