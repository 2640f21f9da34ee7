"""Formats of quantizers with different ones for some layers."""

from __future__ import annotations

import pytest

from dovetail.core.compose import Host, compose
from dovetail.core.engine.checks import check_weights_fit
from dovetail.core.engine.cost import formats
from dovetail.core.engine.layer_formats import over_layers
from dovetail.core.errors import CapacityError

MIXED = ("app=plan", "+preset=h200_fp8_tp1", "quant=mixed")


def spec_of(composition):
    model = composition.part("model")
    return model.target().spec(model.config)


def formats_of(*words):
    composition = compose([*MIXED, *words])
    return formats(composition, spec_of(composition), "cuda")


def test_bits_are_the_mean_over_matrices():
    """Llama 3 8B: a layer has 41.9 million weights of attention, 60 % of them in qkv, and 176.2 million of its MLP."""
    attention, mlp = 41.9, 176.2
    total = attention + mlp
    both = formats_of("quant.layers=[layers.*.mlp.*]")
    assert both.weight_bits == pytest.approx((16 * attention + 8 * mlp) / total, rel=1e-3) and both.product == "fp8"
    down = formats_of("quant.layers=[layers.*.mlp.down]")
    assert down.weight_bits == pytest.approx(16 - 8 * mlp / 3 / total, rel=1e-3) and down.product == "bfloat16"
    some = formats_of("quant.layers=[layers.0.*,layers.1.attn.o]")
    assert some.weight_bits == pytest.approx(16 - 8 * (1 + 0.4 * attention / total) / 32, rel=1e-3)
    four = formats_of("quant.layers=[layers.*.mlp.*]", "quant@quant.those=int4", "quant@quant.rest=fp8")
    assert 4 < four.weight_bits < 5.5 and four.product == "bfloat16"
    assert formats_of("quant@quant.rest=int8").weight_bits == 8


def test_experts_have_their_own():
    words = ("model=mixtral_8x7b", "quant.layers=[layers.*.experts.*]")
    found = formats_of(*words)
    assert (found.weight_bits, found.expert_bits) == (16, 8)
    half = formats_of("model=mixtral_8x7b", "quant.layers=[layers.?.*]")
    assert half.expert_bits == pytest.approx(16 - 8 * 10 / 32)


def test_weights_fit_as_they_are_mixed():
    """70B in bfloat16 does not fit on the device, and with MLPs in FP8 it does."""
    device = Host(device="cuda", device_count=1, compute_capability=(9, 0), memory_bytes=120 << 30)
    for words, fits in (("quant.layers=[layers.*.mlp.*]", True), ("quant.layers=[layers.0.mlp.*]", False)):
        composition = compose([*MIXED, "model=llama3_70b", words])
        if fits:
            check_weights_fit(composition, spec_of(composition), device)
        else:
            with pytest.raises(CapacityError, match="of weights a device"):
                check_weights_fit(composition, spec_of(composition), device)


def test_copies_of_mixed_layers_are_counted():
    """Those of layers in W4A8 beside layers in bfloat16, though the mean has more than 8 bits and another product."""
    words = ("quant@quant.those=int4", "quant.those.activations=fp8", "quant.layers=[layers.0.*]")
    rounded, kept = formats_of(*words), formats_of(*words, "quant.those.many_rows=kept")
    share = 1 / spec_of(compose(MIXED)).layers
    assert rounded.copy_bits == 0 and kept.copy_bits == pytest.approx(8 * share)
    assert kept.weight_bits == rounded.weight_bits > 8 and kept.product != "fp8"
    plain = formats_of("quant@quant.those=int4", "quant.those.many_rows=kept", "quant.layers=[layers.0.*]")
    assert plain.copy_bits == 0


def test_a_nested_quantizer_that_states_nothing_is_no_plain_one():
    """Its weights have any bits; only those of quant=none have the model's dtype."""
    spec, fp8 = spec_of(compose(MIXED)), {"weight_bits": 8, "product": "fp8"}
    for stated in ({"of_layers": ((("layers.*.mlp.*",), fp8),)}, {**fp8, "of_layers": ((("layers.0.*",), {}),)}):
        found = over_layers(stated, spec, 16.0)
        assert (found["weight_bits"], found["product"]) == (None, None)


def test_the_first_pattern_that_matches_counts():
    composition = compose(MIXED)
    first, second = {"weight_bits": 4, "product": "model"}, {"weight_bits": 8, "product": "fp8"}
    stated = {
        "weight_bits": "model",
        "product": "model",
        "of_layers": ((("layers.*",), first), (("layers.*.mlp.*",), second)),
    }
    found = over_layers(stated, spec_of(composition), 16.0)
    assert (found["weight_bits"], found["product"]) == (4, "model")
    assert over_layers(second, spec_of(composition), 16.0) is second
