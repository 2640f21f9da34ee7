"""quant=fp8 against the unquantized matmul.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.core.compose import Host
from dovetail.core.interfaces import PLAIN, Activation, LinearShape, Partial
from dovetail.core.ops import encode
from dovetail.core.startup_notes import collect_notes
from dovetail.plugins.quant.capabilities import fp8
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN, quantize_rows
from dovetail.plugins.quant.fp8.quantizer import FP8, FP8Linear

from .checkpoints import random_tokens, save_random
from .driver import CPU, Driver, load_model


def test_rounding_is_within_half_a_step():
    torch.seed()
    x_TC = torch.randn(64, 257) * torch.randn(64, 1).exp()
    values, scale_T1 = quantize_rows(x_TC)
    back = values.float() * scale_T1
    # The format has three mantissa bits down to 2^-6 and steps of 2^-9 below.
    assert ((back - x_TC).abs() <= torch.maximum(x_TC.abs() / 16, scale_T1 * 2**-10) * 1.0001).all()
    assert torch.equal(values.float().abs().amax(1), torch.full((64,), 448.0))


@pytest.mark.parametrize(("tokens", "inp", "out"), [(1, 64, 48), (5, 256, 96), (33, 1024, 256)])
def test_error_of_a_product(tokens, inp, out):
    torch.seed()
    # Rows differ greatly in magnitude, since each row has its own scale.
    x_TI, weight_OI = torch.randn(tokens, inp) * torch.randn(tokens, 1).exp(), torch.randn(out, inp)
    weight_OI *= torch.randn(out, 1).exp()
    bias_O = torch.randn(out)
    shape = LinearShape(inp, out, (32, out - 32), dtype=torch.float32)
    method = FP8(FP8Config()).linear("layers.0.mlp.gate_up", shape)
    params = method.create(shape, CPU)
    for part in (slice(32, out), slice(0, 32)):
        method.load(params, part, {"weight": weight_OI[part]})
    method.finish(params)
    assert params["weight"].dtype == torch.float8_e4m3fn and params["weight"].is_contiguous()

    x = encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN]
    got = method.apply(params, x, bias_O) - bias_O

    expected, size = x_TI @ weight_OI.t(), x_TI.norm(dim=1, keepdim=True) * weight_OI.norm(dim=1)
    assert ((got - expected).abs() < 0.2 * size).all()
    assert ((got - expected) / size).norm() / (expected / size).norm() < 0.06


def host_of(*capability: int) -> Host:
    return Host(device="cuda", device_count=1, compute_capability=capability)


def test_old_gpus_multiply_in_the_dtype_of_the_model():
    for config, host, product in (
        (FP8Config(), host_of(8, 0), "model"),
        (FP8Config(), host_of(9, 0), "fp8"),
        (FP8Config(), Host(), "fp8"),
        (FP8Config(activations="plain"), host_of(9, 0), "model"),
        (FP8Config(activations="model"), host_of(9, 0), "model"),
    ):
        stated = fp8(config, host)
        assert stated.provides["product"] == product and not stated.requires
    forced = FP8Config(activations="fp8")
    (demand,) = fp8(forced, host_of(8, 6)).requires
    assert not demand.admits((8, 6)) and "quant.activations=model" in demand.reason
    assert not fp8(forced, host_of(8, 9)).requires


@pytest.mark.parametrize(("capability", "plain"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_start_up_notes_that_a_gpu_has_no_fp8_matmuls(capability, plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(), collect_notes() as notes:
        method = FP8(FP8Config()).linear("layers.0.mlp.down", LinearShape(64, 48, (48,), dtype=torch.bfloat16))
        params = method.create(LinearShape(64, 48, (48,), dtype=torch.bfloat16), torch.device("cuda"))
    assert (method.input is PLAIN) is plain and params["weight"].dtype is torch.float8_e4m3fn
    assert [f"compute capability {capability[0]}.{capability[1]} has no FP8" in text for text in notes] == [
        True
    ] * plain


def test_plain_inputs_lose_only_the_weights_precision():
    torch.seed()
    x_TI, weight_OI, bias_O = torch.randn(5, 256), torch.randn(96, 256) * torch.randn(96, 1).exp(), torch.randn(96)
    shape = LinearShape(256, 96, (96,), dtype=torch.float32)
    method = FP8(FP8Config(activations="plain")).linear("layers.0.mlp.down", shape)
    params = method.create(shape, CPU)
    method.load(params, slice(0, 96), {"weight": weight_OI})
    stored_OI = params["weight"].float() * params["scale"][:, None]
    got, expected = method.apply(params, Activation(PLAIN, x_TI), bias_O), x_TI @ stored_OI.t() + bias_O
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert method.partial(params, Activation(PLAIN, x_TI)).scale is None


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_scales_are_of_rows_or_of_all(scales):
    weight_OI, x_TI = torch.randn(48, 64), torch.randn(5, 64)
    method = FP8(FP8Config(scales=scales)).linear("layers.0.mlp.gate_up", LinearShape(64, 48, (32, 16)))
    params = method.create(LinearShape(64, 48, (32, 16), dtype=torch.float32), CPU)
    for part in (slice(0, 32), slice(32, 48)):
        method.load(params, part, {"weight": weight_OI[part]})
    x = encode(x_TI, (method.input,))[method.input]
    one = scales == "tensor"
    assert len(params["scale"].unique()) == (2 if one else 48), "one for each part"
    assert len(x.scale.unique()) == (1 if one else 5)


def test_scales_that_matmuls_defer_to_the_norm_are_applied(tmp_path, monkeypatch):
    """Scales are deferred as by the library's matmul with many rows on a GPU."""
    save_random(tmp_path, "gqa", hidden_size=128, intermediate_size=256, head_dim=16)
    tokens, left = random_tokens(40, seed=2), []

    def logits() -> torch.Tensor:
        return Driver(load_model(tmp_path, quantizer=FP8(FP8Config()))).step([("a", tokens)])[0]

    def leave(method: FP8Linear, params: dict[str, torch.Tensor], x: Activation) -> Partial:
        left.append(len(params["scale"]))
        y_TO = method.apply(params, x)
        return Partial(y_TO / x.scale / params["scale"], (x.scale, params["scale"]))

    expected = logits()
    monkeypatch.setattr(FP8Linear, "partial", leave)
    found = logits()
    assert set(left) == {128}
    # A value halfway between two 8-bit ones may be rounded either way.
    assert (found - expected).norm() / expected.norm() < 0.15


@pytest.mark.parametrize("vocab", [208, 199])
@pytest.mark.parametrize("variant", ["gqa", "tied"])
def test_logits_in_fp8(variant, vocab, tmp_path):
    """quant.head=fp8 quantizes the matrix of logits, also one that the embedding shares, whose rows it then decodes,
    and one whose rows are no multiple of 16."""
    save_random(tmp_path, variant, hidden_size=64, vocab_size=vocab)
    config = FP8Config(skip=("layers.*",), head="fp8")
    plain, made = load_model(tmp_path), load_model(tmp_path, quantizer=FP8(config))
    assert isinstance(made.head.table.method, FP8Linear)
    assert (made.embedding.table is made.head.table) == (variant == "tied")
    ids = torch.arange(vocab)
    expected, got = plain.embedding(ids), made.embedding(ids)
    assert torch.equal(got, expected) == (variant == "gqa") and (got - expected).norm() < 0.05 * expected.norm()
    states = torch.randn(5, 64)
    expected, got = plain.head(states), made.head(states)
    assert got.shape == expected.shape and 0 < (got - expected).norm() < 0.06 * expected.norm()
