"""Decoders of GGUF blocks against the package gguf, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from dovetail.core.compose import Host, compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import PLAIN, LinearShape
from dovetail.plugins.quant.config import GGUFConfig
from dovetail.plugins.quant.gguf.blocks import FORMATS, decode_blocks
from dovetail.plugins.quant.gguf.checkpoint import BITS, MIXES
from dovetail.plugins.quant.gguf.quantizer import GGUF, BlockLinear

from ...contract.checkpoint import k_quants

SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Positions of the float16 numbers of a block."""


def random_blocks(name: str, rows: int, blocks: int) -> torch.Tensor:
    """Return random bytes with finite scales."""
    size = FORMATS[name].size
    bytes_RBS = np.random.default_rng().integers(0, 256, (rows, blocks, size), np.uint8)
    for at in SCALES[name]:
        halves = bytes_RBS[..., at : at + 2].copy().view(np.float16)
        bytes_RBS[..., at : at + 2] = np.where(np.isfinite(halves), halves, np.float16(-0.75)).view(np.uint8)
    return torch.from_numpy(bytes_RBS.reshape(rows, blocks * size))


def expected(name: str, bytes_RS: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(bytes_RS.numpy(), gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_exactly_those_of_ggml(name: str) -> None:
    bytes_RS = random_blocks(name, 64, 5)
    codes = decode_blocks(name, bytes_RS)
    assert torch.equal(codes.values_RC(), expected(name, bytes_RS))
    product = codes.scales_RG.repeat_interleave(FORMATS[name].group, 1) * codes.codes_RC
    offsets = codes.offsets_RG().repeat_interleave(FORMATS[name].group, 1)
    assert torch.equal(product - offsets, expected(name, bytes_RS)), "scale * code - offset is exact, too"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_as_it_is_described(name: str) -> None:
    form, blocks = FORMATS[name], random_blocks(name, 32, 4)
    codes = decode_blocks(name, blocks)
    assert (form.values, form.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert codes.codes_RC.shape == (32, 4 * form.values) and codes.codes_RC.dtype is torch.uint8
    assert codes.scales_RG.shape == (32, 4 * form.values // form.group)
    assert codes.codes_RC.max() == 2**form.bits - 1, "all codes occur in random bytes"
    assert 0 <= codes.zero < 2**form.bits


def test_blocks_of_columns_decode_alone() -> None:
    whole = random_blocks("Q6_K", 8, 6)
    part = whole[:, 210 * 2 : 210 * 5]
    assert torch.equal(decode_blocks("Q6_K", part).values_RC(), expected("Q6_K", whole)[:, 512:1280])


def test_groups_that_hardly_vary_are_finite_in_a_16_bit_model() -> None:
    """Their minimum is more steps of the scale than a zero in float16 can be."""
    block = np.full((2, 144), 0x35, np.uint8)
    block[:, :4] = np.array([6e-8, 0.5], np.float16).view(np.uint8)
    block[:, 4:16] = 1
    shape = LinearShape(256, 2, (2,), dtype=torch.bfloat16, names=("a",))
    method = BlockLinear("Q4_K", shape, PLAIN)
    params = method.create(shape, torch.device("cpu"))
    method.load(params, slice(0, 2), {"weight": torch.from_numpy(block)})
    values = method.rows(params, torch.arange(2)).float()
    torch.testing.assert_close(values, expected("Q4_K", torch.from_numpy(block)), rtol=2**-8, atol=0)


def test_an_unknown_type_names_the_others() -> None:
    with pytest.raises(ConfigError, match="Q2_K are not decoded; there are Q4_0, Q8_0, Q4_K, Q5_K, Q6_K"):
        decode_blocks("Q2_K", torch.zeros(1, 84, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("mix", "types"),
    [
        ("Q4_0", ("Q4_0", "Q4_0", "Q4_0", "Q6_K", "Q4_0")),
        ("Q4_K_M", ("Q4_K", "Q6_K", "Q4_K", "Q6_K", "Q4_K")),
        ("Q5_K_M", ("Q5_K", "Q6_K", "Q5_K", "Q6_K", "Q5_K")),
        ("Q8_0", ("Q8_0",) * 5),
    ],
)
def test_random_weights_have_the_types_of_a_mixture(mix: str, types: tuple[str, ...]) -> None:
    quantizer = GGUF(GGUFConfig.model_validate({"mix": mix}))
    layers = [f"model.layers.{layer}.{name}" for layer, name in ((3, "mlp.down_proj"), (12, "self_attn.v_proj"))]
    names = (layers[0], layers[1], "model.layers.12.self_attn.q_proj")
    methods = [quantizer.linear(name, LinearShape(512, 8, (8,), names=(name,))) for name in names]
    methods += [
        quantizer.table(name, LinearShape(512, 8, (8,), names=(name,)), lookup=name != "lm_head")
        for name in ("lm_head", "model.embed_tokens")
    ]
    assert tuple(method.kind for method in methods if isinstance(method, BlockLinear)) == types


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b"])
def test_plans_count_the_bits_of_a_mixture(mix: str, model: str) -> None:
    composition = compose([f"model={model}", "quant=gguf", f"quant.mix={mix}", "cost=h200"])
    found = composition.part("quant").capabilities(Host(device="cuda")).provides
    hf = composition.part("model").config.hf
    most, wider, head = (BITS[kind][2] for kind in MIXES[mix])
    hidden, channels, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"]
    values = hidden * hf["num_key_value_heads"] * hidden // heads
    share = (hidden * channels + values) / (3 * hidden * channels + 2 * hidden**2 + 2 * values) / 2
    assert found["weight_bits"] == pytest.approx(most + share * (wider - most), abs=0.05)
    assert (found["embedding_bits"], found["head_bits"]) == (most, head)


@pytest.mark.parametrize(("inputs", "kind"), [(512, "Q4_K"), (320, "Q8_0"), (72, None)])
def test_random_weights_fit_whole_blocks(inputs: int, kind: str | None) -> None:
    name = "model.layers.1.mlp.gate_proj"
    method = GGUF(GGUFConfig()).linear(name, LinearShape(inputs, 8, (8,), names=(name,)))
    assert getattr(method, "kind", None) == kind


@pytest.mark.parametrize("kind", FORMATS)
def test_random_weights_are_rounded_to_the_nearest_code(kind: str) -> None:
    mix = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(kind, kind)
    name, whole = "model.layers.1.self_attn.q_proj", torch.rand(8, 512) - 0.3
    shape = LinearShape(512, 8, (8,), dtype=torch.float32, names=(name,))
    method = GGUF(GGUFConfig.model_validate({"mix": mix})).linear(name, shape)
    assert isinstance(method, BlockLinear) and method.kind == kind
    params = method.create(shape, torch.device("cpu"))
    method.load(params, slice(0, 8), {"weight": whole})
    error = (method.rows(params, torch.arange(8)) - whole).abs().max()
    # Half of a step, which spans the range or twice the largest magnitude; zeros are rounded as well.
    step = (1.0 if method.format.zero else 1.4) / (2**method.format.bits - 1)
    assert 0.2 * step < error < 1.01 * step


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.09), ("Q5_K", 0.045), ("Q6_K", 0.025)])
def test_the_encoders_of_the_tests_round_to_the_nearest(kind, most):
    """The package gguf decodes what they write, with the error that its bits allow. Groups of zeros stay zeros."""
    values = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    values[1, 32:64] = 0.0
    values[2, :256] += 3.0
    encoded = k_quants.encode(values, kind)
    decoded = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[kind])
    error = np.square(decoded - values)[:2].mean() ** 0.5
    assert 0.3 * most < error < most
    assert not decoded[1, 32:64].any() and abs(decoded[2, :256].mean() - values[2, :256].mean()) < 0.05
    codes = decode_blocks(kind, torch.from_numpy(encoded))
    np.testing.assert_array_equal(codes.values_RC().numpy(), decoded)
