"""Sums of inputs on their way from a norm to a matmul."""

from __future__ import annotations

import torch

from dovetail import compose
from dovetail.core.interfaces import PLAIN, ActFormat
from dovetail.core.interfaces.rows import padded_activation, share_of_bundle
from dovetail.core.layers.linear import Linear, Part
from dovetail.core.ops import encode, rms_norm
from dovetail.core.ops.formats import with_sums
from dovetail.core.ops.packed_matmul import SUMMED, sum_width
from dovetail.core.ops.weight_formats import E2M1, INT4, INT8, UINT4
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


def test_formats_whose_shift_and_zero_are_subtracted_apart_have_sums():
    """The runs are as long as the products that share a scale, at least."""
    assert [sum_width(fmt, 128) for fmt in (INT4, UINT4, E2M1, INT8)] == [SUMMED, SUMMED, 0, 0]
    assert [sum_width(INT4, group) for group in (0, 32, 64, 96, 256)] == [SUMMED, 0, 0, 0, SUMMED]


def test_rows_that_are_cut_or_filled_up_lose_their_sums():
    """Those of other rows would be subtracted."""
    summed = with_sums(ActFormat("summed", reference=lambda x: (x, None)), 16)
    bundle = encode(torch.randn(5, 32), (summed,))
    assert bundle[summed].sums is not None
    assert share_of_bundle(bundle, 1, 2)[summed].sums is None
    assert padded_activation(bundle[summed], 8).sums is None
    assert gathered(Alone(None), bundle, 5)[summed].sums is None
