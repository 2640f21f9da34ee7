"""Sums of inputs on their way from a norm to a matmul."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail import compose
from dovetail.core.interfaces import PLAIN, ActFormat, Sums
from dovetail.core.interfaces.rows import padded_activation, share_of_bundle
from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.layers.linear import Linear, Part
from dovetail.core.ops import encode, rms_norm
from dovetail.core.ops.formats import with_sums
from dovetail.core.ops.packed_matmul import sums_for
from dovetail.core.ops.packed_tiles import MOST_EXACT_ROWS
from dovetail.core.ops.packing import empty_by_group, words_of_row
from dovetail.core.ops.weight_formats import E2M1, INT4, INT8, UINT4, UINT8
from dovetail.core.testing.model_doubles import TaggingQuantizer
from dovetail.core.testing.model_driver import Alone, build_context
from dovetail.plugins.collective.sharded import _gathered as gathered

SPEC = compose(["model=llama3_8b"]).part("model").facts()


def test_a_matmul_gets_the_sums_that_it_can_use():
    """Its inputs have the format that it names, whether sums were added or not, and one encoding serves both."""
    spy = TaggingQuantizer()
    layer = Linear("layer", build_context(SPEC, quantizer=spy), (Part("layer", 24, 0, 24),), 32)
    with torch.no_grad():
        layer.params["weight"].normal_()
    fmt, x_TC = layer.method.input, torch.randn(3, 32)
    assert layer.input.base is fmt and layer.inputs == (layer.input,)
    bundle, _ = rms_norm(x_TC, None, torch.ones(32), 1e-5, (PLAIN, fmt, *layer.inputs))
    assert [one.format for one in bundle.items] == [PLAIN, layer.input]
    got = layer(bundle)
    assert spy.summed == {"layer"}
    spy.summed.clear()
    torch.testing.assert_close(layer(encode(bundle[PLAIN].values, (fmt,))), got)
    assert not spy.summed


def weight(fmt: WeightFormat, group: int = 128, inputs: int = 768, zero: torch.dtype = torch.uint8) -> PackedWeight:
    scale_OG, zero_OG = (
        empty_by_group(32, -(-inputs // (group or inputs)), dtype=dtype, device=torch.device("meta"))
        for dtype in (torch.bfloat16, zero)
    )
    codes = torch.empty(32, words_of_row(inputs, fmt.stored_bits), dtype=torch.int32, device="meta")
    return PackedWeight(fmt, inputs, group, codes, scale_OG, zero_OG if fmt.zero else None)


def test_sums_are_for_codes_from_which_shift_and_zero_are_subtracted_apart():
    """They are for tiles with many tokens, and of as many products as share a scale."""
    assert all(sums_for(weight(fmt)) == Sums(128, 33) for fmt in (INT4, UINT4))
    assert [sums_for(weight(fmt)) for fmt in (E2M1, INT8, UINT8)] == [None, None, None]
    assert [sums_for(weight(INT4, group)) is not None for group in (0, 256, 32, 64, 96)] == [True, True, *[False] * 3]
    # The kernel multiplies neither in E4M3.
    assert sums_for(weight(UINT4, zero=torch.float16)) is None and sums_for(weight(INT4, inputs=776)) is None
    rounded = replace(weight(INT4), rounded_scale=torch.ones(32))
    assert sums_for(rounded) == Sums(128, 33, MOST_EXACT_ROWS)


def test_rows_that_are_cut_or_filled_up_lose_their_sums():
    """Those of other rows would be subtracted."""
    summed = with_sums(ActFormat("summed", reference=lambda x: (x, None)), Sums(16))
    bundle = encode(torch.randn(5, 32), (summed,))
    assert bundle[summed].sums is not None
    assert share_of_bundle(bundle, 1, 2)[summed].sums is None
    assert padded_activation(bundle[summed], 8).sums is None
    assert gathered(Alone(None), bundle, 5)[summed].sums is None
