"""quant.many_rows: which methods round weights of 4 bits to E4M3 once more, and with what results."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Activation, ExpertShape, LinearMethod, LinearShape, Quantizer, Routing
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.packed_linear_experts import PackedLinearExperts
from dovetail.core.ops import encode
from dovetail.core.ops.packed_tiles import MOST_EXACT_ROWS
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.quant.config import Int4Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int4.quantizer import Int4

from ...layouts import pack_quantized
from ...numerics.checkpoints import random_tokens, save_random
from ...numerics.driver import Driver, load_model
from .test_mixed import SAID

CPU = torch.device("cpu")
SHAPE = LinearShape(256, 128, (64, 64), "column", torch.float32, ("a.gate_proj", "a.up_proj"))
PATH = "layers.0.mlp.gate_up"
ROWS = MOST_EXACT_ROWS + 88
MX, NV = ({"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": n}} for n in (32, 16))
MX["weights"]["scale_dtype"] = "torch.uint8"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "compressed-tensors": pack_quantized(num_bits=4, strategy="group", group_size=32, symmetric=True),
    "with zeros, order": pack_quantized(
        num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="group"
    ),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": NV}
    },
    "mxfp4": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"a": MX}
    },
    "bitsandbytes nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "config_groups": SAID,
}  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def made(*words: str) -> Quantizer:
    return compose(list(words)).build("quant")


def rounds(quantizer: Quantizer, shape: LinearShape = SHAPE, path: str = PATH) -> list[str]:
    """Return the names of the tensors that a layer has because many rows round its weight."""
    return [name for name in quantizer.linear(path, shape).create(shape, CPU) if "rounded_scale" in name]


@pytest.mark.parametrize("name", ["int4", "fp4", "fp4 quant.block=32", "nf4", "w4a16", "w4a8"])
def test_weights_that_are_rounded_as_they_load(name):
    fp8 = [] if name == "w4a8" else ["quant.activations=fp8"]
    assert rounds(made(*f"quant={name}".split(), *fp8)) == ["rounded_scale"]
    assert rounds(made(*f"quant={name}".split(), *fp8, "quant.many_rows=exact")) == []
    kept = made(*f"quant={name}".split(), *fp8, "quant.many_rows=kept")
    assert kept.linear(PATH, SHAPE).create(SHAPE, CPU)["rounded"].shape == (128, 256)
    assert rounds(made(*f"quant={name}".split(), "quant.activations=model")) == []


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_layouts_that_auto_chooses(name, tmp_path):
    hf = {**MODEL, "quantization_config": CHECKPOINTS[name]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    found = []
    for words in ([], ["quant.activations=fp8"], ["quant.activations=fp8", "quant.many_rows=exact"]):
        quantizer = made("model=llama", f"model.path={tmp_path}", *words)
        quantizer.read_checkpoint(SimpleNamespace(path=tmp_path, config=lambda: hf, tensors=dict))
        found.append(rounds(quantizer))
    assert found == [[], ["rounded_scale"], []]


def test_patterns_of_a_mixture():
    words = ["quant=mixed", "quant.layers=[layers.*.mlp.*]", "quant@quant.those=int4", "quant.those.activations=fp8"]
    assert rounds(made(*words)) == ["rounded_scale"] and rounds(made(*words), path="layers.0.attn.o") == []
    assert rounds(made(*words, "quant.those.many_rows=exact")) == []
    with pytest.raises(
        ConfigError, match=r"quant\.many_rows=exact is for a checkpoint with several config_groups: set"
    ):
        made(*words, "quant.many_rows=exact").table("lm_head", SHAPE, lookup=False)


def test_no_group_of_a_checkpoint_has_the_option(tmp_path):
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["re:.*"], "format": "int-quantized", "weights": weights, "input_activations": tokens}
    hf = {"quantization_config": {**SAID, "config_groups": {"a": group}}}
    with pytest.raises(ConfigError, match=r"quant\.many_rows=exact does not apply to a \(quant=int8\) .* leave it out"):
        made("quant=mixed", "quant.many_rows=exact").read_checkpoint(
            SimpleNamespace(path=tmp_path, config=lambda: hf, tensors=dict)
        )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quant.activations=fp8"], ["0.rounded_scale"]),
        (["quant.activations=fp8", "quant.many_rows=exact"], []),
        ([], []),
    ],
)
def test_stacked_layers_of_gguf(words, expected):
    """up has codes of 8 bits in memory."""
    quantizer = made("quant=gguf", *words)
    quantizer.types = dict(zip(SHAPE.names, ("Q4_K", "Q6_K"), strict=True))
    assert rounds(quantizer) == expected


@pytest.mark.parametrize(
    ("words", "inputs", "outputs"),
    [(["quant.bits=8"], 256, 128), ([], 264, 128), ([], 256, 120), (["quant.activations=model"], 256, 128)],
)
def test_what_is_never_rounded(words, inputs, outputs):
    shape = LinearShape(inputs, outputs, (outputs,), "column", torch.float32, ("a",))
    assert rounds(made("quant=w4a8", "quant.group=32", *words), shape) == []


def loaded(quantizer: Quantizer, weight_OI: torch.Tensor) -> tuple[LinearMethod, dict[str, torch.Tensor]]:
    method = quantizer.linear(PATH, SHAPE)
    params = method.create(SHAPE, CPU)
    load(method, params, weight_OI)
    return method, params


def load(method: LinearMethod, params: dict[str, torch.Tensor], weight_OI: torch.Tensor) -> None:
    for part in (slice(0, 64), slice(64, 128)):
        method.load(params, part, {"weight": weight_OI[part]})
    method.finish(params)


@pytest.mark.parametrize("name", ["int4", "fp4", "fp4 quant.block=32", "nf4"])
def test_results_of_many_rows_are_near_those_of_few(name):
    """Also if weights are loaded again, and in copies of the tensors. Scales of MXFP4 are powers of two, so that its
    numbers stay exact."""
    quantizer, exactly = (
        made(*f"quant={name}".split(), "quant.activations=fp8", *more) for more in ([], ["quant.many_rows=exact"])
    )
    x_TI, weight_OI = torch.randn(ROWS, 256), torch.randn(128, 256)
    x = encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN]
    method, params = loaded(quantizer, 1000 * torch.randn(128, 256))
    load(method, params, weight_OI)
    got = method.apply({key: value.clone() for key, value in params.items()}, x)
    other, others = loaded(exactly, weight_OI)
    expected = other.apply(others, x)
    error = (got - expected).norm() / expected.norm()
    assert (error < 1e-6) if "32" in name else (1e-3 < error < 0.04), f"relative error {error:.4f}"
    few = Activation(FP8_TOKEN, x.values[:MOST_EXACT_ROWS], x.scale[:MOST_EXACT_ROWS])
    torch.testing.assert_close(method.apply(params, few), expected[:MOST_EXACT_ROWS])


@pytest.mark.parametrize("name", ["int4", "nf4"])
def test_kept_weights_give_the_results_of_those_that_each_matmul_rounds(name):
    """Also if weights are loaded again, in copies of the tensors, and with few rows."""
    words = f"quant={name}", "quant.activations=fp8"
    x = encode(torch.randn(ROWS, 256), (FP8_TOKEN,))[FP8_TOKEN]
    few = Activation(FP8_TOKEN, x.values[:5], x.scale[:5])
    weight_OI = torch.randn(128, 256)
    method, params = loaded(made(*words, "quant.many_rows=kept"), 1000 * torch.randn(128, 256))
    load(method, params, weight_OI)
    other, others = loaded(made(*words), weight_OI)
    params = {key: value.clone() for key, value in params.items()}
    for each in (x, few):
        assert torch.equal(method.apply(params, each), other.apply(others, each))
    # The codes have no part in it.
    params["codes"].zero_()
    assert torch.equal(method.apply(params, x), other.apply(others, x))


@pytest.mark.parametrize("kind", [LoopedExperts, PackedLinearExperts])
def test_experts(kind):
    """Products of stacked matrices multiply them as they are; those of single ones round."""
    shape = ExpertShape(2, 64, 32, torch.float32, tuple((f"{e}.w1", f"{e}.w3", f"{e}.w2") for e in range(2)))
    routing = Routing(torch.randint(2, (ROWS, 1), dtype=torch.int32), torch.rand(ROWS, 1) + 0.5)
    x = encode(torch.randn(ROWS, 64), (FP8_TOKEN,))[FP8_TOKEN]
    weights = {
        (e, part): torch.randn(*((64, 32) if part == "down" else (32, 64)))
        for e in range(2)
        for part in ("gate", "up", "down")
    }

    def output(many_rows: str) -> torch.Tensor:
        quantizer = Int4(Int4Config(group=32, activations="fp8", many_rows=many_rows))
        experts = kind(quantizer, "layers.0.mlp.experts", shape)
        params = experts.create(shape, CPU)
        assert any("rounded_scale" in key for key in params) == (kind is LoopedExperts and many_rows == "rounded")
        for (expert, part), weight in weights.items():
            experts.load(params, expert, part, {"weight": weight})
        experts.finish(params)
        return experts.apply(params, x, routing)

    got, expected = output("rounded"), output("exact")
    error = (got - expected).norm() / expected.norm()
    assert (1e-3 < error < 0.06) if kind is LoopedExperts else torch.equal(got, expected)


def test_ranks_round_their_shares(tmp_path):
    """The scales of a share of columns are its own, so results differ by rounding."""
    save_random(tmp_path, "gqa", hidden_size=128, max_position_embeddings=1024)
    tokens = random_tokens(ROWS, seed=5)

    def logits(collective: Any = None, many_rows: str = "rounded") -> torch.Tensor:
        quantizer = Int4(Int4Config(group=32, activations="fp8", many_rows=many_rows))
        more = {} if collective is None else {"collective": collective}
        model = load_model(tmp_path, quantizer=quantizer, max_len=1024, **more)
        return Driver(model).step([("a", tokens)])[0]

    def error(*ranks: Any) -> float:
        got, exact = (logits(*ranks, many_rows=many_rows) for many_rows in ("rounded", "exact"))
        return float((got - exact).norm() / exact.norm())

    two, other = on_threads(2, error)
    # This random model amplifies each error to a fourth of its logits.
    assert two == other and 0.1 < two < 1.3 * error()
